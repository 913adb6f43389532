/* Which pools a row attends to, in batches of rows: scores (dsa_score.cu), then
 *   k_select_pick   a block a row: radix selection of the least score that counts (integer histograms, so no order of
 *                   work enters), then the list in ascending order, ties by number
 * What a row sees follows from its own position, so one recording serves every context length. */
#include "ops/cuda/dsa_select.h"

#include <stddef.h>

enum {
    /* Rows of the longest context whose scores fit the scratch: an eighth of a window's, which is less than experts
     * take, between these two. Of shorter contexts more. */
    BATCH_MIN = 64,
    BATCH = 256,
    BATCH_MAX = 4096,
    THREADS = 256,
    PICK_FEW = 1024, /* threads of k_select_pick, for few rows and for many */
    PICK_MANY = 256,
    BINS = 1 << 11,
    CANDIDATES = 4096, /* pools that are looked at one by one */
    MAXIMA = 8192,     /* that fit shared memory: of a million tokens */
    STAGED = 16384     /* scores, where a context has so few */
};

static TD_DEVICE float score_of_rank(uint32_t rank)
{
    return __uint_as_float(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank);
}

/* What is in shared memory is ranks already. */
static TD_DEVICE uint32_t td_rank_of(uint32_t rank)
{
    return rank;
}

typedef struct pick_block {
    uint32_t bins[BINS]; /* zeros between uses */
    uint32_t warp_sum[32];
    uint32_t low, high; /* of the ranks that were staged */
    uint32_t prefix, mask;
    int left;
    bool done;
} pick_block;

typedef struct pick_shared {
    uint16_t live[CANDIDATES]; /* groups of 32 that are to be read, ascending */
    union {
        uint32_t staged[1]; /* ranks that are read several times, as many as fit the memory that was asked for; then */
        struct {
            uint32_t rank[CANDIDATES];
            int32_t pool[CANDIDATES];
        };
    };
} pick_shared;

/* One digit of the left-th largest of n ranks, as distances to low: narrows prefix and mask; left becomes its place
 * among those with the prefix. Done when it is the last of them: they all belong to the largest then. Bins go from the
 * largest down; a thread sums EACH neighbours, which lie PICK apart. */
template <int PICK, typename T>
static TD_DEVICE void narrow(pick_block *b, const T *score, int n, uint32_t low, int shift, int bits)
{
    enum { EACH = BINS / PICK };
    uint32_t prefix = b->prefix, mask = b->mask, digit = (1u << bits) - 1, left = (uint32_t)b->left;
    for (int i = threadIdx.x; i < n; i += PICK) {
        uint32_t above = td_rank_of(score[i]) - low, bin = digit - (above >> shift & digit);
        if ((above & mask) == prefix) atomicAdd(&b->bins[bin % EACH * PICK + bin / EACH], 1u);
    }
    __syncthreads();
    uint32_t count[EACH], sum = 0, all;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        count[j] = b->bins[j * PICK + threadIdx.x];
        b->bins[j * PICK + threadIdx.x] = 0;
        sum += count[j];
    }
    uint32_t before = td_block_before(sum, b->warp_sum, &all);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        if (before < left && left <= before + count[j]) {
            b->left = (int)(left - before);
            b->prefix = prefix | (digit - (EACH * threadIdx.x + j)) << shift;
            b->mask = mask | digit << shift;
            b->done = left == before + count[j];
        }
        before += count[j];
    }
    __syncthreads();
}

/* The rank of the top-th largest of n scores, whose ranks are low .. high, and how many equal to it belong to the top;
 * or a rank between it and the next smaller one. Digits are of the distance to low, as long as high's: most often one
 * or two. */
template <int PICK, typename T>
static TD_DEVICE uint32_t threshold(pick_block *b, const T *score, int n, int top, uint32_t low, uint32_t high,
                                    uint32_t *ties)
{
    enum { DIGIT = 11 };
    static_assert(BINS == 1 << DIGIT, "a bin a digit");
    if (threadIdx.x == 0) {
        b->prefix = b->mask = 0;
        b->left = top;
        b->done = false;
    }
    __syncthreads();
    for (int bits = 32 - __clz((int)(high - low)); bits > 0 && !b->done; bits -= DIGIT)
        narrow<PICK>(b, score, n, low, max(bits - DIGIT, 0), min(bits, (int)DIGIT));
    *ties = b->done ? (uint32_t)n : (uint32_t)b->left;
    uint32_t least = low + b->prefix;
    __syncthreads();
    return least;
}

