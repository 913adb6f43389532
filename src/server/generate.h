/* From a prompt to a reply: admission, the wait for tokens, and the two ways a reply leaves: whole, or as events of a
 * stream. How it is written in JSON is the route's (td_form). Internal. */
#ifndef TD_SERVER_GENERATE_H
#define TD_SERVER_GENERATE_H

#include "server/core.h"
#include "server/logprobs.h"
#include "server/params.h"
#include "server/reply.h"

#include <sys/types.h>

TD_BEGIN_C

typedef enum td_delta { TD_DELTA_REASONING, TD_DELTA_CONTENT } td_delta;

/* A route's way to write. The stream functions append complete events to g->out. */
typedef struct td_form {
    const char *id_prefix;    /* "chatcmpl-" */
    const char *prompt_param; /* the field to blame for a prompt that is too long: "messages" */
    const char *chunk_object; /* "object" of a stream's chunks: "chat.completion.chunk" */
    void (*begin)(td_generation *g);
    void (*delta)(td_generation *g, td_delta kind, const td_buf *text);
    void (*finish)(td_generation *g);
    void (*whole)(td_generation *g); /* into g->x->reply */
} td_form;

struct td_generation {
    td_call *x;
    const td_form *form;
    td_params params;
    td_arena arena; /* what params point to */
    td_request *request;
    td_reply reply;
    td_logprobs logprobs;
    char id[64];
    int64_t created_s;
    td_ids prompt;
    int max_tokens; /* cut to the window */
    int32_t end_ids[TD_STOP_IDS_MAX];
    int n_end_ids;

    td_refusal broken; /* status 0: nothing went wrong */
    td_buf out;        /* stream: events not sent yet */
    size_t n_out_sent;
    bool begun, closed; /* stream: first and last event were written */
    size_t n_ids_sent;  /* stream: of reply.ids, with return_token_ids */
    int64_t wrote_ns, tokens_ns, first_token_ns;
};

/* A generation for the route to fill: params (with their strings in g->arena) and prompt. The call owns it. NULL:
 * refused already. */
td_generation *td_generation_create(td_call *x, const td_form *form);
void td_generation_destroy(td_generation *g); /* cancels what still runs, and counts; NULL is allowed */

/* Checks the prompt against the window, submits, and then either waits for the whole reply or leaves a stream. start,
 * ids: how the reply's text is split. Whatever happens, the call has its answer. */
void td_generation_run(td_generation *g, td_reply_start start, const td_reply_ids *ids);

/* Next bytes of the stream, as libmicrohttpd wants them: waits until there are some. */
ssize_t td_generation_read(td_generation *g, char *out, size_t cap);

/* How it ended or stands, for metrics and the log: "stop", "length", "error", "canceled". */
const char *td_generation_status(const td_generation *g);

/* Parts of a reply that all forms share. */
void td_write_head(td_generation *g, td_json_writer *w, const char *object); /* id, object, created, model */
void td_write_chunk_usage(td_generation *g,
                          td_json_writer *w);              /* of a chunk before the last, where usage is asked for */
void td_write_usage(td_generation *g, td_json_writer *w);  /* {"prompt_tokens": ...} */
void td_write_timing(td_generation *g, td_json_writer *w); /* key and value of "tandem" */
void td_write_stop_reason(td_generation *g, td_json_writer *w); /* key and value of "stop_reason" */
void td_write_ids(td_json_writer *w, const char *key, const int32_t *ids, size_t n);

/* One event: opens "data: {" with the head, closes with an empty line. */
void td_sse_open(td_generation *g, td_json_writer *w);
void td_sse_close(td_generation *g, td_json_writer *w);

/* After the last choice: usage, timing, [DONE]. */
void td_sse_finish(td_generation *g, td_json_writer *w);

TD_END_C
#endif
