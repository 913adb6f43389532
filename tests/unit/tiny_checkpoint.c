#include "tiny_checkpoint.h"

#include "base/hash.h"
#include "checkpoint/exl3.h"
#include "checkpoint/slices.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char plain_config[] =
    "{\"model_type\": \"glm5_next\", \"tie_word_embeddings\": false, \"text_config\": {"
    "\"vocab_size\": 300, \"hidden_size\": 96, \"intermediate_size\": 160, \"moe_intermediate_size\": 96,"
    "\"num_hidden_layers\": 5, \"num_attention_heads\": 2, \"num_key_value_heads\": 2, \"n_shared_experts\": 1,"
    "\"n_routed_experts\": 6, \"num_experts_per_tok\": 3, \"routed_scaling_factor\": 2.5, \"kv_lora_rank\": 64,"
    "\"q_lora_rank\": 48, \"qk_rope_head_dim\": 0, \"v_head_dim\": 48, \"qk_nope_head_dim\": 32,"
    "\"max_position_embeddings\": 8192, \"rms_norm_eps\": 1e-05,"
    "\"mlp_layer_types\": [\"dense\", \"sparse\", \"sparse\", \"sparse\", \"sparse\"],"
    "\"index_topk\": 32, \"index_head_dim\": 128, \"index_n_heads\": 3, \"swiglu_limit\": 10.0, \"index_kpool\": 4,"
    "\"linear_attn_config\": {\"num_heads\": 4, \"head_dim\": 128, \"short_conv_kernel_size\": 4,"
    "\"gate_lower_bound\": -5.0}, \"hc_mult\": 4, \"hc_eps\": 1e-06, \"hc_sinkhorn_iters\": 20,"
    "\"eos_token_id\": [1], \"model_type\": \"glm5_next_text\","
    "\"layer_types\": [\"linear_attention\", \"linear_attention\", \"linear_attention\","
    "\"deepseek_sparse_attention\", \"linear_attention\"],"
    "\"n_group\": 1, \"topk_group\": 1, \"norm_topk_prob\": true, \"num_nextn_predict_layers\": 1,"
    "\"hidden_act\": \"silu\", \"mla_use_nope\": true}}";

static const char exl3_config[] =
    "{\"model_type\": \"glm5_next\", \"tie_word_embeddings\": false, \"text_config\": {"
    "\"vocab_size\": 256, \"hidden_size\": 128, \"intermediate_size\": 256, \"moe_intermediate_size\": 256,"
    "\"num_hidden_layers\": 4, \"num_attention_heads\": 2, \"num_key_value_heads\": 2, \"n_shared_experts\": 0,"
    "\"n_routed_experts\": 5, \"num_experts_per_tok\": 2, \"routed_scaling_factor\": 1.5, \"kv_lora_rank\": 64,"
    "\"q_lora_rank\": 64, \"qk_rope_head_dim\": 0, \"v_head_dim\": 64, \"qk_nope_head_dim\": 32,"
    "\"max_position_embeddings\": 8192, \"rms_norm_eps\": 1e-05,"
    "\"mlp_layer_types\": [\"dense\", \"sparse\", \"sparse\", \"sparse\"],"
    "\"index_topk\": 32, \"index_head_dim\": 128, \"index_n_heads\": 2, \"swiglu_limit\": 10.0, \"index_kpool\": 4,"
    "\"linear_attn_config\": {\"num_heads\": 2, \"head_dim\": 128, \"short_conv_kernel_size\": 4,"
    "\"gate_lower_bound\": -5.0}, \"hc_mult\": 4, \"hc_eps\": 1e-06, \"hc_sinkhorn_iters\": 20,"
    "\"eos_token_id\": [1], \"model_type\": \"glm5_next_text\","
    "\"layer_types\": [\"linear_attention\", \"deepseek_sparse_attention\", \"linear_attention\","
    "\"deepseek_sparse_attention\"],"
    "\"n_group\": 1, \"topk_group\": 1, \"norm_topk_prob\": true, \"num_nextn_predict_layers\": 1,"
    "\"hidden_act\": \"silu\", \"mla_use_nope\": true},"
    "\"quantization_config\": {\"quant_method\": \"exl3\", \"bits\": 4, \"codebook\": \"mcg\"}}";

enum { TENSORS_MAX = 1024, EXPERT_PARTS = 4 };

