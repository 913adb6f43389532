/* See config.h. Keys, defaults, ranges and the values that are the only ones this program computes stand in tables;
 * code is left for what relates several keys: schedules, ids, the EXL3 widths. A table row that refuses says so in
 * words a person can act on: "config.json: text_config.index_kpool: 16, must be 4". */
#include "checkpoint/config.h"

#include "base/hash.h"
#include "base/json.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FILE_BYTES_MAX ((size_t)16 << 20)

/* One object of one file. */
typedef struct section {
    const char *file;   /* "dir/config.json" */
    const char *prefix; /* "text_config.", or "" at the top level */
    const td_json *object;
    td_error *err;
} section;

static td_status refuse(const section *s, td_status status, const char *key, const char *what)
{
    return td_fail(s->err, status, "%s: %s%s: %s", s->file, s->prefix, key, what);
}

/* NULL when absent or null. */
static const td_json *get(const section *s, const char *key)
{
    const td_json *value = td_json_get(s->object, key);
    return td_json_is_null(value) ? NULL : value;
}

static bool is_kind(const td_json *value, td_json_kind kind)
{
    return td_json_kind_of(value) == kind;
}

static bool is_bool(const td_json *value)
{
    return is_kind(value, TD_JSON_TRUE) || is_kind(value, TD_JSON_FALSE);
}

/* "1.0" is no integer here: the writers of these files never put one where an integer belongs. */
static td_status integer_of(const td_json *value, int64_t *out)
{
    return is_kind(value, TD_JSON_INT) ? td_json_int64(value, out) : TD_EINVAL;
}

/* --- integers --- */

enum { REQUIRED = 1 };

typedef struct int_key {
    const char *key, *alias;
    size_t offset; /* of an int in the target */
    int flags, fallback, least, most, multiple;
} int_key;

#define AT(field)  offsetof(td_config, field)
#define VIS(field) offsetof(td_config_vision, field)

static const int_key TEXT_INTS[] = {
    { "vocab_size", NULL, AT(vocab_size), REQUIRED, 0, 2, 1 << 20, 2 },
    { "hidden_size", NULL, AT(hidden), REQUIRED, 0, 16, 1 << 16, 16 },
    { "num_hidden_layers", NULL, AT(n_layers), REQUIRED, 0, 1, TD_LAYERS_MAX - 1, 1 },
    { "intermediate_size", NULL, AT(intermediate), REQUIRED, 0, 32, 1 << 20, 32 },
    { "moe_intermediate_size", NULL, AT(moe_intermediate), REQUIRED, 0, 32, 1 << 16, 32 },
    { "num_attention_heads", NULL, AT(n_heads), REQUIRED, 0, 2, 1024, 2 },
    { "n_routed_experts", "num_local_experts", AT(n_experts), REQUIRED, 0, 1, 512, 1 },
    { "n_shared_experts", NULL, AT(n_shared_experts), 0, 1, 0, 16, 1 },
    { "num_experts_per_tok", NULL, AT(top_k), REQUIRED, 0, 1, 64, 1 },
    { "q_lora_rank", NULL, AT(q_lora), REQUIRED, 0, 16, 1 << 16, 16 },
    { "kv_lora_rank", NULL, AT(kv_lora), REQUIRED, 0, 16, 1 << 16, 16 },
    { "qk_nope_head_dim", NULL, AT(qk_dim), REQUIRED, 0, 16, 1024, 16 },
    { "v_head_dim", NULL, AT(v_dim), REQUIRED, 0, 16, 1024, 16 },
    { "max_position_embeddings", NULL, AT(max_positions), 0, 1 << 20, 1, 1 << 24, 1 },
    { "hc_mult", NULL, AT(hc_mult), 0, TD_HC_MULT, TD_HC_MULT, TD_HC_MULT, 1 },
    { "hc_sinkhorn_iters", NULL, AT(hc_iters), 0, 20, 1, 1000, 1 },
    { "index_topk", NULL, AT(index_topk), 0, 2048, TD_INDEX_POOL, 1 << 16, TD_INDEX_POOL },
    { "index_kpool", NULL, AT(index_kpool), REQUIRED, 0, TD_INDEX_POOL, TD_INDEX_POOL, 1 },
    { "index_head_dim", NULL, AT(index_dim), 0, TD_INDEX_DIM, TD_INDEX_DIM, TD_INDEX_DIM, 1 },
    { "index_n_heads", NULL, AT(index_heads), 0, 32, 1, 256, 1 },
    { "num_nextn_predict_layers", NULL, AT(n_mtp), 0, 0, 0, 1, 1 },
};

