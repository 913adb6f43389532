#!/bin/sh
# usage: nvcc_report.sh REPORT nvcc ...: runs the compiler with its report in a file; shows the file when it fails.
report=$1
shift
if "$@" >"$report" 2>&1; then exit 0; fi
cat "$report" >&2
exit 1
