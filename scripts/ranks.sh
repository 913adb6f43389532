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
        gzip -c "$log" > "$LOG_DIR/$name-rank$1.log.gz" || echo "warning: the log of rank $1 was not saved" >&2
        find "$LOG_DIR" -maxdepth 1 -name "*-rank$1.log.gz" | sort -r | tail -n +$((LOG_KEEP + 1)) | while IFS= read -r old; do
            rm -f "$old"
        done
    fi
    rm -f "$log"
}

# SIGTERM to both, then SIGKILL after STOP_TIMEOUT. 1: one is still there.
stop_ranks() {
    local rank pid waited pids=()
    for rank in 0 1; do
        pid=$(rank_pid $rank) && pids+=("$pid")
    done
    for pid in "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null; done
    for ((waited = 0; waited < STOP_TIMEOUT * 10; waited++)); do
        rank_pid 0 >/dev/null || rank_pid 1 >/dev/null || break
        sleep 0.1
    done
    for rank in 0 1; do
        if pid=$(rank_pid $rank); then
            echo "rank $rank did not end within $STOP_TIMEOUT s: killed" >&2
            kill -KILL "$pid" 2>/dev/null
            for ((waited = 0; waited < 50; waited++)); do
                rank_pid $rank >/dev/null || break
                sleep 0.1
            done
        fi
        rank_pid $rank >/dev/null && return 1
        rm -f "$STATE_DIR/rank$rank.pid"
        save_log $rank
    done
    return 0
}

show_logs() {
    local rank
    for rank in 0 1; do
        [ -s "$(rank_log $rank)" ] || continue
        echo "--- last lines of rank $rank ($(rank_log $rank))" >&2
        tail -n 25 "$(rank_log $rank)" >&2
    done
}
