/* See generate.h. The connection's thread does everything: it sleeps in td_request_next() for a tenth of a second at
 * most, so that it sees a client that left, and a server that stops, soon enough. */
#include "server/generate.h"

#include "base/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH_TOKENS = 16, WAIT_MS = 100 };

td_generation *td_generation_create(td_call *x, const td_form *form)
{
    td_generation *g = calloc(1, sizeof *g);
    if (!g) {
        td_refusal why;
        td_refuse(&why, 503, "unavailable", NULL, "out of memory");
        td_call_refuse(x, &why);
        return NULL;
    }
    g->x = x;
    g->form = form;
    td_arena_init(&g->arena, 0);
    td_buf_init(&g->out, 0);
    g->created_s = td_wall_s();
    size_t n = (size_t)snprintf(g->id, sizeof g->id, "%s", form->id_prefix);
    td_random_hex(g->id + n, 24);
    x->generation = g;
    return g;
}

const char *td_generation_status(const td_generation *g)
{
    const char *reason = td_reply_reason(&g->reply);
    if (g->broken.status) return "error";
    return reason ? reason : "canceled";
}

static void count(const td_generation *g)
{
    td_metrics_request record = { .key = g->x->key, .status = "refused" };
    if (g->request) {
        record.status = td_generation_status(g);
        record.ran = true;
        record.latency_s = (double)(td_now_ns() - g->x->begin_ns) * 1e-9;
        record.first_token_s = g->first_token_ns ? (double)(g->first_token_ns - g->x->begin_ns) * 1e-9 : -1.0;
        record.n_tokens = (int)g->reply.ids.n;
        record.max_tokens = g->max_tokens;
        td_request_stats_get(g->request, &record.stats);
    }
    td_metrics_request_done(g->x->server->metrics, &record);
}

void td_generation_destroy(td_generation *g)
{
    if (!g) return;
    count(g);
    td_request_release(g->request);
    td_reply_deinit(&g->reply);
    td_logprobs_deinit(&g->logprobs);
    td_ids_deinit(&g->prompt);
    td_buf_deinit(&g->out);
    td_arena_deinit(&g->arena);
    free(g);
}

/* ---------------------------------------------------------------------------------------------- admission --- */

/* Clients compact their conversation when they read this: status, code and the words before the full stop are matched.
 */
static td_status check_window(td_generation *g, td_refusal *why)
{
    int64_t window = g->x->server->options.context_tokens, prompt = (int64_t)g->prompt.n;
    int64_t reply = g->params.max_given ? g->params.max_tokens : 0;
    if (prompt == 0) return td_refuse_field(why, g->form->prompt_param, "the prompt has no tokens");
    bool fits = prompt < window && reply <= window - prompt;
    if (fits) {
        int64_t room = window - prompt;
        g->max_tokens = (int)(g->params.max_tokens < room ? g->params.max_tokens : room);
        return TD_OK;
    }
    int64_t sum = reply > INT64_MAX - prompt ? INT64_MAX : prompt + reply;
    return td_refuse(
        why, 400, "context_length_exceeded", g->form->prompt_param,
        "This server's maximum context length is %lld tokens. However, you requested %lld tokens (%lld in the "
        "%s, %lld in the completion). Please reduce the length of the %s%s.",
        (long long)window, (long long)sum, (long long)prompt, g->form->prompt_param, (long long)reply,
        g->form->prompt_param, reply ? " or of the completion" : "");
}

/* ignore_eos: only the ids that the client named still end the reply. */
static void collect_end_ids(td_generation *g)
{
    const td_server *server = g->x->server;
    if (!g->params.ignore_eos)
        for (int i = 0; i < server->n_end_ids; i++) g->end_ids[g->n_end_ids++] = server->end_ids[i];
    for (int i = 0; i < g->params.n_stop_ids; i++) g->end_ids[g->n_end_ids++] = g->params.stop_ids[i];
}

