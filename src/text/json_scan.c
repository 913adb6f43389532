/* RFC 8259, strictly: no comments, no trailing commas, no raw control characters, valid UTF-8, escapes only in pairs
 * where they are surrogates. */
#include "text/json_scan.h"

#include <stdlib.h>
#include <string.h>

#include "text/utf8.h"

void td_json_scan_init(td_json_scan *s, const char *data, size_t n_bytes)
{
    *s = (td_json_scan){ .start = data, .p = data, .end = data + n_bytes, .status = TD_OK };
}

void td_json_scan_deinit(td_json_scan *s)
{
    free(s->scratch);
    s->scratch = NULL;
    s->scratch_cap = 0;
}

void td_json_scan_fail(td_json_scan *s, td_status status, const char *message)
{
    if (s->status != TD_OK) return;
    s->status = status;
    s->message = message;
    s->offset = (size_t)(s->p - s->start);
}

static void wrong(td_json_scan *s, const char *message)
{
    td_json_scan_fail(s, TD_EFORMAT, message);
}

char td_json_scan_peek(td_json_scan *s)
{
    if (s->status != TD_OK) return 0;
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\n' || *s->p == '\r' || *s->p == '\t')) s->p++;
    return s->p < s->end ? *s->p : 0;
}

static bool take(td_json_scan *s, char c)
{
    if (td_json_scan_peek(s) != c || c == 0) return false;
    s->p++;
    return true;
}

bool td_json_scan_open(td_json_scan *s, char open)
{
    if (!take(s, open)) {
        wrong(s, open == '{' ? "expected an object" : "expected an array");
        return false;
    }
    return !take(s, open == '{' ? '}' : ']') && s->status == TD_OK;
}

bool td_json_scan_next(td_json_scan *s, char close)
{
    if (take(s, ',')) return true;
    if (!take(s, close)) wrong(s, "expected a comma or the end of an object or array");
    return false;
}

/* The end of the string that starts behind p: the closing quote, or NULL after a mistake. *plain: it has no escapes. */
static const char *string_end(td_json_scan *s, bool *plain)
{
    const char *p = s->p + 1;
    *plain = true;
    while (p < s->end) {
        unsigned char c = (unsigned char)*p;
        if (c == '"') return p;
        if (c < 0x20) break;
        if (c == '\\') {
            *plain = false;
            p += 2;
        } else if (c < 0x80) {
            p++;
        } else {
            size_t n;
            if (td_utf8_next((const unsigned char *)p, (const unsigned char *)s->end, &n) == TD_UTF8_INVALID) {
                s->p = p;
                wrong(s, "a string is not valid UTF-8");
                return NULL;
            }
            p += n;
        }
    }
    s->p = p < s->end ? p : s->end;
    wrong(s, p < s->end ? "a control character in a string" : "a string does not end");
    return NULL;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/* The four digits at p, or -1. */
static int32_t hex4(const char *p, const char *end)
{
    int32_t value = 0;
    if (end - p < 4) return -1;
    for (int i = 0; i < 4; i++) {
        int digit = hex_digit(p[i]);
        if (digit < 0) return -1;
        value = value << 4 | digit;
    }
    return value;
}

/* \uXXXX, perhaps a pair of them; *p stands on the first digit. -1: malformed, or half a pair. */
static int32_t unicode_escape(const char **p, const char *end)
{
    int32_t c = hex4(*p, end);
    if (c < 0) return -1;
    *p += 4;
    if (c < 0xD800 || c > 0xDFFF) return c;
    if (c > 0xDBFF || end - *p < 6 || (*p)[0] != '\\' || (*p)[1] != 'u') return -1;
    int32_t low = hex4(*p + 2, end);
    if (low < 0xDC00 || low > 0xDFFF) return -1;
    *p += 6;
    return 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
}

/* One escape; *p stands behind the backslash and is moved past it. -1: no such escape. */
static int32_t escape(const char **p, const char *end)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (*p >= end) return -1;
    char c = *(*p)++;
    if (c == 'u') return unicode_escape(p, end);
    const char *at = c ? strchr(from, c) : NULL;
    return at ? to[at - from] : -1;
}

static bool scratch_reserve(td_json_scan *s, size_t n_bytes)
{
    if (s->scratch_cap >= n_bytes) return true;
    char *scratch = realloc(s->scratch, 2 * n_bytes);
    if (!scratch) {
        td_json_scan_fail(s, TD_ENOMEM, "out of memory");
        return false;
    }
    s->scratch = scratch;
    s->scratch_cap = 2 * n_bytes;
    return true;
}

