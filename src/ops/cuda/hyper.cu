/* Hyper-connections: leave one site, enter the next. Two kernels: the first works on slices of 64 channels (all four
 * streams) of many rows, so that one row is spread over the chip: it writes the new streams and each slice's share of
 * the 24 mixes and of the sum of squares; the second finishes a row: shares added in order, gates, collapse, norm. The
 * Sinkhorn iterations, a long chain of divisions that only the next site needs, run on a warp of their own meanwhile.
 */
#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"

enum {
    S = TD_STREAMS,
    MIXES = 2 * S + S * S, /* pre 0..3, post 4..7, comb 8..23 */
    SHARES = MIXES + 1,    /* and the sum of squares */
    SLICE = 64,            /* channels */
    THREADS = 256,
    ROWS_AT_ONCE = THREADS / SLICE,
    ROWS_A_BLOCK = 32,
    PER_LANE = S * SLICE / 32,
    PER_WARP = MIXES / (THREADS / 32)
};

typedef struct hyper_args {
    int n_rows, dim, iters;
    float rms_eps, hc_eps;
    const float *partials, *fn, *base, *scale, *norm;
    td_bf16 *x;
    float *post, *comb;
    td_bf16 *n;
    float *shares; /* [n_rows][slices][SHARES] */
} hyper_args;

/* X_s = act( post_s b + (((C_0s X_0 + C_1s X_1) + C_2s X_2) + C_3s X_3) ) of one channel */
static TD_DEVICE void leave(const hyper_args &a, size_t row, int d, float x[S])
{
    size_t at = row * a.dim + d;
    const float *post = a.post + row * S, *c = a.comb + row * S * S;
    float b = td_round_bf16(a.partials[at] + a.partials[(size_t)a.n_rows * a.dim + at]), y[S];
#pragma unroll
    for (int k = 0; k < S; k++)
        y[k] = td_round_bf16(post[k] * b +
                             (((c[k] * x[0] + c[S + k] * x[1]) + c[2 * S + k] * x[2]) + c[3 * S + k] * x[3]));
#pragma unroll
    for (int k = 0; k < S; k++) {
        x[k] = y[k];
        a.x[(row * S + k) * a.dim + d] = td_to_bf16(y[k]);
    }
}

/* Channel threadIdx.x % SLICE of row `row`: into xs[4][SLICE]. */
static TD_DEVICE void stream_values(const hyper_args &a, size_t row, int d, bool valid, float *xs)
{
    float x[S] = { 0.0f, 0.0f, 0.0f, 0.0f };
    if (valid) {
#pragma unroll
        for (int s = 0; s < S; s++) x[s] = td_load_bf16(a.x + (row * S + s) * a.dim + d);
        if (a.partials) leave(a, row, d, x);
    }
#pragma unroll
    for (int s = 0; s < S; s++) xs[s * SLICE + threadIdx.x % SLICE] = x[s];
}

static __global__ void __launch_bounds__(THREADS) k_hyper_slices(hyper_args a)
{
    td_begin();
    __shared__ float xs[ROWS_AT_ONCE][S * SLICE];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slice = blockIdx.x, d = slice * SLICE + threadIdx.x % SLICE;
    float fn[PER_WARP][PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_WARP * PER_LANE; i++) {
        int e = lane + 32 * (i % PER_LANE), channel = slice * SLICE + e % SLICE, k = warp + 8 * (i / PER_LANE);
        fn[i / PER_LANE][i % PER_LANE] =
            a.fn && channel < a.dim ? a.fn[(size_t)k * S * a.dim + (size_t)(e / SLICE) * a.dim + channel] : 0.0f;
    }
    int first = blockIdx.y * ROWS_A_BLOCK, end = min(first + ROWS_A_BLOCK, a.n_rows);
    for (int r0 = first; r0 < end; r0 += ROWS_AT_ONCE) {
        int own = threadIdx.x / SLICE;
        __syncthreads();
        stream_values(a, (size_t)(r0 + own), d, r0 + own < end && d < a.dim, xs[own]);
        __syncthreads();
        for (int r = 0; a.fn && r < ROWS_AT_ONCE && r0 + r < end; r++) {
            float *share = a.shares + ((size_t)(r0 + r) * gridDim.x + slice) * SHARES, v[PER_LANE];
#pragma unroll
            for (int j = 0; j < PER_LANE; j++) v[j] = xs[r][lane + 32 * j];
#pragma unroll
            for (int i = 0; i < PER_WARP; i++) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < PER_LANE; j++) sum = fmaf(fn[i][j], v[j], sum);
                sum = td_warp_sum(sum);
                if (lane == 0) share[warp + 8 * i] = sum;
            }
            if (warp != r) continue;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < PER_LANE; j++) sum = fmaf(v[j], v[j], sum);
            sum = td_warp_sum(sum);
            if (lane == 0) share[MIXES] = sum;
        }
    }
}

