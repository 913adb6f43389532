/* A conversation as a client holds it: turns, the request that continues it, and what the pieces of a streamed reply
 * say. No terminal here. */
#ifndef TD_CLI_CONVERSATION_H
#define TD_CLI_CONVERSATION_H

#include "base/buf.h"
#include "base/json.h"

TD_BEGIN_C

typedef struct td_turn {
    char *user, *content, *reasoning; /* reasoning: sent back as the model's own thoughts; "" when there was none */
} td_turn;

typedef struct td_conversation {
    td_turn *turns;
    int n_turns, cap;
    char *system;       /* NULL: none */
    const char *model;  /* borrowed, as are the next */
    const char *effort; /* NULL: the server's default */
    int64_t max_tokens; /* 0: the server's default */
    double temperature; /* negative: the server's default */
} td_conversation;

void td_conversation_deinit(td_conversation *conversation);
void td_conversation_clear(td_conversation *conversation); /* forgets the turns, keeps the rest */
td_status td_conversation_system(td_conversation *conversation, const char *text); /* NULL or "": none */

/* Ends a turn: what was asked and what came. */
td_status td_conversation_add(td_conversation *conversation, const char *user, const char *content,
                              const char *reasoning);

/* The streaming request that asks `user` next. */
void td_conversation_request(const td_conversation *conversation, const char *user, td_buf *out);

/* What one event of the stream carries. Strings point into the event. */
typedef struct td_chat_piece {
    const char *content, *reasoning; /* NULL: none in this event */
    const char *finish;              /* "stop", "length", ...; NULL: it goes on */
    int64_t completion_tokens;       /* -1: not said here */
    bool done;                       /* "[DONE]" */
} td_chat_piece;

/* data is changed. TD_EFORMAT: not a chunk of this API; TD_EIO: the server ended the reply with an error (err has its
 * words). */
td_status td_chat_piece_read(td_arena *arena, char *data, size_t n_bytes, td_chat_piece *out, td_error *err);

TD_END_C
#endif
