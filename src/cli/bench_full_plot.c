/* The plot of `tandem bench full`: time over floor by context, a line a window size and one for prompt chunks. Plain
 * SVG whose colours follow the reader's light or dark page. */
#include "cli/bench_full.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { WIDTH = 760, HEIGHT = 420, LEFT = 60, RIGHT = 150, TOP = 50, BOTTOM = 50, LINES_MAX = TD_FULL_LIST_MAX + 1 };

#define STYLE                                                                                                          \
    "<style>\n"                                                                                                        \
    "svg{--page:#fff;--ink:#222;--grid:#ddd;--c0:#0b62c4;--c1:#c2500a;--c2:#1c7a3a;--c3:#8b2fb0;--c4:#a8123e;"         \
    "--c5:#5d6b00;--c6:#00727a;--c7:#6b4a2b;--c8:#444}\n"                                                              \
    "@media (prefers-color-scheme:dark){svg{--page:#16181c;--ink:#e6e6e6;--grid:#3a3d44;--c0:#6db3ff;--c1:#ff9d5c;"    \
    "--c2:#6fd08c;--c3:#d79bf0;--c4:#ff7f9f;--c5:#cdd95c;--c6:#5fd5dd;--c7:#d3a678;--c8:#bbb}}\n"                      \
    "text{font:13px sans-serif;fill:var(--ink)}.grid{stroke:var(--grid)}.line{fill:none;stroke-width:2}\n"             \
    "</style>\n"

typedef struct plot {
    FILE *file;
    double low, high;   /* of log2(context + 1024), so that 0 has a place */
    double bottom, top; /* ratios */
} plot;

static double scale_of(int64_t context)
{
    return log2((double)context + 1024);
}

static double at_x(const plot *p, int64_t context)
{
    double span = p->high > p->low ? p->high - p->low : 1;
    return LEFT + (scale_of(context) - p->low) / span * (WIDTH - LEFT - RIGHT);
}

static double at_y(const plot *p, double ratio)
{
    return TOP + (p->top - ratio) / (p->top - p->bottom) * (HEIGHT - TOP - BOTTOM);
}

static void find_bounds(plot *p, const td_full_result *r)
{
    p->low = INFINITY;
    p->high = -INFINITY;
    p->top = 2;
    p->bottom = 1;
    for (int i = 0; i < r->n_cases; i++) {
        const td_full_case *c = &r->cases[i];
        p->low = fmin(p->low, scale_of(c->context));
        p->high = fmax(p->high, scale_of(c->context));
        p->top = fmax(p->top, ceil(c->ratio * 2) / 2);
        p->bottom = fmin(p->bottom, floor(c->ratio * 2) / 2);
    }
}

static void draw_axes(const plot *p, const td_full_result *r)
{
    char text[32];
    double step = (p->top - p->bottom) / 8, unit = step <= 0.5 ? 0.5 : ceil(step);
    for (double y = p->bottom; y <= p->top + 1e-9; y += unit)
        fprintf(p->file,
                "<line class=\"grid\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/><text x=\"%d\" y=\"%.1f\" "
                "text-anchor=\"end\">%.1f</text>\n",
                LEFT, WIDTH - RIGHT, at_y(p, y), at_y(p, y), LEFT - 8, at_y(p, y) + 4, y);
    for (int i = 0; i < r->n_cases; i++) {
        bool seen = false;
        for (int k = 0; k < i; k++) seen |= r->cases[k].context == r->cases[i].context;
        if (seen) continue;
        double x = at_x(p, r->cases[i].context);
        fprintf(p->file,
                "<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"/><text x=\"%.1f\" y=\"%d\" "
                "text-anchor=\"middle\">%s</text>\n",
                x, x, TOP, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 20,
                td_full_tokens(r->cases[i].context, text, sizeof text));
    }
    fprintf(p->file, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">tokens before the window</text>\n",
            (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10);
}

static bool belongs(const td_full_case *c, const td_full_case *first)
{
    return c->prompt == first->prompt && c->n_rows == first->n_rows;
}

/* The line of all cases like `first`, and its name at the right, one below the other. */
static void draw_line(const plot *p, const td_full_result *r, const td_full_case *first, int number)
{
    fprintf(p->file, "<polyline class=\"line\" stroke=\"var(--c%d)\"%s points=\"", number % LINES_MAX,
            first->prompt ? " stroke-dasharray=\"6 4\"" : "");
    for (int i = 0; i < r->n_cases; i++)
        if (belongs(&r->cases[i], first))
            fprintf(p->file, "%.1f,%.1f ", at_x(p, r->cases[i].context), at_y(p, r->cases[i].ratio));
    fprintf(p->file, "\"/>\n");
    for (int i = 0; i < r->n_cases; i++)
        if (belongs(&r->cases[i], first))
            fprintf(p->file, "<circle r=\"3\" fill=\"var(--c%d)\" cx=\"%.1f\" cy=\"%.1f\"/>\n", number % LINES_MAX,
                    at_x(p, r->cases[i].context), at_y(p, r->cases[i].ratio));
    int y = TOP + 10 + 22 * number;
    fprintf(p->file, "<line class=\"line\" stroke=\"var(--c%d)\"%s x1=\"%d\" x2=\"%d\" y1=\"%d\" y2=\"%d\"/>\n",
            number % LINES_MAX, first->prompt ? " stroke-dasharray=\"6 4\"" : "", WIDTH - RIGHT + 14,
            WIDTH - RIGHT + 38, y, y);
    fprintf(p->file, "<text x=\"%d\" y=\"%d\">%d row%s%s</text>\n", WIDTH - RIGHT + 44, y + 4, first->n_rows,
            first->n_rows == 1 ? "" : "s", first->prompt ? ", prompt" : "");
}

td_status td_full_plot_open(const char *path, FILE **out, td_error *err)
{
    *out = *path ? fopen(path, "we") : NULL;
    return *path && !*out ? td_fail(err, TD_EIO, "--svg %s: %s", path, strerror(errno)) : TD_OK;
}

td_status td_full_plot(FILE *file, const td_full_rig *rig, const td_full_result *r, td_error *err)
{
    plot p = { .file = file };
    int n_lines = 0;
    char device[TD_FULL_NAME_CAP];
    memcpy(device, rig->device, sizeof device);
    device[strcspn(device, ",<>&")] = '\0'; /* its name alone, and nothing that means something in XML */
    find_bounds(&p, r);
    fprintf(p.file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" role=\"img\">\n" STYLE
            "<rect width=\"%d\" height=\"%d\" fill=\"var(--page)\"/>\n"
            "<text x=\"%d\" y=\"28\">Time of a forward over its floor, by context (%d layers, %s)</text>\n",
            WIDTH, HEIGHT, WIDTH, HEIGHT, LEFT, rig->config.n_layers, device);
    draw_axes(&p, r);
    for (int i = 0; i < r->n_cases; i++) {
        bool seen = false;
        for (int k = 0; k < i; k++) seen |= belongs(&r->cases[k], &r->cases[i]);
        if (!seen) draw_line(&p, r, &r->cases[i], n_lines++);
    }
    fprintf(p.file, "</svg>\n");
    if (fflush(file) || ferror(file)) return td_fail(err, TD_EIO, "--svg: %s", strerror(errno));
    return TD_OK;
}
