/* From the tokens of a reply to its text: whole characters, reasoning apart from content, stop strings and end tokens
 * taken out. Streamed and whole replies go through the same code, so they cannot differ. Knows no HTTP. Internal. */
#ifndef TD_SERVER_REPLY_H
#define TD_SERVER_REPLY_H

#include "engine/engine.h"
#include "text/reasoning.h"
#include "text/tokenizer.h"
#include "text/utf8_stream.h"

TD_BEGIN_C

typedef enum td_reply_end {
    TD_REPLY_RUNNING,
    TD_REPLY_STOP,   /* an end token, a stop token or a stop string */
    TD_REPLY_LENGTH, /* the limit or the window */
    TD_REPLY_BROKEN  /* canceled or failed: what there is, is not the reply */
} td_reply_end;

typedef struct td_reply_options {
    const td_tokenizer *tokenizer;
    td_reply_start start;
    td_reply_ids ids;       /* all -1: no split, everything is content */
    td_stop *stop;          /* borrowed; may have no strings */
    const int32_t *end_ids; /* [n_end_ids] borrowed: no text, end of the reply */
    int n_end_ids;
    int min_tokens;    /* stop strings do not count before that many tokens */
    bool no_reasoning; /* reasoning text is dropped (its tokens count) */
} td_reply_options;

typedef struct td_reply {
    td_reply_options options;
    td_utf8_stream utf8;
    td_reasoning split;
    td_buf reasoning, content; /* text that is certain; a streaming caller empties them */
    td_buf text;               /* scratch */
    td_ids ids;                /* every counted token */
    td_reply_end end;
    int stop_string;          /* index, -1: none */
    int32_t end_id;           /* the token that ended it, -1: none */
    int64_t reasoning_tokens; /* final once ended */
    bool failed;              /* out of memory */
} td_reply;

void td_reply_init(td_reply *reply, const td_reply_options *options);
void td_reply_deinit(td_reply *reply);

/* One more token. true: the reply has ended (further tokens are not the reply's any more). */
bool td_reply_feed(td_reply *reply, int32_t id);

/* The engine has no more tokens; does nothing after an end by feed. */
void td_reply_finish(td_reply *reply, td_finish finish);

/* "stop", "length"; NULL while running or broken. */
const char *td_reply_reason(const td_reply *reply);

/* Digest of the counted ids: the first 16 hex digits of SHA-256 over them as little-endian 32-bit numbers. */
enum { TD_TOKEN_SHA_CAP = 17 };
void td_reply_sha(const td_reply *reply, char out[TD_TOKEN_SHA_CAP]);

/* Text of one token alone, U+FFFD where it is not whole characters. */
void td_token_text(const td_tokenizer *tokenizer, int32_t id, td_buf *out);

TD_END_C
#endif
