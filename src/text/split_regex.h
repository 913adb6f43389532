/* The splitter for patterns that pretokenize.c does not know: PCRE2 with its just-in-time compiler. */
#ifndef TD_TEXT_SPLIT_REGEX_H
#define TD_TEXT_SPLIT_REGEX_H

#include "text/pretokenize.h"

TD_BEGIN_C

typedef struct td_split_regex td_split_regex;

td_status td_split_regex_create(const char *pattern, size_t n_bytes, bool literal, td_split_regex **out, td_error *err);
void td_split_regex_destroy(td_split_regex *regex);

/* The parts of a walk (pretokenize.h) that need the engine. */
td_status td_split_regex_start(const td_split_regex *regex, td_split_walk *walk);
void td_split_regex_stop(td_split_walk *walk);
td_status td_split_regex_piece_end(const td_split_regex *regex, td_split_walk *walk, const unsigned char **after);

TD_END_C
#endif
