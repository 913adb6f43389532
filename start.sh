#!/usr/bin/env bash
# start.sh            build if needed, start both ranks, check them, print the address
# start.sh restart    the same, stopping a running pair first, once everything that can be refused was checked
# start.sh help       this text
#
# With no settings it serves the bundled demo model from two ranks on this machine. Further arguments go to both ranks after
# the defaults, so they win:  ./start.sh --max-tokens 512    (tandem serve --help lists them)
#
# Settings are environment variables, scripts/local.sh, or lines of .env (first hit wins); scripts/config.sh names them all.
# The usual ones: PORT, HOST, MODEL, CONTEXT, PARALLEL, THINKING, API_KEY_FILE, BACKEND, GPU, RANKS, TRANSPORT, DRY_RUN, FOREGROUND.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" || exit 1
ROOT=$PWD

usage() { sed -n '2,/^set /p' start.sh | sed '$d; s/^# \{0,1\}//'; }

RESTART=0
case "${1:-}" in
restart) RESTART=1; shift ;;
help) usage; exit 0 ;;
esac
for word in "$@"; do
    case $word in -h | --help) usage; exit 0 ;; esac
done
EXTRA=("$@")

extra_value() { # flag -> its last value among the further arguments; 1: it is not there
    local i found=1 value=''
    for ((i = 0; i < ${#EXTRA[@]}; i++)); do
        case ${EXTRA[i]} in
        "--$1="*) value=${EXTRA[i]#*=} found=0 ;;
        "--$1") value=${EXTRA[i + 1]:-} found=0 ;;
        esac
    done
    [ $found = 0 ] && printf '%s\n' "$value"
}

# Further arguments win over settings: what these scripts need to know themselves is read back from them.
take_extra_settings() {
    local pair value
    for pair in port:PORT host:HOST name:SERVED_NAME model:MODEL context:CONTEXT parallel:PARALLEL kv:KV dense:DENSE \
        transport:TRANSPORT api-key-file:API_KEY_FILE; do
        if value=$(extra_value "${pair%:*}"); then printf -v "${pair#*:}" '%s' "$value"; fi
    done
    for value in rank world; do
        if extra_value $value >/dev/null; then die "--$value is not for further arguments; the setting RANKS is 1 or 2"; fi
    done
}

# shellcheck source=scripts/config.sh
source scripts/config.sh
load_settings
take_extra_settings
check_settings
# shellcheck source=scripts/ranks.sh
source scripts/ranks.sh

if [ -t 1 ]; then BOLD=$'\e[1m' GREEN=$'\e[32m' PLAIN=$'\e[0m'; else BOLD='' GREEN='' PLAIN=''; fi
in_url() { # host -> as a URL has it
    case $1 in *:*) printf '[%s]' "$1" ;; *) printf '%s' "$1" ;; esac
}
LOCAL_HOST=$HOST
case $LOCAL_HOST in 0.0.0.0) LOCAL_HOST=127.0.0.1 ;; ::) LOCAL_HOST=::1 ;; esac
URL=http://$(in_url "$LOCAL_HOST"):$PORT
RANK_PIDS=()

step() { printf '%s[%s/5] %s%s\n' "$BOLD" "$1" "$2" "$PLAIN"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    show_logs
    exit 1
}

