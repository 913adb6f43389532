/* The sampler's arithmetic on the GPU: the functions of ops/sample_math.h themselves, compiled by nvcc. */
#include "opcheck/sample_values.h"

#include <cuda_runtime.h>

enum { THREADS = 256, BLOCKS = 1024 };

/* Sums of 64-bit integers: the order of the atomics does not matter. */
static __global__ void k_sample_digest(int ln, uint64_t n, unsigned long long *digest)
{
    uint64_t sum = 0, step = (uint64_t)gridDim.x * THREADS;
    for (uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
        double result = ln ? td_sample_ln(td_test_ln_argument(i)) : td_sample_exp(td_test_exp_argument(i));
        sum += td_test_digest_term(i, result);
    }
    atomicAdd(digest, (unsigned long long)sum);
}

static __global__ void k_sample_values(int kind, uint64_t n, uint64_t *values)
{
    uint64_t i = (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n) values[i] = oc_sample_value(kind, i);
}

/* Brings n_bytes of device memory to the host and gives it back. */
static bool fetch(void *device, void *host, size_t n_bytes, const char **why)
{
    cudaError_t error = cudaGetLastError(); /* of the launch */
    if (error == cudaSuccess) error = cudaMemcpy(host, device, n_bytes, cudaMemcpyDeviceToHost);
    cudaFree(device);
    *why = cudaGetErrorString(error);
    return error == cudaSuccess;
}

bool oc_gpu_sample_digest(int ln, uint64_t n, uint64_t *digest, const char **why)
{
    unsigned long long *sum = NULL;
    cudaError_t error = cudaMalloc((void **)&sum, sizeof *sum);
    if (error == cudaSuccess) error = cudaMemset(sum, 0, sizeof *sum);
    *why = cudaGetErrorString(error);
    if (error != cudaSuccess) return false;
    k_sample_digest<<<BLOCKS, THREADS>>>(ln, n, sum);
    return fetch(sum, digest, sizeof *sum, why);
}

bool oc_gpu_sample_values(int kind, uint64_t n, uint64_t *values, const char **why)
{
    uint64_t *device = NULL;
    cudaError_t error = cudaMalloc((void **)&device, n * sizeof *device);
    *why = cudaGetErrorString(error);
    if (error != cudaSuccess) return false;
    k_sample_values<<<(unsigned)((n + THREADS - 1) / THREADS), THREADS>>>(kind, n, device);
    return fetch(device, values, n * sizeof *device, why);
}
