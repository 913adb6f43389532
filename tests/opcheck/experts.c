/* experts: EXL3 in every width and codebook, plain bf16; a row's bits alone and in windows of any size. */
#include "opcheck.h"
#include "opcheck/experts_states.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ROWS = 257, EXPERTS_MAX = 64 };

typedef struct layer {
    int n_experts, dim, width, top_k;
    td_experts e[OC_SIDES];
    td_exl3 views[OC_SIDES][3][EXPERTS_MAX];
    td_weight plain[OC_SIDES][3][EXPERTS_MAX];
    oc_buf *x, *ids, *weights, *shared, *y;
} layer;

static td_f16 *random_signs(oc_ctx *oc, int n, float scale)
{
    td_f16 *x = (td_f16 *)malloc((size_t)n * sizeof *x);
    for (int i = 0; i < n; i++)
        x[i] = td_f32_f16(scale * (1.0f + 0.5f * oc_uniform(oc)) * (oc_below(oc, 2) ? 1.0f : -1.0f));
    return x;
}

/* Any bits are a valid stream. The expert's whole matrix has inputs and outputs beyond the slice that is cut. */
static void add_exl3(oc_ctx *oc, layer *l, int matrix, int i, int bits2, td_exl3_codebook codebook)
{
    int k = matrix == 2 ? l->width : l->dim, n = matrix == 2 ? l->dim : l->width;
    td_exl3 whole = { .k = k + 128, .n = n + 128, .bits2 = bits2, .codebook = codebook };
    size_t words = td_exl3_trellis_bytes(whole.k, whole.n, bits2) / 2;
    uint16_t *trellis = (uint16_t *)malloc(words * sizeof *trellis);
    for (size_t w = 0; w < words; w++) trellis[w] = (uint16_t)(oc_rand(oc) >> 40);
    td_f16 *suh = random_signs(oc, whole.k, 1.0f), *svh = random_signs(oc, whole.n, 0.02f);
    whole.trellis = trellis;
    whole.suh = suh;
    whole.svh = svh;
    oc_buf *b[OC_SIDES] = { oc_new(oc, "experts", td_exl3_bytes(k, n, bits2)) };
    b[OC_GPU] = b[OC_CPU];
    for (int side = 0; side < OC_SIDES; side++) {
        td_error err;
        td_exl3 *view = &l->views[side][matrix][i];
        view->trellis = (const uint16_t *)oc_at(b[side], side);
        td_status status = oc->ops[side].exl3_fill(oc->dev[side], view, &whole, 128, 128 + k, 0, n, &err);
        oc_expect(oc, status == TD_OK, "exl3_fill");
    }
    free(trellis);
    free(suh);
    free(svh);
}

static void add_plain(oc_ctx *oc, layer *l, int matrix, int i)
{
    int k = matrix == 2 ? l->width : l->dim, n = matrix == 2 ? l->dim : l->width;
    oc_weight w = oc_random_weight(oc, TD_W_BF16, n, k);
    for (int side = 0; side < OC_SIDES; side++) l->plain[side][matrix][i] = w.w[side];
}

static td_status run(oc_ctx *oc, int side, const layer *l, int first, int rows, bool shared)
{
    size_t r = (size_t)first, dim = (size_t)l->dim, k = (size_t)l->top_k;
    td_experts_args a = { .n_rows = rows, .top_k = l->top_k, .limit = 10.0f, .experts = &l->e[side] };
    a.x = td_act_at(oc->dev[side], (const td_act *)oc_at(l->x, side), r * dim);
    a.ids = (const int32_t *)oc_at(l->ids, side) + r * k;
    a.weights = (const float *)oc_at(l->weights, side) + r * k;
    if (shared) a.shared = (const float *)oc_at(l->shared, side) + r * dim;
    a.y = (float *)oc_at(l->y, side) + r * dim;
    return oc->ops[side].experts(oc->dev[side], &a);
}

/* Picks of a row differ, but in every fifth row two are the same; some are outside and are skipped, in a few rows all; a
 * few experts are chosen far more often than others. */
static void make_rows(oc_ctx *oc, layer *l)
{
    size_t dim = (size_t)l->dim, k = (size_t)l->top_k;
    int32_t *ids = (int32_t *)malloc(MOST_ROWS * k * sizeof *ids);
    for (int r = 0; r < MOST_ROWS; r++)
        for (size_t i = 0; i < k; i++) {
            int32_t *row = ids + (size_t)r * k, id;
            bool again;
            do {
                id = oc_below(oc, 3) ? oc_below(oc, l->n_experts) : oc_below(oc, (l->n_experts + 3) / 4);
                again = false;
                for (size_t j = 0; j < i; j++) again |= row[j] == id;
            } while (again);
            row[i] = oc_below(oc, 50) ? id : oc_below(oc, 2) ? -1 : l->n_experts;
            if (i == k - 1 && r % 5 == 2) row[i] = row[0];
            if (r % 32 == 9) row[i] = -1;
        }
    l->x = oc_acts(oc, "x", MOST_ROWS * dim, 1.0f);
    l->ids = oc_ints(oc, "ids", ids, MOST_ROWS * k);
    l->weights = oc_floats(oc, "weights", MOST_ROWS * k, 0.3f, 0.2f);
    l->shared = oc_floats(oc, "shared", MOST_ROWS * dim, 0.0f, 0.5f);
    l->y = oc_new(oc, "y", MOST_ROWS * dim * sizeof(float));
    free(ids);
}

