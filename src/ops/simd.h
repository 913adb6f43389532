/* Sixteen fp32 lanes: two AVX registers, four NEON registers, or an array. Every function does the same IEEE operation
 * in each lane, so the three forms have equal bits. Sixteen because that is a panel of outputs (ops/cpu/panel.h) and
 * because sums over long vectors are defined as 16 interleaved chains and a tree (docs/arithmetic.md). */
#ifndef TD_OPS_SIMD_H
#define TD_OPS_SIMD_H

#include "base/num.h"

#include <math.h>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define TD_SIMD_AVX2 1
#include <immintrin.h>
#elif defined(__aarch64__)
#define TD_SIMD_NEON 1
#include <arm_neon.h>
#endif

/* Loops whose trip count is a constant after inlining: arrays of td_v16 then live in registers. */
#if defined(__clang__)
#define TD_UNROLL _Pragma("unroll")
#else
#define TD_UNROLL _Pragma("GCC unroll 16")
#endif
#define TD_INLINE static inline __attribute__((always_inline))

enum { TD_LANES = 16 };

#if defined(TD_SIMD_AVX2)

typedef struct td_v16 {
    __m256 a, b; /* lanes 0..7, 8..15 */
} td_v16;

TD_INLINE td_v16 td_v16_splat(float x)
{
    return (td_v16){ _mm256_set1_ps(x), _mm256_set1_ps(x) };
}

TD_INLINE td_v16 td_v16_load(const float *p)
{
    return (td_v16){ _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8) };
}

TD_INLINE void td_v16_store(float *p, td_v16 x)
{
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}

TD_INLINE td_v16 td_v16_add(td_v16 x, td_v16 y)
{
    return (td_v16){ _mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b) };
}

TD_INLINE td_v16 td_v16_mul(td_v16 x, td_v16 y)
{
    return (td_v16){ _mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b) };
}

/* x * y + z, rounded once */
TD_INLINE td_v16 td_v16_fma(td_v16 x, td_v16 y, td_v16 z)
{
    return (td_v16){ _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b) };
}

/* Panel order (16 bf16 in 8 words of 32 bits): word j holds lane j in its low half, lane 8 + j in its high half. */
TD_INLINE td_v16 td_v16_load_panel_bf16(const uint16_t *p)
{
    __m256i w = _mm256_loadu_si256((const __m256i *)p);
    return (td_v16){ _mm256_castsi256_ps(_mm256_slli_epi32(w, 16)),
                     _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xffff0000))) };
}

/* Natural order: 16 bf16, 16 binary16. */
TD_INLINE td_v16 td_v16_load_bf16(const uint16_t *p)
{
    __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8)));
    return (td_v16){ _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)) };
}

TD_INLINE td_v16 td_v16_load_f16(const uint16_t *p)
{
    return (td_v16){ _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                     _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))) };
}

/* Each lane rounded to bf16, as the upper half of its bits (td_f32_bf16); the lower half is not cleared. */
TD_INLINE __m256i td_bf16_bits8(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

TD_INLINE td_v16 td_v16_round_bf16(td_v16 x)
{
    __m256i mask = _mm256_set1_epi32((int)0xffff0000);
    return (td_v16){ _mm256_castsi256_ps(_mm256_and_si256(td_bf16_bits8(x.a), mask)),
                     _mm256_castsi256_ps(_mm256_and_si256(td_bf16_bits8(x.b), mask)) };
}

TD_INLINE void td_v16_store_bf16(uint16_t *p, td_v16 x)
{
    __m256i a = _mm256_srli_epi32(td_bf16_bits8(x.a), 16), b = _mm256_srli_epi32(td_bf16_bits8(x.b), 16);
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8));
}

/* Each lane rounded to binary16 and back. */
TD_INLINE td_v16 td_v16_round_f16(td_v16 x)
{
    return (td_v16){ _mm256_cvtph_ps(_mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT)),
                     _mm256_cvtph_ps(_mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT)) };
}

/* 16 e4m3 codes as value * 2^-8: the code's bits moved into a half float, whose subnormals convert exactly. The NaN
 * code is not one here. */
TD_INLINE td_v16 td_v16_load_e4m3(const uint8_t *p)
{
    __m256i w = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 8);
    w = _mm256_and_si256(_mm256_srai_epi16(w, 1), _mm256_set1_epi16((short)0xbf80));
    return (td_v16){ _mm256_cvtph_ps(_mm256_castsi256_si128(w)), _mm256_cvtph_ps(_mm256_extracti128_si256(w, 1)) };
}

