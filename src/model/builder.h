/* One description of the weights, run twice: taking memory (counting when the arena only counts) and filling it from
 * the checkpoint. weights.c says which tensors make up which matrix; the functions here do one of the two with it.
 * Because both runs go through the same calls, the plan, the memory and the loader cannot differ.
 *
 * The first failure sticks: later calls do nothing, td_builder.status and err keep it. */
#ifndef TD_MODEL_BUILDER_H
#define TD_MODEL_BUILDER_H

#include "model/internal.h"
#include "model/stand_in.h"

typedef struct td_builder {
    td_dev *dev;
    const td_ops *ops;
    const td_checkpoint *ck;
    td_arena *meta; /* descriptors */
    td_status status;
    td_error *err;
    char prefix[64]; /* put before every tensor name */
    int layer;

    td_arena *mem;    /* taking: device memory from here; NULL: filling */
    td_arena *shared; /* taking: what host and device both see */
    size_t *account;  /* taking: the plan's sum that grows */

    td_progress_fn *progress; /* filling */
    void *user;
    uint64_t done_bytes, total_bytes, unreleased_bytes;
    td_stand_in stand_in; /* filling from a checkpoint of shapes */
    void *staging;        /* values converted on their way to the device; heap, only while loading */
    size_t staging_bytes;
} td_builder;

void td_builder_deinit(td_builder *b);

/* n_bytes at a multiple of 64, rounded up to one. NULL while counting. */
void *td_builder_take(td_builder *b, size_t n_bytes);

/* Names from now on: of the decoder layer `layer`, or after `prefix`. */
void td_builder_layer(td_builder *b, int layer);
void td_builder_prefix(td_builder *b, const char *prefix);

/* Rows `take` of the tensor `name`, which has `rows` rows. */
typedef struct td_part {
    const char *name;
    int64_t rows;
    td_range take;
} td_part;

td_part td_part_all(const char *name, int64_t rows);

/* The parts stacked along out, columns `cols` of their `in` inputs. */
void td_build_matrix(td_builder *b, td_weight *w, td_format format, int64_t in, td_range cols, const td_part *parts,
                     int n_parts);
/* One whole matrix. */
void td_build_whole(td_builder *b, td_weight *w, td_format format, const char *name, int64_t out, int64_t in);

/* The parts, `cols` values a row, as fp32, one after the other. */
void td_build_floats(td_builder *b, const float **dst, int64_t cols, const td_part *parts, int n_parts);
void td_build_vector(td_builder *b, const float **dst, const char *name, int64_t n);
/* The same with every value replaced by map(value); map NULL: as they are. */
void td_build_mapped(td_builder *b, const float **dst, int64_t cols, const td_part *parts, int n_parts,
                     float (*map)(float));

void td_build_table(td_builder *b, const td_bf16 **dst, const char *name, int64_t rows, int64_t cols);

/* kv_b of heads `heads`. */
void td_build_kv_b(td_builder *b, td_kv_b *w, const td_config *config, td_range heads);

/* All experts of the builder's layer, columns `width` of moe_intermediate. */
void td_build_experts(td_builder *b, td_experts *e, const td_config *config, td_range width);

/* weights.c: all of them, in the order of the layers. */
void td_build_weights(td_builder *b, td_model *m);

/* load.c: fills what the layout took. */
td_status td_model_load(td_model *m, const td_checkpoint *ck, td_progress_fn *progress, void *user, td_error *err);

#endif