typedef struct tiny_tensor {
    char name[160];
    td_dtype dtype;
    int rank;
    int64_t shape[TD_RANK_MAX];
} tiny_tensor;

typedef struct tiny_list {
    tiny_tensor items[TENSORS_MAX];
    int n;
} tiny_list;

static void add(tiny_list *list, const char *name, td_dtype dtype, int rank, const int64_t *shape)
{
    td_check(list->n < TENSORS_MAX);
    tiny_tensor *t = &list->items[list->n++];
    snprintf(t->name, sizeof t->name, "%s", name);
    t->dtype = dtype;
    t->rank = rank;
    memcpy(t->shape, shape, (size_t)rank * sizeof *shape);
}

static td_status add_role(void *user, const td_role *role)
{
    bool f32_only = !(role->dtypes & TD_DTYPE_BIT(TD_DTYPE_BF16)) || strstr(role->name, "A_log") ||
                    strstr(role->name, "dt_bias") || strstr(role->name, "_base") || strstr(role->name, "_scale");
    /* Some of what files may hold in either type is F32 here, so that the conversion is tried too. */
    bool f32_too = strstr(role->name, "layers.2.") && (strstr(role->name, "b_proj") || strstr(role->name, "conv1d"));
    add((tiny_list *)user, role->name, f32_only || f32_too ? TD_DTYPE_F32 : TD_DTYPE_BF16, role->rank, role->shape);
    return TD_OK;
}

static void add_expert(tiny_list *list, const td_config *c, int layer, int expert)
{
    static const char *const names[] = { "gate_proj", "up_proj", "down_proj" };
    for (int p = 0; p < 3; p++) {
        int64_t in = p == 2 ? c->moe_intermediate : c->hidden, out = p == 2 ? c->hidden : c->moe_intermediate;
        char name[160];
        int n =
            snprintf(name, sizeof name, "model.language_model.layers.%d.mlp.experts.%d.%s.", layer, expert, names[p]);
        char *part = name + n;
        if (c->quant_method == TD_QUANT_NONE) {
            strcpy(part, "weight");
            add(list, name, TD_DTYPE_BF16, 2, (const int64_t[]){ out, in });
            continue;
        }
        int bits = expert == 1 ? 3 : expert == 2 ? 5 : 4;
        strcpy(part, "trellis");
        add(list, name, TD_DTYPE_I16, 3, (const int64_t[]){ in / 16, out / 16, 16 * bits });
        strcpy(part, "suh");
        add(list, name, TD_DTYPE_F16, 1, &in);
        strcpy(part, "svh");
        add(list, name, TD_DTYPE_F16, 1, &out);
        strcpy(part, "mcg");
        add(list, name, TD_DTYPE_I32, 1, (const int64_t[]){ 1 });
    }
}

/* ---- values ---- */

static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static float uniform(uint64_t *state) /* [-1, 1) */
{
    return (float)(int32_t)(next(state) >> 32) * 0x1p-31f;
}

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

static float value_of(const tiny_tensor *t, uint64_t *state)
{
    float u = uniform(state);
    if (ends_with(t->name, "A_log")) return 0.5f + 0.5f * u;
    if (ends_with(t->name, "dt_bias")) return -2.0f + 2.0f * u;
    if (ends_with(t->name, "e_score_correction_bias")) return 7.0f + 0.05f * u;
    if (ends_with(t->name, "_scale")) return 1.0f + 0.2f * u;
    if (ends_with(t->name, "_base") || ends_with(t->name, "ape") || ends_with(t->name, "k_norm.bias")) return 0.5f * u;
    if (ends_with(t->name, "norm.weight") || strstr(t->name, "layernorm")) return 1.0f + 0.2f * u;
    if (strstr(t->name, "conv1d")) return 0.5f * u;
    if (ends_with(t->name, "embed_tokens.weight")) return u;
    return u * 1.7f / sqrtf((float)t->shape[t->rank - 1]);
}

static void fill_value(const tiny_tensor *t, size_t i, uint64_t *state, void *out)
{
    if (t->dtype == TD_DTYPE_F32)
        ((float *)out)[i] = value_of(t, state);
    else if (t->dtype == TD_DTYPE_BF16)
        ((td_bf16 *)out)[i] = td_f32_bf16(value_of(t, state));
    else if (t->dtype == TD_DTYPE_I32)
        ((uint32_t *)out)[i] = TD_EXL3_MCG_MARK;
    else if (t->dtype == TD_DTYPE_I16)
        ((uint16_t *)out)[i] = (uint16_t)next(state); /* any bits are a trellis */
    else
        ((td_f16 *)out)[i] = td_f32_f16((next(state) & 1 ? 1.0f : -1.0f) * (0.25f + 0.05f * uniform(state)));
}