static const int_key LINEAR_INTS[] = {
    { "num_heads", "linear_num_heads", AT(kda_heads), 0, 64, 2, 1024, 2 },
    { "head_dim", "linear_head_dim", AT(kda_dim), 0, TD_KDA_DIM, TD_KDA_DIM, TD_KDA_DIM, 1 },
    { "short_conv_kernel_size", "linear_conv_kernel_dim", AT(kda_conv), 0, TD_KDA_CONV, TD_KDA_CONV, TD_KDA_CONV, 1 },
};

static const int_key VISION_INTS[] = {
    { "depth", NULL, VIS(depth), 0, 24, 1, 256, 1 },
    { "hidden_size", NULL, VIS(hidden), 0, 1024, 16, 1 << 14, 16 },
    { "num_heads", NULL, VIS(n_heads), 0, 16, 1, 256, 1 },
    { "intermediate_size", NULL, VIS(intermediate), 0, 4096, 16, 1 << 16, 16 },
    { "out_hidden_size", NULL, VIS(out_hidden), 0, 1536, 16, 1 << 16, 16 },
    { "projection_intermediate_size", NULL, VIS(projection), 0, 10240, 16, 1 << 16, 16 },
    { "patch_size", NULL, VIS(patch), 0, 14, 14, 14, 1 },
    { "temporal_patch_size", NULL, VIS(temporal_patch), 0, 2, 2, 2, 1 },
    { "spatial_merge_size", NULL, VIS(spatial_merge), 0, 2, 2, 2, 1 },
    { "image_size", NULL, VIS(image_size), 0, 336, 1, 1 << 16, 1 },
    { "in_channels", NULL, VIS(channels), 0, 3, 3, 3, 1 },
};

static td_status read_int(const section *s, const int_key *k, void *target)
{
    const char *key = k->key;
    const td_json *value = get(s, key);
    if (!value && k->alias && (value = get(s, k->alias))) key = k->alias;
    if (!value && (k->flags & REQUIRED)) return refuse(s, TD_EFORMAT, key, "missing or null");
    int64_t x = k->fallback;
    if (value && integer_of(value, &x)) return refuse(s, TD_EFORMAT, key, "not an integer");
    const char *what = NULL;
    char text[128];
    if (k->least == k->most && x != k->least)
        snprintf(text, sizeof text, "%lld, must be %d", (long long)x, k->least), what = text;
    else if (x < k->least || x > k->most)
        snprintf(text, sizeof text, "%lld, must be %d to %d", (long long)x, k->least, k->most), what = text;
    else if (x % k->multiple != 0)
        snprintf(text, sizeof text, "%lld, must be a multiple of %d", (long long)x, k->multiple), what = text;
    if (what) return refuse(s, TD_EUNSUPPORTED, key, what);
    *(int *)((char *)target + k->offset) = (int)x;
    return TD_OK;
}

static td_status read_ints(const section *s, const int_key *keys, size_t n, void *target)
{
    for (size_t i = 0; i < n; i++) {
        td_status status = read_int(s, &keys[i], target);
        if (status) return status;
    }
    return TD_OK;
}

/* --- other scalars --- */

typedef struct float_key {
    const char *key;
    size_t offset;
    int flags;
    double fallback, above, most; /* above < x <= most */
} float_key;

static const float_key TEXT_FLOATS[] = {
    { "rms_norm_eps", AT(rms_eps), REQUIRED, 0, 0, 1 },
    { "routed_scaling_factor", AT(routed_scale), REQUIRED, 0, 0, 1e6 },
    { "swiglu_limit", AT(swiglu_limit), REQUIRED, 0, 0, 1e6 },
    { "hc_eps", AT(hc_eps), 0, 1e-6, 0, 1 },
};

