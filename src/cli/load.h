/* Requests with a stopwatch: several at once, each on a connection and thread of its own, streamed, timed by this
 * side's clock. */
#ifndef TD_CLI_LOAD_H
#define TD_CLI_LOAD_H

#include "base/buf.h"

TD_BEGIN_C

enum { TD_LOAD_MAX = 64 }; /* requests at once */

typedef struct td_load_request {
    const char *path; /* "/v1/completions", "/v1/chat/completions" */
    td_buf body;      /* with "stream": true and usage asked for; the caller's */
    /* what came of it; times in seconds from the common start */
    td_status status;
    td_error err;
    double sent_s, first_s, last_s; /* first: of the first text */
    int64_t prompt_tokens, cached_tokens, completion_tokens;
    double prefill_s, decode_s; /* by the server's own clock; -1: it does not say */
} td_load_request;

/* Sends all at once and waits for all. TD_OK: every request's outcome is in its own status; else nothing was sent.
 * silent_s: as of td_client_stream. */
td_status td_load_run(const char *url, const char *key, td_load_request *requests, int n, double silent_s,
                      td_error *err);

TD_END_C
#endif
