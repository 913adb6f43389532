/* The arithmetic of sampling rule v1 (docs/sampling.md): exp, ln, masses, the keyed uniform and the exact share of an
 * integer mass. Every function is a fixed sequence of IEEE binary64 additions, multiplications, fused multiply-adds and
 * divisions, or of integer operations, so it gives the same bits in C, in C++ and in CUDA device code, on every
 * machine. Equal bits are the requirement, not the last ulp; all the same exp stays within 1 ulp and ln within 2.5.
 *
 * No product here feeds an addition other than through fma(): a compiler that contracts on its own could change
 * nothing. tests/unit/sample_math_test.c holds digests of 1e8 results of each; a change here changes replies and needs
 * a new version of the rule. */
#ifndef TD_OPS_SAMPLE_MATH_H
#define TD_OPS_SAMPLE_MATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define TD_HD __host__ __device__
#else
#define TD_HD
#endif

#define TD_LOG2E  0x1.71547652b82fep+0
#define TD_LN2_HI 0x1.62e42fefa39efp-1  /* ln 2 rounded */
#define TD_LN2_LO 0x1.abc9e3b39803fp-56 /* ln 2 - TD_LN2_HI, rounded */
#define TD_MASS_1 ((uint64_t)1 << 40)   /* mass of a token as probable as the most probable one */

__extension__ typedef unsigned __int128 td_u128;

TD_HD static inline double td_f64_from_bits(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

TD_HD static inline uint64_t td_f64_bits(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* E(d) = exp(d) for d <= 0; 0 below -40, where the mass is 0 anyway. d = k ln 2 + f, |f| <= ln 2 / 2; Taylor to f^13.
 */
TD_HD static inline double td_sample_exp(double d)
{
    double shifted = fma(d, TD_LOG2E, 0x1.8p52); /* rounds to an integer, which its low bits then hold */
    double k = shifted - 0x1.8p52;
    double f = fma(-k, TD_LN2_HI, d);
    f = fma(-k, TD_LN2_LO, f);
    double p = 0x1.6124613a86d09p-33; /* 1 / 13! */
    p = fma(p, f, 0x1.1eed8eff8d898p-29);
    p = fma(p, f, 0x1.ae64567f544e4p-26);
    p = fma(p, f, 0x1.27e4fb7789f5cp-22);
    p = fma(p, f, 0x1.71de3a556c734p-19);
    p = fma(p, f, 0x1.a01a01a01a01ap-16);
    p = fma(p, f, 0x1.a01a01a01a01ap-13);
    p = fma(p, f, 0x1.6c16c16c16c17p-10);
    p = fma(p, f, 0x1.1111111111111p-7);
    p = fma(p, f, 0x1.5555555555555p-5);
    p = fma(p, f, 0x1.5555555555555p-3);
    p = fma(p, f, 0.5);
    p = fma(p, f, 1.0);
    p = fma(p, f, 1.0);
    double power = td_f64_from_bits(((td_f64_bits(shifted) + 1023) & 0x7ff) << 52); /* 2^k, exact */
    return d < -40.0 ? 0.0 : p * power;
}

/* Ln(x) = ln(x) for finite x > 0. x = 2^e m, sqrt(1/2) <= m < sqrt(2), t = (m - 1) / (m + 1):
 * ln x = e ln 2 + 2 (t + t^3/3 + ... + t^21/21). */
TD_HD static inline double td_sample_ln(double x)
{
    int e = 0;
    if (x < 0x1p-1022) { /* subnormal */
        x = x * 0x1p54;
        e = -54;
    }
    uint64_t bits = td_f64_bits(x), above = bits - 0x3fe6a09e667f3bcdu; /* bits of sqrt(1/2), rounded up */
    int64_t shift = (int64_t)above >> 52;                               /* arithmetic: how many doublings from m */
    double m = td_f64_from_bits(bits - ((uint64_t)shift << 52));
    e += (int)shift;
    double t = (m - 1.0) / (m + 1.0), s = t * t;
    double p = 0x1.8618618618618p-5; /* 1 / 21 */
    p = fma(p, s, 0x1.af286bca1af28p-5);
    p = fma(p, s, 0x1.e1e1e1e1e1e1ep-5);
    p = fma(p, s, 0x1.1111111111111p-4);
    p = fma(p, s, 0x1.3b13b13b13b14p-4);
    p = fma(p, s, 0x1.745d1745d1746p-4);
    p = fma(p, s, 0x1.c71c71c71c71cp-4);
    p = fma(p, s, 0x1.2492492492492p-3);
    p = fma(p, s, 0x1.999999999999ap-3);
    p = fma(p, s, 0x1.5555555555555p-2);
    double t2 = t + t, tail = s * p;
    double of_m = fma(t2, tail, t2);
    return fma((double)e, TD_LN2_HI, fma((double)e, TD_LN2_LO, of_m));
}

/* Distance of a logit from the highest one, in units of the temperature; <= 0. */
TD_HD static inline double td_sample_distance(float z, float z_top, double temperature)
{
    return ((double)z - (double)z_top) / temperature;
}

TD_HD static inline uint64_t td_sample_mass(double d)
{
    return (uint64_t)(td_sample_exp(d) * 0x1p40);
}

TD_HD static inline uint64_t td_sample_mix(uint64_t x)
{
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* The part of the noise's key that all tokens of a position share. */
TD_HD static inline uint64_t td_sample_key(uint64_t seed, uint64_t pos)
{
    return td_sample_mix(td_sample_mix(seed + 0x9e3779b97f4a7c15u) ^ (pos * 0xd1b54a32d192ed03u));
}

/* Gumbel noise of a token: -ln(-ln u), u uniform on 2^52 points strictly between 0 and 1 (53 bits would round to 1). */
TD_HD static inline double td_sample_gumbel(uint64_t key, int32_t id)
{
    uint64_t h = td_sample_mix(key ^ (uint64_t)(uint32_t)id);
    double u = fma((double)(h >> 12), 0x1p-52, 0x1p-53);
    return -td_sample_ln(-td_sample_ln(u));
}

/* ceil(p * mass) for 0 < p < 1 and mass < 2^58, p being exactly its binary64 value. */
TD_HD static inline uint64_t td_sample_share(double p, uint64_t mass)
{
    uint64_t bits = td_f64_bits(p), a = bits & 0xfffffffffffffu;
    int exponent = (int)(bits >> 52), e = 1074; /* p = a 2^-e */
    if (exponent) {
        a |= (uint64_t)1 << 52;
        e = 1075 - exponent;
    }
    if (e > 111) return 1;
    td_u128 product = (td_u128)a * mass;
    return (uint64_t)((product + (((td_u128)1 << e) - 1)) >> e);
}

#endif
