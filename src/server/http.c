/* libmicrohttpd's callbacks: from a header block to a call, from a call to a response.
 *
 * Refusals that need no body are decided on the header block. A small body of a refused request is read and dropped, so
 * that the connection can be kept; otherwise the answer is written beside libmicrohttpd (td_conn_refuse) and the
 * connection closes: the library cannot answer in the middle of a body, and would reset a connection whose body it has
 * not read. */
#include "server/generate.h"

#include "base/clock.h"
#include "base/log.h"

#include <microhttpd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

enum {
    TARGET_MAX_BYTES = 8 << 10,
    HEADERS_MAX_BYTES = 64 << 10,
    POOL_BYTES = 192 << 10, /* of a connection in libmicrohttpd: the header block twice and some */
    STREAM_BLOCK_BYTES = 16 << 10,
    DROP_MAX_BYTES = 1 << 20, /* of a refused request's body that is read for the connection's sake */
    STACK_BYTES = 1 << 20,
    EXTRA_CONNECTIONS = 64, /* beyond the limit: they get an answer that says so */
    HEADERS_MAX = 16
};

/* ------------------------------------------------------------------------------------------------ headers --- */

typedef struct header {
    const char *name, *value;
} header;

typedef struct header_list {
    header items[HEADERS_MAX];
    int n;
    char retry_after[16], allow[64];
} header_list;

static void add(header_list *list, const char *name, const char *value)
{
    td_check(list->n < HEADERS_MAX);
    list->items[list->n++] = (header){ name, value };
}

/* What every response carries, whoever writes it. */
static void collect_headers(const td_server *server, const td_call *x, int status, int retry_after_s, header_list *list)
{
    list->n = 0;
    if (!server->options.no_cors) {
        add(list, "Access-Control-Allow-Origin", "*");
        add(list, "Access-Control-Expose-Headers", "x-request-id, Retry-After");
    }
    if (x && x->request_id[0]) add(list, "x-request-id", x->request_id);
    if (status == 401) add(list, "WWW-Authenticate", "Bearer");
    if (retry_after_s > 0) {
        snprintf(list->retry_after, sizeof list->retry_after, "%d", retry_after_s);
        add(list, "Retry-After", list->retry_after);
    }
    if (x && x->route && (status == 405 || status == 204)) {
        td_route_allow(x->route, list->allow);
        add(list, "Allow", list->allow);
    }
    if (status == 204 && !server->options.no_cors) {
        add(list, "Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS");
        add(list, "Access-Control-Allow-Headers", "Authorization, *"); /* browsers do not let * cover Authorization */
        add(list, "Access-Control-Max-Age", "86400");
    }
    if (x && x->stream) {
        add(list, "Cache-Control", "no-cache");
        add(list, "X-Accel-Buffering", "no");
    }
}