static const float_key VISION_FLOATS[] = {
    { "rms_norm_eps", VIS(rms_eps), 0, 1e-5, 0, 1 },
    { "swiglu_limit", VIS(swiglu_limit), 0, 10, 0, 1e6 },
};

static const float_key SAMPLING_FLOATS[] = {
    { "temperature", AT(temperature), 0, 1, -1e-9, 100 },
    { "top_p", AT(top_p), 0, 1, 0, 1 },
};

static const float_key ROPE_FLOATS[] = { { "rope_theta", VIS(rope_theta), 0, 10000, 0, 1e9 } };

static td_status read_floats(const section *s, const float_key *keys, size_t n, void *target)
{
    for (size_t i = 0; i < n; i++) {
        const float_key *k = &keys[i];
        const td_json *value = get(s, k->key);
        char text[128];
        if (!value && (k->flags & REQUIRED)) return refuse(s, TD_EFORMAT, k->key, "missing or null");
        double x = k->fallback;
        if (value && td_json_double(value, &x)) return refuse(s, TD_EFORMAT, k->key, "not a number");
        if (!(x > k->above && x <= k->most)) {
            snprintf(text, sizeof text, "%g, must be above %g and at most %g", x, k->above < 0 ? 0 : k->above, k->most);
            return refuse(s, TD_EUNSUPPORTED, k->key, text);
        }
        *(float *)((char *)target + k->offset) = (float)x;
    }
    return TD_OK;
}

/* An absent key has the only value that is supported, for each of these. */
typedef struct must_bool {
    const char *key;
    bool value;
} must_bool;

typedef struct must_text {
    const char *key, *value;
} must_text;

static const must_bool TEXT_BOOLS[] = {
    { "tie_word_embeddings", false }, { "attention_bias", false },
    { "mla_use_nope", true },         { "mhc", true },
    { "index_kpool_compress", true }, { "index_kpool_always_select_tail", true },
};

static const must_text TEXT_WORDS[] = {
    { "hidden_act", "silu" },
    { "scoring_func", "sigmoid" },
    { "topk_method", "noaux_tc" },
    { "moe_router_dtype", "float32" },
};

/* Integers that change nothing here but would change the model. */
static const int_key TEXT_FIXED[] = {
    { "qk_rope_head_dim", NULL, 0, 0, 0, 0, 0, 1 },
    { "n_group", NULL, 0, 0, 1, 1, 1, 1 },
    { "topk_group", NULL, 0, 0, 1, 1, 1, 1 },
    { "moe_layer_freq", NULL, 0, 0, 1, 1, 1, 1 },
};

static td_status check_bools(const section *s, const must_bool *keys, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const td_json *value = get(s, keys[i].key);
        if (!value) continue;
        if (!is_bool(value)) return refuse(s, TD_EFORMAT, keys[i].key, "not true or false");
        if (is_kind(value, TD_JSON_TRUE) != keys[i].value)
            return refuse(s, TD_EUNSUPPORTED, keys[i].key,
                          keys[i].value ? "false, must be true" : "true, must be false");
    }
    return TD_OK;
}

static td_status refuse_text(const section *s, const char *key, const td_json *value, const char *allowed)
{
    char text[256];
    snprintf(text, sizeof text, "\"%.64s\", must be %s", td_json_string(value, NULL), allowed);
    return refuse(s, TD_EUNSUPPORTED, key, text);
}

static td_status check_words(const section *s, const must_text *keys, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const td_json *value = get(s, keys[i].key);
        if (!value) continue;
        if (!is_kind(value, TD_JSON_STRING)) return refuse(s, TD_EFORMAT, keys[i].key, "not a string");
        char allowed[96];
        snprintf(allowed, sizeof allowed, "\"%s\"", keys[i].value);
        if (!td_json_equals(value, keys[i].value)) return refuse_text(s, keys[i].key, value, allowed);
    }
    return TD_OK;
}

#define N(table) (sizeof(table) / sizeof *(table))

static td_status child(const section *parent, const char *key, const char *prefix, section *out)
{
    const td_json *value = get(parent, key);
    if (value && !is_kind(value, TD_JSON_OBJECT)) return refuse(parent, TD_EFORMAT, key, "not an object");
    *out = (section){ parent->file, prefix, value, parent->err };
    return TD_OK;
}

