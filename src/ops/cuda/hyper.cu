/* Hyper-connections: leave one site, enter the next. Two kernels: the first works on slices of 64 channels (all four
 * streams) of some rows, so that one row is spread over the chip: it writes the new streams and each slice's share of
 * the 24 mixes and of the sum of squares (in one form for few rows and one for many, with the same bits); the second
 * finishes a row: shares added in order, gates, collapse, norm. The Sinkhorn iterations, a long chain of divisions that
 * only the next site needs, are a kernel beside what follows (td_cuda_aside()). One row is all latency: weights are
 * asked for before the wait for the kernel before, and what a kernel reads first is read in one go. */
#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"

enum {
    S = TD_STREAMS,
    MIXES = 2 * S + S * S, /* pre 0..3, post 4..7, comb 8..23 */
    SHARES = MIXES + 1,    /* and the sum of squares */
    SLICE = 64,            /* channels */
    THREADS = 256,
    ROWS_AT_ONCE = THREADS / SLICE,
    FEW_ROWS = 8, /* up to these: a block has all of them, four at once */
    PER_LANE = S * SLICE / 32,
    WARPS = THREADS / 32,
    PER_WARP = MIXES / WARPS,
    SINKHORN_ROWS = 4,
    SHARED_MAX = 46 * 1024 /* of a row, beside what is fixed */
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
static TD_DEVICE void load_channel(const hyper_args &a, size_t row, int d, bool valid, float x[S])
{
#pragma unroll
    for (int s = 0; s < S; s++) x[s] = valid ? td_load_bf16(a.x + (row * S + s) * a.dim + d) : 0.0f;
}

/* The new streams of channel d, from the old ones: into memory and into xs[4][SLICE]. A warp has one row; `there`: it is
 * one of the window's; `valid`: so is the channel. */
static TD_DEVICE void stream_values(const hyper_args &a, size_t row, int d, bool there, bool valid, float x[S],
                                    float *xs)
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
    for (int s = 0; s < S; s++) xs[s * SLICE + threadIdx.x % SLICE] = valid ? x[s] : 0.0f;
}

static __global__ void __launch_bounds__(THREADS) k_hyper_slices(hyper_args a)
{
    __shared__ float xs[ROWS_AT_ONCE][S * SLICE];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slice = blockIdx.x, d = slice * SLICE + threadIdx.x % SLICE;
    int own = threadIdx.x / SLICE, end = a.n_rows;
    float fn[PER_WARP][PER_LANE];
    float x[S];
    if (a.partials) load_channel(a, own, d, own < end && d < a.dim, x);
#pragma unroll
    for (int i = 0; i < PER_WARP * PER_LANE; i++) {
        int e = lane + 32 * (i % PER_LANE), channel = slice * SLICE + e % SLICE, k = warp + 8 * (i / PER_LANE);
        fn[i / PER_LANE][i % PER_LANE] =
            a.fn && channel < a.dim ? a.fn[(size_t)k * S * a.dim + (size_t)(e / SLICE) * a.dim + channel] : 0.0f;
    }
    td_begin(); /* the old streams and the weights are on their way */
    for (int r0 = 0; r0 < end; r0 += ROWS_AT_ONCE) {
        bool there = r0 + own < end, valid = there && d < a.dim;
        if (r0 || !a.partials) load_channel(a, (size_t)(r0 + own), d, valid, x);
        __syncthreads();
        stream_values(a, (size_t)(r0 + own), d, there, valid, x, xs[own]);
        __syncthreads();
        for (int r = 0; a.fn && r < ROWS_AT_ONCE && r0 + r < end; r++) {
            float *share = a.shares + ((size_t)(r0 + r) * gridDim.x + slice) * SHARES, w[PER_LANE];
#pragma unroll
            for (int j = 0; j < PER_LANE; j++) w[j] = xs[r][lane + 32 * j];
#pragma unroll
            for (int i = 0; i < PER_WARP; i++) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < PER_LANE; j++) sum = fmaf(fn[i][j], w[j], sum);
                sum = td_warp_sum(sum);
                if (lane == 0) share[warp + 8 * i] = sum;
            }
            if (warp != r) continue;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < PER_LANE; j++) sum = fmaf(w[j], w[j], sum);
            sum = td_warp_sum(sum);
            if (lane == 0) share[MIXES] = sum;
        }
    }
}

