/* UTF-8, one character at a time. A lead byte decides the length and the range of the second byte; that range is where
 * overlong forms, surrogates and values above U+10FFFF are excluded, so later bytes only need to be continuations. */
#include "text/utf8.h"

#include <string.h>

typedef struct lead {
    size_t n_bytes; /* 0: no character starts with this byte */
    unsigned char second_min, second_max;
} lead;

static lead lead_of(unsigned char b)
{
    if (b < 0x80) return (lead){ 1, 0, 0 };
    if (b < 0xC2) return (lead){ 0, 0, 0 };
    if (b < 0xE0) return (lead){ 2, 0x80, 0xBF };
    if (b < 0xF0) return (lead){ 3, b == 0xE0 ? 0xA0 : 0x80, b == 0xED ? 0x9F : 0xBF };
    if (b < 0xF5) return (lead){ 4, b == 0xF0 ? 0x90 : 0x80, b == 0xF4 ? 0x8F : 0xBF };
    return (lead){ 0, 0, 0 };
}

/* How many bytes from p on fit the form that its lead byte promises; at least 1. */
static size_t fitting_bytes(const unsigned char *p, const unsigned char *end, lead l)
{
    size_t n = 1;
    while (n < l.n_bytes && p + n < end) {
        unsigned char min = n == 1 ? l.second_min : 0x80, max = n == 1 ? l.second_max : 0xBF;
        if (p[n] < min || p[n] > max) break;
        n++;
    }
    return n;
}

uint32_t td_utf8_next(const unsigned char *p, const unsigned char *end, size_t *n_bytes)
{
    lead l = lead_of(p[0]);
    *n_bytes = fitting_bytes(p, end, l);
    if (*n_bytes != l.n_bytes) return TD_UTF8_INVALID;
    switch (l.n_bytes) {
    case 1: return p[0];
    case 2: return (p[0] & 0x1Fu) << 6 | (p[1] & 0x3Fu);
    case 3: return (p[0] & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
    default: return (p[0] & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
    }
}

bool td_utf8_is_partial(const unsigned char *p, const unsigned char *end)
{
    if (p >= end) return false;
    lead l = lead_of(p[0]);
    size_t n = (size_t)(end - p);
    return n < l.n_bytes && fitting_bytes(p, end, l) == n;
}

size_t td_utf8_valid_prefix(const char *text, size_t n_bytes)
{
    const unsigned char *start = (const unsigned char *)text, *p = start, *end = start + n_bytes;
    while (p < end) {
        uint64_t eight;
        if (end - p >= 8 && (memcpy(&eight, p, 8), (eight & 0x8080808080808080u) == 0)) {
            p += 8; /* most text is ASCII */
            continue;
        }
        size_t n;
        if (td_utf8_next(p, end, &n) == TD_UTF8_INVALID) break;
        p += n;
    }
    return (size_t)(p - start);
}

size_t td_utf8_put(uint32_t c, char *out)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (char)(0xC0 | c >> 6);
        out[1] = (char)(0x80 | (c & 0x3F));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (char)(0xE0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 0x3F));
        out[2] = (char)(0x80 | (c & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 0x3F));
    out[2] = (char)(0x80 | (c >> 6 & 0x3F));
    out[3] = (char)(0x80 | (c & 0x3F));
    return 4;
}
