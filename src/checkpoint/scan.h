/* A JSON scanner for the two large JSON texts of a checkpoint (shard headers and the index): walks the text once,
 * builds nothing, allocates nothing. Inside src/checkpoint only; config.json, small and irregular, goes through
 * base/json.h. */
#ifndef TD_CHECKPOINT_SCAN_H
#define TD_CHECKPOINT_SCAN_H

#include "base/status.h"

TD_BEGIN_C

typedef struct td_scan {
    const char *begin, *at, *end; /* no terminating zero is needed */
} td_scan;

typedef struct td_scan_text {
    const char *data; /* between the quotes, escapes left as they are */
    size_t n_bytes;
    bool plain; /* printable ASCII without escapes: the bytes are the string */
} td_scan_text;

/* All of them skip white space first; on false the text is not what was asked for and s->at stands at the place. */
bool td_scan_char(td_scan *s, char c); /* consumes c if it comes next */
bool td_scan_string(td_scan *s, td_scan_text *out);
bool td_scan_u64(td_scan *s, uint64_t *out); /* digits only: no sign, fraction or exponent; false on overflow */
bool td_scan_skip(td_scan *s);               /* any value, nested at most TD_SCAN_DEPTH_MAX deep */
bool td_scan_end(td_scan *s);                /* nothing but white space is left */

#define TD_SCAN_DEPTH_MAX 32

static inline bool td_scan_is(td_scan_text text, const char *word, size_t n_bytes)
{
    return text.n_bytes == n_bytes && __builtin_memcmp(text.data, word, n_bytes) == 0;
}

TD_END_C
#endif