/* Ranks of n scores into shared memory, several loads of a thread at a time; the lowest and the highest. */
template <int PICK> static TD_DEVICE void stage(pick_block *b, uint32_t *to, const float *from, int n)
{
    enum { AT_ONCE = 8 };
    uint32_t low = UINT32_MAX, high = 0;
    for (int i = threadIdx.x; i < n; i += AT_ONCE * PICK) {
        float v[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) v[j] = from[min(i + j * PICK, n - 1)];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            uint32_t rank = td_rank_of(v[j]);
            if (i + j * PICK < n) to[i + j * PICK] = rank;
            low = min(low, rank);
            high = max(high, rank);
        }
    }
    low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
    if (threadIdx.x % 32 == 0) {
        atomicMin(&b->low, low);
        atomicMax(&b->high, high);
    }
    __syncthreads();
}

/* Numbers of the groups whose maxima are least or more, ascending; how many they are. A lane has 32 neighbours. */
template <int PICK> static TD_DEVICE int find_live(pick_block *b, pick_shared *c, int groups, uint32_t least)
{
    int lane = threadIdx.x % 32, steps = (groups + PICK - 1) / PICK, first = threadIdx.x / 32 * steps * 32;
    uint32_t mine = 0, all;
    for (int i = 0; i < steps; i++) {
        int group = first + 32 * i + lane;
        uint32_t votes = __ballot_sync(0xffffffffu, group < groups && c->staged[group] >= least);
        if (lane == i) mine = votes;
    }
    uint32_t at = td_block_before(__popc(mine), b->warp_sum, &all);
    for (; mine && at < CANDIDATES; mine &= mine - 1, at++)
        c->live[at] = (uint16_t)(first + 32 * lane + __ffs(mine) - 1);
    __syncthreads();
    return (int)all;
}

/* Long contexts: the top-th largest of the maxima of 32 pools each cannot exceed the top-th largest score, so what is
 * below it is out, and most groups of 32 need not be read. The others' pools, in order, are what remains to be looked
 * at; their number, or 0 when that does not help (many equal scores, NaN). *least: no rank is lower. */
template <int PICK>
static TD_DEVICE int filter(pick_block *b, pick_shared *c, const float *score, const float *most, int n, int top,
                            uint32_t *least)
{
    enum { AT_ONCE = 16 }; /* groups of a warp that are read in a turn */
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, groups = (n + TD_SELECT_GROUP - 1) / TD_SELECT_GROUP,
        kept = 0;
    uint32_t ties, of_round;
    stage<PICK>(b, c->staged, most, groups);
    *least = threshold<PICK>(b, c->staged, groups, top, b->low, b->high, &ties);
    int live = find_live<PICK>(b, c, groups, *least);
    if (live > CANDIDATES) return 0;
    float bound = score_of_rank(*least); /* the same order, but for NaN, which is below both */
    for (int g0 = 0; g0 < live; g0 += AT_ONCE * PICK / 32) {
        float x[AT_ONCE];
        uint32_t mine = 0; /* votes of a group: lane j's is j */
        int g = g0 + warp * AT_ONCE;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            int pool = g + j < live ? c->live[g + j] * TD_SELECT_GROUP + lane : n;
            x[j] = pool < n ? score[pool] : NAN;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            uint32_t votes = __ballot_sync(0xffffffffu, x[j] >= bound);
            if (lane == j) mine = votes;
        }
        int at = kept + (int)td_block_before(__popc(mine), b->warp_sum, &of_round);
        kept += (int)of_round;
        if (kept > CANDIDATES) return 0;
        at = __shfl_sync(0xffffffffu, at, 0);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            uint32_t votes = __ballot_sync(0xffffffffu, x[j] >= bound);
            if (x[j] >= bound) {
                int place = at + __popc(votes & ((1u << lane) - 1));
                c->rank[place] = td_rank_of(x[j]);
                c->pool[place] = c->live[g + j] * TD_SELECT_GROUP + lane;
            }
            at += __popc(votes);
        }
    }
    __syncthreads();
    return kept < top ? 0 : kept; /* fewer where groups hold nothing but NaN */
}

