/* The decoding of 4-bit mcg tiles on the GPU, ops/cuda/experts_tile.h itself, word by word. */
#include "opcheck/experts_states.h"
#include "ops/cuda/experts_tile.h"

enum { THREADS = 256 };

static __global__ void k_experts_states(uint32_t *values)
{
    size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    uint32_t a[4];
    td_decode_mcg4(td_pair_sums_init(), oc_state_word((uint32_t)i), oc_state_before((uint32_t)i), a);
    for (int j = 0; j < 4; j++) values[4 * i + j] = a[j];
}

bool oc_gpu_states(uint32_t *values, const char **why)
{
    uint32_t *device = NULL;
    size_t n_bytes = (size_t)OC_STATE_WORDS * 4 * sizeof *device;
    cudaError_t error = cudaMalloc((void **)&device, n_bytes);
    *why = cudaGetErrorString(error);
    if (error != cudaSuccess) return false;
    k_experts_states<<<OC_STATE_WORDS / THREADS, THREADS>>>(device);
    error = cudaGetLastError();
    if (error == cudaSuccess) error = cudaMemcpy(values, device, n_bytes, cudaMemcpyDeviceToHost);
    cudaFree(device);
    *why = cudaGetErrorString(error);
    return error == cudaSuccess;
}
