/* tandem bench full: one rank's share of a model of full size, without its checkpoint. Weights are random numbers in
 * the real formats, made where they are used; everything else is real: the forward pass, its operations, the pool, the
 * recordings, the exchanges (with a peer that takes as long as it is told). What comes out is how near a forward comes
 * to the time that its bytes or its multiplications must take on this device (docs/bench.md "The full size"). */
#include "cli/bench_full.h"

#include "cli/args.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const td_setting SETTINGS[] = {
    { .name = "shape",
      .kind = TD_SETTING_CHOICE,
      .fallback = "real",
      .choices = "real|small",
      .value = "WHICH",
      .help = "GLM-5.3-Flash, or a small model of its pattern for the CPU",
      .group = "what is measured" },
    { .name = "layers",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = TD_LAYERS_MAX - 1,
      .value = "N",
      .help = "the first N layers; 0: all (45 of the real shape)" },
    { .name = "world",
      .kind = TD_SETTING_INT,
      .fallback = "2",
      .min = 1,
      .max = 2,
      .value = "RANKS",
      .help = "2: one rank's half of heads and experts; 1: all of them" },
    { .name = "exchange-us",
      .kind = TD_SETTING_REAL,
      .fallback = "11",
      .min = 0,
      .max = 1e6,
      .value = "US",
      .help = "what the peer that is not there takes for each of the two exchanges a layer" },
    { .name = "rows",
      .kind = TD_SETTING_TEXT,
      .fallback = "1,2,4,8,16,32",
      .value = "LIST",
      .help = "rows of decode windows, over up to four sequences; up to 64" },
    { .name = "contexts",
      .kind = TD_SETTING_TEXT,
      .fallback = "",
      .value = "LIST",
      .help = "tokens before them; default 4096,131072,1048576 (small shape: 512,4096,16384)" },
    { .name = "prompts",
      .kind = TD_SETTING_TEXT,
      .fallback = "",
      .value = "LIST",
      .help = "tokens before prompt chunks, or none; default 0,8192,131072,1048576 (small: 0,4096)" },
    { .name = "chunk-rows",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = 8192,
      .value = "ROWS",
      .help = "rows of a prompt chunk; 0: 2048 (small shape: 256)" },
    { .name = "dense",
      .kind = TD_SETTING_CHOICE,
      .fallback = "q4",
      .choices = "bf16|q4|fp8",
      .value = "FORMAT",
      .help = "dense weights in memory" },
    { .name = "backend",
      .kind = TD_SETTING_CHOICE,
      .fallback = "auto",
      .choices = "auto|cpu|cuda",
      .value = "WHICH",
      .help = "auto: a GPU when there is one",
      .group = "where" },
    { .name = "gpu",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = 255,
      .value = "N",
      .help = "number in the driver's list" },
    { .name = "threads",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = 256,
      .value = "N",
      .help = "of the CPU; 0: all cores" },
    { .name = "pool-tokens",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = 1 << 30,
      .value = "N",
      .help = "of the KV pool; 0: the longest context four times, or as much as fits" },
    { .name = "expert-gbs",
      .kind = TD_SETTING_REAL,
      .fallback = "-1",
      .min = -1,
      .max = 1e6,
      .value = "GB/S",
      .help = "rate at which bytes of experts count for the floor; 0: the copy rate; -1: 2000 on sm_90, else 0",
      .group = "how" },
    { .name = "runs",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = TD_BENCH_RUNS_MAX,
      .value = "N",
      .help = "forwards of each kind; the median counts. 0: 15 decode windows, 5 prompts" },
    { .name = "quick", .kind = TD_SETTING_FLAG, .help = "a third of the forwards" },
    { .name = "json", .kind = TD_SETTING_FLAG, .help = "one JSON object instead of the tables" },
    { .name = "svg",
      .kind = TD_SETTING_TEXT,
      .fallback = "",
      .value = "FILE",
      .help = "draw time over floor by context" },
};
enum { N_SETTINGS = sizeof SETTINGS / sizeof *SETTINGS, DECODE_RUNS = 15, PROMPT_RUNS = 5 };

static void print_help(void)
{
    printf(
        "usage: tandem bench full [settings]\n\n"
        "Measures one rank's share of the real model on this machine. No checkpoint is needed: weights are random "
        "numbers\n"
        "in the real formats (4-bit EXL3 experts, 4-bit dense weights, fp8 head), contexts are random cached rows, "
        "the\n"
        "other rank is a pause. The real shape takes 75 GiB for its weights; --layers and --shape small take less.\n\n"
        "  floor   the time that must pass: bytes at the measured copy rate (those of the experts that were picked at\n"
        "          --expert-gbs), or multiplications at the measured multiply rate, whichever is longer\n"
        "  waits   exchanges times --exchange-us\n"
        "  ratio   (time - waits) / floor. 1.00 would be perfect\n\n");
    td_settings_help(SETTINGS, N_SETTINGS);
    printf("\nexamples   tandem bench full --svg full.svg\n"
           "           tandem bench full --quick --rows 1,8 --contexts 4096 --prompts 8192\n"
           "           tandem bench full --backend cpu --shape small --layers 4\n");
}

