#!/usr/bin/env bash
# exact.sh TANDEM    the same requests to one rank, two ranks over shared memory and two over TCP: the same tokens (token_sha), and
# for the demo's known questions the replies that the reference implementation gives.
set -uo pipefail
TANDEM=$1
# shellcheck source=tests/e2e/ranks.sh
source "$(dirname "$0")/ranks.sh"

REQUESTS=(
    '{"messages":[{"role":"user","content":"Capital of Romania?"}],"temperature":0}'
    '{"messages":[{"role":"user","content":"8 * 1 = ?"}],"temperature":0,"reasoning_effort":"low"}'
    '{"messages":[{"role":"user","content":"Extract name, age and city as JSON: My friend Dana from Warsaw turned 45."}],"temperature":0,"reasoning_effort":"none"}'
    '{"messages":[{"role":"user","content":"What is the speed of light?"}],"temperature":0}'
    '{"messages":[{"role":"user","content":"Write a function that checks for palindromes in Python."}],"temperature":0,"reasoning_effort":"low"}'
    '{"messages":[{"role":"user","content":"Tell me a story about a fox."}],"temperature":1,"max_tokens":60}'
    '{"messages":[{"role":"user","content":"Tell me a story about a fox."}],"temperature":0.9,"top_p":0.8,"seed":11,"max_tokens":60}'
    '{"messages":[{"role":"user","content":"Summarize TCP in two sentences."}],"temperature":1,"top_k":5,"min_p":0.1,"seed":3,"max_tokens":60}'
)
REPLIES=(
    'The capital of Romania is Bucharest.'
    '8 * 1 = 8'
    '{"name": "Dana", "age": 45, "city": "Warsaw"}'
    'Light travels at about 299,792 kilometers per second in a vacuum.'
    '```python
def is_palindrome(text):
    letters = [c.lower() for c in text if c.isalnum()]
    return letters == letters[::-1]
```

It ignores case and punctuation.'
)
THOUGHTS=(
    'This is a question about capitals. The country is Romania. The capital is Bucharest.'
    'We need 8 * 1.'
    ''
    'This is a simple question. I know the answer. I will answer in one or two sentences.'
    'The user wants a Python function that checks for palindromes.'
)

run_all() { # tag settings... -> $WORK/TAG.N
    local tag=$1 i
    shift
    if [ "$tag" = one ]; then
        rm -f "$WORK/rank0.log"
        "$TANDEM" serve --model "$MODEL" --port 0 --threads 2 > "$WORK/rank0.log" 2>&1 &
        PID0=$! PID1=''
        wait_line "$WORK/rank0.log" 'ready after' 60 || exit 1
        URL=$(sed -n 's|.*ready after .*: \(http://[^/]*\)/v1.*|\1|p' "$WORK/rank0.log")
    else
        start_ranks "$@"
    fi
    for i in "${!REQUESTS[@]}"; do ask "${REQUESTS[i]}" > "$WORK/$tag.$i"; done
    # All at once: the same tokens again.
    local pids=()
    for i in "${!REQUESTS[@]}"; do
        ask "${REQUESTS[i]}" > "$WORK/$tag-together.$i" &
        pids+=($!)
    done
    wait "${pids[@]}"
    end_ranks
}

sha() { jq -r '.tandem.token_sha' "$1"; }

run_all one
run_all shm --transport shm --check-layers
run_all tcp --transport tcp
for i in "${!REQUESTS[@]}"; do
    want=$(sha "$WORK/one.$i")
    [ "${#want}" = 16 ] || fail "request $i: no token_sha: $(cat "$WORK/one.$i")"
    for tag in one-together shm shm-together tcp tcp-together; do expect "request $i, $tag" "$(sha "$WORK/$tag.$i")" "$want"; done
done
for i in "${!REPLIES[@]}"; do
    expect "reply $i" "$(jq -r '.choices[0].message.content' "$WORK/tcp.$i")" "${REPLIES[i]}"
    expect "reasoning $i" "$(jq -r '.choices[0].message.reasoning_content // ""' "$WORK/tcp.$i")" "${THOUGHTS[i]}"
done
finish
