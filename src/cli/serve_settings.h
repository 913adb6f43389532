/* Settings of `tandem serve` and `tandem plan`: one table, so that what is planned is what is served. */
#ifndef TD_CLI_SERVE_SETTINGS_H
#define TD_CLI_SERVE_SETTINGS_H

#include "base/settings.h"
#include "checkpoint/checkpoint.h"
#include "model/model.h"
#include "ops/gpu.h"

extern const td_setting td_serve_settings[];
extern const int td_n_serve_settings;

/* What follows from settings and checkpoint together. */
typedef struct td_serve_shape {
    td_model_options model;
    int32_t context_tokens;
    bool exact_fp32;
    int n_threads;
    size_t reserve_bytes;
    td_backend backend;
    td_gpu gpu;             /* backend TD_CUDA: the one, as it was found */
    char backend_note[256]; /* why `auto` did not take a GPU; empty: it did, or was not asked */
} td_serve_shape;

/* The device of that shape. */
td_status td_serve_device(const td_serve_shape *shape, const td_config *config, td_dev **out, td_error *err);

/* context 0: the checkpoint's maximum. TD_EINVAL names the setting. */
td_status td_serve_shape_of(const td_settings *settings, const td_config *config, td_serve_shape *out, td_error *err);

/* Bytes a rank of this shape takes in all; the parts in *plan. */
td_status td_serve_bytes(const td_serve_shape *shape, const td_checkpoint *checkpoint, td_model_plan *plan,
                         size_t *total_bytes, td_error *err);

/* The longest context of at most shape->context_tokens that fits into available_bytes, in steps of TD_BLOCK; 0: none.
 * The pool shrinks with it. */
td_status td_serve_largest(const td_serve_shape *shape, const td_checkpoint *checkpoint, size_t available_bytes,
                           int32_t *context_tokens, td_error *err);

/* Sets the context (and with it the pool, unless pool-tokens was given). */
void td_serve_set_context(td_serve_shape *shape, const td_settings *settings, int32_t context_tokens);

/* Whether a shape fits here and, when no context was asked for, the largest that does: then *shape is changed to it. */
typedef struct td_serve_fit {
    td_model_plan plan;     /* of *shape as it is afterwards */
    size_t total_bytes;     /* the same */
    size_t available_bytes; /* for this rank, beside the reserve: ranks that share a machine have half each */
    int32_t largest;        /* window in tokens, at most the one that *shape had before; 0: none fits */
    bool fits;
} td_serve_fit;
td_status td_serve_fit_shape(td_serve_shape *shape, const td_settings *settings, const td_checkpoint *checkpoint,
                             td_serve_fit *out, td_error *err);

size_t td_mem_available_bytes(void); /* MemAvailable of /proc/meminfo; SIZE_MAX when it cannot be read */

#endif
