/* What the forms of KDA share on the GPU: what precedes the recurrence (convolution, norms, gates), the recurrence
 * step, which window and replay must have in common to the last bit, and what follows. Norms are a warp's, of one row of
 * one head, four channels a lane: lane, lane + 32, lane + 64, lane + 96. */
#ifndef TD_OPS_CUDA_KDA_H
#define TD_OPS_CUDA_KDA_H

#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"

enum {
    TD_KDA_D = TD_HEAD,
    TD_KDA_STATE = TD_HEAD * TD_HEAD,
    TD_KDA_THREADS = 512, /* of the recurrence: 128 value channels x 4 quarters of the key channels */
    TD_KDA_QUARTER = TD_HEAD / (TD_KDA_THREADS / TD_HEAD)
};

/* td_kda_low_rank with the types of the device. */
typedef struct td_kda_gates {
    const uint8_t *f_b, *g_b;
    const td_bf16 *f_a, *g_a;
    size_t stride;
} td_kda_gates;

/* td_kda_args with the types of the device. */
typedef struct td_kda_call {
    const td_segment *segments;
    int n_segments, n_heads;
    float rms_eps, lower_bound;
    td_kda_weights w;
    float *state;
    td_bf16 *conv;
    td_kda_saved saved;
    const td_bf16 *proj, *beta_raw, *f, *gate;
    size_t proj_stride, beta_stride, f_stride, gate_stride;
    td_bf16 *y;
    td_kda_gates low;
} td_kda_call;

TD_DEVICE size_t td_kda_slot(const td_segment *segment, int parity)
{
    return 2 * (size_t)segment->slot + (size_t)(parity & 1);
}

TD_DEVICE float *td_kda_state_at(const td_kda_call &a, const td_segment *segment, int parity, int head)
{
    return a.state + (td_kda_slot(segment, parity) * a.n_heads + head) * TD_KDA_STATE;
}

TD_DEVICE td_bf16 *td_kda_conv_at(const td_kda_call &a, const td_segment *segment, int parity, int j)
{
    return a.conv + (td_kda_slot(segment, parity) * (TD_CONV - 1) + j) * 3 * TD_HEAD * a.n_heads;
}

TD_DEVICE int td_kda_first_saved(const td_segment *segments, int segment)
{
    int row = 0;
#pragma unroll 1
    for (int i = 0; i < segment; i++) row += segments[i].chunked ? 0 : segments[i].n_rows;
    return row;
}

/* Raw projection of row t of a segment; t < 0: from the committed convolution window. */
TD_DEVICE const td_bf16 *td_kda_raw(const td_kda_call &a, const td_segment *segment, int t)
{
    return t < 0 ? td_kda_conv_at(a, segment, segment->parity, TD_CONV - 1 + t)
                 : a.proj + (size_t)(segment->first_row + t) * a.proj_stride;
}

TD_DEVICE void td_kda_load4(const float *p, float x[4])
{
    float4 v = *(const float4 *)p;
    x[0] = v.x;
    x[1] = v.y;
    x[2] = v.z;
    x[3] = v.w;
}

/* act(silu(convolution)) of one channel; raw: rows t - 3 .. t. Taps oldest first. */
TD_DEVICE float td_kda_convolve(const float taps[TD_CONV], const float raw[TD_CONV])
{
    float z = taps[0] * raw[0];
#pragma unroll
    for (int j = 1; j < TD_CONV; j++) z = fmaf(taps[j], raw[j], z);
    return td_round_bf16(td_siluf(z));
}

/* x / sqrt(sum x^2 + 1e-6) * scale */
TD_DEVICE void td_kda_normalise(float x[4], float scale)
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) sum = fmaf(x[i], x[i], sum);
    float inverse = 1.0f / sqrtf(td_warp_sum(sum) + 1e-6f);
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = x[i] * inverse * scale;
}

/* alpha = exp(bound * sigmoid(neg_a * (f + dt_bias))) of one channel */
TD_DEVICE float td_kda_decay(const td_kda_call &a, float neg_a, float dt_bias, float f)
{
    return td_expf(a.lower_bound * td_sigmoidf(neg_a * (f + dt_bias)));
}

TD_DEVICE float td_kda_beta(td_bf16 raw)
{
    return td_round_bf16(td_sigmoidf(td_load_bf16(&raw)));
}

