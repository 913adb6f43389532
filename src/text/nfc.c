/* Normalization Form C (Unicode Standard Annex 15). Text is copied as it is up to the last character before one that
 * may combine; from there to the next character that surely does not, a region is decomposed, put into canonical order
 * and composed. Each step is linear: a run of combining marks is ordered by counting, since it can be a megabyte. */
#include <stdlib.h>
#include <string.h>

#include "text/unicode.h"
#include "text/utf8.h"

enum {
    HANGUL_L = 0x1100,
    HANGUL_V = 0x1161,
    HANGUL_T = 0x11A7,
    HANGUL_S = 0xAC00,
    N_L = 19,
    N_V = 21,
    N_T = 28,
    N_S = N_L * N_V * N_T,
    DECOMPOSED_CAP = 8, /* the longest full decomposition has 4 characters */
};

/* A character, or a byte that is none: those have the top bit and take part in nothing. */
#define STRAY_BYTE 0x80000000u

typedef struct marked {
    uint32_t c;
    uint8_t combining_class;
} marked;

typedef struct nfc {
    const td_unicode *unicode;
    const td_unicode_tables *tables;
    marked *region, *sorted; /* sorted: as large as region, for the counting sort */
    size_t n_region, region_cap;
    char *out;
    size_t n_out, out_cap;
} nfc;

static uint8_t combining_class(const nfc *x, uint32_t c)
{
    size_t lo = 0, hi = x->tables->n_combining;
    if (c < 0x300 || !(td_unicode_class(x->unicode, c) & TD_UNICODE_COMPOSE)) return 0;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (x->tables->combining[mid].last < c)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < x->tables->n_combining && x->tables->combining[lo].first <= c ? x->tables->combining[lo].combining_class
                                                                              : 0;
}

static const td_unicode_triple *find_decomposition(const nfc *x, uint32_t c)
{
    size_t lo = 0, hi = x->tables->n_decompositions;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (x->tables->decompositions[mid].a < c)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < x->tables->n_decompositions && x->tables->decompositions[lo].a == c ? &x->tables->decompositions[lo]
                                                                                    : NULL;
}

/* The primary composite of a and b, or 0. */
static uint32_t compose_pair(const nfc *x, uint32_t a, uint32_t b)
{
    if (a - HANGUL_L < N_L && b - HANGUL_V < N_V) return HANGUL_S + ((a - HANGUL_L) * N_V + (b - HANGUL_V)) * N_T;
    if (a - HANGUL_S < N_S && (a - HANGUL_S) % N_T == 0 && b - HANGUL_T - 1 < N_T - 1) return a + (b - HANGUL_T);
    size_t lo = 0, hi = x->tables->n_compositions;
    uint64_t key = (uint64_t)a << 32 | b;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        const td_unicode_triple *t = &x->tables->compositions[mid];
        if (((uint64_t)t->a << 32 | t->b) < key)
            lo = mid + 1;
        else
            hi = mid;
    }
    const td_unicode_triple *t = &x->tables->compositions[lo];
    return lo < x->tables->n_compositions && t->a == a && t->b == b ? t->c : 0;
}

static td_status region_push(nfc *x, uint32_t c)
{
    if (x->n_region == x->region_cap) {
        size_t cap = x->region_cap ? 2 * x->region_cap : 64;
        marked *region = realloc(x->region, cap * sizeof *region);
        if (!region) return TD_ENOMEM;
        x->region = region;
        marked *sorted = realloc(x->sorted, cap * sizeof *sorted);
        if (!sorted) return TD_ENOMEM;
        x->sorted = sorted;
        x->region_cap = cap;
    }
    x->region[x->n_region++] = (marked){ c, combining_class(x, c) };
    return TD_OK;
}

static td_status region_push_decomposed(nfc *x, uint32_t c)
{
    if (c - HANGUL_S < N_S) {
        uint32_t s = c - HANGUL_S, t = s % N_T;
        td_status st = region_push(x, HANGUL_L + s / (N_V * N_T));
        if (st == TD_OK) st = region_push(x, HANGUL_V + s / N_T % N_V);
        return st == TD_OK && t ? region_push(x, HANGUL_T + t) : st;
    }
    uint32_t tail[DECOMPOSED_CAP]; /* second parts, innermost last */
    size_t n_tail = 0;
    for (const td_unicode_triple *t; (t = find_decomposition(x, c)) != NULL; c = t->b) {
        if (t->c) tail[n_tail++] = t->c;
        td_check(n_tail < DECOMPOSED_CAP);
    }
    td_status st = region_push(x, c);
    while (st == TD_OK && n_tail) st = region_push(x, tail[--n_tail]);
    return st;
}

