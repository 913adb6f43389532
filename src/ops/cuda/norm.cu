/* RMSNorm, the mean of the streams, and the MTP layer's plain residual. */
#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"

enum { THREADS = 256, HELD = 16 /* values of a thread that are on their way at once */ };

/* Values first + j * THREADS of a row. */
static TD_DEVICE void load_values(const td_bf16 *from, int first, int dim, float v[HELD])
{
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int i = first + j * THREADS;
        v[j] = i < dim ? td_load_bf16(from + i) : 0.0f;
    }
}

static __global__ void k_rmsnorm(const int32_t *rows, int dim, float eps, const td_bf16 *x, size_t x_stride,
                                 const float *w, td_bf16 *y, size_t y_stride)
{
    for (int i = 32 * threadIdx.x; i < dim; i += 32 * THREADS) td_prefetch(w + i); /* a line each */
    td_begin();
    __shared__ float scratch[THREADS / 32 + 1];
    size_t r = blockIdx.x;
    const td_bf16 *from = x + (size_t)(rows ? rows[r] : (int32_t)r) * x_stride;
    float sum = 0.0f, v[HELD];
    for (int first = threadIdx.x; first < dim; first += HELD * THREADS) {
        load_values(from, first, dim, v);
#pragma unroll
        for (int j = 0; j < HELD; j++) sum = fmaf(v[j], v[j], sum); /* beyond the row: zeros, which change nothing */
    }
    float inverse = 1.0f / sqrtf(td_block_sum(sum, THREADS / 32, scratch) / (float)dim + eps);
    for (int first = threadIdx.x; first < dim; first += HELD * THREADS) {
        if (dim > HELD * THREADS) load_values(from, first, dim, v);
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            int i = first + j * THREADS;
            if (i < dim) y[r * y_stride + i] = td_to_bf16(td_round_bf16(v[j] * inverse) * __ldg(w + i));
        }
    }
}

td_status td_cuda_rmsnorm(td_dev *base, const td_rmsnorm_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    if (a->n_rows < 0 || a->dim < 1) return TD_EINVAL;
    if (!a->n_rows) return TD_OK;
    td_launch(dev, k_rmsnorm, a->n_rows, THREADS, 0, a->row, a->dim, a->eps, (const td_bf16 *)a->x, a->x_stride, a->w,
              (td_bf16 *)a->y, a->y_stride);
    return td_cuda_launched(dev, "rmsnorm");
}

static __global__ void k_stream_mean(const int32_t *rows, int dim, const td_bf16 *x, td_bf16 *h, size_t h_stride)
{
    td_begin();
    size_t r = blockIdx.x, at = (size_t)(rows ? rows[r] : (int32_t)r) * TD_STREAMS * dim;
    int d = blockIdx.y * THREADS + threadIdx.x;
    if (d >= dim) return;
    float sum = td_load_bf16(x + at + d);
#pragma unroll
    for (int s = 1; s < TD_STREAMS; s++) sum += td_load_bf16(x + at + (size_t)s * dim + d);
    h[r * h_stride + d] = td_to_bf16(sum * 0.25f);
}

td_status td_cuda_stream_mean(td_dev *base, const td_stream_mean_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    if (a->n_rows < 0 || a->dim < 1) return TD_EINVAL;
    if (!a->n_rows) return TD_OK;
    td_launch(dev, k_stream_mean, dim3((unsigned)a->n_rows, td_ceil_div((size_t)a->dim, THREADS)), THREADS, 0, a->row,
              a->dim, (const td_bf16 *)a->x, (td_bf16 *)a->h, a->h_stride);
    return td_cuda_launched(dev, "stream_mean");
}

static __global__ void k_residual(size_t n, const float *partials, td_bf16 *x)
{
    td_begin();
    size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n) x[i] = td_to_bf16(td_load_bf16(x + i) + td_round_bf16(partials[i] + partials[n + i]));
}

td_status td_cuda_residual(td_dev *base, const td_residual_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    if (a->n_rows < 0 || a->dim < 1) return TD_EINVAL;
    size_t n = (size_t)a->n_rows * (size_t)a->dim;
    if (!n) return TD_OK;
    td_launch(dev, k_residual, td_ceil_div(n, THREADS), THREADS, 0, n, a->partials, (td_bf16 *)a->x);
    return td_cuda_launched(dev, "residual");
}
