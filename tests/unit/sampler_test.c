/* engine/sampler.h against the rule as defined (td_sample_reference), which in turn is compared with draws computed by
 * a Python program (tests/oracle/sampler). Shards, numbers of candidates and neighbours must never show in a token. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/sampler.h"
#include "ops/sample_math.h"

enum { VOCAB = 3000, BIG = 120000, ALL = 1 << 30 };

static const td_sample_params usual = { .temperature = 1.0, .top_p = 0.95, .seed = 1 };

static uint64_t random_state;

static uint64_t random_u64(void)
{
    return td_sample_mix(random_state++);
}

static double random_unit(void)
{
    return (double)(random_u64() >> 11) * 0x1p-53;
}

/* Like a model's: a few high ones over a wide hill, on a coarse grid so that equal values are common. */
static void fill(float *z, int n, double width, double grid)
{
    for (int i = 0; i < n; i++) {
        double x = (random_unit() + random_unit() + random_unit() - 1.5) * width;
        z[i] = (float)(floor(x / grid) * grid);
    }
}

/* How often the last sharded() had to ask again. */
static int n_repeats;

/* One row the way the engine does it: n_shards parts, first_n candidates at first (0: as the sampler proposes). */
static td_status sharded(const td_sample_logits *row, const td_sample_params *params, uint64_t pos, int n_logprobs,
                         int n_shards, int first_n, td_sample_result *out)
{
    td_sample_logits part[TD_SAMPLE_SHARDS_MAX];
    td_sample_max max[TD_SAMPLE_SHARDS_MAX], top;
    td_sample_summary *summary[TD_SAMPLE_SHARDS_MAX];
    for (int s = 0; s < n_shards; s++) {
        int from = (int)((int64_t)row->n * s / n_shards), to = (int)((int64_t)row->n * (s + 1) / n_shards);
        part[s] = *row;
        part[s].z += from;
        part[s].n = to - from;
        part[s].first_id += from;
        td_sample_shard_max(&part[s], &max[s]);
    }
    n_repeats = 0;
    td_status status = td_sample_merge_max(max, n_shards, &top);
    if (status) return status;
    if (td_sample_settled_by_max(params, n_logprobs)) {
        *out = (td_sample_result){ .id = top.id };
        return TD_OK;
    }
    int biggest = (row->n + n_shards - 1) / n_shards;
    int n = first_n ? (first_n < biggest ? first_n : biggest) : td_sample_first_n(params, n_logprobs, biggest);
    for (;;) {
        for (int s = 0; s < n_shards; s++) {
            size_t bytes = td_sample_summary_bytes(n);
            summary[s] = malloc(bytes);
            memset(summary[s], 0xa5, bytes);
            td_sample_shard_summary(&part[s], params, pos, &top, n_logprobs, n, summary[s]);
        }
        status =
            td_sample_merge((const td_sample_summary *const *)summary, n_shards, params, pos, &top, n_logprobs, out);
        for (int s = 0; s < n_shards; s++) free(summary[s]);
        if (status != TD_EAGAIN) return status;
        assert_true(n < biggest); /* whole shards never ask again */
        n = td_sample_next_n(n, biggest);
        n_repeats++;
    }
}

static void expect_equal(const td_sample_result *a, const td_sample_result *b)
{
    assert_int_equal(a->id, b->id);
    assert_true(a->logprob == b->logprob);
    assert_int_equal(a->n_top, b->n_top);
    for (int i = 0; i < a->n_top; i++) {
        assert_int_equal(a->top[i].id, b->top[i].id);
        assert_true(a->top[i].logprob == b->top[i].logprob);
    }
}

/* 1 to 5 shards and candidate limits 1, 8, 64, 1024, all give what the rule says. Returns the token. */
static int32_t check(const td_sample_logits *row, const td_sample_params *params, uint64_t pos, int n_logprobs)
{
    static const int shards[] = { 1, 2, 3, 5 }, limits[] = { 0, 1, 8, 64, 1024, ALL };
    td_sample_result wanted, got;
    assert_int_equal(td_sample_reference(row, params, pos, n_logprobs, &wanted), TD_OK);
    for (size_t s = 0; s < sizeof shards / sizeof *shards; s++)
        for (size_t k = 0; k < sizeof limits / sizeof *limits; k++) {
            if (shards[s] > row->n) continue;
            assert_int_equal(sharded(row, params, pos, n_logprobs, shards[s], limits[k], &got), TD_OK);
            expect_equal(&got, &wanted);
        }
    return wanted.id;
}