/* ---- settings ---- */

static td_status read_list(const td_settings *s, const char *name, const char *fallback, int64_t min, int64_t max,
                           int64_t *out, int *n, td_error *err)
{
    const char *text = td_settings_text(s, name);
    *n = 0;
    if (strcmp(text, "none") == 0) return TD_OK;
    return td_args_numbers(name, *text ? text : fallback, min, max, TD_FULL_LIST_MAX, out, n, err);
}

static td_status read_options(const td_settings *s, td_full_options *o, td_error *err)
{
    bool small = strcmp(td_settings_text(s, "shape"), "small") == 0;
    const char *dense = td_settings_text(s, "dense");
    int runs = (int)td_settings_int(s, "runs"), share = td_settings_flag(s, "quick") ? 3 : 1;
    double experts = td_settings_real(s, "expert-gbs");
    *o = (td_full_options){ .shape = small ? TD_SHAPE_SMALL : TD_SHAPE_REAL,
                            .layers = (int)td_settings_int(s, "layers"),
                            .world = (int)td_settings_int(s, "world"),
                            .backend = td_settings_text(s, "backend"),
                            .gpu = (int)td_settings_int(s, "gpu"),
                            .n_threads = (int)td_settings_int(s, "threads"),
                            .exchange_ns = (int64_t)(td_settings_real(s, "exchange-us") * 1e3),
                            .pool_tokens = td_settings_int(s, "pool-tokens"),
                            .chunk_rows = (int)td_settings_int(s, "chunk-rows"),
                            .dense = strcmp(dense, "q4") == 0    ? TD_W_Q4
                                     : strcmp(dense, "fp8") == 0 ? TD_W_FP8
                                                                 : TD_W_BF16,
                            .expert_bytes_per_s = experts < 0 ? -1 : experts * 1e9,
                            .decode_runs = runs ? runs : DECODE_RUNS / share,
                            .prompt_runs = runs ? runs : (PROMPT_RUNS + share - 1) / share,
                            .json = td_settings_flag(s, "json"),
                            .svg = td_settings_text(s, "svg") };
    if (!o->chunk_rows) o->chunk_rows = small ? 256 : 2048;
    if (o->chunk_rows % TD_GRID)
        return td_fail(err, TD_EINVAL, "--chunk-rows: %d is not a multiple of %d", o->chunk_rows, TD_GRID);
    td_status status = read_list(s, "rows", "", 1, TD_WINDOW_MAX, o->rows, &o->n_rows, err);
    if (!status)
        status = read_list(s, "contexts", small ? "512,4096,16384" : "4096,131072,1048576", 0, 1 << 24, o->contexts,
                           &o->n_contexts, err);
    if (!status)
        status = read_list(s, "prompts", small ? "0,4096" : "0,8192,131072,1048576", 0, 1 << 24, o->prompts,
                           &o->n_prompts, err);
    if (!status && !(o->n_rows && o->n_contexts) && !o->n_prompts)
        return td_fail(err, TD_EINVAL, "--rows, --contexts, --prompts: nothing is left to measure");
    return status;
}

/* ---- verdicts ---- */

static const td_full_case *find(const td_full_result *r, bool prompt, int n_rows, int64_t context)
{
    for (int i = 0; i < r->n_cases; i++) {
        const td_full_case *c = &r->cases[i];
        if (c->prompt == prompt && c->n_rows == n_rows && c->context == context) return c;
    }
    return NULL;
}

static void add_target(td_full_result *r, const char *what, const char *unit, double measured, bool at_least,
                       double wanted)
{
    r->targets[r->n_targets++] = (td_full_target){ .what = what,
                                                   .unit = unit,
                                                   .wanted = wanted,
                                                   .measured = measured,
                                                   .at_least = at_least,
                                                   .met = at_least ? measured >= wanted : measured <= wanted };
}

