/* Added tokens: whole strings that become one id wherever they stand in a text, before anything else happens to it. */
#ifndef TD_TEXT_ADDED_TOKENS_H
#define TD_TEXT_ADDED_TOKENS_H

#include "base/status.h"
#include "text/unicode.h"

TD_BEGIN_C

#define TD_ADDED_MAX_BYTES 512 /* of a token's content */

typedef struct td_added_token {
    char *content;
    size_t n_bytes;
    int32_t id;
    bool special;
    bool single_word; /* not where a word character stands on either side */
    bool lstrip;      /* takes the white space before it along */
    bool rstrip;      /* and behind it */
    bool normalized;  /* searched for in the normalized text, in what the others have left */
    bool reserved;    /* td_tokenizer_reserve() */
} td_added_token;

typedef struct td_added_tokens {
    td_added_token *tokens;
    size_t n, cap;
    uint32_t *order;            /* [n] tokens by content, so that those with a common prefix are neighbours */
    uint32_t first_of[256 + 1]; /* order[first_of[b] .. first_of[b + 1]): contents that start with byte b */
} td_added_tokens;

void td_added_tokens_init(td_added_tokens *set);
void td_added_tokens_deinit(td_added_tokens *set);

/* Copies content (1 .. TD_ADDED_MAX_BYTES bytes). TD_ENOMEM. */
td_status td_added_tokens_add(td_added_tokens *set, const td_added_token *token, const char *content, size_t n_bytes);

/* After the last add, before any look-up. TD_ENOMEM; TD_EINVAL: two tokens have the same content. */
td_status td_added_tokens_index(td_added_tokens *set);

const td_added_token *td_added_tokens_find(const td_added_tokens *set, const char *content, size_t n_bytes);

/* A place where a token stands: text[start .. end), strips included. token NULL: there is none up to the text's end. */
typedef struct td_added_match {
    const td_added_token *token;
    size_t start, end;
} td_added_match;

/* The next token from *pos on: the leftmost, of those the longest. Moves *pos behind it. Text before `taken` belongs to
 * the token before this one and is not stripped again. */
td_added_match td_added_tokens_next(const td_added_tokens *set, const td_unicode *unicode, const char *text,
                                    size_t n_bytes, bool with_reserved, size_t *pos, size_t taken);

TD_END_C
#endif