static void test_random(void **state)
{
    (void)state;
    static const double temperatures[] = { 0, 1e-6, 0.3, 1, 2 }, top_ps[] = { 1, 0.95, 0.5, 0.01, 1e-300 };
    static const double min_ps[] = { 0, 0.05, 0.7, 1, 2 };
    static const int top_ks[] = { 0, -1, 1, 5, 40, 2000, 100000 };
    static float z[VOCAB];
    random_state = 1;
    for (int round = 0; round < 150; round++) {
        int n = 1 + (int)(random_u64() % VOCAB);
        uint32_t allowed[VOCAB / 32 + 8];
        fill(z, n, 2 + 20 * random_unit(), round % 3 ? 0.125 : 1e-5);
        for (size_t i = 0; i < sizeof allowed / 4; i++) allowed[i] = (uint32_t)random_u64();
        const td_sample_logits row = { .z = z, .n = n, .first_id = 100, .allowed = round % 2 ? allowed : NULL };
        const td_sample_params params = { .temperature = temperatures[random_u64() % 5],
                                          .top_p = top_ps[random_u64() % 5],
                                          .min_p = random_u64() % 2 ? 0 : min_ps[random_u64() % 5],
                                          .top_k = random_u64() % 2 ? 0 : top_ks[random_u64() % 7],
                                          .seed = random_u64() };
        allowed[100 / 32] |= 1u << 100 % 32; /* something always is */
        check(&row, &params, random_u64() % 1000000, (int)(random_u64() % 22) - 1);
    }
}

/* ---- against Python ---- */

static void test_python(void **state)
{
    (void)state;
    FILE *file = fopen("tests/oracle/sampler/draws.txt", "r");
    static float z[VOCAB];
    int n, top_k, wanted, rows = 0;
    unsigned long long state_word, seed, pos;
    double width, temperature, top_p, min_p, logprob;
    assert_non_null(file);
    while (fscanf(file, "%llu %d %la %la %d %la %la %llu %llu %d %la", &state_word, &n, &width, &temperature, &top_k,
                  &top_p, &min_p, &seed, &pos, &wanted, &logprob) == 11) {
        random_state = state_word;
        assert_true(n <= VOCAB);
        for (int i = 0; i < n; i++) z[i] = (float)(random_unit() * width);
        const td_sample_logits row = { .z = z, .n = n };
        const td_sample_params params = {
            .temperature = temperature, .top_p = top_p, .min_p = min_p, .top_k = top_k, .seed = seed
        };
        td_sample_result got;
        assert_int_equal(td_sample_reference(&row, &params, pos, 0, &got), TD_OK);
        assert_int_equal(got.id, wanted);
        assert_true(fabs(got.logprob - logprob) < 1e-9);
        rows++;
    }
    assert_int_equal(rows, 400);
    fclose(file);
}

static void test_seed(void **state)
{
    (void)state;
    /* hashlib.sha256(b"tandem-seed-v1" + struct.pack("<QI", salt, n) + ids + media), first 8 bytes, little-endian */
    static const int32_t ids[] = { 154822, 154824, 0, 7 };
    td_seed_media media = { .first_row = 9 };
    memset(media.digest, 0xab, sizeof media.digest);
    assert_true(td_sample_seed_from_prompt(0, ids, 4) == 0xf268730cabaf53c9ull);
    assert_true(td_sample_seed_from_prompt(0x0123456789abcdefull, ids, 4) == 0xdf212fcd4b009ed5ull);
    assert_true(td_sample_seed_from_prompt(0, NULL, 0) == 0x5481a06b6eaf0006ull);
    assert_true(td_sample_seed(0, ids, 4, &media, 1) == 0x495334a5544246b3ull);
}

/* ---- the cases that go wrong ---- */

static void test_greedy(void **state)
{
    (void)state;
    float z[] = { 1, 3, -2, 3, 0.5f, 3 };
    const td_sample_logits row = { .z = z, .n = 6, .first_id = 10 };
    td_sample_params params = { .temperature = 0, .top_p = 1 };
    assert_int_equal(check(&row, &params, 0, -1), 11); /* equal: the lowest id, across shards too */
    params.temperature = -1;
    assert_int_equal(check(&row, &params, 0, 3), 11);
    z[1] = -0.0f;
    z[3] = 0.0f;
    z[0] = z[4] = z[5] = -1;
    assert_int_equal(check(&row, &params, 0, -1), 11); /* -0 equals 0 */
}

