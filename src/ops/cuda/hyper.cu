/* Hyper-connections: leave one site, enter the next. Two kernels: the first works on slices of 64 channels (all four
 * streams) of some rows, so that one row is spread over the chip: it writes the new streams and each slice's share of
 * the 24 mixes and of the sum of squares (in one form for few rows and one for many, hyper_many.cu, with the same
 * bits: hyper.h); the second finishes a row: shares added in order, gates, collapse, norm. The Sinkhorn iterations, a
 * long chain of divisions that only the next site needs, are a kernel beside what follows (td_cuda_aside()). One row
 * is all latency: weights are asked for before the wait for the kernel before, and what a kernel reads first is read
 * in one go. */
#include "ops/cuda/hyper.h"

enum {
    THREADS = 256,
    ROWS_AT_ONCE = THREADS / SLICE,
    FEW_ROWS = 8, /* up to these: a block has all of them */
    WARPS = THREADS / 32,
    STREAM_ROW = S * SLICE + 16, /* values of a row, SUMS_STRIDE floats of its sums: eight rows in different banks */
    SUMS_STRIDE = 40,
    SINKHORN_ROWS = 4,
    SHARED_MAX = 46 * 1024 /* of a row, beside what is fixed */
};

/* X_s = act( post_s b + (((C_0s X_0 + C_1s X_1) + C_2s X_2) + C_3s X_3) ) of one channel; gate: lanes 0..3 of the warp
 * hold the row's post, 4..19 its C. */
static TD_DEVICE void leave(float b, float gate, float x[S])
{
    float c[S * S], y[S];
#pragma unroll
    for (int i = 0; i < S * S; i++) c[i] = __shfl_sync(0xffffffffu, gate, S + i);
#pragma unroll
    for (int k = 0; k < S; k++)
        y[k] = td_round_bf16(__shfl_sync(0xffffffffu, gate, k) * b +
                             (((c[k] * x[0] + c[S + k] * x[1]) + c[2 * S + k] * x[2]) + c[3 * S + k] * x[3]));
#pragma unroll
    for (int k = 0; k < S; k++) x[k] = y[k];
}

/* The old streams of channel d of a row. They are older than the operation before (ops/hyper.h). */
static TD_DEVICE void load_channel(const td_hyper_call &a, size_t row, int d, bool valid, float x[S])
{
#pragma unroll
    for (int s = 0; s < S; s++) x[s] = valid ? td_load_bf16(a.x + (row * S + s) * a.dim + d) : 0.0f;
}

/* The new streams of channel d, from the old ones: into memory and into xs[4][SLICE]. A warp has one row; `there`: it is
 * one of the window's; `valid`: so is the channel. */
static TD_DEVICE void stream_values(const td_hyper_call &a, size_t row, int d, bool there, bool valid, float x[S],
                                    td_bf16 *xs)
{
    int lane = threadIdx.x % 32;
    if (a.partials) {
        float part[TD_SHARDS] = { 0.0f, 0.0f }, gate = 0.0f;
#pragma unroll
        for (int i = 0; i < TD_SHARDS; i++)
            if (valid) part[i] = a.partials[((size_t)i * a.n_rows + row) * a.dim + d];
        if (there && lane < S + S * S) gate = lane < S ? a.post[row * S + lane] : a.comb[row * S * S + lane - S];
        leave(td_round_bf16(part[0] + part[1]), gate, x);
#pragma unroll
        for (int s = 0; s < S; s++)
            if (valid) a.x[(row * S + s) * a.dim + d] = td_to_bf16(x[s]);
    }
#pragma unroll
    for (int s = 0; s < S; s++) xs[s * SLICE + threadIdx.x % SLICE] = td_to_bf16(valid ? x[s] : 0.0f);
}

/* A chunk's sums of row g, whose values of the lane are at x. */
static TD_DEVICE void mix_rows(const td_mix_step w[S], const td_bf16 *x, bool there, float *to)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    td_mix_sums of;
    td_mix_clear(&of);