void td_http_closing_reply(const td_server *server, const td_call *x, const td_refusal *why, td_buf *out)
{
    header_list list;
    td_buf body;
    char date[64];
    struct tm utc;
    time_t now = (time_t)td_wall_s();
    td_buf_init(&body, 0);
    td_refusal_write(why, &body);
    gmtime_r(&now, &utc);
    strftime(date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT", &utc); /* the program never sets a locale */
    td_buf_printf(out, "HTTP/1.1 %d %s\r\nDate: %s\r\nConnection: close\r\nContent-Type: application/json\r\n",
                  why->status, MHD_get_reason_phrase_for((unsigned)why->status), date);
    collect_headers(server, x, why->status, why->retry_after_s, &list);
    for (int i = 0; i < list.n; i++) td_buf_printf(out, "%s: %s\r\n", list.items[i].name, list.items[i].value);
    td_buf_printf(out, "Content-Length: %zu\r\n\r\n", body.n_bytes);
    if (!x || x->method != TD_METHOD_HEAD) td_buf_add(out, body.data, body.n_bytes);
    td_buf_deinit(&body);
}

/* ------------------------------------------------------------------------------------- refusals, early end --- */

/* Answers at once and closes; returns what libmicrohttpd is told. */
static enum MHD_Result refuse_and_close(td_call *x, const td_refusal *why)
{
    td_buf reply;
    td_buf_init(&reply, 0);
    td_http_closing_reply(x->server, x, why, &reply);
    x->status = why->status;
    x->sent_raw = true;
    if (td_conn_enter(&x->server->conns, x->conn, TD_PHASE_WORK)) td_conn_refuse(x->conn, reply.data, reply.n_bytes);
    td_buf_deinit(&reply);
    return MHD_NO;
}

/* ------------------------------------------------------------------------------------- the header block --- */

typedef struct framing {
    int n_lengths, n_encodings, n_hosts; /* Content-Length, Transfer-Encoding, Host */
    const char *length, *encoding, *content_encoding;
    bool unequal, bad_name;
    uint64_t n_bytes; /* of the body, by Content-Length */
} framing;

/* Characters that a name cannot have: "Content-Length : 5" would be a length to some and none to others. And a name
 * that merely begins like one of the two that frame a body: libmicrohttpd 0.9.75 appends a folded line to the name
 * instead of the value, which would hide them. */
static bool name_is_bad(const char *name)
{
    static const char *const framers[] = { "Content-Length", "Transfer-Encoding" };
    for (const char *c = name; *c; c++)
        if ((unsigned char)*c <= ' ' || (unsigned char)*c >= 0x7f || strchr("\"(),/:;<=>?@[\\]{}", *c)) return true;
    for (int i = 0; i < 2; i++) {
        size_t n = strlen(framers[i]);
        if (strncasecmp(name, framers[i], n) == 0 && name[n]) return true;
    }
    return false;
}

static enum MHD_Result look_at_header(void *context, enum MHD_ValueKind kind, const char *name, const char *value)
{
    framing *f = context;
    (void)kind;
    if (!value) value = "";
    if (name_is_bad(name)) f->bad_name = true;
    if (strcasecmp(name, "Content-Length") == 0) {
        if (f->n_lengths++ && strcmp(f->length, value) != 0) f->unequal = true;
        f->length = value;
    } else if (strcasecmp(name, "Transfer-Encoding") == 0) {
        f->n_encodings++;
        f->encoding = value;
    } else if (strcasecmp(name, "Host") == 0) {
        f->n_hosts++;
    } else if (strcasecmp(name, "Content-Encoding") == 0) {
        f->content_encoding = value;
    }
    return MHD_YES;
}

static td_status check_length(framing *f, td_refusal *why)
{
    size_t n_digits = strspn(f->length, "0123456789");
    if (f->unequal) return td_refuse_field(why, NULL, "unequal Content-Length headers");
    if (n_digits == 0 || f->length[n_digits] || n_digits > 18)
        return td_refuse_field(why, NULL, "Content-Length must be a number");
    f->n_bytes = strtoull(f->length, NULL, 10);
    return TD_OK;
}

/* Two readings of one request are how requests are smuggled past a proxy: there must be exactly one. */
static td_status check_framing(framing *f, const char *version, td_refusal *why)
{
    if (f->bad_name) return td_refuse_field(why, NULL, "a header line is malformed or folded");
    if (f->n_hosts > 1 || (f->n_hosts == 0 && strcmp(version, "HTTP/1.1") == 0))
        return td_refuse_field(why, NULL, "one Host header is needed");
    if (f->n_encodings > 0 && f->n_lengths > 0)
        return td_refuse_field(why, NULL, "Content-Length together with Transfer-Encoding");
    if (f->n_encodings > 1 || (f->n_encodings && strcasecmp(f->encoding, "chunked") != 0))
        return td_refuse_field(why, NULL, "Transfer-Encoding: only chunked is understood");
    if (f->n_encodings && strcmp(version, "HTTP/1.1") != 0)
        return td_refuse_field(why, NULL, "Transfer-Encoding needs HTTP/1.1");
    return f->n_lengths ? check_length(f, why) : TD_OK;
}

static td_method method_of(const char *method)
{
    if (strcmp(method, "GET") == 0) return TD_METHOD_GET;
    if (strcmp(method, "POST") == 0) return TD_METHOD_POST;
    if (strcmp(method, "HEAD") == 0) return TD_METHOD_HEAD;
    if (strcmp(method, "OPTIONS") == 0) return TD_METHOD_OPTIONS;
    return TD_METHOD_OTHER;
}

static const char *method_name(td_method method)
{
    switch (method) {
    case TD_METHOD_GET: return "GET";
    case TD_METHOD_POST: return "POST";
    case TD_METHOD_HEAD: return "HEAD";
    case TD_METHOD_OPTIONS: return "OPTIONS";
    default: return "OTHER";
    }
}

static const char *request_header(td_call *x, const char *name)
{
    return MHD_lookup_connection_value(x->mhd, MHD_HEADER_KIND, name);
}

static void set_request_id(td_call *x)
{
    const char *given = request_header(x, "x-request-id");
    size_t n = given ? strlen(given) : 0;
    bool usable = n > 0 && n < TD_REQUEST_ID_CAP;
    for (size_t i = 0; i < n && usable; i++) usable = given[i] >= 0x20 && given[i] < 0x7f;
    if (usable) {
        memcpy(x->request_id, given, n + 1);
    } else {
        memcpy(x->request_id, "req_", 5);
        td_random_hex(x->request_id + 4, 24);
    }
}

/* Too large or ambiguous: nothing behind such a header block can be trusted. */
static td_status check_block(td_call *x, framing *f, const char *version, td_refusal *why)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(x->mhd, MHD_CONNECTION_INFO_REQUEST_HEADER_SIZE);
    if (x->target_bytes > TARGET_MAX_BYTES)
        return td_refuse(why, 414, NULL, NULL, "the request line is longer than %d bytes", TARGET_MAX_BYTES);
    if (info && info->header_size > HEADERS_MAX_BYTES)
        return td_refuse(why, 431, NULL, NULL, "the header block is larger than %d bytes", HEADERS_MAX_BYTES);
    MHD_get_connection_values(x->mhd, MHD_HEADER_KIND, look_at_header, f);
    td_status st = check_framing(f, version, why);
    if (st != TD_OK) return st;
    if (f->n_bytes > (uint64_t)x->server->options.body_limit_bytes)
        return td_refuse(why, 413, "request_too_large", NULL, "the request body is larger than %d bytes",
                         x->server->options.body_limit_bytes);
    if (td_conns_count(&x->server->conns) > x->server->options.max_connections)
        return td_refuse(why, 503, "unavailable", NULL, "more than %d connections", x->server->options.max_connections);
    return TD_OK;
}

