/* Chunked KDA, prepare: a warp's rows out of memory. Warp w of eight has the 16 rows of sub-block w / 2 and the 64
 * channels of half w % 2, a lane two neighbouring ones, so that products over rows are products of its registers.
 * Names without prefix: for kda_prepare.cu alone. */
#ifndef TD_OPS_CUDA_KDA_ROWS_H
#define TD_OPS_CUDA_KDA_ROWS_H

#include "ops/cuda/kda_chunk.h"

enum { D = TD_KDA_D, C = TD_CHUNK, SUB = 16 };

/* What a lane knows of its rows: two channels each, packed where they are bf16. */
typedef struct rows {
    uint32_t q[SUB], k[SUB];
    float alpha[SUB][2];
} rows;

typedef struct place {
    const td_segment *segment;
    int head, lane, sub, half, channel; /* channel, channel + 1 */
    int t0, n;                          /* first row in the segment; how many there are, <= 0: none */
} place;

/* Two neighbouring values; PAIRS: at 4 bytes. */
template <bool PAIRS> static TD_DEVICE uint32_t load_pair(const td_bf16 *at)
{
    return PAIRS ? *(const uint32_t *)at : at[0] | (uint32_t)at[1] << 16;
}

/* act(silu(convolution)) of eight rows and the lane's channels; part: 0 q, 1 k, 2 v; t0 as in place, n rows are there.
 * The order is td_kda_convolve()'s. FULL: there are all rows, no questions asked. */
template <bool PAIRS, bool FULL>
static TD_DEVICE void convolve(const td_kda_call &a, const place &p, int part, int t0, int n, uint32_t x[8])
{
    size_t channel = ((size_t)part * a.n_heads + p.head) * D + p.channel;
    const td_bf16 *from = a.proj + (size_t)(p.segment->first_row + t0) * a.proj_stride + channel;
    uint32_t raw[8 + TD_CONV - 1] = {};
    if (FULL || n > 0)
#pragma unroll
        for (int j = 0; j < TD_CONV - 1; j++)
            raw[j] = load_pair<PAIRS>(td_kda_raw(a, p.segment, t0 + j - (TD_CONV - 1)) + channel);
#pragma unroll
    for (int r = 0; r < 8; r++, from += a.proj_stride)
        if (FULL || r < n) raw[r + TD_CONV - 1] = load_pair<PAIRS>(from);
    float4 w0 = *(const float4 *)(a.w.conv + channel * TD_CONV);
    float4 w1 = *(const float4 *)(a.w.conv + (channel + 1) * TD_CONV);
#pragma unroll
    for (int r = 0; r < 8; r++) {
        float z0 = w0.x * td_low_bf16(raw[r]), z1 = w1.x * td_high_bf16(raw[r]);
        z0 = fmaf(w0.y, td_low_bf16(raw[r + 1]), z0), z1 = fmaf(w1.y, td_high_bf16(raw[r + 1]), z1);
        z0 = fmaf(w0.z, td_low_bf16(raw[r + 2]), z0), z1 = fmaf(w1.z, td_high_bf16(raw[r + 2]), z1);
        z0 = fmaf(w0.w, td_low_bf16(raw[r + 3]), z0), z1 = fmaf(w1.w, td_high_bf16(raw[r + 3]), z1);
        x[r] = FULL || r < n ? td_pack_bf16(td_times_sigmoid(z0, z0), td_times_sigmoid(z1, z1)) : 0;
    }
}

