/* JSON to outside, written straight into a td_buf: no tree is built. Commas are put by the writer; the caller keeps
 * begin and end, key and value in order (a reply's shape is fixed in code, so nothing checks it at run time).
 *
 *     td_json_writer w = { .out = &buf };
 *     td_json_write_begin(&w, '{');
 *     td_json_write_key(&w, "id");
 *     td_json_write_text(&w, id);
 *     td_json_write_end(&w, '}');
 *
 * Compact form, non-ASCII literal. What comes out is always valid UTF-8 and always valid JSON: ill-formed bytes become
 * U+FFFD, infinite numbers and NaN become null. Failure (no memory) shows in buf.failed. */
#ifndef TD_BASE_JSON_WRITE_H
#define TD_BASE_JSON_WRITE_H

#include "base/buf.h"
#include "base/json.h"

TD_BEGIN_C

typedef struct td_json_writer {
    td_buf *out;
    bool comma; /* the next key or value is not the first of its container */
} td_json_writer;

void td_json_write_begin(td_json_writer *w, char bracket); /* '{' or '[' */
void td_json_write_end(td_json_writer *w, char bracket);   /* '}' or ']' */
void td_json_write_key(td_json_writer *w, const char *name);
void td_json_write_string(td_json_writer *w, const char *text, size_t n_bytes);
void td_json_write_text(td_json_writer *w, const char *text); /* zero-terminated; NULL writes null */
void td_json_write_int(td_json_writer *w, int64_t x);
void td_json_write_uint(td_json_writer *w, uint64_t x);
void td_json_write_double(td_json_writer *w, double x); /* shortest digits that read back to the same double */
void td_json_write_bool(td_json_writer *w, bool x);
void td_json_write_null(td_json_writer *w);
void td_json_write_raw(td_json_writer *w, const char *json, size_t n_bytes); /* already JSON */
void td_json_write_value(td_json_writer *w, const td_json *value);           /* compact; numbers as they were sent */

/* key and value in one call: what most members are. */
void td_json_write_member_text(td_json_writer *w, const char *name, const char *text);
void td_json_write_member_int(td_json_writer *w, const char *name, int64_t x);
void td_json_write_member_bool(td_json_writer *w, const char *name, bool x);

/* "text" with quotes: escapes " \ and U+0000-001F (\b \f \n \r \t, else \u00xx), nothing else. */
void td_json_escape(td_buf *out, const char *text, size_t n_bytes);

/* Digits of x as Python's repr: shortest that reads back, "1.0", "1e-07", "inf", "nan". Returns the length. */
#define TD_REPR_CAP 32
int td_double_repr(double x, char out[TD_REPR_CAP]);

TD_END_C
#endif
