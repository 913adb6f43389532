/* See load.h. */
#include "cli/load.h"

#include "base/clock.h"
#include "cli/client.h"

#include <pthread.h>
#include <string.h>

/* Threads wait here until all of them are there, so that no request has a start before the others. */
typedef struct gate {
    pthread_mutex_t mutex;
    pthread_cond_t opened;
    bool open, give_up;
    int64_t start_ns;
} gate;

typedef struct worker {
    td_load_request *request;
    td_client *client;
    gate *gate;
    double silent_s;
    td_arena arena;
    bool complete; /* the stream ended as it should */
    pthread_t thread;
} worker;

static double now_s(const worker *w)
{
    return (double)(td_now_ns() - w->gate->start_ns) * 1e-9;
}

static bool has_text(const td_json *root)
{
    const td_json *choice = td_json_at(td_json_get(root, "choices"), 0), *delta = td_json_get(choice, "delta");
    const td_json *const places[] = { td_json_get(choice, "text"), td_json_get(delta, "content"),
                                      td_json_get(delta, "reasoning_content") };
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const char *text = td_json_string(places[i], NULL);
        if (text && *text) return true;
    }
    return false;
}

static void read_counts(td_load_request *r, const td_json *root)
{
    const td_json *usage = td_json_get(root, "usage"), *timing = td_json_get(root, "tandem");
    (void)td_json_int64(td_json_get(usage, "prompt_tokens"), &r->prompt_tokens);
    (void)td_json_int64(td_json_get(usage, "completion_tokens"), &r->completion_tokens);
    (void)td_json_int64(td_json_get(td_json_get(usage, "prompt_tokens_details"), "cached_tokens"), &r->cached_tokens);
    (void)td_json_double(td_json_get(timing, "prefill_s"), &r->prefill_s);
    (void)td_json_double(td_json_get(timing, "decode_s"), &r->decode_s);
}

static bool on_event(void *user, char *data, size_t n_bytes)
{
    worker *w = user;
    td_load_request *r = w->request;
    const td_json *root;
    double at_s = now_s(w);
    if (n_bytes == 6 && memcmp(data, "[DONE]", 6) == 0) {
        w->complete = true;
        return false;
    }
    td_arena_deinit(&w->arena);
    td_arena_init(&w->arena, 0);
    r->status = td_json_parse(&w->arena, data, n_bytes, &root, &r->err);
    const td_json *error = r->status ? NULL : td_json_get(root, "error");
    if (!td_json_is_null(error)) {
        const char *words = td_json_string(td_json_get(error, "message"), NULL);
        r->status = td_fail(&r->err, TD_EIO, "the server ended a reply: %.500s", words ? words : "no reason given");
    }
    if (r->status) return false;
    bool text = has_text(root),
         end = td_json_string(td_json_get(td_json_at(td_json_get(root, "choices"), 0), "finish_reason"), NULL);
    if (text || end) { /* a reply whose only token has no text still ends */
        if (r->first_s < 0) r->first_s = at_s;
        r->last_s = at_s;
    }
    read_counts(r, root);
    return true;
}

static bool pass(gate *g)
{
    pthread_mutex_lock(&g->mutex);
    while (!g->open) pthread_cond_wait(&g->opened, &g->mutex);
    bool go = !g->give_up;
    pthread_mutex_unlock(&g->mutex);
    return go;
}

static void open_gate(gate *g, bool give_up)
{
    pthread_mutex_lock(&g->mutex);
    g->open = true;
    g->give_up = give_up;
    g->start_ns = td_now_ns();
    pthread_cond_broadcast(&g->opened);
    pthread_mutex_unlock(&g->mutex);
}

static void *work(void *user)
{
    worker *w = user;
    td_load_request *r = w->request;
    td_error err;
    if (!pass(w->gate)) return NULL;
    r->sent_s = now_s(w);
    td_status status = td_client_stream(w->client, r->path, &r->body, w->silent_s, on_event, w, &err);
    if (status && !r->status) {
        r->status = status;
        r->err = err;
    }
    if (!r->status && !w->complete) r->status = td_fail(&r->err, TD_EIO, "%s: the stream ended early", r->path);
    return NULL;
}

static td_status start(worker *w, const char *url, const char *key, td_error *err)
{
    td_load_request *r = w->request;
    r->status = TD_OK;
    r->sent_s = r->last_s = 0;
    r->first_s = r->prefill_s = r->decode_s = -1;
    r->prompt_tokens = r->cached_tokens = r->completion_tokens = 0;
    td_arena_init(&w->arena, 0);
    td_status status = td_client_open(url, key, NULL, &w->client, err);
    if (!status && pthread_create(&w->thread, NULL, work, w))
        status = td_fail(err, TD_ENOMEM, "no thread can be started");
    return status;
}

static void finish(worker *w)
{
    td_arena_deinit(&w->arena);
    td_client_close(w->client);
}

td_status td_load_run(const char *url, const char *key, td_load_request *requests, int n, double silent_s,
                      td_error *err)
{
    worker workers[TD_LOAD_MAX];
    gate g = { .mutex = PTHREAD_MUTEX_INITIALIZER, .opened = PTHREAD_COND_INITIALIZER };
    td_status status = TD_OK;
    int started = 0;
    td_check(n >= 1 && n <= TD_LOAD_MAX);
    while (!status && started < n) {
        worker *w = &workers[started];
        *w = (worker){ .request = &requests[started], .gate = &g, .silent_s = silent_s };
        status = start(w, url, key, err);
        if (status)
            finish(w);
        else
            started++;
    }
    open_gate(&g, status != TD_OK);
    for (int i = 0; i < started; i++) {
        pthread_join(workers[i].thread, NULL);
        finish(&workers[i]);
    }
    return status;
}
