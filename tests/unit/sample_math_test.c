/* ops/sample_math.h: digests of many results (the bits are a promise), accuracy against libm, exact shares of
 * masses. "sample_math_test digest" computes the digests of 1e8 arguments each instead and prints them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sample_digest.h"

static void test_digest(void **state)
{
    (void)state;
    assert_true(td_test_digest(0, 1000000) == TD_EXP_DIGEST_1E6);
    assert_true(td_test_digest(1, 1000000) == TD_LN_DIGEST_1E6);
}

/* Error of result in units of its last place. */
static double ulps(double result, long double exact)
{
    int exponent;
    frexp((double)exact, &exponent);
    return (double)(fabsl((long double)result - exact) / ldexpl(1.0L, exponent - 53));
}

static void test_accuracy(void **state)
{
    (void)state;
    double worst_exp = 0, worst_ln = 0;
    for (uint64_t i = 0; i < 200000; i++) {
        double d = td_test_exp_argument(i), x = td_test_ln_argument(i);
        if (d < -40.0) {
            assert_true(td_sample_exp(d) == 0.0);
        } else {
            double error = ulps(td_sample_exp(d), expl((long double)d));
            if (error > worst_exp) worst_exp = error;
        }
        double error = ulps(td_sample_ln(x), logl((long double)x));
        if (error > worst_ln) worst_ln = error;
    }
    print_message("largest error: exp %.3f ulp, ln %.3f ulp\n", worst_exp, worst_ln);
    assert_true(worst_exp < 1.0 && worst_ln < 2.5);
}

static void test_edges(void **state)
{
    (void)state;
    assert_true(td_sample_exp(0.0) == 1.0 && td_sample_exp(-0.0) == 1.0);
    assert_true(td_sample_exp(-40.0) > 0 && td_sample_exp(nextafter(-40.0, -50.0)) == 0.0);
    assert_true(td_sample_exp(-INFINITY) == 0.0 && td_sample_exp(-1e308) == 0.0);
    assert_true(td_sample_mass(0.0) == TD_MASS_1);
    assert_true(td_sample_ln(1.0) == 0.0);
    assert_true(td_sample_ln(2.0) == log(2.0) && td_sample_ln(0.5) == -log(2.0));
    assert_true(td_sample_ln(0x1p-1074) == log(0x1p-1074) && td_sample_ln(0x1p-1022) == log(0x1p-1022));
    /* the noise of the extreme uniforms is finite: 2^-53 and 1 - 2^-53 */
    assert_true(isfinite(-td_sample_ln(-td_sample_ln(0x1p-53))));
    assert_true(isfinite(-td_sample_ln(-td_sample_ln(1.0 - 0x1p-53))));
    assert_true(fma((double)((UINT64_MAX) >> 12), 0x1p-52, 0x1p-53) == 1.0 - 0x1p-53);
    /* a key's noise: an independent computation of the same hash */
    double u = exp(-exp(-td_sample_gumbel(td_sample_key(1, 2), 3)));
    assert_true(u > 0 && u < 1);
}

/* ceil(p m) bit by bit on p = a 2^-e. */
static uint64_t share_obvious(double p, uint64_t mass)
{
    int exponent;
    double fraction = frexp(p, &exponent);
    uint64_t a = (uint64_t)ldexp(fraction, 53);
    int e = 53 - exponent;
    td_u128 product = (td_u128)a * mass;
    uint64_t bits[3] = { (uint64_t)product, (uint64_t)(product >> 64), 0 };
    uint64_t whole = 0;
    bool rest = false;
    for (int i = 0; i < 192; i++) {
        bool bit = bits[i / 64] >> (i % 64) & 1;
        if (i < e)
            rest |= bit;
        else if (i - e < 64)
            whole |= (uint64_t)bit << (i - e);
    }
    return whole + rest;
}

static void test_share(void **state)
{
    (void)state;
    assert_true(td_sample_share(0.5, 3) == 2 && td_sample_share(0.5, 4) == 2);
    assert_true(td_sample_share(0x1p-1074, TD_MASS_1) == 1 && td_sample_share(0x1p-1022, TD_MASS_1) == 1);
    assert_true(td_sample_share(nextafter(1.0, 0.0), TD_MASS_1) == TD_MASS_1);
    assert_true(td_sample_share(0.1, 10) == 2); /* binary64's 0.1 is more than a tenth */
    assert_true(td_sample_share(0.3, 10) == 3); /* and its 0.3 is less than three */
    for (uint64_t i = 0; i < 100000; i++) {
        uint64_t r = td_sample_mix(i), q = td_sample_mix(r + 1);
        double p = ldexp(td_test_unit(r) + 0x1p-53, -(int)(q & 63));
        uint64_t mass = TD_MASS_1 + (q >> 7);
        assert_true(td_sample_share(p, mass) == share_obvious(p, mass));
    }
}

static int print_digests(void)
{
    uint64_t exp_digest = td_test_digest(0, 100000000), ln_digest = td_test_digest(1, 100000000);
    printf("exp 0x%016llx\nln  0x%016llx\n", (unsigned long long)exp_digest, (unsigned long long)ln_digest);
    return exp_digest == TD_EXP_DIGEST_1E8 && ln_digest == TD_LN_DIGEST_1E8 ? 0 : 1;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_digest),
        cmocka_unit_test(test_accuracy),
        cmocka_unit_test(test_edges),
        cmocka_unit_test(test_share),
    };
    if (argc > 1 && strcmp(argv[1], "digest") == 0) return print_digests();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