/* --- linear_attn_config, or the flat linear_* keys --- */

static td_status read_linear(const section *text, td_config *c)
{
    section linear;
    td_status status = child(text, "linear_attn_config", "text_config.linear_attn_config.", &linear);
    if (status) return status;
    bool flat = !linear.object;
    const section *s = flat ? text : &linear;
    for (size_t i = 0; i < N(LINEAR_INTS) && !status; i++) {
        int_key k = LINEAR_INTS[i];
        if (flat) k.key = k.alias;
        k.alias = NULL;
        status = read_int(s, &k, c);
    }
    if (status) return status;
    const char *key = flat ? "linear_lower_bound" : "gate_lower_bound";
    const td_json *bound = get(s, key), *safe = get(s, "safe_gate");
    double x = -5.0;
    if (bound && td_json_double(bound, &x)) return refuse(s, TD_EFORMAT, key, "not a number");
    if (!bound && safe && !is_kind(safe, TD_JSON_TRUE))
        return refuse(s, TD_EUNSUPPORTED, key, "null without safe_gate: the softplus gate is not supported");
    if (!(x < 0 && x >= -1000)) return refuse(s, TD_EUNSUPPORTED, key, "must be below 0 and at least -1000");
    c->kda_lower_bound = (float)x;
    return TD_OK;
}

/* --- schedules --- */

/* list[i] is one of words; out[i] its number. Lists may carry the MTP layer's entry, which is ignored. */
static td_status read_schedule(const section *s, const td_config *c, const char *key, const char *const *words,
                               const int *numbers, size_t n_words, int *out)
{
    const td_json *list = get(s, key);
    char text[160];
    if (!is_kind(list, TD_JSON_ARRAY)) return refuse(s, TD_EFORMAT, key, list ? "not a list" : "missing or null");
    size_t n = td_json_count(list);
    if (n != (size_t)c->n_layers && n != (size_t)(c->n_layers + c->n_mtp)) {
        snprintf(text, sizeof text, "%zu entries, must be num_hidden_layers = %d", n, c->n_layers);
        return refuse(s, TD_EFORMAT, key, text);
    }
    for (int i = 0; i < c->n_layers; i++) {
        const char *word = td_json_string(td_json_at(list, (size_t)i), NULL);
        size_t w = 0;
        while (word && w < n_words && strcmp(word, words[w]) != 0) w++;
        if (!word || w == n_words) {
            snprintf(text, sizeof text, "entry %d: \"%.64s\" is unknown", i, word ? word : "(no string)");
            return refuse(s, TD_EUNSUPPORTED, key, text);
        }
        out[i] = numbers[w];
    }
    return TD_OK;
}

static td_status read_layer_types(const section *s, td_config *c)
{
    static const char *const WORDS[] = { "linear_attention", "deepseek_sparse_attention", "full_attention" };
    static const int IS_DSA[] = { 0, 1, 1 };
    int kinds[TD_LAYERS_MAX];
    td_status status = read_schedule(s, c, "layer_types", WORDS, IS_DSA, N(WORDS), kinds);
    if (status) return status;
    for (int i = 0; i < c->n_layers; i++) c->is_dsa[i] = kinds[i] != 0;
    c->is_dsa[c->n_layers] = c->n_mtp == 1;
    return TD_OK;
}

static td_status read_mlp_types(const section *s, td_config *c)
{
    static const char *const WORDS[] = { "dense", "sparse" };
    static const int IS_MOE[] = { 0, 1 };
    int kinds[TD_LAYERS_MAX];
    td_status status;
    if (get(s, "mlp_layer_types")) {
        status = read_schedule(s, c, "mlp_layer_types", WORDS, IS_MOE, N(WORDS), kinds);
    } else {
        int n_dense = 0;
        const int_key first = { "first_k_dense_replace", NULL, 0, 0, 3, 0, TD_LAYERS_MAX, 1 };
        status = read_int(s, &first, &n_dense);
        for (int i = 0; i < c->n_layers; i++) kinds[i] = i >= n_dense;
    }
    if (status) return status;
    for (int i = 0; i < c->n_layers; i++) c->is_moe[i] = kinds[i] != 0;
    c->is_moe[c->n_layers] = c->n_mtp == 1;
    return TD_OK;
}

