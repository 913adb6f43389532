/* See random_checkpoint.h. */
#include "random_checkpoint.h"

#include "base/hash.h"
#include "base/num.h"
#include "checkpoint/safetensors.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TENSORS_MAX = 2048, NAME_CAP = 128 };

typedef struct shape {
    const char *name;
    int vocab, hidden, intermediate, expert_width, n_layers, n_dense, heads, shared, n_experts, top_k, q_lora,
        index_topk;
    int index_heads, kda_heads, n_mtp;
    double scale; /* of routed experts */
} shape;

static const shape shapes[] = {
    { .name = "small",
      .vocab = 512,
      .hidden = 384,
      .intermediate = 512,
      .expert_width = 128,
      .n_layers = 5,
      .n_dense = 1,
      .heads = 8,
      .shared = 1,
      .n_experts = 24,
      .top_k = 8,
      .q_lora = 128,
      .index_topk = 32,
      .index_heads = 16,
      .kda_heads = 4,
      .n_mtp = 1,
      .scale = 2.5 },
    { .name = "nine",
      .vocab = 384,
      .hidden = 256,
      .intermediate = 384,
      .expert_width = 256,
      .n_layers = 9,
      .n_dense = 3,
      .heads = 4,
      .shared = 2,
      .n_experts = 6,
      .top_k = 3,
      .q_lora = 192,
      .index_topk = 64,
      .index_heads = 13,
      .kda_heads = 2,
      .n_mtp = 0,
      .scale = 1.5 },
};

typedef struct entry {
    char name[NAME_CAP];
    int rank;
    int64_t dims[3];
} entry;

typedef struct list {
    entry *items;
    int n;
} list;

static void add(list *l, int rank, int64_t a, int64_t b, int64_t c, const char *fmt, ...)
    __attribute__((format(printf, 6, 7)));
static void add(list *l, int rank, int64_t a, int64_t b, int64_t c, const char *fmt, ...)
{
    td_check(l->n < TENSORS_MAX);
    entry *e = &l->items[l->n++];
    va_list args;
    va_start(args, fmt);
    vsnprintf(e->name, sizeof e->name, fmt, args);
    va_end(args);
    e->rank = rank;
    e->dims[0] = a;
    e->dims[1] = b;
    e->dims[2] = c;
}

static void add_mlp(list *l, const char *base, int width, int hidden)
{
    add(l, 2, width, hidden, 0, "%sgate_proj.weight", base);
    add(l, 2, width, hidden, 0, "%sup_proj.weight", base);
    add(l, 2, hidden, width, 0, "%sdown_proj.weight", base);
}

static void add_moe(list *l, const char *base, const shape *s)
{
    char inner[NAME_CAP + 32];
    add(l, 2, s->n_experts, s->hidden, 0, "%smlp.gate.weight", base);
    add(l, 1, s->n_experts, 0, 0, "%smlp.gate.e_score_correction_bias", base);
    snprintf(inner, sizeof inner, "%smlp.shared_experts.", base);
    add_mlp(l, inner, s->expert_width * s->shared, s->hidden);
    for (int e = 0; e < s->n_experts; e++) {
        snprintf(inner, sizeof inner, "%smlp.experts.%d.", base, e);
        add_mlp(l, inner, s->expert_width, s->hidden);
    }
}