/* Lane 4 i + j holds c[i][j]; 16 lanes take part. Each sum ascends over the four members, as on the CPU. */
static TD_DEVICE float column_sum(float c, int lane)
{
    float sum = __shfl_sync(0xffffffffu, c, lane % 4);
    for (int i = 1; i < S; i++) sum += __shfl_sync(0xffffffffu, c, lane % 4 + 4 * i);
    return sum;
}

static TD_DEVICE float row_sum(float c, int lane)
{
    float sum = __shfl_sync(0xffffffffu, c, lane / 4 % 4 * 4);
    for (int j = 1; j < S; j++) sum += __shfl_sync(0xffffffffu, c, lane / 4 % 4 * 4 + j);
    return sum;
}

static TD_DEVICE void sinkhorn(const hyper_args &a, const float *logits, float *comb, int lane)
{
    float l = logits[lane % 16], max = l;
    for (int j = 0; j < S; j++) max = fmaxf(max, __shfl_sync(0xffffffffu, l, lane / 4 % 4 * 4 + j));
    float e = td_expf(l - max), c = e / row_sum(e, lane) + a.hc_eps;
    c = c / (column_sum(c, lane) + a.hc_eps);
    for (int t = 1; t < a.iters; t++) {
        c = c / (row_sum(c, lane) + a.hc_eps);
        c = c / (column_sum(c, lane) + a.hc_eps);
    }
    if (lane < S * S) comb[lane] = c;
}

static TD_DEVICE void workers_wait()
{
    asm volatile("bar.sync 1, 256;" ::: "memory");
}

/* Sum over the worker threads; both waits are theirs alone. */
static TD_DEVICE float workers_sum(float x, float *scratch)
{
    x = td_warp_sum(x);
    workers_wait();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    workers_wait();
    float sum = 0.0f;
    for (int w = 0; w < THREADS / 32; w++) sum += scratch[w];
    return sum;
}

/* Value i of eight. */
static TD_DEVICE float eighth(uint4 v, int i)
{
    uint32_t pair = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
    return i % 2 ? td_high_bf16(pair) : td_low_bf16(pair);
}

