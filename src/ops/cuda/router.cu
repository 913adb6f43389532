/* Routing rows to experts. Logits in fp32 are the shared product's (linear.cu, weight.h); a warp a row picks. A pick is the
 * largest key, and of equal keys the lowest id, so no order of work decides a tie.
 * Many rows: the product, then the picks. Up to four, all latency: a warp takes one slice of a panel, whose weights are
 * on their way before the kernel before has ended, and the block that arrives last adds the slices in order and picks. */
#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"
#include "ops/cuda/weight.h"

enum {
    ROWS = 4, /* of a block of k_router_pick */
    PER_LANE = TD_EXPERTS_MAX / 32,
    FEW_ROWS = 4,                 /* with more, picking row by row costs more than a launch */
    FEW_WARPS = 9,                /* of a block of k_router_few */
    FEW_THREADS = 32 * FEW_WARPS, /* and the most experts: a thread each */
    FEW_GROUPS = 8                /* of a slice: a lane has all its weights in registers */
};

typedef struct router_call {
    int n_rows, n_experts, top_k;
    bool norm;
    float scale;
    const float *bias;
    int32_t *ids;
    float *weights;
} router_call;

/* Up to FEW_ROWS rows. */
typedef struct router_few {
    const uint8_t *w;
    const td_bf16 *x;
    size_t panel_bytes;
    int in, groups, slices, n_panels;
    float *shares; /* [FEW_ROWS][slices][16 * n_panels] */
    uint32_t *counter;
} router_few;

/* A key's rank: 0 is none, so NaN shares the lowest rank of all. */
static TD_DEVICE uint32_t rank_of(float key)
{
    return max(td_rank_of(key), 1u);
}

/* A warp: lane k has the row's pick k and its sigmoid. */
static TD_DEVICE void write_picks(const router_call &a, int row, int picked_id, float sigmoid)
{
    int lane = threadIdx.x % 32;
    float picked = lane < a.top_k ? sigmoid : 0.0f, sum = 0.0f;
#pragma unroll 8
    for (int k = 0; k < a.top_k; k++) sum += __shfl_sync(0xffffffffu, picked, k);
    if (lane >= a.top_k) return;
    a.ids[(size_t)row * a.top_k + lane] = picked_id;
    a.weights[(size_t)row * a.top_k + lane] = (a.norm ? picked / (sum + 1e-20f) : picked) * a.scale;
}

/* A warp: the row's picks. rank: of expert lane + 32 i. */
static TD_DEVICE void pick(const router_call &a, int row, uint32_t rank[PER_LANE], const float *logits)
{
    int lane = threadIdx.x % 32, picked_id = 0;
    for (int k = 0; k < a.top_k; k++) {
        uint32_t best = 0, id = 0xffffffffu;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (32 * i < a.n_experts) best = max(best, rank[i]);
        best = __reduce_max_sync(0xffffffffu, best);
#pragma unroll
        for (int i = PER_LANE - 1; i >= 0; i--)
            if (32 * i < a.n_experts && rank[i] == best) id = (uint32_t)(lane + 32 * i);
        id = __reduce_min_sync(0xffffffffu, id);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if ((uint32_t)(lane + 32 * i) == id) rank[i] = 0;
        if (lane == k) picked_id = (int)id;
    }
    write_picks(a, row, picked_id, td_sigmoidf(logits[picked_id]));
}

static __global__ void k_router_pick(router_call a, const float *logits)
{
    td_begin();
    int row = blockIdx.x * ROWS + threadIdx.x / 32;
    uint32_t rank[PER_LANE];
    if (row >= a.n_rows) return;
    logits += (size_t)row * a.n_experts;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        int e = threadIdx.x % 32 + 32 * i;
        rank[i] = e < a.n_experts ? rank_of(td_sigmoidf(logits[e]) + a.bias[e]) : 0;
    }
    pick(a, row, rank, logits);
}

/* Four steps of a group for up to 8 rows; x: the lane's piece of its row. */
static TD_DEVICE void group_product(const uint4 raw[4], const td_bf16 *x, bool first_half, bool second_half, float c[4])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 b = (half ? second_half : first_half) ? *(const uint4 *)(x + 32 * half) : make_uint4(0, 0, 0, 0);
        const uint32_t a0[4] = { raw[2 * half].x, raw[2 * half].y, raw[2 * half].z, raw[2 * half].w };
        const uint32_t a1[4] = { raw[2 * half + 1].x, raw[2 * half + 1].y, raw[2 * half + 1].z, raw[2 * half + 1].w };
        td_mma_bf16(c, a0, b.x, b.y);
        td_mma_bf16(c, a1, b.z, b.w);
    }
}

