/* The program's front door: picks the subcommand. */
#include "cli/cli.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help;
} commands[] = {
    { "serve", td_cli_serve, "run one rank of the server" },
    { "chat", td_cli_chat, "talk to a running server in the terminal" },
    { "info", td_cli_info, "what a checkpoint holds, and whether it can be served" },
    { "plan", td_cli_plan, "what a server would take of memory, and the largest window that fits" },
    { "quantize", td_cli_quantize, "make an EXL3 checkpoint from a BF16 one" },
    { "bench", td_cli_bench, "measure a running server, or the block operations on this machine" },
    { "smoke", td_cli_smoke, "ask a running server one question and judge the answer" },
    { "linktest", td_cli_linktest, "measure the link between two machines or processes" },
    { "opcheck", td_cli_opcheck, "compare every block operation on the GPU with the CPU" },
};

static int help(FILE *out)
{
    fprintf(out, "tandem " TD_VERSION ": GLM-5.3-Flash on two machines, behind an OpenAI-compatible API\n\n"
                 "usage: tandem COMMAND [settings]     tandem COMMAND --help explains each\n\n");
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].help);
    fprintf(out, "\nFirst time? ./start.sh builds the program and serves the bundled demo model on this machine.\n");
    return out == stdout ? TD_EXIT_OK : TD_EXIT_ARGUMENTS;
}

/* What libraries read from the environment; whoever sets these keeps them.
 *
 * Kernels are loaded when the GPU is first asked for, not one by one when they are first used: then what is free
 * afterwards is free, and no request waits for one.
 *
 * Worker threads that spin while they wait would take the cores from the other rank, the API and each other: on a busy
 * machine a decode step takes 60 times as long. The OpenMP runtime reads its policy before main(), so it has to be
 * there from the start. */
static void prepare_environment(char **argv)
{
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    if (getenv("OMP_WAIT_POLICY")) return;
    char program[4096]; /* by its own path: the process keeps its name */
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    if (n <= 0) return;
    program[n] = '\0';
    setenv("OMP_WAIT_POLICY", "passive", 1);
    execv(program, argv); /* returns only when the file is gone: then threads spin */
}

int main(int argc, char **argv)
{
    prepare_environment(argv);
    signal(SIGPIPE, SIG_IGN);
    if (argc < 2) return help(stderr);
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0)
        return help(stdout);
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "version") == 0) {
        printf("tandem " TD_VERSION "\n");
        return TD_EXIT_OK;
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (strcmp(argv[1], commands[i].name) == 0) return commands[i].run(argc - 1, argv + 1);
    fprintf(stderr, "tandem: there is no command '%s'; tandem --help lists them\n", argv[1]);
    return TD_EXIT_ARGUMENTS;
}
