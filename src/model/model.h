/* The model: weights of one rank's shards, caches of its slots, and the forward pass, written once over the op table.
 *
 *     plan     td_model_plan_bytes(..., &plan)                      every byte, before a weight is read
 *     load     td_model_create(...)                                 packs the rank's slices, reports progress
 *     forward  td_model_forward(model, &batch)                      a window of rows from several sequences
 *     commit   td_model_commit(model, keep)                         which rows of that window really happened
 *
 * Every rank calls the same functions with the same arguments; partials cross ranks through the link inside forward.
 * A forward never changes committed state: it writes KV rows at and after each segment's position (dead until they are
 * committed) and the other parity of the KDA states. The engine thread owns the model; no function here is thread-safe.
 */
#ifndef TD_MODEL_MODEL_H
#define TD_MODEL_MODEL_H

#include "checkpoint/checkpoint.h"
#include "link/link.h"
#include "ops/ops.h"

TD_BEGIN_C

typedef struct td_model td_model;

typedef struct td_model_options {
    int rank, world;        /* world 1: both shards here; world 2: shard `rank` */
    int n_slots;            /* sequences that hold state at once (4) */
    int n_blocks;           /* KV pool, blocks of TD_BLOCK tokens */
    int chunk_rows;         /* largest prompt window, multiple of TD_GRID (CPU 512, CUDA 2048) */
    int64_t context_tokens; /* longest sequence */
    td_kv_format kv;
    td_format dense, head; /* format of dense weights and of lm_head */
    bool mtp;              /* load the MTP layer */
    int n_logits;          /* rows of one window whose logits may be wanted; 0: TD_WINDOW_MAX */
    bool check_layers;     /* debug: compare a checksum of X over the ranks after every layer */
    bool no_graphs;        /* debug: operations one by one, no recordings */
    bool loopback;         /* measurements: no peer; a gather takes loopback_ns and gives this rank's own part back */
    int64_t loopback_ns;
} td_model_options;

/* Bytes by purpose. total = what create takes, to the byte: create runs the same layout. Not in it: the device's own
 * scratch (td_dev_scratch_bytes) and what the link must be opened with. Largest pool that fits into M bytes: (M -
 * (total - kv)) / (kv_bytes_per_token * TD_BLOCK) blocks. */
typedef struct td_model_plan {
    size_t experts_bytes, dense_bytes, embed_bytes, head_bytes, mtp_bytes; /* weights; mtp: all of that layer */
    size_t kv_bytes, state_bytes, scratch_bytes;
    size_t total_bytes, shared_bytes; /* shared: the part of the total that host and device both see */
    size_t kv_bytes_per_token, state_bytes_per_slot;
    size_t link_region_bytes, link_gather_bytes; /* least region_bytes and gather_max_bytes of td_link_options */
} td_model_plan;

/* The limits a device for this model must be created with. */
void td_model_dev_limits(const td_config *config, const td_model_options *options, td_dev_limits *limits);

/* Reads headers only: the widths of EXL3 tensors differ. dev is asked for its formats, nothing is taken from it.
 * TD_EINVAL: an option; TD_EFORMAT, TD_ENOTFOUND, TD_EUNSUPPORTED: the checkpoint. */
td_status td_model_plan_bytes(const td_dev *dev, const td_ops *ops, const td_checkpoint *checkpoint,
                              const td_model_options *options, td_model_plan *plan, td_error *err);

/* Called during loading, from the loading thread. Return false to give up (TD_ECANCELED). */
typedef bool td_progress_fn(void *user, uint64_t done_bytes, uint64_t total_bytes);

/* dev, link and checkpoint are borrowed; dev and link until destroy, the checkpoint only for this call. */
td_status td_model_create(td_dev *dev, const td_ops *ops, td_link *link, const td_checkpoint *checkpoint,
                          const td_model_options *options, td_progress_fn *progress, void *user, td_model **out,
                          td_error *err);
void td_model_destroy(td_model *model);
const td_config *td_model_config(const td_model *model);
td_dev *td_model_dev(const td_model *model); /* as given: what follows a forward runs there too */
const td_ops *td_model_ops(const td_model *model);

/* Clears a slot's recurrent state and forgets its block table: a new sequence starts at position 0. */
void td_model_slot_reset(td_model *model, int slot);
int32_t td_model_slot_pos(const td_model *model, int slot); /* rows committed: where the slot's next segment starts */

/* The slot's blocks in order of position; n_blocks * TD_BLOCK must exceed every position that is written. Copied. */
void td_model_slot_blocks(td_model *model, int slot, const int32_t *blocks, int n_blocks);

/* Copies the used rows of one pool block (all planes) to another: a second writer continues a shared, partly filled
 * block. */
