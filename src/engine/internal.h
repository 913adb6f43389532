/* The engine's own structures: slots, the queue, and the three files that work on them:
 *   scheduler.c  rank 0 decides the next step from requests, slots and the pool
 *   apply.c      every rank applies a step: slots, blocks, forward, samples, commit
 *   engine.c     the thread, the queue, the interface of engine.h */
#ifndef TD_ENGINE_INTERNAL_H
#define TD_ENGINE_INTERNAL_H

#include "engine/engine.h"
#include "engine/kv_pool.h"
#include "engine/request.h"
#include "engine/sampling.h"
#include "engine/step.h"

typedef enum td_slot_state { TD_SLOT_FREE, TD_SLOT_FILLING, TD_SLOT_DECODING } td_slot_state;

/* What every rank knows of a running request. pending: sampled, not yet fed through the model. */
typedef struct td_slot {
    td_slot_state state;
    int32_t *prompt; /* [context_tokens] */
    int32_t n_prompt;
    int32_t pos; /* rows committed */
    int32_t pending;
    int32_t n_sampled, max_tokens, min_tokens, n_logprobs;
    int32_t n_end_ids, end_ids[TD_STEP_END_IDS_MAX];
    td_sample_params sample;
    int32_t *blocks; /* [blocks_cap] */
    int n_blocks;
    td_finish finish; /* set by the sample that ended the reply; the slot stays until it is released */

    td_request *request; /* rank 0 */
    uint64_t order;      /* rank 0: of admission, for age */
    bool paused;         /* rank 0: no room to grow in the last round */
} td_slot;

typedef struct td_queue {
    td_request *head, *tail;
} td_queue;

struct td_engine {
    td_engine_options options;
    td_model *model;
    td_link *link;
    td_slot *slots; /* [n_slots] */
    int blocks_cap; /* blocks of one slot's table */
    td_kv_pool pool;
    td_step step; /* the one being planned or applied */
    td_sample_scratch *sample_scratch;
    td_arena arena; /* all of the above */
    void *arena_memory;
    td_arena shared; /* what the model's device sees too */
    void *shared_memory;
    void *message; /* step message */
    size_t message_bytes;
    bool fill_next;   /* rank 0: alternates prompt chunks and rounds while both wait */
    bool fill_oldest; /* rank 0: alternates whose chunk it is, the oldest prompt's or the one's with the least left */
    uint64_t n_admitted;
    int n_new, n_delivered; /* rank 0: requests admitted for the first time, tokens delivered, by the current step */
    double forward_s;       /* what the model took of the current step */

    pthread_t thread;
    bool thread_runs;
    pthread_mutex_t mutex; /* guards queues, stop, status and error */
    pthread_cond_t wake;
    td_queue foreground, background;
    int n_waiting;
    bool stop;
    td_status status; /* TD_OK, or why the engine is broken */
    td_error error;

    pthread_mutex_t stats_mutex; /* guards stats; held for a copy, never across work */
    td_engine_stats stats;
    atomic_llong iteration_start_ns; /* 0: idle */
};

/* scheduler.c: fills engine->step; false: nothing to do until something changes. Takes engine->mutex. */
bool td_engine_plan(td_engine *engine);

/* apply.c: on every rank, with the same step. */
td_status td_engine_apply(td_engine *engine, const td_step *step, td_error *err);
/* Blocks that an admission takes: the prompt's and those of a few rows of the reply, as far as window and pool go. */
int td_engine_admit_blocks(const td_engine *engine, int32_t n_prompt);
uint64_t td_engine_digest(const td_engine *engine);

#endif