static td_status put(td_safetensors_writer *writer, const tiny_tensor *t, td_error *err)
{
    size_t n = 1;
    for (int i = 0; i < t->rank; i++) n *= (size_t)t->shape[i];
    size_t n_bytes = n * (size_t)td_dtype_bytes(t->dtype);
    void *values = malloc(n_bytes);
    if (!values) return td_fail(err, TD_ENOMEM, "%s: out of memory", t->name);
    uint64_t state = td_fnv1a(TD_FNV1A_START, t->name, strlen(t->name));
    for (size_t i = 0; i < n; i++) fill_value(t, i, &state, values);
    td_status status = td_safetensors_writer_put(writer, values, n_bytes, err);
    free(values);
    return status;
}

static td_status write_tensors(const tiny_list *list, const char *dir, td_error *err)
{
    td_safetensors_writer *writer = NULL;
    td_status status = td_safetensors_writer_create(dir, (uint64_t)1 << 20, &writer, err);
    for (int i = 0; i < list->n && !status; i++) {
        const tiny_tensor *t = &list->items[i];
        status = td_safetensors_writer_declare(writer, t->name, t->dtype, t->rank, t->shape, err);
    }
    if (!status) status = td_safetensors_writer_begin(writer, err);
    for (int i = 0; i < list->n && !status; i++) status = put(writer, &list->items[i], err);
    if (!status) status = td_safetensors_writer_finish(writer, err);
    td_safetensors_writer_destroy(writer);
    return status;
}

static td_status put_config(const char *dir, const char *json, td_error *err)
{
    char path[512];
    snprintf(path, sizeof path, "%s/config.json", dir);
    FILE *file = fopen(path, "w");
    if (!file) return td_fail(err, TD_EIO, "%s: cannot be written", path);
    fputs(json, file);
    return fclose(file) ? td_fail(err, TD_EIO, "%s: cannot be written", path) : TD_OK;
}

td_status td_tiny_write_config(const char *json, const char *dir, td_error *err)
{
    td_config c;
    td_status status = td_config_parse("tiny", json, strlen(json), NULL, NULL, 0, &c, err);
    if (!status) status = put_config(dir, json, err);
    tiny_list *list = (tiny_list *)calloc(1, sizeof *list);
    if (!list) return td_fail(err, TD_ENOMEM, "tiny checkpoint: out of memory");
    if (!status) status = td_roles_each(&c, add_role, list);
    for (int layer = 0; layer < c.n_layers + c.n_mtp && !status; layer++)
        for (int e = 0; e < c.n_experts && c.is_moe[layer]; e++) add_expert(list, &c, layer, e);
    if (!status) status = write_tensors(list, dir, err);
    free(list);
    return status;
}

td_status td_tiny_write(td_tiny_kind kind, const char *dir, td_error *err)
{
    return td_tiny_write_config(kind == TD_TINY_PLAIN ? plain_config : exl3_config, dir, err);
}

td_status td_tiny_create(td_tiny_kind kind, char dir[256], td_error *err)
{
    const char *base = getenv("TMPDIR");
    snprintf(dir, 256, "%s/td-tiny-XXXXXX", base && strlen(base) < 200 ? base : "/tmp");
    if (!mkdtemp(dir)) return td_fail(err, TD_EIO, "%s: cannot be made", dir);
    return td_tiny_write(kind, dir, err);
}

void td_tiny_remove(const char *dir)
{
    td_checkpoint *ck = NULL;
    char path[512];
    if (td_checkpoint_open(dir, &ck, NULL) == TD_OK) {
        for (int i = 0; i < td_checkpoint_n_files(ck); i++) {
            const char *name = td_checkpoint_file_name(ck, i), *slash = strrchr(name, '/');
            snprintf(path, sizeof path, "%s/%s", dir, slash ? slash + 1 : name);
            unlink(path);
        }
        td_checkpoint_close(ck);
    }
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/config.json", dir);
    unlink(path);
    rmdir(dir);
}
