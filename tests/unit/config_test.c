/* config.json: the released numbers read back, every refusal with its words, other spellings that are accepted. Each
 * case is one edit of a good file, so that nothing but the edit can be the reason. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "checkpoint/config.h"

#include <jansson.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FULL  "tests/unit/data/config_full.json"
#define SMALL "tests/unit/data/config_small.json"

/* "a.b.c": the object that holds c, and c. */
static json_t *walk(json_t *root, const char *path, const char **key)
{
    for (const char *dot; (dot = strchr(path, '.')); path = dot + 1) {
        char name[64];
        snprintf(name, sizeof name, "%.*s", (int)(dot - path), path);
        root = json_object_get(root, name);
        assert_non_null(root);
    }
    *key = path;
    return root;
}

/* Parses the good file with path set to the JSON value (NULL: removed). */
static td_status parse_edited(const char *file, const char *path, const char *value, td_config *out, td_error *err)
{
    json_t *root = json_load_file(file, 0, NULL);
    assert_non_null(root);
    if (path) {
        const char *key;
        json_t *object = walk(root, path, &key);
        if (value)
            json_object_set_new(object, key, json_loads(value, JSON_DECODE_ANY, NULL));
        else
            json_object_del(object, key);
    }
    char *text = json_dumps(root, 0);
    td_status status = td_config_parse("c.json", text, strlen(text), "g.json", NULL, 0, out, err);
    free(text);
    json_decref(root);
    return status;
}

static void test_released(void **state)
{
    (void)state;
    td_config c;
    td_error err = { 0 };
    assert_int_equal(parse_edited(FULL, NULL, NULL, &c, &err), TD_OK);
    assert_int_equal(c.vocab_size, 154880);
    assert_int_equal(c.hidden, 4096);
    assert_int_equal(c.n_layers, 45);
    assert_int_equal(c.intermediate, 12288);
    assert_int_equal(c.moe_intermediate, 2048);
    assert_int_equal(c.shared_intermediate, 2048);
    assert_int_equal(c.n_heads, 64);
    assert_int_equal(c.n_experts, 288);
    assert_int_equal(c.top_k, 8);
    assert_true(c.routed_scale == 2.5f && c.norm_topk && c.rms_eps == 1e-5f && c.swiglu_limit == 10.0f);
    assert_int_equal(c.q_lora, 1536);
    assert_int_equal(c.kv_lora, 512);
    assert_int_equal(c.qk_dim, 256);
    assert_int_equal(c.v_dim, 256);
    assert_int_equal(c.index_topk, 2048);
    assert_int_equal(c.index_kpool, 4);
    assert_int_equal(c.index_heads, 32);
    assert_int_equal(c.kda_heads, 64);
    assert_true(c.kda_lower_bound == -5.0f && c.hc_eps == 1e-6f);
    assert_int_equal(c.hc_iters, 20);
    assert_int_equal(c.n_mtp, 1);
    assert_int_equal(td_config_n_dsa(&c), 11);
    assert_int_equal(td_config_n_moe(&c), 42);
    for (int i = 0; i < 45; i++) {
        assert_int_equal(c.is_dsa[i], i % 4 == 3);
        assert_int_equal(c.is_moe[i], i >= 3);
    }
    assert_true(c.is_dsa[45] && c.is_moe[45]); /* MTP */
    assert_int_equal(c.n_eos, 3);
    assert_int_equal(c.eos[1], 154827);
    assert_int_equal(c.pad_id, 154820);
    assert_int_equal(c.image_id, 154854);
    assert_true(c.has_vision);
    assert_int_equal(c.vision.projection, 10240);
    assert_true(c.vision.rope_theta == 10000.0f);
    assert_int_equal(c.quant_method, TD_QUANT_EXL3);
    assert_true(c.quant_bits == 4.0f);
    assert_string_equal(c.quant_codebook, "mcg");
    assert_true(c.temperature == 1.0f && c.top_p == 1.0f);
}

