#!/usr/bin/env bash
# shellcheck disable=SC2119
# rank_signals.sh TANDEM    SIGTERM to either rank at every stage: both end with 0, soon, and running replies end; signals that must not
# end anything do not.
set -uo pipefail

TANDEM=$1
# shellcheck source=tests/e2e/ranks.sh
source "$(dirname "$0")/ranks.sh"
STORY='{"messages":[{"role":"user","content":"Tell me a story."}],"temperature":0,"ignore_eos":true,"max_tokens":MAX}'

both_end() { # what
    local what=$1 pid0=$PID0 pid1=$PID1
    wait_exit "$pid0" 8
    expect "$what: rank 0" $? 0
    wait_exit "$pid1" 8
    expect "$what: rank 1" $? 0
}

for rank in 0 1; do
    echo "--- alone, waiting for the other one: rank $rank"
    next_port
    start_rank $rank
    pid=PID$rank
    wait_line "$WORK/rank$rank.log" 'memory:' 20
    sleep 0.2
    kill -TERM "${!pid}"
    wait_exit "${!pid}" 8
    expect "rank $rank alone" $? 0
done

for rank in 0 1; do
    for delay in 0 0.05 0.1 0.2; do
        echo "--- $delay s after they met: rank $rank"
        next_port
        start_rank 1
        start_rank 0
        wait_line "$WORK/rank$rank.log" 'pair' 20
        sleep $delay
        pid=PID$rank
        kill -TERM "${!pid}"
        both_end "SIGTERM to rank $rank after $delay s"
    done
done

echo '--- rank 0 has loaded, rank 1 stands still'
next_port
start_rank 1
start_rank 0
wait_line "$WORK/rank1.log" 'pair formed over' 20
kill -STOP "$PID1"
sleep 3
kill -TERM "$PID0"
wait_exit "$PID0" 8
expect 'rank 0' $? 0
kill -CONT "$PID1"
wait_exit "$PID1" 8
expect 'rank 1' $? 0

echo '--- signals that end nothing'
start_ranks
for signal in USR1 HUP; do
    for pid in "$PID0" "$PID1"; do kill -$signal "$pid"; done
done
sleep 0.3
expect 'a request after them' "$(ask "${STORY/MAX/3}" | jq -r .usage.completion_tokens)" 3
kill -TERM "$PID0"
both_end 'SIGTERM after SIGUSR1 and SIGHUP'

echo '--- in a reply'
start_ranks
ask "${STORY/MAX/120}" > "$WORK/body" &
client=$!
until curl -gs --noproxy '*' "$URL/health" | grep -q '"requests_running":1'; do sleep 0.02; done
kill -TERM "$PID0"
wait_exit $client 20
expect 'the reply' "$(jq -r .usage.completion_tokens "$WORK/body")" 120
both_end 'SIGTERM to rank 0 in a reply'
start_ranks
ask "${STORY/MAX/2000}" > "$WORK/body" &
client=$!
until curl -gs --noproxy '*' "$URL/health" | grep -q '"requests_running":1'; do sleep 0.02; done
kill -TERM "$PID1"
wait_exit $client 20
expect 'the reply' "$(jq -r .error.message "$WORK/body")" 'the server is stopping'
both_end 'SIGTERM to rank 1 in a reply'
finish
