# shellcheck shell=bash
# Settings of start.sh and stop.sh: where a value comes from, and every default. Sourced, never run.
#
# First hit wins: the environment of the command, scripts/local.sh (sourced as bash), .env beside start.sh (KEY=value
# lines, parsed and never executed), the defaults below. Unset and empty mean the same.

# Lines of .env: optional blanks, optional "export ", NAME=VALUE. A value in quotes is literal up to the closing quote, and
# only blanks and a comment may follow; an unquoted value ends at the first # and loses trailing blanks. Nothing is expanded.
read_env_file() {
    local line name value rest
    local assignment='^[[:blank:]]*(export[[:blank:]]+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)$'
    local quoted="^(\"([^\"]*)\"|'([^']*)')[[:blank:]]*(#.*)?\$"
    while IFS= read -r line || [ -n "$line" ]; do
        [[ $line =~ $assignment ]] || continue
        name=${BASH_REMATCH[2]} rest=${BASH_REMATCH[3]%$'\r'}
        if [[ $rest == [\"\']* ]]; then
            [[ $rest =~ $quoted ]] || continue
            value=${BASH_REMATCH[2]}${BASH_REMATCH[3]}
        else
            value=${rest%%#*}
            value=${value%"${value##*[![:blank:]]}"}
        fi
        [ -n "${!name+set}" ] || export "$name=$value"
    done < "$1"
}

# local.sh may set anything, but what the command's environment exports wins over it.
source_local() {
    local before name
    before=$(export -p)
    set +u # the file is the user's: ours are the rules in these scripts only
    # shellcheck disable=SC1090
    source "$1"
    set -u
    eval "$(grep -vE '^declare -[a-zA-Z]*r' <<<"$before" | sed 's/^declare -x/declare -gx/')"
    for name in "${SETTING_NAMES[@]}"; do
        if [ -n "${!name+set}" ]; then export "${name?}"; fi
    done
}

# CUDA_ARCHS: compute capabilities of this machine's GPUs as CMake wants them ("90", "121"), when the kernels run on them and
# there is a compiler for them; else empty. CUDA_NOTE: why a GPU that is here is not built for.
find_cuda() {
    local found usable
    found=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d '. ' | grep -E '^[0-9]+$' | sort -u)
    [ -n "$found" ] || return 0
    usable=$(awk '$1 >= 90' <<<"$found" | paste -sd ';')
    if [ -z "$usable" ]; then
        CUDA_NOTE='note: the GPU here is older than sm_90, which the CUDA operations need: building for the CPU'
    elif command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
        CUDA_ARCHS=$usable
    else
        CUDA_NOTE='note: a GPU is here, but no nvcc to build for it (CUDA toolkit 13): building for the CPU'
    fi
}

SETTING_NAMES=(WORKER MODEL SERVED_NAME HOST PORT MASTER_ADDR MASTER_PORT CONTEXT BACKEND GPU PARALLEL MAX_TOKENS MAX_QUEUED THINKING KV DENSE
    TRANSPORT NET_DEVICES THREADS MEMORY_RESERVE_GIB API_KEY_FILE STATE_DIR LOG_DIR LOG_KEEP WAIT_TIMEOUT STOP_TIMEOUT
    FOREGROUND DRY_RUN RANKS SSE_KEEPALIVE_S PEER_TIMEOUT_S BUILD_DIR)

load_settings() {
    [ -n "${HOME:-}" ] || HOME=~ # a service may have none
    [ -f "$ROOT/scripts/local.sh" ] && source_local "$ROOT/scripts/local.sh"
    [ -f "$ROOT/.env" ] && read_env_file "$ROOT/.env"

    : "${WORKER:=}"                              # ssh target of the second machine; empty: both ranks on this one
    : "${RANKS:=2}"                              # 1 or 2
    : "${MODEL:=$ROOT/models/demo}"              # folder of the checkpoint
    : "${SERVED_NAME:=}"                         # model id of the API; empty: the checkpoint's own
    : "${HOST:=127.0.0.1}"                       # address of the API; 0.0.0.0 for all
    : "${PORT:=8888}"
    : "${MASTER_ADDR:=127.0.0.1}"                # rank 0's address on the link
    : "${MASTER_PORT:=29551}"
    : "${CONTEXT:=0}"                            # tokens of prompt and reply; 0: the model's, or the largest that fits
    : "${PARALLEL:=4}"                           # requests at once
    : "${MAX_TOKENS:=32768}"                     # of a request that names none
    : "${MAX_QUEUED:=64}"                        # waiting requests before 429
    : "${THINKING:=1}"                           # think by default
    : "${BACKEND:=auto}"                         # auto, cpu, cuda: where the model runs
    : "${GPU:=0}"                                # which GPU, by the driver's numbering; "0,1": one for each rank
    : "${KV:=bf16}"                              # bf16, fp8: rows of the attention cache
    : "${DENSE:=bf16}"                           # bf16, q4, fp8: dense weights in memory
    : "${TRANSPORT:=auto}"                       # auto, shm, tcp, rc
    : "${NET_DEVICES:=}"
    : "${THREADS:=0}"                            # of each rank; 0: the cores of this machine shared out
    : "${MEMORY_RESERVE_GIB:=1}"
    : "${API_KEY_FILE:=}"
    : "${STATE_DIR:=${XDG_STATE_HOME:-$HOME/.local/state}/tandem}"
    : "${LOG_DIR:=${XDG_CACHE_HOME:-$HOME/.cache}/tandem/logs}"
    : "${LOG_KEEP:=10}"                          # saved logs of each rank; 0: none
    : "${WAIT_TIMEOUT:=1800}"                    # seconds until ready
    : "${STOP_TIMEOUT:=30}"                      # seconds until killed
    : "${SSE_KEEPALIVE_S:=15}"
    : "${PEER_TIMEOUT_S:=120}"
    : "${FOREGROUND:=0}"                         # 1: stay attached, end with rank 0's exit code
    : "${DRY_RUN:=0}"                            # 1: print the commands, change nothing
    # shellcheck disable=SC2034 # start.sh reads it
    CUDA_ARCHS='' CUDA_NOTE=''
    if [ "$BACKEND" != cpu ]; then find_cuda; fi
    if [ -n "$CUDA_ARCHS" ]; then : "${BUILD_DIR:=$ROOT/build/cuda}"; else : "${BUILD_DIR:=$ROOT/build/cpu}"; fi
}

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

check_number() { # name low high
    local value=${!1}
    if ! [[ $value =~ ^(0|[1-9][0-9]{0,8})$ ]] || [ "$value" -lt "$2" ] || [ "$value" -gt "$3" ]; then
        die "$1: '$value' is not a whole number from $2 to $3"
    fi
}

check_choice() { # name choice...
    local name=$1 value=${!1} choice
    shift
    for choice in "$@"; do
        [ "$value" = "$choice" ] && return
    done
    die "$name: '$value' is not one of: $*"
}

# What stopping needs.
check_stop_settings() {
    check_number LOG_KEEP 0 1000
    check_number STOP_TIMEOUT 1 3600
    check_choice DRY_RUN 0 1
}

# Everything that can be judged without the program; the rest is the program's own --check-args.
check_settings() {
    if [ -n "$WORKER" ]; then
        die "WORKER is set ($WORKER), but starting on two machines is not part of this version. Unset WORKER to serve from two
       ranks on this machine."
    fi
    check_number RANKS 1 2
    check_number PORT 1 65535
    check_number MASTER_PORT 1 65535
    check_number CONTEXT 0 1048576
    check_number PARALLEL 1 16
    check_number MAX_TOKENS 1 1048576
    check_number MAX_QUEUED 0 100000
    check_number THREADS 0 256
    check_number WAIT_TIMEOUT 1 86400
    check_number SSE_KEEPALIVE_S 0 3600
    check_number PEER_TIMEOUT_S 0 86400
    check_choice THINKING 0 1
    check_choice FOREGROUND 0 1
    check_stop_settings
    check_choice BACKEND auto cpu cuda
    [[ "$GPU" =~ ^[0-9]{1,2}(,[0-9]{1,2})?$ ]] || die "GPU: '$GPU' is not a number, or two with a comma"
    check_choice KV bf16 fp8
    check_choice DENSE bf16 q4 fp8
    check_choice TRANSPORT auto shm tcp rc
    [ -f "$MODEL/config.json" ] || die "MODEL: there is no $MODEL/config.json"
    if [ -n "$API_KEY_FILE" ] && [ ! -r "$API_KEY_FILE" ]; then die "API_KEY_FILE: cannot read $API_KEY_FILE"; fi
    return 0
}