static const struct refusal {
    const char *path, *value, *says;
} REFUSALS[] = {
    { "model_type", "\"qwen3\"", "c.json: model_type: \"qwen3\", must be \"glm5_next\"" },
    { "model_type", NULL, "model_type: missing or not a string" },
    { "text_config", "[]", "text_config: not an object" },
    { "text_config.model_type", "\"glm4\"", "text_config.model_type: \"glm4\", must be \"glm5_next_text\"" },
    { "text_config.qk_rope_head_dim", "64", "text_config.qk_rope_head_dim: 64, must be 0" },
    { "text_config.mla_use_nope", "false", "text_config.mla_use_nope: false, must be true" },
    { "text_config.q_lora_rank", "null", "text_config.q_lora_rank: missing or null" },
    { "text_config.num_key_value_heads", "1", "text_config.num_key_value_heads: 1, must be 64" },
    { "text_config.index_kpool", NULL, "text_config.index_kpool: missing or null" },
    { "text_config.index_kpool", "16", "text_config.index_kpool: 16, must be 4" },
    { "text_config.index_kpool", "0", "text_config.index_kpool: 0, must be 4" },
    { "text_config.index_topk", "2046", "text_config.index_topk: 2046, must be a multiple of 4" },
    { "text_config.index_topk", "0", "text_config.index_topk: 0, must be 4 to 65536" },
    { "text_config.index_head_dim", "64", "text_config.index_head_dim: 64, must be 128" },
    { "text_config.index_n_heads", "0", "text_config.index_n_heads: 0, must be 1 to 256" },
    { "text_config.linear_attn_config.head_dim", "64", "text_config.linear_attn_config.head_dim: 64, must be 128" },
    { "text_config.linear_attn_config.short_conv_kernel_size", "3", "short_conv_kernel_size: 3, must be 4" },
    { "text_config.linear_attn_config.num_heads", "7", "num_heads: 7, must be a multiple of 2" },
    { "text_config.linear_attn_config.gate_lower_bound", "0", "gate_lower_bound: must be below 0" },
    { "text_config.linear_attn_config.gate_lower_bound", "\"x\"", "gate_lower_bound: not a number" },
    { "text_config.linear_attn_config", "{\"safe_gate\": false}", "gate_lower_bound: null without safe_gate" },
    { "text_config.linear_attn_config", "3", "linear_attn_config: not an object" },
    { "text_config.linear_attn_config.kda_layers", "[0, 1]", "kda_layers: contradicts layer_types at layer 2" },
    { "text_config.linear_attn_config.full_attn_layers", "[0]",
      "full_attn_layers: contradicts layer_types at layer 0" },
    { "text_config.linear_attn_config.kda_layers", "[-1]", "kda_layers: holds something that is no layer" },
    { "text_config.n_group", "4", "text_config.n_group: 4, must be 1" },
    { "text_config.topk_group", "2", "text_config.topk_group: 2, must be 1" },
    { "text_config.moe_layer_freq", "2", "text_config.moe_layer_freq: 2, must be 1" },
    { "text_config.scoring_func", "\"softmax\"", "text_config.scoring_func: \"softmax\", must be \"sigmoid\"" },
    { "text_config.topk_method", "\"greedy\"", "text_config.topk_method: \"greedy\", must be \"noaux_tc\"" },
    { "text_config.moe_router_dtype", "\"bfloat16\"", "moe_router_dtype: \"bfloat16\", must be \"float32\"" },
    { "text_config.mhc", "false", "text_config.mhc: false, must be true" },
    { "text_config.hc_mult", "2", "text_config.hc_mult: 2, must be 4" },
    { "text_config.hidden_act", "\"gelu\"", "text_config.hidden_act: \"gelu\", must be \"silu\"" },
    { "text_config.attention_bias", "true", "text_config.attention_bias: true, must be false" },
    { "text_config.index_kpool_compress", "false", "index_kpool_compress: false, must be true" },
    { "text_config.index_kpool_always_select_tail", "false", "index_kpool_always_select_tail: false, must be true" },
    { "tie_word_embeddings", "true", "c.json: tie_word_embeddings: true, must be false" },
    { "text_config.tie_word_embeddings", "true", "text_config.tie_word_embeddings: true, must be false" },
    { "text_config.tie_word_embeddings", "0", "text_config.tie_word_embeddings: not true or false" },
    { "text_config.layer_types", NULL, "text_config.layer_types: missing or null" },
    { "text_config.layer_types", "[\"linear_attention\"]", "layer_types: 1 entries, must be num_hidden_layers = 45" },
    { "text_config.layer_types", "\"full_attention\"", "layer_types: not a list" },
    { "text_config.num_nextn_predict_layers", "2", "num_nextn_predict_layers: 2, must be 0 to 1" },
    { "text_config.num_hidden_layers", "256", "num_hidden_layers: 256, must be 1 to 255" },
    { "text_config.num_hidden_layers", "43", "layer_types: 45 entries, must be num_hidden_layers = 43" },
    { "text_config.num_hidden_layers", "4.5", "num_hidden_layers: not an integer" },
    { "text_config.num_hidden_layers", "9e99", "num_hidden_layers: not an integer" },
    { "text_config.vocab_size", "154881", "vocab_size: 154881, must be a multiple of 2" },
    { "text_config.vocab_size", "-2", "vocab_size: -2, must be 2 to 1048576" },
    { "text_config.num_attention_heads", "63", "num_attention_heads: 63, must be a multiple of 2" },
    { "text_config.n_routed_experts", "100000", "n_routed_experts: 100000, must be 1 to 512" },
    { "text_config.n_routed_experts", "4", "num_experts_per_tok: more than n_routed_experts" },
    { "text_config.hidden_size", "100", "hidden_size: 100, must be a multiple of 16" },
    { "text_config.swiglu_limit", NULL, "swiglu_limit: missing or null" },
    { "text_config.swiglu_limit", "0", "swiglu_limit: 0, must be above 0 and at most" },
    { "text_config.rms_norm_eps", "\"1e-5\"", "rms_norm_eps: not a number" },
    { "text_config.norm_topk_prob", "1", "norm_topk_prob: not true or false" },
    { "text_config.eos_token_id", "[154880]", "eos_token_id: not an id inside the vocabulary" },
    { "text_config.eos_token_id", "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]", "eos_token_id: 17 ids, at most 16" },
    { "text_config.pad_token_id", "154880", "pad_token_id: 154880, must be -1 to 154879" },
    { "image_token_id", "-2", "image_token_id: -2, must be" },
    { "vision_config", "7", "vision_config: not an object" },
    { "vision_config.patch_size", "16", "vision_config.patch_size: 16, must be 14" },
    { "vision_config.temporal_patch_size", "1", "vision_config.temporal_patch_size: 1, must be 2" },
    { "vision_config.spatial_merge_size", "4", "vision_config.spatial_merge_size: 4, must be 2" },
    { "vision_config.out_hidden_size", "1536", "vision_config.out_hidden_size: must equal the text model's" },
    { "vision_config.num_heads", "3", "vision_config.num_heads: hidden_size / num_heads" },
    { "vision_config.attention_bias", "false", "vision_config.attention_bias: false, must be true" },
    { "vision_config.rope_parameters", "{\"rope_type\":\"yarn\"}", "rope_parameters.rope_type: \"yarn\", must be" },
    { "quantization_config.quant_method", "\"fp8\"", "quantization_config.quant_method: \"fp8\", must be \"exl3\"" },
    { "quantization_config.quant_method", NULL, "quant_method: missing or not a string" },
    { "quantization_config.bits", "9", "quantization_config.bits: 9, must be" },
    { "quantization_config.codebook", "\"mul1\"", "quantization_config.codebook: \"mul1\", must be \"mcg\"" },
    { "quantization_config.scope", "\"all\"", "quantization_config.scope: must be the routed experts only" },
    { "quantization_config.non_routed_dtype_policy", "\"int8\"", "non_routed_dtype_policy: \"int8\", must be" },
    { "text_config.moe_intermediate_size", "160", "moe_intermediate_size: must be a multiple of 128" },
    { "text_config.moe_intermediate_size", "128", "moe_intermediate_size: must be a multiple of 128 and at least 256" },
};

