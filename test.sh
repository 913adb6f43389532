#!/usr/bin/env bash
# test.sh    installs what is missing (Debian 12, Ubuntu 24.04), builds, runs every test; the last line is the count.
# test.sh quick    the same without sanitizers, fuzzers, arm64 and static checks.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" || exit 1
exec scripts/test_all.sh "$@"