/* Stable order by combining class within each run of non-starters. */
static void order_region(nfc *x)
{
    for (size_t i = 0; i < x->n_region;) {
        if (x->region[i].combining_class == 0) {
            i++;
            continue;
        }
        size_t end = i, at[256] = { 0 }, sum = 0;
        while (end < x->n_region && x->region[end].combining_class) at[x->region[end++].combining_class]++;
        if (end - i > 1) {
            for (int k = 0; k < 256; k++) {
                size_t n = at[k];
                at[k] = sum;
                sum += n;
            }
            for (size_t j = i; j < end; j++) x->sorted[at[x->region[j].combining_class]++] = x->region[j];
            memcpy(x->region + i, x->sorted, (end - i) * sizeof *x->region);
        }
        i = end;
    }
}

/* Joins each character to the last starter unless something between them blocks it: a character of the same or a higher
 * class that stayed, or another starter. */
static void compose_region(nfc *x)
{
    size_t n = 0, starter = SIZE_MAX;
    int last_class = 0; /* of the last character kept after the starter; 0: none between */
    for (size_t i = 0; i < x->n_region; i++) {
        marked m = x->region[i];
        bool blocked = starter == SIZE_MAX || (n - 1 != starter && last_class >= m.combining_class);
        uint32_t joined = blocked ? 0 : compose_pair(x, x->region[starter].c, m.c);
        if (joined) {
            x->region[starter].c = joined;
            continue;
        }
        if (m.combining_class == 0) starter = n;
        last_class = m.combining_class;
        x->region[n++] = m;
    }
    x->n_region = n;
}

static td_status out_reserve(nfc *x, size_t n_bytes)
{
    if (x->out_cap - x->n_out >= n_bytes) return TD_OK;
    size_t cap = x->out_cap + x->out_cap / 2 + n_bytes + 256;
    char *out = realloc(x->out, cap);
    if (!out) return TD_ENOMEM;
    x->out = out;
    x->out_cap = cap;
    return TD_OK;
}

static td_status flush_region(nfc *x)
{
    order_region(x);
    compose_region(x);
    td_status st = out_reserve(x, 4 * x->n_region);
    if (st != TD_OK) return st;
    for (size_t i = 0; i < x->n_region; i++) {
        uint32_t c = x->region[i].c;
        if (c & STRAY_BYTE)
            x->out[x->n_out++] = (char)(c & 0xFF);
        else
            x->n_out += td_utf8_put(c, x->out + x->n_out);
    }
    x->n_region = 0;
    return TD_OK;
}

/* Adds one character or the bytes that are none. */
static td_status take_character(nfc *x, uint32_t c, const unsigned char *p, size_t n_bytes)
{
    if (c != TD_UTF8_INVALID) return region_push_decomposed(x, c);
    td_status st = TD_OK;
    for (size_t i = 0; i < n_bytes && st == TD_OK; i++) st = region_push(x, STRAY_BYTE | p[i]);
    return st;
}

/* Where the first character that needs a closer look stands, and the character before it (from where work starts). */
static const unsigned char *find_compose(const td_unicode *unicode, const unsigned char *p, const unsigned char *end,
                                         const unsigned char **before)
{
    *before = p;
    while (p < end) {
        size_t n = 1;
        if (*p >= 0x80) {
            uint32_t c = td_utf8_next(p, end, &n);
            if (td_unicode_class(unicode, c) & TD_UNICODE_COMPOSE) return p;
        }
        *before = p;
        p += n;
    }
    return end;
}

static td_status normalize(nfc *x, const unsigned char *p, const unsigned char *end)
{
    while (p < end) {
        const unsigned char *before, *first = find_compose(x->unicode, p, end, &before);
        if (first == end) before = end;
        size_t n = (size_t)(before - p);
        td_status st = out_reserve(x, n);
        if (st != TD_OK) return st;
        if (n) memcpy(x->out + x->n_out, p, n);
        x->n_out += n;
        for (p = before; p < end; p += n) {
            uint32_t c = td_utf8_next(p, end, &n);
            if (p > first && !(td_unicode_class(x->unicode, c) & TD_UNICODE_COMPOSE)) break;
            st = take_character(x, c, p, n);
            if (st != TD_OK) return st;
        }
        st = flush_region(x);
        if (st != TD_OK) return st;
    }
    return TD_OK;
}

td_status td_nfc(const td_unicode *unicode, const char *text, size_t n_bytes, const char **out, size_t *n_out,
                 char **owned)
{
    const unsigned char *p = (const unsigned char *)text, *before;
    if (find_compose(unicode, p, p + n_bytes, &before) == p + n_bytes) {
        *out = text;
        *n_out = n_bytes;
        *owned = NULL;
        return TD_OK;
    }
    nfc x = { .unicode = unicode, .tables = td_unicode_tables_get() };
    td_status st = out_reserve(&x, n_bytes + n_bytes / 8);
    if (st == TD_OK) st = normalize(&x, p, p + n_bytes);
    free(x.region);
    free(x.sorted);
    if (st != TD_OK) {
        free(x.out);
        return st;
    }
    *out = *owned = x.out;
    *n_out = x.n_out;
    return TD_OK;
}