static td_status submit(td_generation *g, td_refusal *why)
{
    const td_params *p = &g->params;
    int64_t top_k = p->top_k < 0 ? 0 : p->top_k > INT32_MAX ? INT32_MAX : p->top_k;
    td_request_options options = {
        .ids = g->prompt.data,
        .n_ids = (int)g->prompt.n,
        .max_tokens = g->max_tokens,
        .min_tokens = p->min_tokens,
        .sample = { .temperature = p->temperature,
                    .top_k = (int)top_k,
                    .top_p = p->top_p,
                    .min_p = p->min_p,
                    .seed = (uint64_t)p->seed },
        .seed_from_prompt = !p->seeded,
        .end_ids = g->end_ids,
        .n_end_ids = g->n_end_ids,
        .n_logprobs = p->logprobs == TD_LOGPROBS_NONE ? -1 : p->n_top_logprobs,
        .background = p->background,
    };
    td_error err = { 0 };
    td_engine *engine = atomic_load(&g->x->server->engine);
    if (!engine) return td_refuse(why, 503, "unavailable", NULL, "the server is stopping");
    td_status st = td_engine_submit(engine, &options, &g->request, &err);
    return st == TD_OK ? TD_OK : td_refuse_status(why, st, &err);
}

/* --------------------------------------------------------------------------------------------- the tokens --- */

/* After the headers of a stream are out, or tokens exist, nothing is the client's mistake any more. */
static void set_broken(td_generation *g, td_finish finish)
{
    const td_error *err = td_request_error(g->request);
    if (finish == TD_FINISH_CANCELED)
        td_refuse(&g->broken, 503, "unavailable", NULL, "the server is stopping");
    else if (err && err->status == TD_EPEER)
        td_refuse(&g->broken, 503, "unavailable", NULL, "the engine has stopped: %s", err->text);
    else
        td_refuse(&g->broken, 500, "internal_error", NULL, "generation failed: %s",
                  err ? err->text : "no reason given");
}

static void take(td_generation *g, const td_token *tokens, int n)
{
    int64_t now_ns = td_now_ns();
    size_t before = g->reply.ids.n;
    for (int i = 0; i < n && g->reply.end == TD_REPLY_RUNNING; i++) {
        td_reply_feed(&g->reply, tokens[i].id);
        if (g->reply.end_id < 0) td_logprobs_add(&g->logprobs, g->x->server->options.tokenizer, &tokens[i]);
    }
    if (g->reply.failed || td_logprobs_failed(&g->logprobs))
        td_refuse(&g->broken, 503, "unavailable", NULL, "out of memory");
    double gap_s = g->tokens_ns ? (double)(now_ns - g->tokens_ns) * 1e-9 : -1.0;
    td_metrics_tokens(g->x->server->metrics, (int)(g->reply.ids.n - before), gap_s);
    if (!g->first_token_ns) g->first_token_ns = now_ns;
    g->tokens_ns = now_ns;
}

static bool running(const td_generation *g)
{
    return g->reply.end == TD_REPLY_RUNNING && !g->broken.status;
}

/* Waits a moment for tokens and feeds them to the reply. */
static void pump(td_generation *g)
{
    td_token tokens[BATCH_TOKENS];
    td_finish finish = TD_FINISH_NONE;
    int n = td_request_next(g->request, tokens, BATCH_TOKENS, WAIT_MS, &finish);
    if (n > 0) take(g, tokens, n);
    if (!running(g)) {
        td_request_cancel(g->request); /* a stop string: the engine does not know it */
        return;
    }
    if (finish == TD_FINISH_END || finish == TD_FINISH_LENGTH) {
        td_reply_finish(&g->reply, finish);
    } else if (finish != TD_FINISH_NONE) {
        set_broken(g, finish);
        td_reply_finish(&g->reply, finish);
    } else if (atomic_load(&g->x->server->cancel)) {
        td_request_cancel(g->request);
        set_broken(g, TD_FINISH_CANCELED);
    }
}

static bool client_left(td_generation *g)
{
    if (!td_conn_left(g->x->conn)) return false;
    td_request_cancel(g->request);
    g->x->left = true;
    return true;
}

static void wait_for_all(td_generation *g)
{
    while (running(g)) {
        if (client_left(g)) return;
        pump(g);
    }
    if (g->broken.status) {
        td_call_refuse(g->x, &g->broken);
        return;
    }
    g->form->whole(g);
    td_call_json(g->x);
}