/* y = gated norm of act(o) of row t. norm, gate: the weights, and sigmoid(gate), of the head's 128 channels. */
TD_DEVICE void td_kda_finish(const td_kda_call &a, const td_segment *segment, int head, int t, int lane, float o[4],
                             const float *norm, const float *gate)
{
    size_t row = (size_t)(segment->first_row + t), at = (row * a.n_heads + head) * TD_HEAD + lane;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        o[i] = td_round_bf16(o[i]);
        sum = fmaf(o[i], o[i], sum);
    }
    float inverse = 1.0f / sqrtf(td_warp_sum(sum) / TD_HEAD + a.rms_eps);
#pragma unroll
    for (int i = 0; i < 4; i++)
        a.y[at + 32 * i] = td_to_bf16((norm[lane + 32 * i] * (o[i] * inverse)) * gate[lane + 32 * i]);
}

/* One row on value channel d = threadIdx.x % 128 and the quarter threadIdx.x / 128 of the key channels, held in m:
 *   M = diag(alpha) M;  r = M^T k;  u = beta (v - r);  M = M + k u^T;  o = M^T q (OUTPUT)
 * Sums: a chain over the quarter's ascending channels, quarters in order. red: [2][4][128], `turn` alternates; o:
 * [4][128] takes the quarters' shares. Rows are 16-byte aligned. */
template <bool OUTPUT>
TD_DEVICE void td_kda_step(float m[TD_KDA_QUARTER], const float *k, const float *v, const float *alpha, float beta,
                           const float *q, float *red, int turn, float *o)
{
    int d = threadIdx.x % TD_HEAD, quarter = threadIdx.x / TD_HEAD, c0 = quarter * TD_KDA_QUARTER;
    float sum = 0.0f, kc[4], other[4];
#pragma unroll
    for (int j = 0; j < TD_KDA_QUARTER; j++) {
        if (j % 4 == 0) {
            td_kda_load4(k + c0 + j, kc);
            td_kda_load4(alpha + c0 + j, other);
        }
        m[j] = other[j % 4] * m[j];
        sum = fmaf(kc[j % 4], m[j], sum);
    }
    red += turn * TD_KDA_THREADS;
    red[threadIdx.x] = sum;
    __syncthreads();
    float r = ((red[d] + red[TD_HEAD + d]) + red[2 * TD_HEAD + d]) + red[3 * TD_HEAD + d], u = beta * (v[d] - r);
    sum = 0.0f;
#pragma unroll
    for (int j = 0; j < TD_KDA_QUARTER; j++) {
        if (j % 4 == 0) {
            td_kda_load4(k + c0 + j, kc);
            if (OUTPUT) td_kda_load4(q + c0 + j, other);
        }
        m[j] = fmaf(kc[j % 4], u, m[j]);
        if (OUTPUT) sum = fmaf(other[j % 4], m[j], sum);
    }
    if (OUTPUT) o[threadIdx.x] = sum;
}

TD_DEVICE void td_kda_state_load(float m[TD_KDA_QUARTER], const float *state)
{
    state += threadIdx.x / TD_HEAD * TD_KDA_QUARTER * TD_HEAD + threadIdx.x % TD_HEAD;
#pragma unroll
    for (int j = 0; j < TD_KDA_QUARTER; j++) m[j] = state[j * TD_HEAD];
}

TD_DEVICE void td_kda_state_store(const float m[TD_KDA_QUARTER], float *state)
{
    state += threadIdx.x / TD_HEAD * TD_KDA_QUARTER * TD_HEAD + threadIdx.x % TD_HEAD;
#pragma unroll
    for (int j = 0; j < TD_KDA_QUARTER; j++) state[j * TD_HEAD] = m[j];
}

/* The 3 raw rows of this head's channels before row n_rows of [old 3; raw rows] go to the other parity. */
TD_DEVICE void td_kda_conv_write(const td_kda_call &a, const td_segment *segment, int head, int n_rows,
                                 const td_bf16 *raw, size_t stride)
{
    for (int i = threadIdx.x; i < (TD_CONV - 1) * 3 * TD_HEAD; i += blockDim.x) {
        int j = i / (3 * TD_HEAD), part = i / TD_HEAD % 3, t = n_rows - (TD_CONV - 1) + j;
        size_t channel = ((size_t)part * a.n_heads + head) * TD_HEAD + i % TD_HEAD;
        const td_bf16 *src =
            t < 0 ? td_kda_conv_at(a, segment, segment->parity, TD_CONV - 1 + t) : raw + (size_t)t * stride;
        td_kda_conv_at(a, segment, !segment->parity, j)[channel] = src[channel];
    }
}

/* kda_chunk.cu: the chunked segments of a window. */
td_status td_cuda_kda_chunked(td_cuda_dev *dev, const td_kda_call *a, int n_rows);

#endif