/* The pools of the top largest of n scores, whose ranks are low .. high, ascending. pool: NULL where score i is pool
 * i's. */
template <int PICK, typename T>
static TD_DEVICE void write_list(pick_block *b, const T *score, const int32_t *pool, int n, int top, uint32_t low,
                                 uint32_t high, int32_t *list)
{
    enum { EACH = 4 }; /* neighbours of a thread */
    uint32_t listed = 0, tied = 0, ties, all, least = threshold<PICK>(b, score, n, top, low, high, &ties);
    for (int p0 = 0; p0 < n; p0 += EACH * PICK) {
        int p = p0 + EACH * (int)threadIdx.x;
        uint32_t more = 0, equal = 0;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            uint32_t rank = p + j < n ? td_rank_of(score[p + j]) : 0;
            if (p + j < n && rank > least) more |= 1u << j;
            if (p + j < n && rank == least) equal |= 1u << j;
        }
        uint32_t before = td_block_before(__popc(more) | __popc(equal) << 16, b->warp_sum, &all);
        uint32_t at = listed + (before & 0xffffu), ties_before = tied + (before >> 16);
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            bool above = more >> j & 1, same = equal >> j & 1;
            if (above || (same && ties_before < ties)) list[at + min(ties_before, ties)] = pool ? pool[p + j] : p + j;
            at += above;
            ties_before += same;
        }
        listed += all & 0xffffu;
        tied += all >> 16;
    }
}

template <int PICK> static __global__ void __launch_bounds__(PICK) k_select_pick(td_select_batch a, int n_staged)
{
    td_begin();
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ pick_block b;
    pick_shared *c = (pick_shared *)smem;
    int row = blockIdx.x, n = td_pools_of(a, row);
    if (threadIdx.x == 0) a.count[row] = n <= a.top_pools ? -1 : a.top_pools;
    if (n <= a.top_pools) return;
    for (int i = threadIdx.x; i < BINS; i += PICK) b.bins[i] = 0;
    if (threadIdx.x == 0) {
        b.low = UINT32_MAX;
        b.high = 0;
    }
    __syncthreads();
    const float *score = a.score + (size_t)row * a.score_stride;
    int32_t *list = a.list + (size_t)row * a.top_pools;
    int groups = (n + TD_SELECT_GROUP - 1) / TD_SELECT_GROUP, kept = 0;
    uint32_t least = 0;
    if (n > CANDIDATES && groups >= a.top_pools && groups <= min(n_staged, 32 * PICK)) {
        const float *most = a.most + (size_t)row * a.score_stride / TD_SELECT_GROUP;
        kept = filter<PICK>(&b, c, score, most, n, a.top_pools, &least);
    }
    if (kept) {
        write_list<PICK>(&b, c->rank, c->pool, kept, a.top_pools, least, b.high, list);
    } else if (n <= n_staged) {
        stage<PICK>(&b, c->staged, score, n);
        write_list<PICK>(&b, c->staged, NULL, n, a.top_pools, b.low, b.high, list);
    } else {
        write_list<PICK>(&b, score, NULL, n, a.top_pools, 0, UINT32_MAX, list);
    }
}

static __global__ void k_select_dense(int n_rows, int32_t *count)
{
    td_begin();
    int row = blockIdx.x * THREADS + threadIdx.x;
    if (row < n_rows) count[row] = -1;
}

static size_t score_stride(int64_t tokens)
{
    return ((size_t)tokens / TD_POOL + TD_SELECT_WHOLE) / TD_SELECT_WHOLE * TD_SELECT_WHOLE;
}

static size_t row_bytes(size_t stride)
{
    return (stride + stride / TD_SELECT_GROUP) * sizeof(float);
}

