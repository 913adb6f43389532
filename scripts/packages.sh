#!/usr/bin/env bash
# packages.sh build|test [--missing]    installs what the build (or also the tests) need on Debian 12 and Ubuntu 24.04;
# with --missing only names what is not there. Uses sudo when not root; does nothing when nothing is missing.
set -euo pipefail
BUILD=(gcc cmake ninja-build pkg-config libc6-dev libucx-dev libmicrohttpd-dev libpcre2-dev libssl-dev
    libcurl4-openssl-dev curl)
TEST=(libcmocka-dev libjansson-dev g++ clang libclang-rt-dev libomp-dev nodejs iproute2 shellcheck clang-format qemu-user gcc-aarch64-linux-gnu
    libc6-dev-arm64-cross jq)
case "${1:-}" in
build) wanted=("${BUILD[@]}") ;;
test) wanted=("${BUILD[@]}" "${TEST[@]}") ;;
*) sed -n '2,3p' "$0" | sed 's/^# //' >&2; exit 2 ;;
esac
missing=()
for package in "${wanted[@]}"; do
    # A tool that is on the PATH counts, wherever it came from (a newer Node.js, a compiler of one's own).
    case $package in
    nodejs) command -v node >/dev/null 2>&1 && command -v npm >/dev/null 2>&1 && continue ;;
    gcc | g++ | cmake | clang | curl | jq | shellcheck | clang-format) command -v "$package" >/dev/null 2>&1 && continue ;;
    esac
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
done
[[ " ${missing[*]-} " == *" nodejs "* ]] && missing+=(npm)
if [ "${2:-}" = --missing ]; then
    [ ${#missing[@]} -eq 0 ] || printf '%s\n' "${missing[@]}"
    exit 0
fi
[ ${#missing[@]} -gt 0 ] || exit 0
command -v apt-get >/dev/null || { echo "error: this needs apt-get (Debian, Ubuntu), or install by hand: ${missing[*]}" >&2; exit 1; }
sudo=()
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "error: as root: apt-get install ${missing[*]}" >&2; exit 1; }
    sudo=(sudo)
fi
echo "installing: ${missing[*]}"
"${sudo[@]}" apt-get update -qq
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
