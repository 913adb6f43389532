/* What the files of the server share: the server, one call (a request and its reply), the table of routes.
 * Internal.
 *
 * Life of a call, all on its connection's thread: http.c makes it when the header block is complete, checks
 * framing, key and state, collects the body, then calls the route. A route reads x->body and leaves either a reply
 * (td_call_json, td_call_refuse) or a generation that streams. http.c sends it, logs it and frees it. */
#ifndef TD_SERVER_CORE_H
#define TD_SERVER_CORE_H

#include "server/auth.h"
#include "server/conn.h"
#include "server/metrics.h"
#include "server/refusal.h"
#include "server/server.h"

#include <stdatomic.h>

struct MHD_Connection;
struct MHD_Daemon;

TD_BEGIN_C

enum { TD_REQUEST_ID_CAP = 129, TD_END_IDS_MAX = 32, TD_MODEL_CAP = 257 };

typedef enum td_server_state {
    TD_SERVER_LOADING,
    TD_SERVER_READY,
    TD_SERVER_FAILED,
    TD_SERVER_STOPPING
} td_server_state;

struct td_server {
    td_server_options options; /* defaults filled in; strings point into the arena */
    td_arena arena;
    td_reply_ids reply_ids; /* of the tokenizer */
    int32_t end_ids[TD_END_IDS_MAX];
    int n_end_ids;
    bool loopback;
    int port;
    int64_t created_s;

    td_auth *auth;
    td_metrics *metrics;
    td_conns conns;
    struct MHD_Daemon *daemon;

    atomic_int state;   /* td_server_state */
    atomic_bool cancel; /* running requests are to end now */
    atomic_llong progress_done, progress_total;
    atomic_llong bodies_bytes;   /* held by all calls */
    _Atomic(td_engine *) engine; /* NULL before ready and after stop */
    pthread_mutex_t mutex;       /* guards what follows */
    pthread_cond_t idle;         /* n_calls became 0 */
    int n_calls;
    char failure[TD_ERROR_TEXT_CAP];
};

typedef enum td_method {
    TD_METHOD_GET = 1,
    TD_METHOD_POST = 2,
    TD_METHOD_HEAD = 4,
    TD_METHOD_OPTIONS = 8,
    TD_METHOD_OTHER = 16
} td_method;

typedef struct td_call td_call;
typedef void td_route_fn(td_call *x);

enum {
    TD_ROUTE_KEY = 1,     /* needs an API key */
    TD_ROUTE_READY = 2,   /* 503 unless the engine is ready */
    TD_ROUTE_PROBE = 4,   /* asked every few seconds by machines: logged at debug level only */
    TD_ROUTE_METRICS = 8, /* the key is not needed with metrics_open */
    TD_ROUTE_PREFIX = 16  /* path is a prefix; the rest is x->path_arg */
};

typedef struct td_route {
    const char *path; /* without /v1 and trailing slash; "" for none: not found */
    const char *name; /* for logs and metrics */
    int methods;      /* td_method bits; HEAD comes with GET */
    int flags;
    td_route_fn *handle;
} td_route;

typedef struct td_generation td_generation;

struct td_call {
    td_server *server;
    struct MHD_Connection *mhd;
    td_conn *conn;
    const td_route *route;
    td_method method;
    const char *path_arg;
    size_t target_bytes; /* of the request line's path and query */
    bool begun;          /* the header block was looked at */
    char request_id[TD_REQUEST_ID_CAP];
    char key[TD_KEY_LABEL_CAP]; /* label; "" without keys */
    int64_t begin_ns;

    td_arena arena;
    td_buf body;
    int64_t body_counted_bytes; /* of server->bodies_bytes */
    bool drop_body;             /* read and forget: the reply is already known */
    size_t dropped_bytes;

    int status; /* 0: no reply yet */
    td_buf reply;
    const char *content_type;
    int retry_after_s;
    bool ask_for_key;          /* WWW-Authenticate */
    td_generation *generation; /* owned; with stream: the reply's body */
    bool stream;
    bool left;     /* the client is gone: no reply */
    bool sent_raw; /* refused beside libmicrohttpd, the connection closes */
};

/* routes.c */
const td_route *td_route_find(const char *path, const char **path_arg); /* never NULL; path "": there is none */
void td_route_allow(const td_route *route, char allow[64]);             /* "GET, HEAD" */

/* http.c: libmicrohttpd's callbacks; the daemon that calls them. */
td_status td_http_start(td_server *server, int listen_fd, td_error *err);

/* A complete response that closes the connection, ready for td_conn_refuse(). x may be NULL (no request is known). */
void td_http_closing_reply(const td_server *server, const td_call *x, const td_refusal *why, td_buf *out);

/* call.c: the reply of a call that does not stream. */
void td_call_done(td_call *x, int status, const char *content_type); /* x->reply holds the body */
void td_call_json(td_call *x);                                       /* 200, application/json */
void td_call_refuse(td_call *x, const td_refusal *why);

/* Parses x->body into the call's arena; the top level must be an object. NULL: refused already. */
const td_json *td_call_body(td_call *x);

/* Frees the body and everything parsed from it: a long reply should not hold a long prompt's text. */
void td_call_drop_body(td_call *x);

/* Random hex digits for ids: n_digits of them and a zero. */
void td_random_hex(char *out, int n_digits);

td_route_fn td_route_chat, td_route_completions, td_route_models, td_route_model, td_route_tokenize,
    td_route_detokenize, td_route_health, td_route_metrics, td_route_version, td_route_ping;

TD_END_C
#endif