/* Every DSA layer must run its own indexer: reuse of another layer's selection is not implemented. */
static td_status check_indexers(const section *s, const td_config *c)
{
    static const char *const WORDS[] = { "full", "shared" };
    static const int IS_SHARED[] = { 0, 1 };
    int shared[TD_LAYERS_MAX] = { 0 };
    const char *key = "indexer_types";
    const td_json *pattern = get(s, "index_topk_pattern");
    if (get(s, key)) {
        td_status status = read_schedule(s, c, key, WORDS, IS_SHARED, N(WORDS), shared);
        if (status) return status;
    } else if (pattern) {
        key = "index_topk_pattern";
        size_t n_bytes = 0;
        const char *letters = td_json_string(pattern, &n_bytes);
        if (!letters || n_bytes < (size_t)c->n_layers)
            return refuse(s, TD_EFORMAT, key, "must be a string of F and S, one for each layer");
        for (int i = 0; i < c->n_layers; i++) shared[i] = letters[i] != 'F';
    } else {
        const int_key freq = { "index_topk_freq", NULL, 0, 0, 1, 1, 1, 1 };
        int ignored;
        return read_int(s, &freq, &ignored);
    }
    for (int i = 0; i < c->n_layers; i++) {
        if (!c->is_dsa[i] || !shared[i]) continue;
        char text[96];
        snprintf(text, sizeof text, "layer %d reuses another layer's selection, must be full", i);
        return refuse(s, TD_EUNSUPPORTED, key, text);
    }
    return TD_OK;
}

/* linear_attn_config.kda_layers and full_attn_layers repeat layer_types; they must not contradict it. */
static td_status check_layer_list(const section *linear, const td_config *c, const char *key, bool dsa)
{
    const td_json *list = get(linear, key);
    if (!list) return TD_OK;
    if (!is_kind(list, TD_JSON_ARRAY)) return refuse(linear, TD_EFORMAT, key, "not a list");
    bool listed[TD_LAYERS_MAX] = { false };
    for (size_t i = 0; i < td_json_count(list); i++) {
        int64_t layer = -1;
        if (integer_of(td_json_at(list, i), &layer) || layer < 0 || layer >= TD_LAYERS_MAX)
            return refuse(linear, TD_EFORMAT, key, "holds something that is no layer");
        listed[layer] = true;
    }
    for (int layer = 0; layer < c->n_layers; layer++) {
        if (listed[layer] == (c->is_dsa[layer] == dsa)) continue;
        char text[96];
        snprintf(text, sizeof text, "contradicts layer_types at layer %d", layer);
        return refuse(linear, TD_EFORMAT, key, text);
    }
    return TD_OK;
}

static td_status read_schedules(const section *s, td_config *c)
{
    section linear;
    td_status status = read_layer_types(s, c);
    if (!status) status = read_mlp_types(s, c);
    if (!status) status = check_indexers(s, c);
    if (!status) status = child(s, "linear_attn_config", "text_config.linear_attn_config.", &linear);
    if (!status && linear.object) status = check_layer_list(&linear, c, "kda_layers", false);
    if (!status && linear.object) status = check_layer_list(&linear, c, "full_attn_layers", true);
    return status;
}

/* --- ids --- */

static td_status read_id(const section *s, const char *key, const td_config *c, int *out)
{
    const int_key k = { key, NULL, 0, 0, -1, -1, c->vocab_size - 1, 1 };
    return read_int(s, &k, out);
}

/* An int or a list of ints; absent: untouched. */
static td_status read_eos(const section *s, td_config *c)
{
    const td_json *value = get(s, "eos_token_id");
    if (!value) return TD_OK;
    bool is_list = is_kind(value, TD_JSON_ARRAY);
    size_t n = is_list ? td_json_count(value) : 1;
    char text[96];
    if (n > TD_EOS_MAX) {
        snprintf(text, sizeof text, "%zu ids, at most %d", n, TD_EOS_MAX);
        return refuse(s, TD_EUNSUPPORTED, "eos_token_id", text);
    }
    for (size_t i = 0; i < n; i++) {
        int64_t id = -1;
        if (integer_of(is_list ? td_json_at(value, i) : value, &id) || id < 0 || id >= c->vocab_size)
            return refuse(s, TD_EFORMAT, "eos_token_id", "not an id inside the vocabulary");
        c->eos[i] = (int)id;
    }
    c->n_eos = (int)n;
    return TD_OK;
}

