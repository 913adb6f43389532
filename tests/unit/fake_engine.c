/* See fake_engine.h. */
#include "fake_engine.h"

#include "base/clock.h"
#include "text/chat_encode.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { POOL_TOKENS = 65536 };

struct td_engine {
    pthread_mutex_t mutex; /* guards everything, requests too */
    pthread_cond_t changed;
    const td_tokenizer *tokenizer;
    fake_script script;
    td_ids reply;
    td_request *first_waiting;
    int n_waiting, n_running, n_submitted, n_canceled, n_released;
    int64_t prompt_tokens, reply_tokens;
    td_request_options last;
    int32_t *last_ids;
};

struct td_request {
    td_engine *engine;
    td_request *next_waiting;
    td_request_options options;
    int32_t end_ids[TD_STOP_IDS_MAX];
    fake_script script;
    int32_t *reply;
    int n_reply;
    bool waiting, running, canceled;
    int64_t submit_ns, start_ns, first_ns;
    int n_taken;
    td_error error;
};

td_engine *fake_engine_create(const td_tokenizer *tokenizer, const fake_script *script)
{
    td_engine *engine = calloc(1, sizeof *engine);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&engine->mutex, NULL);
    pthread_cond_init(&engine->changed, &attr);
    pthread_condattr_destroy(&attr);
    engine->tokenizer = tokenizer;
    fake_engine_set(engine, script);
    return engine;
}

void fake_engine_set(td_engine *engine, const fake_script *script)
{
    td_error err;
    pthread_mutex_lock(&engine->mutex);
    engine->script = *script;
    engine->script.reply = NULL;
    if (engine->script.slots == 0) engine->script.slots = 4;
    if (engine->script.together == 0) engine->script.together = 1;
    engine->reply.n = 0;
    td_check(td_tokenizer_encode(engine->tokenizer, script->reply, strlen(script->reply), 0, &engine->reply, &err) ==
             TD_OK);
    pthread_mutex_unlock(&engine->mutex);
}

void fake_engine_seen(td_engine *engine, fake_seen *seen)
{
    pthread_mutex_lock(&engine->mutex);
    *seen = (fake_seen){ .options = engine->last,
                         .n_submitted = engine->n_submitted,
                         .n_canceled = engine->n_canceled,
                         .n_released = engine->n_released,
                         .n_running = engine->n_running };
    pthread_mutex_unlock(&engine->mutex);
}

void td_engine_stop(td_engine *engine)
{
    (void)engine;
}

void td_engine_destroy(td_engine *engine)
{
    td_ids_deinit(&engine->reply);
    free(engine->last_ids);
    pthread_cond_destroy(&engine->changed);
    pthread_mutex_destroy(&engine->mutex);
    free(engine);
}

td_status td_engine_health(const td_engine *engine, td_error *err)
{
    if (engine->script.health != TD_OK) return td_fail(err, engine->script.health, "the other rank is gone");
    return TD_OK;
}

/* ---- a request, with the engine's mutex held ---- */

static void unlink_waiting(td_request *r)
{
    td_request **at = &r->engine->first_waiting;
    while (*at && *at != r) at = &(*at)->next_waiting;
    if (*at) *at = r->next_waiting;
    r->engine->n_waiting -= r->waiting;
    r->waiting = false;
}

static void leave(td_request *r)
{
    unlink_waiting(r);
    r->engine->n_running -= r->running;
    r->running = false;
    pthread_cond_broadcast(&r->engine->changed);
}

static void admit(td_request *r)
{
    td_engine *engine = r->engine;
    if (!r->waiting || engine->first_waiting != r || engine->n_running >= engine->script.slots) return;
    unlink_waiting(r);
    r->running = true;
    r->start_ns = td_now_ns();
    engine->n_running++;
    pthread_cond_broadcast(&engine->changed); /* the next in the queue may have a lane as well */
}

/* The i-th token of the reply: the script's, again and again while an end token is not possible. */
static int32_t token_at(const td_request *r, int i)
{
    bool may_end = r->options.n_end_ids > 0 && i >= r->n_reply && i >= r->options.min_tokens;
    if (may_end || r->n_reply == 0) return r->options.n_end_ids > 0 ? r->end_ids[0] : 'x';
    return r->reply[i % r->n_reply];
}

