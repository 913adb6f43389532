#!/usr/bin/env bash
# stop.sh    ends both ranks on this machine, saves their logs, and says so. Exit code 1 when one could not be stopped.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" || exit 1
ROOT=$PWD
case "${1:-}" in
'') ;;
-h | --help | help) sed -n '2p' stop.sh | sed 's/^# //'; exit 0 ;;
*) echo "error: stop.sh takes no arguments" >&2; exit 2 ;;
esac
# shellcheck source=scripts/config.sh
source scripts/config.sh
load_settings
check_stop_settings
# shellcheck source=scripts/ranks.sh
source scripts/ranks.sh

if ! rank_pid 0 >/dev/null && ! rank_pid 1 >/dev/null; then
    echo "tandem is not running."
    exit 0
fi
if [ "$DRY_RUN" = 1 ]; then
    for rank in 0 1; do pid=$(rank_pid $rank) && echo "would stop rank $rank, pid $pid"; done
    exit 0
fi
running=$(curl -gsS --noproxy '*' -m 3 "http://127.0.0.1:$(rank_port)/health" 2>/dev/null | sed -n 's/.*"requests_running":[[:space:]]*\([0-9]*\).*/\1/p')
[ "${running:-0}" = 0 ] || echo "warning: $running request(s) are running and get 10 s to finish" >&2
stop_ranks || { echo "error: a rank could not be stopped" >&2; exit 1; }
echo "tandem has stopped."
