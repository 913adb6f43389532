/* Rotations around the products of EXL3 experts, for experts.cu and experts_few.cu. H: butterflies in the order of
 * checkpoint/hadamard.h, a warp 128 values, four a lane. */
#ifndef TD_OPS_CUDA_EXPERTS_ROTATE_H
#define TD_OPS_CUDA_EXPERTS_ROTATE_H

#include "ops/cuda/experts.h"
#include "ops/cuda/moe.h"

/* H of a warp's 128 values, four in a row a lane: strides 1, 2 in the lane, 4 .. 64 across lanes; then the scale. */
TD_DEVICE void td_hadamard(float v[4])
{
    float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c;
    v[1] = b + d;
    v[2] = a - c;
    v[3] = b - d;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float other = __shfl_xor_sync(0xffffffffu, v[i], step);
            v[i] = threadIdx.x & step ? other - v[i] : v[i] + other;
        }
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] *= 0.08838834764831845f; /* 1 / sqrt(128) */
}

TD_DEVICE float td_half_value(const td_f16 *p)
{
    return __half2float(*(const __half *)p);
}

/* f16(H(x * suh)) of values k .. k + 3 of this lane, at their place in a rotated row. */
TD_DEVICE void td_rotate_in(float v[4], const td_f16 *suh, int k, td_bf16 *to)
{
    for (int i = 0; i < 4; i++) v[i] *= td_half_value(suh + k + i);
    td_hadamard(v);
    for (int i = 0; i < 4; i += 2) {
        __half2 h = __floats2half2_rn(v[i], v[i + 1]);
        *(__half2 *)(to + td_rotated_at(k + i)) = h;
    }
}

/* H(z) * svh of the same values. */
TD_DEVICE void td_rotate_out(float v[4], const td_f16 *svh, int n)
{
    td_hadamard(v);
    for (int i = 0; i < 4; i++) v[i] *= td_half_value(svh + n + i);
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

TD_DEVICE void td_load4(const float *p, float v[4])
{
    float4 f = *(const float4 *)p;
    v[0] = f.x;
    v[1] = f.y;
    v[2] = f.z;
    v[3] = f.w;
}

#endif
