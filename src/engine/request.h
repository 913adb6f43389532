/* A request as the engine sees it: parameters, a place in the queue, and the tokens on their way to the reader.
 * Internal to the engine; engine.h has what others may do. Held twice (engine, submitter); the last to let go frees it.
 *
 * The engine thread only writes into arrays that submit has sized: nothing is allocated there. */
#ifndef TD_ENGINE_REQUEST_H
#define TD_ENGINE_REQUEST_H

#include "engine/engine.h"

#include <pthread.h>
#include <stdatomic.h>

TD_BEGIN_C

struct td_request {
    td_engine *engine;
    td_request *next;           /* in the engine's queue */
    td_request_options options; /* ids and end_ids point into this request's own memory */
    int32_t *tokens;            /* [max_tokens] of the reply */
    float *logprobs;            /* [max_tokens] with n_logprobs >= 0 */
    int32_t *top_ids;           /* [max_tokens][n_logprobs] */
    float *top_logprobs;        /* [max_tokens][n_logprobs] */
    int n_replayed;             /* engine thread: tokens sampled since the last admission; below n_tokens: a replay */
    int n_admissions;           /* engine thread: more than one after a preemption */

    atomic_bool cancel; /* asked for by the submitter */
    atomic_int holders;

    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t changed;
    int n_tokens; /* delivered */
    int n_taken;  /* read */
    td_finish finish;
    td_error error;
    td_request_stats stats;
    int64_t submit_ns, admit_ns, first_ns;
};

/* Copies the options. max_tokens must be cut already. NULL: out of memory. */
td_request *td_request_create(td_engine *engine, const td_request_options *options);
void td_request_drop(td_request *request); /* one holder less */

/* Engine thread. deliver ignores tokens of a replay that were delivered before the stream was preempted: then false. */
void td_request_admitted(td_request *request);
bool td_request_deliver(td_request *request, const td_token *token);
void td_request_prefilled(td_request *request, int cached_tokens);
void td_request_round(td_request *request);
void td_request_finish(td_request *request, td_finish finish, const td_error *error);

TD_END_C
#endif
