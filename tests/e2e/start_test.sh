#!/usr/bin/env bash
# start_test.sh BUILD_DIR    start.sh and stop.sh as a person uses them, in a copy of the tree's scripts with its own state folder.
set -uo pipefail
BUILD_DIR=$(readlink -f "$1")
SOURCE=$PWD
TOP=$(mktemp -d)
WORK="$TOP/it's a \"folder\""
mkdir "$WORK"
failures=0
export BUILD_DIR STATE_DIR=$WORK/state LOG_DIR=$WORK/logs HOME=$WORK
unset MODEL CONTEXT KV PARALLEL THINKING WORKER
cleanup() {
    (cd "$WORK/tree" && ./stop.sh > /dev/null 2>&1)
    rm -rf "$TOP"
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

# A machine with a GPU: nvidia-smi and nvcc as they would answer there.
mkdir "$WORK/gpu"
printf '#!/bin/sh\necho 12.1\n' > "$WORK/gpu/nvidia-smi"
printf '#!/bin/sh\n' > "$WORK/gpu/nvcc"
chmod +x "$WORK/gpu/nvidia-smi" "$WORK/gpu/nvcc"
out=$(PATH="$WORK/gpu:$PATH" BUILD_DIR='' GPU=0,1 DRY_RUN=1 ./start.sh 2>&1)
contains 'GPU: a build with CUDA' "$out" 'build/cuda/src/cli/tandem'
contains 'GPU: rank 0' "$(grep '^rank 0' <<<"$out")" '--gpu 0\,1 '
contains 'GPU: rank 1' "$(grep '^rank 1' <<<"$out")" '--gpu 0\,1 '
printf '#!/bin/sh\necho 8.9\n' > "$WORK/gpu/nvidia-smi"
out=$(PATH="$WORK/gpu:$PATH" BUILD_DIR='' DRY_RUN=1 ./start.sh 2>&1)
contains 'GPU: too old to build for' "$out" 'older than sm_90'
contains 'GPU: too old, so the CPU' "$out" 'build/cpu/src/cli/tandem'
out=$(PATH="$WORK/gpu:$PATH" BACKEND=cpu BUILD_DIR='' DRY_RUN=1 ./start.sh 2>&1)
contains 'GPU: BACKEND=cpu' "$out" 'build/cpu/src/cli/tandem'
out=$(GPU=0,x DRY_RUN=1 ./start.sh 2>&1)
contains 'GPU: nonsense is refused' "$out" "GPU: '0,x'"

out=$(WORKER=user@192.0.2.2 ./start.sh 2>&1)
expect 'WORKER: exit code' $? 1
contains 'WORKER: message' "$out" 'two machines'
out=$(PORT=x ./start.sh 2>&1)
contains 'bad PORT' "$out" "PORT: 'x'"
out=$(LOG_KEEP=08 ./start.sh 2>&1)
contains 'a number with a leading zero' "$out" "LOG_KEEP: '08'"
out=$(./start.sh --port=70000 2>&1)
contains 'bad --port' "$out" "PORT: '70000'"
out=$(./start.sh --rank 1 2>&1)
contains '--rank' "$out" 'RANKS'
out=$(env -u HOME -u STATE_DIR DRY_RUN=1 STATE_DIR="$STATE_DIR" ./start.sh 2>&1)
contains 'without HOME' "$out" '--rank 1 --world 2'
# shellcheck disable=SC2016
echo 'KV=${NOT_SET_ANYWHERE}fp8' > scripts/local.sh
out=$(DRY_RUN=1 ./start.sh 2>&1)
contains 'local.sh with an unset variable' "$out" '--kv fp8'
rm scripts/local.sh

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

curl -gsS --noproxy '*' "http://127.0.0.1:$PORT/v1/chat/completions" -H 'Content-Type: application/json' \
    -d '{"messages":[{"role":"user","content":"A story."}],"temperature":0,"ignore_eos":true,"max_tokens":120}' > "$WORK/reply" &
client=$!
for _ in $(seq 200); do curl -gs --noproxy '*' "http://127.0.0.1:$PORT/health" | grep -q '"requests_running":1' && break; done
out=$(STOP_TIMEOUT=x ./stop.sh 2>&1)
contains 'stop with a bad STOP_TIMEOUT' "$out" "STOP_TIMEOUT: 'x'"
out=$(./stop.sh 2>&1)
contains 'stop beside a reply' "$out" 'tandem has stopped.'
wait $client
contains 'stop beside a reply: it ends as it should' "$(cat "$WORK/reply")" '"completion_tokens":120'

(umask 077; printf '# keys\n  laptop: s3#cr"et \n' > "$WORK/keys")
old=$PORT
out=$(API_KEY_FILE="$WORK/keys" ./start.sh --port $((PORT + 1)) 2>&1)
expect 'start with keys and --port: exit code' $? 0
contains 'start with keys and --port' "$out" ":$((old + 1))/v1"
[[ $out =~ window\ +[0-9]+\ tokens ]] || fail "start with keys: no window in $out"
case $out in *'cr"et'*) fail 'the key is shown' ;; esac

kill -KILL "$(cut -d' ' -f1 "$STATE_DIR/rank1.pid")" # half a pair
for _ in $(seq 50); do kill -0 "$(cut -d' ' -f1 "$STATE_DIR/rank0.pid")" 2> /dev/null || break; sleep 0.1; done
out=$(./start.sh 2>&1)
expect 'start after a lost rank: exit code' $? 0
./start.sh restart > "$WORK/out" 2>&1 & # a rank that dies while it loads takes the other one along
starter=$!
pids=$(cat "$STATE_DIR"/rank?.pid)
for _ in $(seq 600); do
    now=$(cat "$STATE_DIR/rank1.pid" 2> /dev/null)
    if [ -n "$now" ] && [[ $pids != *"$now"* ]]; then break; fi
    sleep 0.01
done
kill -KILL "${now%% *}"
wait $starter
expect 'a rank that dies while loading: exit code' $? 1
contains 'a rank that dies while loading' "$(cat "$WORK/out")" 'ended while loading, exit code'
expect 'and the other one' "$(./stop.sh)" 'tandem is not running.'
out=$(FOREGROUND=1 timeout -s INT 6 ./start.sh 2>&1) # interrupted
contains 'in the foreground: the log is shown' "$out" 'ready after'
expect 'in the foreground: both end with it' "$(./stop.sh)" 'tandem is not running.'
expect 'in the foreground: nothing is left behind' "$(pgrep -f "tail -n [+]1 -F $STATE_DIR" | wc -l)" 0
out=$(./start.sh 2>&1)
expect 'start: exit code' $? 0
out=$(./stop.sh 2>&1)
expect 'stop: exit code' $? 0
expect 'stop' "$out" 'tandem has stopped.'
(exec 3<> "/dev/tcp/127.0.0.1/$PORT") 2> /dev/null && fail 'something still listens'
out=$(MODEL=$WORK/nothing ./start.sh 2>&1)
contains 'no such model' "$out" 'MODEL:'
[ "$failures" = 0 ] || { echo "$failures failed"; exit 1; }
echo 'all ok'