static td_status read_ids(const section *top, const section *text, td_config *c)
{
    td_status status = read_eos(text, c);
    if (!status && c->n_eos == 0) status = read_eos(top, c);
    if (!status) status = read_id(text, "pad_token_id", c, &c->pad_id);
    if (!status) status = read_id(top, "image_token_id", c, &c->image_id);
    if (!status) status = read_id(top, "image_start_token_id", c, &c->image_start_id);
    if (!status) status = read_id(top, "image_end_token_id", c, &c->image_end_id);
    if (!status) status = read_id(top, "video_token_id", c, &c->video_id);
    if (!status) status = read_id(top, "video_start_token_id", c, &c->video_start_id);
    if (!status) status = read_id(top, "video_end_token_id", c, &c->video_end_id);
    return status;
}

/* --- text, vision, quantization --- */

static td_status read_text(const section *s, td_config *c)
{
    int fixed;
    td_status status = check_words(s, TEXT_WORDS, N(TEXT_WORDS));
    if (!status) status = check_bools(s, TEXT_BOOLS, N(TEXT_BOOLS));
    for (size_t i = 0; i < N(TEXT_FIXED) && !status; i++) status = read_int(s, &TEXT_FIXED[i], &fixed);
    if (!status) status = read_ints(s, TEXT_INTS, N(TEXT_INTS), c);
    if (!status) status = read_floats(s, TEXT_FLOATS, N(TEXT_FLOATS), c);
    if (!status) status = read_linear(s, c);
    if (status) return status;
    const int_key kv_heads = { "num_key_value_heads", NULL, 0, 0, c->n_heads, c->n_heads, c->n_heads, 1 };
    status = read_int(s, &kv_heads, &fixed);
    if (status) return status;
    if (c->top_k > c->n_experts) return refuse(s, TD_EUNSUPPORTED, "num_experts_per_tok", "more than n_routed_experts");
    const td_json *norm = get(s, "norm_topk_prob");
    if (norm && !is_bool(norm)) return refuse(s, TD_EFORMAT, "norm_topk_prob", "not true or false");
    c->norm_topk = !norm || is_kind(norm, TD_JSON_TRUE);
    c->shared_intermediate = c->moe_intermediate * c->n_shared_experts;
    return read_schedules(s, c);
}

static td_status read_vision(const section *top, td_config *c)
{
    static const must_text WORDS[] = { { "model_type", "glm5_next_vision" }, { "hidden_act", "silu" } };
    static const must_bool BOOLS[] = { { "attention_bias", true } };
    static const must_text ROPE[] = { { "rope_type", "axial" } };
    section s, rope;
    td_config_vision *v = &c->vision;
    td_status status = child(top, "vision_config", "vision_config.", &s);
    if (status || !s.object) return status;
    status = check_words(&s, WORDS, N(WORDS));
    if (!status) status = check_bools(&s, BOOLS, N(BOOLS));
    if (!status) status = read_ints(&s, VISION_INTS, N(VISION_INTS), v);
    if (!status) status = read_floats(&s, VISION_FLOATS, N(VISION_FLOATS), v);
    if (!status) status = child(&s, "rope_parameters", "vision_config.rope_parameters.", &rope);
    if (!status) status = check_words(&rope, ROPE, N(ROPE));
    if (!status) status = read_floats(&rope, ROPE_FLOATS, N(ROPE_FLOATS), v);
    if (status) return status;
    if (v->hidden % v->n_heads != 0 || v->hidden / v->n_heads % 4 != 0)
        return refuse(&s, TD_EUNSUPPORTED, "num_heads", "hidden_size / num_heads must be a multiple of 4");
    if (v->out_hidden != c->hidden)
        return refuse(&s, TD_EUNSUPPORTED, "out_hidden_size", "must equal the text model's hidden_size");
    v->attention_bias = true;
    c->has_vision = true;
    return TD_OK;
}