/* [p, end) without its escapes, in scratch: an escape is never shorter than the bytes it stands for. */
static size_t unescape(td_json_scan *s, const char *p, const char *end)
{
    size_t n = 0;
    if (!scratch_reserve(s, (size_t)(end - p) + 1)) return 0;
    while (p < end) {
        if (*p != '\\') {
            s->scratch[n++] = *p++;
            continue;
        }
        p++;
        int32_t c = escape(&p, end);
        if (c < 0) {
            s->p = p < end ? p : end;
            wrong(s, "a string holds a wrong escape");
            return 0;
        }
        n += td_utf8_put((uint32_t)c, s->scratch + n);
    }
    return n;
}

void td_json_scan_string(td_json_scan *s, const char **text, size_t *n_bytes)
{
    bool plain;
    *text = "";
    *n_bytes = 0;
    if (td_json_scan_peek(s) != '"') {
        wrong(s, "expected a string");
        return;
    }
    const char *start = s->p + 1, *end = string_end(s, &plain);
    if (!end) return;
    size_t n = plain ? (size_t)(end - start) : unescape(s, start, end);
    if (s->status != TD_OK) return;
    s->p = end + 1;
    *text = plain ? start : s->scratch;
    *n_bytes = n;
}

void td_json_scan_key(td_json_scan *s, const char **text, size_t *n_bytes)
{
    td_json_scan_string(s, text, n_bytes);
    if (!take(s, ':')) wrong(s, "expected a colon");
}

static void digits(td_json_scan *s)
{
    const char *start = s->p;
    while (s->p < s->end && *s->p >= '0' && *s->p <= '9') s->p++;
    if (s->p == start) wrong(s, "a malformed number");
}

/* Any number; true when it has neither fraction nor exponent. */
static bool number(td_json_scan *s)
{
    bool integer = true;
    if (*s->p == '-') s->p++;
    const char *first = s->p;
    digits(s);
    if (s->p - first > 1 && *first == '0') wrong(s, "a number starts with 0");
    if (s->p < s->end && *s->p == '.') {
        integer = false;
        s->p++;
        digits(s);
    }
    if (s->p < s->end && (*s->p == 'e' || *s->p == 'E')) {
        integer = false;
        s->p++;
        if (s->p < s->end && (*s->p == '+' || *s->p == '-')) s->p++;
        digits(s);
    }
    return integer;
}

static bool starts_number(char c)
{
    return c == '-' || (c >= '0' && c <= '9');
}

int64_t td_json_scan_integer(td_json_scan *s)
{
    if (!starts_number(td_json_scan_peek(s))) {
        wrong(s, "expected a number");
        return 0;
    }
    const char *p = s->p;
    bool integer = number(s), negative = *p == '-';
    int64_t value = 0;
    if (!integer) wrong(s, "expected an integer");
    for (p += negative; s->status == TD_OK && p < s->p; p++) {
        if (value > (INT64_MAX - 9) / 10) {
            wrong(s, "a number is out of range");
            return 0;
        }
        value = 10 * value + (*p - '0');
    }
    return s->status != TD_OK ? 0 : negative ? -value : value;
}

static void word(td_json_scan *s, const char *text)
{
    size_t n = strlen(text);
    if ((size_t)(s->end - s->p) < n || memcmp(s->p, text, n) != 0) {
        wrong(s, "expected a value");
        return;
    }
    s->p += n;
}

static void scalar(td_json_scan *s)
{
    bool plain;
    char c = td_json_scan_peek(s);
    if (c == '"') {
        const char *end = string_end(s, &plain);
        if (end) s->p = end + 1;
    } else if (starts_number(c)) {
        (void)number(s);
    } else {
        word(s, c == 't' ? "true" : c == 'f' ? "false" : "null");
    }
}

void td_json_scan_value(td_json_scan *s, const char **text, size_t *n_bytes)
{
    char close[TD_JSON_SCAN_DEPTH]; /* what ends each open object or array */
    size_t depth = 0;
    const char *key, *start = (td_json_scan_peek(s), s->p);
    size_t n_key;
    do {
        char c = td_json_scan_peek(s);
        bool more = false;
        if (c == '{' || c == '[') {
            if (depth == TD_JSON_SCAN_DEPTH) {
                wrong(s, "nested too deeply");
                break;
            }
            more = td_json_scan_open(s, c);
            if (more) close[depth++] = c == '{' ? '}' : ']';
        } else {
            scalar(s);
        }
        while (!more && depth && s->status == TD_OK) {
            more = td_json_scan_next(s, close[depth - 1]);
            if (!more) depth--;
        }
        if (more && close[depth - 1] == '}') td_json_scan_key(s, &key, &n_key);
    } while (depth && s->status == TD_OK);
    *text = start;
    *n_bytes = s->status == TD_OK ? (size_t)(s->p - start) : 0;
}

td_status td_json_scan_end(td_json_scan *s)
{
    if (td_json_scan_peek(s) != 0 || s->p != s->end) wrong(s, "something follows the value");
    return s->status;
}
