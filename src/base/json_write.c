/* See json_write.h. */
#include "base/json_write.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- numbers ---- */

/* text is "d.ddde+xx": its last digit one up. False where that carries out of the first digit. */
static bool next_decimal(char *text)
{
    for (char *c = strchr(text, 'e') - 1; c >= text; c--) {
        if (*c == '.') continue;
        if (*c != '9') {
            ++*c;
            return true;
        }
        *c = '0';
    }
    return false;
}

/* Fewest digits that read back to x > 0, and the decimal exponent of the first. printf rounds correctly, so the nearest
 * decimal of k digits is tried for growing k. At powers of two the gap above x is twice the gap below, and the next
 * decimal up may read back where the nearest does not. */
static int shortest_digits(double x, char digits[24], int *exponent)
{
    char text[40];
    int unused;
    bool power_of_two = frexp(x, &unused) == 0.5;
    for (int k = 0; k < 17; k++) {
        snprintf(text, sizeof text, "%.*e", k, x);
        if (strtod(text, NULL) == x) break;
        if (power_of_two && next_decimal(text) && strtod(text, NULL) == x) break;
    }
    char *mark = strchr(text, 'e');
    *exponent = (int)strtol(mark + 1, NULL, 10);
    int n = 0;
    for (char *c = text; c < mark; c++)
        if (*c != '.') digits[n++] = *c;
    while (n > 1 && digits[n - 1] == '0') n--;
    return n;
}

static int put_zeros(char *out, int n)
{
    for (int i = 0; i < n; i++) out[i] = '0';
    return n > 0 ? n : 0;
}

