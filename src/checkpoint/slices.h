/* Which part of a tensor a shard owns, and copying it out. The model is always computed as TD_SHARDS virtual shards, so
 * that one rank and two ranks add the same numbers in the same order: a single rank owns both shards, of two ranks each
 * owns one. The functions take any number of shards; what is left over after an even cut goes to the lowest.
 * Why cuts fall where they do: docs/checkpoint.md "Slices". */
#ifndef TD_CHECKPOINT_SLICES_H
#define TD_CHECKPOINT_SLICES_H

#include "checkpoint/checkpoint.h"

TD_BEGIN_C

#define TD_SHARDS 2 /* virtual shards of every model */

typedef struct td_range {
    int64_t begin, end; /* end is not part of it */
} td_range;

static inline int64_t td_range_n(td_range range)
{
    return range.end - range.begin;
}

/* Cuts total (a multiple of unit, both > 0) into n_shards contiguous ranges of whole units; the first (units %
 * n_shards) shards own one unit more. 0 <= shard < n_shards. A shard may be empty when there are fewer units than
 * shards. */
td_range td_shard_range(int64_t total, int64_t unit, int shard, int n_shards);

/* The unit in which a width (of an MLP, of the vocabulary) is cut: 128, so that no Hadamard block of EXL3 is divided;
 * for widths that are not a multiple of 128, or have less than two such units: the largest smaller power of two. */
int64_t td_shard_unit(int64_t width);

/* The shards that rank owns: [begin, end) out of TD_SHARDS. 1 <= world <= TD_SHARDS. */
td_range td_rank_shards(int rank, int world);

/* How a tensor is divided among shards. Rows: the first dimension; columns: the last one of a matrix. */
typedef enum td_split { TD_SPLIT_REPLICATED, TD_SPLIT_ROWS, TD_SPLIT_COLS } td_split;

/* Everything a shard owns, in the units of the config. */
typedef struct td_shard {
    td_range heads;        /* MLA heads: rows h * qk_dim of q_b, h * (qk_dim + v_dim) of kv_b, columns h * v_dim of o */
    td_range kda_heads;    /* rows h * kda_dim of q, k, v, f_b, g_b, conv, dt_bias; rows h of A_log, b; columns of o */
    td_range intermediate; /* dense MLP: rows of gate, up; columns of down */
    td_range moe;          /* every routed expert: the same for its width */
    td_range shared;       /* shared expert: the same; empty without one */
    td_range vocab;        /* rows of lm_head */
} td_shard;

void td_shard_of(const td_config *config, int shard, int n_shards, td_shard *out);

/* What the layout says about one tensor of the text model. */
typedef enum td_group {
    TD_GROUP_EMBEDDING, /* embed_tokens */
    TD_GROUP_HEAD,      /* lm_head */
    TD_GROUP_KDA,
    TD_GROUP_DSA,
    TD_GROUP_MLP,    /* dense MLPs */
    TD_GROUP_SHARED, /* shared experts */
    TD_GROUP_ROUTER,
    TD_GROUP_HYPER,   /* hyper-connections */
    TD_GROUP_NORMS,   /* layer norms, final norm */
    TD_GROUP_MTP,     /* what only the MTP layer has: eh_proj, enorm, hnorm, shared_head.norm */
    TD_GROUP_EXPERTS, /* routed experts */
    TD_GROUP_VISION,
    TD_GROUP_COUNT
} td_group;

typedef struct td_role {
    char name[160];
    td_group group;
    int layer;       /* -1: not of a layer; n_layers: MTP */
    unsigned dtypes; /* set of allowed dtypes */
    int rank;
    int64_t shape[TD_RANK_MAX];
    td_split split;
    int64_t unit; /* of the split dimension: rows or columns that stay together */
} td_role;

/* Calls visit for every tensor that the config demands, except those of routed experts and of the vision tower; stops
 * at the first status that is not TD_OK and returns it. */
typedef td_status td_role_visit(void *user, const td_role *role);
td_status td_roles_each(const td_config *config, td_role_visit *visit, void *user);

/* The same for the vision tower; calls nothing when the config has none. */
td_status td_vision_roles_each(const td_config *config, td_role_visit *visit, void *user);

/* The shard's part of the split dimension of role; the whole first dimension when it is replicated. */
td_range td_role_range(const td_role *role, int shard, int n_shards);

/* Copies rows (first dimension) rows of tensor to out[n][rest], or columns of a matrix to out[rows][n], converted as
 * td_tensor_to_bf16 / _f32 do. out holds out_cap elements; TD_EINVAL when the range is outside or out too small. */
td_status td_slice_rows_bf16(const td_tensor *tensor, td_range rows, td_bf16 *out, size_t out_cap, td_error *err);
td_status td_slice_cols_bf16(const td_tensor *tensor, td_range cols, td_bf16 *out, size_t out_cap, td_error *err);
td_status td_slice_rows_f32(const td_tensor *tensor, td_range rows, float *out, size_t out_cap, td_error *err);
td_status td_slice_cols_f32(const td_tensor *tensor, td_range cols, float *out, size_t out_cap, td_error *err);

/* Elements range of dimension dim, all of the others, of any dtype, unconverted: trellis strips (dim 1 of gate and up,
 * dim 0 of down), suh, svh. out holds out_bytes bytes. */
td_status td_slice_raw(const td_tensor *tensor, int dim, td_range range, void *out, size_t out_bytes, td_error *err);

TD_END_C
#endif
