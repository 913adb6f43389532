/* tandem bench full without a GPU: its sizes are the released ones, its checkpoint of shapes is what the layout demands
 * byte for byte, its values are what they claim to be, and a run of the small shape adds up. argv[1]: the program. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <jansson.h>

#include "checkpoint/shapes.h"
#include "cli/full_size.h"
#include "model/model.h"
#include "model/stand_in.h"
#include "ops/random.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#define FULL "tests/unit/data/config_full.json"

static const char *program;

static td_config config_of(td_full_shape shape, int n_layers)
{
    td_config config;
    td_error err;
    if (td_full_config(shape, n_layers, &config, &err)) fail_msg("%s", err.text);
    return config;
}

/* ---- sizes ---- */

/* Every number of the text model equals the released config.json's; only MTP, vision and ids are left out. */
static void test_real_shape(void **state)
{
    (void)state;
    td_config real = config_of(TD_SHAPE_REAL, 0), released;
    td_error err;
    char *text = (char *)malloc(65536);
    FILE *file = fopen(FULL, "rb");
    assert_non_null(text);
    assert_non_null(file);
    size_t n = fread(text, 1, 65536, file);
    fclose(file);
    if (td_config_parse(FULL, text, n, NULL, NULL, 0, &released, &err)) fail_msg("%s", err.text);
    free(text);
    released.n_mtp = 0;
    released.is_dsa[released.n_layers] = released.is_moe[released.n_layers] = false;
    released.has_vision = false;
    memset(&released.vision, 0, sizeof released.vision);
    released.n_eos = real.n_eos;
    memcpy(released.eos, real.eos, sizeof real.eos);
    int *ids[] = { &released.image_id, &released.image_start_id, &released.image_end_id,
                   &released.video_id, &released.video_start_id, &released.video_end_id };
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) *ids[i] = -1;
    assert_memory_equal(&real, &released, sizeof real);
}

static void test_layers_keep_their_pattern(void **state)
{
    (void)state;
    td_error err;
    td_config five = config_of(TD_SHAPE_REAL, 5), out;
    static const bool dsa[] = { false, false, false, true, false }, moe[] = { false, false, false, true, true };
    assert_int_equal(five.n_layers, 5);
    assert_memory_equal(five.is_dsa, dsa, sizeof dsa);
    assert_memory_equal(five.is_moe, moe, sizeof moe);
    assert_int_equal(config_of(TD_SHAPE_SMALL, 0).n_layers, 8);
    assert_int_equal(td_full_config(TD_SHAPE_REAL, 256, &out, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, "1 to 45"));
}

/* ---- shapes ---- */

/* The released folder has 150,226 tensors with 175,622,979,576 bytes. Not ours: the vision tower (347 tensors,
 * 563,627,008 values of 2 bytes) and the MTP layer (25 tensors, and 3,634,498,944 bytes of 288 experts with 12 each).
 * The folder keeps A_log, dt_bias and the bases and scales of hyper-connections as fp32 (566,268 bytes more). */
static void test_shapes_are_the_released_ones(void **state)
{
    (void)state;
    td_config real = config_of(TD_SHAPE_REAL, 0);
    td_checkpoint *ck;
    td_error err;
    if (td_checkpoint_create_shapes(&real, 4, NULL, &ck, &err)) fail_msg("%s", err.text);
    assert_int_equal(td_checkpoint_count(ck), 150226 - 347 - 25 - 288 * 12);
    if (td_checkpoint_verify(ck, &err)) fail_msg("%s", err.text);
    int64_t mtp = 1536 * 4096 + 1536 + 16384 * 1536 + 512 * 4096 + 512 + 32768 * 512 + 4096 * 16384 /* attention */
                  + 4096 * 1536 + 128 * 4096 + 2 * 128 + 32 * 4096 + 128 * 4096 + 4 * 128           /* indexer */
                  + 2 * 4096 + 288 * 4096 + 3 * 2048 * 4096 + 4096 * 8192 + 3 * 4096;
    uint64_t others = 2 * 563627008ull + 3634498944ull + 2 * (uint64_t)mtp + 4 * 288 + 566268;
    assert_int_equal(td_checkpoint_data_bytes(ck), 175622979576ull - others);
    assert_null(td_checkpoint_values(ck));
    td_checkpoint_close(ck);
}

