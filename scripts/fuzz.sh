#!/usr/bin/env bash
# fuzz.sh PROGRAM SECONDS    runs one libFuzzer target on a copy of its corpus; what crashes it is kept in build/fuzz-findings.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
program=$1 seconds=$2
name=$(basename "$program")
corpus=tests/fuzz/corpus/${name#fuzz_}
work=build/fuzz-corpus/$name findings=build/fuzz-findings
mkdir -p "$work" "$findings"
args=(-max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix="$findings/$name-")
set -- "$work"
if [ -d "$corpus" ]; then set -- "$work" "$corpus"; fi
ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1 "$program" "${args[@]}" "$@"
