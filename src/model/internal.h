/* What the files of src/model share: the model's structures, in the words of docs/model.md.
 *
 * Weights and caches are described per layer and, where heads or widths are divided, per own shard: a rank of world 1
 * owns both virtual shards (own index 0 and 1), a rank of world 2 one (own index 0). Everything else is held once a
 * rank. All pointers into `memory` are handed out by one layout (layout.c, weights.c), which the plan runs as well. */
#ifndef TD_MODEL_INTERNAL_H
#define TD_MODEL_INTERNAL_H

#include "base/arena.h"
#include "checkpoint/slices.h"
#include "model/model.h"

/* Leaves the calling function with the status of a step that failed. */
#define TD_TRY(call)                                                                                                   \
    do {                                                                                                               \
        td_status try_status = (call);                                                                                 \
        if (try_status) return try_status;                                                                             \
    } while (0)

enum { TD_HYPER_ROWS = 24, TD_RING_TAIL = 4, TD_GRAPH_LEVELS = 4 };

/* KDA layer. Columns of a projected row: per own shard q | k | v, then f_a | g_a, then b of all own heads. */
typedef struct td_model_kda_shard {
    int n_heads;
    td_kda_weights w;
    td_kda_state state;
    td_kda_saved saved;
    td_weight f_b, g_b; /* [heads * 128][128] */
    td_weight out;      /* columns of this shard's heads */
} td_model_kda_shard;

typedef struct td_model_kda {
    td_weight in; /* [columns above][dim] */
    td_model_kda_shard shard[TD_SHARDS];
} td_model_kda;

/* DSA layer. Columns of a projected row: q_a | kv_a | wk | compress gate; the last two stay bf16 in every format. */
typedef struct td_model_dsa_shard {
    td_kv_b kv_b;
    td_weight out;
} td_model_dsa_shard;

typedef struct td_model_dsa {
    td_weight latent_in;     /* q_a | kv_a */
    td_weight index_in;      /* wk | compress gate */
    td_weight index_q;       /* wq_b */
    td_weight index_weights; /* weights_proj, fp32 out */
    td_weight q_b;           /* rows of all own heads */
    const float *q_norm, *kv_norm, *k_norm_w, *k_norm_b, *ape;
    td_dsa_cache cache;
    td_model_dsa_shard shard[TD_SHARDS];
} td_model_dsa;

/* Gated MLP: dense layers and the shared expert. */
typedef struct td_model_mlp_shard {
    int width;
    td_weight gate_up; /* gate | up */
    td_weight down;
} td_model_mlp_shard;

typedef struct td_model_mlp {
    td_model_mlp_shard shard[TD_SHARDS];
} td_model_mlp;

typedef struct td_model_moe {
    td_weight router;
    const float *bias;
    td_model_mlp shared; /* unused without shared experts */
    td_experts experts[TD_SHARDS];
} td_model_moe;

/* Where a block meets the residual: hyper-connection and norm. The MTP layer has only the norm. */
typedef struct td_model_site {
    const float *fn, *base, *scale;
    const float *norm;
} td_model_site;

typedef struct td_model_layer {
    bool is_dsa, is_moe;
    td_model_site attn_site, mlp_site;
    td_model_kda kda; /* unless is_dsa */
    td_model_dsa dsa;
    td_model_mlp mlp; /* unless is_moe */
    td_model_moe moe;
} td_model_layer;

typedef struct td_model_slot {
    int32_t pos;      /* rows committed */
    int parity;       /* which KDA state is the committed one */
    int32_t n_blocks; /* valid entries of its block table */
} td_model_slot;

/* Tables that the host writes and operations read. A GPU has a copy of its own, which follows in stream order
 * (window.c): operations that read the host's over the bus would each wait for it. On the CPU they are one. */
typedef struct td_model_tables {
    int32_t *ids, *pos, *seg; /* [rows_cap] */
    td_segment *segments;     /* [TD_SEGMENTS_MAX] */
    int32_t *keep;            /* [TD_SEGMENTS_MAX], for the replay */
    int32_t *wanted;          /* [n_logits] rows whose logits are wanted */
} td_model_tables;

