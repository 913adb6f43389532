/* tandem opcheck in a program without CUDA operations: there is nothing to compare. */
#include "cli/cli.h"

#include <stdio.h>

int td_cli_opcheck(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    fprintf(stderr, "tandem opcheck: this build has no CUDA operations to check (-DTD_CUDA=ON makes one that has)\n");
    return TD_EXIT_FAILED;
}
