/* See full_size.h. The numbers are the released checkpoint's config.json (docs/checkpoint.md), put together as that
 * file would be, so that what is refused there is refused here; a unit test compares the two. */
#include "cli/full_size.h"

#include "base/json_write.h"

/* Keys of text_config whose values are numbers, for either shape. */
static const struct {
    const char *key;
    int64_t real, small;
} NUMBERS[] = {
    { "vocab_size", 154880, 2048 },
    { "hidden_size", 4096, 256 },
    { "intermediate_size", 12288, 512 },
    { "moe_intermediate_size", 2048, 256 },
    { "num_attention_heads", 64, 2 },
    { "num_key_value_heads", 64, 2 },
    { "n_routed_experts", 288, 16 },
    { "n_shared_experts", 1, 1 },
    { "num_experts_per_tok", 8, 4 },
    { "q_lora_rank", 1536, 128 },
    { "kv_lora_rank", 512, 512 },
    { "qk_nope_head_dim", 256, 256 },
    { "v_head_dim", 256, 256 },
    { "max_position_embeddings", 1048576, 16384 },
    { "index_topk", 2048, 256 },
    { "index_kpool", 4, 4 },
    { "index_head_dim", 128, 128 },
    { "index_n_heads", 32, 4 },
    { "hc_mult", 4, 4 },
    { "hc_sinkhorn_iters", 20, 20 },
    { "num_nextn_predict_layers", 0, 0 },
    { "pad_token_id", 154820, 2047 },
};

enum { REAL_LAYERS = 45, SMALL_LAYERS = 8, DENSE_LAYERS = 3, DSA_EVERY = 4, REAL_KDA_HEADS = 64, SMALL_KDA_HEADS = 2 };

static void write_real(td_json_writer *w, const char *key, double x)
{
    td_json_write_key(w, key);
    td_json_write_double(w, x);
}

/* Three KDA layers, then a DSA layer; the first three layers have a dense MLP. */
static void write_schedules(td_json_writer *w, int n_layers)
{
    td_json_write_key(w, "layer_types");
    td_json_write_begin(w, '[');
    for (int i = 0; i < n_layers; i++)
        td_json_write_text(w, i % DSA_EVERY == DSA_EVERY - 1 ? "deepseek_sparse_attention" : "linear_attention");
    td_json_write_end(w, ']');
    td_json_write_key(w, "mlp_layer_types");
    td_json_write_begin(w, '[');
    for (int i = 0; i < n_layers; i++) td_json_write_text(w, i < DENSE_LAYERS ? "dense" : "sparse");
    td_json_write_end(w, ']');
}

static void write_text(td_json_writer *w, bool small, int n_layers)
{
    td_json_write_begin(w, '{');
    td_json_write_member_text(w, "model_type", "glm5_next_text");
    td_json_write_member_int(w, "num_hidden_layers", n_layers);
    for (size_t i = 0; i < sizeof NUMBERS / sizeof *NUMBERS; i++)
        td_json_write_member_int(w, NUMBERS[i].key, small ? NUMBERS[i].small : NUMBERS[i].real);
    write_real(w, "rms_norm_eps", 1e-5);
    write_real(w, "swiglu_limit", 10);
    write_real(w, "routed_scaling_factor", 2.5);
    write_real(w, "hc_eps", 1e-6);
    write_schedules(w, n_layers);
    td_json_write_key(w, "linear_attn_config");
    td_json_write_begin(w, '{');
    td_json_write_member_int(w, "num_heads", small ? SMALL_KDA_HEADS : REAL_KDA_HEADS);
    td_json_write_member_int(w, "head_dim", TD_KDA_DIM);
    td_json_write_member_int(w, "short_conv_kernel_size", TD_KDA_CONV);
    write_real(w, "gate_lower_bound", -5);
    td_json_write_end(w, '}');
    td_json_write_end(w, '}');
}

static void write_config(td_json_writer *w, bool small, int n_layers)
{
    td_json_write_begin(w, '{');
    td_json_write_member_text(w, "model_type", "glm5_next");
    td_json_write_key(w, "text_config");
    write_text(w, small, n_layers);
    td_json_write_key(w, "quantization_config");
    td_json_write_begin(w, '{');
    td_json_write_member_text(w, "quant_method", "exl3");
    td_json_write_member_int(w, "bits", TD_FULL_EXPERT_BITS);
    td_json_write_member_text(w, "codebook", "mcg");
    td_json_write_end(w, '}');
    td_json_write_end(w, '}');
}

td_status td_full_config(td_full_shape shape, int n_layers, td_config *out, td_error *err)
{
    bool small = shape == TD_SHAPE_SMALL;
    int all = small ? SMALL_LAYERS : REAL_LAYERS;
    if (n_layers < 0 || n_layers > all)
        return td_fail(err, TD_EINVAL, "layers %d: 1 to %d, or 0 for all", n_layers, all);
    if (!n_layers) n_layers = all;
    td_buf text;
    td_buf_init(&text, 0);
    td_json_writer w = { .out = &text };
    write_config(&w, small, n_layers);
    td_status status = text.failed ? td_fail(err, TD_ENOMEM, "no memory for a config")
                                   : td_config_parse(small ? "the small shape" : "the real shape", text.data,
                                                     text.n_bytes, NULL, NULL, 0, out, err);
    td_buf_deinit(&text);
    return status;
}
