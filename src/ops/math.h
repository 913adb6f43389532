/* Elementary functions in fp32 with the same bits everywhere: on x86-64-v3, arm64 and a GPU. Each is a fixed sequence
 * of add, mul, fma, div and bit operations, which IEEE 754 defines to the last bit; libm's expf is not the same
 * function on two machines. Compile with -ffp-contract=off (nvcc: --fmad=false) and without flushing of subnormals. No
 * branches, so that loops over them become vector code. Errors: docs/arithmetic.md, tests/unit/ops_math_test.c. */
#ifndef TD_OPS_MATH_H
#define TD_OPS_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define TD_MATH __host__ __device__ static inline
#else
#define TD_MATH static inline
#endif

TD_MATH float td_math_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

TD_MATH uint32_t td_math_to_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* e^x, at most 1 ulp off. Beyond the range: 0 and infinity; NaN stays NaN.
 * x = n ln 2 + r with |r| <= ln 2 / 2 (n from the rounding of an addition to 1.5 * 2^23, ln 2 in two parts), the Taylor
 * polynomial of degree 7 in r (next term: 5e-9 of the result), and 2^n in two factors, so that subnormal results are
 * rounded once. */
TD_MATH float td_expf(float x)
{
    float c = x < -104.0f ? -104.0f : x;
    c = c > 89.0f ? 89.0f : c;
    float shifted = fmaf(c, 1.44269504088896341f, 12582912.0f);
    float n = shifted - 12582912.0f;
    float r = fmaf(n, -0.693147182464599609375f, c);
    r = fmaf(n, 1.904654299957767878e-9f, r);
    float p = 1.0f / 5040.0f;
    p = fmaf(p, r, 1.0f / 720.0f);
    p = fmaf(p, r, 1.0f / 120.0f);
    p = fmaf(p, r, 1.0f / 24.0f);
    p = fmaf(p, r, 1.0f / 6.0f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    int32_t exponent = (int32_t)(td_math_to_bits(shifted) - 0x4b400000u);
    int32_t half = exponent >> 1;
    float s0 = td_math_from_bits((uint32_t)(half + 127) << 23);
    float s1 = td_math_from_bits((uint32_t)(exponent - half + 127) << 23);
    return p * s0 * s1;
}

/* 1 / (1 + e^-x), at most 2.5 ulp off for x > -87; below that the result is less than 1e-37 and may be 0. */
TD_MATH float td_sigmoidf(float x)
{
    return 1.0f / (1.0f + td_expf(-x));
}

/* x * sigmoid(x) as one division: at most 2.5 ulp off for x > -87. */
TD_MATH float td_siluf(float x)
{
    return x / (1.0f + td_expf(-x));
}

/* min(x, limit) and clamp(x, -limit, limit) that let NaN through. */
TD_MATH float td_min_f(float x, float limit)
{
    return x > limit ? limit : x;
}

TD_MATH float td_clamp_f(float x, float limit)
{
    return x > limit ? limit : x < -limit ? -limit : x;
}

#endif
