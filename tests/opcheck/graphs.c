/* A recording replayed with other tables == the same operations called one after the other == with a wait after each
 * (which rules out that a kernel reads what the one before it has not written yet): bits. Operations side by side, long
 * ones beside short ones either way == the same in one line. Sites of hyper-connections one after the other, each of
 * which reads what the one before has left on a branch, and part of its input early. */
#include "opcheck.h"

#include <stdlib.h>
#include <string.h>

enum { ROWS = 3, DIM = 512, OUT = 384, LONG = 12, SITES = 12 };

typedef struct step {
    oc_weight w, down, block;
    oc_buf *x, *y, *partials, *act, *gate_up, *fn, *base, *scale, *norm, *streams, *post, *comb, *n;
} step;

static td_status run_hyper(oc_ctx *oc, const step *s, bool pending)
{
    td_hyper_args h = { .n_rows = ROWS, .dim = DIM, .rms_eps = 1e-5f, .hc_eps = 1e-6f, .iters = 20 };
    h.fn = (const float *)oc_at(s->fn, OC_GPU);
    h.base = (const float *)oc_at(s->base, OC_GPU);
    h.scale = (const float *)oc_at(s->scale, OC_GPU);
    h.norm = (const float *)oc_at(s->norm, OC_GPU);
    h.partials = pending ? (const float *)oc_at(s->partials, OC_GPU) : NULL;
    h.x = (td_act *)oc_at(s->streams, OC_GPU);
    h.post = (float *)oc_at(s->post, OC_GPU);
    h.comb = (float *)oc_at(s->comb, OC_GPU);
    h.n = (td_act *)oc_at(s->n, OC_GPU);
    return oc->ops[OC_GPU].hyper(oc->dev[OC_GPU], &h);
}

static td_status run_mlp(oc_ctx *oc, const step *s, bool wait)
{
    td_dev *dev = oc->dev[OC_GPU];
    const td_ops *ops = &oc->ops[OC_GPU];
    td_linear_args l = { .n_rows = ROWS,
                         .w = &s->w.w[OC_GPU],
                         .x = (const td_act *)oc_at(s->x, OC_GPU),
                         .x_stride = DIM,
                         .y_act = (td_act *)oc_at(s->gate_up, OC_GPU),
                         .y_stride = 2 * OUT };
    td_status status = ops->linear(dev, &l);
    if (wait && status == TD_OK) status = td_dev_sync(dev, NULL);
    td_swiglu_args g = { ROWS, OUT, 10.0f, (const td_act *)oc_at(s->gate_up, OC_GPU), (td_act *)oc_at(s->act, OC_GPU) };
    return status == TD_OK ? ops->swiglu(dev, &g) : status;
}

static td_status run(oc_ctx *oc, const step *s, bool wait)
{
    td_status status = run_mlp(oc, s, wait);
    if (wait && status == TD_OK) status = td_dev_sync(oc->dev[OC_GPU], NULL);
    return status == TD_OK ? run_hyper(oc, s, false) : status;
}

static void new_inputs(oc_ctx *oc, const step *s)
{
    for (size_t j = 0; j < ROWS * DIM; j++) ((td_bf16 *)(void *)s->x->cpu)[j] = td_f32_bf16(oc_uniform(oc));
    for (size_t j = 0; j < ROWS * 4 * DIM; j++) ((td_bf16 *)(void *)s->streams->cpu)[j] = td_f32_bf16(oc_uniform(oc));
    oc_push(oc, s->x);
    oc_push(oc, s->streams);
}

/* Enters SITES sites, each with a block of one product for both partials. */
static td_status run_sites(oc_ctx *oc, const step *s, bool wait)
{
    td_dev *dev = oc->dev[OC_GPU];
    td_status status = TD_OK;
    for (int i = 0; i < SITES && status == TD_OK; i++) {
        status = run_hyper(oc, s, i > 0);
        if (wait && status == TD_OK) status = td_dev_sync(dev, NULL);
        for (int shard = 0; shard < TD_SHARDS && status == TD_OK; shard++) {
            td_linear_args l = { .n_rows = ROWS,
                                 .w = &s->block.w[OC_GPU],
                                 .x = (const td_act *)oc_at(s->n, OC_GPU),
                                 .x_stride = DIM,
                                 .y_f32 = (float *)oc_at(s->partials, OC_GPU) + shard * ROWS * DIM,
                                 .y_stride = DIM };
            status = oc->ops[OC_GPU].linear(dev, &l);
            if (wait && status == TD_OK) status = td_dev_sync(dev, NULL);
        }
    }
    return status;
}