/* When the i-th token is due. */
static int64_t due_ns(const td_request *r, int i)
{
    double s = r->script.prefill_s + (i / r->script.together) * r->script.token_s;
    return r->start_ns + (int64_t)(s * 1e9);
}

static bool is_end(const td_request *r, int32_t id)
{
    for (int i = 0; i < r->options.n_end_ids; i++)
        if (r->end_ids[i] == id) return true;
    return false;
}

/* How it ended, if all tokens were taken. */
static td_finish finish_of(const td_request *r)
{
    if (r->canceled) return TD_FINISH_CANCELED;
    if (r->script.fail_at > 0 && r->n_taken >= r->script.fail_at) return TD_FINISH_ERROR;
    if (r->n_taken > 0 && is_end(r, token_at(r, r->n_taken - 1))) return TD_FINISH_END;
    return r->n_taken >= r->options.max_tokens ? TD_FINISH_LENGTH : TD_FINISH_NONE;
}

static void take_token(td_request *r, td_token *token)
{
    int32_t id = token_at(r, r->n_taken++);
    *token = (td_token){ .id = id, .logprob = -0.5f };
    for (int i = 0; i < r->options.n_logprobs; i++) {
        token->top_ids[i] = i == 0 ? id : (id + i) % 256;
        token->top_logprobs[i] = -0.5f - (float)i;
        token->n_top++;
    }
    if (!r->first_ns) r->first_ns = td_now_ns();
    r->engine->reply_tokens++;
}

/* ---- engine.h ---- */

td_status td_engine_submit(td_engine *engine, const td_request_options *options, td_request **out, td_error *err)
{
    pthread_mutex_lock(&engine->mutex);
    if (engine->n_waiting > 0 || engine->n_running >= engine->script.slots) {
        if (engine->n_waiting >= engine->script.queue_cap) {
            int n = engine->n_waiting;
            pthread_mutex_unlock(&engine->mutex);
            return td_fail(err, TD_EFULL, "%d requests are waiting", n);
        }
    }
    td_request *r = calloc(1, sizeof *r);
    r->engine = engine;
    r->options = *options;
    memcpy(r->end_ids, options->end_ids, (size_t)options->n_end_ids * sizeof *r->end_ids);
    r->script = engine->script;
    r->n_reply = (int)engine->reply.n;
    r->reply = calloc((size_t)r->n_reply + 1, sizeof *r->reply);
    if (r->n_reply) memcpy(r->reply, engine->reply.data, (size_t)r->n_reply * sizeof *r->reply);
    r->submit_ns = td_now_ns();
    r->waiting = true;
    td_request **at = &engine->first_waiting;
    while (*at) at = &(*at)->next_waiting;
    *at = r;
    engine->n_waiting++;
    engine->n_submitted++;
    engine->prompt_tokens += options->n_ids;
    free(engine->last_ids);
    engine->last_ids = malloc((size_t)(options->n_ids + options->n_end_ids) * sizeof *engine->last_ids);
    memcpy(engine->last_ids, options->ids, (size_t)options->n_ids * sizeof *engine->last_ids);
    memcpy(engine->last_ids + options->n_ids, options->end_ids, (size_t)options->n_end_ids * sizeof *engine->last_ids);
    engine->last = *options;
    engine->last.ids = engine->last_ids;
    engine->last.end_ids = engine->last_ids + options->n_ids;
    admit(r);
    pthread_mutex_unlock(&engine->mutex);
    *out = r;
    return TD_OK;
}

static void wait_until(td_request *r, int64_t ns)
{
    struct timespec until = { .tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000 };
    pthread_cond_timedwait(&r->engine->changed, &r->engine->mutex, &until);
}

int td_request_next(td_request *r, td_token *tokens, int cap, int timeout_ms, td_finish *finish)
{
    int n = 0;
    int64_t deadline_ns = td_now_ns() + timeout_ms * 1000000ll;
    pthread_mutex_lock(&r->engine->mutex);
    for (;;) {
        int64_t now_ns = td_now_ns();
        admit(r);
        while (n < cap && finish_of(r) == TD_FINISH_NONE && r->running && due_ns(r, r->n_taken) <= now_ns)
            take_token(r, &tokens[n++]);
        if (n > 0 || finish_of(r) != TD_FINISH_NONE || now_ns >= deadline_ns) break;
        int64_t next_ns = r->running ? due_ns(r, r->n_taken) : deadline_ns;
        wait_until(r, next_ns < deadline_ns ? next_ns : deadline_ns);
    }
    *finish = finish_of(r);
    if (*finish == TD_FINISH_ERROR) td_fail(&r->error, r->script.fail_status, "scripted failure");
    if (*finish != TD_FINISH_NONE) leave(r);
    pthread_mutex_unlock(&r->engine->mutex);
    return n;
}

