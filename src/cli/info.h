/* tandem info: what a checkpoint folder is, and whether this program would serve it. */
#ifndef TD_CLI_INFO_H
#define TD_CLI_INFO_H

#include "base/status.h"

TD_BEGIN_C

/* argv[0] is "info". Exit code: 0 would be served, 1 refused or unreadable, 2 bad arguments. */
int td_cli_info(int argc, char **argv);

TD_END_C
#endif
