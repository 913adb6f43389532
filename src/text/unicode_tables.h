/* Unicode data as sorted tables; unicode_tables.c is generated (its head says how). unicode.h is the way to use it. */
#ifndef TD_TEXT_UNICODE_TABLES_H
#define TD_TEXT_UNICODE_TABLES_H

#include "base/status.h"

TD_BEGIN_C

typedef struct td_unicode_range {
    uint32_t first, last; /* both included */
} td_unicode_range;

typedef struct td_unicode_combining {
    uint32_t first, last;
    uint8_t combining_class; /* never 0 */
} td_unicode_combining;

typedef struct td_unicode_triple {
    uint32_t a, b, c;
} td_unicode_triple;

typedef struct td_unicode_tables {
    const td_unicode_range *letter, *number, *space, *word;
    size_t n_letter, n_number, n_space, n_word;
    const td_unicode_combining *combining;
    size_t n_combining;
    const td_unicode_triple *decompositions; /* a = b c by one canonical step; c == 0: a = b */
    size_t n_decompositions;
    const td_unicode_triple *compositions; /* a b = c */
    size_t n_compositions;
} td_unicode_tables;

const td_unicode_tables *td_unicode_tables_get(void);

TD_END_C
#endif
