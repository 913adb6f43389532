/* A client of the OpenAI-compatible API for the commands: JSON in and out, and event streams. One client belongs to one
 * thread; it keeps its connection between calls.
 *
 * The API key goes into a header and nowhere else: no message and no log line ever shows it. A server on this machine
 * is reached directly, whatever proxy the environment names. Redirects are not followed: a key must not wander. */
#ifndef TD_CLI_CLIENT_H
#define TD_CLI_CLIENT_H

#include "base/json.h"
#include "base/settings.h"
#include "cli/sse.h"

TD_BEGIN_C

typedef struct td_client td_client;

/* Asked about ten times a second while a call runs: true ends it. For what a signal handler has noted. */
typedef bool td_client_stop_fn(void);

/* Rows for a command's settings table. */
#define TD_CLIENT_KEY_SETTING                                                                                          \
    {                                                                                                                  \
        .name = "api-key", .kind = TD_SETTING_TEXT, .fallback = "", .value = "KEY",                                    \
        .help = "key of the server; default: the environment's TANDEM_API_KEY"                                         \
    }

/* url: "http://host:8888", with or without "/v1" or a slash at the end; "host:8888" means http. key: NULL or "" means
 * the environment's TANDEM_API_KEY, and no key when that is missing too. stop: NULL, or what
 * ends a call in progress with TD_ECANCELED. TD_EINVAL: the URL or the key. */
td_status td_client_open(const char *url, const char *key, td_client_stop_fn *stop, td_client **out, td_error *err);
void td_client_close(td_client *client); /* NULL is allowed */

/* "http://host:8888": without path. */
const char *td_client_base(const td_client *client);

typedef struct td_client_reply {
    int status;          /* of HTTP; 0: nothing came */
    const td_json *json; /* the body */
    double wall_s;
    td_buf body;
    td_arena arena;
} td_client_reply;

/* path: "/v1/models". body NULL: GET. limit_s: for all of it. Fails also for a status other than 2xx (err carries the
 * server's own words) and for a body that is not JSON. *reply is valid after success only; then free it. */
td_status td_client_call(td_client *client, const char *path, const td_buf *body, double limit_s,
                         td_client_reply *reply, td_error *err);
void td_client_reply_free(td_client_reply *reply);

/* POST that answers with events; "[DONE]" is delivered as any other. Returns TD_OK at the stream's end, or once the
 * callback returned false. silent_s: a stream without a byte for that long is TD_ETIMEOUT (servers send keep-alive
 * comments). */
td_status td_client_stream(td_client *client, const char *path, const td_buf *body, double silent_s, td_event_fn *event,
                           void *user, td_error *err);

/* The first id of /v1/models into id. */
td_status td_client_model(td_client *client, char *id, size_t cap_bytes, td_error *err);

TD_END_C
#endif
