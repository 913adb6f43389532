/* Number formats of checkpoints and caches: bf16, fp16, e4m3. All conversions round to nearest even; bits are the same
 * on every machine. Values are handled as float (exact for all three). Usable from C and from CUDA host code. */
#ifndef TD_BASE_NUM_H
#define TD_BASE_NUM_H

#include "base/status.h"

#include <string.h>

#ifdef __CUDACC__
#define TD_HD __host__ __device__
#else
#define TD_HD
#endif

typedef uint16_t td_bf16; /* bits of a bfloat16 */
typedef uint16_t td_f16;  /* bits of an IEEE binary16 */
typedef uint8_t td_e4m3;  /* bits of an FP8 e4m3, finite-only ("fn"): 0x7f is NaN, largest 448 */

TD_HD static inline float td_bits_f32(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

TD_HD static inline uint32_t td_f32_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

TD_HD static inline float td_bf16_f32(td_bf16 x)
{
    return td_bits_f32((uint32_t)x << 16);
}

TD_HD static inline td_bf16 td_f32_bf16(float x)
{
    uint32_t bits = td_f32_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (td_bf16)((bits >> 16) | 0x40u); /* NaN stays NaN */
    return (td_bf16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

TD_HD static inline float td_f16_f32(td_f16 h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
    if (exponent == 31) return td_bits_f32(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return td_bits_f32(sign | (exponent + 112) << 23 | mantissa << 13);
    float small = (float)mantissa * 0x1p-24f; /* zero and subnormals, exact */
    return sign ? -small : small;
}

TD_HD static inline td_f16 td_f32_f16(float x)
{
    uint32_t bits = td_f32_bits(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return (td_f16)(sign | 0x7e00u | ((rest >> 13) & 0x3ffu));
    if (rest >= 0x477ff000u) return (td_f16)(sign | 0x7c00u); /* 65520 and more: infinity */
    if (rest < 0x38800000u) { /* below 2^-14: let the addition of 0.5 do the rounding at 2^-24 */
        float scaled = td_bits_f32(rest) + 0.5f;
        return (td_f16)(sign | (td_f32_bits(scaled) - 0x3f000000u));
    }
    return (td_f16)(sign | ((rest + 0xfffu + ((rest >> 13) & 1u) - 0x38000000u) >> 13));
}

TD_HD static inline float td_e4m3_f32(td_e4m3 q)
{
    uint32_t sign = (uint32_t)(q & 0x80u) << 24, exponent = (q >> 3) & 15u, mantissa = q & 7u;
    if (exponent == 15 && mantissa == 7) return td_bits_f32(0x7fc00000u);
    if (exponent) return td_bits_f32(sign | (exponent + 120) << 23 | mantissa << 20);
    float small = (float)mantissa * 0x1p-9f;
    return sign ? -small : small;
}

/* Saturates at 448; NaN stays NaN. */
TD_HD static inline td_e4m3 td_f32_e4m3(float x)
{
    uint32_t bits = td_f32_bits(x), sign = bits >> 24 & 0x80u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return (td_e4m3)(sign | 0x7fu);
    if (rest >= 0x43e80000u) return (td_e4m3)(sign | 0x7eu); /* 464 rounds to 512 or more: keep the largest */
    if (rest < 0x3c800000u) {                                /* below 2^-6: the addition of 2^14 rounds at 2^-9 */
        float scaled = td_bits_f32(rest) + 16384.0f;
        return (td_e4m3)(sign | (td_f32_bits(scaled) - 0x46800000u));
    }
    return (td_e4m3)(sign | ((rest + 0x7ffffu + ((rest >> 20) & 1u) - 0x3c000000u) >> 20));
}

#endif