/* Where writers have put the block: at the top or under text_config, by either name. */
static td_status find_quantization(const section *top, const section *text, section *out)
{
    static const char *const KEYS[] = { "quantization_config", "quantization" };
    const section *places[] = { top, text };
    *out = (section){ top->file, "quantization_config.", NULL, top->err };
    for (size_t p = 0; p < N(places); p++) {
        for (size_t k = 0; k < N(KEYS) && !out->object; k++) {
            td_status status = child(places[p], KEYS[k], "quantization_config.", out);
            if (status) return status;
        }
    }
    return TD_OK;
}

/* Widths of EXL3: matrices and each shard's part of them are whole blocks of 128 (docs/checkpoint.md "Slices"). */
static td_status check_exl3_widths(const section *text, const td_config *c)
{
    if (c->hidden % 128 != 0)
        return refuse(text, TD_EUNSUPPORTED, "hidden_size", "must be a multiple of 128 with EXL3");
    if (c->moe_intermediate % 128 != 0 || c->moe_intermediate < 256)
        return refuse(text, TD_EUNSUPPORTED, "moe_intermediate_size",
                      "must be a multiple of 128 and at least 256 with EXL3: each of two shards needs whole blocks");
    return TD_OK;
}

static td_status read_quantization(const section *top, const section *text, td_config *c)
{
    static const must_text WORDS[] = { { "codebook", "mcg" }, { "non_routed_dtype_policy", "official_source_native" } };
    static const float_key BITS[] = { { "bits", AT(quant_bits), REQUIRED, 0, 0.999, 8 } };
    section s;
    td_status status = find_quantization(top, text, &s);
    if (status || !s.object) return status;
    const td_json *method = get(&s, "quant_method"), *scope = get(&s, "scope");
    if (!is_kind(method, TD_JSON_STRING)) return refuse(&s, TD_EFORMAT, "quant_method", "missing or not a string");
    if (!td_json_equals(method, "exl3"))
        return refuse_text(&s, "quant_method", method, "\"exl3\" (or no quantization_config: BF16)");
    status = check_words(&s, WORDS, N(WORDS));
    if (!status) status = read_floats(&s, BITS, N(BITS), c);
    if (status) return status;
    if (scope && (!is_kind(scope, TD_JSON_STRING) || !strstr(td_json_string(scope, NULL), "routed_experts")))
        return refuse(&s, TD_EUNSUPPORTED, "scope", "must be the routed experts only");
    c->quant_method = TD_QUANT_EXL3;
    snprintf(c->quant_codebook, sizeof c->quant_codebook, "mcg");
    return check_exl3_widths(text, c);
}

static td_status read_top(const section *top, td_config *c)
{
    static const must_bool BOOLS[] = { { "tie_word_embeddings", false } };
    static const must_text TYPE[] = { { "model_type", "glm5_next_text" } };
    section text;
    const td_json *type = get(top, "model_type");
    if (!is_kind(type, TD_JSON_STRING)) return refuse(top, TD_EFORMAT, "model_type", "missing or not a string");
    td_status status = child(top, "text_config", "text_config.", &text);
    if (status) return status;
    bool flat = !text.object && td_json_equals(type, "glm5_next_text");
    if (!flat && !td_json_equals(type, "glm5_next")) return refuse_text(top, "model_type", type, "\"glm5_next\"");
    if (text.object)
        status = check_words(&text, TYPE, N(TYPE));
    else
        text = *top; /* a flat, text-only file; its model_type was judged above */
    if (!status) status = check_bools(top, BOOLS, N(BOOLS));
    if (!status) status = read_text(&text, c);
    if (!status) status = read_ids(top, &text, c);
    if (!status) status = read_vision(top, c);
    if (!status) status = read_quantization(top, &text, c);
    return status;
}