static td_status check_key(td_call *x, td_refusal *why)
{
    const char *key = td_auth_key_of(request_header(x, "Authorization"), request_header(x, "x-api-key"));
    bool open =
        !(x->route->flags & TD_ROUTE_KEY) || ((x->route->flags & TD_ROUTE_METRICS) && x->server->options.metrics_open);
    td_auth_answer answer = td_auth_check(x->server->auth, key, x->key);
    if (open || answer == TD_AUTH_OPEN || answer == TD_AUTH_OK) return TD_OK;
    if (answer == TD_AUTH_CLOSED)
        return td_refuse(why, 503, "unavailable", NULL,
                         "no API key is accepted until the server's key file is valid again");
    return td_refuse(why, 401, "invalid_api_key", NULL,
                     key ? "the API key is not valid"
                         : "an API key is needed: send "
                           "Authorization: Bearer KEY");
}

static td_status check_state(const td_call *x, td_refusal *why)
{
    if (!(x->route->flags & TD_ROUTE_READY)) return TD_OK;
    switch (atomic_load(&x->server->state)) {
    case TD_SERVER_READY: return TD_OK;
    case TD_SERVER_LOADING:
        td_refuse(why, 503, "loading", NULL, "the model is still being loaded");
        why->retry_after_s = 30;
        return TD_EINVAL;
    case TD_SERVER_FAILED:
        return td_refuse(why, 503, "unavailable", NULL, "the server has failed and must be restarted");
    default: return td_refuse(why, 503, "unavailable", NULL, "the server is stopping");
    }
}

