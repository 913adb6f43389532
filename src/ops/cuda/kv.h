/* Rows of the KV pool on the GPU: where they are and how they are coded. The host half checks windows. */
#ifndef TD_OPS_CUDA_KV_H
#define TD_OPS_CUDA_KV_H

#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"

enum { TD_KV_WIDTH = 512, TD_KV_TAIL = 16, TD_POOLS_A_TABLE_BLOCK = TD_BLOCK / TD_POOL };

/* Bytes of a row of `width` values; as td_kv_row_bytes(). */
TD_HD static inline size_t td_kv_bytes(td_kv_format format, int width)
{
    return format == TD_KV_FP8 ? (size_t)width + TD_KV_TAIL : (size_t)width * sizeof(td_bf16);
}

/* Row of a position in the latent plane, and of a pool in the pool plane, through the slot's block table. */
TD_DEVICE int64_t td_latent_row(const td_dsa_cache &c, int slot, int64_t pos)
{
    return (int64_t)c.blocks[(size_t)slot * c.blocks_cap + (size_t)(pos / TD_BLOCK)] * TD_BLOCK + pos % TD_BLOCK;
}

TD_DEVICE int64_t td_pool_row(const td_dsa_cache &c, int slot, int64_t pool)
{
    return (int64_t)c.blocks[(size_t)slot * c.blocks_cap + (size_t)(pool / TD_POOLS_A_TABLE_BLOCK)] *
               TD_POOLS_A_TABLE_BLOCK +
           pool % TD_POOLS_A_TABLE_BLOCK;
}

/* Element index of the index key of a position in the ring; the gate follows TD_HEAD elements later. */
TD_DEVICE size_t td_ring_at(const td_dsa_cache &c, int slot, int64_t pos)
{
    return ((size_t)slot * c.ring_rows + (size_t)(pos % c.ring_rows)) * 2 * TD_HEAD;
}

/* scale = 2^(e - 8) for the largest value m * 2^e, 1/2 <= m < 1: codes reach 128 .. 256, nothing saturates. */
TD_DEVICE float td_kv_scale(float max)
{
    if (!(max >= 6.01853107621011e-36f)) return 1.0f; /* 2^-117: zeros, and what would need a subnormal scale */
    return __uint_as_float(((__float_as_uint(max) >> 23) - 126 - 8 + 127) << 23);
}

/* Every segment lies inside the window, the ring and its block table. */
static inline bool td_cuda_kv_fits(const td_window *window, const td_dsa_cache *cache)
{
    if (cache->kv_lora < 16 || cache->kv_lora > TD_KV_WIDTH || cache->kv_lora % 16 || cache->ring_rows < 1)
        return false;
    for (int i = 0; i < window->n_segments; i++) {
        const td_segment *s = window->host_segments + i;
        if (s->n_rows < 0 || s->first_row < 0 || s->n_rows > window->n_rows - s->first_row) return false;
        if (s->n_rows && (s->pos < 0 || s->slot < 0 || s->n_rows + TD_POOL - 1 > cache->ring_rows ||
                          ((int64_t)s->pos + s->n_rows - 1) / TD_BLOCK >= cache->blocks_cap))
            return false;
    }
    return true;
}

#endif
