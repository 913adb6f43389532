/* The HTTP server: the OpenAI routes over one engine (docs/server.md; what clients may send: docs/api.md).
 *
 *     td_server *server;
 *     td_status st = td_server_create(&options, &server, err);    // listens at once: /health says "loading"
 *     td_server_progress(server, done, total);                    // while weights are read
 *     td_server_ready(server, engine);                            // from now on requests are taken
 *     ...
 *     td_server_stop(server, 30.0);                               // 503 for new requests, running ones finish
 *     td_server_destroy(server);
 *
 * Threads: one a connection, made by libmicrohttpd, and one for deadlines. Text, JSON and sockets are handled there and
 * never on the engine's thread. All functions may be called from any thread; create and destroy once. */
#ifndef TD_SERVER_SERVER_H
#define TD_SERVER_SERVER_H

#include "checkpoint/config.h"
#include "engine/engine.h"
#include "text/chat.h"
#include "text/tokenizer.h"

TD_BEGIN_C

typedef struct td_server td_server;

/* All pointers are borrowed until td_server_destroy(), but strings, which are copied. Zero in a number marked (0: x)
 * means x. */
typedef struct td_server_options {
    /* where */
    const char *host; /* address to bind, "127.0.0.1", "0.0.0.0", "::"; NULL: 127.0.0.1 */
    int port;         /* 0: any free one, see td_server_port() */

    /* what is served */
    const char *model_id;       /* the name clients see */
    const char *const *aliases; /* [n_aliases] further names of the same model */
    int n_aliases;
    const char *checkpoint;        /* "root" of /v1/models; NULL: model_id */
    const char *backend;           /* "cpu", "cuda": for /health */
    const char *version;           /* of this program */
    bool strict_model;             /* an unknown `model` is 404; otherwise it is accepted and echoed */
    int world;                     /* ranks: for /health; (0: 1) */
    const td_tokenizer *tokenizer; /* after td_chat_reserve_media() */
    const td_config *config;
    int32_t context_tokens; /* prompt + reply; the engine's */

    /* defaults of requests */
    double temperature, top_p; /* negative: the checkpoint's */
    int max_tokens;            /* (0: 32768) */
    td_chat_options chat;      /* reasoning effort, clear_thinking, ... */
    const int32_t *end_ids; /* [n_end_ids] ids that end a reply; NULL: config.eos and <|assistant|> and the role tags */
    int n_end_ids;

    /* who may ask; no key anywhere: everyone */
    const char *const *keys; /* [n_keys] from the command line: labels cli-1, cli-2, ... */
    int n_keys;
    const char *keys_env; /* comma-separated: labels env-1, ...; NULL: none */
    const char
        *keys_file;    /* a path: one key a line, optionally "label: key"; NULL: none. Read again when it changes. */
    bool metrics_open; /* /metrics without a key */

    /* behaviour */
    bool no_cors;               /* CORS headers are sent unless set */
    bool reasoning_both;        /* replies carry `reasoning` beside `reasoning_content` */
    double keepalive_s;         /* comment on a silent stream after; (0: 15); negative: never */
    int body_limit_bytes;       /* (0: 96 MiB) one request body */
    int64_t bodies_limit_bytes; /* (0: 256 MiB) all request bodies held at one time: further ones get 503 */
    int max_connections;        /* (0: 1024) further ones get 503 */

    /* limits of time, seconds */
    double header_timeout_s; /* (0: 30) for the whole header block */
    double body_timeout_s;   /* (0: 60) without a byte of the body */
    double write_timeout_s;  /* (0: 30) a reader that takes nothing while its buffer is full */
    double idle_timeout_s;   /* (0: 75) a kept connection without a request */
} td_server_options;

/* Binds and listens before it returns, in the state "loading": every route but /health, /ping and /version answers 503.
 * TD_EINVAL: an option; TD_EIO: the address is taken or not ours, the key file cannot be read; TD_EFORMAT: the key
 * file. */
td_status td_server_create(const td_server_options *options, td_server **out, td_error *err);

int td_server_port(const td_server *server); /* the port that is bound */

void td_server_progress(td_server *server, int64_t done, int64_t total); /* any unit; shown while loading */
void td_server_ready(td_server *server, td_engine *engine);    /* engine: borrowed until td_server_stop() returned */
void td_server_failed(td_server *server, const char *message); /* from now on /health is 503 "unhealthy" */

/* Takes no more connections and requests (503), lets running ones finish for at most limit_s, then cancels them: their
 * streams end with an error event. Returns once no request is left and the threads are joined; the engine is not used
 * any more. */
void td_server_stop(td_server *server, double limit_s);

/* Stops without waiting if td_server_stop() was not called. NULL is allowed. */
void td_server_destroy(td_server *server);

/* Reads the key file again now (SIGHUP; call it from a thread, not from a signal handler). */
void td_server_reload_keys(td_server *server);

TD_END_C
#endif
