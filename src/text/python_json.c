/* See python_json.h. Strings are escaped like in replies: json_write.h does exactly what Python does. */
#include "text/python_json.h"

#include "base/json_write.h"

#include <math.h>
#include <string.h>

static void put_number(td_buf *out, const td_json *value)
{
    size_t n_bytes;
    const char *digits = td_json_number_text(value, &n_bytes);
    char text[TD_REPR_CAP];
    double x;
    if (td_json_kind_of(value) == TD_JSON_INT) {
        bool minus_zero = n_bytes == 2 && memcmp(digits, "-0", 2) == 0;
        td_buf_add(out, digits + minus_zero, n_bytes - minus_zero);
    } else if (td_json_double(value, &x) == TD_OK) {
        if (isinf(x))
            td_buf_puts(out, x < 0 ? "-Infinity" : "Infinity");
        else
            td_buf_add(out, text, (size_t)td_double_repr(x, text));
    }
}

/* As deep as the reader allows: TD_JSON_MAX_DEPTH levels of recursion. */
static void put_container(td_buf *out, const td_json *value)
{
    bool object = td_json_kind_of(value) == TD_JSON_OBJECT;
    td_buf_putc(out, object ? '{' : '[');
    for (size_t i = 0; i < td_json_count(value); i++) {
        if (i) td_buf_add(out, ", ", 2);
        if (object) {
            size_t n_bytes;
            const char *key = td_json_key_at(value, i, &n_bytes);
            td_json_escape(out, key, n_bytes);
            td_buf_add(out, ": ", 2);
        }
        td_python_json(out, td_json_at(value, i));
    }
    td_buf_putc(out, object ? '}' : ']');
}

void td_python_json(td_buf *out, const td_json *value)
{
    size_t n_bytes;
    const char *text;
    switch (td_json_kind_of(value)) {
    case TD_JSON_ABSENT:
    case TD_JSON_NULL: td_buf_puts(out, "null"); break;
    case TD_JSON_FALSE: td_buf_puts(out, "false"); break;
    case TD_JSON_TRUE: td_buf_puts(out, "true"); break;
    case TD_JSON_INT:
    case TD_JSON_REAL: put_number(out, value); break;
    case TD_JSON_STRING:
        text = td_json_string(value, &n_bytes);
        td_json_escape(out, text, n_bytes);
        break;
    case TD_JSON_ARRAY:
    case TD_JSON_OBJECT: put_container(out, value); break;
    }
}