/* A warp's slice of a panel, into the shares. */
static TD_DEVICE void share(const router_call &a, const router_few &f, int unit)
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, panel = unit / f.slices, slice = unit % f.slices;
    int first = f.groups * slice / f.slices, n = f.groups * (slice + 1) / f.slices - first;
    const uint8_t *w = f.w + (size_t)panel * f.panel_bytes + (size_t)first * TD_BF16_GROUP + lane * 16;
    uint4 raw[FEW_GROUPS][4];
#pragma unroll
    for (int i = 0; i < 4 * FEW_GROUPS; i++)
        if (i / 4 < n) raw[i / 4][i % 4] = td_load_early16(w + i * 512);
    td_begin(); /* for x; the weights are on their way */
    const td_bf16 *x = f.x + (size_t)min(g, a.n_rows - 1) * f.in + first * TD_TILE_IN + 8 * t;
    int left = f.in - first * TD_TILE_IN - 8 * t; /* inputs from x on */
    float c[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    if (left >= (FEW_GROUPS - 1) * TD_TILE_IN + 40 && n == FEW_GROUPS) { /* no branch in the way of x: linear_few.cu */
#pragma unroll
        for (int i = 0; i < FEW_GROUPS; i++) group_product(raw[i], x + i * TD_TILE_IN, true, true, c);
    } else {
#pragma unroll
        for (int i = 0; i < FEW_GROUPS; i++)
            if (i < n) group_product(raw[i], x + i * TD_TILE_IN, i * TD_TILE_IN < left, i * TD_TILE_IN + 32 < left, c);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = 2 * t + i % 2;
        if (row < a.n_rows)
            f.shares[((size_t)row * f.slices + slice) * TD_TILE_OUT * f.n_panels + panel * TD_TILE_OUT + g +
                     i / 2 * 8] = c[i];
    }
}

/* The block that has arrived last: the key of expert threadIdx.x from the shares of all blocks, as a rank; its sigmoid
 * into sigmoids. 0: there is no such expert. */
static TD_DEVICE uint32_t add_shares(const router_call &a, const router_few &f, int row, float *sigmoids)
{
    int width = TD_TILE_OUT * f.n_panels, e = threadIdx.x;
    const float *shares = f.shares + (size_t)row * f.slices * width + e;
    float v[TD_SLICES_MAX], sum = 0.0f;
    if (e >= a.n_experts) return 0;
    float bias = __ldg(a.bias + e);
#pragma unroll
    for (int s = 0; s < TD_SLICES_MAX; s++) v[s] = s < f.slices ? __ldcg(shares + s * width) : 0.0f;
#pragma unroll
    for (int s = 0; s < TD_SLICES_MAX; s++)
        if (s < f.slices) sum += v[s];
    sum = td_sigmoidf(sum);
    sigmoids[e] = sum;
    return rank_of(sum + bias);
}

/* Rank and expert as one number: of equal ranks the lower id comes first. */
static TD_DEVICE uint64_t order_of(uint32_t rank, uint32_t id)
{
    return (uint64_t)rank << 32 | (uint32_t)~id;
}

/* A warp's top_k of the experts that its threads have ranks of, as orders. An expert's place is the number of those
 * before it. There may be fewer than top_k: then zeros follow. (Loops are short ones: this is executed once, and what it
 * waits for is its own instructions.) */
static TD_DEVICE void best_of_warp(int top_k, uint32_t rank, uint64_t *best_orders)
{
    int lane = threadIdx.x % 32, place = 0;
#pragma unroll 8
    for (int i = 1; i < 32; i++) {
        int from = (lane + i) % 32;
        uint32_t other = __shfl_sync(0xffffffffu, rank, from);
        place += other > rank || (other == rank && from < lane);
    }
    if (lane < top_k) best_orders[lane] = 0;
    __syncwarp();
    if (rank && place < top_k) best_orders[place] = order_of(rank, threadIdx.x);
}

/* A block: a row's picks among those of all warps. A candidate's place is counted by four threads. */
static TD_DEVICE void pick_best(int top_k, const uint64_t *orders, int *picks)
{
    enum { PARTS = 4 };
    int n = FEW_WARPS * top_k, part = threadIdx.x % PARTS;
#pragma unroll 1
    for (int first = 0; first < n; first += FEW_THREADS / PARTS) {
        int c = first + threadIdx.x / PARTS, place = 0;
        uint64_t own = c < n ? orders[c] : 0;
#pragma unroll 6
        for (int i = part; i < n; i += PARTS) place += orders[i] > own;
#pragma unroll
        for (int step = 1; step < PARTS; step *= 2) place += __shfl_xor_sync(0xffffffffu, place, step);
        if (own && part == 0 && place < top_k) picks[place] = (int)~(uint32_t)own;
    }
}

