#!/usr/bin/env bash
# no_gpu.sh TANDEM FOLDER    a CUDA build on machines without a GPU to use: one clear line each, and the exit code.
# FOLDER holds the fake libcuda.so.1 (fake_driver.c). Run from the repository's root.
set -uo pipefail
tandem=$1
export LD_LIBRARY_PATH=$2${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
bad=0

# expect CODE TEXT COMMAND...    the command ends with CODE, and one line of what it says has TEXT in it.
expect()
{
    local code=$1 text=$2 out got
    shift 2
    out=$("$@" 2>&1)
    got=$?
    if [ $got -ne "$code" ] || [ "$(grep -cF -- "$text" <<<"$out")" -ne 1 ]; then
        printf 'FAILED: %s\n  exit code %d, expected %d and one line with: %s\n%s\n' "$*" $got "$code" "$text" "$out"
        bad=1
    fi
}

serve=("$tandem" serve --model models/demo --port 0)
expect 1 "--backend cuda: no NVIDIA driver is installed" env FAKE_DRIVER=0 "${serve[@]}" --backend cuda
expect 1 "it is for CUDA 12.4, this build needs CUDA 13." env FAKE_DRIVER=12040 "${serve[@]}" --backend cuda
expect 1 "--backend cuda: the NVIDIA driver lists no GPU" env FAKE_DRIVER=99000 FAKE_INIT=100 "${serve[@]}" --backend cuda
expect 1 "the NVIDIA driver is not ready yet" env FAKE_DRIVER=99000 FAKE_INIT=802 "${serve[@]}" --backend cuda
expect 1 "restart the machine" env FAKE_DRIVER=99000 FAKE_INIT=803 "${serve[@]}" --backend cuda
expect 1 "no NVIDIA driver is installed" env FAKE_DRIVER=0 "$tandem" opcheck
expect 2 "--part: '3/2' is not K/N" env FAKE_DRIVER=0 "$tandem" opcheck --part 3/2
expect 1 "no NVIDIA driver is installed" env FAKE_DRIVER=0 "$tandem" plan --model models/demo --backend cuda
# auto takes the CPU and says why; timeout ends it with SIGTERM, which is a clean stop
expect 0 "on the CPU: no NVIDIA driver is installed" timeout --preserve-status 2 env FAKE_DRIVER=0 "${serve[@]}"
expect 0 "on the CPU: the NVIDIA driver is too old" timeout --preserve-status 2 env FAKE_DRIVER=12040 "${serve[@]}"
exit $bad
