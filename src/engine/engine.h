/* The engine: one thread that owns the model and runs iterations: admit, fill prompts, decode, sample, commit, deliver.
 *
 * Rank 0 takes requests from any thread and decides; what it decides travels as one step message, and every rank
 * applies it through the same code (docs/engine.md). Other ranks run td_engine_follow() until told to stop. A request
 * is a queue of tokens between the engine thread and the thread that submitted it; text, JSON and sockets are not known
 * here. */
#ifndef TD_ENGINE_ENGINE_H
#define TD_ENGINE_ENGINE_H

#include "engine/sampler.h"
#include "link/link.h"
#include "model/model.h"

TD_BEGIN_C

typedef struct td_engine td_engine;
typedef struct td_request td_request;

typedef struct td_engine_options {
    int rank, world;
    int n_slots;            /* requests that run at once; the model's n_slots */
    int queue_cap;          /* requests that may wait beside them; one more is TD_EFULL */
    int32_t context_tokens; /* prompt + reply of one request */
    int n_blocks;           /* of the model's KV pool, blocks of TD_BLOCK tokens */
    int chunk_rows;         /* of the model */
    int n_ids;              /* ids the tokenizer knows, at most vocab_size; padding rows beyond are never sampled */
    uint64_t seed_salt;     /* enters prompt-derived seeds */
} td_engine_options;

/* What the engine needs of td_link_options beside the model's share: region_bytes, and least gather_max_bytes. */
void td_engine_link_bytes(const td_config *config, size_t *region_bytes, size_t *gather_bytes);

/* Bytes that td_engine_create takes of host memory: prompts, block tables, the step message, sampling. */
size_t td_engine_bytes(const td_config *config, const td_engine_options *options);

/* model and link are borrowed until destroy. Rank 0: starts the engine thread. */
td_status td_engine_create(td_model *model, td_link *link, const td_engine_options *options, td_engine **out,
                           td_error *err);

/* Ends running and waiting requests (TD_ECANCELED), tells the other ranks to stop, joins the thread. Rank 0 only. */
void td_engine_stop(td_engine *engine);
void td_engine_destroy(td_engine *engine);

/* Other ranks: applies step messages on the calling thread until rank 0 stops (TD_OK) or the link is lost (TD_EPEER).
 */
td_status td_engine_follow(td_engine *engine, td_error *err);

/* Rank 0: TD_OK while it works; TD_EPEER / TD_ECUDA / ... once it has failed: every request then ends with that error.
 */
td_status td_engine_health(const td_engine *engine, td_error *err);

enum { TD_TOP_LOGPROBS_MAX = 20, TD_STOP_IDS_MAX = 64 };

typedef struct td_request_options {
    const int32_t *ids; /* [n_ids] prompt, copied; 1 <= n_ids < context_tokens */
    int n_ids;
    int max_tokens; /* >= 1; cut to context_tokens - n_ids */
    int min_tokens; /* end ids are excluded from sampling before that many tokens */
    td_sample_params sample;
    bool seed_from_prompt;  /* sample.seed is replaced by the prompt's */
    const int32_t *end_ids; /* [n_end_ids] copied: a sampled one ends the reply (it is delivered, last) */
    int n_end_ids;
    int n_logprobs;  /* -1: none; 0: of the token; up to 20 alternatives */
    bool background; /* waits behind foreground requests */
} td_request_options;

/* Thread-safe. TD_EFULL: queue full; TD_EINVAL: a size or a sampling parameter (nothing is queued); the engine's error
 * once it has failed. *out belongs to the caller until td_request_release. */
td_status td_engine_submit(td_engine *engine, const td_request_options *options, td_request **out, td_error *err);

typedef struct td_token {
    int32_t id;
    float logprob; /* with n_logprobs >= 0: at temperature 1 over the whole vocabulary */
    int n_top;
    int32_t top_ids[TD_TOP_LOGPROBS_MAX];
    float top_logprobs[TD_TOP_LOGPROBS_MAX];
} td_token;

typedef enum td_finish {
    TD_FINISH_NONE,     /* still running */
    TD_FINISH_END,      /* an end id */
    TD_FINISH_LENGTH,   /* max_tokens or the context */
    TD_FINISH_CANCELED, /* td_request_cancel, or the engine stopped */
    TD_FINISH_ERROR     /* td_request_error() */
} td_finish;

/* Takes up to cap tokens; waits at most timeout_ms for the first. Returns how many (0: timeout or the end). *finish is
 * set once all tokens were taken and the reply ended. One reader a request. */
int td_request_next(td_request *request, td_token *tokens, int cap, int timeout_ms, td_finish *finish);

/* Leaves the queue at once, or stops within one iteration. May be called at any time, more than once. */
void td_request_cancel(td_request *request);
const td_error *td_request_error(const td_request *request); /* after TD_FINISH_ERROR */

typedef struct td_request_stats {
    double queue_s, prefill_s, decode_s, ttft_s; /* ttft: submit to first token */
    int prompt_tokens, cached_tokens, completion_tokens;
    int64_t rounds, drafted, accepted;
    bool admitted; /* it has left the queue */
} td_request_stats;
void td_request_stats_get(const td_request *request, td_request_stats *out);
void td_request_release(td_request *request); /* cancels if still running; NULL is allowed */

/* Whole-engine counters; never blocks on the engine thread; counters never go back. */
typedef struct td_engine_stats {
    int running, waiting, decoding, prefilling, paused, slots;
    int64_t requests_total, prompt_tokens_total, completion_tokens_total, cached_tokens_total;
    int64_t rounds_total, drafted_total, accepted_total, preemptions_total;
    double prefill_s_total, decode_s_total;
    double decode_forward_s_total; /* the part of decode_s_total that the model takes; the rest is the engine's own */
    int64_t pool_tokens, pool_free_tokens;
    double iteration_s; /* age of the current iteration; 0 when idle */
} td_engine_stats;
void td_engine_stats_get(const td_engine *engine, td_engine_stats *out);

TD_END_C
#endif
