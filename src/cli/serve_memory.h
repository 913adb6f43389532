/* What a rank of the server takes of memory, and whether a machine has it: the same for `tandem plan` and
 * `tandem serve`. */
#ifndef TD_CLI_SERVE_MEMORY_H
#define TD_CLI_SERVE_MEMORY_H

#include "cli/serve_settings.h"

/* A GPU of its own memory and the host are two places. On the CPU, and on a GPU that shares the host's memory, they are
 * one, and only the sum counts: td_serve_one_memory(). */
typedef struct td_serve_memory {
    size_t device_bytes; /* weights, caches, activations and scratch on a GPU; 0 on the CPU */
    size_t host_bytes;   /* CPU: everything; GPU: pinned tables and logits, the link's region, prompts */
} td_serve_memory;

bool td_serve_one_memory(const td_serve_shape *shape);

/* For a rank of this shape; *scratch: what the operations take of it beside the model's plan. */
typedef struct td_serve_need {
    td_model_plan plan;
    size_t scratch_bytes;
    td_serve_memory memory;
} td_serve_need;
td_status td_serve_need_of(const td_serve_shape *shape, const td_checkpoint *checkpoint, td_serve_need *out,
                           td_error *err);

/* What this rank may take: beside the reserve; ranks that share a machine have half each. On the GPU as
 * shape->gpu says. */
td_serve_memory td_serve_available(const td_serve_shape *shape, const td_settings *settings);

bool td_serve_fits(const td_serve_shape *shape, const td_serve_memory *need, const td_serve_memory *available);

/* The longest context of at most shape->context_tokens that fits, in steps of TD_BLOCK; 0: none. The pool shrinks with
 * it. */
td_status td_serve_largest(const td_serve_shape *shape, const td_checkpoint *checkpoint,
                           const td_serve_memory *available, int32_t *context_tokens, td_error *err);

/* Whether a shape fits here and, when no context was asked for, the largest that does: then *shape is changed to it. */
typedef struct td_serve_fit {
    td_serve_need need; /* of *shape as it is afterwards */
    td_serve_memory available;
    size_t host_free_bytes; /* MemAvailable then, reserve and other rank included */
    int32_t largest;        /* window in tokens, at most the one that *shape had before; 0: none fits */
    bool fits;
} td_serve_fit;
td_status td_serve_fit_shape(td_serve_shape *shape, const td_settings *settings, const td_checkpoint *checkpoint,
                             td_serve_fit *out, td_error *err);

/* After memory could not be had although it should have fitted, and everything taken was given back: the largest window
 * for what is free now; where that would be what was tried, the one for an eighth less. */
td_status td_serve_refit(td_serve_shape *shape, const td_settings *settings, const td_checkpoint *checkpoint,
                         const td_serve_memory *tried, int32_t *context_tokens, td_error *err);

size_t td_mem_available_bytes(void); /* MemAvailable of /proc/meminfo; SIZE_MAX when it cannot be read */

#endif