/* They are those of the whole model, half of it a rank. Growth is of the time without waits: they would hide some. */
static void judge(const td_full_rig *rig, const td_full_options *o, td_full_result *r)
{
    enum { SHORT = 4096, PROMPT = 8192, LONG = 1 << 20, ALL_LAYERS = 45, PROMPT_ROWS = 2048 };
    if (o->shape != TD_SHAPE_REAL || rig->config.n_layers != ALL_LAYERS || o->world != 2 || rig->backend != TD_CUDA)
        return;
    const td_full_case *one = find(r, false, 1, SHORT), *eight = find(r, false, 8, SHORT);
    const td_full_case *far = find(r, false, 1, LONG), *near_prompt = find(r, true, PROMPT_ROWS, PROMPT);
    const td_full_case *far_prompt = find(r, true, PROMPT_ROWS, LONG);
    if (one) add_target(r, "1 row at 4k, time over floor", "", one->ratio, false, 1.35);
    if (eight) add_target(r, "8 rows at 4k, time over floor", "", eight->ratio, false, 1.5);
    if (one && far)
        add_target(r, "1 row, growth of its time from 4k to 1M", "%",
                   100 * ((far->s.median - far->link_s) / (one->s.median - one->link_s) - 1), false, 30);
    if (near_prompt)
        add_target(r, "2,048 prompt rows at 8k", "tok/s", near_prompt->n_rows / near_prompt->s.median, true, 10000);
    if (far_prompt)
        add_target(r, "2,048 prompt rows at 1M", "tok/s", far_prompt->n_rows / far_prompt->s.median, true, 6000);
}

/* ---- running ---- */

static td_status run_case(td_full_rig *rig, const td_full_options *o, bool prompt, int n_rows, int64_t context,
                          td_full_result *r, td_error *err)
{
    char text[32];
    bool fits;
    td_full_case *c = &r->cases[r->n_cases];
    *c = (td_full_case){ .prompt = prompt, .n_rows = n_rows, .context = context };
    td_full_tokens(context, text, sizeof text);
    if (isatty(STDERR_FILENO)) fprintf(stderr, "\r%d %srows at %s      ", n_rows, prompt ? "prompt " : "", text);
    td_status status = td_full_case_run(rig, o, c, &fits, err);
    if (status) return status;
    if (fits)
        r->n_cases++;
    else
        fprintf(stderr, "%d %s at %s: left out, the longest sequence has %lld tokens and the pool %lld\n", n_rows,
                prompt        ? "prompt rows"
                : n_rows == 1 ? "row"
                              : "rows",
                text, (long long)rig->model_options.context_tokens, (long long)rig->model_options.n_blocks * TD_BLOCK);
    return TD_OK;
}

static td_status measure(td_full_rig *rig, const td_full_options *o, td_full_result *r, td_error *err)
{
    td_status status = TD_OK;
    for (int i = 0; i < o->n_contexts; i++)
        for (int k = 0; k < o->n_rows && !status; k++)
            status = run_case(rig, o, false, (int)o->rows[k], o->contexts[i], r, err);
    for (int i = 0; i < o->n_prompts && !status; i++)
        status = run_case(rig, o, true, o->chunk_rows, o->prompts[i], r, err);
    if (isatty(STDERR_FILENO)) fprintf(stderr, "\r%40s\r", "");
    if (!status && !r->n_cases) return td_fail(err, TD_EINVAL, "none of the contexts fits into the pool");
    return status;
}

static td_status run(const td_full_options *o, td_full_result *r, td_error *err)
{
    FILE *svg = NULL;
    td_full_rig *rig = (td_full_rig *)calloc(1, sizeof *rig);
    if (!rig) return td_fail(err, TD_ENOMEM, "out of memory");
    td_status status = td_full_plot_open(o->svg, &svg, err);
    if (!status) status = td_full_rig_open(o, rig, err);
    if (!status) {
        status = measure(rig, o, r, err);
        if (!status) judge(rig, o, r);
        if (!status && o->json) td_full_print_json(o, rig, r);
        if (!status && !o->json) td_full_print(o, rig, r);
        if (!status && svg) status = td_full_plot(svg, rig, r, err);
        td_full_rig_close(rig);
    }
    if (svg) fclose(svg);
    free(rig);
    return status;
}

int td_bench_full(int argc, char **argv)
{
    td_settings settings;
    td_full_options options;
    td_error err;
    if (td_args_help(argc, argv)) {
        print_help();
        return TD_EXIT_OK;
    }
    td_status status = td_settings_parse(SETTINGS, N_SETTINGS, argc, argv, &settings, &err);
    if (!status) status = read_options(&settings, &options, &err);
    if (status) return td_bench_fail("full", status, &err);
    td_full_result *result = (td_full_result *)calloc(1, sizeof *result);
    if (!result) return TD_EXIT_MEMORY;
    status = run(&options, result, &err);
    free(result);
    return status ? td_bench_fail("full", status, &err) : TD_EXIT_OK;
}