build() {
    step 1 Setup
    [ -z "$CUDA_NOTE" ] || echo "  $CUDA_NOTE"
    [ "$DRY_RUN" = 1 ] && return
    local missing=()
    mapfile -t missing < <(scripts/packages.sh build --missing)
    if [ ${#missing[@]} -gt 0 ]; then scripts/packages.sh build || die "packages could not be installed: ${missing[*]}"; fi
    scripts/build.sh "$BUILD_DIR" "$CUDA_ARCHS" || die "the build failed"
}

threads_of_a_rank() {
    local cores
    cores=$(nproc)
    if [ "$THREADS" -gt 0 ]; then echo "$THREADS"; elif [ "$RANKS" = 2 ] && [ "$cores" -gt 1 ]; then echo $((cores / 2)); else echo "$cores"; fi
}

rank_command() { # rank -> the array COMMAND
    COMMAND=("$TANDEM" serve --model "$MODEL" --rank "$1" --world "$RANKS" --master "$MASTER_ADDR" --master-port "$MASTER_PORT"
        --transport "$TRANSPORT" --context "$CONTEXT" --parallel "$PARALLEL" --max-tokens "$MAX_TOKENS" --kv "$KV" --dense "$DENSE"
        --backend "$BACKEND" --gpu "$GPU"
        --threads "$(threads_of_a_rank)" --memory-reserve-gib "$MEMORY_RESERVE_GIB" --peer-timeout-s "$PEER_TIMEOUT_S"
        --wait-timeout-s "$WAIT_TIMEOUT")
    [ -n "$NET_DEVICES" ] && COMMAND+=(--net-devices "$NET_DEVICES")
    [ "$THINKING" = 0 ] && COMMAND+=(--reasoning-effort none)
    if [ "$1" = 0 ]; then
        COMMAND+=(--host "$HOST" --port "$PORT" --name "${SERVED_NAME:-$(basename "$MODEL")}" --max-queued "$MAX_QUEUED"
            --keepalive-s "$SSE_KEEPALIVE_S")
        [ -n "$API_KEY_FILE" ] && COMMAND+=(--api-key-file "$API_KEY_FILE")
    fi
    COMMAND+=("${EXTRA[@]}")
}

refuse_taken_port() {
    if (exec 3<> "/dev/tcp/$LOCAL_HOST/$PORT") 2>/dev/null; then
        die "PORT: $PORT is in use on this machine$(command -v ss >/dev/null && ss -Hltnp "sport = :$PORT" 2>/dev/null | awk '{print " by " $NF}' | head -1)"
    fi
}

check() {
    step 2 Checks
    local rank
    for ((rank = 0; rank < RANKS; rank++)); do
        rank_command "$rank"
        if [ "$DRY_RUN" = 1 ]; then
            printf 'rank %s:' "$rank"
            printf ' %q' "${COMMAND[@]}"
            printf '\n'
        else
            "${COMMAND[@]}" --check-args || die "the settings of rank $rank were refused; nothing was changed"
        fi
    done
    [ "$DRY_RUN" = 1 ] && exit 0
    "$TANDEM" info "$MODEL" > "$STATE_DIR/info.txt" 2>&1 || { cat "$STATE_DIR/info.txt" >&2; die "$MODEL cannot be served; nothing was changed"; }
    [ "$PORT" = "$(rank_port)" ] || refuse_taken_port # before a running pair is stopped
    if rank_pid 0 >/dev/null || rank_pid 1 >/dev/null; then
        [ "$RESTART" = 1 ] || echo "  one rank of an earlier pair is left: stopping it"
        stop_ranks || die "a running rank could not be stopped"
    fi
    save_log 0
    save_log 1
    refuse_taken_port
    # A second rank 1 at the control port of another pair would end that pair.
    if [ "$RANKS" = 2 ] && (exec 3<> "/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; then
        die "MASTER_PORT: $MASTER_PORT is in use on $MASTER_ADDR; another pair needs another MASTER_PORT"
    fi
}

launch() {
    step 3 Launch
    local rank pid interrupted=0
    trap 'interrupted=1' INT TERM HUP # no rank without a pid file
    for ((rank = RANKS - 1; rank >= 0 && !interrupted; rank--)); do
        rank_command "$rank"
        # The lock is this script's: a rank must not inherit it, or the next start would find it held.
        setsid "${COMMAND[@]}" >> "$(rank_log "$rank")" 2>&1 < /dev/null 9>&- &
        pid=$!
        RANK_PIDS[rank]=$pid
        if ! printf '%s %s %s\n' "$pid" "$(start_time "$pid")" "$PORT" > "$STATE_DIR/rank$rank.pid"; then
            kill -TERM "$pid"
            stop_ranks
            die "STATE_DIR: cannot write $STATE_DIR/rank$rank.pid"
        fi
        printf '  rank %s: pid %s, log %s\n' "$rank" "$pid" "$(rank_log "$rank")"
    done
    if [ $interrupted = 1 ]; then
        stop_ranks
        exit 130
    fi
    trap - INT TERM HUP
}

# One rank alone would wait for the other one and hold the port.
rank_ended() { # rank
    local code
    wait "${RANK_PIDS[$1]}" 2>/dev/null
    code=$?
    sleep 0.3 # the other rank notices; its last words belong to the report
    printf 'error: rank %s ended while loading, exit code %s\n' "$1" $code >&2
    show_logs
    stop_ranks
    exit 1
}

health_field() { # json name -> number or text
    sed -n "s/.*\"$2\":[[:space:]]*\"\{0,1\}\([^\",}]*\).*/\1/p" <<<"$1" | head -1
}

wait_until_ready() {
    step 4 Loading
    local start=$SECONDS rank body line='' last=''
    while :; do
        for ((rank = 0; rank < RANKS; rank++)); do
            rank_pid "$rank" >/dev/null || rank_ended "$rank"
        done
        body=$(curl -gsS --noproxy '*' -m 5 "$URL/health" 2>/dev/null) || body=''
        case $(health_field "$body" status) in
        ok) break ;;
        loading)
            line=$(sed -nE 's/.*"done":([0-9]+),"total":([1-9][0-9]*).*/\1 \2/p' <<<"$body" | awk '{ printf "  %d%% loaded", 100 * $1 / $2 }')
            [ -t 1 ] && printf '\r%s' "$line"
            if [ ! -t 1 ] && [ "$line" != "$last" ] && [ $(((SECONDS - start) % 15)) = 0 ]; then echo "$line"; last=$line; fi
            ;;
        unhealthy) fail "the server says: $body" ;;
        esac
        [ $((SECONDS - start)) -lt "$WAIT_TIMEOUT" ] || fail "not ready after $WAIT_TIMEOUT s; the ranks still run: tail -f $(rank_log 0)"
        sleep 0.1
    done
    [ -t 1 ] && printf '\r'
    printf '  ready    %s\n' "$(sed -n 's/.* \(weights: .* GB\/s)\)$/\1/p' "$(rank_log 0)" | tail -1)"
}

