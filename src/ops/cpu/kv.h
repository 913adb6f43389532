/* Rows of the KV pool: where they are and how they are coded. */
#ifndef TD_OPS_CPU_KV_H
#define TD_OPS_CPU_KV_H

#include "ops/cpu/cpu.h"
#include "ops/dsa.h"

enum { TD_KV_WIDTH_MAX = 512, TD_KV_FP8_EXTRA = 16, TD_POOLS_A_BLOCK = TD_BLOCK / TD_POOL };

/* Row of a position in the latent plane, and of a pool in the pool plane, through the slot's block table. */
static inline int64_t td_kv_latent_row(const td_dsa_cache *cache, int slot, int64_t pos)
{
    return (int64_t)cache->blocks[(size_t)slot * (size_t)cache->blocks_cap + (size_t)(pos / TD_BLOCK)] * TD_BLOCK +
           pos % TD_BLOCK;
}

static inline int64_t td_kv_pool_row(const td_dsa_cache *cache, int slot, int64_t pool)
{
    return (int64_t)cache->blocks[(size_t)slot * (size_t)cache->blocks_cap + (size_t)(pool / TD_POOLS_A_BLOCK)] *
               TD_POOLS_A_BLOCK +
           pool % TD_POOLS_A_BLOCK;
}

/* Element index of the index key of a position in the ring; the gate follows TD_HEAD elements later. */
static inline size_t td_kv_ring_at(const td_dsa_cache *cache, int slot, int64_t pos)
{
    return ((size_t)slot * (size_t)cache->ring_rows + (size_t)(pos % cache->ring_rows)) * 2 * TD_HEAD;
}

/* One row between fp32 and its stored form. x of a store is already rounded to act. */
void td_kv_store(const td_cpu_dev *dev, td_kv_format format, void *plane, int64_t row, int width, const float *x);
void td_kv_load(const td_cpu_dev *dev, td_kv_format format, const void *plane, int64_t row, int width, float *x);

/* Every segment lies inside the window, the ring and its block table. */
bool td_kv_window_fits(const td_window *window, const td_dsa_cache *cache);

#endif
