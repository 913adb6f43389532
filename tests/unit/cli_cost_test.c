/* The formulas behind every ratio, against numbers worked out by hand and, summed over the operations that a real
 * forward pass calls, against each other: a formula that forgets a product shows there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cli/bench_rig.h"
#include "cli/ceilings.h"
#include "cli/op_timer.h"

#include <math.h>
#include <stdio.h>

#define FULL "tests/unit/data/config_full.json"
#define DEMO "models/demo"

static td_config full_config(void)
{
    static char text[65536];
    td_config config;
    td_error err;
    FILE *file = fopen(FULL, "rb");
    assert_non_null(file);
    size_t n = fread(text, 1, sizeof text, file);
    fclose(file);
    if (td_config_parse(FULL, text, n, NULL, NULL, 0, &config, &err)) fail_msg("%s", err.text);
    return config;
}

static void expect_near(const char *what, double got, double want, double bound)
{
    if (!(fabs(got - want) <= bound * want)) fail_msg("%s: %.6g, expected %.6g", what, got, want);
}

/* GFLOP of a row of the full model on one of two ranks, added up on paper from the matrices' shapes:
 *   experts      42 layers * 8 * 6 * 4096 * 1024                                                   8.456
 *   shared       42 * 6 * 4096 * 1024                                                              1.057
 *   dense         3 * 6 * 4096 * 6144                                                              0.453
 *   router       42 * 2 * 4096 * 288                                                               0.099
 *   KDA          34 * (2 * 4096 * (3 * 4096 + 256 + 32) + 4 * 128 * 4096 + 2 * 4096 * 4096)         4.714
 *   DSA          11 * (2 * 4096 * (1536 + 512 + 256) + 2 * 1536 * 8192 + 2 * 512 * 32 * 512
 *                      + 2 * 8192 * 4096)                                                           1.407
 *   recurrence   34 * 32 * 7 * 128 * 128                                                            0.125
 *   attention    11 * 32 * 2048 * 512 * 4 (2,048 tokens at position 2047)                           1.476
 * and about one per cent of elementwise work, most of it in the hyper-connections. */
static void test_full_row(void **state)
{
    (void)state;
    td_config config = full_config();
    double sum = 8.456 + 1.057 + 0.453 + 0.099 + 4.714 + 1.407 + 0.125 + 1.476;
    double row = td_cost_row_flops(&config, 2, 2047) * 1e-9;
    if (!(row > sum && row < 1.02 * sum)) fail_msg("%.4f GFLOP a row, expected a little more than %.4f", row, sum);

    /* Past 2,048 tokens the indexer chooses: queries, weights, and a score of every pool. */
    double index = 11 * (2.0 * 1536 * 4096 + 2.0 * 4096 * 32 + 2048 * 32 * 256.0) * 1e-9;
    double later = td_cost_row_flops(&config, 2, 8191) * 1e-9;
    expect_near("row with selection", later - row, index, 0.02);

    /* One rank alone does both shards' work, but what both would repeat only once. */
    double alone = td_cost_row_flops(&config, 1, 2047) * 1e-9;
    assert_true(alone < 2 * row && alone > 1.9 * row);
}

static void test_prompt_is_the_sum_of_its_rows(void **state)
{
    (void)state;
    td_config config = full_config();
    double head = 2.0 * 4096 * 77440, sum = head;
    for (int pos = 0; pos < 300; pos++) sum += td_cost_row_flops(&config, 2, pos);
    expect_near("prompt", td_cost_prompt_flops(&config, 2, 300), sum, 1e-12);
}

static void test_active_bytes(void **state)
{
    (void)state;
    td_config config = full_config();
    td_model_plan plan = { .dense_bytes = 1000,
                           .head_bytes = 200,
                           .experts_bytes = 288 * 50,
                           .embed_bytes = 154880 * 8,
                           .kv_bytes = 1 << 30,
                           .mtp_bytes = 12345 };
    expect_near("active", td_cost_active_bytes(&config, &plan), 1000 + 200 + 8 * 50 + 8, 1e-12);
}

