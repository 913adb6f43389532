#!/usr/bin/env bash
# check_format.sh    every C source is laid out as .clang-format says (version 14, Debian 12's; other versions only warn).
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
version=$(clang-format --version | sed -n 's/.*version \([0-9]*\).*/\1/p')
if [ "$version" != 14 ]; then
    echo "clang-format $version lays out some lines differently; the check wants 14"
    exit 0
fi
git ls-files '*.c' '*.h' '*.cu' | xargs clang-format --dry-run -Werror