int td_double_repr(double x, char out[TD_REPR_CAP])
{
    if (isnan(x)) return snprintf(out, TD_REPR_CAP, "nan");
    if (isinf(x)) return snprintf(out, TD_REPR_CAP, x < 0 ? "-inf" : "inf");
    char digits[24];
    int exponent, n = 0, n_digits = shortest_digits(fabs(x), digits, &exponent);
    if (signbit(x)) out[n++] = '-';
    if (exponent < -4 || exponent >= 16) {
        out[n++] = digits[0];
        if (n_digits > 1) out[n++] = '.';
        memcpy(out + n, digits + 1, (size_t)n_digits - 1);
        n += n_digits - 1;
        return n + snprintf(out + n, TD_REPR_CAP - (size_t)n, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
    }
    int n_whole = exponent + 1; /* digits before the point, if positive */
    if (n_whole <= 0) {
        memcpy(out + n, "0.", 2);
        n += 2;
        n += put_zeros(out + n, -n_whole);
        n_whole = 0;
    } else {
        int n_given = n_whole < n_digits ? n_whole : n_digits;
        memcpy(out + n, digits, (size_t)n_given);
        n += n_given;
        n += put_zeros(out + n, n_whole - n_given);
        out[n++] = '.';
        if (n_whole >= n_digits) out[n++] = '0';
    }
    for (int i = n_whole; i < n_digits; i++) out[n++] = digits[i];
    out[n] = '\0';
    return n;
}

/* ---- strings ---- */

/* Length of the well-formed character at s, or 0; then *bad = bytes that one U+FFFD replaces. */
static int utf8_take(const unsigned char *s, size_t n_left, int *bad)
{
    unsigned char low = 0x80, high = 0xbf;
    int n = s[0] < 0x80 ? 1 : s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : s[0] < 0xf5 ? 4 : 0;
    *bad = 1;
    if (n < 2) return n;
    if (s[0] == 0xe0) low = 0xa0;
    if (s[0] == 0xed) high = 0x9f;
    if (s[0] == 0xf0) low = 0x90;
    if (s[0] == 0xf4) high = 0x8f;
    for (int i = 1; i < n; i++) {
        if ((size_t)i >= n_left || s[i] < low || s[i] > high) {
            *bad = i;
            return 0;
        }
        low = 0x80;
        high = 0xbf;
    }
    return n;
}

static void escape_ascii(td_buf *out, unsigned char c)
{
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    const char *found = c ? strchr(from, c) : NULL;
    if (found) {
        const char text[2] = { '\\', to[found - from] };
        td_buf_add(out, text, 2);
    } else {
        td_buf_printf(out, "\\u%04x", c);
    }
}

void td_json_escape(td_buf *out, const char *text, size_t n_bytes)
{
    const unsigned char *s = (const unsigned char *)text, *end = s + n_bytes, *plain = s;
    td_buf_putc(out, '"');
    while (s < end) {
        if (*s >= 0x20 && *s < 0x80 && *s != '"' && *s != '\\') {
            s++;
            continue;
        }
        int bad = 1, n = utf8_take(s, (size_t)(end - s), &bad);
        if (n > 1) {
            s += n;
            continue;
        }
        td_buf_add(out, plain, (size_t)(s - plain));
        if (n == 1) {
            escape_ascii(out, *s++);
        } else {
            td_buf_puts(out, "\xef\xbf\xbd");
            s += bad;
        }
        plain = s;
    }
    td_buf_add(out, plain, (size_t)(s - plain));
    td_buf_putc(out, '"');
}

/* ---- the writer ---- */

static void before_value(td_json_writer *w)
{
    if (w->comma) td_buf_putc(w->out, ',');
    w->comma = true;
}

void td_json_write_begin(td_json_writer *w, char bracket)
{
    before_value(w);
    td_buf_putc(w->out, bracket);
    w->comma = false;
}

void td_json_write_end(td_json_writer *w, char bracket)
{
    td_buf_putc(w->out, bracket);
    w->comma = true;
}

static void write_key(td_json_writer *w, const char *name, size_t n_bytes)
{
    before_value(w);
    td_json_escape(w->out, name, n_bytes);
    td_buf_putc(w->out, ':');
    w->comma = false; /* the value follows without one */
}

void td_json_write_key(td_json_writer *w, const char *name)
{
    write_key(w, name, strlen(name));
}

void td_json_write_string(td_json_writer *w, const char *text, size_t n_bytes)
{
    before_value(w);
    td_json_escape(w->out, text, n_bytes);
}

void td_json_write_text(td_json_writer *w, const char *text)
{
    if (text)
        td_json_write_string(w, text, strlen(text));
    else
        td_json_write_null(w);
}

void td_json_write_int(td_json_writer *w, int64_t x)
{
    before_value(w);
    td_buf_printf(w->out, "%" PRId64, x);
}

void td_json_write_uint(td_json_writer *w, uint64_t x)
{
    before_value(w);
    td_buf_printf(w->out, "%" PRIu64, x);
}

void td_json_write_double(td_json_writer *w, double x)
{
    char text[TD_REPR_CAP];
    if (!isfinite(x)) {
        td_json_write_null(w);
        return;
    }
    before_value(w);
    td_buf_add(w->out, text, (size_t)td_double_repr(x, text));
}

void td_json_write_bool(td_json_writer *w, bool x)
{
    before_value(w);
    td_buf_puts(w->out, x ? "true" : "false");
}

void td_json_write_null(td_json_writer *w)
{
    before_value(w);
    td_buf_puts(w->out, "null");
}

void td_json_write_raw(td_json_writer *w, const char *json, size_t n_bytes)
{
    before_value(w);
    td_buf_add(w->out, json, n_bytes);
}

static void write_container(td_json_writer *w, const td_json *value)
{
    bool object = td_json_kind_of(value) == TD_JSON_OBJECT;
    td_json_write_begin(w, object ? '{' : '[');
    for (size_t i = 0; i < td_json_count(value); i++) {
        size_t n;
        if (object) {
            const char *key = td_json_key_at(value, i, &n);
            write_key(w, key, n);
        }
        td_json_write_value(w, td_json_at(value, i)); /* as deep as the reader allowed: TD_JSON_MAX_DEPTH */
    }
    td_json_write_end(w, object ? '}' : ']');
}

void td_json_write_value(td_json_writer *w, const td_json *value)
{
    size_t n;
    const char *text;
    switch (td_json_kind_of(value)) {
    case TD_JSON_ABSENT:
    case TD_JSON_NULL: td_json_write_null(w); break;
    case TD_JSON_FALSE: td_json_write_bool(w, false); break;
    case TD_JSON_TRUE: td_json_write_bool(w, true); break;
    case TD_JSON_INT:
    case TD_JSON_REAL:
        text = td_json_number_text(value, &n);
        td_json_write_raw(w, text, n);
        break;
    case TD_JSON_STRING:
        text = td_json_string(value, &n);
        td_json_write_string(w, text, n);
        break;
    case TD_JSON_ARRAY:
    case TD_JSON_OBJECT: write_container(w, value); break;
    }
}

void td_json_write_member_text(td_json_writer *w, const char *name, const char *text)
{
    td_json_write_key(w, name);
    td_json_write_text(w, text);
}

void td_json_write_member_int(td_json_writer *w, const char *name, int64_t x)
{
    td_json_write_key(w, name);
    td_json_write_int(w, x);
}

void td_json_write_member_bool(td_json_writer *w, const char *name, bool x)
{
    td_json_write_key(w, name);
    td_json_write_bool(w, x);
}