/* Many rows: the same sums, cheaper. Eight rows at once: a warp makes the streams of one, two channels a lane, with
 * what it loads a round ahead; then it has six mixes of four rows, so that a row is read by four warps, and its 24 sums
 * and one of squares go through one transposing tree over the lanes. */
enum {
    MANY_AT_ONCE = THREADS / 32,
    MANY_SHARED = 4, /* rows of a warp's sums; also the warps that share a row's mixes */
    MANY_MIXES = MIXES / MANY_SHARED,
    MANY_SUMS = MANY_SHARED * MANY_MIXES + 1,
    MANY_ROWS = 128 /* of a block, at most */
};

/* What a lane has loaded of its warp's row; zeros where there are no channels. */
typedef struct raw_row {
    uint32_t x[S];
    float2 part[TD_SHARDS];
    float gate; /* lanes 0..3: post, 4..19: C */
} raw_row;

/* Where a lane's row is, as numbers of elements; fewer than 2^32 (td_cuda_hyper() sees to it). */
typedef struct row_place {
    const float *gates;
    uint32_t stream, partial, gate, gate_step;
} row_place;

static TD_DEVICE row_place place_of(const hyper_args &a, int row, int d)
{
    int lane = threadIdx.x % 32;
    row_place p;
    p.stream = (uint32_t)row * S * a.dim + d;
    p.partial = (uint32_t)row * a.dim + d;
    p.gate_step = lane < S ? S : S * S;
    p.gate = row * p.gate_step + (lane < S ? lane : lane - S);
    p.gates = lane < S ? a.post : a.comb;
    return p;
}

static TD_DEVICE void next_rows(const hyper_args &a, row_place *p)
{
    p->stream += MANY_AT_ONCE * S * a.dim;
    p->partial += MANY_AT_ONCE * a.dim;
    p->gate += MANY_AT_ONCE * p->gate_step;
}

static TD_DEVICE void load_row(const hyper_args &a, const row_place &p, bool there, bool channels, raw_row *raw)
{
    if (there && channels)
#pragma unroll
        for (int s = 0; s < S; s++) raw->x[s] = *(const uint32_t *)(a.x + (p.stream + s * a.dim));
    if (!a.partials) return;
    if (there && channels)
#pragma unroll
        for (int i = 0; i < TD_SHARDS; i++)
            raw->part[i] = *(const float2 *)(a.partials + (p.partial + (uint32_t)i * a.n_rows * a.dim));
    if (there && threadIdx.x % 32 < S + S * S) raw->gate = p.gates[p.gate];
}

/* The new streams of two channels (leave() twice), into memory where `store` and into xs[4][SLICE]. gates: the warp's.
 */
static TD_DEVICE void make_streams(const hyper_args &a, const row_place &p, bool store, const raw_row &raw,
                                   float *gates, float *xs)
{
    int lane = threadIdx.x % 32;
    uint32_t pair[S];
#pragma unroll
    for (int s = 0; s < S; s++) pair[s] = raw.x[s];
    if (a.partials) {
        __nv_bfloat162 both = __floats2bfloat162_rn(raw.part[0].x + raw.part[1].x, raw.part[0].y + raw.part[1].y);
        uint32_t b = *(uint32_t *)&both;
        float c[S][S], post[S];
        __syncwarp();
        if (lane < S + S * S) gates[lane] = raw.gate;
        __syncwarp();
        *(float4 *)post = *(const float4 *)gates;
#pragma unroll
        for (int i = 0; i < S; i++) *(float4 *)c[i] = *(const float4 *)(gates + S + S * i);
#pragma unroll
        for (int k = 0; k < S; k++) {
            float y[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float x[S];
#pragma unroll
                for (int s = 0; s < S; s++) x[s] = i ? td_high_bf16(raw.x[s]) : td_low_bf16(raw.x[s]);
                y[i] = post[k] * (i ? td_high_bf16(b) : td_low_bf16(b)) +
                       (((c[0][k] * x[0] + c[1][k] * x[1]) + c[2][k] * x[2]) + c[3][k] * x[3]);
            }
            pair[k] = td_pack_bf16(y[0], y[1]);
        }
        if (store)
#pragma unroll
            for (int s = 0; s < S; s++) *(uint32_t *)(a.x + (p.stream + s * a.dim)) = pair[s];
    }
#pragma unroll
    for (int s = 0; s < S; s++)
        *(float2 *)(xs + s * SLICE + 2 * lane) = make_float2(td_low_bf16(pair[s]), td_high_bf16(pair[s]));
}

