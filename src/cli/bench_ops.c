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
#include "cli/cost.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS_LIST_MAX = 8, ENTRIES_MAX = 64, LABEL_CAP = 40, CHUNK_ROWS = 512 };

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

/* Calls of one operation with one shape in a window. */
typedef struct entry {
    const char *op;
    char shape[LABEL_CAP];
    td_cost cost;    /* of a window: all calls */
    int n_calls;     /* of a window */
    double window_s; /* of the window that runs now */
    double run_s[TD_BENCH_RUNS_MAX];
    td_stat s; /* of run_s */
} entry;

typedef struct recorder {
    td_ops real;
    bool on;
    entry entries[ENTRIES_MAX];
    int n_entries;
} recorder;

/* The entries of a table of operations carry no user data, so the timing ones find the recorder here. */
static recorder *timing;

/* --- the table that times --- */

static entry *entry_of(recorder *r, const char *op, const char *shape)
{
    for (int i = 0; i < r->n_entries; i++)
        if (strcmp(r->entries[i].op, op) == 0 && strcmp(r->entries[i].shape, shape) == 0) return &r->entries[i];
    if (r->n_entries == ENTRIES_MAX) return NULL; /* more shapes than any model here has: they go uncounted */
    entry *e = &r->entries[r->n_entries++];
    *e = (entry){ .op = op };
    snprintf(e->shape, sizeof e->shape, "%s", shape);
    return e;
}

static td_status note(const char *op, const char *shape, td_cost cost, int64_t start_ns, int64_t end_ns,
                      td_status status)
{
    entry *e = timing->on ? entry_of(timing, op, shape) : NULL;
    if (!e) return status;
    e->window_s += (double)(end_ns - start_ns) * 1e-9;
    e->cost.bytes += cost.bytes;
    e->cost.flops += cost.flops;
    e->n_calls++;
    return status;
}

static td_status timed_embed(td_dev *dev, const td_embed_args *a)
{
    int64_t start = td_now_ns();
    td_status status = timing->real.embed(dev, a);
    int64_t end = td_now_ns();
    return note("embed", "", td_cost_embed(dev, a), start, end, status);
}

static td_status timed_hyper(td_dev *dev, const td_hyper_args *a)
{
    int64_t start = td_now_ns();
    td_status status = timing->real.hyper(dev, a);
    int64_t end = td_now_ns();
    const char *what = !a->fn ? "leave" : a->partials ? "leave and enter" : "enter";
    return note("hyper", what, td_cost_hyper(dev, a), start, end, status);
}

static td_status timed_rmsnorm(td_dev *dev, const td_rmsnorm_args *a)
{
    int64_t start = td_now_ns();
    td_status status = timing->real.rmsnorm(dev, a);
    int64_t end = td_now_ns();
    return note("rmsnorm", "", td_cost_rmsnorm(dev, a), start, end, status);
}

static td_status timed_stream_mean(td_dev *dev, const td_stream_mean_args *a)
{
    int64_t start = td_now_ns();
    td_status status = timing->real.stream_mean(dev, a);
    int64_t end = td_now_ns();
    return note("stream_mean", "", td_cost_stream_mean(dev, a), start, end, status);
}

static td_status timed_linear(td_dev *dev, const td_linear_args *a)
{
    static const char *const FORMATS[] = { [TD_W_BF16] = "bf16", [TD_W_Q4] = "q4", [TD_W_FP8] = "fp8" };
    char shape[LABEL_CAP];
    int64_t start = td_now_ns();
    td_status status = timing->real.linear(dev, a);
    int64_t end = td_now_ns();
    snprintf(shape, sizeof shape, "%d x %d %s", a->w->out, a->w->in, FORMATS[a->w->format]);
    return note("linear", shape, td_cost_linear(dev, a), start, end, status);
}

static td_status timed_kda(td_dev *dev, const td_kda_args *a)
{
    char shape[LABEL_CAP];
    int64_t start = td_now_ns();
    td_status status = timing->real.kda(dev, a);
    int64_t end = td_now_ns();
    snprintf(shape, sizeof shape, "%d heads", a->n_heads);
    return note("kda", shape, td_cost_kda(dev, a), start, end, status);
}

static td_status timed_kda_replay(td_dev *dev, const td_kda_replay_args *a)
{
    char shape[LABEL_CAP];
    int64_t start = td_now_ns();
    td_status status = timing->real.kda_replay(dev, a);
    int64_t end = td_now_ns();
    snprintf(shape, sizeof shape, "%d heads", a->n_heads);
    return note("kda_replay", shape, td_cost_kda_replay(dev, a), start, end, status);
}

static td_status timed_dsa_store(td_dev *dev, const td_dsa_store_args *a)
{
    int64_t start = td_now_ns();
    td_status status = timing->real.dsa_store(dev, a);
    int64_t end = td_now_ns();
    return note("dsa_store", "", td_cost_dsa_store(dev, a), start, end, status);
}

static td_status timed_dsa_select(td_dev *dev, const td_dsa_select_args *a)
{
    int64_t start = td_now_ns();
    td_status status = timing->real.dsa_select(dev, a);
    int64_t end = td_now_ns();
    return note("dsa_select", "", td_cost_dsa_select(dev, a), start, end, status);
}

static td_status timed_dsa_attend(td_dev *dev, const td_dsa_attend_args *a)
{
    char shape[LABEL_CAP];
    int64_t start = td_now_ns();
    td_status status = timing->real.dsa_attend(dev, a);
    int64_t end = td_now_ns();
    snprintf(shape, sizeof shape, "%d heads", a->kv_b.n_heads);
    return note("dsa_attend", shape, td_cost_dsa_attend(dev, a), start, end, status);
}

