#!/usr/bin/env bash
# build.sh [DIR]    configures (once) and builds the program in DIR (build/cpu); quick when nothing changed.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
dir=${1:-$PWD/build/cpu}
log=$dir/build.log
mkdir -p "$dir"
if ! { [ -f "$dir/build.ninja" ] || cmake -S . -B "$dir" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo; } > "$log" 2>&1; then
    tail -n 30 "$log" >&2
    exit 1
fi
if [ -t 1 ]; then
    cmake --build "$dir" --target tandem
elif ! cmake --build "$dir" --target tandem >> "$log" 2>&1; then
    tail -n 30 "$log" >&2
    exit 1
fi