static void add_dsa(list *l, const char *b, const shape *s)
{
    add(l, 2, s->q_lora, s->hidden, 0, "%sself_attn.q_a_proj.weight", b);
    add(l, 1, s->q_lora, 0, 0, "%sself_attn.q_a_layernorm.weight", b);
    add(l, 2, s->heads * 256, s->q_lora, 0, "%sself_attn.q_b_proj.weight", b);
    add(l, 2, 512, s->hidden, 0, "%sself_attn.kv_a_proj_with_mqa.weight", b);
    add(l, 1, 512, 0, 0, "%sself_attn.kv_a_layernorm.weight", b);
    add(l, 2, s->heads * 512, 512, 0, "%sself_attn.kv_b_proj.weight", b);
    add(l, 2, s->hidden, s->heads * 256, 0, "%sself_attn.o_proj.weight", b);
    add(l, 2, s->index_heads * 128, s->q_lora, 0, "%sself_attn.indexer.wq_b.weight", b);
    add(l, 2, 128, s->hidden, 0, "%sself_attn.indexer.wk.weight", b);
    add(l, 1, 128, 0, 0, "%sself_attn.indexer.k_norm.weight", b);
    add(l, 1, 128, 0, 0, "%sself_attn.indexer.k_norm.bias", b);
    add(l, 2, s->index_heads, s->hidden, 0, "%sself_attn.indexer.weights_proj.weight", b);
    add(l, 2, 128, s->hidden, 0, "%sself_attn.indexer.index_kpool_compress_gate", b);
    add(l, 2, 4, 128, 0, "%sself_attn.indexer.index_kpool_compress_ape", b);
}

static void add_kda(list *l, const char *b, const shape *s)
{
    int width = s->kda_heads * 128;
    for (const char *x = "qkv"; *x; x++) {
        add(l, 2, width, s->hidden, 0, "%sself_attn.%c_proj.weight", b, *x);
        add(l, 3, width, 1, 4, "%sself_attn.%c_conv1d.weight", b, *x);
    }
    for (const char *x = "fg"; *x; x++) {
        add(l, 2, 128, s->hidden, 0, "%sself_attn.%c_a_proj.weight", b, *x);
        add(l, 2, width, 128, 0, "%sself_attn.%c_b_proj.weight", b, *x);
    }
    add(l, 2, s->kda_heads, s->hidden, 0, "%sself_attn.b_proj.weight", b);
    add(l, 1, s->kda_heads, 0, 0, "%sself_attn.A_log", b);
    add(l, 1, width, 0, 0, "%sself_attn.dt_bias", b);
    add(l, 1, 128, 0, 0, "%sself_attn.o_norm.weight", b);
    add(l, 2, s->hidden, width, 0, "%sself_attn.o_proj.weight", b);
}

static void add_norms(list *l, const char *b, const shape *s)
{
    add(l, 1, s->hidden, 0, 0, "%sinput_layernorm.weight", b);
    add(l, 1, s->hidden, 0, 0, "%spost_attention_layernorm.weight", b);
}

static void add_all(list *l, const shape *s)
{
    char b[NAME_CAP];
    add(l, 2, s->vocab, s->hidden, 0, "model.language_model.embed_tokens.weight");
    add(l, 1, s->hidden, 0, 0, "model.language_model.norm.weight");
    add(l, 2, s->vocab, s->hidden, 0, "lm_head.weight");
    for (int i = 0; i < s->n_layers; i++) {
        snprintf(b, sizeof b, "model.language_model.layers.%d.", i);
        add_norms(l, b, s);
        for (int site = 0; site < 2; site++) {
            const char *name = site ? "ffn" : "attn";
            add(l, 2, 24, 4 * s->hidden, 0, "%shc_%s_fn", b, name);
            add(l, 1, 24, 0, 0, "%shc_%s_base", b, name);
            add(l, 1, 3, 0, 0, "%shc_%s_scale", b, name);
        }
        (i % 4 == 3 ? add_dsa : add_kda)(l, b, s);
        char mlp[NAME_CAP + 8];
        snprintf(mlp, sizeof mlp, "%smlp.", b);
        if (i < s->n_dense)
            add_mlp(l, mlp, s->intermediate, s->hidden);
        else
            add_moe(l, b, s);
    }
    if (!s->n_mtp) return;
    snprintf(b, sizeof b, "model.language_model.layers.%d.", s->n_layers);
    add_norms(l, b, s);
    add(l, 2, s->hidden, 2 * s->hidden, 0, "%seh_proj.weight", b);
    add(l, 1, s->hidden, 0, 0, "%senorm.weight", b);
    add(l, 1, s->hidden, 0, 0, "%shnorm.weight", b);
    add(l, 1, s->hidden, 0, 0, "%sshared_head.norm.weight", b);
    add_dsa(l, b, s);
    add_moe(l, b, s);
}

