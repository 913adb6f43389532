/* linear in its three formats: random matrices against the CPU, packed values through unit vectors, rows alone. */
#include "opcheck.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const format_names[] = { "bf16", "q4", "fp8" };
static const int row_counts[] = { 0, 1, 2, 3, 7, 8, 9, 16, 33, 64, 65, 128, 257 };

enum { MOST_ROWS = 257, PAD = 8 };

typedef struct buffers {
    oc_buf *x, *y;
    size_t x_stride, y_stride;
    bool f32;
} buffers;

static td_status run(oc_ctx *oc, int side, const oc_weight *w, const buffers *b, int first, int rows)
{
    td_linear_args a = { .n_rows = rows, .w = &w->w[side], .x_stride = b->x_stride, .y_stride = b->y_stride };
    a.x = td_act_at(oc->dev[side], (const td_act *)oc_at(b->x, side), (size_t)first * b->x_stride);
    if (b->f32)
        a.y_f32 = (float *)oc_at(b->y, side) + (size_t)first * b->y_stride;
    else
        a.y_act = td_act_at(oc->dev[side], (const td_act *)oc_at(b->y, side), (size_t)first * b->y_stride);
    return oc->ops[side].linear(oc->dev[side], &a);
}

/* Gaps between rows hold poison and must keep it: columns out .. y_stride are compared too. */
static void rows_alone(oc_ctx *oc, const oc_weight *w, const buffers *b)
{
    unsigned char *all = (unsigned char *)oc_pull(oc, b->y);
    size_t row_bytes = b->y_stride * (b->f32 ? sizeof(float) : sizeof(td_bf16));
    for (size_t i = 0; i < sizeof row_counts / sizeof *row_counts; i++) {
        int n = row_counts[i], first = oc_below(oc, MOST_ROWS - n + 1);
        oc_poison(oc, b->y);
        oc_ran(oc, TD_OK, run(oc, OC_GPU, w, b, first, n));
        unsigned char *part = (unsigned char *)oc_pull(oc, b->y);
        char what[64];
        snprintf(what, sizeof what, "%d rows from %d", n, first);
        oc_bits(oc, what, part + (size_t)first * row_bytes, all + (size_t)first * row_bytes, (size_t)n * row_bytes);
        free(part);
    }
    free(all);
}

static void check(oc_ctx *oc, td_format format, int out, int in, bool f32)
{
    if (!oc_case(oc, "%s [%d][%d]%s", format_names[format], out, in, f32 ? " fp32" : "")) return;
    oc_weight w = oc_random_weight(oc, format, out, in);
    buffers b = { .x_stride = (size_t)in + (f32 ? PAD : 2), .f32 = f32 };
    b.y_stride = (size_t)out + (out % 32 ? 3 : 4); /* rows that may be stored four values at a time, and others */
    b.x = oc_acts(oc, "x", MOST_ROWS * b.x_stride, 1.0f);
    b.y = oc_new(oc, "y", MOST_ROWS * b.y_stride * (f32 ? sizeof(float) : sizeof(td_bf16)));
    oc_ran(oc, run(oc, OC_CPU, &w, &b, 0, MOST_ROWS), run(oc, OC_GPU, &w, &b, 0, MOST_ROWS));
    if (f32)
        oc_near_f32(oc, b.y, MOST_ROWS * b.y_stride, 2e-6);
    else
        oc_near_act(oc, b.y, MOST_ROWS * b.y_stride, 1e-3); /* a value near the middle of two bf16 may go either way */
    rows_alone(oc, &w, &b);
    oc_done(oc);
}

/* q4 far from zero: offsets are all of a weight but its last bits, and sums of x all of a product, so what is lost of
 * either shows. */
static void check_offsets(oc_ctx *oc, int out, int in)
{
    if (!oc_case(oc, "q4 [%d][%d], far from zero", out, in)) return;
    size_t n = (size_t)out * (size_t)in, n_x = MOST_ROWS * (size_t)in;
    td_bf16 *rows = oc_host_bf16(oc, n, 0.01f);
    for (size_t i = 0; i < n; i++) rows[i] = td_f32_bf16(1.0f + td_bf16_f32(rows[i]));
    oc_weight w = oc_pack(oc, TD_W_Q4, out, in, rows);
    buffers b = { .x_stride = (size_t)in, .y_stride = (size_t)out, .f32 = true };
    b.x = oc_new(oc, "x", n_x * sizeof(td_bf16));
    td_bf16 *x = oc_host_bf16(oc, n_x, 0.3f);
    for (size_t i = 0; i < n_x; i++) ((td_bf16 *)(void *)b.x->cpu)[i] = td_f32_bf16(1.0f + td_bf16_f32(x[i]));
    oc_push(oc, b.x);
    b.y = oc_new(oc, "y", MOST_ROWS * b.y_stride * sizeof(float));
    oc_ran(oc, run(oc, OC_CPU, &w, &b, 0, MOST_ROWS), run(oc, OC_GPU, &w, &b, 0, MOST_ROWS));
    oc_near_f32(oc, b.y, MOST_ROWS * b.y_stride, 1e-6);
    rows_alone(oc, &w, &b);
    free(x);
    free(rows);
    oc_done(oc);
}