void td_generation_run(td_generation *g, td_reply_start start, const td_reply_ids *ids)
{
    td_refusal why;
    td_status st = check_window(g, &why);
    if (st == TD_OK) {
        collect_end_ids(g);
        td_reply_init(&g->reply, &(td_reply_options){ .tokenizer = g->x->server->options.tokenizer,
                                                      .start = start,
                                                      .ids = *ids,
                                                      .stop = &g->params.stop,
                                                      .end_ids = g->end_ids,
                                                      .n_end_ids = g->n_end_ids,
                                                      .min_tokens = g->params.min_tokens,
                                                      .no_reasoning = !g->params.include_reasoning });
        td_logprobs_init(&g->logprobs, g->params.logprobs, g->params.n_top_logprobs);
        st = submit(g, &why);
    }
    if (st != TD_OK) {
        td_call_refuse(g->x, &why);
        return;
    }
    g->x->stream = g->params.stream;
    g->wrote_ns = td_now_ns();
    if (!g->x->stream) wait_for_all(g);
}

/* --------------------------------------------------------------------------------------------- the stream --- */

static void write_deltas(td_generation *g)
{
    if (g->reply.reasoning.n_bytes > 0) {
        g->form->delta(g, TD_DELTA_REASONING, &g->reply.reasoning);
        td_buf_clear(&g->reply.reasoning);
    }
    if (g->reply.content.n_bytes > 0) {
        g->form->delta(g, TD_DELTA_CONTENT, &g->reply.content);
        td_buf_clear(&g->reply.content);
    }
}

static void done(td_generation *g)
{
    td_buf_puts(&g->out, "data: [DONE]\n\n");
}

static void write_broken(td_generation *g)
{
    td_buf_puts(&g->out, "data: ");
    td_refusal_write(&g->broken, &g->out);
    td_buf_puts(&g->out, "\n\n");
    done(g);
    g->closed = true;
}

/* Appends events to g->out: at least one, unless the client left (false). */
static bool fill(td_generation *g)
{
    double keepalive_s = g->x->server->options.keepalive_s;
    if (!g->begun) {
        g->form->begin(g);
        g->begun = true;
    }
    while (g->out.n_bytes == 0 && !g->out.failed) {
        if (client_left(g)) return false;
        pump(g);
        if (g->broken.status) {
            write_broken(g);
            break;
        }
        write_deltas(g);
        if (!running(g)) {
            g->form->finish(g);
            g->closed = true;
        } else if (g->out.n_bytes == 0 && keepalive_s > 0 &&
                   (double)(td_now_ns() - g->wrote_ns) * 1e-9 >= keepalive_s) {
            td_buf_puts(&g->out, ": keepalive\n\n");
        }
    }
    return !g->out.failed;
}

ssize_t td_generation_read(td_generation *g, char *out, size_t cap)
{
    if (g->n_out_sent == g->out.n_bytes) {
        if (g->closed) return 0;
        td_buf_clear(&g->out);
        g->n_out_sent = 0;
        if (!fill(g)) return -1;
    }
    size_t n = g->out.n_bytes - g->n_out_sent;
    if (n > cap) n = cap;
    memcpy(out, g->out.data + g->n_out_sent, n);
    g->n_out_sent += n;
    g->wrote_ns = td_now_ns();
    return (ssize_t)n;
}

void td_sse_open(td_generation *g, td_json_writer *w)
{
    *w = (td_json_writer){ .out = &g->out };
    td_buf_puts(&g->out, "data: ");
    td_json_write_begin(w, '{');
    td_write_head(g, w, g->form->chunk_object);
}

void td_sse_close(td_generation *g, td_json_writer *w)
{
    td_json_write_end(w, '}');
    td_buf_puts(&g->out, "\n\n");
}

/* Usage rides on the finish chunk unless the client asked for a chunk of its own: one without choices that nobody asked
 * for breaks clients that look at choices[0]. */
void td_sse_finish(td_generation *g, td_json_writer *w)
{
    if (g->params.include_usage) {
        td_write_chunk_usage(g, w);
        td_sse_close(g, w);
        td_sse_open(g, w);
        td_json_write_key(w, "choices");
        td_json_write_begin(w, '[');
        td_json_write_end(w, ']');
    }
    td_json_write_key(w, "usage");
    td_write_usage(g, w);
    td_write_timing(g, w);
    td_sse_close(g, w);
    done(g);
}

/* ------------------------------------------------------------------------------------------- shared parts --- */