static bool ends(const char *name, const char *tail)
{
    size_t n = strlen(name), m = strlen(tail);
    return n >= m && strcmp(name + n - m, tail) == 0;
}

/* Offset and scale of a tensor's elements, by its name; true: kept in fp32. Equal to make.py's rule(). */
static bool rule(const entry *e, double *offset, double *scale)
{
    static const struct {
        const char *tail;
        double offset, scale;
        bool fp32;
    } rules[] = {
        { "e_score_correction_bias", 7.0, 0.0625, true },
        { "A_log", 1.0, 0.5, true },
        { "dt_bias", 0.0, 1.0, true },
        { "_base", 0.0, 0.5, true },
        { "_scale", 0.5, 0.125, true },
        { "hc_attn_fn", 0.0, 0.03125, false },
        { "hc_ffn_fn", 0.0, 0.03125, false },
        { "k_norm.bias", 0.0, 0.125, false },
        { "norm.weight", 1.0, 0.125, false },
        { "conv1d.weight", 0.0, 0.5, false },
        { "index_kpool_compress_ape", 0.0, 0.5, false },
        { "embed_tokens.weight", 0.0, 1.0, false },
    };
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (ends(e->name, rules[i].tail)) {
            *offset = rules[i].offset;
            *scale = rules[i].scale;
            return rules[i].fp32;
        }
    *offset = 0.0;
    *scale = 2.0 / sqrt((double)e->dims[e->rank - 1]);
    return false;
}

/* Sum of the four 16-bit parts of a splitmix64 value, centred: a rough bell over (-2, 2). */
static double noise(uint64_t seed, uint64_t i)
{
    uint64_t x = seed + (i + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    x ^= x >> 31;
    return (double)((x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48)) / 65536.0 - 2.0;
}

static int64_t n_elements(const entry *e)
{
    int64_t n = 1;
    for (int i = 0; i < e->rank; i++) n *= e->dims[i];
    return n;
}

static size_t fill(const entry *e, void *out)
{
    double offset, scale;
    bool fp32 = rule(e, &offset, &scale);
    uint64_t seed = td_fnv1a(TD_FNV1A_START, e->name, strlen(e->name));
    int64_t n = n_elements(e);
    for (int64_t i = 0; i < n; i++) {
        float value = (float)(offset + scale * noise(seed, (uint64_t)i));
        if (fp32)
            ((float *)out)[i] = value;
        else
            ((td_bf16 *)out)[i] = td_f32_bf16(value);
    }
    return (size_t)n * (fp32 ? sizeof(float) : sizeof(td_bf16));
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const entry *)a)->name, ((const entry *)b)->name);
}