/* Four bits of each of 16 words, from bit 4 * nibble on, as floats 0..15. */
typedef struct td_w16 {
    __m256i a, b;
} td_w16;

TD_INLINE td_w16 td_w16_load(const uint8_t *p)
{
    return (td_w16){ _mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32)) };
}

TD_INLINE td_v16 td_w16_nibble(td_w16 w, int nibble)
{
    __m256i mask = _mm256_set1_epi32(15);
    return (td_v16){ _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(w.a, 4 * nibble), mask)),
                     _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(w.b, 4 * nibble), mask)) };
}

/* Sum of the lanes as a tree: lane l with l + 8, then l + 4, l + 2, l + 1. */
TD_INLINE float td_v16_sum(td_v16 x)
{
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}

#elif defined(TD_SIMD_NEON)

typedef struct td_v16 {
    float32x4_t a, b, c, d;
} td_v16;

TD_INLINE td_v16 td_v16_splat(float x)
{
    float32x4_t v = vdupq_n_f32(x);
    return (td_v16){ v, v, v, v };
}

TD_INLINE td_v16 td_v16_load(const float *p)
{
    return (td_v16){ vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12) };
}

TD_INLINE void td_v16_store(float *p, td_v16 x)
{
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}

TD_INLINE td_v16 td_v16_add(td_v16 x, td_v16 y)
{
    return (td_v16){ vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b), vaddq_f32(x.c, y.c), vaddq_f32(x.d, y.d) };
}

TD_INLINE td_v16 td_v16_mul(td_v16 x, td_v16 y)
{
    return (td_v16){ vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b), vmulq_f32(x.c, y.c), vmulq_f32(x.d, y.d) };
}

TD_INLINE td_v16 td_v16_fma(td_v16 x, td_v16 y, td_v16 z)
{
    return (td_v16){ vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c),
                     vfmaq_f32(z.d, x.d, y.d) };
}

TD_INLINE td_v16 td_v16_load_panel_bf16(const uint16_t *p)
{
    uint32x4_t w0 = vreinterpretq_u32_u16(vld1q_u16(p)), w1 = vreinterpretq_u32_u16(vld1q_u16(p + 8));
    uint32x4_t mask = vdupq_n_u32(0xffff0000u);
    return (td_v16){ vreinterpretq_f32_u32(vshlq_n_u32(w0, 16)), vreinterpretq_f32_u32(vshlq_n_u32(w1, 16)),
                     vreinterpretq_f32_u32(vandq_u32(w0, mask)), vreinterpretq_f32_u32(vandq_u32(w1, mask)) };
}

TD_INLINE td_v16 td_v16_load_bf16(const uint16_t *p)
{
    uint16x8_t lo = vld1q_u16(p), hi = vld1q_u16(p + 8);
    return (td_v16){ vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(lo), 16)),
                     vreinterpretq_f32_u32(vshll_high_n_u16(lo, 16)),
                     vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(hi), 16)),
                     vreinterpretq_f32_u32(vshll_high_n_u16(hi, 16)) };
}

TD_INLINE td_v16 td_v16_load_f16(const uint16_t *p)
{
    float16x8_t lo = vreinterpretq_f16_u16(vld1q_u16(p)), hi = vreinterpretq_f16_u16(vld1q_u16(p + 8));
    return (td_v16){ vcvt_f32_f16(vget_low_f16(lo)), vcvt_high_f32_f16(lo), vcvt_f32_f16(vget_low_f16(hi)),
                     vcvt_high_f32_f16(hi) };
}

TD_INLINE uint32x4_t td_bf16_bits4(float32x4_t x)
{
    uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vbslq_u32(vceqq_f32(x, x), rounded, vorrq_u32(bits, vdupq_n_u32(0x400000)));
}

TD_INLINE float32x4_t td_round_bf16_4(float32x4_t x)
{
    return vreinterpretq_f32_u32(vandq_u32(td_bf16_bits4(x), vdupq_n_u32(0xffff0000u)));
}

TD_INLINE td_v16 td_v16_round_bf16(td_v16 x)
{
    return (td_v16){ td_round_bf16_4(x.a), td_round_bf16_4(x.b), td_round_bf16_4(x.c), td_round_bf16_4(x.d) };
}

