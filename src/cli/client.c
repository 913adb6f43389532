/* See client.h. */
#include "cli/client.h"

#include "base/clock.h"

#include <curl/curl.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    URL_CAP = 1024,
    POLL_MS = 100,
    CONNECT_S = 10,
    WORDS_CAP = 4096, /* of a refusal's body that are kept */
};
#define REPLY_LIMIT ((size_t)64 << 20)
#define EVENT_LIMIT ((size_t)16 << 20)

struct td_client {
    char base[URL_CAP];
    td_client_stop_fn *stop;
    CURL *easy;
    CURLM *multi;
    struct curl_slist *headers;
    char curl_words[CURL_ERROR_SIZE];
};

/* --- opening --- */

static bool host_is(const char *base, const char *name)
{
    const char *host = strstr(base, "://") + 3;
    size_t n = strlen(name);
    return strncasecmp(host, name, n) == 0 && (host[n] == ':' || host[n] == '\0');
}

static bool is_loopback(const char *base)
{
    const char *host = strstr(base, "://") + 3;
    return strncmp(host, "127.", 4) == 0 || host_is(base, "localhost") || host_is(base, "[::1]");
}

static td_status set_base(td_client *client, const char *url, td_error *err)
{
    const char *scheme = strstr(url, "://");
    bool known = !scheme || strncasecmp(url, "http://", 7) == 0 || strncasecmp(url, "https://", 8) == 0;
    const char *host = scheme ? scheme + 3 : url;
    if (!known || !*host || *host == '/' || strpbrk(url, " ?#@\t\r\n"))
        return td_fail(err, TD_EINVAL, "'%s' is not the address of a server, such as http://127.0.0.1:8888", url);
    int n = snprintf(client->base, sizeof client->base, "%s%s", scheme ? "" : "http://", url);
    if (n < 0 || (size_t)n >= sizeof client->base) return td_fail(err, TD_EINVAL, "the server's address is too long");
    size_t end = (size_t)n;
    while (end && client->base[end - 1] == '/') end--;
    if (end > 3 && memcmp(client->base + end - 3, "/v1", 3) == 0) end -= 3;
    while (end && client->base[end - 1] == '/') end--;
    client->base[end] = '\0';
    return TD_OK;
}

static td_status add_header(td_client *client, const char *line, td_error *err)
{
    struct curl_slist *longer = curl_slist_append(client->headers, line);
    if (!longer) return td_fail(err, TD_ENOMEM, "out of memory");
    client->headers = longer;
    return TD_OK;
}

static td_status set_key(td_client *client, const char *key, td_error *err)
{
    char line[2048];
    if (!key || !*key) key = getenv("TANDEM_API_KEY");
    if (!key || !*key) return TD_OK;
    for (const char *c = key; *c; c++)
        if (*c <= ' ' || *c > '~')
            return td_fail(err, TD_EINVAL, "the API key has a character that cannot stand in a header");
    int n = snprintf(line, sizeof line, "Authorization: Bearer %s", key);
    if (n < 0 || (size_t)n >= sizeof line) return td_fail(err, TD_EINVAL, "the API key is too long");
    return add_header(client, line, err);
}

td_status td_client_open(const char *url, const char *key, td_client_stop_fn *stop, td_client **out, td_error *err)
{
    td_client *client = calloc(1, sizeof *client);
    if (!client) return td_fail(err, TD_ENOMEM, "out of memory");
    client->stop = stop;
    td_status status = set_base(client, url, err);
    if (!status) {
        curl_global_init(CURL_GLOBAL_DEFAULT);
        client->easy = curl_easy_init();
        client->multi = curl_multi_init();
        if (!client->easy || !client->multi) status = td_fail(err, TD_ENOMEM, "libcurl cannot be started");
    }
    if (!status) status = add_header(client, "Content-Type: application/json", err);
    if (!status) status = add_header(client, "Expect:", err); /* no round trip before a long prompt */
    if (!status) status = set_key(client, key, err);
    if (status) {
        td_client_close(client);
        return status;
    }
    *out = client;
    return TD_OK;
}

void td_client_close(td_client *client)
{
    if (!client) return;
    bool curl = client->easy || client->multi;
    curl_slist_free_all(client->headers);
    if (client->easy) curl_easy_cleanup(client->easy);
    if (client->multi) curl_multi_cleanup(client->multi);
    if (curl) curl_global_cleanup();
    free(client);
}

