/* Log probabilities of a reply's tokens in the two JSON forms clients know. Kept as text, because a long reply with
 * twenty alternatives a token would be megabytes of numbers otherwise. Internal. */
#ifndef TD_SERVER_LOGPROBS_H
#define TD_SERVER_LOGPROBS_H

#include "base/json_write.h"
#include "engine/engine.h"
#include "text/tokenizer.h"

TD_BEGIN_C

typedef enum td_logprobs_form {
    TD_LOGPROBS_NONE,
    TD_LOGPROBS_CHAT, /* {"content":[{"token","logprob","bytes","top_logprobs":[...]}],"refusal":null} */
    TD_LOGPROBS_TEXT  /* {"tokens":[],"token_logprobs":[],"top_logprobs":[{}],"text_offset":[]} */
} td_logprobs_form;

typedef struct td_logprobs {
    td_logprobs_form form;
    int n_top;       /* alternatives a token, as asked */
    int n_tokens;    /* not yet written */
    td_buf lists[4]; /* elements with commas between; the chat form uses the first only */
    td_buf text;     /* scratch */
    int64_t offset;  /* characters of the reply so far */
} td_logprobs;

void td_logprobs_init(td_logprobs *logprobs, td_logprobs_form form, int n_top);
void td_logprobs_deinit(td_logprobs *logprobs);
void td_logprobs_add(td_logprobs *logprobs, const td_tokenizer *tokenizer, const td_token *token);

/* The value of the member "logprobs": what was added since the last write, null when that is nothing. */
void td_logprobs_write(td_logprobs *logprobs, td_json_writer *w);
bool td_logprobs_failed(const td_logprobs *logprobs); /* out of memory */

TD_END_C
#endif
