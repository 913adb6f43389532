/* See args.h. */
#include "cli/args.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

bool td_args_help(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "help") == 0) return true;
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) return true;
    return false;
}

/* Whether "--word" is followed by its value. Unknown words take none: the parser will refuse them by name. */
static bool takes_value(const td_setting *table, int n, const char *word)
{
    if (strchr(word, '=')) return false;
    for (int i = 0; i < n; i++)
        if (strcmp(table[i].name, word + 2) == 0) return table[i].kind != TD_SETTING_FLAG;
    return false;
}

const char *td_args_take_word(const td_setting *table, int n, int *argc, char **argv)
{
    for (int i = 1; i < *argc; i++) {
        if (argv[i][0] == '-' && argv[i][1] == '-') {
            i += takes_value(table, n, argv[i]);
            continue;
        }
        char *word = argv[i];
        memmove(argv + i, argv + i + 1, (size_t)(*argc - i - 1) * sizeof *argv);
        (*argc)--;
        return word;
    }
    return NULL;
}

td_status td_args_numbers(const char *name, const char *text, int64_t min, int64_t max, int cap, int64_t *out, int *n,
                          td_error *err)
{
    int count = 0;
    for (const char *at = text;; at++) {
        char *end;
        errno = 0;
        long long x = strtoll(at, &end, 10);
        if (end == at || errno || (*end && *end != ','))
            return td_fail(err, TD_EINVAL, "--%s: '%s' is not a list of whole numbers such as 1,2,4", name, text);
        if (x < min || x > max)
            return td_fail(err, TD_EINVAL, "--%s: %lld is out of range; %lld to %lld are possible", name, x,
                           (long long)min, (long long)max);
        if (count == cap) return td_fail(err, TD_EINVAL, "--%s: more than %d numbers", name, cap);
        out[count++] = x;
        if (!*end) break;
        at = end;
    }
    *n = count;
    return TD_OK;
}