TD_INLINE void td_v16_store_bf16(uint16_t *p, td_v16 x)
{
    vst1_u16(p, vshrn_n_u32(td_bf16_bits4(x.a), 16));
    vst1_u16(p + 4, vshrn_n_u32(td_bf16_bits4(x.b), 16));
    vst1_u16(p + 8, vshrn_n_u32(td_bf16_bits4(x.c), 16));
    vst1_u16(p + 12, vshrn_n_u32(td_bf16_bits4(x.d), 16));
}

TD_INLINE td_v16 td_v16_round_f16(td_v16 x)
{
    return (td_v16){ vcvt_f32_f16(vcvt_f16_f32(x.a)), vcvt_f32_f16(vcvt_f16_f32(x.b)), vcvt_f32_f16(vcvt_f16_f32(x.c)),
                     vcvt_f32_f16(vcvt_f16_f32(x.d)) };
}

TD_INLINE td_v16 td_v16_load_e4m3(const uint8_t *p)
{
    uint8x16_t codes = vld1q_u8(p);
    uint16x8_t mask = vdupq_n_u16(0xbf80);
    uint16x8_t lo = vshll_n_u8(vget_low_u8(codes), 8), hi = vshll_n_u8(vget_high_u8(codes), 8);
    lo = vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16(vreinterpretq_s16_u16(lo), 1)), mask);
    hi = vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16(vreinterpretq_s16_u16(hi), 1)), mask);
    float16x8_t l = vreinterpretq_f16_u16(lo), h = vreinterpretq_f16_u16(hi);
    return (td_v16){ vcvt_f32_f16(vget_low_f16(l)), vcvt_high_f32_f16(l), vcvt_f32_f16(vget_low_f16(h)),
                     vcvt_high_f32_f16(h) };
}

typedef struct td_w16 {
    uint32x4_t a, b, c, d;
} td_w16;

TD_INLINE td_w16 td_w16_load(const uint8_t *p)
{
    return (td_w16){ vreinterpretq_u32_u8(vld1q_u8(p)), vreinterpretq_u32_u8(vld1q_u8(p + 16)),
                     vreinterpretq_u32_u8(vld1q_u8(p + 32)), vreinterpretq_u32_u8(vld1q_u8(p + 48)) };
}

TD_INLINE td_v16 td_w16_nibble(td_w16 w, int nibble)
{
    int32x4_t shift = vdupq_n_s32(-4 * nibble);
    uint32x4_t mask = vdupq_n_u32(15);
    return (td_v16){ vcvtq_f32_u32(vandq_u32(vshlq_u32(w.a, shift), mask)),
                     vcvtq_f32_u32(vandq_u32(vshlq_u32(w.b, shift), mask)),
                     vcvtq_f32_u32(vandq_u32(vshlq_u32(w.c, shift), mask)),
                     vcvtq_f32_u32(vandq_u32(vshlq_u32(w.d, shift), mask)) };
}

TD_INLINE float td_v16_sum(td_v16 x)
{
    float32x4_t t = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    float32x2_t s = vadd_f32(vget_low_f32(t), vget_high_f32(t));
    return vget_lane_f32(s, 0) + vget_lane_f32(s, 1);
}

#else

typedef struct td_v16 {
    float l[TD_LANES];
} td_v16;

TD_INLINE td_v16 td_v16_splat(float x)
{
    td_v16 v;
    for (int i = 0; i < TD_LANES; i++) v.l[i] = x;
    return v;
}

TD_INLINE td_v16 td_v16_load(const float *p)
{
    td_v16 v;
    memcpy(v.l, p, sizeof v.l);
    return v;
}

TD_INLINE void td_v16_store(float *p, td_v16 x)
{
    memcpy(p, x.l, sizeof x.l);
}

TD_INLINE td_v16 td_v16_add(td_v16 x, td_v16 y)
{
    for (int i = 0; i < TD_LANES; i++) x.l[i] += y.l[i];
    return x;
}

TD_INLINE td_v16 td_v16_mul(td_v16 x, td_v16 y)
{
    for (int i = 0; i < TD_LANES; i++) x.l[i] *= y.l[i];
    return x;
}

TD_INLINE td_v16 td_v16_fma(td_v16 x, td_v16 y, td_v16 z)
{
    for (int i = 0; i < TD_LANES; i++) z.l[i] = fmaf(x.l[i], y.l[i], z.l[i]);
    return z;
}

TD_INLINE td_v16 td_v16_load_panel_bf16(const uint16_t *p)
{
    td_v16 v;
    for (int i = 0; i < 8; i++) {
        v.l[i] = td_bf16_f32(p[2 * i]);
        v.l[8 + i] = td_bf16_f32(p[2 * i + 1]);
    }
    return v;
}

