/* A reply's text, token by token, split into reasoning and content, and ended by stop strings.
 *
 * The split goes by token ids: the think block ends at the token </think>, and the same characters spelled with other
 * tokens are reasoning like any other text (that is how grammars see it too, which know only ids). Without ids
 * (end_think < 0) it goes by the text, holding back what may be the beginning of the tag.
 *
 * What comes out is the same for every grouping of tokens into steps. All reasoning precedes all content: once content
 * has begun, <think> and </think> are plain text. Stop strings are looked for in the whole text as it was generated,
 * reasoning and tags included. States: docs/chat.md "Splitting the reply". */
#ifndef TD_TEXT_REASONING_H
#define TD_TEXT_REASONING_H

#include "base/buf.h"
#include "text/stop.h"

TD_BEGIN_C

/* Where in a reply the prompt ended. */
typedef enum td_reply_start {
    TD_REPLY_IN_REASONING, /* after <think> */
    TD_REPLY_AT_ANSWER,    /* after </think>: leading line feeds are dropped, a first <think> opens a think block */
    TD_REPLY_IN_ANSWER     /* inside a text that is continued, or no chat at all: nothing is dropped */
} td_reply_start;

/* Token ids from tokenizer.json; -1 where it has none. */
typedef struct td_reply_ids {
    int32_t think, end_think;
    int32_t begin_box, end_box; /* <|begin_of_box|>, <|end_of_box|>: dropped from an answer, what they enclose stays */
} td_reply_ids;

typedef struct td_reasoning {
    td_reply_ids ids;
    td_stop *stop;      /* borrowed; NULL: no stop strings */
    int state;          /* private, as all below */
    int tag_matched;    /* text form: bytes of the tag seen at the end of the text */
    bool may_open;      /* a first <think> opens a think block */
    td_buf held, kinds; /* text not given out yet, and for every byte of it what it is */
    int64_t n_reasoning_tokens;
    int stopped_by; /* index of the stop string, -1: none yet */
} td_reasoning;

void td_reasoning_init(td_reasoning *split, td_reply_start start, const td_reply_ids *ids, td_stop *stop);
void td_reasoning_deinit(td_reasoning *split);

/* One token and the text it completes (whole characters; may be empty; a tag's text included). Appends what is certain
 * to reasoning and content; a caller that streams sends reasoning first, in a chunk of its own. may_stop = false: a
 * stop string that is complete with this token does not count (min_tokens). Returns true once a stop string has ended
 * the reply: the rest of the text is omitted, further calls do nothing. */
bool td_reasoning_feed(td_reasoning *split, int32_t id, const char *text, size_t n_bytes, bool may_stop,
                       td_buf *reasoning, td_buf *content);

/* The reply is over: appends what was held back. */
void td_reasoning_finish(td_reasoning *split, td_buf *reasoning, td_buf *content);

/* Tokens of the think block, </think> included. */
int64_t td_reasoning_tokens(const td_reasoning *split);

/* Index of the stop string that ended the reply, or -1. */
int td_reasoning_stopped_by(const td_reasoning *split);

/* Is the reply still in its think block? */
bool td_reasoning_open(const td_reasoning *split);

TD_END_C
#endif
