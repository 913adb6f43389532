/* A reader for large JSON texts of a known shape: it walks the text once and builds nothing. A tokenizer.json holds
 * half a million strings; as a document tree they would cost seconds and hundreds of megabytes. Small parts are cut out
 * with td_json_scan_value() and read as a value (base/json.h).
 *
 *     td_json_scan s;
 *     td_json_scan_init(&s, data, n_bytes);
 *     for (bool more = td_json_scan_open(&s, '{'); more; more = td_json_scan_next(&s, '}')) {
 *         const char *key; size_t n;
 *         td_json_scan_key(&s, &key, &n);
 *         ... exactly one value: string, integer, value, or an inner loop ...
 *     }
 *     if (td_json_scan_end(&s) != TD_OK) ... s.message, s.offset ...
 *
 * The first mistake is kept; after it every call does nothing, loops end, and results are empty. */
#ifndef TD_TEXT_JSON_SCAN_H
#define TD_TEXT_JSON_SCAN_H

#include "base/status.h"

TD_BEGIN_C

#define TD_JSON_SCAN_DEPTH 64

typedef struct td_json_scan {
    const char *start, *p, *end;
    char *scratch; /* the last string, when it had escapes */
    size_t scratch_cap;
    td_status status;
    const char *message; /* what was wrong (static text), and where */
    size_t offset;
} td_json_scan;

void td_json_scan_init(td_json_scan *s, const char *data, size_t n_bytes);
void td_json_scan_deinit(td_json_scan *s);

/* The first byte of the next value, or 0 at the end or after a mistake. */
char td_json_scan_peek(td_json_scan *s);

/* Enters an object ('{') or array ('['); true when it has a member. next: after a member; close is '}' or ']'. */
bool td_json_scan_open(td_json_scan *s, char open);
bool td_json_scan_next(td_json_scan *s, char close);

/* A member's key and its colon; a string. The bytes live until the next call for a string. */
void td_json_scan_key(td_json_scan *s, const char **text, size_t *n_bytes);
void td_json_scan_string(td_json_scan *s, const char **text, size_t *n_bytes);

int64_t td_json_scan_integer(td_json_scan *s); /* a number with fraction or exponent is a mistake */

/* Passes over any one value (nested at most TD_JSON_SCAN_DEPTH deep); *text is where it stands. Escapes in strings are
 * not looked at: whoever reads the cut-out text will. */
void td_json_scan_value(td_json_scan *s, const char **text, size_t *n_bytes);

/* A mistake found by the caller: message is static. */
void td_json_scan_fail(td_json_scan *s, td_status status, const char *message);

/* Only white space may follow. Returns the status of the whole. */
td_status td_json_scan_end(td_json_scan *s);

TD_END_C
#endif
