/* See request.h. */
#include "engine/request.h"

#include "base/clock.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static bool take_arrays(td_request *r)
{
    size_t n = (size_t)r->options.max_tokens, n_top = r->options.n_logprobs > 0 ? (size_t)r->options.n_logprobs : 0;
    r->tokens = malloc(n * sizeof *r->tokens);
    if (!r->tokens) return false;
    if (r->options.n_logprobs < 0) return true;
    r->logprobs = malloc(n * sizeof *r->logprobs);
    r->top_ids = malloc((n * n_top + 1) * sizeof *r->top_ids);
    r->top_logprobs = malloc((n * n_top + 1) * sizeof *r->top_logprobs);
    return r->logprobs && r->top_ids && r->top_logprobs;
}

static void destroy(td_request *r)
{
    pthread_cond_destroy(&r->changed);
    pthread_mutex_destroy(&r->mutex);
    free((void *)r->options.ids);
    free(r->tokens);
    free(r->logprobs);
    free(r->top_ids);
    free(r->top_logprobs);
    free(r);
}

td_request *td_request_create(td_engine *engine, const td_request_options *options)
{
    td_request *r = calloc(1, sizeof *r);
    if (!r) return NULL;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&r->changed, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&r->mutex, NULL);
    r->engine = engine;
    r->options = *options;
    atomic_init(&r->holders, 2);
    r->submit_ns = td_now_ns();
    r->stats.prompt_tokens = options->n_ids;

    size_t n_ids = (size_t)options->n_ids, n_end = (size_t)options->n_end_ids;
    int32_t *ids = malloc((n_ids + n_end) * sizeof *ids);
    r->options.ids = ids;
    if (!ids || !take_arrays(r)) {
        destroy(r);
        return NULL;
    }
    memcpy(ids, options->ids, n_ids * sizeof *ids);
    if (n_end) memcpy(ids + n_ids, options->end_ids, n_end * sizeof *ids);
    r->options.end_ids = ids + n_ids;
    return r;
}

void td_request_drop(td_request *request)
{
    if (atomic_fetch_sub(&request->holders, 1) == 1) destroy(request);
}

void td_request_admitted(td_request *request)
{
    pthread_mutex_lock(&request->mutex);
    request->n_replayed = 0;
    request->n_admissions++;
    if (!request->stats.admitted) {
        request->admit_ns = td_now_ns();
        request->stats.admitted = true;
        request->stats.queue_s = (double)(request->admit_ns - request->submit_ns) * 1e-9;
    }
    pthread_mutex_unlock(&request->mutex);
}

void td_request_prefilled(td_request *request, int cached_tokens)
{
    pthread_mutex_lock(&request->mutex);
    if (request->stats.prefill_s == 0.0) {
        request->stats.prefill_s = (double)(td_now_ns() - request->admit_ns) * 1e-9;
        request->stats.cached_tokens = cached_tokens;
    }
    pthread_mutex_unlock(&request->mutex);
}

void td_request_round(td_request *request)
{
    pthread_mutex_lock(&request->mutex);
    request->stats.rounds++;
    pthread_mutex_unlock(&request->mutex);
}

bool td_request_deliver(td_request *request, const td_token *token)
{
    if (request->n_replayed++ < request->n_tokens) return false; /* n_tokens is written by this thread alone */
    pthread_mutex_lock(&request->mutex);
    int i = request->n_tokens, n_top = request->options.n_logprobs;
    td_check(i < request->options.max_tokens);
    request->tokens[i] = token->id;
    if (n_top >= 0) request->logprobs[i] = token->logprob;
    for (int k = 0; k < n_top; k++) {
        request->top_ids[(size_t)i * (size_t)n_top + (size_t)k] = k < token->n_top ? token->top_ids[k] : -1;
        request->top_logprobs[(size_t)i * (size_t)n_top + (size_t)k] = k < token->n_top ? token->top_logprobs[k] : 0.0f;
    }
    request->n_tokens = i + 1;
    request->stats.completion_tokens = i + 1;
    int64_t now = td_now_ns();
    if (i == 0) {
        request->first_ns = now;
        request->stats.ttft_s = (double)(now - request->submit_ns) * 1e-9;
    }
    request->stats.decode_s = (double)(now - request->first_ns) * 1e-9;
    pthread_cond_broadcast(&request->changed);
    pthread_mutex_unlock(&request->mutex);
    return true;
}

void td_request_finish(td_request *request, td_finish finish, const td_error *error)
{
    pthread_mutex_lock(&request->mutex);
    if (request->finish == TD_FINISH_NONE) {
        request->finish = finish;
        if (error) request->error = *error;
        pthread_cond_broadcast(&request->changed);
    }
    pthread_mutex_unlock(&request->mutex);
}

static void take(td_request *r, td_token *out)
{
    int i = r->n_taken++, n_top = r->options.n_logprobs;
    *out = (td_token){ .id = r->tokens[i] };
    if (n_top >= 0) out->logprob = r->logprobs[i];
    for (int k = 0; k < n_top; k++) {
        size_t at = (size_t)i * (size_t)n_top + (size_t)k;
        if (r->top_ids[at] < 0) break;
        out->top_ids[k] = r->top_ids[at];
        out->top_logprobs[k] = r->top_logprobs[at];
        out->n_top = k + 1;
    }
}

int td_request_next(td_request *request, td_token *tokens, int cap, int timeout_ms, td_finish *finish)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&request->mutex);
    while (request->n_taken == request->n_tokens && request->finish == TD_FINISH_NONE)
        if (pthread_cond_timedwait(&request->changed, &request->mutex, &until) == ETIMEDOUT) break;
    int n = 0;
    while (n < cap && request->n_taken < request->n_tokens) take(request, &tokens[n++]);
    *finish = request->n_taken == request->n_tokens ? request->finish : TD_FINISH_NONE;
    pthread_mutex_unlock(&request->mutex);
    return n;
}

const td_error *td_request_error(const td_request *request)
{
    return &request->error;
}

void td_request_stats_get(const td_request *request, td_request_stats *out)
{
    pthread_mutex_t *mutex = (pthread_mutex_t *)&request->mutex;
    pthread_mutex_lock(mutex);
    *out = request->stats;
    pthread_mutex_unlock(mutex);
}
