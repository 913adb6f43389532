/* Sparse latent attention. Arithmetic: docs/model.md "DSA" and "Indexer". Latents, pooled keys, selections are the same
 * on every rank; heads are a shard's own. */
#ifndef TD_OPS_DSA_H
#define TD_OPS_DSA_H

#include "ops/dev.h"
#include "ops/linear.h"

TD_BEGIN_C

typedef enum td_kv_format {
    TD_KV_ACT, /* rows of act */
    TD_KV_FP8  /* width e4m3 codes, the power-of-two scale as fp32, 12 zero bytes (docs/kv-pool.md) */
} td_kv_format;

/* Bytes of a cached row of `width` values (512 or 128). */
size_t td_kv_row_bytes(const td_dev *dev, td_kv_format format, int width);

/* The caches of one DSA layer and the sequences' block tables. Planes cover the whole pool. */
typedef struct td_dsa_cache {
    td_kv_format format;
    void *latents; /* [n_blocks * 512] rows of kv_lora values */
    void *pools;   /* [n_blocks * 128] rows of 128 values: pooled index keys */
    td_act *ring;  /* [n_slots][ring_rows][2][128]  index key and gate of recent positions, row = pos % ring_rows */
    int ring_rows; /* >= rows of the largest window + 3, multiple of 4 */
    const int32_t *blocks; /* [n_slots][blocks_cap] block numbers in order of position */
    int blocks_cap;
    int kv_lora; /* 512 */
} td_dsa_cache;

/* For every row: c_q = rmsnorm(q_a), latent = rmsnorm(kv_a) into the pool; index key = layernorm(wk), gate into the
 * ring; each pool whose last member is in the window is completed (members from ring). Later rows of a rejected window
 * are overwritten. The window's and the block tables are older than the operation that comes right before: a device
 * may read them while that one ends. */
typedef struct td_dsa_store_args {
    const td_window *window;
    td_dsa_cache cache;
    int q_lora;
    float rms_eps;
    const td_act *proj;
    size_t proj_stride;               /* q_a [q_lora] | kv_a [kv_lora] | wk [128] | compress gate [128] */
    const float *q_norm, *kv_norm;    /* [q_lora], [kv_lora] */
    const float *k_norm_w, *k_norm_b; /* [128] LayerNorm, eps 1e-6 */
    const float *ape;                 /* [4][128] */
    td_act *c_q;                      /* [rows][q_lora] out */
} td_dsa_store_args;
typedef td_status td_dsa_store_fn(td_dev *dev, const td_dsa_store_args *a);

/* Pools a row attends to. npool = (pos + 1) / 4. npool <= top_pools: count = -1, the row sees its whole prefix. Else
 * count = top_pools and list[r] = the pools of the top_pools largest
 *   s_P = sum_h w_h * max(0, 128^-1/2 * q_h . K_P)    h ascending, fp32;   equal scores: the lower pool
 * ascending. w_h = weights[r][h] * n_heads^-1/2. Rows of a window without sparse rows cost nothing. */
typedef struct td_dsa_select_args {
    const td_window *window;
    td_dsa_cache cache;
    int n_heads;          /* index heads */
    int top_pools;        /* index_topk / 4 */
    const td_act *q;      /* [rows][n_heads][128] */
    const float *weights; /* [rows][n_heads] raw projection */
    int32_t *count;       /* [rows] out */
    int32_t *list;        /* [rows][top_pools] out */
} td_dsa_select_args;
typedef td_status td_dsa_select_fn(td_dev *dev, const td_dsa_select_args *a);

/* Absorbed attention of a shard's heads over each row's tokens (selected pools + the tail 4 * npool .. pos, or 0 ..
 * pos):
 *   qt_h = act(Wk_h^T q_h);  score = qt_h . latent_t * scale;  ol_h = act( sum p latent / sum p );
 *   o_h = act(Wv_h ol_h)
 * Tokens ascending, partials of 512 tokens merged in order. kv_b: per head [k_dim + v_dim][kv_lora]; the two uses read
 * it along different axes, so it is packed by its own functions. */
typedef struct td_kv_b {
    int n_heads, k_dim, v_dim, kv_lora; /* 256, 256, 512 */
    void *data;                         /* device-visible; the layout belongs to the backend */
} td_kv_b;
size_t td_cpu_kv_b_bytes(const td_dev *dev, int n_heads, int k_dim, int v_dim, int kv_lora);
td_status td_cpu_kv_b_fill(td_dev *dev, const td_kv_b *w,
                           const td_bf16 *src); /* [n_heads * (k_dim + v_dim)][kv_lora] */

typedef struct td_dsa_attend_args {
    const td_window *window;
    td_dsa_cache cache;
    td_kv_b kv_b;
    float scale; /* k_dim^-1/2 */
    int top_pools;
    const int32_t *count, *list; /* from dsa_select */
    const td_act *q;
    size_t q_stride; /* [rows][n_heads * k_dim] */
    td_act *o;       /* [rows][n_heads * v_dim] out */
} td_dsa_attend_args;
typedef td_status td_dsa_attend_fn(td_dev *dev, const td_dsa_attend_args *a);

td_dsa_store_fn td_cpu_dsa_store;
td_dsa_select_fn td_cpu_dsa_select;
td_dsa_attend_fn td_cpu_dsa_attend;

TD_END_C
#endif