/* Plain experts, and what cannot be. */
static void test_other_shapes(void **state)
{
    (void)state;
    td_config small = config_of(TD_SHAPE_SMALL, 4);
    td_checkpoint *ck = NULL;
    td_error err;
    td_expert_matrix matrix;
    if (td_checkpoint_create_shapes(&small, 0, NULL, &ck, &err)) fail_msg("%s", err.text);
    if (td_checkpoint_verify(ck, &err)) fail_msg("%s", err.text);
    assert_int_equal(td_checkpoint_expert(ck, 3, 15, TD_PROJ_DOWN, &matrix, &err), TD_OK);
    assert_null(matrix.trellis);
    assert_int_equal(td_checkpoint_expert(ck, 3, 16, TD_PROJ_DOWN, &matrix, &err), TD_EINVAL);
    td_checkpoint_close(ck);
    assert_int_equal(td_checkpoint_create_shapes(&small, 9, NULL, &ck, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, "9 bits"));
}

/* One rank's weights of the whole model: the experts' bytes are known to the byte (three matrices of 6,322,176 bytes
 * without their marks), everything together is 75 GiB. */
static void test_plan_of_a_rank(void **state)
{
    (void)state;
    td_config real = config_of(TD_SHAPE_REAL, 0);
    td_checkpoint *ck;
    td_error err;
    td_ops ops;
    td_model_plan plan;
    td_dev *dev = td_dev_create_sizes(TD_CPU, false);
    assert_non_null(dev);
    td_ops_init(&ops, dev);
    td_model_options o = { .world = 2,
                           .n_slots = 4,
                           .n_blocks = 2048,
                           .chunk_rows = 2048,
                           .context_tokens = 1 << 20,
                           .kv = TD_KV_FP8,
                           .dense = TD_W_Q4,
                           .head = TD_W_FP8,
                           .loopback = true };
    if (td_checkpoint_create_shapes(&real, 4, NULL, &ck, &err)) fail_msg("%s", err.text);
    if (td_model_plan_bytes(dev, &ops, ck, &o, &plan, &err)) fail_msg("%s", err.text);
    assert_int_equal(plan.experts_bytes, 42ull * 288 * 6322176);
    assert_int_equal(plan.kv_bytes_per_token, 6204);
    double weights = (double)(plan.experts_bytes + plan.dense_bytes + plan.embed_bytes + plan.head_bytes) * 0x1p-30;
    if (!(weights > 75.0 && weights < 75.2)) fail_msg("weights of a rank: %.3f GiB", weights);
    td_checkpoint_close(ck);
    td_dev_destroy(dev);
}

/* ---- values ---- */

static void test_bits_are_known(void **state)
{
    (void)state; /* the first outputs of splitmix64 from 0 */
    assert_true(td_random_bits(0, 0) == 0xe220a8397b1dcdafu);
    assert_true(td_random_bits(0, 1) == 0x6e789e6aa1b965f4u);
    assert_true(td_random_bits(0, 2) == 0x06c45d188009454fu);
}

static void fill(td_random_kind kind, float scale, int width, size_t n, void *out)
{
    td_random_args args = { .kind = kind, .seed = 77, .scale = scale, .width = width, .n = n, .out = out };
    assert_int_equal(td_cpu_random_fill(NULL, &args), TD_OK);
}

