#!/usr/bin/env bash
# What test.sh does: groups of checks, each a line of the report; see docs/testing.md.
set -uo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." || exit 1
quick=0
[ "${1:-}" = quick ] && quick=1
jobs=$(nproc)
passed=0 failed=0
logs=$PWD/build/test-logs
mkdir -p "$logs"

# A step that is one check: its output is shown only when it fails.
check() { # name command...
    local name=$1 log start=$SECONDS
    log=$logs/${name//[^A-Za-z0-9]/-}.log
    shift
    if "$@" > "$log" 2>&1; then
        passed=$((passed + 1))
        printf 'ok      %-44s %4d s\n' "$name" $((SECONDS - start))
    else
        failed=$((failed + 1))
        printf 'FAILED  %-44s %4d s\n' "$name" $((SECONDS - start))
        tail -n 60 "$log"
    fi
}

# A CTest run: each of its tests counts.
run_ctest() { # name folder arguments...
    local name=$1 folder=$2 log start=$SECONDS n_run n_bad
    log=$logs/ctest-${name//[^A-Za-z0-9]/-}.log
    shift 2
    ctest --test-dir "$folder" --output-on-failure "$@" 2>&1 | tee "$log" | grep -E '^ *[0-9]+/[0-9]+ Test .*(Failed|Timeout|Exception|Not Run)|^[0-9]+% tests' || true
    n_run=$(sed -n 's/^.*tests failed out of \([0-9]*\)$/\1/p' "$log" | tail -1)
    n_bad=$(sed -n 's/^.*tests passed, \([0-9]*\) tests failed out of .*$/\1/p' "$log" | tail -1)
    if [ -z "$n_run" ]; then n_run=1 n_bad=1; fi
    passed=$((passed + n_run - n_bad))
    failed=$((failed + n_bad))
    printf '%-7s %-44s %4d s\n' "$([ "$n_bad" = 0 ] && echo ok || echo FAILED)" "$name: $n_run tests" $((SECONDS - start))
    [ "$n_bad" = 0 ] || sed -n '/The following tests FAILED/,$p' "$log"
    [ "$n_bad" = 0 ] || grep -vE '^ *[0-9]+/[0-9]+ Test .*Passed|^ *Start ' "$log" | tail -n 150
}

configure_and_build() { # preset
    cmake --preset "$1" && cmake --build --preset "$1" -- -j "$jobs"
}

# Only where there is a compiler for GPUs: kernels for the GB10 (the H200's come from the same sources), and what runs without one.
build_cuda() {
    cmake -S . -B build/sm_121 -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DTD_CUDA=ON -DTD_CUDA_ARCHS=121 &&
        cmake --build build/sm_121 --target tandem td_opcheck td_fake_driver -- -j "$jobs"
}

# Without the distribution's arm64 libraries only what needs none: the digest of the operations.
arm64=build/arm64
build_arm64() {
    local status=0
    scripts/arm64_sysroot.sh || status=$?
    case $status in
    0) configure_and_build arm64 ;;
    3)
        arm64=build/arm64-ops
        cmake -S tests/arm64 -B $arm64 -G Ninja --toolchain "$PWD/cmake/arm64.cmake" && cmake --build $arm64 -- -j "$jobs"
        ;;
    *) return "$status" ;;
    esac
}

scripts/packages.sh test || { echo "0 passed, 1 failed"; exit 1; }
check 'build (gcc, warnings are errors)' configure_and_build cpu
run_ctest 'tests' build/cpu -j "$jobs" -LE slow
if [ $quick = 0 ]; then
    check 'build (clang, warnings are errors)' configure_and_build clang
    check 'build (address and undefined sanitizers)' configure_and_build asan
    run_ctest 'tests with sanitizers' build/asan -j "$jobs" -L 'unit|fuzz|faults' -LE slow
    if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
        check 'build (CUDA, sm_121)' build_cuda
        run_ctest 'a CUDA build without a GPU' build/sm_121 -R '^no_gpu$'
    fi
    check 'build (arm64)' build_arm64
    run_ctest 'arm64 under qemu' $arm64 -j "$jobs" -LE slow
    check 'build (fuzzers)' configure_and_build fuzz
    for fuzzer in build/fuzz/tests/fuzz/fuzz_*; do
        [ -x "$fuzzer" ] && [ -f "$fuzzer" ] && check "fuzz $(basename "$fuzzer")" scripts/fuzz.sh "$fuzzer" "${FUZZ_SECONDS:-60}"
    done
    check 'format' scripts/check_format.sh
    check 'shell scripts' shellcheck -x start.sh stop.sh test.sh scripts/*.sh .ci/run
    check 'headers alone, as C17 and C++17' scripts/check_headers.sh
    check 'symbols have the td_ prefix' scripts/check_symbols.sh build/cpu
fi
printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" = 0 ] && [ "$passed" -gt 0 ]