static td_status check_route(const td_call *x, td_refusal *why)
{
    td_method method = x->method == TD_METHOD_HEAD ? TD_METHOD_GET : x->method;
    char allow[64];
    if (!x->route->path[0])
        return td_refuse(why, 404, "not_found", NULL,
                         "no such route; this server has /v1/chat/completions, /v1/completions, /v1/models, /tokenize, "
                         "/detokenize, /health, /metrics, /version");
    if (x->route->methods & method) return TD_OK;
    td_route_allow(x->route, allow);
    return td_refuse(why, 405, NULL, NULL, "this route answers %s", allow);
}

static td_status check_content_encoding(const framing *f, td_refusal *why)
{
    if (!f->content_encoding || !*f->content_encoding || strcasecmp(f->content_encoding, "identity") == 0) return TD_OK;
    return td_refuse(why, 415, NULL, NULL, "Content-Encoding: compressed request bodies are not accepted");
}

static enum MHD_Result begin(td_call *x, const char *url, const char *method, const char *version)
{
    framing f = { 0 };
    td_refusal why;
    x->begun = true;
    x->method = method_of(method);
    x->route = td_route_find(url, &x->path_arg);
    set_request_id(x);
    if (!td_conn_enter(&x->server->conns, x->conn, TD_PHASE_BODY)) return MHD_NO;
    if (check_block(x, &f, version, &why) != TD_OK) return refuse_and_close(x, &why);
    if (x->method == TD_METHOD_OPTIONS) {
        x->status = 204;
    } else if (check_key(x, &why) != TD_OK) {
        return refuse_and_close(x, &why);
    } else if (check_route(x, &why) != TD_OK || check_state(x, &why) != TD_OK ||
               check_content_encoding(&f, &why) != TD_OK) {
        if (f.n_bytes > DROP_MAX_BYTES) return refuse_and_close(x, &why);
        td_call_refuse(x, &why);
    }
    x->drop_body = x->status != 0 || x->method != TD_METHOD_POST;
    return MHD_YES;
}

/* ------------------------------------------------------------------------------------------------ the body --- */

static enum MHD_Result take_body(td_call *x, const char *data, size_t n_bytes)
{
    td_server *server = x->server;
    td_refusal why;
    if (!td_conn_enter(&server->conns, x->conn, TD_PHASE_BODY)) return MHD_NO;
    if (x->drop_body) {
        x->dropped_bytes += n_bytes;
        if (x->dropped_bytes <= DROP_MAX_BYTES) return MHD_YES;
        td_refuse(&why, 413, "request_too_large", NULL, "the body of this request is not read");
        return refuse_and_close(x, &why);
    }
    if (n_bytes > (size_t)server->options.body_limit_bytes - x->body.n_bytes) {
        td_refuse(&why, 413, "request_too_large", NULL, "the request body is larger than %d bytes",
                  server->options.body_limit_bytes);
        return refuse_and_close(x, &why);
    }
    x->body_counted_bytes += (int64_t)n_bytes;
    long long held = atomic_fetch_add(&server->bodies_bytes, (long long)n_bytes) + (long long)n_bytes;
    td_buf_add(&x->body, data, n_bytes);
    if (held <= server->options.bodies_limit_bytes && !x->body.failed) return MHD_YES;
    td_refuse(&why, 503, "unavailable", NULL, "too many large requests at once");
    return refuse_and_close(x, &why);
}