static void test_bell(void **state)
{
    (void)state;
    enum { N = 200000 };
    td_bf16 *x = (td_bf16 *)malloc(N * sizeof *x);
    double sum = 0, squares = 0, within = 0;
    assert_non_null(x);
    fill(TD_RANDOM_BF16, 0.02f, 0, N, x);
    for (int i = 0; i < N; i++) {
        double v = (double)td_bf16_f32(x[i]);
        sum += v;
        squares += v * v;
        within += fabs(v) < 0.02;
    }
    assert_true(fabs(sum / N) < 3e-4);
    assert_true(fabs(sqrt(squares / N) - 0.02) < 1e-4);
    assert_true(fabs(within / N - 0.683) < 0.01);
    free(x);
}

/* Rows are those of docs/kv-pool.md: finite codes, the largest between 128 and 256, a power of two, zeros. */
static void test_cached_rows(void **state)
{
    (void)state;
    enum { N = 64, WIDTH = 512, ROW = WIDTH + 16 };
    static uint8_t rows[N * ROW];
    fill(TD_RANDOM_KV_FP8, 1, WIDTH, N, rows);
    for (int r = 0; r < N; r++) {
        const uint8_t *row = rows + (size_t)r * ROW;
        float largest = 0, scale, square = 0;
        memcpy(&scale, row + WIDTH, sizeof scale);
        assert_true(scale == 0x1p-6f);
        for (int i = 0; i < WIDTH; i++) {
            float v = td_e4m3_f32(row[i]);
            assert_true(isfinite(v));
            if (fabsf(v) > largest) largest = fabsf(v);
            square += v * scale * v * scale;
        }
        assert_true(largest >= 128 && largest <= 256);
        assert_true(square / WIDTH > 0.7f && square / WIDTH < 1.3f);
        for (int i = WIDTH + 4; i < ROW; i++) assert_int_equal(row[i], 0);
        if (r) assert_memory_not_equal(row, row - ROW, WIDTH);
    }
}

static void test_signs(void **state)
{
    (void)state;
    enum { N = 4096 };
    static td_f16 x[N];
    int negative = 0;
    fill(TD_RANDOM_SIGNS, 0.016f, 0, N, x);
    for (int i = 0; i < N; i++) {
        float v = td_f16_f32(x[i]);
        assert_true(fabsf(v) >= 0.0119f && fabsf(v) <= 0.0201f);
        negative += v < 0;
    }
    assert_in_range(negative, N / 2 - 200, N / 2 + 200);
}

/* Parts start at different places, at whole cache lines, inside the pool. */
static void test_parts(void **state)
{
    (void)state;
    static td_bf16 pool[4096];
    static uint16_t words[64 * 1024];
    static td_f16 scales[1024];
    td_values values = { .weights = pool,
                         .words = words,
                         .in_scales = scales,
                         .out_scales = scales,
                         .n_weights = 4096,
                         .n_words = 64 * 1024,
                         .n_scales = 1024 };
    td_stand_in s = { .values = &values };
    const td_bf16 *first = td_stand_in_weights(&s, 1000);
    int same = 0;
    for (int i = 0; i < 200; i++) {
        const td_bf16 *part = td_stand_in_weights(&s, 1000);
        assert_true(part >= pool && part + 1000 <= pool + 4096 && (part - pool) % 64 == 0);
        same += part == first;
    }
    assert_true(same < 20);
    assert_ptr_equal(td_stand_in_weights(&s, 4096), pool);
    assert_null(td_stand_in_weights(&s, 4097));
    td_exl3 whole = { .k = 256, .n = 512, .bits2 = 8, .codebook = TD_EXL3_MCG };
    assert_int_equal(td_stand_in_exl3(&s, &whole), TD_OK);
    assert_true(whole.trellis >= words && whole.trellis + 256 * 512 / 4 <= words + 64 * 1024);
    whole.n = 1024; /* 65,536 words fit, 1,024 scales fit; twice as many do not */
    assert_int_equal(td_stand_in_exl3(&s, &whole), TD_OK);
    whole.k = 512;
    assert_int_equal(td_stand_in_exl3(&s, &whole), TD_EINVAL);
    float norm[4], bias[4];
    td_stand_in_floats(&s, "input_layernorm.weight", 4, norm);
    td_stand_in_floats(&s, "mlp.gate.e_score_correction_bias", 4, bias);
    for (int i = 0; i < 4; i++) assert_true(norm[i] == 1.0f && fabsf(bias[i] - 7) < 0.01f);
}

