/* Products of routed experts: how inputs are cut into slices, and the decoding of 4-bit mcg tiles, for
 * experts_product.cu and experts_few.cu. */
#ifndef TD_OPS_CUDA_EXPERTS_TILE_H
#define TD_OPS_CUDA_EXPERTS_TILE_H

#include "ops/cuda/experts.h"

/* Slices that k inputs are cut into; a slice is one chain of steps, slices are added in order. */
static inline int td_expert_slices(int k)
{
    return k >= 2048 ? 8 : k >= 512 ? 4 : k >= 256 ? 2 : 1;
}

/* 64 bits of a stream, of which a lane decodes the last 32: 16-bit states that end at each of their eight nibbles. As
 * windows of 32 bits that hold two of them: end 4, 5, 6 and 7 nibbles behind `before`. */
TD_DEVICE uint32_t td_mcg4_window(uint32_t word, uint32_t before, int i)
{
    return i == 3 ? word : __funnelshift_r(word, before, 12 - 4 * i);
}

/* Products of a window's two states with the codebook's multiplier. The lower one is cut out by subtracting the upper
 * one's part from the product of both: multiplications are what there is room for. */
TD_DEVICE void td_mcg4_products(uint32_t window, uint32_t *upper, uint32_t *lower)
{
    *upper = (window >> 16) * TD_EXL3_MCG_MARK;
    *lower = window * TD_EXL3_MCG_MARK - *upper * 65536u;
}

/* Adds the halves of every register of an A operand, which is a product with a matrix of ones. A sum is exact before it
 * is rounded to nearest, so these are the bits of one addition (experts_check.cu looks at all states, opcheck at all
 * weights). A lane gets the sums of its own registers: of a[0] and a[2], and of a[1] and a[3]. */
typedef struct td_pair_sums {
    uint32_t b[2]; /* the ones of this lane */
} td_pair_sums;

TD_DEVICE td_pair_sums td_pair_sums_init()
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    return { { g == 2 * t ? 0x3c003c00u : 0, g == 2 * t + 1 ? 0x3c003c00u : 0 } };
}

TD_DEVICE void td_pair_sum(const td_pair_sums &ones, const uint32_t a[4], uint32_t sums[2])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%8};"
        : "=r"(sums[0]), "=r"(sums[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(ones.b[0]), "r"(ones.b[1]), "r"(0));
}

/* A half of the A operand of a step from the lanes' words and the words before: a[0], a[1] (half 0) or a[2], a[3]. */
TD_DEVICE void td_decode_mcg4_half(const td_pair_sums &ones, uint32_t word, uint32_t before, int half, uint32_t a[4])
{
    uint32_t p[4];
#pragma unroll
    for (int i = 0; i < 2; i++) td_mcg4_products(td_mcg4_window(word, before, 2 * half + i), &p[2 * i], &p[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < 4; i++) p[i] = td_and_xor(p[i], 0x8fff8fffu, 0x3b603b60u);
    td_pair_sum(ones, p, a + 2 * half);
}

TD_DEVICE void td_decode_mcg4(const td_pair_sums &ones, uint32_t word, uint32_t before, uint32_t a[4])
{
    td_decode_mcg4_half(ones, word, before, 0, a);
    td_decode_mcg4_half(ones, word, before, 1, a);
}

/* The word before a lane's four. */
TD_DEVICE uint32_t td_mcg4_before(uint4 words)
{
    return __shfl_sync(0xffffffffu, words.w, (threadIdx.x + 28) & 31);
}

/* Word i of four; i: known to the compiler. */
TD_DEVICE uint32_t td_word(uint4 words, int i)
{
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

#endif