/* alpha = exp(bound * sigmoid(neg_a * (f + dt_bias))) of eight rows; 1 where there is no row. */
template <bool PAIRS, bool FULL>
static TD_DEVICE void decays(const td_kda_call &a, const place &p, int t0, int n, float alpha[8][2])
{
    const td_bf16 *from = a.f + (size_t)(p.segment->first_row + t0) * a.f_stride + p.head * D + p.channel;
    const float *bias = a.w.dt_bias + p.head * D + p.channel;
    float slope = a.w.neg_a[p.head], bias0 = bias[0], bias1 = bias[1];
    uint32_t f[8];
#pragma unroll
    for (int r = 0; r < 8; r++, from += a.f_stride) f[r] = FULL || r < n ? load_pair<PAIRS>(from) : 0;
#pragma unroll
    for (int r = 0; r < 8; r++) {
        float g0 = td_times_sigmoid(a.lower_bound, slope * (td_low_bf16(f[r]) + bias0));
        float g1 = td_times_sigmoid(a.lower_bound, slope * (td_high_bf16(f[r]) + bias1));
        alpha[r][0] = FULL || r < n ? td_exp_near(g0) : 1.0f;
        alpha[r][1] = FULL || r < n ? td_exp_near(g1) : 1.0f;
    }
}

/* v as the A operand: value channels are rows, pairs of rows of the prompt columns. Shared memory has no room for it
 * yet: it waits where o will be. */
static TD_DEVICE void put_values(const place &p, const uint32_t x[SUB], td_kda_chunk *out)
{
    int tile = p.channel / 16, upper = p.channel / 8 % 2;
    uint4 *to = (uint4 *)out->o + (p.sub * (D / 16) + tile) * 32;
#pragma unroll
    for (int e = 0; e < 2; e++)
#pragma unroll
        for (int t = 0; t < 4; t++) {
            uint32_t take = e ? 0x7632 : 0x5410;
            uint32_t *words = (uint32_t *)&to[td_kda_place(p.channel % 8 + e, t, tile)];
            words[upper] = __byte_perm(x[2 * t], x[2 * t + 1], take);
            words[2 + upper] = __byte_perm(x[2 * t + 8], x[2 * t + 9], take);
        }
}

/* Asks for the warp's rows, a line each: of proj's q, k, v and of f. */
static TD_DEVICE void ask_rows(const td_kda_call &a, const place &p)
{
    int r = p.lane % SUB, first = p.segment->first_row + p.t0 + r;
    size_t channel = (size_t)p.head * D + 64 * p.half, width = (size_t)a.n_heads * D;
    if (r >= p.n) return;
    const td_bf16 *proj = a.proj + (size_t)first * a.proj_stride + channel;
    td_prefetch(proj + p.lane / SUB * width);
    td_prefetch(p.lane / SUB ? a.f + (size_t)first * a.f_stride + channel : proj + 2 * width);
}

/* v, k, q and alpha, eight rows at a time: registers move up, so that the code, which is what this kernel waits for, is
 * there once. */
template <bool PAIRS> static TD_DEVICE void read_rows(const td_kda_call &a, const place &p, rows *x, td_kda_chunk *out)
{
    bool full = p.n >= SUB;
#pragma unroll 1
    for (int i = 0; i < 6; i++) {
        int part = 2 - i / 2, r0 = i % 2 * 8;
        uint32_t y[8];
        if (full)
            convolve<PAIRS, true>(a, p, part, p.t0 + r0, 8, y);
        else
            convolve<PAIRS, false>(a, p, part, p.t0 + r0, p.n - r0, y);
#pragma unroll
        for (int r = 0; r < 8; r++) {
            x->k[r] = x->k[8 + r];
            x->k[8 + r] = x->q[r];
            x->q[r] = x->q[8 + r];
            x->q[8 + r] = y[r];
        }
        if (i == 1) put_values(p, x->q, out);
    }
#pragma unroll 1
    for (int r0 = 0; r0 < SUB; r0 += 8) {
        float alpha[8][2];
        if (full)
            decays<PAIRS, true>(a, p, p.t0 + r0, 8, alpha);
        else
            decays<PAIRS, false>(a, p, p.t0 + r0, p.n - r0, alpha);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            x->alpha[i / 2][i % 2] = x->alpha[8 + i / 2][i % 2];
            x->alpha[8 + i / 2][i % 2] = alpha[i / 2][i % 2];
        }
    }
}

#endif