void oc_linear(oc_ctx *oc)
{
    static const int demo[][2] = { { 1026, 256 }, { 256, 128 }, { 16, 16 }, { 50, 48 }, { 512, 384 }, { 768, 1536 } };
    static const int real[][2] = { { 12576, 4096 }, { 4096, 128 }, { 2048, 4096 },
                                   { 4096, 1024 },  { 32, 4096 },  { 4096, 6144 } };
    static const int turns[][2] = { { 8224, 512 },  { 8240, 1024 }, { 8256, 2048 }, /* blocks take several panels */
                                    { 1040, 8192 }, { 80, 12288 },                  /* slices of several rounds */
                                    { 80, 4480 } }; /* slices of eight and of nine groups */
    for (int format = TD_W_BF16; format <= TD_W_FP8; format++) {
        for (int i = 0; oc->demo && i < 6; i++)
            for (int f32 = 0; f32 < 2; f32++) check(oc, (td_format)format, demo[i][0], demo[i][1], f32);
        for (int i = 0; oc->real && i < 6; i++) check(oc, (td_format)format, real[i][0], real[i][1], true);
    }
    for (int i = 0; oc->real && i < 6; i++) check(oc, TD_W_Q4, turns[i][0], turns[i][1], true);
    for (int i = 0; oc->demo && i < 6; i++) check_offsets(oc, demo[i][0], demo[i][1]);
    if (oc->real) check_offsets(oc, 8240, 1024);
}

/* y = W e_i gives the packed values themselves: the same bits, so the same scales and codes. */
static void check_values(oc_ctx *oc, td_format format, int out, int in, int kind)
{
    if (!oc_case(oc, "%s values [%d][%d] kind %d", format_names[format], out, in, kind)) return;
    td_bf16 *rows = oc_host_bf16(oc, (size_t)out * (size_t)in, kind == 1 ? 1e-30f : 1.0f);
    if (kind == 2) memset(rows, 0, (size_t)out * (size_t)in * sizeof *rows);
    if (kind == 3) rows[in + 3] = td_f32_bf16(1e30f); /* one outlier */
    oc_weight w = oc_pack(oc, format, out, in, rows);
    buffers b = { .x_stride = (size_t)in, .y_stride = (size_t)out, .f32 = true };
    b.x = oc_new(oc, "x", (size_t)in * (size_t)in * sizeof(td_bf16));
    memset(b.x->cpu, 0, b.x->n_bytes);
    for (int i = 0; i < in; i++) ((td_bf16 *)(void *)b.x->cpu)[i * in + i] = td_f32_bf16(1.0f);
    oc_push(oc, b.x);
    b.y = oc_new(oc, "y", (size_t)in * (size_t)out * sizeof(float));
    oc_ran(oc, run(oc, OC_CPU, &w, &b, 0, in), run(oc, OC_GPU, &w, &b, 0, in));
    oc_same(oc, b.y);
    free(rows);
    oc_done(oc);
}

/* A matrix filled group by group from one buffer, which is spoilt as soon as a fill returns, and nothing waits in
 * between: what a loader does. */
static void check_refilled(oc_ctx *oc, td_format format, int out, int in, int group)
{
    if (!oc_case(oc, "%s [%d][%d] in groups of %d", format_names[format], out, in, group)) return;
    size_t n = (size_t)group * (size_t)in;
    oc_weight w;
    for (int side = 0; side < OC_SIDES; side++) {
        oc_buf *data = oc_new(oc, "weight", oc->ops[side].weight_bytes(format, out, in));
        memset(data->cpu, 0, data->n_bytes);
        oc_push(oc, data);
        w.w[side] = (td_weight){ format, out, in, oc_at(data, side) };
    }
    for (int first = 0; first < out; first += group) {
        td_bf16 *rows = oc_host_bf16(oc, n, 1.0f), *lent = (td_bf16 *)malloc(n * sizeof *lent);
        for (int side = 0; side < OC_SIDES; side++) {
            memcpy(lent, rows, n * sizeof *lent);
            td_status status = oc->ops[side].weight_fill(oc->dev[side], &w.w[side], first, group, lent, (size_t)in, 0);
            memset(lent, 0xff, n * sizeof *lent); /* NaN */
            oc_expect(oc, status == TD_OK, "weight_fill");
        }
        free(rows);
        free(lent);
    }
    buffers b = { .x_stride = (size_t)in, .y_stride = (size_t)out, .f32 = true };
    b.x = oc_acts(oc, "x", 16 * b.x_stride, 1.0f);
    b.y = oc_new(oc, "y", 16 * b.y_stride * sizeof(float));
    oc_ran(oc, run(oc, OC_CPU, &w, &b, 0, 16), run(oc, OC_GPU, &w, &b, 0, 16));
    oc_near_f32(oc, b.y, 16 * b.y_stride, 2e-6);
    oc_done(oc);
}

void oc_weights(oc_ctx *oc)
{
    for (int format = TD_W_BF16; format <= TD_W_FP8; format++) {
        if (oc->demo) check_refilled(oc, (td_format)format, 512, 256, 32);
        if (oc->real) check_refilled(oc, (td_format)format, 2048, 4096, 256);
    }
    for (int format = TD_W_BF16; format <= TD_W_FP8; format++)
        for (int kind = 0; kind < 4; kind++) {
            check_values(oc, (td_format)format, 40, 80, kind);
            check_values(oc, (td_format)format, 16, 256, kind);
        }
}
