/* Contents are few (36 in GLM's file, 256 in Llama's) and text rarely holds their first byte, so a table of first bytes
 * finds the candidates and a sorted list of contents is narrowed byte by byte: no automaton is needed. A place costs at
 * most the length of the longest content times a logarithm. */
#include "text/added_tokens.h"

#include <stdlib.h>
#include <string.h>

#include "text/utf8.h"

void td_added_tokens_init(td_added_tokens *set)
{
    memset(set, 0, sizeof *set);
}

void td_added_tokens_deinit(td_added_tokens *set)
{
    for (size_t i = 0; i < set->n; i++) free(set->tokens[i].content);
    free(set->tokens);
    free(set->order);
    td_added_tokens_init(set);
}

td_status td_added_tokens_add(td_added_tokens *set, const td_added_token *token, const char *content, size_t n_bytes)
{
    if (set->n == set->cap) {
        size_t cap = set->cap ? 2 * set->cap : 64;
        td_added_token *tokens = realloc(set->tokens, cap * sizeof *tokens);
        if (!tokens) return TD_ENOMEM;
        set->tokens = tokens;
        set->cap = cap;
    }
    char *copy = malloc(n_bytes + 1);
    if (!copy) return TD_ENOMEM;
    memcpy(copy, content, n_bytes);
    copy[n_bytes] = 0;
    td_added_token *t = &set->tokens[set->n++];
    *t = *token;
    t->content = copy;
    t->n_bytes = n_bytes;
    return TD_OK;
}

/* Bytewise, and a prefix before what it is a prefix of. */
static int compare(const char *a, size_t n_a, const char *b, size_t n_b)
{
    int order = memcmp(a, b, n_a < n_b ? n_a : n_b);
    return order ? order : (n_a > n_b) - (n_a < n_b);
}

static int compare_tokens(const void *a, const void *b, void *tokens)
{
    const td_added_token *x = (td_added_token *)tokens + *(const uint32_t *)a;
    const td_added_token *y = (td_added_token *)tokens + *(const uint32_t *)b;
    return compare(x->content, x->n_bytes, y->content, y->n_bytes);
}

td_status td_added_tokens_index(td_added_tokens *set)
{
    set->order = malloc((set->n + 1) * sizeof *set->order);
    if (!set->order) return TD_ENOMEM;
    for (size_t i = 0; i < set->n; i++) set->order[i] = (uint32_t)i;
    if (set->n) qsort_r(set->order, set->n, sizeof *set->order, compare_tokens, set->tokens);
    for (size_t i = 1; i < set->n; i++)
        if (compare_tokens(&set->order[i - 1], &set->order[i], set->tokens) == 0) return TD_EINVAL;
    size_t i = 0;
    for (int b = 0; b < 256; b++) {
        set->first_of[b] = (uint32_t)i;
        while (i < set->n && (unsigned char)set->tokens[set->order[i]].content[0] == b) i++;
    }
    set->first_of[256] = (uint32_t)i;
    return TD_OK;
}

const td_added_token *td_added_tokens_find(const td_added_tokens *set, const char *content, size_t n_bytes)
{
    size_t lo = 0, hi = set->n;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        const td_added_token *t = &set->tokens[set->order[mid]];
        int order = compare(t->content, t->n_bytes, content, n_bytes);
        if (order == 0) return t;
        if (order < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}

/* The part of order[lo .. hi) whose contents have byte b at offset depth; all agree before it, shorter ones are first.
 */
static void narrow(const td_added_tokens *set, size_t depth, int b, size_t *lo, size_t *hi)
{
    for (int side = 0; side < 2; side++) {
        size_t a = *lo, z = *hi;
        while (a < z) {
            size_t mid = (a + z) / 2;
            const td_added_token *t = &set->tokens[set->order[mid]];
            int at = t->n_bytes > depth ? (unsigned char)t->content[depth] : -1;
            if (at < b + side)
                a = mid + 1;
            else
                z = mid;
        }
        *(side ? hi : lo) = a;
    }
}

/* The longest token that stands at text[0 ..], or NULL. */
static const td_added_token *longest_at(const td_added_tokens *set, const char *text, size_t n_bytes,
                                        bool with_reserved)
{
    const td_added_token *found = NULL;
    unsigned char b = (unsigned char)text[0];
    size_t lo = set->first_of[b], hi = set->first_of[b + 1];
    for (size_t depth = 1; lo < hi; depth++) {
        const td_added_token *t = &set->tokens[set->order[lo]];
        if (t->n_bytes == depth && (with_reserved || !t->reserved)) found = t;
        if (depth == n_bytes) break;
        narrow(set, depth, (unsigned char)text[depth], &lo, &hi);
    }
    return found;
}

static unsigned class_before(const td_unicode *unicode, const char *text, size_t at, size_t *n)
{
    const unsigned char *start = (const unsigned char *)text, *p = start + at - 1;
    while (p > start && start + at - p < 4 && (*p & 0xC0) == 0x80) p--;
    uint32_t c = td_utf8_next(p, start + at, n);
    if (c != TD_UTF8_INVALID && p + *n == start + at) return td_unicode_class(unicode, c);
    *n = 1;
    return 0;
}

static unsigned class_at(const td_unicode *unicode, const char *text, size_t at, size_t n_bytes, size_t *n)
{
    uint32_t c = td_utf8_next((const unsigned char *)text + at, (const unsigned char *)text + n_bytes, n);
    return td_unicode_class(unicode, c);
}

static bool inside_word(const td_unicode *unicode, const char *text, size_t n_bytes, size_t start, size_t end)
{
    size_t n;
    return (start > 0 && (class_before(unicode, text, start, &n) & TD_UNICODE_WORD)) ||
           (end < n_bytes && (class_at(unicode, text, end, n_bytes, &n) & TD_UNICODE_WORD));
}

td_added_match td_added_tokens_next(const td_added_tokens *set, const td_unicode *unicode, const char *text,
                                    size_t n_bytes, bool with_reserved, size_t *pos, size_t taken)
{
    while (*pos < n_bytes) {
        unsigned char b = (unsigned char)text[*pos];
        const td_added_token *t = NULL;
        if (set->first_of[b] != set->first_of[b + 1]) t = longest_at(set, text + *pos, n_bytes - *pos, with_reserved);
        if (!t) {
            ++*pos;
            continue;
        }
        size_t start = *pos, end = *pos + t->n_bytes, n;
        *pos = end;
        if (start < taken) continue; /* begins in white space that the token before took along */
        if (t->single_word && inside_word(unicode, text, n_bytes, start, end)) continue;
        while (t->lstrip && start > taken && (class_before(unicode, text, start, &n) & TD_UNICODE_SPACE)) start -= n;
        while (t->rstrip && end < n_bytes && (class_at(unicode, text, end, n_bytes, &n) & TD_UNICODE_SPACE)) end += n;
        return (td_added_match){ t, start, end };
    }
    return (td_added_match){ NULL, n_bytes, n_bytes };
}
