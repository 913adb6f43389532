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
    bool gpu_is_shared;     /* where both ranks are on one machine, they are on that GPU */
    char backend_note[256]; /* why `auto` did not take a GPU; empty: it did, or was not asked */
} td_serve_shape;

/* Which GPU each rank takes. TD_EINVAL: --gpu is not one number or two. */
td_status td_serve_gpus(const td_settings *settings, int64_t gpus[TD_SHARDS], td_error *err);

/* The device of that shape. */
td_status td_serve_device(const td_serve_shape *shape, const td_config *config, td_dev **out, td_error *err);

/* context 0: the checkpoint's maximum. TD_EINVAL names the setting. */
td_status td_serve_shape_of(const td_settings *settings, const td_config *config, td_serve_shape *out, td_error *err);

/* Sets the context (and with it the pool, unless pool-tokens was given). */
void td_serve_set_context(td_serve_shape *shape, const td_settings *settings, int32_t context_tokens);

#endif
