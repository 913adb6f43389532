/* See settings.h. */
#include "base/settings.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int find(const td_setting *table, int n, const char *name, size_t n_bytes)
{
    for (int i = 0; i < n; i++)
        if (strlen(table[i].name) == n_bytes && memcmp(table[i].name, name, n_bytes) == 0) return i;
    return -1;
}

/* Edit distance, for "did you mean". Words are short. */
static int distance(const char *a, size_t n_a, const char *b)
{
    enum { CAP = 48 };
    size_t n_b = strlen(b);
    int row[CAP + 1];
    if (n_a > CAP || n_b > CAP) return CAP;
    for (size_t j = 0; j <= n_b; j++) row[j] = (int)j;
    for (size_t i = 1; i <= n_a; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= n_b; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[n_b];
}

static td_status unknown(const td_setting *table, int n, const char *word, size_t n_bytes, td_error *err)
{
    int best = 0;
    for (int i = 1; i < n; i++)
        if (distance(word, n_bytes, table[i].name) < distance(word, n_bytes, table[best].name)) best = i;
    if (distance(word, n_bytes, table[best].name) <= 3)
        return td_fail(err, TD_EINVAL, "--%.*s: no such setting; did you mean --%s?", (int)n_bytes, word,
                       table[best].name);
    return td_fail(err, TD_EINVAL, "--%.*s: no such setting; --help lists them", (int)n_bytes, word);
}

static bool one_of(const char *choices, const char *text)
{
    size_t n_bytes = strlen(text);
    for (const char *at = choices; at;) {
        const char *end = strchr(at, '|');
        size_t n = end ? (size_t)(end - at) : strlen(at);
        if (n == n_bytes && memcmp(at, text, n) == 0) return true;
        at = end ? end + 1 : NULL;
    }
    return false;
}

static td_status check_number(const td_setting *s, const char *text, td_error *err)
{
    char *end;
    errno = 0;
    double value = s->kind == TD_SETTING_INT ? (double)strtoll(text, &end, 10) : strtod(text, &end);
    const char *what = s->kind == TD_SETTING_INT ? "whole number" : "number";
    if (end == text || *end || errno || !isfinite(value))
        return td_fail(err, TD_EINVAL, "--%s: '%s' is not a %s", s->name, text, what);
    if (value < s->min || value > s->max)
        return td_fail(err, TD_EINVAL, "--%s: %s is out of range; %.15g to %.15g are possible", s->name, text, s->min,
                       s->max);
    return TD_OK;
}

static td_status check(const td_setting *s, const char *text, td_error *err)
{
    switch (s->kind) {
    case TD_SETTING_INT:
    case TD_SETTING_REAL: return check_number(s, text, err);
    case TD_SETTING_CHOICE:
        if (one_of(s->choices, text)) return TD_OK;
        return td_fail(err, TD_EINVAL, "--%s: '%s' is not one of %s", s->name, text, s->choices);
    case TD_SETTING_TEXT:
    case TD_SETTING_LIST:
        if (*text || s->min < 1) return TD_OK;
        return td_fail(err, TD_EINVAL, "--%s: the value is empty", s->name);
    case TD_SETTING_FLAG: return TD_OK;
    }
    return TD_OK;
}

static td_status set(td_settings *out, int i, const char *text, td_error *err)
{
    td_status status = check(&out->table[i], text, err);
    if (status) return status;
    if (out->table[i].kind == TD_SETTING_LIST) {
        if (out->n_list == TD_SETTING_LIST_MAX)
            return td_fail(err, TD_EINVAL, "--%s: more than %d values", out->table[i].name, TD_SETTING_LIST_MAX);
        out->list[out->n_list] = text;
        out->list_of[out->n_list++] = i;
    }
    out->text[i] = text;
    out->given[i] = true;
    return TD_OK;
}

td_status td_settings_parse(const td_setting *table, int n, int argc, char **argv, td_settings *out, td_error *err)
{
    td_check(n <= TD_SETTINGS_MAX);
    td_settings s = { .table = table, .n = n };
    td_status status;
    for (int i = 0; i < n; i++) s.text[i] = table[i].fallback;
    for (int a = 1; a < argc; a++) {
        const char *word = argv[a];
        if (strncmp(word, "--", 2) != 0)
            return td_fail(err, TD_EINVAL, "'%s': settings begin with --; --help lists them", word);
        word += 2;
        const char *equals = strchr(word, '=');
        size_t n_bytes = equals ? (size_t)(equals - word) : strlen(word);
        bool negated = n_bytes > 3 && memcmp(word, "no-", 3) == 0 && find(table, n, word, n_bytes) < 0;
        int i = negated ? find(table, n, word + 3, n_bytes - 3) : find(table, n, word, n_bytes);
        if (i < 0 || (negated && table[i].kind != TD_SETTING_FLAG)) return unknown(table, n, word, n_bytes, err);
        if (table[i].kind == TD_SETTING_FLAG) {
            if (equals) return td_fail(err, TD_EINVAL, "--%s takes no value", table[i].name);
            status = set(&s, i, negated ? "0" : "1", err);
        } else if (equals) {
            status = set(&s, i, equals + 1, err);
        } else if (a + 1 < argc) {
            status = set(&s, i, argv[++a], err);
        } else {
            status = td_fail(err, TD_EINVAL, "--%s: a value (%s) is missing", table[i].name, table[i].value);
        }
        if (status) return status;
    }
    for (int i = 0; i < n; i++)
        if (table[i].required && !s.text[i])
            return td_fail(err, TD_EINVAL, "--%s %s is needed: %s", table[i].name, table[i].value, table[i].help);
    *out = s;
    return TD_OK;
}

static int index_of(const td_settings *settings, const char *name)
{
    int i = find(settings->table, settings->n, name, strlen(name));
    td_check(i >= 0);
    return i;
}

const char *td_settings_text(const td_settings *settings, const char *name)
{
    return settings->text[index_of(settings, name)];
}

int64_t td_settings_int(const td_settings *settings, const char *name)
{
    const char *text = td_settings_text(settings, name);
    return text ? strtoll(text, NULL, 10) : 0;
}

double td_settings_real(const td_settings *settings, const char *name)
{
    const char *text = td_settings_text(settings, name);
    return text ? strtod(text, NULL) : 0.0;
}

bool td_settings_flag(const td_settings *settings, const char *name)
{
    const char *text = td_settings_text(settings, name);
    return text && strcmp(text, "1") == 0;
}

bool td_settings_given(const td_settings *settings, const char *name)
{
    return settings->given[index_of(settings, name)];
}

int td_settings_list(const td_settings *settings, const char *name, const char **out, int cap)
{
    int i = index_of(settings, name), n = 0;
    for (int k = 0; k < settings->n_list && n < cap; k++)
        if (settings->list_of[k] == i) out[n++] = settings->list[k];
    return n;
}

void td_settings_help(const td_setting *table, int n)
{
    for (int i = 0; i < n; i++) {
        const td_setting *s = &table[i];
        char head[64];
        if (s->group) printf("\n%s\n", s->group);
        snprintf(head, sizeof head, "--%s%s%s", s->name, s->kind == TD_SETTING_FLAG ? "" : " ",
                 s->kind == TD_SETTING_FLAG ? "" : s->value);
        printf("  %-28s %s", head, s->help);
        if (s->kind == TD_SETTING_CHOICE) printf(" [%s]", s->choices);
        if (s->kind == TD_SETTING_INT || s->kind == TD_SETTING_REAL) printf(" [%.15g..%.15g]", s->min, s->max);
        if (s->fallback && *s->fallback && s->kind != TD_SETTING_FLAG) printf(" (%s)", s->fallback);
        if (s->required) printf(" (needed)");
        printf("\n");
    }
}

size_t td_settings_canonical(const td_settings *settings, char *out, size_t cap_bytes)
{
    size_t n = 0;
    for (int i = 0; i < settings->n; i++) {
        if (!settings->table[i].same_on_ranks) continue;
        const char *text = settings->text[i] ? settings->text[i] : "";
        int k = snprintf(n < cap_bytes ? out + n : NULL, n < cap_bytes ? cap_bytes - n : 0, "%s=%s\n",
                         settings->table[i].name, text);
        n += k > 0 ? (size_t)k : 0;
    }
    return n;
}