/* ----------------------------------------------------------------------------------------------- the reply --- */

static ssize_t read_stream(void *context, uint64_t pos, char *out, size_t cap)
{
    td_call *x = context;
    (void)pos;
    if (!td_conn_enter(&x->server->conns, x->conn, TD_PHASE_WORK)) return MHD_CONTENT_READER_END_WITH_ERROR;
    ssize_t n = td_generation_read(x->generation, out, cap);
    td_conn_enter(&x->server->conns, x->conn, TD_PHASE_WRITE);
    return n > 0 ? n : n == 0 ? MHD_CONTENT_READER_END_OF_STREAM : MHD_CONTENT_READER_END_WITH_ERROR;
}

static enum MHD_Result send_reply(td_call *x)
{
    header_list list;
    struct MHD_Response *response;
    if (x->stream) {
        x->status = 200;
        x->content_type = "text/event-stream; charset=utf-8";
        response = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK_BYTES, read_stream, x, NULL);
    } else {
        response = MHD_create_response_from_buffer(x->reply.n_bytes, x->reply.data ? x->reply.data : "",
                                                   MHD_RESPMEM_PERSISTENT); /* x outlives the response */
    }
    if (!response) return MHD_NO;
    collect_headers(x->server, x, x->status, x->retry_after_s, &list);
    if (x->content_type) MHD_add_response_header(response, "Content-Type", x->content_type);
    for (int i = 0; i < list.n; i++) MHD_add_response_header(response, list.items[i].name, list.items[i].value);
    td_conn_enter(&x->server->conns, x->conn, TD_PHASE_WRITE);
    enum MHD_Result queued = MHD_queue_response(x->mhd, (unsigned)x->status, response);
    MHD_destroy_response(response);
    return queued;
}

static enum MHD_Result answer(td_call *x)
{
    if (!td_conn_enter(&x->server->conns, x->conn, TD_PHASE_WORK)) return MHD_NO;
    td_refusal why;
    if (!x->status && check_state(x, &why) != TD_OK) td_call_refuse(x, &why); /* it changed while the body came */
    if (!x->status) x->route->handle(x);
    return x->left ? MHD_NO : send_reply(x);
}

/* --------------------------------------------------------------------------------------------- callbacks --- */

static void on_connection(void *context, struct MHD_Connection *mhd, void **socket_context,
                          enum MHD_ConnectionNotificationCode code)
{
    td_server *server = context;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CONNECTION_FD);
        *socket_context = info ? td_conn_open(&server->conns, info->connect_fd) : NULL;
    } else if (*socket_context) {
        td_conn_close(&server->conns, *socket_context);
        *socket_context = NULL;
    }
}

static void free_call(td_call *x)
{
    td_server *server = x->server;
    td_generation_destroy(x->generation);
    td_call_drop_body(x);
    td_buf_deinit(&x->reply);
    free(x);
    pthread_mutex_lock(&server->mutex);
    if (--server->n_calls == 0) pthread_cond_broadcast(&server->idle);
    pthread_mutex_unlock(&server->mutex);
}

/* The request line is complete: the call begins here, because only here its length is known. */
static void *on_target(void *context, const char *target, struct MHD_Connection *mhd)
{
    td_server *server = context;
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    td_call *x = calloc(1, sizeof *x);
    if (!x) return NULL;
    x->server = server;
    x->mhd = mhd;
    x->conn = info ? info->socket_context : NULL;
    x->begin_ns = td_now_ns();
    x->target_bytes = strlen(target);
    td_arena_init(&x->arena, (size_t)1 << 30);
    td_buf_init(&x->body, 0);
    td_buf_init(&x->reply, 0);
    pthread_mutex_lock(&server->mutex);
    server->n_calls++;
    pthread_mutex_unlock(&server->mutex);
    return x;
}

