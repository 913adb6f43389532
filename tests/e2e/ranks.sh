# shellcheck shell=bash
# Two real ranks of the demo model, for the scripts beside this one. Sourced with TANDEM set to the program.
#   start_ranks [settings...]   fills PID0, PID1, URL and the logs $WORK/rank0.log, $WORK/rank1.log; waits until ready
#   start_rank R [settings...]  one of them, without waiting
#   wait_exit PID SECONDS       -> its exit code, or 255 and a message when it still runs
WORK=$(mktemp -d)
MODEL=${MODEL:-models/demo}
MASTER_PORT=0
trap 'end_ranks; rm -rf "$WORK"' EXIT

failures=0
fail() {
    echo "FAILED: $*"
    failures=$((failures + 1))
}

expect() { # what got wanted
    if [ "$2" = "$3" ]; then echo "ok: $1 ($2)"; else fail "$1: $2, expected $3"; fi
}

start_rank() { # rank settings...
    local rank=$1
    shift
    rm -f "$WORK/rank$rank.log" # nobody may take an earlier pair's lines for this one's
    "$TANDEM" serve --model "$MODEL" --rank "$rank" --world 2 --master-port "$MASTER_PORT" --port 0 --threads 1 --wait-timeout-s 20 "$@" \
        > "$WORK/rank$rank.log" 2>&1 &
    printf -v "PID$rank" '%s' $!
}

# The control port lies below the ports that systems hand out; another one for each pair.
next_port() {
    MASTER_PORT=$((20000 + (RANDOM * 32768 + RANDOM) % 12000))
}

wait_line() { # file pattern seconds
    local i
    for ((i = 0; i < $3 * 20; i++)); do
        grep -q "$2" "$1" 2>/dev/null && return 0
        sleep 0.05
    done
    echo "no line '$2' in $1:"
    cat "$1"
    return 1
}

start_ranks() {
    next_port
    rm -f "$WORK/rank0.log"
    start_rank 1 "$@"
    start_rank 0 "$@"
    wait_line "$WORK/rank0.log" 'ready after' 60 || exit 1
    URL=$(sed -n 's|.*ready after .*: \(http://[^/]*\)/v1.*|\1|p' "$WORK/rank0.log")
}

wait_exit() { # pid seconds
    local i
    for ((i = 0; i < $2 * 20; i++)); do
        if ! kill -0 "$1" 2>/dev/null; then
            wait "$1"
            return $?
        fi
        sleep 0.05
    done
    echo "process $1 still runs after $2 s"
    return 255
}

end_ranks() {
    local pid
    for pid in ${PID0:-} ${PID1:-}; do kill -KILL "$pid" 2>/dev/null; done
    wait 2>/dev/null
    return 0
}

finish() {
    [ "$failures" = 0 ] || { echo "$failures failed"; exit 1; }
    echo "all ok"
}

ask() { # json -> body
    curl -gsS --noproxy '*' -m 120 "$URL/v1/chat/completions" -H 'Content-Type: application/json' -d "$1"
}
