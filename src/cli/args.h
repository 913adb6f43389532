/* What every command does with its words before the settings table reads them. */
#ifndef TD_CLI_ARGS_H
#define TD_CLI_ARGS_H

#include "base/settings.h"

TD_BEGIN_C

/* "--help", "-h" or, as the first word, "help". */
bool td_args_help(int argc, char **argv);

/* Takes the first word that is neither a setting nor a setting's value out of argv and returns it; NULL: there is none.
 * So a command's one operand (a URL, a folder) may stand before, after or between its settings. */
const char *td_args_take_word(const td_setting *table, int n, int *argc, char **argv);

/* "1,2,4" into out; TD_EINVAL names the setting: not a list of whole numbers, one out of min..max, or more than cap. */
td_status td_args_numbers(const char *name, const char *text, int64_t min, int64_t max, int cap, int64_t *out, int *n,
                          td_error *err);

TD_END_C
#endif
