/* What the kernels of dense products share (linear_few.cu, linear_turns.cu, linear_many.cu, kda_gates.h): the arguments, and the
 * arithmetic of a group of 64 inputs, whose order of operations must be the same everywhere (weight.h). Decoding of q4
 * and fp8 gives exact bf16 numbers; scales are applied to fp32 sums. */
#ifndef TD_OPS_CUDA_PRODUCT_H
#define TD_OPS_CUDA_PRODUCT_H

#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"
#include "ops/cuda/weight.h"

/* The most rows of linear_few.cu; the rows of a block of linear_many.cu. */
enum { TD_FEW_ROWS = 64, TD_MANY_ROWS = 64 };

typedef struct td_product {
    const uint8_t *w;
    size_t w_batch, panel_bytes;
    int out, in, n_rows, n_panels, groups, slices;
    const td_bf16 *x;
    size_t x_stride, x_batch;
    td_bf16 *y_act;
    float *y_f32;
    size_t y_stride, y_batch;
    const uint4 *sums; /* q4, many rows: operands of the sums of x, [blocks][sums_tiles][32 lanes] */
    size_t sums_tiles; /* of eight rows, of whole tiles of TD_MANY_ROWS */
} td_product;

/* All give a row the same bits.
 *   few    linear_few.cu: up to TD_FEW_ROWS rows
 *   many   linear_many.cu: any number; q4 with p->sums filled by td_product_sums()
 *   apart  linear_many.cu: bf16, one matrix of so few outputs that its tiles would leave most of the GPU idle; every
 *          slice has tiles of its own, in `shares` ([slices][n_rows][out])
 *   turns  linear_turns.cu: q4, one matrix of many panels, up to eight rows
 * The last two say whether they are for this shape; then they have enqueued it. */
void td_product_few(const td_cuda_dev *dev, td_format format, const td_product *p, int n_batch);
void td_product_many(const td_cuda_dev *dev, td_format format, const td_product *p, int n_batch);
bool td_product_apart(const td_cuda_dev *dev, td_format format, const td_product *p, float *shares,
                      size_t shares_bytes);
void td_product_sums(const td_cuda_dev *dev, const td_product *p, uint4 *sums);
bool td_product_turns(const td_cuda_dev *dev, const td_product *p);
cudaError_t td_product_many_init(void);
cudaError_t td_product_turns_init(void);

TD_DEVICE void td_product_store(const td_product &p, int batch, int row, int out, float value)
{
    size_t at = (size_t)batch * p.y_batch + (size_t)row * p.y_stride + out;
    if (p.y_act)
        p.y_act[at] = td_to_bf16(value);
    else
        p.y_f32[at] = value;
}

/* One step's A operand of q4 from a lane's word, exact. */
TD_DEVICE void td_decode_q4(uint32_t word, uint32_t a[4])
{
    const uint32_t magic = 0x43004300u; /* bf16 128: its last mantissa bit counts 1 */
    __nv_bfloat162 base = *(const __nv_bfloat162 *)&magic;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        uint32_t v = td_and_or(word >> 4 * r, 0x000f000fu, magic);
        __nv_bfloat162 q = __hsub2(*(__nv_bfloat162 *)&v, base);
        a[r] = *(uint32_t *)&q;
    }
}

/* One step's A operand of fp8 from two of a lane's words, exact. */
TD_DEVICE void td_decode_fp8(uint32_t w0, uint32_t w1, uint32_t a[4])
{
    a[0] = td_e4m3_pair(w0);
    a[1] = td_e4m3_pair(w0 << 8);
    a[2] = td_e4m3_pair(w1);
    a[3] = td_e4m3_pair(w1 << 8);
}

/* 16-byte loads a lane makes for a group. */
template <int FORMAT> struct td_pieces {
    static const int N = FORMAT == TD_W_BF16 ? 4 : FORMAT == TD_W_FP8 ? 2 : 1;
};

template <int FORMAT> TD_DEVICE void td_decode(const uint4 *raw, int step, uint32_t a[4])
{
    if (FORMAT == TD_W_BF16) {
        a[0] = raw[step].x;
        a[1] = raw[step].y;
        a[2] = raw[step].z;
        a[3] = raw[step].w;
    } else if (FORMAT == TD_W_FP8) {
        uint4 v = raw[step / 2];
        td_decode_fp8(step % 2 ? v.z : v.x, step % 2 ? v.w : v.y, a);
    } else {
        uint4 v = raw[0];
        td_decode_q4(step == 0 ? v.x : step == 1 ? v.y : step == 2 ? v.z : v.w, a);
    }
}

