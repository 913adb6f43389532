/* config.json of a glm5_next checkpoint: read once, checked once, then plain numbers that every other folder may trust.
 * Everything this program cannot compute is refused here by file and key, so that no kernel has to ask. What is
 * accepted and why: docs/checkpoint.md "config.json". */
#ifndef TD_CHECKPOINT_CONFIG_H
#define TD_CHECKPOINT_CONFIG_H

#include "base/status.h"

TD_BEGIN_C

#define TD_LAYERS_MAX 256 /* decoder layers and the MTP layer together */
#define TD_EOS_MAX    16

/* Fixed by the kernels; a config that says otherwise is refused. */
#define TD_HC_MULT    4   /* residual streams */
#define TD_INDEX_POOL 4   /* tokens in a pool */
#define TD_INDEX_DIM  128 /* index_head_dim */
#define TD_KDA_DIM    128 /* linear_attn_config.head_dim: of keys and of values */
#define TD_KDA_CONV   4   /* taps */

typedef enum td_quant_method { TD_QUANT_NONE, TD_QUANT_EXL3 } td_quant_method;

typedef struct td_config_vision {
    int depth;          /* blocks */
    int hidden;         /* hidden_size */
    int n_heads;        /* num_heads */
    int intermediate;   /* intermediate_size */
    int out_hidden;     /* out_hidden_size: equals the text model's hidden */
    int projection;     /* projection_intermediate_size, of the merger */
    int patch;          /* patch_size, pixels */
    int temporal_patch; /* temporal_patch_size, frames */
    int spatial_merge;  /* spatial_merge_size, patches a side of one feature row */
    int image_size;     /* pixels */
    int channels;       /* in_channels */
    bool attention_bias;
    float rms_eps, swiglu_limit, rope_theta;
} td_config_vision;

typedef struct td_config {
    /* widths */
    int vocab_size;          /* rows of the embedding and of the head, even */
    int hidden;              /* hidden_size, D */
    int n_layers;            /* num_hidden_layers, without the MTP layer */
    int intermediate;        /* intermediate_size: dense MLP */
    int moe_intermediate;    /* moe_intermediate_size: one routed expert */
    int shared_intermediate; /* moe_intermediate * n_shared_experts */
    int max_positions;       /* max_position_embeddings: largest window */
    float rms_eps;           /* rms_norm_eps */
    float swiglu_limit;      /* clamp of every gated MLP */

    /* experts */
    int n_experts;        /* n_routed_experts */
    int n_shared_experts; /* 0: no shared expert */
    int top_k;            /* num_experts_per_tok */
    float routed_scale;   /* routed_scaling_factor */
    bool norm_topk;       /* norm_topk_prob */

    /* DSA layers */
    int n_heads;         /* num_attention_heads == num_key_value_heads, even */
    int q_lora, kv_lora; /* q_lora_rank, kv_lora_rank */
    int qk_dim;          /* qk_nope_head_dim; there is no rotary part */
    int v_dim;           /* v_head_dim */
    int index_topk;      /* tokens kept by the indexer, a multiple of index_kpool */
    int index_kpool;     /* TD_INDEX_POOL */
    int index_dim;       /* TD_INDEX_DIM */
    int index_heads;     /* index_n_heads */

    /* KDA layers */
    int kda_heads;         /* linear_attn_config.num_heads, even */
    int kda_dim;           /* TD_KDA_DIM */
    int kda_conv;          /* TD_KDA_CONV */
    float kda_lower_bound; /* gate_lower_bound, < 0 */

    /* hyper-connections */
    int hc_mult;  /* TD_HC_MULT */
    int hc_iters; /* hc_sinkhorn_iters */
    float hc_eps;

    /* schedule: entry n_layers is the MTP layer (DSA + MoE) when n_mtp == 1 */
    int n_mtp;                  /* num_nextn_predict_layers: 0 or 1 */
    bool is_dsa[TD_LAYERS_MAX]; /* false: KDA */
    bool is_moe[TD_LAYERS_MAX]; /* false: dense MLP */

    /* token ids; -1 = the file names none */
    int n_eos;
    int eos[TD_EOS_MAX]; /* every id ends a reply; all in [0, vocab_size) */
    int pad_id;
    int image_id, image_start_id, image_end_id;
    int video_id, video_start_id, video_end_id;

    /* generation_config.json, or 1.0 and 1.0 without the file */
    float temperature, top_p;

    bool has_vision;
    td_config_vision vision;

    td_quant_method quant_method;
    float quant_bits;       /* average; widths are read per tensor */
    char quant_codebook[8]; /* "mcg", or "" when not quantised; informational, marker tensors decide */
} td_config;

/* Reads dir/config.json and, when it is there, dir/generation_config.json. On failure err names file and key, *out is
 * untouched. TD_ENOTFOUND no config.json, TD_EIO, TD_EFORMAT not JSON or a key of the wrong type or out of range,
 * TD_EUNSUPPORTED well formed but not this model. */
td_status td_config_load(const char *dir, td_config *out, td_error *err);

/* The same from bytes; name stands for the file in messages. generation may be NULL. */
td_status td_config_parse(const char *name, const void *json, size_t n_bytes, const char *generation_name,
                          const void *generation, size_t generation_bytes, td_config *out, td_error *err);

/* Layers of a kind, among the decoder layers only. */
int td_config_n_dsa(const td_config *config);
int td_config_n_moe(const td_config *config);

/* FNV-1a-64 over every number above: two ranks compare it before they load. */
uint64_t td_config_hash(const td_config *config);

TD_END_C
#endif
