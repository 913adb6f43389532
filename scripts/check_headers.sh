#!/usr/bin/env bash
# check_headers.sh    every header of src/ compiles alone, as C17 and as C++17 (CUDA files include some of them); those of
# src/ops/cuda are for nvcc.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." || exit 1
flags=(-Isrc -D_GNU_SOURCE -Wall -Wextra -Werror -fsyntax-only)
# shellcheck disable=SC2207
libs=($(pkg-config --cflags libmicrohttpd ucx libpcre2-8 libcurl))
bad=0
for header in $(git ls-files 'src/*.h' | sort); do
    case $header in src/ops/cuda/*) continue ;; esac
    gcc -std=c17 "${flags[@]}" "${libs[@]}" -Wno-pragma-once-outside-header -x c "$header" || bad=1
    case $header in src/server/* | src/cli/* | src/link/* | src/engine/* | src/model/internal.h) continue ;; esac
    g++ -std=c++17 "${flags[@]}" "${libs[@]}" -x c++ "$header" || bad=1
done
exit $bad
