/* JSON from outside: request bodies, tool arguments, and whatever else arrives over the wire.
 *
 * Own reader because a prompt must show numbers as they were sent: 1 and 1.0 differ, and an integer keeps its digits at
 * any size. A value of type number therefore keeps its text and is converted only when asked.
 *
 * Strict RFC 8259 with four decisions:
 *   - a byte order mark at the start is skipped; everything else must be valid UTF-8;
 *   - an escaped lone surrogate (\ud800) becomes U+FFFD, because no UTF-8 text can hold it;
 *   - of members with the same name the last value counts, at the place of the first (Python's dict does the same);
 *   - at most TD_JSON_MAX_DEPTH levels and TD_JSON_MAX_VALUES values, so that hostile input costs bounded memory.
 * Reading is linear in the input but for objects with many members, which are sorted once: n log n, and looking up a
 * name in them is a binary search, so that no request can make the server quadratic.
 *
 * Files (config.json, tokenizer.json) go through the same reader, but strictly: td_json_parse_file.
 *
 * The text is rewritten in place (escapes get shorter) and strings point into it: it must live as long as the values.
 * Values live in the arena, are never changed after parsing and may be read by any thread. */
#ifndef TD_BASE_JSON_H
#define TD_BASE_JSON_H

#include "base/arena.h"

TD_BEGIN_C

#define TD_JSON_MAX_DEPTH  256
#define TD_JSON_MAX_VALUES (4u << 20) /* 4,194,304: a 1M-token prompt as ids fits several times */

typedef enum td_json_kind {
    TD_JSON_ABSENT, /* what td_json_kind_of says of NULL */
    TD_JSON_NULL,
    TD_JSON_FALSE,
    TD_JSON_TRUE,
    TD_JSON_INT,  /* a number without '.', 'e', 'E' */
    TD_JSON_REAL, /* any other number */
    TD_JSON_STRING,
    TD_JSON_ARRAY,
    TD_JSON_OBJECT
} td_json_kind;

typedef struct td_json td_json;

/* Reads one value from text[0..n_bytes); text must have room for one more byte at text[n_bytes], which is set to zero.
 * TD_EFORMAT: not JSON, or over a limit: err says what and at which byte. TD_ENOMEM: the arena is full. *value is
 * untouched after a failure (the text is not). */
td_status td_json_parse(td_arena *arena, char *text, size_t n_bytes, const td_json **value, td_error *err);

/* The same for text that people write and that is kept: it is copied to the arena first, one name twice in an object is
 * a mistake, and mistakes are named by line: "line 3: ',' or '}' expected". */
td_status td_json_parse_file(td_arena *arena, const char *text, size_t n_bytes, const td_json **value, td_error *err);

/* All of these take NULL as "not there" and answer 0, NULL or TD_JSON_ABSENT, so that paths need no checks between. */
td_json_kind td_json_kind_of(const td_json *value);
bool td_json_is_null(const td_json *value);          /* absent or null: the same for every optional field */
const char *td_json_kind_name(const td_json *value); /* "a string", "an object", ...: for messages */

/* Members and elements. count: of an array or object, else 0. */
size_t td_json_count(const td_json *value);
const td_json *td_json_at(const td_json *value, size_t i);                    /* i-th element, or i-th member's value */
const char *td_json_key_at(const td_json *object, size_t i, size_t *n_bytes); /* i-th member's name, zero-terminated */
const td_json *td_json_get(const td_json *object, const char *name);          /* NULL: no object, no such member */
const td_json *td_json_get_n(const td_json *object, const char *name, size_t n_bytes);

/* Strings: UTF-8, zero-terminated, but they may hold zero bytes (\u0000): *n_bytes counts (NULL is allowed). */
const char *td_json_string(const td_json *value, size_t *n_bytes); /* NULL: not a string */
bool td_json_equals(const td_json *value, const char *text);       /* a string with exactly this text? */

/* Numbers. Text: as it was sent, not zero-terminated. int64: also from a real with an integral value up to 2^53;
 * double: nearest value, infinite when too large. TD_EINVAL: not a number, or not representable; *out is untouched. */
const char *td_json_number_text(const td_json *value, size_t *n_bytes); /* NULL: not a number */
td_status td_json_int64(const td_json *value, int64_t *out);
td_status td_json_double(const td_json *value, double *out);

/* TD_EINVAL when the value is neither true nor false. */
td_status td_json_bool(const td_json *value, bool *out);

TD_END_C
#endif