void td_write_head(td_generation *g, td_json_writer *w, const char *object)
{
    td_json_write_member_text(w, "id", g->id);
    td_json_write_member_text(w, "object", object);
    td_json_write_member_int(w, "created", g->created_s);
    td_json_write_member_text(w, "model", g->params.model);
    td_json_write_key(w, "system_fingerprint");
    td_json_write_null(w);
}

/* Until the last: null when a usage chunk was asked for, and the numbers so far when they were. */
void td_write_chunk_usage(td_generation *g, td_json_writer *w)
{
    if (!g->params.include_usage && !g->params.continuous_usage) return;
    td_json_write_key(w, "usage");
    if (g->params.continuous_usage)
        td_write_usage(g, w);
    else
        td_json_write_null(w);
}

void td_write_usage(td_generation *g, td_json_writer *w)
{
    td_request_stats stats;
    td_request_stats_get(g->request, &stats);
    const td_reply *reply = &g->reply;
    int64_t reasoning = reply->end == TD_REPLY_RUNNING ? td_reasoning_tokens(&reply->split) : reply->reasoning_tokens;
    td_json_write_begin(w, '{');
    td_json_write_member_int(w, "prompt_tokens", (int64_t)g->prompt.n);
    td_json_write_member_int(w, "completion_tokens", (int64_t)reply->ids.n);
    td_json_write_member_int(w, "total_tokens", (int64_t)(g->prompt.n + reply->ids.n));
    td_json_write_key(w, "prompt_tokens_details");
    td_json_write_begin(w, '{');
    td_json_write_member_int(w, "cached_tokens", stats.cached_tokens);
    td_json_write_end(w, '}');
    td_json_write_key(w, "completion_tokens_details");
    td_json_write_begin(w, '{');
    td_json_write_member_int(w, "reasoning_tokens", reasoning);
    td_json_write_end(w, '}');
    td_json_write_end(w, '}');
}

static void write_seconds(td_json_writer *w, const char *name, double seconds)
{
    td_json_write_key(w, name);
    td_json_write_double(w, (double)(int64_t)(seconds * 1e6 + 0.5) / 1e6);
}

void td_write_timing(td_generation *g, td_json_writer *w)
{
    td_request_stats stats;
    char sha[TD_TOKEN_SHA_CAP];
    td_request_stats_get(g->request, &stats);
    td_reply_sha(&g->reply, sha);
    td_json_write_key(w, "tandem");
    td_json_write_begin(w, '{');
    write_seconds(w, "queue_s", stats.queue_s);
    write_seconds(w, "prefill_s", stats.prefill_s);
    write_seconds(w, "decode_s", stats.decode_s);
    write_seconds(w, "ttft_s", stats.ttft_s);
    td_json_write_member_int(w, "rounds", stats.rounds);
    td_json_write_member_int(w, "drafted", stats.drafted);
    td_json_write_member_int(w, "accepted", stats.accepted);
    td_json_write_key(w, "tok_s");
    if (stats.decode_s > 0)
        td_json_write_double(w, (double)(int64_t)((double)g->reply.ids.n / stats.decode_s * 100 + 0.5) / 100);
    else
        td_json_write_null(w);
    td_json_write_member_text(w, "token_sha", sha);
    td_json_write_end(w, '}');
}

void td_write_stop_reason(td_generation *g, td_json_writer *w)
{
    const td_reply *reply = &g->reply;
    bool named = false; /* by the client: the model's own end tokens are not a reason */
    for (int i = 0; i < g->params.n_stop_ids; i++)
        named |= reply->end_id >= 0 && g->params.stop_ids[i] == reply->end_id;
    td_json_write_key(w, "stop_reason");
    if (reply->stop_string >= 0)
        td_json_write_string(w, g->params.stop.strings[reply->stop_string].text,
                             g->params.stop.strings[reply->stop_string].n_bytes);
    else if (named)
        td_json_write_int(w, reply->end_id);
    else
        td_json_write_null(w);
}

void td_write_ids(td_json_writer *w, const char *key, const int32_t *ids, size_t n)
{
    td_json_write_key(w, key);
    td_json_write_begin(w, '[');
    for (size_t i = 0; i < n; i++) td_json_write_int(w, ids[i]);
    td_json_write_end(w, ']');
}
