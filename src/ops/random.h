/* Values out of nothing, made where the device wants them: models of full size without a checkpoint (tandem bench full)
 * need tens of gigabytes of them. A value is a function of seed and index alone, in integers and at most one rounded
 * multiplication, so every device makes the same bits. */
#ifndef TD_OPS_RANDOM_H
#define TD_OPS_RANDOM_H

#include "ops/dev.h"

TD_BEGIN_C

typedef enum td_random_kind {
    TD_RANDOM_BITS,  /* uint16_t: every bit by chance, as trellis words are */
    TD_RANDOM_BF16,  /* bell-shaped around 0 with deviation `scale`, at most 4.9 of them */
    TD_RANDOM_F32,   /* the same as fp32 */
    TD_RANDOM_SIGNS, /* f16: a sign by chance, size 0.75 to 1.25 times `scale`, as the scales of EXL3 are */
    TD_RANDOM_KV_FP8 /* cached rows (docs/kv-pool.md) of bell-shaped values; `scale` is a power of two */
} td_random_kind;

typedef struct td_random_args {
    td_random_kind kind;
    uint64_t seed;
    float scale;
    int width; /* of a cached row: values; bytes follow from it */
    size_t n;  /* values; cached rows */
    void *out; /* device-visible, aligned to 4 bytes */
} td_random_args;

/* Enqueued like an operation. TD_EINVAL: no such kind, a width that is not a multiple of 16. */
td_status td_random_fill(td_dev *dev, const td_random_args *a);

/* One device's half of it. */
td_status td_cpu_random_fill(td_dev *dev, const td_random_args *a);
td_status td_cuda_random_fill(td_dev *dev, const td_random_args *a);

/* ---- value i of a seed ---- */

enum { TD_RANDOM_KV_TAIL = 16, TD_RANDOM_KV_MOST = 240 };

TD_HD static inline uint64_t td_random_bits(uint64_t seed, uint64_t i)
{
    uint64_t z = seed + (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* The sum of eight bytes, centred: bell-shaped enough for weights, deviation 1 after the division. */
TD_HD static inline float td_random_bell(uint64_t seed, uint64_t i, float scale)
{
    uint64_t bits = td_random_bits(seed, i);
    uint64_t pairs = (bits & 0x00ff00ff00ff00ffu) + (bits >> 8 & 0x00ff00ff00ff00ffu);
    int sum = (int)((pairs & 0xffff) + (pairs >> 16 & 0xffff) + (pairs >> 32 & 0xffff) + (pairs >> 48));
    return (float)(sum - 1020) * scale;
}

/* What td_random_bell() is scaled with for a deviation of `scale`: sqrt(8 (256^2 - 1) / 12) = 209.02. */
TD_HD static inline float td_random_bell_scale(float scale)
{
    return scale * 0.0047842f;
}

TD_HD static inline td_f16 td_random_sign(uint64_t seed, uint64_t i, float scale)
{
    uint64_t bits = td_random_bits(seed, i);
    float size = (float)(768 + (int)(bits & 511)) * (1.0f / 1024);
    return (td_f16)(td_f32_f16(size * scale) | (bits >> 63 ? 0x8000u : 0u));
}

/* Byte `at` of a cached row of `width` values: codes of deviation 64 (the largest lie near 240, as the format asks of a
 * row of normed values), the row's scale, zeros. */
TD_HD static inline uint8_t td_random_kv_byte(uint64_t seed, uint64_t row, int at, int width, float scale)
{
    if (at >= width + 4) return 0;
    if (at >= width) return (uint8_t)(td_f32_bits(scale * (1.0f / 64)) >> (8 * (at - width)));
    float code = td_random_bell(seed, row * (uint64_t)width + (uint64_t)at, td_random_bell_scale(64.0f));
    if (code > TD_RANDOM_KV_MOST) code = TD_RANDOM_KV_MOST;
    if (code < -TD_RANDOM_KV_MOST) code = -TD_RANDOM_KV_MOST;
    return td_f32_e4m3(code);
}

TD_END_C
#endif