#pragma unroll
    for (int s = 0; s < S; s++) {
        uint2 v = there ? *(const uint2 *)(x + s * SLICE) : make_uint2(0, 0);
        const uint32_t rows[4] = { v.x, 0, v.y, 0 };
        td_mix_add<true>(w[s], rows, &of);
    }
#pragma unroll
    for (int j = 0; j < MIX_TILES; j++)
        *(float2 *)(to + 8 * j + 2 * t) = make_float2(td_mix_sum(of, j, 0), td_mix_sum(of, j, 1));
    if (t == g / 2) to[MIXES] = td_mix_square(of, 0);
}

/* Up to eight rows: all threads make streams, then a warp a chunk has the mixes. Two blocks a multiprocessor, so that a
 * GB10 has all slices of a row at once. */
static __global__ void __launch_bounds__(THREADS, 2) k_hyper_slices(td_hyper_call a)
{
    __shared__ __align__(16) td_bf16 xs[FEW_ROWS][STREAM_ROW];
    __shared__ __align__(16) float sums[CHUNKS][FEW_ROWS][SUMS_STRIDE];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slice = blockIdx.x, d = slice * SLICE + threadIdx.x % SLICE;
    int own = threadIdx.x / SLICE, end = a.n_rows, at = td_mix_channel(warp, lane % 4);
    td_mix_step w[S];
    float x[S];
    if (a.partials) load_channel(a, own, d, own < end && d < a.dim, x);
    if (warp < CHUNKS) {
        float4 raw[S][MIX_TILES];
#pragma unroll
        for (int s = 0; s < S; s++) td_mix_load(a, slice * SLICE + at, s, raw[s]);
#pragma unroll
        for (int s = 0; s < S; s++) td_mix_split(raw[s], &w[s]);
    }
    td_begin(); /* the old streams and the weights are on their way */
    for (int r0 = 0; r0 < end; r0 += ROWS_AT_ONCE) {
        bool there = r0 + own < end, valid = there && d < a.dim;
        if (r0 || !a.partials) load_channel(a, (size_t)(r0 + own), d, valid, x);
        stream_values(a, (size_t)(r0 + own), d, there, valid, x, xs[r0 + own]);
    }
    if (!a.fn) return;
    __syncthreads();
    if (warp < CHUNKS) mix_rows(w, xs[lane / 4] + at, lane / 4 < end, sums[warp][lane / 4]);
    __syncthreads();
    if (warp >= end || lane >= SHARES) return;
    float sum = sums[0][warp][lane];
#pragma unroll
    for (int i = 1; i < CHUNKS; i++) sum += sums[i][warp][lane];
    size_t share = (size_t)warp * gridDim.x + slice;
    if (lane < MIXES)
        a.mixes[share * MIXES + lane] = sum;
    else
        a.squares[share] = sum;
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

/* A warp a row: the logits in comb become the mixing of the row's streams. */
static __global__ void __launch_bounds__(32 * SINKHORN_ROWS) k_hyper_sinkhorn(td_hyper_call a)
{
    td_begin();
    int lane = threadIdx.x % 32, row = blockIdx.x * SINKHORN_ROWS + threadIdx.x / 32;
    if (row >= a.n_rows) return;
    float *comb = a.comb + (size_t)row * S * S, l = comb[lane % (S * S)], max = l;
    for (int j = 0; j < S; j++) max = fmaxf(max, __shfl_sync(0xffffffffu, l, lane / 4 % 4 * 4 + j));
    float e = td_expf(l - max), c = e / row_sum(e, lane) + a.hc_eps;
    c = c / (column_sum(c, lane) + a.hc_eps);
    for (int t = 1; t < a.iters; t++) {
        c = c / (row_sum(c, lane) + a.hc_eps);
        c = c / (column_sum(c, lane) + a.hc_eps);
    }
    if (lane < S * S) comb[lane] = c;
}

/* Value i of eight. */
static TD_DEVICE float eighth(uint4 v, int i)
{
    uint32_t pair = i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
    return i % 2 ? td_high_bf16(pair) : td_low_bf16(pair);
}

static TD_DEVICE void load_streams(const td_hyper_call &a, size_t row, int d, uint4 v[S])
{
#pragma unroll
    for (int s = 0; s < S; s++) v[s] = *(const uint4 *)(a.x + (row * S + s) * a.dim + d);
}

/* Eight channels: the streams collapsed, into to[8]; their squares are added to `square`. */
static TD_DEVICE void collapse(const float pre[S], const uint4 v[S], float *to, float *square)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float c = td_round_bf16(((pre[0] * eighth(v[0], i) + pre[1] * eighth(v[1], i)) + pre[2] * eighth(v[2], i)) +
                                pre[3] * eighth(v[3], i));
        to[i] = c;
        *square = fmaf(c, c, *square);
    }
}