static __global__ void __launch_bounds__(FEW_THREADS) k_router_few(router_call a, router_few f)
{
    __shared__ float sigmoids[FEW_ROWS][FEW_THREADS];
    __shared__ uint64_t orders[FEW_ROWS][FEW_WARPS * TD_TOP_K_MAX];
    __shared__ int picks[FEW_ROWS][TD_TOP_K_MAX];
    __shared__ bool last;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, unit = blockIdx.x * FEW_WARPS + warp;
    if (32 * (int)threadIdx.x < a.n_experts) td_prefetch(a.bias + 32 * threadIdx.x); /* a line each */
    if (unit < f.n_panels * f.slices) share(a, f, unit);
    __syncthreads();
    if (threadIdx.x == 0) last = td_arrives_last(f.counter, 1, gridDim.x);
    __syncthreads();
    if (!last) return;
#pragma unroll 1
    for (int row = 0; row < a.n_rows; row++)
        best_of_warp(a.top_k, add_shares(a, f, row, sigmoids[row]), orders[row] + warp * a.top_k);
    __syncthreads();
#pragma unroll 1
    for (int row = 0; row < a.n_rows; row++) pick_best(a.top_k, orders[row], picks[row]);
    __syncthreads();
    if (warp >= a.n_rows) return;
    int id = picks[warp][lane < a.top_k ? lane : 0];
    write_picks(a, warp, id, sigmoids[warp][id]);
}

static size_t share_floats(size_t n_experts)
{
    return (size_t)FEW_ROWS * TD_SLICES_MAX * td_ceil_div(n_experts, TD_TILE_OUT) * TD_TILE_OUT;
}

size_t td_cuda_router_bytes(const td_dev_limits *limits)
{
    size_t logits = (size_t)limits->rows * (size_t)limits->n_experts, shares = share_floats((size_t)limits->n_experts);
    return (logits > shares ? logits : shares) * sizeof(float);
}

/* False: not for this call. */
static bool launch_few(td_cuda_dev *dev, const td_router_args *a, const router_call *call, float *shares)
{
    router_few f = { (const uint8_t *)a->w->data, (const td_bf16 *)a->x, td_gpu_panel_bytes(TD_W_BF16, a->dim),
                     a->dim };
    f.groups = td_groups(a->dim);
    f.slices = td_slices(f.groups);
    f.n_panels = (int)td_ceil_div((size_t)a->n_experts, TD_TILE_OUT);
    f.shares = shares;
    f.counter = td_cuda_counters(dev) + TD_COUNTERS_ROUTER_AT;
    if (a->n_rows > FEW_ROWS || a->n_experts > FEW_THREADS || a->w->format != TD_W_BF16 ||
        f.groups > f.slices * FEW_GROUPS || a->dim % 8 || ((uintptr_t)a->x & 15))
        return false;
    td_launch(dev, k_router_few, td_ceil_div((size_t)(f.n_panels * f.slices), FEW_WARPS), FEW_THREADS, 0, *call, f);
    return true;
}

td_status td_cuda_router(td_dev *base, const td_router_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    if (a->n_rows < 0 || a->n_rows > dev->limits.rows || a->n_experts < 1 || a->n_experts > TD_EXPERTS_MAX ||
        a->n_experts > dev->limits.n_experts || a->top_k < 1 || a->top_k > a->n_experts || a->top_k > TD_TOP_K_MAX ||
        a->w->out != a->n_experts || a->w->in != a->dim)
        return TD_EINVAL;
    if (!a->n_rows) return TD_OK;
    td_arena arena;
    td_cuda_scratch(dev, &arena);
    float *logits = (float *)td_cuda_take(&arena, td_cuda_router_bytes(&dev->limits));
    router_call call = { a->n_rows, a->n_experts, a->top_k, a->norm, a->scale, a->bias, a->ids, a->weights };
    if (launch_few(dev, a, &call, logits)) return td_cuda_launched(dev, "router");
    td_cuda_product_args p = { a->w->format,
                               a->w->data,
                               0,
                               a->w->out,
                               a->w->in,
                               a->n_rows,
                               1,
                               (const td_bf16 *)a->x,
                               (size_t)a->dim,
                               0,
                               NULL,
                               logits,
                               (size_t)a->n_experts,
                               0 };
    td_status status = td_cuda_product(dev, &p);
    if (status != TD_OK) return status;
    td_launch(dev, k_router_pick, td_ceil_div((size_t)a->n_rows, ROWS), 32 * ROWS, 0, call, logits);
    return td_cuda_launched(dev, "router");
}