void td_request_cancel(td_request *r)
{
    pthread_mutex_lock(&r->engine->mutex);
    if (!r->canceled && finish_of(r) == TD_FINISH_NONE) {
        r->engine->n_canceled++;
        r->canceled = true;
    }
    leave(r);
    pthread_mutex_unlock(&r->engine->mutex);
}

const td_error *td_request_error(const td_request *r)
{
    return &r->error;
}

void td_request_stats_get(const td_request *r, td_request_stats *out)
{
    pthread_mutex_lock(&r->engine->mutex);
    int64_t now_ns = td_now_ns();
    *out = (td_request_stats){ .prompt_tokens = r->options.n_ids,
                               .cached_tokens = 1,
                               .completion_tokens = r->n_taken,
                               .rounds = r->n_taken,
                               .prefill_s = r->script.prefill_s,
                               .admitted = r->start_ns != 0 };
    if (r->start_ns) out->queue_s = (double)(r->start_ns - r->submit_ns) * 1e-9;
    if (r->first_ns) {
        out->ttft_s = (double)(r->first_ns - r->submit_ns) * 1e-9;
        out->decode_s = (double)(now_ns - r->first_ns) * 1e-9;
    }
    pthread_mutex_unlock(&r->engine->mutex);
}

void td_request_release(td_request *r)
{
    if (!r) return;
    td_request_cancel(r);
    pthread_mutex_lock(&r->engine->mutex);
    r->engine->n_released++;
    pthread_mutex_unlock(&r->engine->mutex);
    free(r->reply);
    free(r);
}

void td_engine_stats_get(const td_engine *engine, td_engine_stats *out)
{
    pthread_mutex_lock((pthread_mutex_t *)&engine->mutex);
    *out = (td_engine_stats){ .running = engine->n_running,
                              .waiting = engine->n_waiting,
                              .decoding = engine->n_running,
                              .slots = engine->script.slots,
                              .requests_total = engine->n_submitted,
                              .prompt_tokens_total = engine->prompt_tokens,
                              .completion_tokens_total = engine->reply_tokens,
                              .pool_tokens = POOL_TOKENS,
                              .pool_free_tokens = POOL_TOKENS / 2 };
    pthread_mutex_unlock((pthread_mutex_t *)&engine->mutex);
}

/* ---- tokenizer ---- */

td_tokenizer *fake_tokenizer(void)
{
    static const char *const added[] = { "<|endoftext|>",    "[gMASK]",       "<sop>",           "<|system|>",
                                         "<|user|>",         "<|assistant|>", "<|observation|>", "<|begin_of_image|>",
                                         "<|end_of_image|>", "<think>",       "</think>",        "<|begin_of_box|>",
                                         "<|end_of_box|>",   "<|image|>",     "<|video|>" };
    char *text = malloc(1 << 16), *p = text;
    int next = 0x100;
    p += sprintf(p, "{\"added_tokens\":[");
    for (int i = 0; i < (int)(sizeof added / sizeof added[0]); i++)
        p += sprintf(p, "%s{\"id\":%d,\"content\":\"%s\",\"special\":true}", i ? "," : "", 256 + i, added[i]);
    p += sprintf(p, "],\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false},"
                    "\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{");
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        p += sprintf(p, "%s\"\\u%04x\":%d", b ? "," : "", printable ? b : next++, b);
    }
    p += sprintf(p, "}}}");
    td_tokenizer *tok = NULL;
    td_error err;
    if (td_tokenizer_open_memory("fake", text, (size_t)(p - text), &tok, &err) != TD_OK ||
        td_chat_reserve_media(tok) != TD_OK) {
        fprintf(stderr, "%s\n", err.text);
        abort();
    }
    free(text);
    return tok;
}