/* A window of 3 rows, and attention of 2 heads at position 10 of a short sequence: everything on paper. */
static void test_calls(void **state)
{
    (void)state;
    td_dev_limits limits = { .rows = 64,
                             .dim = 256,
                             .n_heads = 2,
                             .n_experts = 8,
                             .top_k = 2,
                             .expert_width = 128,
                             .index_heads = 4,
                             .index_topk = 256,
                             .context_tokens = 1024 };
    td_dev *dev;
    td_error err;
    if (td_dev_create_cpu(&limits, 1, false, &dev, &err)) fail_msg("%s", err.text);
    td_segment segment = { .n_rows = 3, .pos = 10 };
    td_window window = { .n_rows = 3, .n_segments = 1, .segments = &segment, .host_segments = &segment };

    td_weight w = { .format = TD_W_BF16, .out = 512, .in = 256 };
    td_linear_args linear = { .n_rows = 3, .w = &w, .y_f32 = (float[1]){ 0 } };
    td_cost cost = td_cost_linear(dev, &linear);
    expect_near("linear flops", cost.flops, 3 * 2.0 * 512 * 256, 0);
    expect_near("linear bytes", cost.bytes, 512 * 256 * 2 + 3 * 256 * 2 + 3 * 512 * 4, 0);

    td_kda_args kda = { .window = &window, .n_heads = 2 };
    cost = td_cost_kda(dev, &kda);
    expect_near("kda flops", cost.flops, 3 * 2 * (7.0 * 128 * 128 + 3 * 128 * 8), 0);
    expect_near("kda bytes", cost.bytes, 2 * 2 * 128 * 128 * 4 + 3 * (6 * 256 + 2) * 2, 0);

    td_dsa_attend_args attend = { .window = &window,
                                  .cache = { .kv_lora = 512 },
                                  .kv_b = { .n_heads = 2, .k_dim = 256, .v_dim = 256, .kv_lora = 512 },
                                  .top_pools = 64 };
    cost = td_cost_dsa_attend(dev, &attend); /* rows at 10, 11, 12 see 11, 12, 13 tokens */
    expect_near("attend flops", cost.flops, 2 * (3 * 2.0 * 512 * 512 + 4.0 * 512 * (11 + 12 + 13)), 0);
    attend.top_pools = 2; /* 2 pools and the tail: 8 + 3, 8 + 0, 8 + 1 */
    cost = td_cost_dsa_attend(dev, &attend);
    expect_near("sparse attend flops", cost.flops, 2 * (3 * 2.0 * 512 * 512 + 4.0 * 512 * (11 + 8 + 9)), 0);

    td_dsa_select_args select = { .window = &window, .n_heads = 4, .top_pools = 2 };
    cost = td_cost_dsa_select(dev, &select); /* 2 pools at 10: none to leave out; 3 at 11 and 12 */
    expect_near("select flops", cost.flops, (3 + 3) * 4 * 258.0, 0);
    td_dev_destroy(dev);
}

/* --- the formulas against the forward pass --- */

static td_cost cost_of_window(td_rig *rig, td_op_timer *timer, int n_rows, bool chunked)
{
    td_error err;
    int n_calls;
    td_op_timer_start(timer);
    if (td_rig_forward(rig, n_rows, chunked, &err)) fail_msg("%s", err.text);
    td_op_timer_stop(timer);
    if (td_rig_commit(rig, n_rows, &err)) fail_msg("%s", err.text);
    return td_op_timer_total(timer, &n_calls);
}

static void test_demo_forward(void **state)
{
    (void)state;
    td_rig rig;
    td_error err;
    static td_op_timer timer;
    if (td_rig_open(DEMO, 1, 512, 320, "bf16", &rig, &err)) fail_msg("%s", err.text);
    td_op_timer_install(&timer, &rig.ops);
    const td_config *config = td_checkpoint_config(rig.checkpoint);

    /* In two windows: up to 256 tokens all are attended to, and queries of the indexer are not even computed. */
    td_cost first = cost_of_window(&rig, &timer, 256, true), second = cost_of_window(&rig, &timer, 64, true);
    double head = 2.0 * config->hidden * config->vocab_size;
    double prompt = td_cost_prompt_flops(config, 1, 320), half = td_cost_prompt_flops(config, 1, 256);
    expect_near("prompt of 256", first.flops, half, 0.005);
    expect_near("64 rows after it", second.flops, prompt - half + head, 0.005);

    td_cost row = cost_of_window(&rig, &timer, 1, false);
    expect_near("row at 320", row.flops, td_cost_row_flops(config, 1, 320) + head, 0.005);
    /* Beside the weights a row moves states, cached rows and its own activations: more bytes, but not many times. */
    double active = td_cost_active_bytes(config, &rig.plan);
    assert_true(row.bytes > active && row.bytes < 1.6 * active);
    td_rig_close(&rig);
}

static void test_ratios_are_plausible(void **state)
{
    (void)state;
    td_ceilings c, other = { .copy_bytes_per_s = 1e15, .read_bytes_per_s = 1, .fma_flops_per_s = 1 };
    td_error err;
    assert_int_equal(td_ceilings_measure(1, &c, &err), TD_OK);
    assert_int_equal(c.n_threads, 1);
    assert_true(c.copy_bytes_per_s > 1e8 && c.copy_bytes_per_s < 1e12); /* one core of anything that runs this */
    assert_true(c.read_bytes_per_s > 1e8 && c.read_bytes_per_s < 1e12);
    assert_true(c.fma_flops_per_s > 1e8 && c.fma_flops_per_s < 1e12);
    double fma = c.fma_flops_per_s;
    td_ceilings_raise(&c, &other);
    assert_true(c.copy_bytes_per_s == 1e15 && c.fma_flops_per_s == fma);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_full_row),     cmocka_unit_test(test_prompt_is_the_sum_of_its_rows),
        cmocka_unit_test(test_active_bytes), cmocka_unit_test(test_calls),
        cmocka_unit_test(test_demo_forward), cmocka_unit_test(test_ratios_are_plausible),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
