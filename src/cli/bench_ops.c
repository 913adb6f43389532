/* tandem bench ops: where a forward pass spends its time, operation by operation, and how near each comes to what the
 * machine could do.
 *
 * The operations run inside real windows of a real model: its table of operations is replaced by one that times every
 * call, so shapes, strides, positions and chosen experts are those of serving, and the parts add up to the whole. */
#include "base/clock.h"
#include "cli/args.h"
#include "cli/bench.h"
#include "cli/bench_rig.h"
#include "cli/cli.h"
#include "cli/op_timer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS_LIST_MAX = 8, CHUNK_ROWS = 512 };

static const td_setting SETTINGS[] = {
    { .name = "model",
      .kind = TD_SETTING_TEXT,
      .fallback = "models/demo",
      .min = 1,
      .value = "DIR",
      .help = "checkpoint whose shapes are measured" },
    { .name = "op", .kind = TD_SETTING_TEXT, .fallback = "", .value = "NAME", .help = "show this operation only" },
    { .name = "rows",
      .kind = TD_SETTING_TEXT,
      .fallback = "1,8,512",
      .min = 1,
      .value = "LIST",
      .help = "rows of a window; up to 64 row by row, as in decoding, more as a prompt's chunk" },
    { .name = "context",
      .kind = TD_SETTING_INT,
      .fallback = "1024",
      .min = 0,
      .max = 262144,
      .value = "TOKENS",
      .help = "tokens before the window" },
    { .name = "dense",
      .kind = TD_SETTING_CHOICE,
      .fallback = "bf16",
      .choices = "bf16|q4|fp8",
      .value = "FORMAT",
      .help = "dense weights in memory" },
    { .name = "threads",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = 256,
      .value = "N",
      .help = "0: all cores" },
    { .name = "runs",
      .kind = TD_SETTING_INT,
      .fallback = "9",
      .min = 1,
      .max = TD_BENCH_RUNS_MAX,
      .value = "N",
      .help = "windows of each kind; the median is reported" },
    { .name = "json", .kind = TD_SETTING_FLAG, .help = "one JSON object instead of the tables" },
};
enum { N_SETTINGS = sizeof SETTINGS / sizeof *SETTINGS };

/* --- windows --- */

/* What is shown of an entry of the timer. */
typedef struct line {
    int entry;
    td_stat s; /* of a window */
} line;

typedef struct bench {
    td_rig rig;
    td_ceilings ceilings;
    td_op_timer timer;
    const char *only; /* operation; "": all */
    int n_runs, context;
    double run_s[TD_OP_ENTRIES_MAX][TD_BENCH_RUNS_MAX];
    line lines[TD_OP_ENTRIES_MAX]; /* slowest first */
    int n_lines;
    td_stat window, outside; /* of the windows that were measured last: all of it, and outside the operations */
} bench;

/* One window; a part of a decode window is committed, so that the replay of rejected rows is measured too. */
static td_status one_window(bench *b, int n_rows, double *window_s, td_error *err)
{
    bool chunked = n_rows > TD_WINDOW_MAX;
    int64_t start = td_now_ns();
    td_status status = td_rig_forward(&b->rig, n_rows, chunked, err);
    if (!status && !chunked) status = td_rig_commit(&b->rig, (n_rows + 1) / 2, err);
    *window_s = (double)(td_now_ns() - start) * 1e-9;
    return status;
}

static int slowest_first(const void *a, const void *b)
{
    double x = ((const line *)a)->s.median, y = ((const line *)b)->s.median;
    return (x < y) - (x > y);
}

static void summarise(bench *b, double *window_s, double *outside_s)
{
    b->n_lines = b->timer.n_entries;
    for (int i = 0; i < b->n_lines; i++) b->lines[i] = (line){ .entry = i, .s = td_stat_of(b->run_s[i], b->n_runs) };
    qsort(b->lines, (size_t)b->n_lines, sizeof *b->lines, slowest_first);
    b->window = td_stat_of(window_s, b->n_runs);
    b->outside = td_stat_of(outside_s, b->n_runs);
}

static td_status measure_rows(bench *b, int n_rows, td_error *err)
{
    double window_s[TD_BENCH_RUNS_MAX], outside_s[TD_BENCH_RUNS_MAX], warm;
    b->timer.n_entries = 0;
    td_rig_restart(&b->rig);
    td_status status = td_rig_prompt(&b->rig, b->context, err);
    td_op_timer_start(&b->timer); /* also for a window that is not counted: it makes the entries */
    if (!status) status = one_window(b, n_rows, &warm, err);
    for (int run = 0; !status && run < b->n_runs; run++) {
        td_op_timer_start(&b->timer);
        status = one_window(b, n_rows, &window_s[run], err);
        outside_s[run] = window_s[run];
        for (int i = 0; i < b->timer.n_entries; i++) {
            b->run_s[i][run] = b->timer.entries[i].s;
            outside_s[run] -= b->timer.entries[i].s;
        }
    }
    td_op_timer_stop(&b->timer);
    if (!status) summarise(b, window_s, outside_s);
    return status;
}

/* --- showing --- */

/* The entry of a line, or NULL when another operation was asked for. */
static const td_op_entry *shown(const bench *b, int i)
{
    const td_op_entry *e = &b->timer.entries[b->lines[i].entry];
    return !*b->only || strcmp(b->only, e->op) == 0 ? e : NULL;
}

static void print_line(const bench *b, const char *op, const char *shape, int n_calls, double s, td_cost cost)
{
    double bytes = s > 0 ? cost.bytes / s : 0, flops = s > 0 ? cost.flops / s : 0;
    printf("  %-12s %-20s %5d %11.1f %5.1f%% %9.2f %5.1f%% %9.2f %5.1f%%\n", op, shape, n_calls, s * 1e6,
           100 * s / b->window.median, bytes * 1e-9, 100 * bytes / b->ceilings.copy_bytes_per_s, flops * 1e-9,
           100 * flops / b->ceilings.fma_flops_per_s);
}

