/* Matches are pieces, and so is what lies between two matches ("Isolated"). The reference uses Oniguruma; PCRE2 agrees
 * with it on the constructs that tokenizer files use (classes, \p, alternation, look-ahead, possessive and lazy
 * repeats), but its Unicode tables may be of another year: characters that are newer than the library's tables count as
 * unassigned. That is why the pattern that matters has a splitter of its own.
 *
 * A text that is not valid UTF-8 is matched as a copy in which stray bytes are U+0001: one character each, of no class
 * that patterns ask for, and every offset stays the same. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/split_regex.h"

#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#include "text/utf8.h"

/* Steps of one match: the pattern comes from a file, and a bad one must end in an error rather than never. */
#define MATCH_LIMIT 50000000u

#define JIT_STACK_BYTES (1024 * 1024)

struct td_split_regex {
    pcre2_code *code;
};

td_status td_split_regex_create(const char *pattern, size_t n_bytes, bool literal, td_split_regex **out, td_error *err)
{
    int code = 0;
    PCRE2_SIZE at = 0;
    uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP);
    td_split_regex *regex = calloc(1, sizeof *regex);
    if (!regex) return td_fail(err, TD_ENOMEM, "out of memory");
    regex->code = pcre2_compile((PCRE2_SPTR)pattern, n_bytes, options, &code, &at, NULL);
    if (!regex->code) {
        char text[256];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)text, sizeof text);
        free(regex);
        return td_fail(err, TD_EUNSUPPORTED, "pattern, byte %zu: %s", (size_t)at, text);
    }
    (void)pcre2_jit_compile(regex->code, PCRE2_JIT_COMPLETE); /* where there is no JIT, matching is only slower */
    *out = regex;
    return TD_OK;
}

void td_split_regex_destroy(td_split_regex *regex)
{
    if (!regex) return;
    pcre2_code_free(regex->code);
    free(regex);
}

static td_status mask_stray_bytes(td_split_walk *walk, size_t valid)
{
    size_t n_bytes = (size_t)(walk->end - walk->start);
    walk->masked = malloc(n_bytes);
    if (!walk->masked) return TD_ENOMEM;
    memcpy(walk->masked, walk->start, n_bytes);
    while (valid < n_bytes) {
        size_t n;
        if (td_utf8_next(walk->start + valid, walk->end, &n) == TD_UTF8_INVALID) memset(walk->masked + valid, 1, n);
        valid += n;
    }
    return TD_OK;
}

typedef struct matching {
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
} matching;

static void free_matching(matching *m)
{
    if (!m) return;
    pcre2_match_context_free(m->context);
    pcre2_jit_stack_free(m->stack);
    free(m);
}

td_status td_split_regex_start(const td_split_regex *regex, td_split_walk *walk)
{
    size_t n_bytes = (size_t)(walk->end - walk->start);
    size_t valid = td_utf8_valid_prefix((const char *)walk->start, n_bytes);
    td_status st = valid < n_bytes ? mask_stray_bytes(walk, valid) : TD_OK;
    matching *m = calloc(1, sizeof *m);
    walk->context = m;
    walk->match = pcre2_match_data_create_from_pattern(regex->code, NULL);
    if (m) {
        m->context = pcre2_match_context_create(NULL);
        m->stack = pcre2_jit_stack_create(32 * 1024, JIT_STACK_BYTES, NULL);
    }
    if (st != TD_OK || !m || !walk->match || !m->context) {
        td_split_regex_stop(walk);
        return TD_ENOMEM;
    }
    pcre2_set_match_limit(m->context, MATCH_LIMIT);
    pcre2_jit_stack_assign(m->context, NULL, m->stack);
    return TD_OK;
}

void td_split_regex_stop(td_split_walk *walk)
{
    pcre2_match_data_free(walk->match);
    free_matching(walk->context);
    free(walk->masked);
    walk->match = NULL;
    walk->context = NULL;
    walk->masked = NULL;
}

/* Looks for the next nonempty match from walk->p on; none: match_start and match_end are the end of the text. An empty
 * match cuts the text where it stands, so it counts as one unless it stands at walk->p. */
static td_status find_match(const td_split_regex *regex, td_split_walk *walk)
{
    const unsigned char *text = walk->masked ? (const unsigned char *)walk->masked : walk->start;
    size_t n_bytes = (size_t)(walk->end - walk->start), from = (size_t)(walk->p - walk->start);
    const matching *m = walk->context;
    for (;;) {
        int rc = pcre2_match(regex->code, text, n_bytes, from, PCRE2_NO_UTF_CHECK, walk->match, m->context);
        if (rc == PCRE2_ERROR_NOMATCH) {
            walk->match_start = walk->match_end = walk->end;
            return TD_OK;
        }
        if (rc < 0) return rc == PCRE2_ERROR_NOMEMORY ? TD_ENOMEM : TD_EINVAL;
        const PCRE2_SIZE *at = pcre2_get_ovector_pointer(walk->match);
        if (at[1] < at[0] || at[0] < from) return TD_EINVAL; /* \K in a look-around */
        if (at[1] > at[0] || walk->start + at[0] > walk->p) {
            walk->match_start = walk->start + at[0];
            walk->match_end = walk->start + at[1];
            return TD_OK;
        }
        size_t n = 1; /* an empty match at the start cuts nothing: go on behind the next character */
        if (from == n_bytes) {
            walk->match_start = walk->match_end = walk->end;
            return TD_OK;
        }
        (void)td_utf8_next(text + from, text + n_bytes, &n);
        from += n;
    }
}

td_status td_split_regex_piece_end(const td_split_regex *regex, td_split_walk *walk, const unsigned char **after)
{
    if (!walk->match_start || walk->match_end <= walk->p) {
        td_status st = find_match(regex, walk);
        if (st != TD_OK) return st;
    }
    *after = walk->match_start > walk->p ? walk->match_start : walk->match_end;
    return TD_OK;
}