static td_status parse_object(td_arena *arena, const char *name, const void *json, size_t n_bytes, td_error *err,
                              const td_json **out)
{
    if (n_bytes > FILE_BYTES_MAX) return td_fail(err, TD_EFORMAT, "%s: larger than %zu MB", name, FILE_BYTES_MAX >> 20);
    const td_json *root = NULL;
    td_status status = td_json_parse_file(arena, (const char *)json, n_bytes, &root, err);
    if (status) {
        td_error_prefix(err, "%s", name);
        return status;
    }
    if (!is_kind(root, TD_JSON_OBJECT)) return td_fail(err, TD_EFORMAT, "%s: not a JSON object", name);
    *out = root;
    return TD_OK;
}

td_status td_config_parse(const char *name, const void *json, size_t n_bytes, const char *generation_name,
                          const void *generation, size_t generation_bytes, td_config *out, td_error *err)
{
    td_config c;
    td_arena arena;
    const td_json *root = NULL, *sampling = NULL;
    memset(&c, 0, sizeof c); /* padding too: td_config_hash reads all bytes */
    td_arena_init(&arena, 0);
    td_status status = parse_object(&arena, name, json, n_bytes, err, &root);
    if (!status) status = read_top(&(section){ name, "", root, err }, &c);
    if (!status && generation)
        status = parse_object(&arena, generation_name, generation, generation_bytes, err, &sampling);
    section s = { generation_name, "", sampling, err };
    if (!status) status = read_floats(&s, SAMPLING_FLOATS, N(SAMPLING_FLOATS), &c);
    if (!status && c.n_eos == 0) status = read_eos(&s, &c);
    td_arena_deinit(&arena);
    if (!status) memcpy(out, &c, sizeof c);
    return status;
}

/* The whole file into malloc'ed memory; TD_ENOTFOUND when it does not exist. */
static td_status read_file(const char *path, char **data, size_t *n_bytes, td_error *err)
{
    FILE *file = fopen(path, "rbe");
    if (!file) {
        td_status status = errno == ENOENT ? TD_ENOTFOUND : TD_EIO;
        return td_fail(err, status, "%s: %s", path, strerror(errno));
    }
    char *bytes = (char *)malloc(FILE_BYTES_MAX + 1);
    size_t n = bytes ? fread(bytes, 1, FILE_BYTES_MAX + 1, file) : 0;
    td_status status = TD_OK;
    if (!bytes)
        status = td_fail(err, TD_ENOMEM, "%s: out of memory", path);
    else if (ferror(file))
        status = td_fail(err, TD_EIO, "%s: %s", path, strerror(errno));
    fclose(file);
    if (status) {
        free(bytes);
        return status;
    }
    *data = bytes;
    *n_bytes = n;
    return TD_OK;
}

td_status td_config_load(const char *dir, td_config *out, td_error *err)
{
    char path[4096], sampling_path[4096], *json = NULL, *sampling = NULL;
    size_t n_bytes = 0, sampling_bytes = 0;
    td_error ignored;
    int a = snprintf(path, sizeof path, "%s/config.json", dir);
    int b = snprintf(sampling_path, sizeof sampling_path, "%s/generation_config.json", dir);
    if (a < 0 || b < 0 || (size_t)b >= sizeof sampling_path)
        return td_fail(err, TD_EINVAL, "path too long: %.64s...", dir);
    td_status status = read_file(path, &json, &n_bytes, err);
    if (!status) {
        status = read_file(sampling_path, &sampling, &sampling_bytes, &ignored);
        if (status == TD_ENOTFOUND) status = TD_OK; /* sampling stays NULL: the defaults */
        if (status) td_fail(err, status, "%s", ignored.text);
    }
    if (!status) status = td_config_parse(path, json, n_bytes, sampling_path, sampling, sampling_bytes, out, err);
    free(json);
    free(sampling);
    return status;
}

int td_config_n_dsa(const td_config *config)
{
    int n = 0;
    for (int i = 0; i < config->n_layers; i++) n += config->is_dsa[i];
    return n;
}

int td_config_n_moe(const td_config *config)
{
    int n = 0;
    for (int i = 0; i < config->n_layers; i++) n += config->is_moe[i];
    return n;
}

uint64_t td_config_hash(const td_config *config)
{
    return td_fnv1a(TD_FNV1A_START, config, sizeof *config);
}
