/* The subcommands: argv[0] is the subcommand's own name; the return value is the process's exit code:
 * 0 done, 1 failed, 2 bad arguments, 3 does not fit in memory, 4 peer lost. */
#ifndef TD_CLI_CLI_H
#define TD_CLI_CLI_H

#define TD_VERSION "0.1.0"

enum { TD_EXIT_OK = 0, TD_EXIT_FAILED = 1, TD_EXIT_ARGUMENTS = 2, TD_EXIT_MEMORY = 3, TD_EXIT_PEER = 4 };

int td_cli_serve(int argc, char **argv);
int td_cli_chat(int argc, char **argv);
int td_cli_smoke(int argc, char **argv);
int td_cli_bench(int argc, char **argv);
int td_cli_plan(int argc, char **argv);
int td_cli_info(int argc, char **argv);
int td_cli_quantize(int argc, char **argv);
int td_cli_linktest(int argc, char **argv);
int td_cli_opcheck(int argc, char **argv); /* tests/opcheck, or no_opcheck.c in a build without CUDA */

#endif
