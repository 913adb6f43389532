/* What the kernels of the hyper-connections share (hyper.cu, hyper_many.cu): their arguments, and a slice's share of
 * the mixes, whose arithmetic must be the same for one row and for many.
 *
 * A slice is 64 channels of all four streams; a chunk of it is 16 of them, of which lanes t have four each. Mixes are
 * products of the tensor core: A holds 16 rows of x, B a third of the bits of eight mixes' weights at a time, step s
 * stream s. The parts of a weight are all of its bits (of what is not below 2^-110), so a product is exact, and so are the squares: rows of x by
 * rows of x, of which the diagonal counts. A chunk's sum is a chain of four steps a part, (lowest + middle) + highest
 * part; a slice's is its chunks in order. */
#ifndef TD_OPS_CUDA_HYPER_H
#define TD_OPS_CUDA_HYPER_H

#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"

enum {
    S = TD_STREAMS,
    MIXES = 2 * S + S * S, /* pre 0..3, post 4..7, comb 8..23 */
    SHARES = MIXES + 1,    /* and the sum of squares */
    SLICE = 64,            /* channels */
    CHUNKS = 4,
    MIX_TILES = MIXES / 8,
    PARTS = 3
};

typedef struct td_hyper_call {
    int n_rows, dim, iters;
    float rms_eps, hc_eps;
    const float *partials, *fn, *base, *scale, *norm;
    td_bf16 *x;
    float *post, *comb;
    td_bf16 *n;
    float *mixes, *squares; /* shares of the slices: [n_rows][slices][MIXES], [n_rows][slices] */
} td_hyper_call;

/* The slices' part of a call of many rows; hyper_many.cu. */
void td_hyper_slices_many(const td_cuda_dev *dev, const td_hyper_call *call, size_t slices);

/* The first of lane t's four channels of a chunk, in its slice: two chunks of a lane are eight channels in a row. */
TD_DEVICE int td_mix_channel(int chunk, int t)
{
    return chunk / 2 * 32 + 8 * t + chunk % 2 * 4;
}

/* B operands of one step: of a part, eight mixes. */
typedef struct td_mix_step {
    uint32_t b[PARTS][MIX_TILES][2];
} td_mix_step;

/* A lane's weights of a step: mixes 8 j + g, four channels of stream s from `channel` on. */
TD_DEVICE void td_mix_load(const td_hyper_call &a, int channel, int s, float4 w[MIX_TILES])
{
#pragma unroll
    for (int j = 0; j < MIX_TILES; j++) {
        size_t at = ((size_t)(j * 8 + threadIdx.x % 32 / 4) * S + s) * a.dim + channel;
        w[j] = a.fn && channel < a.dim ? *(const float4 *)(a.fn + at) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

TD_DEVICE void td_mix_split(const float4 w[MIX_TILES], td_mix_step *to)
{
#pragma unroll
    for (int j = 0; j < MIX_TILES; j++) {
        float4 v = w[j];
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            uint32_t low = td_pack_bf16(v.x, v.y), high = td_pack_bf16(v.z, v.w);
            v = make_float4(v.x - td_low_bf16(low), v.y - td_high_bf16(low), v.z - td_low_bf16(high),
                            v.w - td_high_bf16(high));
            to->b[part][j][0] = low;
            to->b[part][j][1] = high;
        }
    }
}

/* Sums of a chunk, as the tensor core leaves them: rows g (0, 1) and g + 8 (2, 3), mixes 8 j + 2t, 2t + 1. Squares of
 * rows 0 to 7 and 8 to 15. */
typedef struct td_mix_sums {
    float c[PARTS][MIX_TILES][4], squares[2][4];
} td_mix_sums;

TD_DEVICE void td_mix_clear(td_mix_sums *to)
{
#pragma unroll
    for (int i = 0; i < PARTS * MIX_TILES * 4; i++) to->c[i / (MIX_TILES * 4)][i / 4 % MIX_TILES][i % 4] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) to->squares[i / 4][i % 4] = 0.0f;
}

/* x: rows g, g + 8: channels 0, 1 of the lane's four, then 2, 3. HALF: there are no rows 8 to 15. */
template <bool HALF> TD_DEVICE void td_mix_add(const td_mix_step &w, const uint32_t x[4], td_mix_sums *to)
{
#pragma unroll
    for (int i = 0; i < PARTS * MIX_TILES; i++) {
        int part = PARTS - 1 - i / MIX_TILES, j = i % MIX_TILES;
        td_mma_bf16(to->c[part][j], x, w.b[part][j][0], w.b[part][j][1]);
    }
    td_mma_bf16(to->squares[0], x, x[0], x[2]);
    if (!HALF) td_mma_bf16(to->squares[1], x, x[1], x[3]);
}

/* Element i of tile j of a chunk's sums. */
TD_DEVICE float td_mix_sum(const td_mix_sums &of, int j, int i)
{
    return (of.c[2][j][i] + of.c[1][j][i]) + of.c[0][j][i];
}

/* The square of row g (half 0) or g + 8, in the lane that has it: t = g / 2. */
TD_DEVICE float td_mix_square(const td_mix_sums &of, int half)
{
    bool odd = threadIdx.x / 4 % 2;
    return odd ? of.squares[half][2 * half + 1] : of.squares[half][2 * half];
}

#endif