static __global__ void __launch_bounds__(THREADS, 2) k_hyper_slices_many(hyper_args a, int rows_a_block)
{
    __shared__ float xs[2][MANY_AT_ONCE][S * SLICE];
    __shared__ __align__(16) float gates[MANY_AT_ONCE][S + S * S];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slice = blockIdx.x, d = slice * SLICE + 2 * lane;
    int part = warp % MANY_SHARED, rows_of_sums = warp - part; /* its mixes, the first of its rows */
    float fn[MANY_MIXES][PER_LANE];
#pragma unroll
    for (int i = 0; i < MANY_MIXES * PER_LANE; i++) {
        int e = lane + 32 * (i % PER_LANE), channel = slice * SLICE + e % SLICE, k = MANY_MIXES * part + i / PER_LANE;
        fn[i / PER_LANE][i % PER_LANE] =
            a.fn && channel < a.dim ? a.fn[(size_t)k * S * a.dim + (size_t)(e / SLICE) * a.dim + channel] : 0.0f;
    }
    /* The lane's sum after the tree: which row's and which mix. The row whose squares a warp sums comes first. */
    int own_row = rows_of_sums + (lane / MANY_MIXES + part) % MANY_SHARED, own = MANY_MIXES * part + lane % MANY_MIXES;
    if (lane == MANY_SUMS - 1) own = MIXES;
    td_begin(); /* the weights are on their way */
    int first = blockIdx.y * rows_a_block, end = min(first + rows_a_block, a.n_rows), turn = 0;
    bool channels = d < a.dim;
    raw_row raw = {};
    row_place place = place_of(a, first + warp, d);
    load_row(a, place, first + warp < end, channels, &raw);
    for (int r0 = first; r0 < end; r0 += MANY_AT_ONCE, turn ^= 1) {
        make_streams(a, place, channels && r0 + warp < end, raw, gates[warp], xs[turn][warp]);
        next_rows(a, &place);
        load_row(a, place, r0 + MANY_AT_ONCE + warp < end, channels, &raw);
        __syncthreads(); /* one a round: who writes xs[turn] again has passed the next one, and all have read this */
        if (!a.fn) continue;
        float sums[MANY_SUMS], squares = 0.0f;
#pragma unroll
        for (int r = 0; r < MANY_SHARED; r++) {
            float v[PER_LANE];
#pragma unroll
            for (int j = 0; j < PER_LANE; j++) v[j] = xs[turn][rows_of_sums + (r + part) % MANY_SHARED][lane + 32 * j];
#pragma unroll
            for (int i = 0; i < MANY_MIXES; i++) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < PER_LANE; j++) sum = fmaf(fn[i][j], v[j], sum);
                sums[r * MANY_MIXES + i] = sum;
            }
            if (r) continue;
#pragma unroll
            for (int j = 0; j < PER_LANE; j++) squares = fmaf(v[j], v[j], squares);
        }
        sums[MANY_SUMS - 1] = squares;
        td_warp_sums<MANY_SUMS>(sums);
        if (lane < MANY_SUMS && r0 + own_row < end)
            a.shares[((size_t)(r0 + own_row) * gridDim.x + slice) * SHARES + own] = sums[0];
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

