#!/usr/bin/env bash
# curl against a running server: TD_URL=http://127.0.0.1:8000 tests/e2e/curl.sh
set -u
: "${TD_URL:?http://HOST:PORT of a running server}"
key=${TD_API_KEY:-none}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# ask STATUS TEXT CURL-ARGUMENTS...: the answer must have the status and hold the text (an extended regular expression).
ask() {
    local status=$1 text=$2 got
    shift 2
    got=$(curl -sS --max-time 60 -o "$work/body" -D "$work/head" -w '%{http_code}' -H "Authorization: Bearer $key" "$@")
    if [ "$got" != "$status" ] || ! cat "$work/head" "$work/body" | grep -Eq -- "$text"; then
        printf 'FAILED: curl %s\n  expected %s with %s\n  got %s\n' "$*" "$status" "$text" "$got"
        head -c 600 "$work/body"
        echo
        failed=1
    fi
}

model=${TD_MODEL:-$(curl -sS -H "Authorization: Bearer $key" "$TD_URL/v1/models" | grep -Eo '"id":"[^"]*"' | head -n 1 | cut -d'"' -f4)}
chat="{\"model\":\"$model\",\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}],\"max_tokens\":8}"

ask 200 '"object":"chat.completion"' "$TD_URL/v1/chat/completions" -d "$chat"
ask 200 '"object":"chat.completion"' "$TD_URL/chat/completions/?beta=true" -d "$chat"
ask 200 'data: \[DONE\]' -N "$TD_URL/v1/chat/completions" -d "${chat%\}},\"stream\":true}"
ask 200 'text/event-stream' -N --http1.0 "$TD_URL/v1/chat/completions" -d "${chat%\}},\"stream\":true}"
ask 200 '"object":"text_completion"' "$TD_URL/v1/completions" -d "{\"prompt\":\"Hi\",\"max_tokens\":4}"
ask 200 '"object":"chat.completion"' "$TD_URL/v1/chat/completions" -H 'Transfer-Encoding: chunked' -H 'Content-Type: application/json' -d "$chat"
ask 415 'Content-Encoding' "$TD_URL/v1/chat/completions" -H 'Content-Encoding: gzip' -d "$chat"
ask 200 '"status":"ok"' "$TD_URL/health"
ask 200 '^Content-Length: [0-9]+' -I "$TD_URL/health"
ask 200 'tandem:requests_total' "$TD_URL/metrics"
ask 200 '"max_model_len"' "$TD_URL/v1/models"
ask 204 'Access-Control-Allow-Headers: Authorization' -X OPTIONS "$TD_URL/v1/chat/completions"
ask 404 '"type":"invalid_request_error"' "$TD_URL/v1/nothing"
ask 405 '^Allow: POST' "$TD_URL/v1/chat/completions"
ask 400 '"code":"invalid_json"' "$TD_URL/v1/chat/completions" -d '{'

# A body over a megabyte: curl asks for 100-continue first. Here it is one long prompt that cannot fit any small window.
{ printf '{"prompt":"'; head -c 2000000 /dev/zero | tr '\0' 'a'; printf ' b","max_tokens":1}'; } >"$work/big.json"
ask 200 '"count":[0-9]+' "$TD_URL/tokenize" -d "@$work/big.json"
# Over the limit: refused without reading it.
head -c 101000000 /dev/zero >"$work/huge"
ask 413 'request_too_large' -X POST "$TD_URL/v1/chat/completions" -T "$work/huge"

[ "$failed" = 0 ] && echo 'curl: all as expected'
exit "$failed"
