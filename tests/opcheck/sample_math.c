/* Sampling must draw the same tokens on every machine (docs/sampling.md), so the GPU's exp and ln must have the bits
 * of the CPU's: the digests of 1e8 results each that unit_sample_math knows, and value by value for the first ones, so
 * that a difference shows where it is. */
#include "opcheck.h"
#include "opcheck/sample_values.h"

#include <stdlib.h>

enum { VALUES = 1 << 16 };

static void check_digest(oc_ctx *oc, int ln, uint64_t n, uint64_t want)
{
    uint64_t got = 0;
    const char *why;
    if (!oc_case(oc, "%s of %llu arguments", ln ? "ln" : "exp", (unsigned long long)n)) return;
    oc_begin(oc, "digest");
    if (!oc_gpu_sample_digest(ln, n, &got, &why))
        oc_fail(oc, "%s", why);
    else if (got != want)
        oc_fail(oc, "%016llx, expected %016llx", (unsigned long long)got, (unsigned long long)want);
    oc_end(oc);
}

static void check_values(oc_ctx *oc, int kind)
{
    static const char *const names[OC_SAMPLE_KINDS] = { "exp", "ln", "mass", "gumbel", "share", "distance" };
    if (!oc_case(oc, "%s, %d values", names[kind], VALUES)) return;
    uint64_t *got = (uint64_t *)calloc(VALUES, sizeof *got);
    const char *why;
    td_check(got);
    oc_begin(oc, "bits");
    if (!oc_gpu_sample_values(kind, VALUES, got, &why)) oc_fail(oc, "%s", why);
    for (uint64_t i = 0; oc->now.ok && i < VALUES; i++) {
        uint64_t want = oc_sample_value(kind, i);
        if (got[i] != want)
            oc_fail(oc, "value %llu is %016llx, expected %016llx", (unsigned long long)i, (unsigned long long)got[i],
                    (unsigned long long)want);
    }
    oc_end(oc);
    free(got);
}

void oc_sample_math(oc_ctx *oc)
{
    for (int kind = 0; kind < OC_SAMPLE_KINDS; kind++) check_values(oc, kind);
    check_digest(oc, 0, 1000000, TD_EXP_DIGEST_1E6);
    check_digest(oc, 1, 1000000, TD_LN_DIGEST_1E6);
    check_digest(oc, 0, 100000000, TD_EXP_DIGEST_1E8);
    check_digest(oc, 1, 100000000, TD_LN_DIGEST_1E8);
}
