#!/usr/bin/env bash
# check_symbols.sh BUILD    no global symbol of our libraries is without the td_ prefix.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." || exit 1
bad=$(find "$1/src" -name 'libtd_*.a' -exec nm -g --defined-only {} + 2>/dev/null |
    awk 'NF == 3 && $3 !~ /^td_/ && $3 !~ /^(__asan|__ubsan|__odr|__sanitizer)/ { print $3 }' | sort -u)
[ -z "$bad" ] || { printf 'global symbols without td_:\n%s\n' "$bad"; exit 1; }