static void print_rows(const bench *b, int n_rows)
{
    int n_calls;
    printf("\n%d row%s after %d tokens: %.3f ms +- %.1f %% a window\n", n_rows, n_rows == 1 ? "" : "s", b->context,
           b->window.median * 1e3, 100 * td_stat_spread(&b->window));
    printf("  %-12s %-20s %5s %11s %6s %9s %6s %9s %6s\n", "operation", "shape", "calls", "us a window", "share",
           "GB/s", "copy", "GFLOP/s", "fma");
    for (int i = 0; i < b->n_lines; i++) {
        const td_op_entry *e = shown(b, i);
        if (e) print_line(b, e->op, e->shape, e->n_calls, b->lines[i].s.median, e->cost);
    }
    if (*b->only) return;
    print_line(b, "between them", "", 0, b->outside.median, (td_cost){ 0 });
    td_cost all = td_op_timer_total(&b->timer, &n_calls);
    print_line(b, "all", "", n_calls, b->window.median, all);
}

static void write_rows(const bench *b, int n_rows, td_json_writer *w)
{
    td_json_write_begin(w, '{');
    td_json_write_member_int(w, "rows", n_rows);
    td_json_write_member_int(w, "context", b->context);
    td_bench_write_stat(w, "window_s", &b->window);
    td_bench_write_stat(w, "outside_s", &b->outside);
    td_json_write_key(w, "ops");
    td_json_write_begin(w, '[');
    for (int i = 0; i < b->n_lines; i++) {
        const td_op_entry *e = shown(b, i);
        if (!e) continue;
        td_json_write_begin(w, '{');
        td_json_write_member_text(w, "op", e->op);
        td_json_write_member_text(w, "shape", e->shape);
        td_json_write_member_int(w, "calls", e->n_calls);
        td_bench_write_stat(w, "s", &b->lines[i].s);
        td_bench_write_number(w, "bytes", e->cost.bytes);
        td_bench_write_number(w, "flops", e->cost.flops);
        td_json_write_end(w, '}');
    }
    td_json_write_end(w, ']');
    td_json_write_end(w, '}');
}

static void print_help(void)
{
    printf(
        "usage: tandem bench ops [settings]\n\n"
        "Times every block operation of the model inside real windows: time, the bytes that must move and the\n"
        "operations that must happen (docs/bench.md), and their shares of this machine's copy and multiply-add rates.\n"
        "A memory-bound operation is good when its copy share is high, a compute-bound one when its fma share is;\n"
        "data that stays in a cache can exceed the copy rate.\n\n");
    td_settings_help(SETTINGS, N_SETTINGS);
    printf("\nexample    tandem bench ops --op linear --rows 1,64\n");
}

static td_status run(bench *b, const td_settings *s, const int64_t *rows, int n_rows_list, td_error *err)
{
    int64_t longest = CHUNK_ROWS;
    int n_threads = (int)td_settings_int(s, "threads");
    bool json = td_settings_flag(s, "json");
    for (int i = 0; i < n_rows_list; i++) longest = rows[i] > longest ? rows[i] : longest;
    int64_t committed = (int64_t)(b->n_runs + 1) * TD_WINDOW_MAX;
    td_status status = td_ceilings_measure(n_threads, &b->ceilings, err);
    if (!status)
        status = td_rig_open(td_settings_text(s, "model"), n_threads, b->context + longest + committed, (int)longest,
                             td_settings_text(s, "dense"), &b->rig, err);
    if (status) return status;
    td_op_timer_install(&b->timer, &b->rig.ops);
    td_buf out;
    td_buf_init(&out, 0);
    td_json_writer w = { .out = &out };
    if (json) {
        td_json_write_begin(&w, '{');
        td_bench_write_machine(&w);
        td_bench_write_ceilings(&w, &b->ceilings);
        td_json_write_key(&w, "windows");
        td_json_write_begin(&w, '[');
    } else {
        td_bench_print_machine();
        td_bench_print_ceilings(&b->ceilings);
    }
    for (int i = 0; !status && i < n_rows_list; i++) {
        status = measure_rows(b, (int)rows[i], err);
        if (status) break;
        if (json)
            write_rows(b, (int)rows[i], &w);
        else
            print_rows(b, (int)rows[i]);
    }
    if (json && !status) {
        td_json_write_end(&w, ']');
        td_json_write_end(&w, '}');
        printf("%s\n", out.data ? out.data : "{}");
    }
    td_buf_deinit(&out);
    td_rig_close(&b->rig);
    return status;
}

int td_bench_ops(int argc, char **argv)
{
    static bench b; /* too large for the stack; one a process, as the timer in it */
    td_settings settings;
    td_error err;
    int64_t rows[ROWS_LIST_MAX];
    int n = 0;
    if (td_args_help(argc, argv)) {
        print_help();
        return TD_EXIT_OK;
    }
    td_status status = td_settings_parse(SETTINGS, N_SETTINGS, argc, argv, &settings, &err);
    if (!status)
        status = td_args_numbers("rows", td_settings_text(&settings, "rows"), 1, 16384, ROWS_LIST_MAX, rows, &n, &err);
    if (status) return td_bench_fail("ops", status, &err);
    b.only = td_settings_text(&settings, "op");
    b.n_runs = (int)td_settings_int(&settings, "runs");
    b.context = (int)td_settings_int(&settings, "context") / TD_GRID * TD_GRID;
    status = run(&b, &settings, rows, n, &err);
    return status ? td_bench_fail("ops", status, &err) : TD_EXIT_OK;
}