typedef struct td_model_window {
    td_window w; /* of the device's tables */
    td_model_tables host, device;
    size_t tables_bytes; /* from ids on */
    int n_wanted;
    int n_serial; /* rows of row-by-row segments, which come first */
} td_model_window;

/* A KDA layer's projected row for so many own heads: whole eights, so that every row starts at a multiple of 16 bytes. */
static inline size_t td_model_kda_columns(size_t own_heads)
{
    return (3 * own_heads * TD_HEAD + 2 * TD_HEAD + own_heads + 7) / 8 * 8;
}

/* Activations of one window; rows_cap rows each. The buffers of a block share memory with those of the other kinds of
 * block, which are never alive at the same time. */
typedef struct td_model_scratch {
    td_act *x;          /* [rows][4][dim] the streams */
    float *post, *comb; /* [rows][4], [rows][4][4] of the pending site */
    td_act *n;          /* [rows][dim] normed input of a block */
    float *partials;    /* [TD_SHARDS][rows][dim]; on the CPU with a second rank: memory that the link sends from */
    td_act *kda_proj, *kda_f, *kda_gate, *kda_y;
    td_act *dsa_proj, *dsa_c_q, *dsa_q, *dsa_o, *index_q;
    float *index_weights;
    int32_t *pool_count, *pool_list;
    td_act *gate_up, *mlp_a;
    int32_t *expert_ids;
    float *expert_weights;
    td_act *final;            /* [rows][dim] final-normed rows of the last forward (with the MTP layer) */
    td_act *wanted;           /* [n_logits][dim] those whose logits are wanted */
    float *logits[TD_SHARDS]; /* [n_logits][vocab_shard] of own shards, by own index */
} td_model_scratch;

struct td_model {
    td_dev *dev;
    const td_ops *ops;
    td_link *link;
    td_config config;
    td_model_options options; /* n_logits resolved */
    td_model_plan plan;

    int first_own, n_own;    /* own shards */
    td_shard own[TD_SHARDS]; /* what they own, by own index */
    int rows_cap;            /* chunk_rows + TD_WINDOW_MAX */
    int vocab_shard;         /* columns of a logits row */
    int top_pools;           /* index_topk / 4 */
    int blocks_cap;          /* entries of a slot's block table */
    int n_loaded;            /* layers, the MTP layer included when it is loaded */

    void *memory, *shared; /* on the device; seen by both (memory.c) */
    size_t memory_bytes, shared_bytes;
    td_arena meta;          /* structures on the heap */
    td_model_layer *layers; /* [n_loaded] */
    td_model_slot *slots;   /* [n_slots] */
    int32_t *blocks;        /* [n_slots][blocks_cap], the host's */
    int32_t *device_blocks; /* its copy, as of the last window; the same memory on the CPU */
    bool blocks_changed;

    const td_bf16 *embed;      /* [vocab][dim] */
    td_weight head[TD_SHARDS]; /* by own index */
    const float *final_norm;
    td_weight eh_proj; /* MTP layer */
    const float *enorm, *hnorm, *shared_head_norm;

    td_model_window window; /* of the last forward */
    td_model_window mtp_window;
    bool have_window, committed; /* there was a forward; it was committed */
    td_model_scratch s;
    int n_logits;                  /* rows in s.logits */
    float *host_logits[TD_SHARDS]; /* copies of s.logits for td_model_logits(), from malloc when it is first called */

    td_graph *graphs[TD_WINDOW_MAX + 1][TD_GRAPH_LEVELS]; /* by rows and reach; NULL until recorded (graph.c) */
    bool recording;

    /* Gathers of a device (exchange.c). bell and slots are in the link's memory; NULL: loopback, or none. */
    uint32_t *gather_state;
    td_bell *bell;
    float *gather_slots;      /* [TD_SHARDS][rows][dim] of a window */
    uint32_t asked, answered; /* numbers of the last gather in the stream, and the last one answered */
    int asked_rows;           /* of those in the stream */

    td_trace trace;
    float *trace_x; /* [rows][4][dim] fp32 while a trace is set */
};

static inline const td_act *td_model_act(const td_model *m, const td_act *base, size_t i)
{
    return td_act_at(m->dev, base, i);
}

static inline bool td_model_traced(const td_model *m)
{
    return m->trace.user || m->trace.layer || m->trace.mlp_input || m->trace.experts || m->trace.pools;
}