const char *td_client_base(const td_client *client)
{
    return client->base;
}

/* --- one transfer --- */

/* Where a body goes: into words until the status is known to be good, then to take(). */
typedef struct transfer {
    td_client *client;
    td_buf *body;            /* a whole reply, or the words of a refusal */
    td_event_reader *events; /* NULL: not a stream */
    td_status status;        /* of the event reader */
} transfer;

static size_t on_bytes(char *bytes, size_t size, size_t n, void *user)
{
    transfer *t = user;
    long code = 0;
    n *= size;
    curl_easy_getinfo(t->client->easy, CURLINFO_RESPONSE_CODE, &code);
    if (code < 200 || code > 299) {
        size_t room = t->body->n_bytes < WORDS_CAP ? WORDS_CAP - t->body->n_bytes : 0;
        td_buf_add(t->body, bytes, n < room ? n : room);
        return n;
    }
    if (t->events) {
        t->status = td_event_reader_feed(t->events, bytes, n);
        return t->status ? CURL_WRITEFUNC_ERROR : n;
    }
    td_buf_add(t->body, bytes, n);
    return t->body->failed ? CURL_WRITEFUNC_ERROR : n;
}

static void prepare(td_client *client, const char *url, const td_buf *body, transfer *t)
{
    CURL *easy = client->easy;
    curl_easy_reset(easy); /* keeps connections */
    client->curl_words[0] = '\0';
    curl_easy_setopt(easy, CURLOPT_URL, url);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, client->curl_words);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, client->headers);
    curl_easy_setopt(easy, CURLOPT_USERAGENT, "tandem");
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_S);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_bytes);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, t);
    if (is_loopback(client->base)) curl_easy_setopt(easy, CURLOPT_NOPROXY, "*");
    if (!body) return;
    curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)body->n_bytes);
    curl_easy_setopt(easy, CURLOPT_POSTFIELDS, body->data);
}

static bool stopped(const td_client *client)
{
    return client->stop && client->stop();
}

/* CURLE_OK, what libcurl says, or CURLE_ABORTED_BY_CALLBACK when the caller wants to stop. */
static CURLcode run(td_client *client)
{
    CURLcode code = CURLE_FAILED_INIT;
    int running = 1;
    if (curl_multi_add_handle(client->multi, client->easy)) return code;
    while (running && !stopped(client)) {
        if (curl_multi_perform(client->multi, &running)) break;
        if (running && curl_multi_poll(client->multi, NULL, 0, POLL_MS, NULL)) break;
    }
    if (running) code = stopped(client) ? CURLE_ABORTED_BY_CALLBACK : CURLE_FAILED_INIT;
    int n_left;
    for (CURLMsg *message; (message = curl_multi_info_read(client->multi, &n_left));)
        if (message->msg == CURLMSG_DONE) code = message->data.result;
    curl_multi_remove_handle(client->multi, client->easy);
    return code;
}

static td_status why_curl(const td_client *client, const char *path, CURLcode code, td_error *err)
{
    const char *words = client->curl_words[0] ? client->curl_words : curl_easy_strerror(code);
    if (code == CURLE_ABORTED_BY_CALLBACK) return td_fail(err, TD_ECANCELED, "stopped");
    if (code == CURLE_COULDNT_CONNECT)
        return td_fail(err, TD_EIO, "nobody answers at %s (is the server running?): %s", client->base, words);
    td_status status = code == CURLE_OPERATION_TIMEDOUT ? TD_ETIMEOUT : TD_EIO;
    return td_fail(err, status, "%s%s: %s", client->base, path, words);
}

/* The server's own words of a refusal: {"error": {"message": ...}} (or the text as it came). */
static td_status why_refused(const char *path, long code, td_buf *body, td_error *err)
{
    td_arena arena;
    const td_json *json = NULL;
    td_arena_init(&arena, 1 << 20);
    td_buf text;
    td_buf_init(&text, 0);
    td_buf_add(&text, body->data ? body->data : "", body->n_bytes);
    if (text.data && !text.failed) (void)td_json_parse(&arena, text.data, text.n_bytes, &json, NULL);
    const char *words = td_json_string(td_json_get(td_json_get(json, "error"), "message"), NULL);
    if (!words) words = body->data && body->n_bytes ? body->data : "no reason given";
    td_status status = code == 404 ? TD_ENOTFOUND : code == 429 ? TD_EFULL : TD_EIO;
    td_fail(err, status, "%s: the server says %ld: %.500s", path, code, words);
    td_buf_deinit(&text);
    td_arena_deinit(&arena);
    return status;
}

