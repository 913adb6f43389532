#!/usr/bin/env bash
# shellcheck disable=SC2119
# with_ranks.sh TANDEM COMMAND...    two real ranks of the demo model; the command runs with TD_URL and TD_MODEL set. Both ranks must
# then end cleanly.
set -uo pipefail

TANDEM=$1
shift
# shellcheck source=tests/e2e/ranks.sh
source "$(dirname "$0")/ranks.sh"
start_ranks
TD_URL=$URL TD_MODEL=$(basename "$MODEL") "$@"
expect "the command's exit code" $? 0
kill -TERM "$PID0"
wait_exit "$PID0" 20
expect 'exit code of rank 0' $? 0
wait_exit "$PID1" 20
expect 'exit code of rank 1' $? 0
if [ "$failures" != 0 ]; then tail -n 30 "$WORK"/rank*.log; fi
finish