static void test_refusals(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof REFUSALS / sizeof *REFUSALS; i++) {
        const struct refusal *r = &REFUSALS[i];
        td_config c;
        td_error err = { 0 };
        memset(&c, 0x5a, sizeof c);
        td_status status = parse_edited(FULL, r->path, r->value, &c, &err);
        if (status == TD_OK || !strstr(err.text, r->says))
            fail_msg("%s = %s: status %d, \"%s\", expected \"%s\"", r->path, r->value ? r->value : "(removed)", status,
                     status ? err.text : "", r->says);
        assert_non_null(strstr(err.text, "c.json: "));
        assert_int_equal(((unsigned char *)&c)[0], 0x5a); /* untouched */
    }
}

static const struct refusal LAYER_WORDS[] = {
    { "layer_types", "linear_attention", "layer_types: entry 2: \"mamba\" is unknown" },
    { "mlp_layer_types", "dense", "mlp_layer_types: entry 2: \"mamba\" is unknown" },
    { "indexer_types", "full", "indexer_types: entry 2: \"mamba\" is unknown" },
};

/* Lists of 5 with one wrong word; a "shared" indexer is refused on a DSA layer only. */
static void test_schedule_words(void **state)
{
    (void)state;
    td_config c;
    td_error err;
    for (size_t i = 0; i < 3; i++) {
        char path[64], value[256];
        const char *w = LAYER_WORDS[i].value;
        snprintf(path, sizeof path, "text_config.%s", LAYER_WORDS[i].path);
        snprintf(value, sizeof value, "[\"%s\", \"%s\", \"mamba\", \"%s\", \"%s\"]", w, w, w, w);
        assert_int_equal(parse_edited(SMALL, path, value, &c, &err), TD_EUNSUPPORTED);
        assert_non_null(strstr(err.text, LAYER_WORDS[i].says));
    }
    const char *shared = "[\"full\", \"full\", \"full\", \"shared\", \"full\"]";
    assert_int_equal(parse_edited(SMALL, "text_config.indexer_types", shared, &c, &err), TD_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "indexer_types: layer 3 reuses another layer's selection, must be full"));
    const char *elsewhere = "[\"shared\", \"full\", \"full\", \"full\", \"full\"]";
    assert_int_equal(parse_edited(SMALL, "text_config.indexer_types", elsewhere, &c, &err), TD_OK);
    assert_int_equal(parse_edited(SMALL, "text_config.mlp_layer_types", "[1, 2, 3, 4, 5]", &c, &err), TD_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "entry 0: \"(no string)\" is unknown"));
}