static void test_numbers(void **state)
{
    (void)state;
    float z[] = { 1, NAN, 2, -INFINITY };
    uint32_t without_nan = 0xd, only_low = 0x8, none = 0;
    td_sample_logits row = { .z = z, .n = 4 };
    td_sample_result out;
    for (int shards = 1; shards <= 2; shards++) {
        row.allowed = NULL;
        assert_int_equal(sharded(&row, &usual, 0, -1, shards, 0, &out), TD_EINVAL);
        row.allowed = &only_low; /* -inf alone */
        assert_int_equal(sharded(&row, &usual, 0, -1, shards, 0, &out), TD_EINVAL);
        row.allowed = &none;
        assert_int_equal(sharded(&row, &usual, 0, -1, shards, 0, &out), TD_EINVAL);
    }
    assert_int_equal(td_sample_reference(&row, &usual, 0, -1, &out), TD_EINVAL);
    row.allowed = &without_nan; /* a NaN that is not allowed does not matter, -inf is never drawn */
    for (uint64_t pos = 0; pos < 50; pos++) assert_int_not_equal(check(&row, &usual, pos, 4), 3);
    z[2] = INFINITY;
    assert_int_equal(sharded(&row, &usual, 0, -1, 2, 0, &out), TD_EINVAL);
}

/* All but one masked, wherever it is. */
static void test_one_allowed(void **state)
{
    (void)state;
    static float z[500];
    random_state = 5;
    fill(z, 500, 10, 0.25);
    for (int only = 0; only < 500; only += 83) {
        uint32_t allowed[16] = { 0 };
        allowed[only / 32] = 1u << only % 32;
        const td_sample_logits row = { .z = z, .n = 500, .allowed = allowed };
        assert_int_equal(check(&row, &usual, 3, 5), only);
    }
}

/* Equal values at the k-th place and at the nucleus' edge, on both sides of the border between shards: the lower ids
 * are in, the higher out, so over many positions exactly the lower ones are drawn. */
static void test_ties_at_the_edge(void **state)
{
    (void)state;
    float z[64];
    bool seen[64] = { false };
    for (int i = 0; i < 64; i++) z[i] = -30;
    for (int i = 28; i < 36; i++) z[i] = 0; /* the border of two shards is at 32 */
    z[40] = 0.5f;
    const td_sample_logits row = { .z = z, .n = 64 };
    td_sample_params params = { .temperature = 1, .top_p = 1, .top_k = 6, .seed = 3 };
    for (uint64_t pos = 0; pos < 120; pos++) seen[check(&row, &params, pos, -1)] = true;
    for (int i = 0; i < 64; i++) assert_int_equal(seen[i], i == 40 || (i >= 28 && i < 33));

    memset(seen, 0, sizeof seen);
    for (int i = 0; i < 64; i++) z[i] = -INFINITY;
    for (int i = 28; i < 36; i++) z[i] = 0;
    params.top_k = 0;
    params.top_p = 0.625; /* 5 of 8 equal masses, reached exactly */
    for (uint64_t pos = 0; pos < 120; pos++) seen[check(&row, &params, pos, -1)] = true;
    for (int i = 0; i < 64; i++) assert_int_equal(seen[i], i >= 28 && i < 33);
    memset(seen, 0, sizeof seen);
    params.top_p = nextafter(0.625, 1); /* one ulp more: one token more */
    for (uint64_t pos = 0; pos < 160; pos++) seen[check(&row, &params, pos, -1)] = true;
    for (int i = 0; i < 64; i++) assert_int_equal(seen[i], i >= 28 && i < 34);
}

/* top_p within an ulp of every cumulative sum. */
static void test_nucleus_edges(void **state)
{
    (void)state;
    static float z[300];
    random_state = 9;
    fill(z, 300, 8, 0.125);
    const td_sample_logits row = { .z = z, .n = 300 };
    td_sample_max top;
    td_sample_shard_max(&row, &top);
    double sum = 0, total = 0;
    for (int i = 0; i < 300; i++) total += exp((double)z[i] - top.z);
    for (int i = 0; i < 60; i++) {
        sum += exp((double)z[i] - top.z);
        double edge = sum / total;
        if (edge >= 1) break;
        for (int step = -1; step <= 1; step++) {
            td_sample_params params = usual;
            params.top_p = step ? nextafter(edge, step < 0 ? 0 : 1) : edge;
            params.seed = (uint64_t)i;
            check(&row, &params, 5, -1);
        }
    }
}

/* More than 100,000 tokens in the nucleus: no list short of everything reaches the cut. */
static void test_flat(void **state)
{
    (void)state;
    float *z = malloc(BIG * sizeof *z);
    td_sample_result wanted, got;
    random_state = 21;
    fill(z, BIG, 0.01, 1e-6);
    const td_sample_logits row = { .z = z, .n = BIG };
    for (int i = 0; i < 2; i++) {
        td_sample_params params = usual;
        params.top_p = i ? 1.0 : 0.95;
        assert_int_equal(td_sample_reference(&row, &params, 77, 20, &wanted), TD_OK);
        for (int shards = 1; shards <= 2; shards++) {
            assert_int_equal(sharded(&row, &params, 77, 20, shards, 0, &got), TD_OK);
            assert_int_equal(n_repeats, i ? 0 : 3); /* 64, 1024, 16384, all; without top_p never again */
            expect_equal(&got, &wanted);
        }
    }
    /* a usual distribution needs no second question */
    fill(z, BIG, 5, 1e-6);
    for (int i = 0; i < 8; i++) z[i * 1000] = 20 - (float)i;
    assert_int_equal(sharded(&row, &usual, 77, 20, 2, 0, &got), TD_OK);
    assert_int_equal(n_repeats, 0);
    free(z);
}

