/* See handshake.h. Quadratic in the number of lines, which is bounded; a hostile text costs at most a few milliseconds.
 */
#include "link/handshake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "link/message.h"

#define SHOWN_VALUE_BYTES 160

typedef struct line {
    const char *key, *value;
    size_t n_key, n_value;
} line;

/* The line that starts at *at; moves *at behind it. false: no well-formed line there. */
static bool next_line(const char **at, const char *end, line *out)
{
    const char *stop = memchr(*at, '\n', (size_t)(end - *at));
    const char *equals = stop ? memchr(*at, '=', (size_t)(stop - *at)) : NULL;
    if (!equals || equals == *at) return false;
    *out = (line){
        .key = *at, .value = equals + 1, .n_key = (size_t)(equals - *at), .n_value = (size_t)(stop - equals - 1)
    };
    *at = stop + 1;
    return true;
}

static bool key_byte(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           (c != 0 && strchr("@_.-", c) != NULL);
}

static bool find(const char *text, const char *end, const char *key, size_t n_key, line *out)
{
    for (const char *at = text; at < end && next_line(&at, end, out);)
        if (out->n_key == n_key && memcmp(out->key, key, n_key) == 0) return true;
    return false;
}

td_status td_identity_check(const char *text, size_t n_bytes, td_error *err)
{
    if (n_bytes > TD_IDENTITY_MAX)
        return td_fail(err, TD_EFORMAT, "settings text of %zu bytes, at most %zu are allowed", n_bytes,
                       TD_IDENTITY_MAX);
    const char *at = text, *end = text + n_bytes;
    int lines = 0;
    while (at < end) {
        const char *start = at;
        line l, first;
        if (++lines > TD_IDENTITY_LINES_MAX)
            return td_fail(err, TD_EFORMAT, "settings text of more than %d lines", TD_IDENTITY_LINES_MAX);
        if (!next_line(&at, end, &l)) return td_fail(err, TD_EFORMAT, "settings line %d is not key=value", lines);
        for (size_t i = 0; i < l.n_key; i++)
            if (!key_byte(l.key[i])) return td_fail(err, TD_EFORMAT, "settings line %d: wrong byte in the key", lines);
        for (size_t i = 0; i < l.n_value; i++)
            if ((unsigned char)l.value[i] < 0x20 || l.value[i] == 0x7f)
                return td_fail(err, TD_EFORMAT, "settings line %d: control byte in the value", lines);
        if (find(text, start, l.key, l.n_key, &first))
            return td_fail(err, TD_EFORMAT, "settings line %d: %.*s is there twice", lines, (int)l.n_key, l.key);
    }
    return TD_OK;
}

td_status td_identity_create(const td_link_options *o, char **text, size_t *n_bytes, td_error *err)
{
    char *buf = malloc(TD_IDENTITY_MAX + 1);
    if (!buf) return td_fail(err, TD_ENOMEM, "link: no memory for the settings text");
    /* The order is the order of complaints: who it is first, then what it runs, then how. */
    int n = snprintf(buf, TD_IDENTITY_MAX + 1,
                     "@world=%d\n@rank=%d\n@build=%s\n@checkpoint=%s\n@transport=%s\n@gather_max_bytes=%zu\n%s",
                     o->world, o->rank, o->build ? o->build : "", o->checkpoint ? o->checkpoint : "", o->transport,
                     o->gather_max_bytes, o->settings ? o->settings : "");
    td_status status = TD_OK;
    if (n < 0 || (size_t)n > TD_IDENTITY_MAX)
        status = td_fail(err, TD_EINVAL, "settings text: more than %zu bytes", TD_IDENTITY_MAX);
    else if (td_identity_check(buf, (size_t)n, err) != TD_OK)
        status = td_error_prefix(err, "this rank's own settings");
    if (status != TD_OK) {
        if (err) err->status = TD_EINVAL;
        free(buf);
        return TD_EINVAL;
    }
    *text = buf;
    *n_bytes = (size_t)n;
    return TD_OK;
}

/* "the ranks differ in kv: rank 0 has 'fp8', rank 1 has 'bf16'"; NULL = that rank has no such key. */
static td_status differ(const line *mine, const line *theirs, int my_rank, td_error *err)
{
    char value[2][SHOWN_VALUE_BYTES + 8], key[80];
    const line *of_rank[2] = { my_rank == 0 ? mine : theirs, my_rank == 0 ? theirs : mine };
    for (int r = 0; r < 2; r++) {
        if (!of_rank[r]) {
            snprintf(value[r], sizeof value[r], "no such setting");
            continue;
        }
        char shown[SHOWN_VALUE_BYTES];
        td_printable(shown, sizeof shown, of_rank[r]->value, of_rank[r]->n_value);
        snprintf(value[r], sizeof value[r], "'%s'", shown);
    }
    const line *named = mine ? mine : theirs;
    bool own_key = named->key[0] == '@';
    td_printable(key, sizeof key, named->key + own_key, named->n_key - own_key);
    return td_fail(err, TD_EINVAL, "the ranks differ in %s: rank 0 has %s, rank 1 has %s", key, value[0], value[1]);
}

static bool is_rank(const line *l)
{
    return l->n_key == 5 && memcmp(l->key, "@rank", 5) == 0;
}

td_status td_identity_compare(const char *mine, size_t mine_bytes, int my_rank, const char *theirs, size_t theirs_bytes,
                              int other_rank, td_error *err)
{
    const char *mine_end = mine + mine_bytes, *theirs_end = theirs + theirs_bytes;
    line a, b;
    char digit = (char)('0' + other_rank);
    if (!find(theirs, theirs_end, "@rank", 5, &b) || b.n_value != 1 || b.value[0] != digit) {
        char shown[16] = "nothing";
        if (find(theirs, theirs_end, "@rank", 5, &b)) td_printable(shown, sizeof shown, b.value, b.n_value);
        return td_fail(err, TD_EINVAL, "the other end says it is rank %s, expected rank %d (both started alike?)",
                       shown, other_rank);
    }
    for (const char *at = mine; at < mine_end && next_line(&at, mine_end, &a);) {
        if (is_rank(&a)) continue;
        bool there = find(theirs, theirs_end, a.key, a.n_key, &b);
        if (!there || a.n_value != b.n_value || memcmp(a.value, b.value, a.n_value) != 0)
            return differ(&a, there ? &b : NULL, my_rank, err);
    }
    for (const char *at = theirs; at < theirs_end && next_line(&at, theirs_end, &b);)
        if (!find(mine, mine_end, b.key, b.n_key, &a)) return differ(NULL, &b, my_rank, err);
    return TD_OK;
}