/* Eight channels of n. */
static TD_DEVICE void store_normed(const float *collapsed, float inverse, const float *norm, td_bf16 *to)
{
    float n[8];
#pragma unroll
    for (int i = 0; i < 8; i++) n[i] = td_round_bf16(collapsed[i] * inverse) * norm[i];
    *(uint4 *)to = make_uint4(td_pack_bf16(n[0], n[1]), td_pack_bf16(n[2], n[3]), td_pack_bf16(n[4], n[5]),
                              td_pack_bf16(n[6], n[7]));
}

/* A warp's part of the slices, lane by lane: their shares added in order. */
static TD_DEVICE float add_shares(const td_hyper_call &a, size_t row, int slices)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int first = slices * warp / WARPS, end = slices * (warp + 1) / WARPS;
    const float *shares = lane < MIXES ? a.mixes + row * slices * MIXES + lane : a.squares + row * slices;
    int step = lane < MIXES ? MIXES : 1;
    float sum = 0.0f;
#pragma unroll 8
    for (int i = first; i < end; i++) sum += shares[i * step];
    return sum;
}

/* A warp: the row's gates from its sums; the pending mixing of the streams stays logits until k_hyper_sinkhorn. */
static TD_DEVICE void mix(const td_hyper_call &a, size_t row, float sum, float base, float scale, float *pre)
{
    int lane = threadIdx.x;
    float squares = __shfl_sync(0xffffffffu, sum, MIXES);
    float rms = 1.0f / sqrtf(squares / (float)(S * a.dim) + a.rms_eps), mixed = (rms * sum) * scale + base;
    float sigmoid = td_sigmoidf(mixed);
    if (lane < S) pre[lane] = sigmoid + a.hc_eps;
    if (lane >= S && lane < 2 * S) a.post[row * S + lane - S] = 2.0f * sigmoid;
    if (lane >= 2 * S && lane < MIXES) a.comb[row * S * S + lane - 2 * S] = mixed;
}

