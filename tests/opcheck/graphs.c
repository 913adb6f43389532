/* A recording replayed with other tables == the same operations called one after the other == with a wait after each
 * (which rules out that a kernel reads what the one before it has not written yet): bits. */
#include "opcheck.h"

#include <stdlib.h>
#include <string.h>

enum { ROWS = 3, DIM = 512, OUT = 384 };

typedef struct step {
    oc_weight w;
    oc_buf *x, *y, *act, *gate_up, *fn, *base, *scale, *norm, *streams, *post, *comb, *n;
} step;

static td_status run(oc_ctx *oc, const step *s, bool wait)
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
    if (status == TD_OK) status = ops->swiglu(dev, &g);
    if (wait && status == TD_OK) status = td_dev_sync(dev, NULL);
    td_hyper_args h = { .n_rows = ROWS, .dim = DIM, .rms_eps = 1e-5f, .hc_eps = 1e-6f, .iters = 20 };
    h.fn = (const float *)oc_at(s->fn, OC_GPU);
    h.base = (const float *)oc_at(s->base, OC_GPU);
    h.scale = (const float *)oc_at(s->scale, OC_GPU);
    h.norm = (const float *)oc_at(s->norm, OC_GPU);
    h.x = (td_act *)oc_at(s->streams, OC_GPU);
    h.post = (float *)oc_at(s->post, OC_GPU);
    h.comb = (float *)oc_at(s->comb, OC_GPU);
    h.n = (td_act *)oc_at(s->n, OC_GPU);
    return status == TD_OK ? ops->hyper(dev, &h) : status;
}

void oc_graphs(oc_ctx *oc)
{
    td_error err = { 0 };
    td_graph *graph = NULL;
    oc_case(oc, "linear, swiglu, hyper of %d rows", ROWS);
    step s = { .w = oc_random_weight(oc, TD_W_Q4, 2 * OUT, DIM) };
    s.x = oc_acts(oc, "x", ROWS * DIM, 1.0f);
    s.gate_up = oc_new(oc, "gate_up", ROWS * 2 * OUT * 2);
    s.act = oc_new(oc, "act", ROWS * OUT * 2);
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
    oc_done(oc);
}
