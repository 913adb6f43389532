/* See scan.h. Strictness: the grammar of RFC 8259, except that bytes from 0x80 on inside strings are not checked to be
 * UTF-8; callers use no string that is not plain ASCII. */
#include "checkpoint/scan.h"

static void skip_space(td_scan *s)
{
    while (s->at < s->end && (*s->at == ' ' || *s->at == '\n' || *s->at == '\r' || *s->at == '\t')) s->at++;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_hex(char c)
{
    return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

bool td_scan_char(td_scan *s, char c)
{
    skip_space(s);
    if (s->at >= s->end || *s->at != c) return false;
    s->at++;
    return true;
}

bool td_scan_end(td_scan *s)
{
    skip_space(s);
    return s->at == s->end;
}

/* After the backslash. */
static bool scan_escape(td_scan *s)
{
    if (s->at >= s->end) return false;
    char c = *s->at++;
    if (c != 'u') return c == '"' || c == '\\' || c == '/' || c == 'b' || c == 'f' || c == 'n' || c == 'r' || c == 't';
    for (int i = 0; i < 4; i++)
        if (s->at >= s->end || !is_hex(*s->at++)) return false;
    return true;
}

bool td_scan_string(td_scan *s, td_scan_text *out)
{
    if (!td_scan_char(s, '"')) return false;
    td_scan_text text = { .data = s->at, .plain = true };
    while (s->at < s->end) {
        unsigned char c = (unsigned char)*s->at++;
        if (c == '"') {
            text.n_bytes = (size_t)(s->at - 1 - text.data);
            *out = text;
            return true;
        }
        if (c < 0x20) return false;
        if (c >= 0x7f) text.plain = false;
        if (c == '\\') {
            text.plain = false;
            if (!scan_escape(s)) return false;
        }
    }
    return false;
}

bool td_scan_u64(td_scan *s, uint64_t *out)
{
    skip_space(s);
    if (s->at >= s->end || !is_digit(*s->at)) return false;
    const char *first = s->at;
    uint64_t x = 0;
    while (s->at < s->end && is_digit(*s->at)) {
        if (__builtin_mul_overflow(x, 10u, &x) || __builtin_add_overflow(x, (uint64_t)(*s->at - '0'), &x)) return false;
        s->at++;
    }
    if (*first == '0' && s->at - first > 1) return false;
    if (s->at < s->end && (*s->at == '.' || *s->at == 'e' || *s->at == 'E')) return false;
    *out = x;
    return true;
}

static bool skip_digits(td_scan *s)
{
    const char *first = s->at;
    while (s->at < s->end && is_digit(*s->at)) s->at++;
    return s->at > first;
}

static bool skip_number(td_scan *s)
{
    if (s->at < s->end && *s->at == '-') s->at++;
    const char *first = s->at;
    if (!skip_digits(s) || (*first == '0' && s->at - first > 1)) return false;
    if (s->at < s->end && *s->at == '.') {
        s->at++;
        if (!skip_digits(s)) return false;
    }
    if (s->at < s->end && (*s->at == 'e' || *s->at == 'E')) {
        s->at++;
        if (s->at < s->end && (*s->at == '+' || *s->at == '-')) s->at++;
        return skip_digits(s);
    }
    return true;
}

static bool skip_word(td_scan *s, const char *word)
{
    for (; *word; word++, s->at++)
        if (s->at >= s->end || *s->at != *word) return false;
    return true;
}

static bool skip_value(td_scan *s, int depth);

/* After '{' or '['. */
static bool skip_members(td_scan *s, bool object, int depth)
{
    char close = object ? '}' : ']';
    td_scan_text key;
    if (td_scan_char(s, close)) return true;
    do {
        if (object && (!td_scan_string(s, &key) || !td_scan_char(s, ':'))) return false;
        if (!skip_value(s, depth)) return false;
    } while (td_scan_char(s, ','));
    return td_scan_char(s, close);
}

static bool skip_value(td_scan *s, int depth)
{
    td_scan_text text;
    skip_space(s);
    if (s->at >= s->end) return false;
    switch (*s->at) {
    case '{':
    case '[':
        if (depth >= TD_SCAN_DEPTH_MAX) return false;
        return skip_members(s, *s->at++ == '{', depth + 1);
    case '"': return td_scan_string(s, &text);
    case 't': return skip_word(s, "true");
    case 'f': return skip_word(s, "false");
    case 'n': return skip_word(s, "null");
    default: return skip_number(s);
    }
}

bool td_scan_skip(td_scan *s)
{
    return skip_value(s, 0);
}
