/* Splitting text into pieces before BPE, as the file's pre_tokenizer says. Pieces tile the text.
 * Two ways: the pattern of the GLM, Qwen and Llama 3 families has a splitter of its own (faster than a regular
 * expression engine, and with the Unicode version of the reference); any other pattern goes through PCRE2. */
#ifndef TD_TEXT_PRETOKENIZE_H
#define TD_TEXT_PRETOKENIZE_H

#include "base/status.h"
#include "text/unicode.h"

TD_BEGIN_C

typedef struct td_splitter td_splitter; /* immutable, shared by threads */

/* pattern: a regular expression, or with literal the text itself. unicode is borrowed. TD_EUNSUPPORTED: PCRE2 does not
 * take it, err says why. */
td_status td_splitter_create(const td_unicode *unicode, const char *pattern, size_t n_bytes, bool literal,
                             td_splitter **out, td_error *err);
void td_splitter_destroy(td_splitter *splitter);

/* True when the pattern is the one that pretokenize.c knows by heart. */
bool td_splitter_is_native(const td_splitter *splitter);

/* One walk over one text. The text must stay until deinit. */
typedef struct td_split_walk {
    const td_splitter *splitter;
    const unsigned char *start, *p, *end;
    char *masked;                                 /* PCRE2 only: a copy of a text that is not valid UTF-8 */
    void *match, *context;                        /* PCRE2 only */
    const unsigned char *match_start, *match_end; /* PCRE2 only: found, not yet handed out; NULL: none */
} td_split_walk;

td_status td_split_walk_init(td_split_walk *walk, const td_splitter *splitter, const char *text, size_t n_bytes);
void td_split_walk_deinit(td_split_walk *walk);

/* The next piece: *n_bytes > 0, or 0 at the end. TD_EINVAL: the pattern took too many steps; TD_ENOMEM. */
td_status td_split_walk_next(td_split_walk *walk, const char **piece, size_t *n_bytes);

TD_END_C
#endif
