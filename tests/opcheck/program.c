/* td_opcheck: `tandem opcheck` without the rest of tandem, for compute-sanitizer, ncu and machines with nothing but a
 * driver. */
#include "cli/cli.h"

int main(int argc, char **argv)
{
    return td_cli_opcheck(argc, argv);
}