/* May a window of n_rows branch (td_dev_fork)? Small ones leave most of a device idle. Only recordings do: called one by
 * one, operations wait for their host rather than for each other, and are what recordings are compared with. */
static inline bool td_model_branches(const td_model *m, int n_rows)
{
    return m->recording && n_rows <= TD_WINDOW_MAX;
}

/* memory.c: where device memory comes from. */
td_status td_memory_create(td_model *m, size_t n_bytes, size_t shared_bytes, td_error *err);
void td_memory_destroy(td_model *m);

/* layout.c: everything, once counting (base NULL), once taking; shared: what host and device both reach. */
td_status td_model_layout(td_model *m, const td_checkpoint *ck, td_arena *mem, td_arena *shared, td_error *err);
td_status td_model_init(td_model *m, td_dev *dev, const td_ops *ops, const td_config *config,
                        const td_model_options *options, td_error *err);

/* window.c */
td_status td_model_window_build(const td_model *m, td_model_window *window, const td_batch *batch, td_error *err);
bool td_model_window_sparse(const td_model *m, const td_window *w);         /* does any row select pools? */
td_status td_model_window_send(td_model *m, const td_model_window *window); /* the tables follow to the device */
td_status td_model_blocks_send(td_model *m);                                /* the block tables, if they changed */

/* kda.c, dsa.c, moe.c: a block from m->s.n to this rank's partials. */
td_status td_model_kda_block(td_model *m, const td_model_kda *kda, const td_model_window *window);
td_status td_model_dsa_block(td_model *m, const td_model_dsa *dsa, const td_model_window *window);
td_status td_model_mlp_block(td_model *m, const td_model_mlp *mlp, int n_rows);
td_status td_model_moe_block(td_model *m, const td_model_moe *moe, int n_rows);
float *td_model_partial(const td_model *m, int own, int n_rows); /* [n_rows][dim] of an own shard */

/* ahead.c: the weights that are read after an exchange, in the order of their use. attention of n_layers: the head. */
typedef struct td_model_ahead {
    td_span span[TD_GATHER_NEXT];
    int n;
} td_model_ahead;
td_model_ahead td_model_ahead_attention(const td_model *m, int layer);
td_model_ahead td_model_ahead_feed_forward(const td_model *m, int layer);

/* exchange.c: partials of the other rank into m->s.partials; ahead: what is read next. On a device the host's part
 * follows: answer is for recordings with n_gathers of n_rows, settle for what is still to be answered, gathered (after
 * td_dev_sync) says whether the device waited for every answer; after a failure abandon lets the device run out, and
 * nothing is answered any more. share_link takes what the plan says from the link. */
td_status td_model_exchange(td_model *m, int n_rows, const td_model_ahead *ahead, td_error *err);
td_status td_model_answer(td_model *m, int n_gathers, int n_rows, td_error *err);
td_status td_model_settle(td_model *m, td_error *err);
td_status td_model_gathered(const td_model *m, td_error *err);
void td_model_abandon(td_model *m);
bool td_model_gathers_on_device(const td_model *m);
size_t td_model_gather_bytes(const td_model *m);
td_status td_model_share_link(td_model *m, td_error *err);
void td_model_unshare_link(td_model *m);

/* graph.c: windows that are replayed. */
bool td_model_graph_serves(const td_model *m, const td_model_window *window);
td_status td_model_graph_run(td_model *m, td_model_window *window, td_error *err);
void td_model_graphs_destroy(td_model *m);

/* trunk.c */
td_status td_model_trunk(td_model *m, const td_model_window *window, td_error *err); /* embedding to logits */
td_status td_model_attention(td_model *m, int layer, const td_model_window *window, td_error *err); /* and exchange */
td_status td_model_feed_forward(td_model *m, int layer, const td_model_window *window, td_error *err);
td_status td_model_head(td_model *m, const td_act *rows, int n_rows);

/* y = W x, act out at columns of y. */
td_status td_model_linear(td_model *m, const td_weight *w, int n_rows, const td_act *x, size_t x_stride, td_act *y,
                          size_t y_stride);
td_status td_model_linear_f32(td_model *m, const td_weight *w, int n_rows, const td_act *x, size_t x_stride, float *y,
                              size_t y_stride);

#endif