static td_status timed_swiglu(td_dev *dev, const td_swiglu_args *a)
{
    char shape[LABEL_CAP];
    int64_t start = td_now_ns();
    td_status status = timing->real.swiglu(dev, a);
    int64_t end = td_now_ns();
    snprintf(shape, sizeof shape, "%d wide", a->width);
    return note("swiglu", shape, td_cost_swiglu(dev, a), start, end, status);
}

static td_status timed_router(td_dev *dev, const td_router_args *a)
{
    char shape[LABEL_CAP];
    int64_t start = td_now_ns();
    td_status status = timing->real.router(dev, a);
    int64_t end = td_now_ns();
    snprintf(shape, sizeof shape, "%d of %d", a->top_k, a->n_experts);
    return note("router", shape, td_cost_router(dev, a), start, end, status);
}

static td_status timed_experts(td_dev *dev, const td_experts_args *a)
{
    char shape[LABEL_CAP];
    const td_experts *e = a->experts;
    int64_t start = td_now_ns();
    td_status status = timing->real.experts(dev, a);
    int64_t end = td_now_ns();
    snprintf(shape, sizeof shape, "%d x %d %s", e->width, e->dim, e->exl3 ? "exl3" : "plain");
    return note("experts", shape, td_cost_experts(dev, a), start, end, status);
}

static void install(td_ops *ops, recorder *r)
{
    r->real = *ops;
    ops->embed = timed_embed;
    ops->hyper = timed_hyper;
    ops->rmsnorm = timed_rmsnorm;
    ops->stream_mean = timed_stream_mean;
    ops->linear = timed_linear;
    ops->kda = timed_kda;
    ops->kda_replay = timed_kda_replay;
    ops->dsa_store = timed_dsa_store;
    ops->dsa_select = timed_dsa_select;
    ops->dsa_attend = timed_dsa_attend;
    ops->swiglu = timed_swiglu;
    ops->router = timed_router;
    ops->experts = timed_experts;
    timing = r;
}

/* --- windows --- */

typedef struct bench {
    td_rig rig;
    td_ceilings ceilings;
    recorder recorder;
    const char *only; /* operation; "": all */
    int n_runs, context;
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
    double x = ((const entry *)a)->s.median, y = ((const entry *)b)->s.median;
    return (x < y) - (x > y);
}

static td_status measure_rows(bench *b, int n_rows, td_error *err)
{
    recorder *r = &b->recorder;
    double window_s[TD_BENCH_RUNS_MAX], outside_s[TD_BENCH_RUNS_MAX], warm;
    r->n_entries = 0;
    r->on = false;
    td_rig_restart(&b->rig);
    td_status status = td_rig_prompt(&b->rig, b->context, err);
    if (!status) status = one_window(b, n_rows, &warm, err);
    r->on = true;
    for (int run = 0; !status && run < b->n_runs; run++) {
        for (int i = 0; i < r->n_entries; i++) {
            r->entries[i].window_s = 0;
            r->entries[i].n_calls = 0;
            r->entries[i].cost = (td_cost){ 0 };
        }
        status = one_window(b, n_rows, &window_s[run], err);
        outside_s[run] = window_s[run];
        for (int i = 0; i < r->n_entries; i++) {
            r->entries[i].run_s[run] = r->entries[i].window_s;
            outside_s[run] -= r->entries[i].window_s;
        }
    }
    r->on = false;
    if (!status) {
        for (int i = 0; i < r->n_entries; i++) r->entries[i].s = td_stat_of(r->entries[i].run_s, b->n_runs);
        qsort(r->entries, (size_t)r->n_entries, sizeof *r->entries, slowest_first);
        b->window = td_stat_of(window_s, b->n_runs);
        b->outside = td_stat_of(outside_s, b->n_runs);
    }
    return status;
}

/* --- showing --- */

static bool is_shown(const bench *b, const entry *e)
{
    return !*b->only || strcmp(b->only, e->op) == 0;
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
    td_cost all = { 0 };
    int n_calls = 0;
    printf("\n%d row%s after %d tokens: %.3f ms +- %.1f %% a window\n", n_rows, n_rows == 1 ? "" : "s", b->context,
           b->window.median * 1e3, 100 * td_stat_spread(&b->window));
    printf("  %-12s %-20s %5s %11s %6s %9s %6s %9s %6s\n", "operation", "shape", "calls", "us a window", "share",
           "GB/s", "copy", "GFLOP/s", "fma");
    for (int i = 0; i < b->recorder.n_entries; i++) {
        const entry *e = &b->recorder.entries[i];
        all.bytes += e->cost.bytes;
        all.flops += e->cost.flops;
        n_calls += e->n_calls;
        if (is_shown(b, e)) print_line(b, e->op, e->shape, e->n_calls, e->s.median, e->cost);
    }
    if (*b->only) return;
    print_line(b, "between them", "", 0, b->outside.median, (td_cost){ 0 });
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
    for (int i = 0; i < b->recorder.n_entries; i++) {
        const entry *e = &b->recorder.entries[i];
        if (!is_shown(b, e)) continue;
        td_json_write_begin(w, '{');
        td_json_write_member_text(w, "op", e->op);
        td_json_write_member_text(w, "shape", e->shape);
        td_json_write_member_int(w, "calls", e->n_calls);
        td_bench_write_stat(w, "s", &e->s);
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
    install(&b->rig.ops, &b->recorder);
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
    static bench b; /* large, and one a process: `timing` points into it */
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