smoke_key() { # one of the keys, for our own questions
    if extra_value api-key; then return; fi
    if [ -n "${TANDEM_API_KEYS:-}" ]; then
        tr ',' '\n' <<<"$TANDEM_API_KEYS" | sed -e 's/^[[:space:]]*//' -e 's/[[:space:]]*$//' | grep -m1 .
    elif [ -n "$API_KEY_FILE" ]; then
        sed -e 's/^[[:space:]]*//' -e '/^#/d' -e 's/^[^:]*:[[:space:]]*//' -e 's/[[:space:]]*$//' "$API_KEY_FILE" | grep -m1 .
    fi
}

health() { # with a key, which goes through a pipe and not through arguments that everyone sees
    local key
    key=$(smoke_key | sed 's/["\\]/\\&/g')
    if [ -n "$key" ]; then
        printf 'header = "Authorization: Bearer %s"\n' "$key" | curl -gsS --noproxy '*' -m 5 -K - "$URL/health"
    else
        curl -gsS --noproxy '*' -m 5 "$URL/health"
    fi
}

live() {
    step 5 'Smoke test'
    TANDEM_API_KEY=$(smoke_key) "$TANDEM" smoke "$URL" || fail "the smoke test failed; the ranks still run"
    local shown=$HOST
    case $shown in 0.0.0.0 | ::) shown=$(hostname -I 2>/dev/null | awk '{print $1}') ;; esac
    printf '\n%s✔ %s is now LIVE! on port %s%s\n\n' "$GREEN" "${SERVED_NAME:-$(basename "$MODEL")}" "$PORT" "$PLAIN"
    printf '  API      http://%s:%s/v1    model %s\n' "$(in_url "${shown:-$LOCAL_HOST}")" "$PORT" "${SERVED_NAME:-$(basename "$MODEL")}"
    printf '  window   %s tokens, %s requests at once, KV %s, dense %s, %s rank(s) over %s\n' \
        "$(health_field "$(health)" context_length)" "$PARALLEL" "$KV" "$DENSE" "$RANKS" "$TRANSPORT"
    printf '  chat     %s chat %s\n' "${TANDEM#"$ROOT"/}" "$URL"
    printf '  logs     tail -f %s\n' "$(rank_log 0)"
    [ "$RANKS" = 2 ] && printf '           tail -f %s\n' "$(rank_log 1)"
    printf '  restart  ./start.sh restart\n  stop     ./stop.sh\n'
}

follow_in_foreground() {
    tail -n +1 -F "$(rank_log 0)" 2>/dev/null &
    local follower=$! code
    # Ctrl-C is 130 to whoever asked; a supervisor's SIGTERM ends with rank 0's own code.
    trap 'kill "$follower"; stop_ranks; exit 130' INT
    trap 'stop_ranks' TERM
    wait "${RANK_PIDS[0]}"
    code=$?
    kill "$follower"
    stop_ranks
    exit $code
}

mkdir -p "$STATE_DIR" || die "STATE_DIR: cannot create $STATE_DIR"
exec 9> "$STATE_DIR/start.lock"
flock -n 9 || die "another start is already running (lock $STATE_DIR/start.lock)"

if [ "$RESTART" = 0 ] && [ "$DRY_RUN" = 0 ] && rank_pid 0 >/dev/null && { [ "$RANKS" = 1 ] || rank_pid 1 >/dev/null; }; then
    echo "tandem is already running on port $(rank_port). './start.sh restart' starts it anew, './stop.sh' ends it."
    [ ${#EXTRA[@]} -eq 0 ] || echo "Not applied: ${EXTRA[*]}"
    exit 0
fi
build
check
launch
if [ "$FOREGROUND" = 1 ]; then
    exec 9>&-
    follow_in_foreground
fi
trap 'printf "\ninterrupted; the ranks go on: ./stop.sh ends them\n" >&2; exit 130' INT TERM
wait_until_ready
live
