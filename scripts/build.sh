#!/usr/bin/env bash
# build.sh [DIR [ARCHS]]    configures (once) and builds the program in DIR (build/cpu); quick when nothing changed. ARCHS: with the
# CUDA operations for these compute capabilities ("121", "90;121").
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
dir=${1:-$PWD/build/cpu}
log=$dir/build.log
cuda=()
if [ -n "${2:-}" ]; then cuda=(-DTD_CUDA=ON "-DTD_CUDA_ARCHS=$2"); fi
mkdir -p "$dir"
# Configured already, and for these cards if it is a build for cards?
configured() {
    [ -f "$dir/build.ninja" ] && { [ -z "${2:-}" ] || grep -q "^TD_CUDA_ARCHS:[A-Z]*=$2\$" "$dir/CMakeCache.txt"; }
}
if ! { configured "$@" || cmake -S . -B "$dir" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo "${cuda[@]}"; } > "$log" 2>&1; then
    tail -n 30 "$log" >&2
    exit 1
fi
if [ -t 1 ]; then
    cmake --build "$dir" --target tandem
elif ! cmake --build "$dir" --target tandem >> "$log" 2>&1; then
    tail -n 30 "$log" >&2
    exit 1
fi
