/* Row-by-row KDA: gates of low rank, f = f_b f_a and gate = g_b g_a, for the 128 channels of a block's head. The products
 * are the smallest there are (128 inputs: two slices of a group each), so each of 16 warps has one slice of 16 channels
 * of both, for up to eight rows. The arithmetic is linear_few.cu's: slices from zero, added in order, rounded to act. */
#ifndef TD_OPS_CUDA_KDA_GATES_H
#define TD_OPS_CUDA_KDA_GATES_H

#include "ops/cuda/kda.h"
#include "ops/cuda/product.h"

enum {
    TD_KDA_GATES_THERE = TD_W_FP8 + 1, /* in memory; else the format of f_b and g_b */
    TD_KDA_GATE_ROWS = 8,
    TD_KDA_GATE_SLICES = TD_HEAD / TD_TILE_IN,
    TD_KDA_GATE_PANELS = TD_HEAD / TD_TILE_OUT
};
static_assert(TD_KDA_GATE_SLICES * TD_KDA_GATE_PANELS * 32 == TD_KDA_THREADS, "a warp a slice and panel");

/* A lane's weights: of f_b, of g_b. */
template <int GATES> struct td_kda_gate_weights {
    uint4 raw[2][td_pieces<GATES>::N];
    uint2 pair[2];
};
template <> struct td_kda_gate_weights<TD_KDA_GATES_THERE> {
};

template <int GATES> TD_DEVICE const uint8_t *td_kda_gate_panel(const td_kda_call &a, int head, int which, int panel)
{
    return (which ? a.low.g_b : a.low.f_b) +
           (size_t)(head * TD_KDA_GATE_PANELS + panel) * td_gpu_panel_bytes((td_format)GATES, TD_HEAD);
}

/* Before the wait. */
template <int GATES> TD_DEVICE void td_kda_load_gates(const td_kda_call &a, int head, td_kda_gate_weights<GATES> *w)
{
    if constexpr (GATES != TD_KDA_GATES_THERE) {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int which = 0; which < 2; which++) {
            const uint8_t *at = td_kda_gate_panel<GATES>(a, head, which, warp / TD_KDA_GATE_SLICES) +
                                (GATES == TD_W_FP8 ? TD_FP8_HEAD : 0) +
                                warp % TD_KDA_GATE_SLICES * td_group_bytes((td_format)GATES);
            w->pair[which] = GATES == TD_W_Q4 ? td_load_early8(at + lane / 4 * 8) : make_uint2(0, 0);
#pragma unroll
            for (int i = 0; i < td_pieces<GATES>::N; i++)
                w->raw[which][i] = td_load_early16(at + (GATES == TD_W_Q4 ? TD_Q4_SCALES : 0) + lane * 16 + i * 512);
        }
    }
}

/* Where the sum of a slice for a channel of row t goes. */
TD_DEVICE int td_kda_gate_share(int which, int slice, int t, int channel)
{
    return ((which * TD_KDA_GATE_SLICES + slice) * TD_KDA_GATE_ROWS + t) * TD_HEAD + channel;
}

/* Slices of n rows from t0 into shares. */
template <int GATES>
TD_DEVICE void td_kda_multiply_gates(const td_kda_call &a, const td_segment *segment, int t0, int n,
                                     const td_kda_gate_weights<GATES> &w, float *shares)
{
    if constexpr (GATES != TD_KDA_GATES_THERE) {
        int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        int slice = warp % TD_KDA_GATE_SLICES, channel = warp / TD_KDA_GATE_SLICES * TD_TILE_OUT + g;
        size_t x = (size_t)(segment->first_row + t0 + min(g, n - 1)) * a.low.stride + slice * TD_TILE_IN + 8 * t;
        uint32_t b[2][1][8];
        td_load_x<true>(a.low.f_a + x, 0, 0, b[0][0]);
        td_load_x<true>(a.low.g_a + x, 0, 0, b[1][0]);
#pragma unroll
        for (int which = 0; which < 2; which++) {
            float acc[1][4] = { { 0.0f, 0.0f, 0.0f, 0.0f } };
            td_lone_group<GATES>(w.raw[which], w.pair[which], b[which], acc);
#pragma unroll
            for (int i = 0; i < 4; i++)
                shares[td_kda_gate_share(which, slice, 2 * t + i % 2, channel + i / 2 * 8)] = acc[0][i];
        }
    }
}

/* f (which 0) or gate of row t0 + t, from shares or from memory. */
template <int GATES>
TD_DEVICE float td_kda_gate_value(const td_kda_call &a, const td_segment *segment, int head, int which, int t0, int t,
                                  int channel, const float *shares)
{
    if constexpr (GATES == TD_KDA_GATES_THERE) {
        size_t row = (size_t)(segment->first_row + t0 + t);
        return td_load_bf16((which ? a.gate + row * a.gate_stride : a.f + row * a.f_stride) + head * TD_HEAD + channel);
    } else {
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < TD_KDA_GATE_SLICES; s++) sum += shares[td_kda_gate_share(which, s, t, channel)];
        if (GATES == TD_W_FP8)
            sum *=
                ((const float *)td_kda_gate_panel<GATES>(a, head, which, channel / TD_TILE_OUT))[channel % TD_TILE_OUT];
        return td_round_bf16(sum);
    }
}

#endif