static void test_extreme_parameters(void **state)
{
    (void)state;
    static float z[400];
    random_state = 33;
    fill(z, 400, 10, 0.5);
    for (int i = 0; i < 400; i++)
        if (z[i] > 3) z[i] = 3; /* several at the top */
    const td_sample_logits row = { .z = z, .n = 400 };
    td_sample_params params = { .temperature = 1, .top_p = 1, .min_p = 1, .seed = 4 };
    for (uint64_t pos = 0; pos < 20; pos++)
        assert_true(z[check(&row, &params, pos, -1)] == 3); /* min_p 1: only the top */
    params.min_p = 0;
    params.temperature = 1e-6;
    for (uint64_t pos = 0; pos < 20; pos++) assert_true(z[check(&row, &params, pos, -1)] == 3);
    params.temperature = 0x1p-1074;
    assert_true(z[check(&row, &params, 1, 2)] == 3);
    params.temperature = 1e300;
    check(&row, &params, 1, 2);
    params.min_p = 0x1p-1074;
    check(&row, &params, 1, 2);
}

/* Noise belongs to (seed, position, id): a row alone and the same row among others, in any order, is the same call.
 * What can be tested is that equal keys give equal draws and different keys different ones, with the right frequencies.
 */
static void test_frequencies(void **state)
{
    (void)state;
    const float z[] = { 0, -1, -2, -3 };
    const td_sample_logits row = { .z = z, .n = 4 };
    const td_sample_params params = { .temperature = 1, .top_p = 1, .seed = 99 };
    int count[4] = { 0 }, n = 40000;
    double total = 0;
    td_sample_result out;
    for (int pos = 0; pos < n; pos++) {
        assert_int_equal(sharded(&row, &params, (uint64_t)pos, -1, 2, 0, &out), TD_OK);
        count[out.id]++;
    }
    for (int i = 0; i < 4; i++) total += exp(z[i]);
    for (int i = 0; i < 4; i++) {
        double p = exp(z[i]) / total, sigma = sqrt(n * p * (1 - p));
        assert_true(fabs(count[i] - n * p) < 4 * sigma);
    }
}

static void test_logprobs(void **state)
{
    (void)state;
    static float z[1000];
    random_state = 41;
    fill(z, 1000, 12, 1e-4);
    const td_sample_logits row = { .z = z, .n = 1000 };
    td_sample_params params = usual;
    params.temperature = 0.2; /* must not show in log-probabilities */
    params.top_p = 0.3;
    td_sample_result out;
    long double sum = 0;
    for (int i = 0; i < 1000; i++) sum += expl((long double)z[i]);
    assert_int_equal(sharded(&row, &params, 12, 20, 2, 0, &out), TD_OK);
    assert_int_equal(out.n_top, 20);
    assert_true(fabsl(out.logprob - ((long double)z[out.id] - logl(sum))) < 1e-9L);
    for (int i = 0; i < 20; i++) {
        assert_true(fabsl(out.top[i].logprob - ((long double)z[out.top[i].id] - logl(sum))) < 1e-9L);
        assert_true(i == 0 || out.top[i].logprob <= out.top[i - 1].logprob);
    }
}

static void test_check(void **state)
{
    (void)state;
    static const struct {
        td_sample_params params;
        const char *text;
    } cases[] = {
        { { .temperature = NAN, .top_p = 1 }, "temperature: must be a finite number" },
        { { .temperature = 1, .top_p = 0 }, "top_p: must be above 0" },
        { { .temperature = 1, .top_p = NAN }, "top_p: must be above 0" },
        { { .temperature = 1, .top_p = 1, .min_p = -0.1 }, "min_p: must be 0 or above" },
        { { .temperature = 1, .top_p = 1, .min_p = INFINITY }, "min_p: must be 0 or above" },
    };
    td_error err;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(td_sample_check(&cases[i].params, &err), TD_EINVAL);
        assert_string_equal(err.text, cases[i].text);
    }
    assert_int_equal(td_sample_check(&usual, &err), TD_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_python),
        cmocka_unit_test(test_seed),
        cmocka_unit_test(test_greedy),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_one_allowed),
        cmocka_unit_test(test_ties_at_the_edge),
        cmocka_unit_test(test_nucleus_edges),
        cmocka_unit_test(test_flat),
        cmocka_unit_test(test_extreme_parameters),
        cmocka_unit_test(test_frequencies),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_check),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
