/* Values out of nothing on the GPU: the functions of ops/random.h, a thread a value. Written once per measurement, so
 * the kernels are as plain as they can be; 26 GB of cached rows take a fraction of a second. */
#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"
#include "ops/random.h"

enum { THREADS = 256, BLOCKS_A_SM = 16 };

static __global__ void __launch_bounds__(THREADS) k_random_values(td_random_args a, float bell)
{
    size_t step = (size_t)gridDim.x * THREADS;
    uint16_t *half = (uint16_t *)a.out;
    float *full = (float *)a.out;
    td_begin();
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < a.n; i += step) {
        switch (a.kind) {
        case TD_RANDOM_BITS: half[i] = (uint16_t)td_random_bits(a.seed, i); break;
        case TD_RANDOM_BF16: half[i] = td_f32_bf16(td_random_bell(a.seed, i, bell)); break;
        case TD_RANDOM_SIGNS: half[i] = td_random_sign(a.seed, i, a.scale); break;
        default: full[i] = td_random_bell(a.seed, i, bell); break;
        }
    }
}

/* A thread four bytes of a row: width and tail are multiples of 16. */
static __global__ void __launch_bounds__(THREADS) k_random_rows(td_random_args a)
{
    size_t step = (size_t)gridDim.x * THREADS, words = ((size_t)a.width + TD_RANDOM_KV_TAIL) / 4, n = a.n * words;
    uint32_t *out = (uint32_t *)a.out;
    td_begin();
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
        size_t row = i / words;
        int at = (int)(i % words) * 4;
        uint32_t word = 0;
        for (int b = 0; b < 4; b++)
            word |= (uint32_t)td_random_kv_byte(a.seed, row, at + b, a.width, a.scale) << (8 * b);
        out[i] = word;
    }
}

td_status td_cuda_random_fill(td_dev *base, const td_random_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    dim3 grid((unsigned)(dev->n_sm * BLOCKS_A_SM));
    if (a->kind == TD_RANDOM_KV_FP8)
        td_launch(dev, k_random_rows, grid, THREADS, 0, *a);
    else
        td_launch(dev, k_random_values, grid, THREADS, 0, *a, td_random_bell_scale(a->scale));
    return td_cuda_launched(dev, "random_fill");
}