size_t td_cuda_select_bytes(const td_dev_limits *limits)
{
    int rows = limits->rows / 8 < BATCH_MIN ? (int)BATCH_MIN : limits->rows / 8;
    rows = rows < BATCH ? rows : (int)BATCH;
    return (size_t)rows * row_bytes(score_stride(limits->context_tokens));
}

/* Scores of a context of `pools`, if they are few; otherwise maxima, then candidates. */
static int staged_floats(int64_t pools)
{
    return pools > STAGED ? (int)MAXIMA : pools > CANDIDATES ? (int)STAGED : (int)CANDIDATES;
}

static size_t pick_bytes(int n_staged)
{
    return offsetof(pick_shared, staged) + (size_t)n_staged * sizeof(float);
}

cudaError_t td_cuda_select_init(void)
{
    const cudaFuncAttribute attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    cudaError_t error = cudaFuncSetAttribute(k_select_pick<PICK_FEW>, attribute, pick_bytes(STAGED));
    if (error == cudaSuccess) error = cudaFuncSetAttribute(k_select_pick<PICK_MANY>, attribute, pick_bytes(STAGED));
    return error == cudaSuccess ? td_cuda_score_init() : error;
}

/* Rows of a batch: as many as fit, all batches about as large. */
static int batch_rows(const td_cuda_dev *dev, int n_rows, size_t stride)
{
    size_t fit = td_cuda_select_bytes(&dev->limits) / row_bytes(stride);
    fit = fit < BATCH_MAX ? fit : (size_t)BATCH_MAX;
    return (int)td_ceil_div((size_t)n_rows, td_ceil_div((size_t)n_rows, fit));
}

td_status td_cuda_dsa_select(td_dev *base, const td_dsa_select_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    const td_window *w = a->window;
    if (a->n_heads < 1 || a->n_heads > dev->limits.index_heads || a->n_heads > TD_SELECT_HEADS_MAX ||
        a->top_pools < 1 || w->n_rows > dev->limits.rows || !td_cuda_kv_fits(w, &a->cache) ||
        w->host_pos_max >= dev->limits.context_tokens)
        return TD_EINVAL;
    if (!w->n_rows) return TD_OK;
    if ((w->host_pos_max + 1) / TD_POOL <= a->top_pools) {
        td_launch(dev, k_select_dense, td_ceil_div((size_t)w->n_rows, THREADS), THREADS, 0, w->n_rows, a->count);
        return td_cuda_launched(dev, "dsa_select");
    }
    td_arena arena;
    td_cuda_scratch(dev, &arena);
    float *score = (float *)td_cuda_take(&arena, td_cuda_select_bytes(&dev->limits));
    size_t stride = score_stride(w->host_pos_max + 1);
    int64_t pools = ((int64_t)w->host_pos_max + 1) / TD_POOL;
    int n_staged = staged_floats(pools);
    int batch = batch_rows(dev, w->n_rows, stride);
    for (int r = 0; r < w->n_rows; r += batch) {
        int rows = w->n_rows - r < batch ? w->n_rows - r : batch;
        td_select_batch s = { w->pos + r,
                              w->seg + r,
                              w->segments,
                              a->cache,
                              rows,
                              a->n_heads,
                              a->top_pools,
                              1.0f / sqrtf((float)a->n_heads) / sqrtf((float)TD_HEAD),
                              (const td_bf16 *)a->q + (size_t)r * (size_t)a->n_heads * TD_HEAD,
                              a->weights + (size_t)r * (size_t)a->n_heads,
                              a->count + r,
                              a->list + (size_t)r * (size_t)a->top_pools,
                              score,
                              score + (size_t)batch * stride,
                              (uint32_t)stride };
        bool many = rows > 2 * dev->n_sm; /* so many that more of them at a time count, not how fast one is */
        td_cuda_score(dev, &s, pools, w->n_rows <= TD_WINDOW_MAX);
        td_launch_spread(dev, many ? k_select_pick<PICK_MANY> : k_select_pick<PICK_FEW>, rows,
                         many ? PICK_MANY : PICK_FEW, pick_bytes(n_staged), s, n_staged);
    }
    return td_cuda_launched(dev, "dsa_select");
}