static void finish_layer(oc_ctx *oc, layer *l, bool exl3)
{
    for (int side = 0; side < OC_SIDES; side++) {
        l->e[side] = (td_experts){ .n_experts = l->n_experts, .dim = l->dim, .width = l->width, .exl3 = exl3 };
        if (exl3)
            l->e[side].gate_x = l->views[side][0], l->e[side].up_x = l->views[side][1],
            l->e[side].down_x = l->views[side][2];
        else
            l->e[side].gate = l->plain[side][0], l->e[side].up = l->plain[side][1], l->e[side].down = l->plain[side][2];
        size_t n = oc->ops[side].experts_table_bytes(&l->e[side]);
        if (n) l->e[side].table = oc_at(oc_new(oc, "table", n), side);
        oc_expect(oc, oc->ops[side].experts_table_fill(oc->dev[side], &l->e[side]) == TD_OK, "experts_table_fill");
    }
}

static void compare(oc_ctx *oc, layer *l, bool shared)
{
    /* from 65 on: items of 8, 16, .. 64 picks, each of which has a loop of its own */
    static const int counts[] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 64, 65, 72, 90, 112, 130, 160, 200 };
    size_t dim = (size_t)l->dim;
    oc_ran(oc, run(oc, OC_CPU, l, 0, MOST_ROWS, shared), run(oc, OC_GPU, l, 0, MOST_ROWS, shared));
    oc_near_f32(oc, l->y, MOST_ROWS * dim, 1e-3); /* act between the products: a value may round the other way */
    unsigned char *y = (unsigned char *)oc_pull(oc, l->y);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        int n = counts[i], first = oc_below(oc, MOST_ROWS - n + 1);
        char what[64];
        oc_poison(oc, l->y);
        oc_ran(oc, TD_OK, run(oc, OC_GPU, l, first, n, shared));
        unsigned char *y1 = (unsigned char *)oc_pull(oc, l->y);
        snprintf(what, sizeof what, "%d rows from %d", n, first);
        oc_bits(oc, what, y1 + (size_t)first * dim * 4, y + (size_t)first * dim * 4, (size_t)n * dim * 4);
        free(y1);
    }
    free(y);
}

/* bits2 0: plain; -1: a mixture of widths. */
static void check(oc_ctx *oc, int n_experts, int dim, int width, int top_k, int bits2, td_exl3_codebook codebook,
                  bool shared)
{
    layer *l = (layer *)calloc(1, sizeof *l);
    td_check(l && n_experts <= EXPERTS_MAX);
    if (!oc_case(oc, "%d experts [%d][%d], top %d, %s %.1f bits%s", n_experts, width, dim, top_k,
                 bits2 ? td_exl3_codebook_name(codebook) : "plain", bits2 / 2.0, shared ? ", shared" : ""))
        return;
    l->n_experts = n_experts;
    l->dim = dim;
    l->width = width;
    l->top_k = top_k;
    for (int m = 0; m < 3; m++)
        for (int i = 0; i < n_experts; i++) {
            if (bits2)
                add_exl3(oc, l, m, i, bits2 > 0 ? bits2 : (i + m) % 3 ? 8 : 6, codebook);
            else
                add_plain(oc, l, m, i);
        }
    make_rows(oc, l);
    finish_layer(oc, l, bits2 != 0);
    compare(oc, l, shared);
    oc_done(oc);
    free(l);
}

/* Every state of 4-bit mcg has the CPU's value, in its place. */
static void check_states(oc_ctx *oc)
{
    uint32_t *got = (uint32_t *)calloc(OC_STATE_WORDS * 4, sizeof *got);
    const char *why;
    td_check(got);
    if (!oc_case(oc, "all states of mcg, 4 bits")) return;
    oc_begin(oc, "bits");
    if (!oc_gpu_states(got, &why)) oc_fail(oc, "%s", why);
    for (uint32_t i = 0; oc->now.ok && i < OC_STATE_WORDS * 8; i++) {
        uint32_t a = i / 2 % 4, high = i % 2, nibble = a / 2 * 2 + high + a % 2 * 4;
        uint64_t stream = (uint64_t)oc_state_before(i / 8) << 32 | oc_state_word(i / 8);
        uint16_t state = (uint16_t)(stream >> (28 - 4 * nibble)), value = (uint16_t)(got[i / 2] >> 16 * high);
        td_f16 want = td_f32_f16(td_exl3_value(TD_EXL3_MCG, state));
        if (value != want) oc_fail(oc, "state %04x is %04x, expected %04x", state, value, want);
    }
    oc_end(oc);
    free(got);
}

static void check_demo(oc_ctx *oc)
{
    static const int widths[] = { 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16 };
    check(oc, 8, 256, 128, 2, 8, TD_EXL3_MCG, true);
    check(oc, 8, 256, 256, 2, 8, TD_EXL3_MCG, false);
    check(oc, 5, 384, 128, 3, 0, TD_EXL3_MCG, true);
    check(oc, 4, 48, 80, 2, 0, TD_EXL3_MCG, true);
    check(oc, 6, 128, 128, 2, -1, TD_EXL3_MCG, true);
    check(oc, 12, 128, 128, 8, 8, TD_EXL3_MCG, true); /* more picks than the threads of a block that counts them */
    for (int i = 0; i < 11; i++)
        for (int c = TD_EXL3_3INST; c <= TD_EXL3_MUL1; c++)
            check(oc, 3, 128, 256, 2, widths[i], (td_exl3_codebook)c, false);
}

void oc_experts(oc_ctx *oc)
{
    check_states(oc);
    if (oc->demo) check_demo(oc);
    if (!oc->real) return;
    check(oc, 12, 4096, 1024, 8, 8, TD_EXL3_MCG, true);
    check(oc, 6, 2048, 512, 4, 6, TD_EXL3_MUL1, true);
    check(oc, 6, 2048, 512, 4, 0, TD_EXL3_MCG, true);
}
