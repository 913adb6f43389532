/* `tandem opcheck`: the list of operations, the settings. */
#include "base/settings.h"
#include "cli/cli.h"
#include "opcheck.h"
#include "ops/gpu.h"

#include <stdio.h>
#include <string.h>

static const struct op {
    const char *name;
    void (*run)(oc_ctx *oc);
    bool asked; /* runs only when it is named */
} ops[] = {
    { "linear", oc_linear, false }, { "weights", oc_weights, false },
    { "rows", oc_rows, false },     { "hyper", oc_hyper, false },
    { "router", oc_router, false }, { "kda", oc_kda, false },
    { "store", oc_store, false },   { "select", oc_select, false },
    { "attend", oc_attend, false }, { "experts", oc_experts, false },
    { "graphs", oc_graphs, false }, { "gather", oc_gather, false },
    { "model", oc_model, false },   { "sample_math", oc_sample_math, false },
    { "sample", oc_sample, false }, { "random", oc_random, false },
    { "bench", oc_bench, true },    { "hang", oc_hang, true },
};
enum { N_OPS = sizeof ops / sizeof *ops };

static const td_setting table[] = {
    { .name = "op",
      .kind = TD_SETTING_LIST,
      .min = 1,
      .value = "NAME",
      .help = "only this operation; may be given several times; 'bench' and 'hang' run only when they are named" },
    { .name = "shapes",
      .kind = TD_SETTING_CHOICE,
      .fallback = "all",
      .choices = "demo|real|all",
      .value = "NAME",
      .help = "the demo's sizes, the real model's, or both" },
    { .name = "seed",
      .kind = TD_SETTING_INT,
      .fallback = "1",
      .min = 0,
      .max = 9007199254740992.0,
      .value = "N",
      .help = "of the random inputs" },
    { .name = "part",
      .kind = TD_SETTING_TEXT,
      .fallback = "0/1",
      .value = "K/N",
      .help = "every N-th case of an operation, from the K-th on: for slow tools, and for several processes" },
    { .name = "gpu",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = 63,
      .value = "N",
      .help = "which GPU, by the driver's numbering" },
    { .name = "model",
      .kind = TD_SETTING_TEXT,
      .fallback = "models/demo",
      .value = "DIR",
      .help = "the checkpoint of the check 'model'" },
    { .name = "json", .kind = TD_SETTING_FLAG, .help = "one JSON object with every check" },
    { .name = "verbose", .kind = TD_SETTING_FLAG, .help = "name each case on stderr before it runs" },
    { .name = "once", .kind = TD_SETTING_FLAG, .help = "benchmarks run their operation once: for a profiler" },
    { .name = "bench",
      .kind = TD_SETTING_CHOICE,
      .fallback = "all",
      .choices = "all|linear|experts|kda|select|attend|rows|sample",
      .value = "GROUP",
      .help = "with --op bench: this group of benchmarks alone" },
    { .name = "list", .kind = TD_SETTING_FLAG, .help = "print the operations' names" },
};
enum { N_SETTINGS = sizeof table / sizeof *table };

static td_status make_devices(oc_ctx *oc, int gpu, int64_t patience_ns, td_error *err)
{
    td_dev_limits limits = { .rows = 2112,
                             .dim = oc->real ? 4096 : 512,
                             .n_heads = 32,
                             .n_experts = 320, /* more than the real model has, for the router */
                             .top_k = 8,
                             .expert_width = 1024,
                             .index_heads = 32,
                             .index_topk = 2048,
                             .vocab_shard = 77440,
                             .context_tokens = 1 << 20,
                             .patience_ns = patience_ns };
    td_status status = td_dev_create_cpu(&limits, 0, false, &oc->dev[OC_CPU], err);
    if (status == TD_OK) status = td_dev_create_cuda(&limits, gpu, &oc->dev[OC_GPU], err);
    for (int side = 0; status == TD_OK && side < OC_SIDES; side++) td_ops_init(&oc->ops[side], oc->dev[side]);
    return status;
}