static td_status parse_text(const char *text, td_config *out, td_error *err)
{
    return td_config_parse("c.json", text, strlen(text), NULL, NULL, 0, out, err);
}

/* Other ways of writing the same, all accepted. */
static void test_spellings(void **state)
{
    (void)state;
    td_config c, flat;
    td_error err = { 0 };
    /* 45 entries are 44 layers and the MTP layer's */
    assert_int_equal(parse_edited(FULL, "text_config.num_hidden_layers", "44", &c, &err), TD_OK);
    assert_int_equal(parse_edited(SMALL, "text_config.eos_token_id", "7", &c, &err), TD_OK);
    assert_int_equal(c.n_eos, 1);
    assert_int_equal(c.eos[0], 7);
    assert_int_equal(parse_edited(SMALL, "quantization_config", NULL, &c, &err), TD_OK);
    assert_int_equal(c.quant_method, TD_QUANT_NONE);
    assert_string_equal(c.quant_codebook, "");
    assert_int_equal(parse_edited(SMALL, "vision_config", NULL, &c, &err), TD_OK);
    assert_false(c.has_vision);
    assert_int_equal(parse_edited(SMALL, "text_config.mlp_layer_types", NULL, &c, &err),
                     TD_OK); /* first_k_dense_replace 3 */
    assert_false(c.is_moe[2]);
    assert_true(c.is_moe[3]);
    assert_int_equal(parse_edited(SMALL, "text_config.num_nextn_predict_layers", "0", &c, &err), TD_OK);
    assert_false(c.is_dsa[5] || c.is_moe[5]);
    const char *with_tail = "[\"dense\", \"sparse\", \"sparse\", \"sparse\", \"sparse\", \"sparse\"]";
    assert_int_equal(parse_edited(SMALL, "text_config.mlp_layer_types", with_tail, &c, &err), TD_OK);
    assert_int_equal(parse_edited(SMALL, "text_config.indexer_types", NULL, &c, &err), TD_OK);

    /* text fields at the top level; KDA sizes by the flat keys; full_attention for DSA; num_local_experts */
    json_t *root = json_load_file(SMALL, 0, NULL), *text = json_object_get(root, "text_config");
    json_t *top = json_deep_copy(text);
    json_object_set_new(top, "model_type", json_string("glm5_next_text"));
    json_object_del(top, "linear_attn_config");
    json_object_set_new(top, "linear_num_heads", json_integer(4));
    json_object_set_new(top, "linear_lower_bound", json_real(-4.0));
    json_object_set(top, "num_local_experts", json_object_get(top, "n_routed_experts"));
    json_object_del(top, "n_routed_experts");
    json_array_set_new(json_object_get(top, "layer_types"), 3, json_string("full_attention"));
    char *dump = json_dumps(top, 0);
    assert_int_equal(parse_text(dump, &flat, &err), TD_OK);
    assert_int_equal(flat.kda_heads, 4);
    assert_int_equal(flat.n_experts, 3);
    assert_true(flat.kda_lower_bound == -4.0f && flat.is_dsa[3] && !flat.has_vision);
    free(dump);
    json_decref(top);
    json_decref(root);
}

