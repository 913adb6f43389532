#!/usr/bin/env bash
# arm64_sysroot.sh [DIR]    puts the arm64 libraries that the tests link into DIR (build/arm64-sysroot), from the
# distribution's own packages; nothing is installed. Does nothing when they are there. Exit code 3: this distribution's
# archive is not known to have them (only Debian's is), 1: it should have.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
dir=$(readlink -m "${1:-build/arm64-sysroot}")
[ ! -e "$dir/complete" ] || exit 0

# shellcheck disable=SC1091
. /etc/os-release
packages=(libssl-dev libpcre2-dev libpcre2-8-0 libcmocka-dev libcmocka0 libjansson-dev libjansson4)
apt=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State::Lists="$dir/apt/lists" -o Dir::Cache="$dir/apt/cache")
case ${ID:-} in
debian) packages+=(libssl3) ;;
*)
    # Ubuntu keeps arm64 apart from its main archive.
    echo "arm64 libraries: only Debian's own archive is known to have them beside amd64, this is ${ID:-unknown}" >&2
    exit 3
    ;;
esac

fetch() {
    mkdir -p "$dir/apt/lists/partial" "$dir/apt/cache" "$dir/apt/debs" &&
        apt-get "${apt[@]}" -qq update &&
        # The user who downloads may not be the one whom apt drops its rights to.
        (cd "$dir/apt/debs" && apt-get "${apt[@]}" -o APT::Sandbox::User="$(id -un)" -qq download "${packages[@]}")
}
log=$(fetch 2>&1) || {
    echo "arm64 libraries: ${packages[*]} could not be fetched for $ID ${VERSION_CODENAME:-}: $(tail -n 1 <<< "$log")" >&2
    [ "$ID" = debian ] && exit 1
    exit 3
}
for deb in "$dir"/apt/debs/*.deb; do dpkg -x "$deb" "$dir"; done
rm -rf "$dir/apt"
touch "$dir/complete"
