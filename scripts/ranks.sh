# shellcheck shell=bash
# The ranks on this machine: pid files, liveness, stopping, log keeping. Sourced by start.sh and stop.sh.
#
# A pid file holds "PID START_TIME PORT": a rank counts as alive only when the process has that start time (field 22 of
# /proc/PID/stat), so a reused pid is never mistaken for ours.

# shellcheck disable=SC2034
TANDEM=$BUILD_DIR/src/cli/tandem

start_time() { # pid -> field 22; the name in field 2 may hold blanks, so count from its closing parenthesis
    local stat
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    stat=${stat##*) }
    # shellcheck disable=SC2086
    set -- $stat
    [ "$1" != Z ] || return 1
    printf '%s\n' "${20}"
}

rank_pid() { # rank -> pid, only if it lives
    local pid started port
    read -r pid started port 2>/dev/null < "$STATE_DIR/rank$1.pid" || return 1
    [ -n "$port" ] && [ "$(start_time "$pid")" = "$started" ] && printf '%s\n' "$pid"
}

rank_port() { # the API port that the running pair was started with
    local pid started port
    read -r pid started port 2>/dev/null < "$STATE_DIR/rank0.pid" || return 1
    printf '%s\n' "$port"
}

rank_log() {
    printf '%s\n' "$STATE_DIR/rank$1.log"
}

# A finished rank's log goes to LOG_DIR as YYYYmmdd-HHMMSS-rankN.log.gz; the newest LOG_KEEP stay. Failure only warns.
save_log() { # rank
    local log name n=0 old
    log=$(rank_log "$1")
    [ -s "$log" ] || return 0
    if [ "$LOG_KEEP" -gt 0 ]; then
        mkdir -p "$LOG_DIR" || { echo "warning: cannot write to $LOG_DIR" >&2; return 0; }
        name=$(date -u +%Y%m%d-%H%M%S)
        while [ -e "$LOG_DIR/$name$([ $n -gt 0 ] && printf '.%s' $n)-rank$1.log.gz" ]; do n=$((n + 1)); done
        [ $n -gt 0 ] && name=$name.$n
        if ! gzip -c "$log" > "$LOG_DIR/$name-rank$1.log.gz"; then # a full disk: the log stays where it is
            echo "warning: the log of rank $1 was not saved: $log" >&2
            rm -f "$LOG_DIR/$name-rank$1.log.gz"
            return 0
        fi
        find "$LOG_DIR" -maxdepth 1 -name "[0-9]*-rank$1.log.gz" | sort -r | tail -n +$((LOG_KEEP + 1)) | while IFS= read -r old; do
            rm -f "$old"
        done
    fi
    rm -f "$log"
}

rank_gone() { # rank seconds
    local i
    for ((i = 0; i < $2 * 10; i++)); do
        rank_pid "$1" >/dev/null || return 0
        sleep 0.1
    done
    return 1
}

# SIGTERM, then SIGKILL after STOP_TIMEOUT. 1: it is still there.
stop_rank() { # rank
    local pid
    if pid=$(rank_pid "$1"); then
        kill -TERM "$pid" 2>/dev/null
        if ! rank_gone "$1" "$STOP_TIMEOUT"; then
            echo "rank $1 did not end within $STOP_TIMEOUT s: killed" >&2
            kill -KILL "$pid" 2>/dev/null
            rank_gone "$1" 5 || return 1
        fi
    fi
    rm -f "$STATE_DIR/rank$1.pid"
    save_log "$1"
}

# Rank 0 first: it lets running replies finish and then tells rank 1; a signal to rank 1 would cut them off.
stop_ranks() {
    local status=0
    stop_rank 0 || status=1
    stop_rank 1 || status=1
    return $status
}

show_logs() {
    local rank
    for rank in 0 1; do
        [ -s "$(rank_log $rank)" ] || continue
        echo "--- last lines of rank $rank ($(rank_log $rank))" >&2
        tail -n 25 "$(rank_log $rank)" >&2
    done
}