static td_status write_config(const shape *s, const char *dir, td_error *err)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/config.json", dir);
    FILE *f = fopen(path, "w");
    if (!f) return td_fail(err, TD_EIO, "%s: cannot be written", path);
    fprintf(
        f,
        "{\"model_type\": \"glm5_next\", \"text_config\": {\"model_type\": \"glm5_next_text\", \"vocab_size\": %d, "
        "\"hidden_size\": %d, "
        "\"intermediate_size\": %d, \"moe_intermediate_size\": %d, \"num_hidden_layers\": %d, \"num_attention_heads\": "
        "%d, "
        "\"num_key_value_heads\": %d, \"n_shared_experts\": %d, \"n_routed_experts\": %d, \"num_experts_per_tok\": %d, "
        "\"routed_scaling_factor\": %g, \"kv_lora_rank\": 512, \"q_lora_rank\": %d, \"qk_rope_head_dim\": 0, "
        "\"v_head_dim\": 256, "
        "\"qk_nope_head_dim\": 256, \"max_position_embeddings\": 65536, \"rms_norm_eps\": 1e-05, \"index_topk\": %d, "
        "\"index_head_dim\": 128, \"index_n_heads\": %d, \"swiglu_limit\": 10.0, \"index_kpool\": 4, "
        "\"linear_attn_config\": "
        "{\"num_heads\": %d, \"head_dim\": 128, \"short_conv_kernel_size\": 4, \"gate_lower_bound\": -5.0}, "
        "\"hc_mult\": 4, "
        "\"hc_eps\": 1e-06, \"hc_sinkhorn_iters\": 20, \"pad_token_id\": 0, \"eos_token_id\": [0], "
        "\"num_nextn_predict_layers\": %d, ",
        s->vocab, s->hidden, s->intermediate, s->expert_width, s->n_layers, s->heads, s->heads, s->shared, s->n_experts,
        s->top_k, s->scale, s->q_lora, s->index_topk, s->index_heads, s->kda_heads, s->n_mtp);
    fprintf(f, "\"layer_types\": [");
    for (int i = 0; i < s->n_layers; i++)
        fprintf(f, "%s\"%s\"", i ? ", " : "", i % 4 == 3 ? "deepseek_sparse_attention" : "linear_attention");
    fprintf(f, "], \"mlp_layer_types\": [");
    for (int i = 0; i < s->n_layers; i++) fprintf(f, "%s\"%s\"", i ? ", " : "", i < s->n_dense ? "dense" : "sparse");
    fprintf(f, "]}}\n");
    return fclose(f) == 0 ? TD_OK : td_fail(err, TD_EIO, "%s: cannot be written", path);
}

static td_status write_tensors(const list *l, const char *dir, char sha256[65], td_error *err)
{
    td_safetensors_writer *writer;
    double offset, scale;
    size_t largest = 0;
    td_status status = td_safetensors_writer_create(dir, (uint64_t)1 << 40, &writer, err);
    for (int i = 0; i < l->n && !status; i++) {
        const entry *e = &l->items[i];
        if ((size_t)n_elements(e) * sizeof(float) > largest) largest = (size_t)n_elements(e) * sizeof(float);
        status = td_safetensors_writer_declare(writer, e->name, rule(e, &offset, &scale) ? TD_DTYPE_F32 : TD_DTYPE_BF16,
                                               e->rank, e->dims, err);
    }
    void *data = malloc(largest);
    td_sha256 *sha = td_sha256_create();
    uint8_t digest[TD_SHA256_BYTES];
    td_check(data && sha);
    if (!status) status = td_safetensors_writer_begin(writer, err);
    for (int i = 0; i < l->n && !status; i++) {
        size_t n_bytes = fill(&l->items[i], data);
        td_sha256_update(sha, data, n_bytes);
        status = td_safetensors_writer_put(writer, data, n_bytes, err);
    }
    td_sha256_finish(sha, digest);
    td_hex(digest, sizeof digest, sha256);
    free(data);
    if (!status) status = td_safetensors_writer_finish(writer, err);
    td_safetensors_writer_destroy(writer);
    return status;
}

td_status td_random_checkpoint_write(const char *name, const char *dir, char sha256[65], td_error *err)
{
    const shape *s = NULL;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (strcmp(shapes[i].name, name) == 0) s = &shapes[i];
    if (!s) return td_fail(err, TD_EINVAL, "%s: no such random checkpoint", name);
    list l = { .items = calloc(TENSORS_MAX, sizeof(entry)) };
    td_check(l.items);
    add_all(&l, s);
    qsort(l.items, (size_t)l.n, sizeof *l.items, by_name);
    td_status status = write_config(s, dir, err);
    if (!status) status = write_tensors(&l, dir, sha256, err);
    free(l.items);
    return status;
}