static enum MHD_Result on_request(void *context, struct MHD_Connection *mhd, const char *url, const char *method,
                                  const char *version, const char *data, size_t *n_bytes, void **request_context)
{
    td_call *x = *request_context;
    (void)context;
    (void)mhd;
    if (!x || !x->conn) return MHD_NO; /* out of memory earlier */
    if (!x->begun) return begin(x, url, method, version);
    if (*n_bytes > 0) {
        size_t n = *n_bytes;
        *n_bytes = 0;
        return take_body(x, data, n);
    }
    return answer(x);
}

static void log_call(const td_call *x)
{
    const td_generation *g = x->generation;
    char tokens[128] = "";
    bool quiet = x->route && (x->route->flags & TD_ROUTE_PROBE) && x->status < 400;
    if (g && g->request) {
        td_request_stats stats;
        td_request_stats_get(g->request, &stats);
        snprintf(tokens, sizeof tokens, " in=%zu cached=%d out=%zu end=%s", g->prompt.n, stats.cached_tokens,
                 g->reply.ids.n, td_generation_status(g));
    }
    td_log(quiet ? TD_LOG_DEBUG : TD_LOG_INFO, "server", "%s %s %d %.1f ms id=%s key=%s%s%s", method_name(x->method),
           x->route ? x->route->name : "-", x->status, (double)(td_now_ns() - x->begin_ns) * 1e-6, x->request_id,
           x->key[0] ? x->key : "-", tokens, x->left ? " client left" : "");
}

static void on_completed(void *context, struct MHD_Connection *mhd, void **request_context,
                         enum MHD_RequestTerminationCode code)
{
    td_call *x = *request_context;
    (void)context;
    if (!x) return;
    *request_context = NULL;
    if (!x->status) { /* an answer of libmicrohttpd's own: a malformed chunk, for example */
        const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_HTTP_STATUS);
        if (info) x->status = (int)info->http_status;
        if (code == MHD_REQUEST_TERMINATED_CLIENT_ABORT) x->left = true;
    } else if (code != MHD_REQUEST_TERMINATED_COMPLETED_OK && !x->sent_raw) {
        x->left = true;
    }
    if (x->left) td_metrics_client_left(x->server->metrics);
    td_metrics_http(x->server->metrics, x->route ? x->route->name : "-", method_name(x->method), x->status);
    log_call(x);
    if (x->conn) {
        td_conn_enter(&x->server->conns, x->conn, TD_PHASE_IDLE);
        if (x->generation && x->generation->broken.status && x->stream) td_conn_end(&x->server->conns, x->conn);
    }
    free_call(x);
}

static void on_log(void *context, const char *fmt, va_list args) __attribute__((format(printf, 2, 0)));
static void on_log(void *context, const char *fmt, va_list args)
{
    char text[512];
    (void)context;
    vsnprintf(text, sizeof text, fmt, args);
    text[strcspn(text, "\r\n")] = 0;
    td_log(TD_LOG_DEBUG, "http", "%s", text);
}

td_status td_http_start(td_server *server, int listen_fd, td_error *err)
{
    unsigned flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_THREAD_PER_CONNECTION | MHD_USE_POLL | MHD_USE_ITC |
                     MHD_USE_ERROR_LOG;
    server->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, on_request, server, MHD_OPTION_EXTERNAL_LOGGER, on_log, NULL, MHD_OPTION_LISTEN_SOCKET,
        listen_fd, MHD_OPTION_NOTIFY_CONNECTION, on_connection, server, MHD_OPTION_NOTIFY_COMPLETED, on_completed,
        server, MHD_OPTION_URI_LOG_CALLBACK, on_target, server, MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)POOL_BYTES,
        MHD_OPTION_CONNECTION_LIMIT, (unsigned)(server->options.max_connections + EXTRA_CONNECTIONS),
        MHD_OPTION_THREAD_STACK_SIZE, (size_t)STACK_BYTES, MHD_OPTION_END);
    if (!server->daemon) return td_fail(err, TD_EIO, "cannot start the HTTP server");
    return TD_OK;
}
