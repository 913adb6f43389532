/* router: ids may differ from the CPU's only where two keys are closer than fp32 sums can tell. */
#include "opcheck.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct call {
    oc_weight w;
    oc_buf *x, *bias, *ids, *weights;
    int dim, n_experts, top_k;
} call;

static td_status run(oc_ctx *oc, int side, const call *c, int first, int rows)
{
    td_router_args a = {
        .n_rows = rows, .dim = c->dim, .n_experts = c->n_experts, .top_k = c->top_k, .norm = true, .scale = 2.5f
    };
    a.x = td_act_at(oc->dev[side], (const td_act *)oc_at(c->x, side), (size_t)first * (size_t)c->dim);
    a.w = &c->w.w[side];
    a.bias = (const float *)oc_at(c->bias, side);
    a.ids = (int32_t *)oc_at(c->ids, side) + (size_t)first * (size_t)c->top_k;
    a.weights = (float *)oc_at(c->weights, side) + (size_t)first * (size_t)c->top_k;
    return oc->ops[side].router(oc->dev[side], &a);
}

static double key_of(const call *c, const td_bf16 *rows, int r, int e)
{
    const td_bf16 *x = (const td_bf16 *)(const void *)c->x->cpu + (size_t)r * (size_t)c->dim,
                  *w = rows + (size_t)e * (size_t)c->dim;
    double z = 0.0;
    for (int i = 0; i < c->dim; i++) z += (double)td_bf16_f32(x[i]) * td_bf16_f32(w[i]);
    return 1.0 / (1.0 + exp(-z)) + ((const float *)(const void *)c->bias->cpu)[e];
}

static void compare(oc_ctx *oc, const call *c, const td_bf16 *matrix, int rows, bool ties)
{
    size_t n = (size_t)rows * (size_t)c->top_k;
    int32_t *ids = (int32_t *)oc_pull(oc, c->ids);
    float *weights = (float *)oc_pull(oc, c->weights);
    const int32_t *want = (const int32_t *)(const void *)c->ids->cpu;
    float *want_weights = (float *)(void *)c->weights->cpu;
    int swapped = 0;
    oc_begin(oc, "ids");
    for (size_t i = 0; i < n; i++) {
        if (ids[i] == want[i]) continue;
        int r = (int)(i / (size_t)c->top_k);
        double gap = fabs(key_of(c, matrix, r, ids[i] < 0 ? 0 : ids[i] % c->n_experts) - key_of(c, matrix, r, want[i]));
        if (ids[i] < 0 || ids[i] >= c->n_experts || ties || !(gap < 2e-6)) {
            oc_fail(oc, "row %d pick %zu is %d, expected %d; keys %.3g apart", r, i % (size_t)c->top_k, ids[i], want[i],
                    gap);
            break;
        }
        swapped++;
        weights[i] = want_weights[i]; /* of another expert */
    }
    if (swapped > rows / 50 + 2) oc_fail(oc, "%d picks swapped in %d rows", swapped, rows);
    if (!swapped) oc_near_values(oc, "weights", weights, want_weights, n, 2e-6);
    free(ids);
    free(weights);
}

static void check(oc_ctx *oc, int n_experts, int dim, int top_k, bool ties)
{
    enum { ROWS = 257 };
    static const int counts[] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 64, 65 };
    if (!oc_case(oc, "%d of %d experts, dim %d%s", top_k, n_experts, dim, ties ? ", ties" : "")) return;
    td_bf16 *matrix = oc_host_bf16(oc, (size_t)n_experts * (size_t)dim, 2.0f / sqrtf((float)dim));
    call c = { .dim = dim, .n_experts = n_experts, .top_k = top_k };
    c.bias = oc_floats(oc, "bias", (size_t)n_experts, 7.0f, 0.05f);
    for (int e = 1; ties && e < n_experts; e += 2) { /* every odd expert repeats its neighbour */
        ((float *)(void *)c.bias->cpu)[e] = ((float *)(void *)c.bias->cpu)[e - 1];
        memcpy(matrix + (size_t)e * (size_t)dim, matrix + (size_t)(e - 1) * (size_t)dim, (size_t)dim * sizeof *matrix);
    }
    oc_push(oc, c.bias);
    c.w = oc_pack(oc, TD_W_BF16, n_experts, dim, matrix);
    c.x = oc_acts(oc, "x", ROWS * (size_t)dim, 1.0f);
    c.ids = oc_new(oc, "ids", ROWS * (size_t)top_k * sizeof(int32_t));
    c.weights = oc_new(oc, "weights", ROWS * (size_t)top_k * sizeof(float));
    oc_ran(oc, run(oc, OC_CPU, &c, 0, ROWS), run(oc, OC_GPU, &c, 0, ROWS));
    compare(oc, &c, matrix, ROWS, ties);
    unsigned char *ids = (unsigned char *)oc_pull(oc, c.ids), *weights = (unsigned char *)oc_pull(oc, c.weights);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        int n = counts[i], first = oc_below(oc, ROWS - n + 1);
        size_t at = (size_t)first * (size_t)top_k * 4, bytes = (size_t)n * (size_t)top_k * 4;
        oc_poison(oc, c.ids);
        oc_poison(oc, c.weights);
        oc_ran(oc, TD_OK, run(oc, OC_GPU, &c, first, n));
        unsigned char *ids1 = (unsigned char *)oc_pull(oc, c.ids), *weights1 = (unsigned char *)oc_pull(oc, c.weights);
        oc_bits(oc, "ids of a part of the rows", ids1 + at, ids + at, bytes);
        oc_bits(oc, "weights of a part of the rows", weights1 + at, weights + at, bytes);
        free(ids1);
        free(weights1);
    }
    free(ids);
    free(weights);
    free(matrix);
    oc_done(oc);
}

void oc_router(oc_ctx *oc)
{
    for (int ties = 0; ties < 2; ties++) {
        if (oc->demo) check(oc, 8, 256, 2, ties);
        if (oc->demo) check(oc, 33, 128, 8, ties);
        if (oc->demo) check(oc, 320, 256, 8, ties); /* more than a thread each of one block */
        if (oc->real) check(oc, 288, 4096, 8, ties);
    }
}
