/* Rotations around the products of EXL3 experts, for experts.cu and experts_few.cu. H: butterflies in the order of
 * checkpoint/hadamard.h. A few rows: a warp 128 values, four a lane. Many: a warp 512, sixteen a lane ("part"), with the
 * same operations on every value and three exchanges between lanes instead of five. */
#ifndef TD_OPS_CUDA_EXPERTS_ROTATE_H
#define TD_OPS_CUDA_EXPERTS_ROTATE_H

#include "ops/cuda/experts.h"
#include "ops/cuda/moe.h"

/* A lane's four values of a warp's 128, a quad: td_quad_at(), + 1, + 16, + 17. */
TD_DEVICE int td_quad_at()
{
    int lane = threadIdx.x % 32;
    return lane / 8 * 32 + lane % 8 * 2;
}

TD_DEVICE void td_quad_across(float v[4], int step)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float other = __shfl_xor_sync(0xffffffffu, v[i], step);
        v[i] = threadIdx.x & step ? other - v[i] : v[i] + other;
    }
}

/* H of a warp's 128 values: strides 1 in the lane, 2, 4, 8 across lanes, 16 in the lane, 32, 64 across; then the scale. */
TD_DEVICE void td_hadamard(float v[4])
{
    float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    float w[4] = { a, b, c, d };
    td_quad_across(w, 1);
    td_quad_across(w, 2);
    td_quad_across(w, 4);
    v[0] = w[0] + w[2];
    v[1] = w[1] + w[3];
    v[2] = w[0] - w[2];
    v[3] = w[1] - w[3];
    td_quad_across(v, 8);
    td_quad_across(v, 16);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] *= 0.08838834764831845f; /* 1 / sqrt(128) */
}

/* v *= the scales of a quad. */
TD_DEVICE void td_quad_scale(float v[4], uint32_t low, uint32_t high)
{
    float2 a = __half22float2(*(const __half2 *)&low), b = __half22float2(*(const __half2 *)&high);
    v[0] *= a.x;
    v[1] *= a.y;
    v[2] *= b.x;
    v[3] *= b.y;
}

TD_DEVICE void td_quad_scale_from(float v[4], const td_f16 *scales)
{
    td_quad_scale(v, *(const uint32_t *)scales, *(const uint32_t *)(scales + 16));
}

/* f16(H(x * suh)) of the quad at k, at its place in a rotated row of a window. */
TD_DEVICE void td_rotate_in(float v[4], const td_f16 *suh, int k, td_bf16 *to)
{
    td_quad_scale_from(v, suh + k);
    td_hadamard(v);
#pragma unroll
    for (int i = 0; i < 4; i += 2) *(__half2 *)(to + td_rotated_by_lane(k + 8 * i)) = __floats2half2_rn(v[i], v[i + 1]);
}

/* H(z) * svh of the same values. */
TD_DEVICE void td_rotate_out(float v[4], const td_f16 *svh, int n)
{
    td_hadamard(v);
    td_quad_scale_from(v, svh + n);
}

/* Input of down from H(z) * svh of gate and up: f16(H(act(swiglu) * suh)). */
TD_DEVICE void td_expert_middle(float gate[4], float up[4], const td_gpu_matrix *m, int n_experts, float limit, int i,
                                td_bf16 *to)
{
    td_rotate_out(gate, m[(size_t)TD_MATRIX_GATE * n_experts].svh, i);
    td_rotate_out(up, m[(size_t)TD_MATRIX_UP * n_experts].svh, i);
    for (int j = 0; j < 4; j++)
        gate[j] = td_round_bf16(td_swiglu_value(td_round_bf16(gate[j]), td_round_bf16(up[j]), limit));
    td_rotate_in(gate, m[(size_t)TD_MATRIX_DOWN * n_experts].suh, i, to);
}

/* A lane's part: the pairs of values at td_part_at() + 8 i of the warp's 512, i = 0 .. 7, in this order. */
enum { TD_PART = 16, TD_PART_WARP = 512 };

TD_DEVICE int td_part_at()
{
    int lane = threadIdx.x % 32;
    return lane / 8 * 128 + lane % 8 / 4 * 64 + lane % 4 * 2;
}