/* ---- a run ---- */

static json_t *run_json(const char *settings)
{
    char command[1024];
    json_error_t error;
    snprintf(command, sizeof command, "%s bench full --backend cpu --threads 2 --shape small --json --runs 2 %s",
             program, settings);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    json_t *root = json_loadf(pipe, 0, &error);
    int status = pclose(pipe);
    if (!root || status) fail_msg("%s: status %d, %s", command, status, error.text);
    return root;
}

static double number(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_number(value)) fail_msg("%s is no number", key);
    return json_number_value(value);
}

/* What a case says follows from its operations and the ceilings. */
static void check_case(const json_t *root, const json_t *c)
{
    const json_t *tops = json_object_get(root, "ceilings"), *ops = json_object_get(c, "ops"), *op;
    double bytes = 0, flops = 0, s = 0, layers = number(root, "layers"), gathers = 0;
    size_t i;
    json_array_foreach(ops, i, op)
    {
        bytes += number(op, "bytes");
        flops += number(op, "flops");
        s += number(op, "s");
        if (strcmp(json_string_value(json_object_get(op, "op")), "gather") == 0) gathers += number(op, "calls");
    }
    assert_true(gathers == 2 * layers);
    assert_true(fabs(bytes - number(c, "bytes")) < 1 && fabs(flops - number(c, "flops")) < 1);
    double experts = number(c, "expert_bytes"), distinct = number(c, "experts_a_layer"), moe = layers - 3;
    double one = 3 * (256 * 128 / 2 + 2 * (256 + 128)); /* a half: 4 bits a weight, scales of both sides in f16 */
    assert_true(fabs(experts - distinct * moe * one) < 1);
    double bytes_s =
        (bytes - experts) / number(tops, "copy_bytes_per_s") + experts / number(tops, "expert_bytes_per_s");
    double flops_s = flops / number(tops, "multiply_flops_per_s"), floor_s = fmax(bytes_s, flops_s);
    double median = number(json_object_get(c, "s"), "median");
    assert_true(fabs(number(c, "floor_s") / floor_s - 1) < 1e-9);
    assert_true(fabs(number(c, "ratio") / ((median - number(c, "waits_s")) / floor_s) - 1) < 1e-9);
    assert_true(fabs(number(c, "tokens_per_s") * median / number(c, "rows") - 1) < 1e-9);
    assert_true(s > 0);
}

/* The plot is a closed document with a line for each window size. */
static void check_plot(FILE *svg, int n_lines)
{
    static char text[32768];
    size_t n = fread(text, 1, sizeof text - 1, svg);
    text[n] = '\0';
    assert_int_equal(strncmp(text, "<svg ", 5), 0);
    assert_non_null(strstr(text, "</svg>"));
    assert_non_null(strstr(text, "prefers-color-scheme:dark"));
    for (const char *at = text; (at = strstr(at, "<polyline")); at++) n_lines--;
    assert_int_equal(n_lines, 0);
}