TD_INLINE td_v16 td_v16_load_bf16(const uint16_t *p)
{
    td_v16 v;
    for (int i = 0; i < TD_LANES; i++) v.l[i] = td_bf16_f32(p[i]);
    return v;
}

TD_INLINE td_v16 td_v16_load_f16(const uint16_t *p)
{
    td_v16 v;
    for (int i = 0; i < TD_LANES; i++) v.l[i] = td_f16_f32(p[i]);
    return v;
}

TD_INLINE td_v16 td_v16_round_bf16(td_v16 x)
{
    for (int i = 0; i < TD_LANES; i++) x.l[i] = td_bf16_f32(td_f32_bf16(x.l[i]));
    return x;
}

TD_INLINE void td_v16_store_bf16(uint16_t *p, td_v16 x)
{
    for (int i = 0; i < TD_LANES; i++) p[i] = td_f32_bf16(x.l[i]);
}

TD_INLINE td_v16 td_v16_round_f16(td_v16 x)
{
    for (int i = 0; i < TD_LANES; i++) x.l[i] = td_f16_f32(td_f32_f16(x.l[i]));
    return x;
}

TD_INLINE td_v16 td_v16_load_e4m3(const uint8_t *p)
{
    td_v16 v;
    for (int i = 0; i < TD_LANES; i++) v.l[i] = td_f16_f32((td_f16)((p[i] & 0x80u) << 8 | (p[i] & 0x7fu) << 7));
    return v;
}

typedef struct td_w16 {
    uint32_t l[TD_LANES];
} td_w16;

TD_INLINE td_w16 td_w16_load(const uint8_t *p)
{
    td_w16 w;
    memcpy(w.l, p, sizeof w.l);
    return w;
}

TD_INLINE td_v16 td_w16_nibble(td_w16 w, int nibble)
{
    td_v16 v;
    for (int i = 0; i < TD_LANES; i++) v.l[i] = (float)(w.l[i] >> (4 * nibble) & 15u);
    return v;
}

TD_INLINE float td_v16_sum(td_v16 x)
{
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) x.l[i] += x.l[i + step];
    return x.l[0];
}

#endif

/* Four lanes, for 4 x 4 matrices: plain vector operators do the same on every machine. */
typedef float td_v4 __attribute__((vector_size(16)));

TD_INLINE void td_v4_transpose(td_v4 c[4])
{
    td_v4 a = __builtin_shufflevector(c[0], c[1], 0, 4, 1, 5), b = __builtin_shufflevector(c[2], c[3], 0, 4, 1, 5);
    td_v4 d = __builtin_shufflevector(c[0], c[1], 2, 6, 3, 7), e = __builtin_shufflevector(c[2], c[3], 2, 6, 3, 7);
    c[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
    c[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    c[2] = __builtin_shufflevector(d, e, 0, 1, 4, 5);
    c[3] = __builtin_shufflevector(d, e, 2, 3, 6, 7);
}

/* to[c][r] = from[r][c] for 16 rows and n columns (a multiple of 4); strides in floats. */
TD_INLINE void td_transpose16(const float *from, size_t ldf, size_t n, float *to, size_t ldt)
{
    for (size_t c = 0; c < n; c += 4)
        for (size_t r = 0; r < TD_LANES; r += 4) {
            td_v4 block[4];
            for (size_t i = 0; i < 4; i++) memcpy(block + i, from + (r + i) * ldf + c, sizeof *block);
            td_v4_transpose(block);
            for (size_t i = 0; i < 4; i++) memcpy(to + (c + i) * ldt + r, block + i, sizeof *block);
        }
}

/* sum_i x[i] y[i] and sum_i x[i]: element i belongs to lane i % 16; lanes are fma (add) chains over ascending i from
 * +0, added as a tree. n % 16 == 0. */
TD_INLINE float td_dot(const float *x, const float *y, size_t n)
{
    td_v16 acc = td_v16_splat(0.0f);
    for (size_t i = 0; i < n; i += TD_LANES) acc = td_v16_fma(td_v16_load(x + i), td_v16_load(y + i), acc);
    return td_v16_sum(acc);
}

TD_INLINE float td_sum(const float *x, size_t n)
{
    td_v16 acc = td_v16_splat(0.0f);
    for (size_t i = 0; i < n; i += TD_LANES) acc = td_v16_add(acc, td_v16_load(x + i));
    return td_v16_sum(acc);
}

#endif
