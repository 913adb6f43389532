/* Whether an answer looks like language at all. A model with damaged weights answers 200 OK and "!!!!!!!!"; a smoke
 * test that takes any 200 would call that a success. */
#ifndef TD_CLI_JUDGE_H
#define TD_CLI_JUDGE_H

#include "base/status.h"

TD_BEGIN_C

/* The answer without white space at both ends: a part of text. */
const char *td_judge_trim(const char *text, size_t n_bytes, size_t *n_trimmed);

/* TD_EFORMAT: empty after trimming, or 8 or more characters of at most 2 kinds; err says which. */
td_status td_judge_answer(const char *text, size_t n_bytes, td_error *err);

/* Bytes of the first n_chars characters of UTF-8 text. */
size_t td_judge_prefix(const char *text, size_t n_bytes, int n_chars);

TD_END_C
#endif