template <int STEP> TD_DEVICE void td_part_inside(float v[TD_PART])
{
#pragma unroll
    for (int i = 0; i < TD_PART; i++) {
        if (i & STEP) continue;
        float low = v[i], high = v[i + STEP];
        v[i] = low + high;
        v[i + STEP] = low - high;
    }
}

template <int STEP> TD_DEVICE void td_part_across(float v[TD_PART])
{
    float sign = threadIdx.x & STEP ? -1.0f : 1.0f; /* other - v or other + v, exactly */
#pragma unroll
    for (int i = 0; i < TD_PART; i++) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xffffffffu, v[i], STEP));
}

/* H of each 128 of the warp's values. */
TD_DEVICE void td_part_hadamard(float v[TD_PART])
{
    td_part_inside<1>(v);
    td_part_across<1>(v); /* two values apart */
    td_part_across<2>(v);
    td_part_inside<2>(v); /* eight */
    td_part_inside<4>(v);
    td_part_inside<8>(v);
    td_part_across<4>(v); /* 64 */
#pragma unroll
    for (int i = 0; i < TD_PART; i++) v[i] *= 0.08838834764831845f; /* 1 / sqrt(128) */
}

/* v *= scales, which are those of the part. */
TD_DEVICE void td_part_scale(float v[TD_PART], const uint32_t scales[TD_PART / 2])
{
#pragma unroll
    for (int i = 0; i < TD_PART / 2; i++) {
        float2 s = __half22float2(*(const __half2 *)&scales[i]);
        v[2 * i] *= s.x;
        v[2 * i + 1] *= s.y;
    }
}

/* Loads of a part from a row's value td_part_at() on; zeros when !live. scales: of a weight, whose address comes out of
 * memory, so that the compiler has to be told what it points to. */
TD_DEVICE void td_part_load16(const td_bf16 *from, bool live, uint32_t pairs[TD_PART / 2])
{
#pragma unroll
    for (int i = 0; i < TD_PART / 2; i++) pairs[i] = live ? *(const uint32_t *)(from + 8 * i) : 0;
}

TD_DEVICE void td_part_load_scales(const td_f16 *from, bool live, uint32_t pairs[TD_PART / 2])
{
#pragma unroll
    for (int i = 0; i < TD_PART / 2; i++) pairs[i] = live ? __ldg((const uint32_t *)(from + 8 * i)) : 0;
}

/* left: how many values the row still has from `from` on; zeros behind them (plain rows need not end with a part). */
TD_DEVICE void td_part_load32(const float *from, int left, float v[TD_PART])
{
#pragma unroll
    for (int i = 0; i < TD_PART / 2; i++) {
        float2 pair = 8 * i < left ? *(const float2 *)(from + 8 * i) : make_float2(0.0f, 0.0f);
        v[2 * i] = pair.x;
        v[2 * i + 1] = pair.y;
    }
}

/* f16(H(v * suh)) at its place in a rotated row, k: of the part's first value. By step, a lane's part is 32 bytes in a
 * row; by lane, four pieces of 8 bytes. */
TD_DEVICE void td_part_rotate_in(float v[TD_PART], const uint32_t suh[TD_PART / 2], int k, bool live, bool by_step,
                                 td_bf16 *to)
{
    __half2 h[2][4]; /* half of a step: inputs + 8, lane of the product: inputs + 16 */
    td_part_scale(v, suh);
    td_part_hadamard(v);
#pragma unroll
    for (int i = 0; i < 8; i++) h[i % 2][i / 2] = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
    if (!live) return;
    if (by_step) {
        uint4 *at = (uint4 *)(to + td_rotated_by_step(k));
        at[0] = *(uint4 *)h[0];
        at[1] = *(uint4 *)h[1];
    } else {
        for (int t = 0; t < 4; t++) {
            __half2 pair[2] = { h[0][t], h[1][t] };
            *(uint2 *)(to + td_rotated_by_lane(k) + 16 * t) = *(uint2 *)pair;
        }
    }
}

#endif
