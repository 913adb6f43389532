/* What machines ask every few seconds: /health, /metrics, /version, /ping. Nothing here waits for the engine. */
#include "server/core.h"

#include <stdio.h>

static void write_double(td_json_writer *w, const char *name, double x)
{
    td_json_write_key(w, name);
    td_json_write_double(w, (double)(int64_t)(x * 1e6 + 0.5) / 1e6);
}

static void write_engine(td_call *x, td_json_writer *w, const td_engine_stats *e)
{
    td_json_write_member_bool(w, "busy", e->running > 0);
    td_json_write_member_int(w, "requests_running", e->running);
    td_json_write_member_int(w, "requests_waiting", e->waiting);
    td_json_write_member_int(w, "requests_total", e->requests_total);
    td_json_write_key(w, "streams");
    td_json_write_begin(w, '{');
    td_json_write_member_int(w, "decoding", e->decoding);
    td_json_write_member_int(w, "prefilling", e->prefilling);
    td_json_write_member_int(w, "paused", e->paused);
    td_json_write_member_int(w, "max", e->slots);
    td_json_write_end(w, '}');
    td_json_write_member_int(w, "context_length", x->server->options.context_tokens);
    if (e->pool_tokens > 0) {
        td_json_write_member_int(w, "pool_tokens", e->pool_tokens);
        td_json_write_member_int(w, "pool_free_tokens", e->pool_free_tokens);
    }
    td_json_write_member_int(w, "prompt_tokens_total", e->prompt_tokens_total);
    td_json_write_member_int(w, "completion_tokens_total", e->completion_tokens_total);
    td_json_write_member_int(w, "cached_tokens_total", e->cached_tokens_total);
    write_double(w, "prefill_seconds_total", e->prefill_s_total);
    write_double(w, "decode_seconds_total", e->decode_s_total);
    td_json_write_member_int(w, "rounds_total", e->rounds_total);
    td_json_write_member_int(w, "drafted_total", e->drafted_total);
    td_json_write_member_int(w, "accepted_total", e->accepted_total);
    write_double(w, "iteration_s", e->iteration_s);
    td_json_write_key(w, "ranks"); /* the engine fails as a whole: while it works, every rank does */
    td_json_write_begin(w, '[');
    for (int rank = 0; rank < x->server->options.world; rank++) {
        td_json_write_begin(w, '{');
        td_json_write_member_int(w, "rank", rank);
        td_json_write_member_bool(w, "ok", true);
        td_json_write_end(w, '}');
    }
    td_json_write_end(w, ']');
}

/* "ok", "loading", "unhealthy" or "stopping"; message: what to say beside it, if anything. */
static const char *status_of(td_server *server, td_engine *engine, char message[TD_ERROR_TEXT_CAP])
{
    message[0] = 0;
    td_error err;
    switch (atomic_load(&server->state)) {
    case TD_SERVER_LOADING: return "loading";
    case TD_SERVER_READY:
        if (engine && td_engine_health(engine, &err) == TD_OK) return "ok";
        snprintf(message, TD_ERROR_TEXT_CAP, "%s", engine ? err.text : "no engine");
        return "unhealthy";
    case TD_SERVER_FAILED:
        pthread_mutex_lock(&server->mutex);
        snprintf(message, TD_ERROR_TEXT_CAP, "%s", server->failure);
        pthread_mutex_unlock(&server->mutex);
        return "unhealthy";
    default: return "stopping";
    }
}

static void write_progress(const td_server *server, td_json_writer *w)
{
    long long done = atomic_load(&server->progress_done), total = atomic_load(&server->progress_total);
    td_json_write_key(w, "progress");
    if (total <= 0) {
        td_json_write_null(w); /* not known yet */
        return;
    }
    td_json_write_begin(w, '{');
    td_json_write_member_int(w, "done", done);
    td_json_write_member_int(w, "total", total);
    td_json_write_end(w, '}');
}

/* Open without a key, so that load balancers can ask; then it tells no more than they need. */
void td_route_health(td_call *x)
{
    td_server *server = x->server;
    td_engine *engine = atomic_load(&server->engine);
    char message[TD_ERROR_TEXT_CAP];
    const char *status = status_of(server, engine, message);
    bool ok = status[0] == 'o';
    bool all = td_auth_is_open(server->auth) || x->key[0];
    td_json_writer w = { .out = &x->reply };
    td_json_write_begin(&w, '{');
    td_json_write_member_text(&w, "status", status);
    if (status[0] == 'l') write_progress(server, &w);
    if (all) {
        td_json_write_member_bool(&w, "ok", ok);
        td_json_write_member_text(&w, "backend", server->options.backend);
        td_json_write_member_text(&w, "version", server->options.version);
        td_json_write_member_text(&w, "model", server->options.model_id);
        if (message[0]) td_json_write_member_text(&w, "message", message);
        if (ok) {
            td_engine_stats stats;
            td_engine_stats_get(engine, &stats);
            write_engine(x, &w, &stats);
        }
    }
    td_json_write_end(&w, '}');
    if (!ok) x->retry_after_s = status[0] == 'l' ? 30 : 5;
    td_call_done(x, ok ? 200 : 503, "application/json");
}

void td_route_metrics(td_call *x)
{
    td_engine_stats stats;
    td_engine *engine = atomic_load(&x->server->engine);
    if (engine) td_engine_stats_get(engine, &stats);
    td_metrics_write(x->server->metrics, x->server->options.model_id, engine ? &stats : NULL, &x->reply);
    td_call_done(x, 200, "text/plain; version=0.0.4; charset=utf-8");
}

void td_route_version(td_call *x)
{
    td_json_writer w = { .out = &x->reply };
    td_json_write_begin(&w, '{');
    td_json_write_member_text(&w, "version", x->server->options.version);
    td_json_write_end(&w, '}');
    td_call_json(x);
}

void td_route_ping(td_call *x)
{
    td_call_done(x, 200, "text/plain; charset=utf-8");
}
