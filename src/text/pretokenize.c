/* The splitter for
 *
 *     (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|
 * ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
 *
 * (GLM, Llama 3; Qwen has \p{N} for \p{N}{1,3}). The alternatives are tried in order at each place, and what the first
 * that fits takes, greedily, is a piece. By what the first character is:
 *
 *     '                       a contraction, if one stands here
 *     letter                  the run of letters
 *     number                  up to three numbers
 *     any but CR, LF          followed by a letter: it and the run of letters
 *     other (not white)       the run of others and the CR, LF behind it; a U+0020 may stand before such a run
 *     white space             the run of white space: up to its last CR or LF if it has one; else, if something
 * follows, all but its last character (which then stands before the next piece); else all
 *
 * Folding of case is Unicode's: the only letter outside ASCII that folds into the contractions is U+017F, to s. */
#include "text/pretokenize.h"

#include <stdlib.h>
#include <string.h>

#include "text/split_regex.h"
#include "text/utf8.h"

#define PATTERN(number)                                                                                                \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" number                                               \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

enum { NEITHER = TD_UNICODE_LETTER | TD_UNICODE_NUMBER | TD_UNICODE_SPACE };

struct td_splitter {
    const td_unicode *unicode;
    int max_numbers;       /* of a piece of numbers: 1 or 3; 0: not the native pattern */
    td_split_regex *regex; /* for every other pattern */
};

td_status td_splitter_create(const td_unicode *unicode, const char *pattern, size_t n_bytes, bool literal,
                             td_splitter **out, td_error *err)
{
    static const char threes[] = PATTERN("\\p{N}{1,3}"), ones[] = PATTERN("\\p{N}");
    td_splitter *s = calloc(1, sizeof *s);
    if (!s) return td_fail(err, TD_ENOMEM, "out of memory");
    s->unicode = unicode;
    td_status st = TD_OK;
    if (!literal && n_bytes == sizeof threes - 1 && memcmp(pattern, threes, n_bytes) == 0)
        s->max_numbers = 3;
    else if (!literal && n_bytes == sizeof ones - 1 && memcmp(pattern, ones, n_bytes) == 0)
        s->max_numbers = 1;
    else
        st = td_split_regex_create(pattern, n_bytes, literal, &s->regex, err);
    if (st != TD_OK) {
        free(s);
        return st;
    }
    *out = s;
    return TD_OK;
}

void td_splitter_destroy(td_splitter *s)
{
    if (!s) return;
    td_split_regex_destroy(s->regex);
    free(s);
}

bool td_splitter_is_native(const td_splitter *s)
{
    return s->max_numbers != 0;
}

/* Class bits of the character at p, and its length. A stray byte is a character of no class. */
static inline unsigned class_at(const td_unicode *unicode, const unsigned char *p, const unsigned char *end, size_t *n)
{
    if (*p < 0x80) {
        *n = 1;
        return unicode->classes[*p]; /* the first block stands first */
    }
    uint32_t c = td_utf8_next(p, end, n);
    if (c == TD_UTF8_INVALID) {
        *n = 1;
        return 0;
    }
    return td_unicode_class(unicode, c);
}

static const unsigned char *run_of(const td_unicode *unicode, const unsigned char *p, const unsigned char *end,
                                   unsigned mask, unsigned want)
{
    size_t n;
    while (p < end && ((class_at(unicode, p, end, &n) & mask) != 0) == (want != 0)) p += n;
    return p;
}

static inline bool is_newline(unsigned char b)
{
    return b == '\r' || b == '\n';
}

/* The end of the contraction whose apostrophe is at p, or NULL. */
static const unsigned char *contraction(const unsigned char *p, const unsigned char *end)
{
    if (end - p < 2) return NULL;
    unsigned char a = p[1] | 0x20, b = end - p > 2 ? p[2] | 0x20 : 0;
    if (p[1] == 0xC5 && end - p > 2 && p[2] == 0xBF) return p + 3; /* U+017F */
    if (p[1] >= 0x80) return NULL;
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return p + 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return p + 3;
    return NULL;
}

/* The end of the piece that starts with white space at p, when no letter and no run of others takes that character. */
static const unsigned char *white(const td_unicode *unicode, const unsigned char *p, const unsigned char *end)
{
    const unsigned char *last = p, *after_newline = NULL;
    size_t n;
    for (const unsigned char *q = p;; q += n) {
        if (q == end) return after_newline ? after_newline : end;
        if (!(class_at(unicode, q, end, &n) & TD_UNICODE_SPACE)) break;
        last = q;
        if (is_newline(*q)) after_newline = q + 1;
    }
    if (after_newline) return after_newline;
    if (last != p) return last;
    (void)class_at(unicode, p, end, &n);
    return p + n;
}

static const unsigned char *numbers(const td_unicode *unicode, const unsigned char *p, const unsigned char *end,
                                    int max_numbers)
{
    size_t n;
    for (int i = 0; i < max_numbers && p < end && (class_at(unicode, p, end, &n) & TD_UNICODE_NUMBER); i++) p += n;
    return p;
}

/* The run of characters that are neither white nor letter nor number from p on, and the line ends behind it. */
static const unsigned char *others(const td_unicode *unicode, const unsigned char *p, const unsigned char *end)
{
    p = run_of(unicode, p, end, NEITHER, 0);
    while (p < end && is_newline(*p)) p++;
    return p;
}

static const unsigned char *native_piece_end(const td_splitter *s, const unsigned char *p, const unsigned char *end)
{
    const td_unicode *u = s->unicode;
    size_t n, n_next;
    unsigned first = class_at(u, p, end, &n);
    if (first & TD_UNICODE_LETTER) return run_of(u, p + n, end, TD_UNICODE_LETTER, 1);
    if (first & TD_UNICODE_NUMBER) return numbers(u, p, end, s->max_numbers);
    if (*p == '\'') {
        const unsigned char *after = contraction(p, end);
        if (after) return after;
    }
    if (p + n < end && !is_newline(*p)) {
        unsigned next = class_at(u, p + n, end, &n_next);
        if (next & TD_UNICODE_LETTER) return run_of(u, p + n + n_next, end, TD_UNICODE_LETTER, 1);
        if (*p == ' ' && !(next & NEITHER)) return others(u, p + n, end);
    }
    return first & TD_UNICODE_SPACE ? white(u, p, end) : others(u, p, end);
}

td_status td_split_walk_init(td_split_walk *walk, const td_splitter *s, const char *text, size_t n_bytes)
{
    const unsigned char *p = (const unsigned char *)text;
    *walk = (td_split_walk){ .splitter = s, .start = p, .p = p, .end = p + n_bytes };
    return s->regex ? td_split_regex_start(s->regex, walk) : TD_OK;
}

void td_split_walk_deinit(td_split_walk *walk)
{
    if (walk->splitter && walk->splitter->regex) td_split_regex_stop(walk);
}

td_status td_split_walk_next(td_split_walk *walk, const char **piece, size_t *n_bytes)
{
    const unsigned char *after = walk->p;
    if (walk->p < walk->end) {
        if (walk->splitter->regex) {
            td_status st = td_split_regex_piece_end(walk->splitter->regex, walk, &after);
            if (st != TD_OK) return st;
        } else {
            after = native_piece_end(walk->splitter, walk->p, walk->end);
        }
    }
    *piece = (const char *)walk->p;
    *n_bytes = (size_t)(after - walk->p);
    walk->p = after;
    return TD_OK;
}
