/* Rows of the KV pool: where they are and how they are coded. */
#ifndef TD_OPS_CPU_KV_H
#define TD_OPS_CPU_KV_H

#include "ops/cpu/cpu.h"
#include "ops/dsa.h"
#include "ops/simd.h"

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

/* Sixteen values of a stored row from value i on. kind: constant after inlining, so that loops over a row are straight
 * code. scale: of the row for TD_KV_ROW_FP8 (td_kv_scale), else not used. */
typedef enum td_kv_kind { TD_KV_ROW_F32, TD_KV_ROW_BF16, TD_KV_ROW_FP8 } td_kv_kind;

static inline td_kv_kind td_kv_kind_of(const td_cpu_dev *dev, td_kv_format format)
{
    return format == TD_KV_FP8 ? TD_KV_ROW_FP8 : dev->base.exact_fp32 ? TD_KV_ROW_F32 : TD_KV_ROW_BF16;
}

TD_INLINE td_v16 td_kv_values(td_kv_kind kind, const uint8_t *row, size_t i, float scale)
{
    switch (kind) {
    case TD_KV_ROW_F32: return td_v16_load((const float *)(const void *)row + i);
    case TD_KV_ROW_BF16: return td_v16_load_bf16((const uint16_t *)(const void *)row + i);
    default: return td_v16_mul(td_v16_splat(scale), td_v16_load_e4m3(row + i));
    }
}

/* What codes read by td_v16_load_e4m3 (value * 2^-8) are multiplied with. */
static inline float td_kv_scale(const uint8_t *row, int width)
{
    uint32_t bits = 0;
    for (int i = 0; i < 4; i++) bits |= (uint32_t)row[width + i] << 8 * i;
    return td_bits_f32(bits) * 256.0f;
}

/* Every segment lies inside the window, the ring and its block table. */
bool td_kv_window_fits(const td_window *window, const td_dsa_cache *cache);

#endif
