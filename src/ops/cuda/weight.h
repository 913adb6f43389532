/* Packed form of a dense weight on the GPU. Panels of 16 outputs; a panel is cut along the inputs in groups of 64,
 * stored so that one 16-byte load of a lane is its part of the A operand (device.h):
 *   bf16  group: 4 steps of 16 inputs, each 32 lanes x 16 bytes
 *   fp8   panel: 16 fp32 scales first; group: 2 halves of 32 inputs, each 32 lanes x 16 codes
 *   q4    group: 16 words (scale | offset << 16, bf16), outputs g and g + 8 beside each other; then 32 lanes x 16
 *         bytes, a word a step
 * A step's "input 2t, 2t+1, 2t+8, 2t+9" are, in memory of x, four values in a row: input 64 G + 32 h + 8 t + i of step
 * 2 h + i / 4 (i = 0..7), so that a lane reads x in 16-byte pieces too. Inputs beyond `in` are zeros.
 *
 * Sums. `in` is cut into slices of whole groups; a slice is one chain of tensor-core steps from +0; slices are added in
 * order. The cut depends on `in` alone. q4: a chain from +0 a group, then y = fma(s, dot, y); after every eight groups
 * of a slice, and its last, tensor-core steps add their offsets' part, b times the sums of x (product.h).
 */
#ifndef TD_OPS_CUDA_WEIGHT_H
#define TD_OPS_CUDA_WEIGHT_H

#include "base/num.h"
#include "ops/linear.h"

enum {
    TD_TILE_OUT = 16,
    TD_TILE_IN = 64,
    TD_BF16_GROUP = 2048,
    TD_FP8_GROUP = 1024,
    TD_Q4_SCALES = 64,
    TD_Q4_GROUP_ALL = TD_Q4_SCALES + 512,
    TD_FP8_HEAD = 64,
    TD_SLICES_MAX = 8,
    TD_BLOCK_GROUPS = 8
};

TD_HD static inline int td_groups(int in)
{
    return (in + TD_TILE_IN - 1) / TD_TILE_IN;
}

TD_HD static inline size_t td_group_bytes(td_format format)
{
    return format == TD_W_BF16 ? TD_BF16_GROUP : format == TD_W_FP8 ? TD_FP8_GROUP : TD_Q4_GROUP_ALL;
}

TD_HD static inline size_t td_gpu_panel_bytes(td_format format, int in)
{
    return (format == TD_W_FP8 ? TD_FP8_HEAD : 0) + (size_t)td_groups(in) * td_group_bytes(format);
}

/* 1, 2, 4 or 8, a group at least each. Slice s is groups [groups * s / slices, groups * (s + 1) / slices). */
TD_HD static inline int td_slices(int groups)
{
    return groups >= 8 ? 8 : groups >= 4 ? 4 : groups >= 2 ? 2 : 1;
}

/* Blocks of up to TD_BLOCK_GROUPS groups, in all slices: what q4 adds offsets after. */
TD_HD static inline int td_blocks(int groups)
{
    int slices = td_slices(groups), n = 0;
    for (int s = 0; s < slices; s++)
        n += (groups * (s + 1) / slices - groups * s / slices + TD_BLOCK_GROUPS - 1) / TD_BLOCK_GROUPS;
    return n;
}

/* Where output o (0..15) of input k (0..63) of a group sits: step, lane, register of A, half of the register. */
typedef struct td_place {
    int step, lane, reg, half;
} td_place;

TD_HD static inline td_place td_place_of(int o, int k)
{
    int i = k % 8;
    td_place p = { 2 * (k / 32) + i / 4, (o % 8) * 4 + k % 32 / 8, i % 4 / 2 * 2 + o / 8, i % 2 };
    return p;
}

#endif