/* Both kinds of call; body_out receives the reply, or the words of a refusal. */
static td_status transact(td_client *client, const char *path, const td_buf *body, double limit_s, double silent_s,
                          td_event_reader *events, td_buf *body_out, long *http, td_error *err)
{
    char url[URL_CAP + 256];
    transfer t = { .client = client, .body = body_out, .events = events };
    if (body && (body->failed || !body->data)) return td_fail(err, TD_ENOMEM, "out of memory");
    snprintf(url, sizeof url, "%s%s", client->base, path);
    prepare(client, url, body, &t);
    if (limit_s > 0) curl_easy_setopt(client->easy, CURLOPT_TIMEOUT_MS, (long)ceil(limit_s * 1000));
    if (silent_s > 0) {
        curl_easy_setopt(client->easy, CURLOPT_LOW_SPEED_LIMIT, 1L);
        curl_easy_setopt(client->easy, CURLOPT_LOW_SPEED_TIME, (long)ceil(silent_s));
    }
    CURLcode code = run(client);
    curl_easy_getinfo(client->easy, CURLINFO_RESPONSE_CODE, http);
    if (t.status == TD_ECANCELED) return TD_OK; /* the reader has what it wanted */
    if (t.status || body_out->failed) return td_fail(err, TD_EFORMAT, "%s: the reply is too large", path);
    if (code != CURLE_OK) return why_curl(client, path, code, err);
    return *http < 200 || *http > 299 ? why_refused(path, *http, body_out, err) : TD_OK;
}

td_status td_client_call(td_client *client, const char *path, const td_buf *body, double limit_s,
                         td_client_reply *reply, td_error *err)
{
    td_client_reply r = { 0 };
    long http = 0;
    td_buf_init(&r.body, REPLY_LIMIT);
    td_arena_init(&r.arena, 0);
    int64_t start_ns = td_now_ns();
    td_status status = transact(client, path, body, limit_s, 0, NULL, &r.body, &http, err);
    r.wall_s = (double)(td_now_ns() - start_ns) * 1e-9;
    r.status = (int)http;
    if (!status && !r.body.data) status = td_fail(err, TD_EFORMAT, "%s: the reply is empty", path);
    if (!status && td_json_parse(&r.arena, r.body.data, r.body.n_bytes, &r.json, err))
        status = td_error_prefix(err, "%s: the reply is not JSON", path);
    if (status)
        td_client_reply_free(&r);
    else
        *reply = r;
    return status;
}

void td_client_reply_free(td_client_reply *reply)
{
    td_arena_deinit(&reply->arena);
    td_buf_deinit(&reply->body);
    *reply = (td_client_reply){ 0 };
}

td_status td_client_stream(td_client *client, const char *path, const td_buf *body, double silent_s, td_event_fn *event,
                           void *user, td_error *err)
{
    td_event_reader events;
    td_buf words;
    long http = 0;
    td_event_reader_init(&events, EVENT_LIMIT, event, user);
    td_buf_init(&words, 0);
    td_status status = transact(client, path, body, 0, silent_s, &events, &words, &http, err);
    td_buf_deinit(&words);
    td_event_reader_deinit(&events);
    return status;
}

td_status td_client_model(td_client *client, char *id, size_t cap_bytes, td_error *err)
{
    td_client_reply reply;
    td_status status = td_client_call(client, "/v1/models", NULL, 30, &reply, err);
    if (status) return status;
    const char *first = td_json_string(td_json_get(td_json_at(td_json_get(reply.json, "data"), 0), "id"), NULL);
    if (!first)
        status = td_fail(err, TD_EFORMAT, "/v1/models: the server names no model");
    else if ((size_t)snprintf(id, cap_bytes, "%s", first) >= cap_bytes)
        status = td_fail(err, TD_EFORMAT, "/v1/models: the model's id is too long");
    td_client_reply_free(&reply);
    return status;
}
