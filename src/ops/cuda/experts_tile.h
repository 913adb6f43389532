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

/* The sum of the halves of a product, which is a state's value, in both halves. A product's own halves are operands of
 * one addition: that leaves one byte permute a pair instead of two to the integer units, which are the limit here. */
TD_DEVICE uint32_t td_halves_sum(uint32_t product)
{
    uint32_t masked = td_and_xor(product, 0x8fff8fffu, 0x3b603b60u);
    __half2 h = *(__half2 *)&masked, v = __hadd2(__low2half2(h), __high2half2(h));
    return *(uint32_t *)&v;
}

/* Products of two states with the codebook's multiplier -> their two values. */
TD_DEVICE uint32_t td_halves_pair(uint32_t p0, uint32_t p1)
{
    return __byte_perm(td_halves_sum(p0), td_halves_sum(p1), 0x5410);
}

/* A lane's eight values of a 4-bit mcg tile from its word and the word of the lane before. States are cut out at whole
 * bytes, one byte permute each; shifting left and what is done by multiplying costs the integer units nothing. 21 of
 * the 39 instructions are theirs, at half rate on Hopper. */
TD_DEVICE void td_decode_mcg4(uint32_t word, uint32_t before, uint32_t a[4])
{
    const uint32_t mark = TD_EXL3_MCG_MARK;
    uint32_t across = __funnelshift_r(word, before, 20), across_up = across * 16u, word_up = word * 16u;
    uint32_t high = word >> 16, low_product = word * mark + high * (mark * 0xffff0000u); /* (word & 0xffff) * mark */
    a[0] = td_halves_pair(__byte_perm(across, 0, 0x4421) * mark, __byte_perm(across_up, 0, 0x4421) * mark);
    a[2] = td_halves_pair((across & 0xffffu) * mark, high * mark);
    a[1] = td_halves_pair(__byte_perm(word_up, 0, 0x4432) * mark, __byte_perm(word, 0, 0x4421) * mark);
    a[3] = td_halves_pair(__byte_perm(word_up, 0, 0x4421) * mark, low_product);
}

#endif