static __global__ void __launch_bounds__(THREADS + 32) k_hyper_finish(hyper_args a, int slices)
{
    td_begin();
    extern __shared__ float collapsed[]; /* [dim]; before: the slices' shares */
    __shared__ float sums[SHARES], m[MIXES], scratch[THREADS / 32];
    size_t row = blockIdx.x;
    int tid = threadIdx.x;
    const float *shares = a.shares + row * slices * SHARES;
    for (int i = tid; i < slices * SHARES; i += THREADS + 32) collapsed[i] = shares[i];
    __syncthreads();
    if (tid < SHARES) {
        float sum = 0.0f;
#pragma unroll 8
        for (int i = 0; i < slices; i++) sum += collapsed[i * SHARES + tid];
        sums[tid] = sum;
    }
    __syncthreads();
    if (tid < MIXES) {
        float rms = 1.0f / sqrtf(sums[MIXES] / (float)(S * a.dim) + a.rms_eps);
        m[tid] = (rms * sums[tid]) * a.scale[tid < S ? 0 : tid < 2 * S ? 1 : 2] + a.base[tid];
        if (tid >= S && tid < 2 * S) a.post[row * S + tid - S] = 2.0f * td_sigmoidf(m[tid]);
    }
    __syncthreads();
    if (tid >= THREADS) {
        sinkhorn(a, m + 2 * S, a.comb + row * S * S, tid - THREADS);
        return;
    }
    float pre[S], square = 0.0f;
    for (int s = 0; s < S; s++) pre[s] = td_sigmoidf(m[s]) + a.hc_eps;
    const td_bf16 *x = a.x + row * S * a.dim;
#pragma unroll 2
    for (int d = 8 * tid; d < a.dim; d += 8 * THREADS) {
        uint4 v[S];
#pragma unroll
        for (int s = 0; s < S; s++) v[s] = *(const uint4 *)(x + (size_t)s * a.dim + d);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float c = td_round_bf16(((pre[0] * eighth(v[0], i) + pre[1] * eighth(v[1], i)) + pre[2] * eighth(v[2], i)) +
                                    pre[3] * eighth(v[3], i));
            collapsed[d + i] = c;
            square = fmaf(c, c, square);
        }
    }
    float inverse = 1.0f / sqrtf(workers_sum(square, scratch) / (float)a.dim + a.rms_eps);
#pragma unroll 2
    for (int d = 8 * tid; d < a.dim; d += 8 * THREADS) {
        float n[8];
        for (int i = 0; i < 8; i++) n[i] = td_round_bf16(collapsed[d + i] * inverse) * __ldg(a.norm + d + i);
        *(uint4 *)(a.n + row * a.dim + d) = make_uint4(td_pack_bf16(n[0], n[1]), td_pack_bf16(n[2], n[3]),
                                                       td_pack_bf16(n[4], n[5]), td_pack_bf16(n[6], n[7]));
    }
}

static size_t slices_of(int dim)
{
    return ((size_t)dim + SLICE - 1) / SLICE;
}

static size_t finish_floats(int dim)
{
    size_t shares = slices_of(dim) * SHARES;
    return shares > (size_t)dim ? shares : (size_t)dim;
}

size_t td_cuda_hyper_bytes(const td_dev_limits *limits)
{
    return (size_t)limits->rows * slices_of(limits->dim) * SHARES * sizeof(float);
}

td_status td_cuda_hyper(td_dev *base, const td_hyper_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    if (a->n_rows < 0 || a->n_rows > dev->limits.rows || a->dim < 16 || a->dim > dev->limits.dim || a->dim % 16 ||
        finish_floats(a->dim) * sizeof(float) > 48 * 1024)
        return TD_EINVAL;
    if (!a->n_rows || (!a->fn && !a->partials)) return TD_OK;
    td_arena arena;
    td_cuda_scratch(dev, &arena);
    hyper_args h = {
        a->n_rows, a->dim, a->iters, a->rms_eps, a->hc_eps, a->partials, a->fn, a->base, a->scale, a->norm
    };
    h.x = (td_bf16 *)a->x;
    h.post = a->post;
    h.comb = a->comb;
    h.n = (td_bf16 *)a->n;
    h.shares = (float *)td_cuda_take(&arena, td_cuda_hyper_bytes(&dev->limits));
    size_t slices = slices_of(a->dim);
    td_launch(dev, k_hyper_slices, dim3((unsigned)slices, td_ceil_div((size_t)a->n_rows, ROWS_A_BLOCK)), THREADS, 0, h);
    if (a->fn)
        td_launch(dev, k_hyper_finish, a->n_rows, THREADS + 32, finish_floats(a->dim) * sizeof(float), h, (int)slices);
    return td_cuda_launched(dev, "hyper");
}