static __global__ void __launch_bounds__(THREADS) k_hyper_finish(td_hyper_call a, int slices)
{
    enum { HELD = 2 }; /* loads of streams and weights that are on their way before the gates are known */
    extern __shared__ __align__(16) float collapsed[]; /* [dim] */
    __shared__ float pre_of[S], sums[WARPS][32], scratch[WARPS + 1];
    size_t row = gridDim.x - 1 - blockIdx.x; /* the last rows are those that the cache still has */
    int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    float base = tid < MIXES ? a.base[tid] : 0.0f, scale = tid < MIXES ? a.scale[tid < S       ? 0
                                                                                 : tid < 2 * S ? 1
                                                                                               : 2]
                                                                       : 0.0f;
    uint4 norm[HELD][2];
#pragma unroll
    for (int i = 0; i < 2 * HELD; i++) {
        int d = 8 * (tid + i / 2 * THREADS);
        if (d < a.dim) norm[i / 2][i % 2] = td_load_early16(a.norm + d + i % 2 * 4);
    }
    td_begin(); /* the weights are on their way */
    sums[warp][lane] = add_shares(a, row, slices);
    uint4 v[HELD][S];
#pragma unroll
    for (int i = 0; i < HELD; i++)
        if (8 * (tid + i * THREADS) < a.dim) load_streams(a, row, 8 * (tid + i * THREADS), v[i]);
    __syncthreads();
    if (warp == 0) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums[w][lane];
        mix(a, row, sum, base, scale, pre_of);
    }
    __syncthreads();
    float pre[S], square = 0.0f;
    for (int s = 0; s < S; s++) pre[s] = pre_of[s];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int d = 8 * (tid + i * THREADS);
        if (d < a.dim) collapse(pre, v[i], collapsed + d, &square);
    }
    for (int d = 8 * (tid + HELD * THREADS); d < a.dim; d += 8 * THREADS) {
        load_streams(a, row, d, v[0]);
        collapse(pre, v[0], collapsed + d, &square);
    }
    float inverse = 1.0f / sqrtf(td_block_sum(square, WARPS, scratch) / (float)a.dim + a.rms_eps);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int d = 8 * (tid + i * THREADS);
        if (d < a.dim) store_normed(collapsed + d, inverse, (const float *)norm[i], a.n + row * a.dim + d);
    }
    for (int d = 8 * (tid + HELD * THREADS); d < a.dim; d += 8 * THREADS)
        store_normed(collapsed + d, inverse, a.norm + d, a.n + row * a.dim + d);
}

static size_t slices_of(int dim)
{
    return ((size_t)dim + SLICE - 1) / SLICE;
}

size_t td_cuda_hyper_bytes(const td_dev_limits *limits)
{
    return (size_t)limits->rows * slices_of(limits->dim) * SHARES * sizeof(float);
}

td_status td_cuda_hyper(td_dev *base, const td_hyper_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    if (a->n_rows < 0 || a->n_rows > dev->limits.rows || a->dim < 16 || a->dim > dev->limits.dim || a->dim % 16 ||
        (size_t)a->dim * sizeof(float) > SHARED_MAX)
        return TD_EINVAL;
    if (!a->n_rows || (!a->fn && !a->partials)) return TD_OK;
    td_arena arena;
    td_cuda_catch_up(dev); /* with the pending site's Sinkhorn */
    td_cuda_scratch(dev, &arena);
    td_hyper_call h = { a->n_rows,   a->dim, a->iters, a->rms_eps, a->hc_eps,
                        a->partials, a->fn,  a->base,  a->scale,   a->norm };
    h.x = (td_bf16 *)a->x;
    h.post = a->post;
    h.comb = a->comb;
    h.n = (td_bf16 *)a->n;
    size_t slices = slices_of(a->dim);
    h.mixes = (float *)td_cuda_take(&arena, td_cuda_hyper_bytes(&dev->limits));
    h.squares = h.mixes + (size_t)a->n_rows * slices * MIXES;
    if (a->n_rows <= FEW_ROWS) {
        td_launch(dev, k_hyper_slices, (unsigned)slices, THREADS, 0, h);
    } else {
        td_hyper_slices_many(dev, &h, slices);
    }
    if (!a->fn) return td_cuda_launched(dev, "hyper");
    td_launch(dev, k_hyper_finish, a->n_rows, THREADS, a->dim * sizeof(float), h, (int)slices);
    td_cuda_aside(dev);
    td_launch(dev, k_hyper_sinkhorn, td_ceil_div((size_t)a->n_rows, SINKHORN_ROWS), 32 * SINKHORN_ROWS, 0, h);
    td_cuda_aside_end(dev);
    return td_cuda_launched(dev, "hyper");
}
