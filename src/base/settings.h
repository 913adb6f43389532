/* Settings of a subcommand: one table says name, kind, default, range, unit, meaning; parsing, refusals, --help and the
 * comparison of ranks all read it. A value is "--name value" or "--name=value"; the last occurrence wins; flags take
 * none. */
#ifndef TD_BASE_SETTINGS_H
#define TD_BASE_SETTINGS_H

#include "base/status.h"

TD_BEGIN_C

typedef enum td_setting_kind {
    TD_SETTING_TEXT,   /* any text; min 1: may not be empty */
    TD_SETTING_INT,    /* min..max */
    TD_SETTING_REAL,   /* min..max, finite */
    TD_SETTING_CHOICE, /* one of choices, "a|b|c" */
    TD_SETTING_FLAG,   /* present or not; "--no-name" takes it back */
    TD_SETTING_LIST    /* text, may be given several times */
} td_setting_kind;

typedef struct td_setting {
    const char *name; /* without the dashes */
    td_setting_kind kind;
    const char *fallback; /* default as text; NULL: none (required when `required`) */
    double min, max;
    const char *choices;
    const char *value; /* what --help shows: "TOKENS", "DIR" */
    const char *help;
    const char *group; /* heading in --help; NULL: that of the one before */
    bool required;
    bool same_on_ranks; /* decides bits or exchanges: compared when the ranks meet */
} td_setting;

enum { TD_SETTINGS_MAX = 64, TD_SETTING_LIST_MAX = 64 };

typedef struct td_settings {
    const td_setting *table;
    int n;
    const char *text[TD_SETTINGS_MAX]; /* given or default; borrowed from argv and the table */
    bool given[TD_SETTINGS_MAX];
    const char *list[TD_SETTING_LIST_MAX];
    int list_of[TD_SETTING_LIST_MAX]; /* which setting list[i] belongs to */
    int n_list;
} td_settings;

/* argv[0] is the subcommand. Positional words are refused, naming the nearest setting. TD_EINVAL names the setting,
 * what was given and what is allowed. */
td_status td_settings_parse(const td_setting *table, int n, int argc, char **argv, td_settings *out, td_error *err);

/* By name; a name that is not in the table is our own mistake and aborts. */
const char *td_settings_text(const td_settings *settings, const char *name);
int64_t td_settings_int(const td_settings *settings, const char *name);
double td_settings_real(const td_settings *settings, const char *name);
bool td_settings_flag(const td_settings *settings, const char *name);
bool td_settings_given(const td_settings *settings, const char *name);
int td_settings_list(const td_settings *settings, const char *name, const char **out, int cap);

/* The table as help text, to stdout. */
void td_settings_help(const td_setting *table, int n);

/* "name=value\n" of every same_on_ranks setting, for the handshake. Returns the bytes it wants, as snprintf. */
size_t td_settings_canonical(const td_settings *settings, char *out, size_t cap_bytes);

TD_END_C
#endif
