#!/bin/sh
# Makes models/demo again from its unquantised source and compares every byte. About five minutes of one core.
# usage: tests/oracle/exl3/regenerate.sh TANDEM BF16-CHECKPOINT [THREADS]
set -eu
[ $# -ge 2 ] || { sed -n '2,3s/^# //p' "$0"; exit 2; }
root=$(cd "$(dirname "$0")/../../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$1" quantize "$2" "$work/demo" --bits 4 --codebook mcg --shard-mb 12 --threads "${3:-0}"
status=0
for file in "$work"/demo/*; do
    cmp "$file" "$root/models/demo/$(basename "$file")" || status=1
done
[ $status = 0 ] && echo "models/demo: the same bytes"
exit $status