static void test_run(void **state)
{
    (void)state;
    char path[] = "/tmp/tandem_plot_XXXXXX", settings[512];
    int file = mkstemp(path);
    assert_true(file >= 0);
    snprintf(settings, sizeof settings,
             "--layers 4 --exchange-us 0 --rows 1,8 --contexts 512,16384 --prompts 0,1024 --chunk-rows 64 "
             "--expert-gbs 1.5 --svg %s",
             path);
    json_t *root = run_json(settings);
    const json_t *cases = json_object_get(root, "cases"), *c;
    static const struct {
        int rows, context, position;
    } wanted[] = { { 1, 512, 512 },     { 8, 512, 512 }, { 1, 16384, 16383 },
                   { 8, 16384, 16382 }, { 64, 0, 0 },    { 64, 1024, 1024 } };
    size_t i;
    assert_int_equal(json_array_size(cases), 6);
    assert_true(number(json_object_get(root, "ceilings"), "expert_bytes_per_s") == 1.5e9);
    json_array_foreach(cases, i, c)
    {
        assert_int_equal(number(c, "rows"), wanted[i].rows);
        assert_int_equal(number(c, "context"), wanted[i].context);
        assert_int_equal(number(c, "position"), wanted[i].position);
        check_case(root, c);
    }
    /* One row picks four experts of its layer, a long context costs more operations, a prompt picks nearly all. */
    assert_true(number(json_array_get(cases, 0), "experts_a_layer") == 4);
    assert_true(number(json_array_get(cases, 5), "experts_a_layer") > 14);
    assert_true(number(json_array_get(cases, 2), "flops") > number(json_array_get(cases, 0), "flops"));
    assert_int_equal(json_array_size(json_object_get(root, "targets")), 0);
    json_decref(root);
    FILE *svg = fdopen(file, "r");
    assert_non_null(svg);
    check_plot(svg, 3);
    fclose(svg);
    remove(path);
}

/* Exchanges take the time that they are told to, and are not counted against the model; what no pool holds is left out.
 */
static void test_waits(void **state)
{
    (void)state;
    json_t *root = run_json("--layers 4 --exchange-us 3000 --rows 1 --contexts 512,4096 --prompts none "
                            "--pool-tokens 1024 2>/dev/null");
    assert_int_equal(json_array_size(json_object_get(root, "cases")), 1);
    const json_t *c = json_array_get(json_object_get(root, "cases"), 0);
    assert_true(fabs(number(c, "waits_s") - 8 * 3e-3) < 1e-9);
    assert_true(number(json_object_get(c, "s"), "low") > 8 * 3e-3);
    json_decref(root);
}

static void expect_refusal(const char *settings, int code, const char *words)
{
    char command[1024], text[4096] = "";
    snprintf(command, sizeof command, "%s bench full --backend cpu %s 2>&1 >/dev/null", program, settings);
    FILE *pipe = popen(command, "r");
    assert_non_null(pipe);
    size_t n = fread(text, 1, sizeof text - 1, pipe);
    text[n] = '\0';
    int status = pclose(pipe);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != code || !strstr(text, words))
        fail_msg("%s: status %d, \"%s\", expected %d with \"%s\"", settings, status, text, code, words);
}

static void test_refusals(void **state)
{
    (void)state;
    expect_refusal("--shape small --pool-tokens 1073741824", 3, "--pool-tokens ");
    expect_refusal("--layers 5 --pool-tokens 1073741824", 3, "--layers ");
    expect_refusal("--chunk-rows 100", 2, "multiple of 64");
    expect_refusal("--rows none --prompts none", 2, "nothing is left");
    expect_refusal("--shape small --svg /nowhere/x.svg", 1, "/nowhere/");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_real_shape),
        cmocka_unit_test(test_layers_keep_their_pattern),
        cmocka_unit_test(test_shapes_are_the_released_ones),
        cmocka_unit_test(test_other_shapes),
        cmocka_unit_test(test_plan_of_a_rank),
        cmocka_unit_test(test_bits_are_known),
        cmocka_unit_test(test_bell),
        cmocka_unit_test(test_cached_rows),
        cmocka_unit_test(test_signs),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_run),
        cmocka_unit_test(test_waits),
        cmocka_unit_test(test_refusals),
    };
    if (argc < 2) {
        fprintf(stderr, "usage: %s TANDEM\n", argv[0]);
        return 2;
    }
    program = argv[1];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
