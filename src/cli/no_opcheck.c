/* tandem opcheck in a program without CUDA operations: there is nothing to compare. */
#include "cli/cli.h"

#include "cli/args.h"

#include <stdio.h>

int td_cli_opcheck(int argc, char **argv)
{
    if (td_args_help(argc, argv)) {
        printf("usage: tandem opcheck [settings]\n\n"
               "Every block operation on the GPU against the CPU. This build has no CUDA operations to check:\n"
               "    scripts/build.sh build/cuda \"90;121\" && build/cuda/src/cli/tandem opcheck --help\n"
               "makes one that has, where nvcc is (docs/cuda.md). A GPU is needed to run it.\n");
        return TD_EXIT_OK;
    }
    fprintf(stderr, "tandem opcheck: this build has no CUDA operations to check; --help says how to make one\n");
    return TD_EXIT_FAILED;
}
