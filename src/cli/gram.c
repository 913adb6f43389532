/* Rows are turned to double and laid out by panels of eight columns, so that a tile of 8 x 8 sums reads two streams
 * that lie together and fit a first-level cache. Products of floats that came from bf16 are exact in double; only the
 * additions round. The lower triangle is summed, mean() mirrors it. */
#include "cli/gram.h"

#include "checkpoint/parallel.h"

#include <stdlib.h>
#include <string.h>

enum { PANEL = 8, PART_ROWS = 128 }; /* a part of two panels: 16 KiB */

typedef double d4 __attribute__((vector_size(32)));

struct td_gram {
    int k, k_max, n_threads, n_new;
    int64_t n_rows;
    double *sum; /* [k][k] */
    double *x;   /* [k / PANEL][TD_GRAM_ROWS][PANEL] the rows of this call */
};

td_status td_gram_create(int k_max, int n_threads, td_gram **out, td_error *err)
{
    td_check(k_max > 0 && k_max % PANEL == 0);
    td_gram *g = calloc(1, sizeof *g);
    size_t k = (size_t)k_max;
    if (g) {
        *g = (td_gram){ .k_max = k_max, .n_threads = n_threads };
        g->sum = malloc(k * k * sizeof *g->sum);
        g->x = malloc(k * TD_GRAM_ROWS * sizeof *g->x);
    }
    if (!g || !g->sum || !g->x) {
        td_gram_destroy(g);
        return td_fail(err, TD_ENOMEM, "no memory for a Hessian of %d x %d", k_max, k_max);
    }
    *out = g;
    return TD_OK;
}

void td_gram_destroy(td_gram *g)
{
    if (!g) return;
    free(g->sum);
    free(g->x);
    free(g);
}

void td_gram_reset(td_gram *g, int k)
{
    td_check(k > 0 && k <= g->k_max && k % PANEL == 0);
    g->k = k;
    g->n_rows = 0;
    memset(g->sum, 0, (size_t)k * (size_t)k * sizeof *g->sum);
}

static d4 load(const double *p)
{
    d4 x;
    memcpy(&x, p, sizeof x);
    return x;
}

static void store(double *p, d4 x)
{
    memcpy(p, &x, sizeof x);
}

/* Four rows of a tile: sum[i][j] += a[r][i] b[r][j], r ascending. */
static void half_tile(const double *a, const double *b, int n_rows, double *sum, size_t stride)
{
    d4 left[4], right[4];
    for (size_t i = 0; i < 4; i++) left[i] = load(sum + i * stride), right[i] = load(sum + i * stride + 4);
    for (int r = 0; r < n_rows; r++, a += PANEL, b += PANEL) {
        d4 b_left = load(b), b_right = load(b + 4);
        for (size_t i = 0; i < 4; i++) {
            d4 x = { a[i], a[i], a[i], a[i] };
            left[i] += x * b_left;
            right[i] += x * b_right;
        }
    }
    for (size_t i = 0; i < 4; i++) store(sum + i * stride, left[i]), store(sum + i * stride + 4, right[i]);
}

/* The panel's tiles left of the diagonal and on it; the longest jobs come first. */
static void add_panel(void *user, int worker, int job)
{
    td_gram *g = user;
    size_t k = (size_t)g->k, i = k / PANEL - 1 - (size_t)job;
    (void)worker;
    for (int r = 0; r < g->n_new; r += PART_ROWS) {
        int n = g->n_new - r < PART_ROWS ? g->n_new - r : PART_ROWS;
        const double *a = g->x + (i * TD_GRAM_ROWS + (size_t)r) * PANEL;
        for (size_t j = 0; j <= i; j++) {
            const double *b = g->x + (j * TD_GRAM_ROWS + (size_t)r) * PANEL;
            double *sum = g->sum + i * PANEL * k + j * PANEL;
            half_tile(a, b, n, sum, k);
            half_tile(a + PANEL / 2, b, n, sum + PANEL / 2 * k, k);
        }
    }
}

void td_gram_add(td_gram *g, const float *x, int n_rows)
{
    td_check(n_rows >= 0 && n_rows <= TD_GRAM_ROWS);
    size_t k = (size_t)g->k;
    for (size_t r = 0; r < (size_t)n_rows; r++)
        for (size_t c = 0; c < k; c++) g->x[(c / PANEL * TD_GRAM_ROWS + r) * PANEL + c % PANEL] = (double)x[r * k + c];
    g->n_new = n_rows;
    g->n_rows += n_rows;
    td_parallel(g->n_threads, g->k / PANEL, add_panel, g);
}

void td_gram_mean(const td_gram *g, float *h)
{
    size_t k = (size_t)g->k;
    double n = g->n_rows ? (double)g->n_rows : 1.0;
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j <= i; j++) h[i * k + j] = h[j * k + i] = (float)(g->sum[i * k + j] / n);
}
