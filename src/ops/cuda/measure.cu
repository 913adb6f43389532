/* What measurements need of a GPU: events in its stream, a pause, and the most that its tensor cores multiply. */
#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"
#include "ops/measure.h"

enum { THREADS = 256, CHAINS = 8, STEPS = 2048, BLOCKS_A_SM = 2, FLOPS_A_STEP = 2 * 16 * 8 * 16 };

td_status td_cuda_event_create(void **out)
{
    cudaEvent_t event;
    if (cudaEventCreate(&event) != cudaSuccess) {
        cudaGetLastError();
        return TD_ENOMEM;
    }
    *out = event;
    return TD_OK;
}

void td_cuda_event_destroy(void *event)
{
    if (event) cudaEventDestroy((cudaEvent_t)event);
}

td_status td_cuda_event_record(td_dev *base, void *event)
{
    td_cuda_dev *dev = td_cuda(base);
    return td_cuda_done(dev, cudaEventRecord((cudaEvent_t)event, dev->stream), "a mark");
}

double td_cuda_event_seconds(void *from, void *to)
{
    float ms = 0.0f;
    if (cudaEventElapsedTime(&ms, (cudaEvent_t)from, (cudaEvent_t)to) != cudaSuccess) {
        cudaGetLastError();
        return 0.0;
    }
    return (double)ms * 1e-3;
}

static __global__ void k_hold(int64_t ns)
{
    uint64_t start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        __nanosleep(1000);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while ((int64_t)(now - start) < ns);
}

td_status td_cuda_hold(td_dev *base, int64_t ns)
{
    td_cuda_dev *dev = td_cuda(base);
    k_hold<<<1, 1, 0, dev->stream>>>(ns);
    return td_cuda_launched(dev, "a pause");
}

/* Chains of products that depend on nothing but themselves, enough of them to fill the pipeline. The operands are zero
 * in fact and unknown to the compiler; what is computed reaches memory only if it is not zero, which it never is. */
static __global__ void __launch_bounds__(THREADS) k_multiply(const uint32_t *zeros, float *out)
{
    uint32_t a[4], b0 = zeros[4], b1 = zeros[5];
    float c[CHAINS][4] = {};
    for (int i = 0; i < 4; i++) a[i] = zeros[i];
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int i = 0; i < CHAINS; i++) td_mma_bf16(c[i], a, b0, b1);
    float sum = 0.0f;
    for (int i = 0; i < CHAINS; i++)
        for (int j = 0; j < 4; j++) sum += c[i][j];
    if (sum != 0.0f) out[blockIdx.x * THREADS + threadIdx.x] = sum;
}

td_status td_cuda_multiply(td_dev *base, double *flops)
{
    td_cuda_dev *dev = td_cuda(base);
    unsigned blocks = (unsigned)(dev->n_sm * BLOCKS_A_SM);
    td_status status = td_cuda_done(dev, cudaMemsetAsync(dev->scratch, 0, 64, dev->stream), "multiply");
    if (status != TD_OK) return status;
    k_multiply<<<blocks, THREADS, 0, dev->stream>>>((const uint32_t *)dev->scratch, (float *)(dev->scratch + 64));
    *flops = (double)blocks * (THREADS / 32) * STEPS * CHAINS * FLOPS_A_STEP;
    return td_cuda_launched(dev, "multiply");
}
