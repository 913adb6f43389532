/* sample_max, sample_summary on the CPU: many rows at once, rows picked from the logits, masks, places of the answers.
 * A row's answer is the one that it gets alone; what that must be is sampler_test.c's business. */
#include "ops_support.h"

enum { ROWS = 6, COLUMNS = 700, STRIDE = 720, FIRST = 1400, MASKS = 2, JOBS = TD_WINDOW_MAX };
enum { WORDS = (FIRST + COLUMNS + 31) / 32 };

static float z[ROWS * STRIDE];
static uint32_t allowed[MASKS * WORDS];
static td_sample_job jobs[JOBS];

static uint64_t next(uint64_t *seed)
{
    return td_sample_mix((*seed)++);
}

/* Returns the bytes of all summaries. */
static size_t make(uint64_t seed)
{
    size_t n_bytes = 0;
    op_fill(&seed, z, ROWS * STRIDE, 6.0f);
    for (int r = 0; r < ROWS; r++)
        for (int i = COLUMNS; i < STRIDE; i++) z[r * STRIDE + i] = NAN; /* padding: not to be looked at */
    for (int w = 0; w < MASKS * WORDS; w++) allowed[w] = (uint32_t)next(&seed);
    for (int i = 0; i < JOBS; i++) {
        jobs[i] = (td_sample_job){ .params = { .temperature = i % 5 ? 0.25 * (i % 5) : 0,
                                               .top_p = i % 3 ? 0.9 : 1,
                                               .min_p = i % 4 ? 0 : 0.1,
                                               .top_k = i % 7 ? 0 : 20,
                                               .seed = next(&seed) },
                                   .pos = next(&seed) % 10000,
                                   .row = (int32_t)(next(&seed) % ROWS),
                                   .mask = (int32_t)(next(&seed) % (MASKS + 1)) - 1,
                                   .n_logprobs = i % 2 ? -1 : i % 20,
                                   .n = 1 + (int)(next(&seed) % 900),
                                   .out_bytes = n_bytes };
        n_bytes += td_sample_summary_bytes(jobs[i].n);
    }
    return n_bytes;
}

static td_sample_logits row_of(const td_sample_job *job)
{
    return (td_sample_logits){ .z = z + job->row * STRIDE,
                               .n = COLUMNS,
                               .first_id = FIRST,
                               .allowed = job->mask < 0 ? NULL : allowed + job->mask * WORDS };
}

static void test_rows_as_alone(void **state)
{
    (void)state;
    const td_dev_limits limits = { .rows = 1, .dim = 16 };
    for (int n_threads = 1; n_threads <= 3; n_threads += 2) {
        td_ops ops;
        td_dev *dev = op_device(&limits, n_threads, false);
        td_ops_init(&ops, dev);
        size_t n_bytes = make(77);
        td_sample_max maxima[JOBS + 1], alone;
        unsigned char *summaries = op_alloc(n_bytes + 8), *want = op_alloc(td_sample_summary_bytes(900));
        memset(maxima, 0xa5, sizeof maxima);
        memset(summaries, 0xa5, n_bytes + 8);
        td_sample_args args = { .n_jobs = JOBS,
                                .n_columns = COLUMNS,
                                .first_id = FIRST,
                                .n_max = 900,
                                .logits = z,
                                .stride = STRIDE,
                                .allowed = allowed,
                                .mask_words = WORDS,
                                .jobs = jobs,
                                .maxima = maxima,
                                .summaries = summaries };
        assert_int_equal(ops.sample_max(dev, &args), TD_OK);
        for (int i = 0; i < JOBS; i++) {
            const td_sample_logits row = row_of(&jobs[i]);
            td_sample_shard_max(&row, &alone);
            op_expect_bits("maximum", &maxima[i], &alone, sizeof alone);
            assert_int_equal(alone.n_nan, 0);
            jobs[i].top = alone;
        }
        assert_int_equal(ops.sample_summary(dev, &args), TD_OK);
        for (int i = 0; i < JOBS; i++) {
            const td_sample_logits row = row_of(&jobs[i]);
            td_sample_shard_summary(&row, &jobs[i].params, jobs[i].pos, &jobs[i].top, jobs[i].n_logprobs, jobs[i].n,
                                    (td_sample_summary *)(void *)want);
            op_expect_bits("summary", summaries + jobs[i].out_bytes, want, td_sample_summary_bytes(jobs[i].n));
        }
        const unsigned char *behind = (const unsigned char *)&maxima[JOBS];
        for (size_t i = 0; i < sizeof *maxima; i++) assert_int_equal(behind[i], 0xa5);
        for (int i = 0; i < 8; i++) assert_int_equal(summaries[n_bytes + (size_t)i], 0xa5);
        free(summaries);
        free(want);
        td_dev_destroy(dev);
    }
}

static void test_sizes(void **state)
{
    (void)state;
    const td_dev_limits limits = { .rows = 1, .dim = 16 };
    td_ops ops;
    td_dev *dev = op_device(&limits, 1, false);
    td_ops_init(&ops, dev);
    td_sample_args args = { .n_jobs = 0, .n_columns = 5, .n_max = 1 };
    assert_int_equal(ops.sample_max(dev, &args), TD_OK); /* no rows: nothing is looked at */
    assert_int_equal(ops.sample_summary(dev, &args), TD_OK);
    args.n_jobs = TD_WINDOW_MAX + 1;
    assert_int_equal(ops.sample_max(dev, &args), TD_EINVAL);
    assert_int_equal(ops.sample_summary(dev, &args), TD_EINVAL);
    /* a shard whose ids are all padding */
    td_sample_max max;
    make(5);
    args = (td_sample_args){ .n_jobs = 1, .logits = z, .stride = STRIDE, .jobs = jobs, .maxima = &max };
    jobs[0].mask = -1;
    assert_int_equal(ops.sample_max(dev, &args), TD_OK);
    assert_int_equal(max.id, -1);
    assert_int_equal(max.n_allowed, 0);
    td_dev_destroy(dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_as_alone),
        cmocka_unit_test(test_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