/* A warp a row: the logits in comb become the mixing of the row's streams. */
static __global__ void __launch_bounds__(32 * SINKHORN_ROWS) k_hyper_sinkhorn(hyper_args a)
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

static TD_DEVICE void load_streams(const hyper_args &a, size_t row, int d, uint4 v[S])
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
static TD_DEVICE float add_shares(const float *shares, int slices)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int first = slices * warp / WARPS, end = slices * (warp + 1) / WARPS;
    float sum = 0.0f;
#pragma unroll 8
    for (int i = first; i < end; i++) sum += shares[i * SHARES + (lane < SHARES ? lane : 0)];
    return sum;
}

/* A warp: the row's gates from its sums; the pending mixing of the streams stays logits until k_hyper_sinkhorn. */
static TD_DEVICE void mix(const hyper_args &a, size_t row, float sum, float base, float scale, float *pre)
{
    int lane = threadIdx.x;
    float squares = __shfl_sync(0xffffffffu, sum, MIXES);
    float rms = 1.0f / sqrtf(squares / (float)(S * a.dim) + a.rms_eps), mixed = (rms * sum) * scale + base;
    float sigmoid = td_sigmoidf(mixed);
    if (lane < S) pre[lane] = sigmoid + a.hc_eps;
    if (lane >= S && lane < 2 * S) a.post[row * S + lane - S] = 2.0f * sigmoid;
    if (lane >= 2 * S && lane < MIXES) a.comb[row * S * S + lane - 2 * S] = mixed;
}

static __global__ void __launch_bounds__(THREADS) k_hyper_finish(hyper_args a, int slices)
{
    enum { HELD = 2 }; /* loads of streams and weights that are on their way before the gates are known */
    extern __shared__ __align__(16) float collapsed[]; /* [dim] */
    __shared__ float pre_of[S], sums[WARPS][32], scratch[WARPS + 1];
    size_t row = blockIdx.x;
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
    sums[warp][lane] = add_shares(a.shares + row * slices * SHARES, slices);
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

/* Rows of a block of k_hyper_slices_many: four rounds of two blocks a multiprocessor. */
static unsigned many_rows(const td_cuda_dev *dev, size_t n_rows, size_t slices)
{
    unsigned rows = td_ceil_div(td_ceil_div(n_rows * slices, 8 * (size_t)dev->n_sm), MANY_AT_ONCE) * MANY_AT_ONCE;
    return rows < MANY_ROWS ? rows : (unsigned)MANY_ROWS;
}

td_status td_cuda_hyper(td_dev *base, const td_hyper_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    if (a->n_rows < 0 || a->n_rows > dev->limits.rows || a->dim < 16 || a->dim > dev->limits.dim || a->dim % 16 ||
        (size_t)a->dim * sizeof(float) > SHARED_MAX ||
        ((uint64_t)a->n_rows + MANY_AT_ONCE) * S * (uint64_t)a->dim > UINT32_MAX)
        return TD_EINVAL;
    if (!a->n_rows || (!a->fn && !a->partials)) return TD_OK;
    td_arena arena;
    td_cuda_catch_up(dev); /* with the pending site's Sinkhorn */
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
    if (a->n_rows <= FEW_ROWS) {
        td_launch(dev, k_hyper_slices, (unsigned)slices, THREADS, 0, h);
    } else {
        unsigned rows = many_rows(dev, (size_t)a->n_rows, slices);
        td_launch(dev, k_hyper_slices_many, dim3((unsigned)slices, td_ceil_div((size_t)a->n_rows, rows)), THREADS, 0, h,
                  (int)rows);
    }
    if (!a->fn) return td_cuda_launched(dev, "hyper");
    td_launch(dev, k_hyper_finish, a->n_rows, THREADS, a->dim * sizeof(float), h, (int)slices);
    td_cuda_aside(dev);
    td_launch(dev, k_hyper_sinkhorn, td_ceil_div((size_t)a->n_rows, SINKHORN_ROWS), 32 * SINKHORN_ROWS, 0, h);
    td_cuda_aside_end(dev);
    return td_cuda_launched(dev, "hyper");
}
