/* Arguments for the sampler's exp and ln, and a digest of the results that does not depend on the order of evaluation,
 * so that a device can compute it with any number of threads and must get the same 64 bits. */
#ifndef TD_TESTS_SAMPLE_DIGEST_H
#define TD_TESTS_SAMPLE_DIGEST_H

#include "ops/sample_math.h"

/* Of arguments 0 .. n - 1; measured on x86-64, equal on arm64. */
#define TD_EXP_DIGEST_1E6 0x9ec9e46dac2cf79cull
#define TD_LN_DIGEST_1E6  0x03faa66306ad1059ull
#define TD_EXP_DIGEST_1E8 0xc3a57a04b3fb5ed1ull
#define TD_LN_DIGEST_1E8  0xde01bdac5457f445ull

TD_HD static inline double td_test_unit(uint64_t r)
{
    return (double)(r >> 12) * 0x1p-52;
}

/* Seven of eight uniform in (-41, 0], the rest spread over small magnitudes down to 2^-63. */
TD_HD static inline double td_test_exp_argument(uint64_t i)
{
    uint64_t r = td_sample_mix(i + 0x9e3779b97f4a7c15u), q = td_sample_mix(r);
    if (r & 7) return -41.0 * td_test_unit(q);
    double scale = td_f64_from_bits((uint64_t)(1023 - (r >> 3 & 63)) << 52);
    return -(scale * (1.0 + td_test_unit(q)));
}

/* A quarter each: the uniforms of the noise, what their logarithms give, any positive double, close to 1. */
TD_HD static inline double td_test_ln_argument(uint64_t i)
{
    uint64_t r = td_sample_mix(i + 0xd1b54a32d192ed03u), q = td_sample_mix(r);
    double u = td_test_unit(q) + 0x1p-53;
    if ((r & 3) == 0) return u;
    if ((r & 3) == 1) return 37.0 * u;
    if ((r & 3) == 2) return td_f64_from_bits(q % 0x7ff0000000000000u | 1);
    double scale = td_f64_from_bits((uint64_t)(1022 - (r >> 2 & 31)) << 52), step = scale * u;
    return r >> 7 & 1 ? 1.0 - step : 1.0 + step;
}

TD_HD static inline uint64_t td_test_digest_term(uint64_t i, double result)
{
    return td_sample_mix(td_f64_bits(result) + i * 0x9e3779b97f4a7c15u);
}

static inline uint64_t td_test_digest(int ln, uint64_t n)
{
    uint64_t digest = 0;
    for (uint64_t i = 0; i < n; i++) {
        double result = ln ? td_sample_ln(td_test_ln_argument(i)) : td_sample_exp(td_test_exp_argument(i));
        digest += td_test_digest_term(i, result);
    }
    return digest;
}

#endif
