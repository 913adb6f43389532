/* opcheck: the list of operations and the options. */
#include "opcheck.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const struct op {
    const char *name;
    void (*run)(oc_ctx *oc);
    bool bench;
} ops[] = {
    { "linear", oc_linear, false },   { "weights", oc_weights, false }, { "rows", oc_rows, false },
    { "hyper", oc_hyper, false },     { "router", oc_router, false },   { "kda", oc_kda, false },
    { "store", oc_store, false },     { "select", oc_select, false },   { "attend", oc_attend, false },
    { "experts", oc_experts, false }, { "graphs", oc_graphs, false },   { "bench", oc_bench, true },
};
enum { N_OPS = sizeof ops / sizeof *ops };

static int usage(const char *bad)
{
    if (bad) fprintf(stderr, "td_opcheck: what is '%s'?\n", bad);
    printf(
        "usage: td_opcheck [--op NAME]... [--shapes demo|real|all] [--seed N] [--json] [--verbose] [--once] [--list]\n"
        "Every block operation on the GPU against the CPU. Exit 0: all equal; 1: some differ; 2: no GPU, or it "
        "failed.\n");
    return bad ? 2 : 0;
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static bool make_devices(oc_ctx *oc)
{
    td_error err;
    td_dev_limits limits = { .rows = 2112,
                             .dim = oc->real ? 4096 : 512,
                             .n_heads = 32,
                             .n_experts = 288,
                             .top_k = 8,
                             .expert_width = 1024,
                             .index_heads = 32,
                             .index_topk = 2048,
                             .context_tokens = 1 << 20 };
    if (td_dev_create_cpu(&limits, 0, false, &oc->dev[OC_CPU], &err) != TD_OK ||
        td_dev_create_cuda(&limits, 0, &oc->dev[OC_GPU], &err) != TD_OK) {
        printf("td_opcheck: %s\n", err.text);
        return false;
    }
    for (int side = 0; side < OC_SIDES; side++) td_ops_init(&oc->ops[side], oc->dev[side]);
    return true;
}

static int run_op(oc_ctx *oc, const struct op *op)
{
    double start = seconds();
    int failed = oc->n_failed, checks = oc->n_checks;
    oc->op = op->name;
    oc->worst = 0.0;
    oc->seed = oc->first_seed * 0x9e3779b97f4a7c15u | 1u;
    op->run(oc);
    failed = oc->n_failed - failed;
    checks = oc->n_checks - checks;
    if (oc->json)
        printf("{\"op\":\"%s\",\"checks\":%d,\"failed\":%d,\"worst_of_bound\":%.4f,\"seconds\":%.2f}\n", op->name,
               checks, failed, oc->worst, seconds() - start);
    else
        printf("%-8s %-7s %5d checks, %d failed; largest error %.3f of its bound; %.1f s\n", failed ? "FAILED" : "ok",
               op->name, checks, failed, oc->worst, seconds() - start);
    fflush(stdout);
    return failed;
}

int main(int argc, char **argv)
{
    oc_ctx oc = { .first_seed = 1 };
    bool chosen[N_OPS] = { false }, some = false, demo = true;
    oc.real = true;
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(arg, "--help") == 0) return usage(NULL);
        if (strcmp(arg, "--json") == 0) {
            oc.json = true;
        } else if (strcmp(arg, "--verbose") == 0) {
            oc.verbose = true;
        } else if (strcmp(arg, "--once") == 0) {
            oc.once = true;
        } else if (strcmp(arg, "--list") == 0) {
            for (int j = 0; j < N_OPS; j++) printf("%s\n", ops[j].name);
            return 0;
        } else if (strcmp(arg, "--seed") == 0) {
            oc.first_seed = strtoull(value, NULL, 10);
            i++;
        } else if (strcmp(arg, "--shapes") == 0) {
            oc.real = strcmp(value, "demo") != 0;
            demo = strcmp(value, "real") != 0;
            i++;
        } else if (strcmp(arg, "--op") == 0) {
            bool found = false;
            for (int j = 0; j < N_OPS; j++)
                if (strcmp(ops[j].name, value) == 0) chosen[j] = some = found = true;
            if (!found) return usage(value);
            i++;
        } else {
            return usage(arg);
        }
    }
    (void)demo; /* the demo's shapes are cheap: they always run */
    if (!make_devices(&oc)) return 2;
    for (int i = 0; i < N_OPS; i++)
        if (some ? chosen[i] : !ops[i].bench) run_op(&oc, &ops[i]);
    if (!oc.json) printf("%d checks, %d failed\n", oc.n_checks, oc.n_failed);
    td_dev_destroy(oc.dev[OC_GPU]);
    td_dev_destroy(oc.dev[OC_CPU]);
    return oc.n_failed ? 1 : 0;
}