static void test_generation(void **state)
{
    (void)state;
    json_t *root = json_load_file(SMALL, 0, NULL);
    json_object_del(json_object_get(root, "text_config"), "eos_token_id");
    char *text = json_dumps(root, 0);
    json_decref(root);
    td_config c;
    td_error err;
    const char *good = "{\"temperature\": 0.5, \"top_p\": 0.95, \"eos_token_id\": [3, 4]}";
    const char *bad[][2] = { { "{\"temperature\": -1}", "g.json: temperature: -1, must be" },
                             { "{\"top_p\": 0}", "g.json: top_p: 0, must be" },
                             { "[1]", "g.json: not a JSON object" },
                             { "{", "g.json: line 1" } };
    assert_int_equal(td_config_parse("c.json", text, strlen(text), "g.json", good, strlen(good), &c, &err), TD_OK);
    assert_true(c.temperature == 0.5f && c.top_p == 0.95f);
    assert_int_equal(c.n_eos, 2); /* the last place to look */
    for (size_t i = 0; i < 4; i++) {
        td_status status =
            td_config_parse("c.json", text, strlen(text), "g.json", bad[i][0], strlen(bad[i][0]), &c, &err);
        assert_int_not_equal(status, TD_OK);
        assert_non_null(strstr(err.text, bad[i][1]));
    }
    free(text);
}

static void test_not_json(void **state)
{
    (void)state;
    td_config c;
    td_error err;
    assert_int_equal(parse_text("", &c, &err), TD_EFORMAT);
    assert_int_equal(parse_text("[]", &c, &err), TD_EFORMAT);
    assert_string_equal(err.text, "c.json: not a JSON object");
    assert_int_equal(parse_text("{\"a\": 1, \"a\": 2}", &c, &err), TD_EFORMAT);
    assert_non_null(strstr(err.text, "c.json: line 1: duplicate"));
    assert_int_equal(td_config_load("/nonexistent", &c, &err), TD_ENOTFOUND);
    assert_string_equal(err.text, "/nonexistent/config.json: No such file or directory");
}

/* Every prefix of a good file is refused: none parses as something else. */
static void test_prefixes(void **state)
{
    (void)state;
    td_config c;
    td_error err;
    static char text[8192];
    FILE *file = fopen(SMALL, "rb");
    assert_non_null(file);
    size_t n = fread(text, 1, sizeof text, file);
    fclose(file);
    while (n && text[n - 1] == '\n') n--;
    for (size_t i = 0; i < n; i++) {
        char *exact = malloc(i ? i : 1);
        memcpy(exact, text, i);
        assert_int_equal(td_config_parse("c.json", exact, i, NULL, NULL, 0, &c, &err), TD_EFORMAT);
        free(exact);
    }
    assert_int_equal(td_config_parse("c.json", text, n, NULL, NULL, 0, &c, &err), TD_OK);
}

static void test_hash(void **state)
{
    (void)state;
    td_config a, b;
    td_error err;
    assert_int_equal(parse_edited(FULL, NULL, NULL, &a, &err), TD_OK);
    assert_int_equal(parse_edited(FULL, NULL, NULL, &b, &err), TD_OK);
    assert_true(td_config_hash(&a) == td_config_hash(&b));
    assert_int_equal(parse_edited(FULL, "text_config.routed_scaling_factor", "2.25", &b, &err), TD_OK);
    assert_true(td_config_hash(&a) != td_config_hash(&b));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_released),  cmocka_unit_test(test_refusals),   cmocka_unit_test(test_schedule_words),
        cmocka_unit_test(test_spellings), cmocka_unit_test(test_generation), cmocka_unit_test(test_not_json),
        cmocka_unit_test(test_prefixes),  cmocka_unit_test(test_hash),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
