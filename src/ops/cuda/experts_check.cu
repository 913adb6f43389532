/* Whether this GPU's tensor core adds two fp16 numbers as its ordinary units do: exactly, then rounded to nearest even.
 * Decoding of 4-bit experts has it add the halves of a weight (experts_tile.h). An H200's does, but no manual promises
 * it, and another rounding would change weights by a last bit without a word; so all 65,536 states are looked at when a
 * device is created, which takes some microseconds. */
#include "ops/cuda/cuda.h"
#include "ops/cuda/experts_tile.h"

enum { THREADS = 256, STATES = 1 << 16, OF_A_THREAD = 4 };

/* A lane has four states, the registers of an A operand. */
static __global__ void k_experts_check(uint32_t *n_wrong)
{
    uint32_t first = (blockIdx.x * THREADS + threadIdx.x) * OF_A_THREAD, a[OF_A_THREAD], sums[2], own[OF_A_THREAD];
    for (int i = 0; i < OF_A_THREAD; i++) {
        a[i] = td_and_xor((first + i) * TD_EXL3_MCG_MARK, 0x8fff8fffu, 0x3b603b60u);
        __half2 halves = *(__half2 *)&a[i];
        own[i] = __half_as_ushort(__hadd(__low2half(halves), __high2half(halves)));
    }
    td_pair_sum(td_pair_sums_init(), a, sums);
    for (int row = 0; row < 2; row++)
        if (sums[row] != (own[row] | own[row + 2] << 16)) atomicAdd(n_wrong, 1);
}

td_status td_cuda_experts_check(td_cuda_dev *dev, td_error *err)
{
    uint32_t *counter = td_cuda_counters(dev), n_wrong = 0;
    k_experts_check<<<STATES / OF_A_THREAD / THREADS, THREADS, 0, dev->stream>>>(counter);
    td_status status = td_cuda_launched(dev, "experts");
    if (status == TD_OK) status = td_dev_download(&dev->base, &n_wrong, counter, sizeof n_wrong);
    if (status != TD_OK) return status;
    if (!n_wrong) return TD_OK;
    return td_fail(
        err, TD_EUNSUPPORTED,
        "GPU %d: its tensor core rounds sums of fp16 numbers in a way that this build was not made for (%u of "
        "%d differ): 4-bit experts would not have their exact weights. Please report it; --backend cpu works",
        dev->index, n_wrong, STATES / 2);
}