static td_status choose(const td_settings *settings, bool chosen[N_OPS], td_error *err)
{
    const char *names[N_OPS + 1];
    int n = td_settings_list(settings, "op", names, N_OPS + 1);
    for (int j = 0; j < N_OPS; j++) chosen[j] = n == 0 && !ops[j].asked;
    for (int i = 0; i < n; i++) {
        int j = 0;
        while (j < N_OPS && strcmp(ops[j].name, names[i]) != 0) j++;
        if (j == N_OPS) return td_fail(err, TD_EINVAL, "--op: there is no operation '%s'; --list has them", names[i]);
        chosen[j] = true;
    }
    return TD_OK;
}

static bool is_chosen(const bool chosen[N_OPS], void (*run)(oc_ctx *oc))
{
    for (int i = 0; i < N_OPS; i++)
        if (ops[i].run == run) return chosen[i];
    return false;
}

static td_status read_part(const char *text, oc_ctx *oc, td_error *err)
{
    char rest;
    if (sscanf(text, "%d/%d%c", &oc->part, &oc->n_parts, &rest) == 2 && oc->part >= 0 && oc->part < oc->n_parts)
        return TD_OK;
    return td_fail(err, TD_EINVAL, "--part: '%s' is not K/N with K from 0 to N - 1", text);
}

static int run(oc_ctx *oc, const bool chosen[N_OPS])
{
    oc_report_begin(oc);
    for (int i = 0; i < N_OPS; i++) {
        if (!chosen[i]) continue;
        oc->seed = oc->first_seed * 0x9e3779b97f4a7c15u | 1u;
        oc_op_begin(oc, ops[i].name);
        ops[i].run(oc);
        oc_op_end(oc);
    }
    oc_report_end(oc, NULL);
    return oc->n_failed ? TD_EXIT_FAILED : TD_EXIT_OK;
}

static int fail(td_status status, const td_error *err)
{
    fprintf(stderr, "tandem opcheck: %s\n", err->text);
    return status == TD_EINVAL ? TD_EXIT_ARGUMENTS : TD_EXIT_FAILED;
}

static int print_help(void)
{
    printf(
        "usage: tandem opcheck [settings]\n\n"
        "Every block operation on the GPU against the CPU: errors and their bounds, and bits where the rules promise\n"
        "them. A line an operation; failures say where, and how to repeat them.\n");
    td_settings_help(table, N_SETTINGS);
    printf("\nexit codes: 0 all hold, 1 some do not, or there is no GPU to use, 2 bad settings\n"
           "example     tandem opcheck --op kda --seed 7\n");
    return TD_EXIT_OK;
}

int td_cli_opcheck(int argc, char **argv)
{
    td_settings settings;
    td_error err;
    bool chosen[N_OPS];
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) return print_help();
    td_status status = td_settings_parse(table, N_SETTINGS, argc, argv, &settings, &err);
    if (!status) status = choose(&settings, chosen, &err);
    if (status) return fail(status, &err);
    if (td_settings_flag(&settings, "list")) {
        for (int i = 0; i < N_OPS; i++) printf("%s\n", ops[i].name);
        return TD_EXIT_OK;
    }
    static oc_ctx oc; /* too large for the stack; one a process */
    status = read_part(td_settings_text(&settings, "part"), &oc, &err);
    if (status) return fail(status, &err);
    const char *shapes = td_settings_text(&settings, "shapes");
    oc.first_seed = (uint64_t)td_settings_int(&settings, "seed");
    oc.demo = strcmp(shapes, "real") != 0;
    oc.real = strcmp(shapes, "demo") != 0;
    oc.json = td_settings_flag(&settings, "json");
    oc.verbose = td_settings_flag(&settings, "verbose");
    oc.once = td_settings_flag(&settings, "once");
    oc.bench = td_settings_text(&settings, "bench");
    oc.gpu_index = (int)td_settings_int(&settings, "gpu");
    oc.model_dir = td_settings_text(&settings, "model");
    td_gpu gpu;
    status = td_gpu_query(oc.gpu_index, &gpu, &err);
    oc.gpu = gpu.name;
    int64_t patience_ms = is_chosen(chosen, oc_hang) ? OC_HANG_PATIENCE_MS : OC_PATIENCE_MS;
    if (status == TD_OK) status = make_devices(&oc, oc.gpu_index, patience_ms * 1000000, &err);
    int code = status == TD_OK ? run(&oc, chosen) : fail(status, &err);
    td_dev_destroy(oc.dev[OC_GPU]);
    td_dev_destroy(oc.dev[OC_CPU]);
    return code;
}
