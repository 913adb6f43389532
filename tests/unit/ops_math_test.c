/* The shared elementary functions against libm in double precision, over random and special arguments. */
#include "ops/math.h"
#include "ops_support.h"

/* error in units of the last place of the exact result */
static double ulps(float got, double want)
{
    int exponent;
    frexp(want, &exponent);
    double ulp = ldexp(1.0, exponent - 24 > -149 ? exponent - 24 : -149);
    return fabs(got - want) / ulp;
}

static void exp_is_within_an_ulp(void **state)
{
    (void)state;
    uint64_t seed = 1;
    double worst = 0.0;
    for (int i = 0; i < 400000; i++) {
        float x = 104.0f * op_uniform(&seed);
        if (i % 3 == 0) x *= 0.01f;
        if (x > 88.7f) continue;
        double error = ulps(td_expf(x), exp((double)x));
        worst = error > worst ? error : worst;
    }
    if (worst > 1.0) fail_msg("td_expf: %.3f ulp", worst);
}

static void sigmoid_and_silu_are_close(void **state)
{
    (void)state;
    uint64_t seed = 2;
    double worst = 0.0;
    for (int i = 0; i < 400000; i++) {
        float x = 80.0f * op_uniform(&seed) * (i % 2 ? 1.0f : 0.05f);
        double sigmoid = 1.0 / (1.0 + exp(-(double)x)), error = ulps(td_sigmoidf(x), sigmoid);
        worst = error > worst ? error : worst;
        error = ulps(td_siluf(x), x * sigmoid);
        worst = error > worst ? error : worst;
    }
    if (worst > 2.5) fail_msg("sigmoid, silu: %.3f ulp", worst);
}

static void special_values(void **state)
{
    (void)state;
    assert_true(td_expf(0.0f) == 1.0f && td_expf(-0.0f) == 1.0f);
    assert_true(td_expf(INFINITY) == INFINITY && td_expf(1e30f) == INFINITY && td_expf(88.8f) == INFINITY);
    assert_true(td_expf(-INFINITY) == 0.0f && td_expf(-1e30f) == 0.0f && td_expf(-104.1f) == 0.0f);
    assert_true(isnan(td_expf(NAN)) && isnan(td_sigmoidf(NAN)) && isnan(td_siluf(NAN)));
    assert_true(td_sigmoidf(200.0f) == 1.0f && td_sigmoidf(-200.0f) == 0.0f && td_sigmoidf(0.0f) == 0.5f);
    assert_true(td_siluf(0.0f) == 0.0f && td_siluf(200.0f) == 200.0f && td_siluf(-200.0f) == 0.0f);
    assert_true(isnan(td_min_f(NAN, 1.0f)) && isnan(td_clamp_f(NAN, 1.0f)));
    assert_true(td_min_f(3.0f, 1.0f) == 1.0f && td_min_f(-3.0f, 1.0f) == -3.0f && td_clamp_f(-3.0f, 1.0f) == -1.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_within_an_ulp),
        cmocka_unit_test(sigmoid_and_silu_are_close),
        cmocka_unit_test(special_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