/* y = fma(s, dot, y) for outputs g and g + 8, whose scales are the halves of `scales`. */
TD_DEVICE void td_fold_q4(float acc[4], const float dot[4], uint32_t scales)
{
    float s0 = td_low_bf16(scales), s1 = td_high_bf16(scales);
    acc[0] = fmaf(s0, dot[0], acc[0]);
    acc[1] = fmaf(s0, dot[1], acc[1]);
    acc[2] = fmaf(s1, dot[2], acc[2]);
    acc[3] = fmaf(s1, dot[3], acc[3]);
}

/* Offsets (weight.h): of a block of up to eight groups, sum over groups of b * (sum of the group's x), as steps of the
 * tensor core after the block's last group. k = 2t is group t of the block, 2t + 1 group t + 4, so that a lane's
 * operands come from two groups' pairs.
 *
 * Sums of group j of its block, by steps with ones for B. As A, the 16 bytes of x that two steps have for B are two
 * rows: what they add up to is added last, and no value has to move. A lane keeps two groups of row g: t and t + 4. */
TD_DEVICE void td_group_sums(const uint32_t b[8], int j, float own[2])
{
    const uint32_t ones = 0x3f803f80u;
    float c[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    td_mma_bf16(c, b, ones, ones);
    td_mma_bf16(c, b + 4, ones, ones);
    bool mine = (int)threadIdx.x % 4 == j % 4;
    float sum = c[0] + c[2];
    if (j < 4)
        own[0] = mine ? sum : own[0];
    else
        own[1] = mine ? sum : own[1];
}

/* A block's sums, zeros where there is no group, as B operands: three bf16 parts, which are all 24 bits (a finite sum of bf16
 * numbers has none below the last part's). */
TD_DEVICE void td_sums_operand(const float own[2], uint32_t parts[3])
{
    float x0 = own[0], x1 = own[1];
#pragma unroll
    for (int i = 0; i < 3; i++) {
        parts[i] = td_pack_bf16(x0, x1);
        x0 -= td_low_bf16(parts[i]);
        x1 -= td_high_bf16(parts[i]);
    }
}

/* Scales and offsets of groups t and t + 4, outputs g (x) and g + 8 (y), as they are stored. */
TD_DEVICE void td_offsets_operand(uint2 low, uint2 high, uint32_t a[2])
{
    a[0] = __byte_perm(low.x, high.x, 0x7632);
    a[1] = __byte_perm(low.y, high.y, 0x7632);
}

TD_DEVICE uint32_t td_scales_of(uint2 pair)
{
    return __byte_perm(pair.x, pair.y, 0x5410);
}

TD_DEVICE void td_fold_offsets(float acc[4], const uint32_t offsets[2], const uint32_t sums[3])
{
    const uint32_t a[4] = { offsets[0], offsets[1], offsets[0], offsets[1] };
    td_mma_bf16(acc, a, sums[0], sums[1]);
    td_mma_bf16_half(acc, offsets, sums[2]);
}

/* B operand of a group: two pieces of row x; b[2 step], b[2 step + 1]. Zeros beyond `in`, unless it fills all groups.
 */
template <bool FULL> TD_DEVICE void td_load_x(const td_bf16 *x, int k, int in, uint32_t b[8])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (FULL || k + 32 * half < in) v = *(const uint4 *)(x + k + 32 * half);
        b[4 * half] = v.x;
        b[4 * half + 1] = v.y;
        b[4 * half + 2] = v.z;
        b[4 * half + 3] = v.w;
    }
}

/* A group's steps for all tiles of rows, onto c. */
template <int FORMAT, int NT> TD_DEVICE void td_few_steps(const uint4 *raw, const uint32_t b[NT][8], float c[NT][4])
{
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t a[4];
        td_decode<FORMAT>(raw, step, a);
#pragma unroll
        for (int nt = 0; nt < NT; nt++) td_mma_bf16(c[nt], a, b[nt][2 * step], b[nt][2 * step + 1]);
    }
}

/* A slice of a single group, onto acc; pair: of q4. */
template <int FORMAT>
TD_DEVICE void td_lone_group(const uint4 *raw, uint2 pair, const uint32_t b[1][8], float acc[1][4])
{
    if constexpr (FORMAT != TD_W_Q4) {
        td_few_steps<FORMAT, 1>(raw, b, acc);
    } else {
        float dot[1][4] = { { 0.0f, 0.0f, 0.0f, 0.0f } }, own[2] = { 0.0f, 0.0f };
        uint32_t sums[3], offsets[2];
        td_group_sums(b[0], 0, own);
        td_sums_operand(own, sums);
        td_few_steps<FORMAT, 1>(raw, b, dot);
        td_fold_q4(acc[0], dot[0], td_scales_of(pair));
        td_offsets_operand(threadIdx.x % 4 == 0 ? pair : make_uint2(0, 0), make_uint2(0, 0), offsets);
        td_fold_offsets(acc[0], offsets, sums);
    }
}

#endif
