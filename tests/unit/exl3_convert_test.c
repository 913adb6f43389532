/* A small plain checkpoint converted whole: what comes out opens, verifies, holds the experts' weights and every other
 * byte; what must not be written is not; a run that fails leaves nothing. */
#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "checkpoint/exl3_convert.h"
#include "checkpoint_fixture.h"

#define SMALL "tests/unit/data/config_small.json"
#define GATE  "model.language_model.layers.4.mlp.experts.0.gate_proj."
enum { IN = 128, OUT = 256 }; /* of gate and up; down the other way round */

/* SMALL without quantization, as narrow as EXL3 allows, one expert in the last layer and one in the MTP layer. */
static char *plain_config(void)
{
    json_t *root = json_load_file(SMALL, 0, NULL), *text = json_object_get(root, "text_config");
    assert_non_null(text);
    json_object_del(root, "quantization_config");
    json_object_set_new(json_object_get(root, "vision_config"), "out_hidden_size", json_integer(IN));
    json_object_set_new(text, "hidden_size", json_integer(IN));
    json_object_set_new(text, "moe_intermediate_size", json_integer(OUT));
    json_object_set_new(text, "n_routed_experts", json_integer(1));
    json_object_set_new(text, "num_experts_per_tok", json_integer(1));
    for (size_t i = 0; i < 4; i++)
        json_array_set_new(json_object_get(text, "mlp_layer_types"), i, json_string("dense"));
    char *dump = json_dumps(root, JSON_INDENT(1));
    json_decref(root);
    assert_non_null(dump);
    return dump;
}

typedef struct source {
    fx_folder fx;
    char *config;
    uint16_t *weight; /* [OUT][IN] bf16 of GATE */
    char to[160], part[180];
} source;

static void make_source(source *s)
{
    td_error err;
    td_config config;
    uint64_t seed = 6;
    fx_create(&s->fx);
    s->config = plain_config();
    if (td_config_parse("config.json", s->config, strlen(s->config), NULL, NULL, 0, &config, &err))
        fail_msg("%s", err.text);
    fx_add_model(&s->fx, &config, 0);
    s->weight = malloc(IN * OUT * sizeof *s->weight);
    assert_non_null(s->weight);
    for (int i = 0; i < IN * OUT; i++) {
        float sum = 0;
        for (int j = 0; j < 4; j++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            sum += (float)(seed >> 40) * 0x1p-24f - 0.5f;
        }
        s->weight[i] = td_f32_bf16(0.05f * sum);
    }
    fx_find(&s->fx, GATE "weight")->data = s->weight;
    fx_write_text(&s->fx, "config.json", s->config);
    fx_write_text(&s->fx, "tokenizer.json", "{\"made\": \"up\"}");
    fx_write_text(&s->fx, "README.md", "of the plain form");
    snprintf(s->to, sizeof s->to, "%s-exl3", s->fx.dir);
    snprintf(s->part, sizeof s->part, "%s.part", s->to);
}

static void remove_result(const source *s)
{
    char command[400];
    snprintf(command, sizeof command, "rm -rf '%s' '%s'", s->to, s->part);
    assert_int_equal(system(command), 0);
}

static void free_source(source *s)
{
    remove_result(s);
    fx_destroy(&s->fx);
    free(s->config);
    free(s->weight);
}

static bool exists(const char *dir, const char *name)
{
    char path[300];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return access(path, F_OK) == 0;
}

static const td_tensor *tensor(const td_checkpoint *ck, const char *name)
{
    const td_tensor *t = td_checkpoint_find(ck, name);
    if (!t) fail_msg("no tensor %s", name);
    return t;
}

/* The packed gate matrix against its source, relative square error. */
static double gate_error(const td_checkpoint *ck, const uint16_t *weight, int bits)
{
    static float restored[IN * OUT];
    td_exl3 w = { .k = IN, .n = OUT, .bits2 = 2 * bits, .codebook = TD_EXL3_MCG };
    w.trellis = tensor(ck, GATE "trellis")->data;
    w.suh = tensor(ck, GATE "suh")->data;
    w.svh = tensor(ck, GATE "svh")->data;
    double lost = 0, total = 0;
    assert_int_equal(td_exl3_restore(&w, restored, NULL), TD_OK);
    for (int k = 0; k < IN; k++) {
        for (int n = 0; n < OUT; n++) {
            double x = (double)td_bf16_f32(weight[n * IN + k]), e = (double)restored[k * OUT + n] - x;
            lost += e * e;
            total += x * x;
        }
    }
    return lost / total;
}

/* Every tensor of the source is in the result with its bytes, but the experts' weights, which are gone. */
static void check_same_tensors(const td_checkpoint *from, const td_checkpoint *to)
{
    size_t n_experts = 0;
    for (size_t i = 0; i < td_checkpoint_count(from); i++) {
        const td_tensor *a = td_checkpoint_at(from, i), *b = td_checkpoint_find(to, a->name);
        if (strstr(a->name, ".mlp.experts.")) {
            assert_null(b);
            n_experts++;
            continue;
        }
        assert_non_null(b);
        assert_int_equal(a->dtype, b->dtype);
        assert_int_equal(a->n_bytes, b->n_bytes);
        assert_memory_equal(a->data, b->data, a->n_bytes);
    }
    assert_int_equal(n_experts, 2 * 3);
    assert_int_equal(td_checkpoint_count(to), td_checkpoint_count(from) + 3 * n_experts);
}

