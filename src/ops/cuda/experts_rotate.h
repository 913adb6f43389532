/* Rotations around the products of EXL3 experts, for experts.cu and experts_few.cu. H: butterflies in the order of
 * checkpoint/hadamard.h. A few rows: a warp 128 values, four a lane. Many: a warp 512, sixteen a lane ("part"), with the
 * same operations on every value and one turn through shared memory instead of five exchanges between lanes. */
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

/* A lane's part of a warp's 512 values, four blocks of 128: first 16 in a row, from td_part_at() on, with which it adds
 * values up to 8 apart, then, after a turn through shared memory, eight pairs 16 apart, from td_part_pairs_at() on. */
enum {
    TD_PART = 16,
    TD_PART_WARP = 512,
    TD_PART_PAIRS = TD_PART / 2,
    TD_TURN_BLOCK = 144,
    TD_TURN = 4 * TD_TURN_BLOCK
};

TD_DEVICE int td_part_at()
{
    return threadIdx.x % 32 * TD_PART;
}

TD_DEVICE int td_part_pairs_at()
{
    int lane = threadIdx.x % 32;
    return lane / 8 * 128 + lane % 8 * 2;
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

/* Where four values of row `row` of 16 lie in a block that turns: neighbours are exchanged so that eight lanes' same
 * piece meets all banks once, and blocks are 16 words more than 128 apart for the pairs. */
TD_DEVICE float *td_turn_at(float *turn, int row, int piece)
{
    return turn + threadIdx.x % 32 / 8 * TD_TURN_BLOCK + row * TD_PART + (piece ^ row / 2) * 4;
}

/* A row's 16 values to pairs and back. turn: [TD_TURN] of the warp. */
TD_DEVICE void td_part_to_pairs(float v[TD_PART], float *turn)
{
    int c = threadIdx.x % 8;
#pragma unroll
    for (int q = 0; q < 4; q++)
        *(float4 *)td_turn_at(turn, c, q) = make_float4(v[4 * q], v[4 * q + 1], v[4 * q + 2], v[4 * q + 3]);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < TD_PART_PAIRS; j++) {
        float2 pair = *(float2 *)(td_turn_at(turn, j, c / 2) + c % 2 * 2);
        v[2 * j] = pair.x;
        v[2 * j + 1] = pair.y;
    }
    __syncwarp();
}

TD_DEVICE void td_part_from_pairs(float v[TD_PART], float *turn)
{
    int c = threadIdx.x % 8;
#pragma unroll
    for (int j = 0; j < TD_PART_PAIRS; j++)
        *(float2 *)(td_turn_at(turn, j, c / 2) + c % 2 * 2) = make_float2(v[2 * j], v[2 * j + 1]);
    __syncwarp();
#pragma unroll
    for (int q = 0; q < 4; q++) {
        float4 four = *(float4 *)td_turn_at(turn, c, q);
        v[4 * q] = four.x;
        v[4 * q + 1] = four.y;
        v[4 * q + 2] = four.z;
        v[4 * q + 3] = four.w;
    }
    __syncwarp();
}

/* H of each 128 of the warp's values, from rows to pairs. */
TD_DEVICE void td_part_hadamard(float v[TD_PART], float *turn)
{
    td_part_inside<1>(v);
    td_part_inside<2>(v);
    td_part_inside<4>(v);
    td_part_inside<8>(v);
    td_part_to_pairs(v, turn);
    td_part_inside<2>(v); /* 16 values apart, */
    td_part_inside<4>(v);
    td_part_inside<8>(v); /* and 64 */
#pragma unroll
    for (int i = 0; i < TD_PART; i++) v[i] *= 0.08838834764831845f; /* 1 / sqrt(128) */
}

/* Values of a part as they are in memory: 16 bits in a row, 32 bits in a row, 32 bits as pairs. */
typedef struct td_part16 {
    uint4 v[2];
} td_part16;

TD_DEVICE td_part16 td_part_load16(const td_bf16 *from)
{
    return { { *(const uint4 *)from, *(const uint4 *)(from + 8) } };
}

TD_DEVICE uint32_t td_part_word(const td_part16 &part, int i)
{
    const uint4 &v = part.v[i / 4];
    return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
}

/* f16, of a weight, whose address comes out of memory, so that the compiler has to be told what it points to. */
TD_DEVICE td_part16 td_part_load_weight(const td_f16 *from)
{
    return { { __ldg((const uint4 *)from), __ldg((const uint4 *)(from + 8)) } };
}

/* x * scales. */
TD_DEVICE void td_part_scaled(const td_part16 &x, const td_part16 &scales, float v[TD_PART])
{
#pragma unroll
    for (int i = 0; i < TD_PART_PAIRS; i++) {
        uint32_t pair = td_part_word(x, i), scale = td_part_word(scales, i);
        float2 s = __half22float2(*(const __half2 *)&scale);
        v[2 * i] = td_low_bf16(pair) * s.x;
        v[2 * i + 1] = td_high_bf16(pair) * s.y;
    }
}

TD_DEVICE void td_part_load32(const float *from, float v[TD_PART])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float4 four = *(const float4 *)(from + 4 * i);
        v[4 * i] = four.x;
        v[4 * i + 1] = four.y;
        v[4 * i + 2] = four.z;
        v[4 * i + 3] = four.w;
    }
}

/* As pairs. left: how many values the row still has from `from` on (plain rows need not end with a block). */
TD_DEVICE void td_part_load32_pairs(const float *from, int left, float v[TD_PART])
{
#pragma unroll
    for (int i = 0; i < TD_PART_PAIRS; i++) {
        float2 pair = 16 * i < left ? *(const float2 *)(from + 16 * i) : make_float2(0.0f, 0.0f);
        v[2 * i] = pair.x;
        v[2 * i + 1] = pair.y;
    }
}

TD_DEVICE void td_part_load_scale_pairs(const td_f16 *from, uint32_t pairs[TD_PART_PAIRS])
{
#pragma unroll
    for (int i = 0; i < TD_PART_PAIRS; i++) pairs[i] = __ldg((const uint32_t *)(from + 16 * i));
}

/* v *= scales, both as pairs. */
TD_DEVICE void td_part_scale_pairs(float v[TD_PART], const uint32_t scales[TD_PART_PAIRS])
{
#pragma unroll
    for (int i = 0; i < TD_PART_PAIRS; i++) {
        float2 s = __half22float2(*(const __half2 *)&scales[i]);
        v[2 * i] *= s.x;
        v[2 * i + 1] *= s.y;
    }
}

/* f16(H(v)) at its place in a rotated row. v: scaled, a row's 16 values; k: of the lane's first pair. By step, a lane's
 * pairs of 64 inputs are 16 bytes in a row. */
TD_DEVICE void td_part_rotate_in(float v[TD_PART], float *turn, int k, bool live, bool by_step, td_bf16 *to)
{
    __half2 h[TD_PART_PAIRS];
    td_part_hadamard(v, turn);
#pragma unroll
    for (int i = 0; i < TD_PART_PAIRS; i++) h[i] = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
    if (!live) return;
    if (by_step) {
        to += td_rotated_by_step(k);
        *(uint4 *)to = *(uint4 *)h;
        *(uint4 *)(to + TD_TILE_IN) = *(uint4 *)(h + 4);
    } else {
        to += td_rotated_by_lane(k);
#pragma unroll
        for (int i = 0; i < TD_PART_PAIRS; i++) *(__half2 *)(to + 16 * i) = h[i];
    }
}

#endif