static void pull_all(oc_ctx *oc, oc_buf *const *outputs, int n, void **got)
{
    for (int k = 0; k < n; k++) got[k] = oc_pull(oc, outputs[k]);
}

/* What the device holds now has the bits of `want`. */
static void same_all(oc_ctx *oc, oc_buf *const *outputs, int n, void *const *want, const char *name)
{
    for (int k = 0; k < n; k++) {
        void *got = oc_pull(oc, outputs[k]);
        oc_bits(oc, name, got, want[k], outputs[k]->n_bytes);
        free(got);
    }
}

static void sites(oc_ctx *oc, const step *s)
{
    td_error err = { 0 };
    td_graph *graph = NULL;
    oc_buf *outputs[] = { s->streams, s->n, s->post, s->comb };
    enum { OUTPUTS = sizeof outputs / sizeof *outputs };
    td_status status = td_dev_capture_begin(oc->dev[OC_GPU]);
    if (status == TD_OK) status = run_sites(oc, s, false);
    oc_expect(oc, td_dev_capture_end(oc->dev[OC_GPU], &graph, &err) == TD_OK && status == TD_OK, "recording sites");
    for (int i = 0; graph && i < 10; i++) {
        void *want[OUTPUTS];
        new_inputs(oc, s);
        oc_ran(oc, TD_OK, run_sites(oc, s, true));
        pull_all(oc, outputs, OUTPUTS, want);
        for (int recorded = 0; recorded < 2; recorded++) {
            for (int k = 1; k < OUTPUTS; k++) oc_poison(oc, outputs[k]);
            oc_push(oc, s->streams);
            oc_ran(oc, TD_OK, recorded ? td_dev_graph_launch(oc->dev[OC_GPU], graph) : run_sites(oc, s, false));
            same_all(oc, outputs, OUTPUTS, want, recorded ? "sites, recorded" : "sites");
        }
        for (int k = 0; k < OUTPUTS; k++) free(want[k]);
    }
    td_dev_graph_destroy(oc->dev[OC_GPU], graph);
}

/* The MLP beside the hyper-connections, one of them LONG times; then a product of what the MLP left. */
static td_status run_beside(oc_ctx *oc, const step *s, bool beside, bool long_branch)
{
    td_dev *dev = oc->dev[OC_GPU];
    td_status status = beside ? td_dev_fork(dev) : TD_OK;
    for (int i = 0; i < (long_branch ? LONG : 1) && status == TD_OK; i++) status = run_mlp(oc, s, false);
    if (beside && status == TD_OK) status = td_dev_main(dev);
    for (int i = 0; i < (long_branch ? 1 : LONG) && status == TD_OK; i++) status = run_hyper(oc, s, false);
    if (beside && status == TD_OK) status = td_dev_join(dev);
    td_linear_args l = { .n_rows = ROWS,
                         .w = &s->down.w[OC_GPU],
                         .x = (const td_act *)oc_at(s->act, OC_GPU),
                         .x_stride = OUT,
                         .y_act = (td_act *)oc_at(s->y, OC_GPU),
                         .y_stride = DIM };
    return status == TD_OK ? oc->ops[OC_GPU].linear(dev, &l) : status;
}