/* Hessians are asked for by matrix; what the source answers is used, its failure ends the run and leaves nothing. */
typedef struct asked {
    int n, fail_at, gates, downs;
} asked;

static td_status answer(void *user, int layer, int expert, td_projection projection, int k, float *h, bool *known,
                        td_error *err)
{
    asked *a = user;
    assert_true(layer == 4 || layer == 5);
    assert_int_equal(expert, 0);
    assert_int_equal(k, projection == TD_PROJ_DOWN ? OUT : IN);
    a->gates += projection == TD_PROJ_GATE;
    a->downs += projection == TD_PROJ_DOWN;
    if (a->n++ == a->fail_at) return td_fail(err, TD_EIO, "calibration broke");
    for (int i = 0; i < k * k; i++) h[i] = i / k == i % k ? 2.0f : 0.0f;
    *known = layer == 4;
    return TD_OK;
}

static void test_convert(void **state)
{
    source s;
    td_error err = { 0 };
    td_checkpoint *from, *to;
    td_convert_progress result;
    (void)state;
    make_source(&s);
    fx_write(&s.fx, 2);
    asked a = { .fail_at = 100 };
    td_hessian_source hessian = { &a, answer };
    td_convert_args args = { .from_dir = s.fx.dir,
                             .to_dir = s.to,
                             .codebook = TD_EXL3_MCG,
                             .bits = 5,
                             .n_threads = 2,
                             .shard_bytes_max = 4000000,
                             .hessian = &hessian };
    assert_int_equal(mkdir(s.to, 0777), 0); /* an empty folder is fine */
    if (td_exl3_convert(&args, &result, &err)) fail_msg("%s", err.text);
    assert_int_equal(result.n_done, 6);
    assert_int_equal(result.n_total, 6);
    assert_int_equal(a.n, 6);
    assert_int_equal(a.gates, 2);
    assert_int_equal(a.downs, 2);
    assert_int_equal(result.n_feedback, 3);
    assert_false(exists(s.part, ""));
    assert_true(exists(s.to, "tokenizer.json") && exists(s.to, "model.safetensors.index.json"));
    assert_false(exists(s.to, "README.md"));

    if (td_checkpoint_open(s.fx.dir, &from, &err)) fail_msg("%s", err.text);
    if (td_checkpoint_open(s.to, &to, &err)) fail_msg("%s", err.text);
    if (td_checkpoint_verify(to, &err)) fail_msg("%s", err.text);
    assert_int_equal(td_checkpoint_config(to)->quant_method, TD_QUANT_EXL3);
    assert_true(td_checkpoint_config(to)->quant_bits == 5.0f);
    assert_true(td_checkpoint_n_files(to) > 1);
    check_same_tensors(from, to);
    assert_int_equal(*(const uint32_t *)tensor(to, GATE "mcg")->data, TD_EXL3_MCG_MARK);
    double error = gate_error(to, s.weight, 5);
    assert_true(error < 1.05 * 0.0012 && error > 0.0009);
    td_checkpoint_close(from);
    td_checkpoint_close(to);

    assert_int_equal(td_exl3_convert(&args, &result, &err), TD_EINVAL); /* not over an earlier result */
    assert_non_null(strstr(err.text, "is not empty"));
    args.from_dir = s.to;
    args.to_dir = "/tmp/never";
    assert_int_equal(td_exl3_convert(&args, &result, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, "is quantized already"));
    free_source(&s);
}

static void test_failure_leaves_nothing(void **state)
{
    source s;
    td_error err = { 0 };
    td_convert_progress result;
    (void)state;
    make_source(&s);
    fx_write(&s.fx, 1);
    asked a = { .fail_at = 1 };
    td_hessian_source hessian = { &a, answer };
    td_convert_args args = { .from_dir = s.fx.dir,
                             .to_dir = s.to,
                             .codebook = TD_EXL3_MCG,
                             .bits = 5,
                             .n_threads = 2,
                             .shard_bytes_max = 1000000000,
                             .hessian = &hessian };
    assert_int_equal(td_exl3_convert(&args, &result, &err), TD_EIO);
    assert_non_null(strstr(err.text, "calibration broke"));
    assert_false(exists(s.to, ""));
    assert_false(exists(s.part, ""));

    assert_int_equal(mkdir(s.part, 0777), 0);
    assert_int_equal(td_exl3_convert(&args, &result, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, "cut off"));
    assert_true(exists(s.part, ""));
    free_source(&s);
}

static void test_bad_weight(void **state)
{
    source s;
    td_error err = { 0 };
    td_convert_progress result;
    (void)state;
    make_source(&s);
    s.weight[3 * IN + 7] = 0x7f80; /* infinity, output 3, input 7 */
    fx_write(&s.fx, 1);
    td_convert_args args = { .from_dir = s.fx.dir,
                             .to_dir = s.to,
                             .codebook = TD_EXL3_MCG,
                             .bits = 8,
                             .n_threads = 1,
                             .shard_bytes_max = 1000000000 };
    assert_int_equal(td_exl3_convert(&args, &result, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, GATE "weight"));
    assert_non_null(strstr(err.text, "input 7, output 3 is not finite"));
    assert_false(exists(s.to, ""));
    free_source(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_convert),
        cmocka_unit_test(test_failure_leaves_nothing),
        cmocka_unit_test(test_bad_weight),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
