/* Values of the sampler's arithmetic (ops/sample_math.h) for argument i, and what computes them on a GPU:
 * sample_digest.cu. */
#ifndef TD_TESTS_OPCHECK_SAMPLE_VALUES_H
#define TD_TESTS_OPCHECK_SAMPLE_VALUES_H

#include "base/status.h"
#include "unit/sample_digest.h"

typedef enum oc_sample_kind {
    OC_SAMPLE_EXP,
    OC_SAMPLE_LN,
    OC_SAMPLE_MASS,
    OC_SAMPLE_GUMBEL,
    OC_SAMPLE_SHARE,
    OC_SAMPLE_DISTANCE,
    OC_SAMPLE_KINDS
} oc_sample_kind;

TD_HD static inline uint64_t oc_sample_value(int kind, uint64_t i)
{
    uint64_t r = td_sample_mix(i + 1), q = td_sample_mix(r);
    double u = td_test_unit(q) + 0x1p-53;
    switch (kind) {
    case OC_SAMPLE_EXP: return td_f64_bits(td_sample_exp(td_test_exp_argument(i)));
    case OC_SAMPLE_LN: return td_f64_bits(td_sample_ln(td_test_ln_argument(i)));
    case OC_SAMPLE_MASS: return td_sample_mass(td_test_exp_argument(i));
    case OC_SAMPLE_GUMBEL: return td_f64_bits(td_sample_gumbel(td_sample_key(r, i), (int32_t)(q >> 40)));
    case OC_SAMPLE_SHARE:
        return td_sample_share(u * td_f64_from_bits((uint64_t)(1023 - (r & 63)) << 52), TD_MASS_1 + (r >> 7));
    default: return td_f64_bits(td_sample_distance((float)(30.0 * u), 31.5f, 0.1 + 2.0 * td_test_unit(r)));
    }
}

TD_BEGIN_C

/* On the current GPU; false: a CUDA call failed, and *why says what. digest: as td_test_digest(); values: [n]. */
bool oc_gpu_sample_digest(int ln, uint64_t n, uint64_t *digest, const char **why);
bool oc_gpu_sample_values(int kind, uint64_t n, uint64_t *values, const char **why);

TD_END_C
#endif