td_status td_model_block_copy(td_model *model, int32_t from, int32_t to, int n_tokens);

/* A kept state: the committed recurrent state of a slot and its index-ring tail, flat in the length of the context. */
size_t td_model_snapshot_bytes(const td_model *model);
td_status td_model_snapshot_save(td_model *model, int slot, int32_t pos, void *dst);
td_status td_model_snapshot_load(td_model *model, int slot, int32_t pos, const void *src);

/* Rows of several sequences, concatenated, each slot at most once. Decode and verify segments (chunked 0) come first,
 * at most TD_WINDOW_MAX rows in all; then prompts (chunked 1), pos % TD_GRID == 0, at most chunk_rows rows in all. A
 * prompt that is filled in several windows is cut at multiples of TD_GRID. */
typedef struct td_batch_segment {
    int slot;
    int32_t pos; /* position of the first row = rows committed so far */
    int n_rows;
    const int32_t *ids; /* [n_rows] */
    bool chunked;
    bool logits_last, logits_all; /* rows whose logits are wanted: the last, or all */
} td_batch_segment;

typedef struct td_batch {
    int n_segments;
    td_batch_segment segments[TD_SEGMENTS_MAX];
} td_batch;

/* Runs the window. Afterwards its logits are valid until the next forward. TD_EINVAL: sizes; TD_EPEER: link. */
td_status td_model_forward(td_model *model, const td_batch *batch, td_error *err);

/* Records the windows of up to n_rows decode rows in advance, so that no request waits for it. CPU: nothing to do. */
td_status td_model_prepare(td_model *model, int n_rows, td_error *err);

/* keep[i] in 0..n_rows of segment i of the last forward; chunked segments: 0 or n_rows. Brings the KDA states up to the
 * kept rows and moves each slot on. Without a commit the next forward starts from the same committed state. */
td_status td_model_commit(td_model *model, const int *keep, td_error *err);

/* Logits of the wanted rows in order of the window, this rank's shards: [n_wanted][td_model_vocab_shard()] fp32 for
 * shard s, token id = s * td_model_vocab_shard() + column. NULL for a shard of another rank.
 *   logits_device  where operations read them; columns of ids from the config's vocab_size up are undefined
 *   logits         for the host, which on a GPU means a copy each time (tests, tools); those columns are -inf. Also
 *                  NULL when there is no memory for it or the device is lost */
const float *td_model_logits_device(const td_model *model, int shard);
const float *td_model_logits(td_model *model, int shard);
int td_model_vocab_shard(const td_model *model);
int td_model_n_logits(const td_model *model);

/* Final-normed rows of a segment of the last forward, fp32 [n_rows][hidden]: what the MTP layer takes as h. Needs
 * options.mtp. */
td_status td_model_hidden(const td_model *model, int segment, int from_row, int n_rows, float *out);

/* The MTP layer (docs/model.md "MTP"). Row i of a slot consumes h, the final-normed row of position pos + i (h == NULL:
 * those of the last forward's segment, rows from_row..), and next_ids[i], the token at pos + i + 1; it writes its own
 * caches at pos + i. Logits of the last row are left as by forward; y (NULL or [n_rows][hidden] fp32 host) receives the
 * shared_head-normed rows, which a chained draft passes as h. */
typedef struct td_mtp_args {
    int slot;
    int32_t pos;
    int n_rows;
    const float *h;        /* [n_rows][hidden] host fp32, or NULL */
    int segment, from_row; /* with h == NULL */
    const int32_t *next_ids;
    float *y;
} td_mtp_args;
td_status td_model_mtp(td_model *model, const td_mtp_args *args, td_error *err);

/* Debug and oracle: called after every layer with the streams X of the window, converted to fp32 [n_rows][4][hidden];
 * layer -1: after the embedding; n_layers: final-normed rows [n_rows][hidden]. NULL turns it off. mlp_input: the normed
 * rows [n_rows][hidden] that the layer's MLP or router and experts read, before the call of experts. Also selected
 * experts and pools. The last three see the MTP layer too, as layer n_layers. While a trace is set, user
 * alone counts, windows run operation by operation instead of from recordings. */
typedef struct td_trace {
    void *user;
    void (*layer)(void *user, int layer, int n_rows, const float *x);
    void (*mlp_input)(void *user, int layer, int n_rows, const float *n);
    void (*experts)(void *user, int layer, int n_rows, int top_k, const int32_t *ids, const float *weights);
    void (*pools)(void *user, int layer, int n_rows, int top_pools, const int32_t *count, const int32_t *list);
} td_trace;
void td_model_trace(td_model *model, const td_trace *trace);

TD_END_C
#endif
