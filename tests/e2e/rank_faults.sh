#!/usr/bin/env bash
# shellcheck disable=SC2119
# rank_faults.sh TANDEM [STOP_SECONDS]    ranks killed while they load, idle and in a reply; one stopped for a while in a reply; a
# second rank 1; ranks with different settings. The other rank ends with the code that says why, and no client ever hangs.
set -uo pipefail

TANDEM=$1
STOP_SECONDS=${2:-3}
# shellcheck source=tests/e2e/ranks.sh
source "$(dirname "$0")/ranks.sh"
STORY='{"messages":[{"role":"user","content":"Tell me a story."}],"temperature":0,"ignore_eos":true,"max_tokens":1500}'
STREAM=${STORY%\}},\"stream\":true\}

echo '--- loading'
next_port
start_rank 0
wait_line "$WORK/rank0.log" 'loading' 20
port=$(sed -n 's/.* port \([0-9]*\), loading.*/\1/p' "$WORK/rank0.log")
expect 'health while loading' "$(curl -gs --noproxy '*' -o /dev/null -w '%{http_code}' "http://127.0.0.1:$port/health")" 503
expect 'models while loading' "$(curl -gs --noproxy '*' -o /dev/null -w '%{http_code}' "http://127.0.0.1:$port/v1/models")" 503
start_rank 1
wait_line "$WORK/rank1.log" 'pair' 20
kill -KILL "$PID1"
wait_exit "$PID0" 20
expect 'rank 0 after rank 1 was killed while loading' $? 4
for delay in 0 0.05 0.1 0.15 0.2; do # and at any other moment of it
    next_port
    start_rank 0
    start_rank 1
    wait_line "$WORK/rank1.log" 'pair' 20
    sleep $delay
    kill -KILL "$PID0"
    wait_exit "$PID1" 20
    expect "rank 1 after rank 0 was killed $delay s after they met" $? 4
done

echo '--- idle'
for rank in 0 1; do
    start_ranks
    victim=PID$rank other=PID$((1 - rank))
    kill -KILL "${!victim}"
    wait_exit "${!other}" 20
    expect "the other one after rank $rank was killed idle" $? 4
done

echo '--- in a reply'
for form in plain stream; do
    start_ranks
    request=$STORY
    [ $form = stream ] && request=$STREAM
    ask "$request" > "$WORK/body" &
    client=$!
    sleep 0.7
    kill -KILL "$PID1"
    wait_exit $client 10
    expect "$form: the client's request ended" $? 0
    grep -q '"error"' "$WORK/body" || fail "$form: no error in $(tail -c 300 "$WORK/body")"
    wait_exit "$PID0" 20
    expect "$form: rank 0 after rank 1 was killed" $? 4
done
start_ranks
ask "$STREAM" > "$WORK/body" 2>/dev/null &
client=$!
sleep 0.7
kill -KILL "$PID0"
wait_exit $client 10
[ $? -ne 255 ] || fail 'the client of a killed rank 0 hangs'
wait_exit "$PID1" 20
expect 'rank 1 after rank 0 was killed in a reply' $? 4

echo "--- stopped for $STOP_SECONDS s"
start_ranks
SHORT='{"messages":[{"role":"user","content":"Tell me a story."}],"temperature":0,"ignore_eos":true,"max_tokens":200}'
want=$(ask "$SHORT" | jq -r .tandem.token_sha)
ask "$SHORT" > "$WORK/body" &
client=$!
sleep 0.3
kill -STOP "$PID1"
sleep "$STOP_SECONDS"
kill -CONT "$PID1"
wait_exit $client 60
expect 'the request beside it' $? 0
expect 'its tokens' "$(jq -r .tandem.token_sha "$WORK/body")" "$want"

echo '--- a second rank 1'
first=$PID1
start_rank 1
second=$PID1
wait_exit "$second" 20
expect 'the second rank 1' $? 4
wait_exit "$PID0" 20
expect 'rank 0' $? 4
wait_exit "$first" 20
expect 'the first rank 1' $? 4

echo '--- settings differ'
next_port
start_rank 0 --kv bf16
start_rank 1 --kv fp8
wait_exit "$PID0" 20
expect 'rank 0' $? 2
wait_exit "$PID1" 20
expect 'rank 1' $? 2
grep -q 'kv.*fp8' "$WORK/rank0.log" || fail "the key is not named: $(tail -n 2 "$WORK/rank0.log")"

echo '--- a stop that is announced'
start_ranks
kill -TERM "$PID1"
wait_exit "$PID1" 20
expect 'rank 1 after SIGTERM' $? 0
wait_exit "$PID0" 20
expect 'rank 0 after a clean stop of rank 1' $? 0
finish
