/* See stop.h. One Knuth-Morris-Pratt automaton a stop string: at most TD_STOP_MAX of them, so an automaton for all of
 * them together would be more code for no gain. */
#include "text/stop.h"

#include <string.h>

static td_status add_string(td_stop *stop, td_arena *arena, const td_json *value, td_error *err)
{
    size_t n;
    const char *text = td_json_string(value, &n);
    if (!text) return td_fail(err, TD_EINVAL, "stop: strings expected, got %s", td_json_kind_name(value));
    if (!n) return td_fail(err, TD_EINVAL, "stop: a stop string is empty");
    if (n > TD_STOP_MAX_BYTES)
        return td_fail(err, TD_EINVAL, "stop: a stop string of %zu bytes, at most %d allowed", n, TD_STOP_MAX_BYTES);
    char *copy = td_arena_strndup(arena, text, n);
    uint16_t *fail = (uint16_t *)td_arena_take(arena, n * sizeof *fail, _Alignof(uint16_t));
    if (!copy || !fail) return td_fail(err, TD_ENOMEM, "out of memory");
    fail[0] = 0;
    for (size_t i = 1, k = 0; i < n; i++) {
        while (k && copy[i] != copy[k]) k = fail[k - 1];
        if (copy[i] == copy[k]) k++;
        fail[i] = (uint16_t)k;
    }
    stop->strings[stop->n_strings++] = (td_stop_string){ .text = copy, .fail = fail, .n_bytes = (uint16_t)n };
    return TD_OK;
}

td_status td_stop_init(td_stop *stop, td_arena *arena, const td_json *value, td_error *err)
{
    td_stop made = { 0 };
    td_status status = TD_OK;
    if (td_json_kind_of(value) == TD_JSON_ARRAY) {
        size_t n = td_json_count(value);
        if (n > TD_STOP_MAX)
            return td_fail(err, TD_EINVAL, "stop: %zu stop strings, at most %d allowed", n, TD_STOP_MAX);
        for (size_t i = 0; i < n && !status; i++) status = add_string(&made, arena, td_json_at(value, i), err);
    } else if (!td_json_is_null(value)) {
        status = add_string(&made, arena, value, err);
    }
    if (!status) *stop = made;
    return status;
}

int td_stop_step(td_stop *stop, unsigned char byte)
{
    int found = -1;
    for (int i = 0; i < stop->n_strings; i++) {
        td_stop_string *s = &stop->strings[i];
        uint16_t k = s->n_matched;
        while (k && (unsigned char)s->text[k] != byte) k = s->fail[k - 1];
        if ((unsigned char)s->text[k] == byte) k++;
        if (k == s->n_bytes) {
            if (found < 0 || k > stop->strings[found].n_bytes) found = i;
            k = s->fail[k - 1]; /* goes on as if nothing had been found: the caller may decide that it does not count */
        }
        s->n_matched = k;
    }
    return found;
}

size_t td_stop_held(const td_stop *stop)
{
    size_t held = 0;
    for (int i = 0; i < stop->n_strings; i++)
        if (stop->strings[i].n_matched > held) held = stop->strings[i].n_matched;
    return held;
}
