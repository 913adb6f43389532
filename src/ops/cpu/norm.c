/* RMSNorm, the mean of the streams, and the MTP layer's plain residual. */
#include "ops/cpu/cpu.h"
#include "ops/hyper.h"
#include "ops/simd.h"

enum { PIECE = 512 }; /* values on the stack at a time; a multiple of the 16 lanes */

/* sum x^2: element i in lane i % 16, fma chains, tree. */
static float sum_of_squares(const td_cpu_dev *dev, const td_act *x, size_t xi, size_t n)
{
    float piece[PIECE];
    td_v16 acc = td_v16_splat(0.0f);
    for (size_t i = 0; i < n; i += PIECE) {
        size_t m = n - i < PIECE ? n - i : PIECE, padded = (m + 15) / 16 * 16;
        td_load_act(dev, x, xi + i, piece, m);
        for (size_t j = m; j < padded; j++) piece[j] = 0.0f;
        for (size_t j = 0; j < padded; j += 16) {
            td_v16 v = td_v16_load(piece + j);
            acc = td_v16_fma(v, v, acc);
        }
    }
    return td_v16_sum(acc);
}

void td_rmsnorm_row(const td_cpu_dev *dev, const td_act *x, size_t xi, const float *w, size_t n, float eps, float *y)
{
    float inverse = 1.0f / sqrtf(sum_of_squares(dev, x, xi, n) / (float)n + eps);
    td_load_act(dev, x, xi, y, n);
    for (size_t j = 0; j < n; j++) y[j] *= inverse;
    td_round_act(dev, y, n);
    for (size_t j = 0; j < n; j++) y[j] *= w[j];
    td_round_act(dev, y, n);
}

typedef struct norm_job {
    td_cpu_dev *dev;
    const td_rmsnorm_args *a;
} norm_job;

void td_rmsnorm_one(const td_cpu_dev *dev, const td_rmsnorm_args *a, int r)
{
    size_t xi = (size_t)(a->row ? a->row[r] : r) * a->x_stride;
    float inverse = 1.0f / sqrtf(sum_of_squares(dev, a->x, xi, (size_t)a->dim) / (float)a->dim + a->eps);
    float piece[PIECE];
    for (int i = 0; i < a->dim; i += PIECE) {
        size_t m = (size_t)(a->dim - i < PIECE ? a->dim - i : PIECE);
        td_load_act(dev, a->x, xi + (size_t)i, piece, m);
        for (size_t j = 0; j < m; j++) piece[j] *= inverse;
        td_round_act(dev, piece, m);
        for (size_t j = 0; j < m; j++) piece[j] *= a->w[(size_t)i + j];
        td_store_act(dev, a->y, (size_t)r * a->y_stride + (size_t)i, piece, m);
    }
}

static void norm_rows(void *ctx, int thread, int begin, int end)
{
    const norm_job *job = (const norm_job *)ctx;
    (void)thread;
    for (int r = begin; r < end; r++) td_rmsnorm_one(job->dev, job->a, r);
}

td_status td_cpu_rmsnorm(td_dev *dev, const td_rmsnorm_args *a)
{
    if (a->n_rows < 0 || a->dim < 1) return TD_EINVAL;
    norm_job job = { td_cpu(dev), a };
    td_cpu_for(job.dev, a->n_rows, 4.0 * a->dim, norm_rows, &job);
    return TD_OK;
}

typedef struct mean_job {
    td_cpu_dev *dev;
    const td_stream_mean_args *a;
} mean_job;

static void mean_rows(void *ctx, int thread, int begin, int end)
{
    const mean_job *job = (const mean_job *)ctx;
    const td_stream_mean_args *a = job->a;
    size_t dim = (size_t)a->dim;
    (void)thread;
    for (int r = begin; r < end; r++) {
        size_t xi = (size_t)(a->row ? a->row[r] : r) * TD_STREAMS * dim;
        for (size_t i = 0; i < dim; i += PIECE) {
            size_t m = dim - i < PIECE ? dim - i : PIECE;
            float sum[PIECE], x[PIECE];
            td_load_act(job->dev, a->x, xi + i, sum, m);
            for (size_t s = 1; s < TD_STREAMS; s++) {
                td_load_act(job->dev, a->x, xi + s * dim + i, x, m);
                for (size_t j = 0; j < m; j++) sum[j] += x[j];
            }
            for (size_t j = 0; j < m; j++) sum[j] *= 0.25f;
            td_store_act(job->dev, a->h, (size_t)r * a->h_stride + i, sum, m);
        }
    }
}

td_status td_cpu_stream_mean(td_dev *dev, const td_stream_mean_args *a)
{
    if (a->n_rows < 0 || a->dim < 1) return TD_EINVAL;
    mean_job job = { td_cpu(dev), a };
    td_cpu_for(job.dev, a->n_rows, 4.0 * a->dim, mean_rows, &job);
    return TD_OK;
}

typedef struct residual_job {
    td_cpu_dev *dev;
    const td_residual_args *a;
} residual_job;

static void residual_rows(void *ctx, int thread, int begin, int end)
{
    const residual_job *job = (const residual_job *)ctx;
    const td_residual_args *a = job->a;
    (void)thread;
    for (size_t i = (size_t)begin * (size_t)a->dim; i < (size_t)end * (size_t)a->dim; i += PIECE) {
        size_t left = (size_t)end * (size_t)a->dim - i, m = left < PIECE ? left : PIECE;
        float b[PIECE], x[PIECE];
        const float *p0 = a->partials + i, *p1 = p0 + (size_t)a->n_rows * (size_t)a->dim;
        for (size_t j = 0; j < m; j++) b[j] = p0[j] + p1[j];
        td_round_act(job->dev, b, m);
        td_load_act(job->dev, a->x, i, x, m);
        for (size_t j = 0; j < m; j++) x[j] += b[j];
        td_store_act(job->dev, a->x, i, x, m);
    }
}

td_status td_cpu_residual(td_dev *dev, const td_residual_args *a)
{
    if (a->n_rows < 0 || a->dim < 1) return TD_EINVAL;
    residual_job job = { td_cpu(dev), a };
    td_cpu_for(job.dev, a->n_rows, 2.0 * a->dim, residual_rows, &job);
    return TD_OK;
}
