#!/usr/bin/env bash
# start_test.sh BUILD_DIR    start.sh and stop.sh as a person uses them, in a copy of the tree's scripts with its own state folder.
set -uo pipefail
BUILD_DIR=$(readlink -f "$1")
SOURCE=$PWD
WORK=$(mktemp -d)
failures=0
export BUILD_DIR STATE_DIR=$WORK/state LOG_DIR=$WORK/logs HOME=$WORK
unset MODEL CONTEXT KV PARALLEL THINKING WORKER
cleanup() {
    (cd "$WORK/tree" && ./stop.sh > /dev/null 2>&1)
    rm -rf "$WORK"
}
trap cleanup EXIT

fail() {
    echo "FAILED: $*"
    failures=$((failures + 1))
}
expect() { # what got wanted
    if [ "$2" = "$3" ]; then echo "ok: $1"; else fail "$1: '$2', expected '$3'"; fi
}
contains() { # what text part
    case $2 in *"$3"*) echo "ok: $1" ;; *) fail "$1: '$3' is not in: $2" ;; esac
}

mkdir -p "$WORK/tree"
cp -r start.sh stop.sh scripts "$WORK/tree/"
rm -f "$WORK/tree/scripts/local.sh"
ln -s "$SOURCE/models" "$WORK/tree/models"
cd "$WORK/tree" || exit 1
export PORT=$((20000 + RANDOM % 6000)) MASTER_PORT=$((26000 + RANDOM % 6000))

out=$(./stop.sh)
expect 'stop with nothing running' "$out" 'tandem is not running.'

before=$(find "$WORK" | sort)
out=$(DRY_RUN=1 ./start.sh --max-tokens 77 2>&1)
expect 'dry run: exit code' $? 0
contains 'dry run: the command of rank 1' "$out" '--rank 1 --world 2'
contains 'dry run: further arguments' "$out" '--max-tokens 77'
expect 'dry run: nothing changed but the lock' "$(find "$WORK" | grep -v state | sort)" "$(grep -v state <<<"$before")"

# shellcheck disable=SC2016
printf 'export KV="fp8" # comment\nCONTEXT=4096   # tokens\nPARALLEL=3\nBROKEN LINE\nTHINKING=$(touch %s/executed)\n' "$WORK" > .env
printf 'PARALLEL=2\nCONTEXT=8192\n' > scripts/local.sh
out=$(THINKING=1 CONTEXT=2048 DRY_RUN=1 ./start.sh 2>&1)
contains 'environment beats local.sh' "$out" '--context 2048'
contains 'local.sh beats .env' "$out" '--parallel 2'
contains '.env beats the defaults' "$out" '--kv fp8'
out=$(DRY_RUN=1 ./start.sh 2>&1)
contains '.env is not executed' "$out" "THINKING: '\$(touch"
[ ! -e "$WORK/executed" ] || fail '.env was executed'
rm .env scripts/local.sh

out=$(WORKER=user@192.0.2.2 ./start.sh 2>&1)
expect 'WORKER: exit code' $? 1
contains 'WORKER: message' "$out" 'two machines'
out=$(PORT=x ./start.sh 2>&1)
contains 'bad PORT' "$out" "PORT: 'x'"

out=$(./start.sh 2>&1)
expect 'start: exit code' $? 0
contains 'start: LIVE' "$out" 'demo is now LIVE!'
contains 'start: address' "$out" "http://127.0.0.1:$PORT/v1"
pids=$(cat "$STATE_DIR"/rank?.pid)
out=$(./start.sh 2>&1)
expect 'start again: exit code' $? 0
contains 'start again' "$out" 'already running'
out=$(./start.sh restart --no-such-setting 2>&1)
expect 'restart with a bad argument: exit code' $? 1
contains 'restart with a bad argument' "$out" 'no such setting'
expect 'restart with a bad argument: the old pair still runs' "$(cat "$STATE_DIR"/rank?.pid)" "$pids"
expect 'and serves' "$(curl -gs --noproxy '*' -o /dev/null -w '%{http_code}' "http://127.0.0.1:$PORT/health")" 200
out=$(PARALLEL=2 ./start.sh restart 2>&1)
expect 'restart: exit code' $? 0
contains 'restart: the new setting' "$(curl -gs --noproxy '*' "http://127.0.0.1:$PORT/health")" '"max":2'
[ "$(cat "$STATE_DIR"/rank?.pid)" != "$pids" ] || fail 'restart: the same processes'
expect 'restart: logs of the old pair are kept' "$(find "$LOG_DIR" -name '*.log.gz' | wc -l)" 2

kill -KILL "$(cut -d' ' -f1 "$STATE_DIR/rank1.pid")" # half a pair
for _ in $(seq 50); do kill -0 "$(cut -d' ' -f1 "$STATE_DIR/rank0.pid")" 2> /dev/null || break; sleep 0.1; done
out=$(./start.sh 2>&1)
expect 'start after a lost rank: exit code' $? 0
out=$(./stop.sh 2>&1)
expect 'stop: exit code' $? 0
expect 'stop' "$out" 'tandem has stopped.'
(exec 3<> "/dev/tcp/127.0.0.1/$PORT") 2> /dev/null && fail 'something still listens'
out=$(MODEL=$WORK/nothing ./start.sh 2>&1)
contains 'no such model' "$out" 'MODEL:'
[ "$failures" = 0 ] || { echo "$failures failed"; exit 1; }
echo 'all ok'