static void beside(oc_ctx *oc, const step *s, bool long_branch)
{
    td_error err = { 0 };
    td_graph *graph = NULL;
    oc_buf *outputs[] = { s->act, s->y, s->n, s->post, s->comb };
    enum { OUTPUTS = sizeof outputs / sizeof *outputs };
    td_status status = td_dev_capture_begin(oc->dev[OC_GPU]);
    if (status == TD_OK) status = run_beside(oc, s, true, long_branch);
    oc_expect(oc, td_dev_capture_end(oc->dev[OC_GPU], &graph, &err) == TD_OK && status == TD_OK, "recording branches");
    for (int i = 0; graph && i < 10; i++) {
        void *want[OUTPUTS];
        new_inputs(oc, s);
        oc_ran(oc, TD_OK, run_beside(oc, s, false, long_branch));
        pull_all(oc, outputs, OUTPUTS, want);
        for (int recorded = 0; recorded < 2; recorded++) {
            for (int k = 0; k < OUTPUTS; k++) oc_poison(oc, outputs[k]);
            oc_ran(oc, TD_OK,
                   recorded ? td_dev_graph_launch(oc->dev[OC_GPU], graph) : run_beside(oc, s, true, long_branch));
            same_all(oc, outputs, OUTPUTS, want, recorded ? "side by side, recorded" : "side by side");
        }
        for (int k = 0; k < OUTPUTS; k++) free(want[k]);
    }
    td_dev_graph_destroy(oc->dev[OC_GPU], graph);
}

void oc_graphs(oc_ctx *oc)
{
    td_error err = { 0 };
    td_graph *graph = NULL;
    oc_case(oc, "linear, swiglu, hyper of %d rows", ROWS);
    step s = { .w = oc_random_weight(oc, TD_W_Q4, 2 * OUT, DIM),
               .down = oc_random_weight(oc, TD_W_Q4, DIM, OUT),
               .block = oc_random_weight(oc, TD_W_Q4, DIM, DIM) };
    s.x = oc_acts(oc, "x", ROWS * DIM, 1.0f);
    s.gate_up = oc_new(oc, "gate_up", ROWS * 2 * OUT * 2);
    s.act = oc_new(oc, "act", ROWS * OUT * 2);
    s.y = oc_new(oc, "y", ROWS * DIM * 2);
    s.partials = oc_new(oc, "partials", TD_SHARDS * ROWS * DIM * 4);
    s.fn = oc_floats(oc, "fn", 24 * 4 * DIM, 0.0f, 0.05f);
    s.base = oc_floats(oc, "base", 24, 0.0f, 1.0f);
    s.scale = oc_floats(oc, "scale", 3, 1.0f, 0.2f);
    s.norm = oc_floats(oc, "norm", DIM, 1.0f, 0.3f);
    s.streams = oc_acts(oc, "streams", ROWS * 4 * DIM, 1.0f);
    s.post = oc_new(oc, "post", ROWS * 4 * 4);
    s.comb = oc_new(oc, "comb", ROWS * 16 * 4);
    s.n = oc_new(oc, "n", ROWS * DIM * 2);
    td_status status = td_dev_capture_begin(oc->dev[OC_GPU]);
    if (status == TD_OK) status = run(oc, &s, false);
    oc_expect(oc, td_dev_capture_end(oc->dev[OC_GPU], &graph, &err) == TD_OK && status == TD_OK, "recording");
    for (int i = 0; graph && i < 10; i++) {
        for (size_t j = 0; j < ROWS * DIM; j++) ((td_bf16 *)(void *)s.x->cpu)[j] = td_f32_bf16(oc_uniform(oc));
        oc_push(oc, s.x);
        oc_poison(oc, s.act);
        oc_poison(oc, s.n);
        oc_ran(oc, TD_OK, td_dev_graph_launch(oc->dev[OC_GPU], graph));
        void *act = oc_pull(oc, s.act), *n = oc_pull(oc, s.n);
        for (int wait = 0; wait < 2; wait++) {
            oc_poison(oc, s.act);
            oc_poison(oc, s.n);
            oc_ran(oc, TD_OK, run(oc, &s, wait));
            void *act1 = oc_pull(oc, s.act), *n1 = oc_pull(oc, s.n);
            oc_bits(oc, wait ? "act, with waits" : "act", act, act1, s.act->n_bytes);
            oc_bits(oc, wait ? "n, with waits" : "n", n, n1, s.n->n_bytes);
            free(act1);
            free(n1);
        }
        free(act);
        free(n);
    }
    td_dev_graph_destroy(oc->dev[OC_GPU], graph);
    if (oc_case(oc, "%d sites of %d rows", SITES, ROWS)) sites(oc, &s);
    if (oc_case(oc, "a long branch beside a short one of %d rows", ROWS)) beside(oc, &s, true);
    if (oc_case(oc, "a short branch beside a long one of %d rows", ROWS)) beside(oc, &s, false);
    oc_done(oc);
}
