/* Which pools a row attends to. Two kernels over batches of rows:
 *   k_select_score  256 pools a block in the tensor core's A registers, kept while all rows of the batch pass by as B
 *                   (8 heads a tile); heads are summed in a fixed order: a lane's ascending, then lanes t, t ^ 1, t ^ 2
 *   k_select_pick   a block a row: radix selection of the least score that counts (integer histograms, so no order of
 *                   work enters), then the list in ascending order, ties by number
 * Blocks walk over the pools that the row's own position makes visible, so one recording serves every context length.
 */
#include "ops/cuda/kv.h"

enum {
    BATCH = 64, /* rows of the longest context whose scores fit the scratch; of shorter contexts more */
    BATCH_MAX = 4096,
    QUERIES_MAX = 256, /* rows x heads of a block of k_select_score: 65 KiB */
    THREADS = 256,
    WARP_POOLS = 32,
    TILE = WARP_POOLS * THREADS / 32,
    HEADS_MAX = 64,
    PICK_THREADS = 1024,
    BINS = 1 << 11,
    CANDIDATES = 4096 /* pools that are looked at one by one */
};

typedef struct select_args {
    const int32_t *pos, *seg;
    const td_segment *segments;
    td_dsa_cache cache;
    int n_rows, n_heads, top_pools; /* rows of the batch; the pointers start at its first */
    int block_rows;                 /* of a block of k_select_score */
    float head_scale;
    const td_bf16 *q;
    const float *weights;
    int32_t *count, *list;
    float *score; /* [n_rows][score_stride] */
    float *most;  /* [n_rows][score_stride / WARP_POOLS] the largest of each 32 */
    size_t score_stride;
} select_args;

static TD_DEVICE int pools_of(const select_args &a, int row)
{
    return (a.pos[row] + 1) / TD_POOL;
}

/* A operand of pools g and g + 8 of 16, all 128 inputs: eight steps, and the rows' scales. */
static TD_DEVICE void load_keys(const select_args &a, int slot, int pool, int npool, int half, uint32_t k[8][4],
                                float *scale)
{
    int t = threadIdx.x % 4;
    *scale = 1.0f;
#pragma unroll
    for (int s = 0; s < 8; s++) k[s][half] = k[s][half + 2] = 0;
    if (pool >= npool) return;
    const uint8_t *row = (const uint8_t *)a.cache.pools +
                         td_kv_bytes(a.cache.format, TD_HEAD) * (size_t)td_pool_row(a.cache, slot, pool);
    if (a.cache.format == TD_KV_FP8) *scale = *(const float *)(row + TD_HEAD);
#pragma unroll
    for (int j = 0; j < 4; j++) { /* 32 inputs: 8 of them in a row are this lane's */
        uint4 v;
        if (a.cache.format == TD_KV_FP8) {
            uint2 codes = *(const uint2 *)(row + 32 * j + 8 * t);
            v.x = td_e4m3_pair(__byte_perm(codes.x, 0, 0x1404));
            v.y = td_e4m3_pair(__byte_perm(codes.x, 0, 0x3424));
            v.z = td_e4m3_pair(__byte_perm(codes.y, 0, 0x1404));
            v.w = td_e4m3_pair(__byte_perm(codes.y, 0, 0x3424));
        } else {
            v = *(const uint4 *)(row + 64 * j + 16 * t);
        }
        k[2 * j][half] = v.x;
        k[2 * j][half + 2] = v.y;
        k[2 * j + 1][half] = v.z;
        k[2 * j + 1][half + 2] = v.w;
    }
}

/* Queries and head weights of a block's rows, in shared memory. A query is 16 pieces of 8 values; odd heads have bit 2
 * of the piece flipped, so that a load of eight lanes touches no bank twice. */
typedef struct queries {
    uint4 *q;      /* [rows][heads][16] */
    float *weight; /* [rows][heads] */
} queries;

static size_t queries_bytes(int rows, int heads)
{
    return (size_t)rows * (size_t)heads * (16 * sizeof(uint4) + sizeof(float));
}

static TD_DEVICE void load_queries(const select_args &a, int row0, int rows, int heads, const queries &s)
{
    for (int i = threadIdx.x; i < rows * heads * 16; i += THREADS) {
        int piece = i % 16, h = i / 16 % heads, r = i / 16 / heads;
        const uint4 *q = (const uint4 *)(a.q + ((size_t)(row0 + r) * a.n_heads + h) * TD_HEAD);
        s.q[(r * heads + h) * 16 + (piece ^ (h & 1) * 4)] = h < a.n_heads ? q[piece] : make_uint4(0, 0, 0, 0);
    }
    for (int i = threadIdx.x; i < rows * heads; i += THREADS) {
        int h = i % heads, r = i / heads;
        s.weight[r * heads + h] = h < a.n_heads ? a.weights[(size_t)(row0 + r) * a.n_heads + h] * a.head_scale : 0.0f;
    }
}

/* s = sum_h w_h max(0, 128^-1/2 q_h . K) of a row for the 32 pools in k. */
static TD_DEVICE void score_row(const select_args &a, const queries &s, int r, int row, int heads, int first,
                                const uint32_t k[2][8][4], const float scale[2][2])
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float sum[2][2] = { { 0.0f, 0.0f }, { 0.0f, 0.0f } };
    for (int h0 = 0; h0 < heads; h0 += 8) {
        float dot[2][4] = { { 0.0f, 0.0f, 0.0f, 0.0f }, { 0.0f, 0.0f, 0.0f, 0.0f } };
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint4 b = s.q[(r * heads + h0 + g) * 16 + ((4 * j + t) ^ (g & 1) * 4)];
#pragma unroll
            for (int m = 0; m < 2; m++) {
                td_mma_bf16(dot[m], k[m][2 * j], b.x, b.y);
                td_mma_bf16(dot[m], k[m][2 * j + 1], b.z, b.w);
            }
        }
        float w0 = s.weight[r * heads + h0 + 2 * t], w1 = s.weight[r * heads + h0 + 2 * t + 1];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float d = 0.08838834764831845f * (dot[m][i] * scale[m][i / 2]);
                sum[m][i / 2] = fmaf(i % 2 ? w1 : w0, d > 0.0f ? d : 0.0f, sum[m][i / 2]);
            }
    }
    int npool = pools_of(a, row);
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float x = sum[i / 2][i % 2];
        x += __shfl_xor_sync(0xffffffffu, x, 1);
        x += __shfl_xor_sync(0xffffffffu, x, 2);
        int pool = first + i / 2 * 16 + i % 2 * 8 + g;
        if (pool < npool) most = fmaxf(most, x); /* passes NaN by */
        if (t == 0 && pool < npool) a.score[row * a.score_stride + pool] = x;
    }
    most = td_warp_max(most);
    if (lane == 0) a.most[(row * a.score_stride + first) / WARP_POOLS] = most;
}

static __global__ void __launch_bounds__(THREADS, 2) k_select_score(select_args a)
{
    td_begin();
    extern __shared__ __align__(16) unsigned char smem[];
    int row0 = blockIdx.y * a.block_rows, rows = min(a.n_rows - row0, a.block_rows), heads = (a.n_heads + 7) / 8 * 8,
        most = 0;
    queries s = { (uint4 *)smem, (float *)(smem + (size_t)a.block_rows * heads * 16 * sizeof(uint4)) };
    int g = threadIdx.x % 32 / 4;
    for (int r = 0; r < rows; r++)
        if (pools_of(a, row0 + r) > a.top_pools) most = max(most, pools_of(a, row0 + r));
    if ((int)blockIdx.x * TILE >= most) return;
    load_queries(a, row0, rows, heads, s);
    __syncthreads();
    for (int tile = blockIdx.x; tile * TILE < most; tile += gridDim.x) {
        int first = tile * TILE + threadIdx.x / 32 * WARP_POOLS, slot = -1, loaded = 0;
        uint32_t k[2][8][4];
        float scale[2][2];
        for (int r = 0; r < rows; r++) {
            int npool = pools_of(a, row0 + r), own = a.segments[a.seg[row0 + r]].slot;
            if (npool <= a.top_pools || first >= npool) continue;
            if (own != slot || npool > loaded) { /* later rows of a sequence see more pools */
                slot = own;
                loaded = 0;
                for (int i = r; i < rows; i++)
                    if (a.segments[a.seg[row0 + i]].slot == slot) loaded = max(loaded, pools_of(a, row0 + i));
#pragma unroll
                for (int i = 0; i < 4; i++)
                    load_keys(a, slot, first + i / 2 * 16 + i % 2 * 8 + g, loaded, i % 2, k[i / 2],
                              &scale[i / 2][i % 2]);
            }
            score_row(a, s, r, row0 + r, heads, first, k, scale);
        }
    }
}

/* Order of floats as order of integers; +0 and -0 are one value, NaN is below all. */
static TD_DEVICE uint32_t rank_of(float score)
{
    if (score != score) return 0;
    uint32_t bits = __float_as_uint(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

typedef struct pick_block {
    uint32_t bins[BINS];
    uint32_t warp_sum[PICK_THREADS / 32];
    uint32_t prefix, mask;
    int left;
} pick_block;

/* Sum over threads before this one; *all is the total. Two 16-bit halves may be packed. */
static TD_DEVICE uint32_t block_scan(uint32_t x, uint32_t *warp_sum, uint32_t *all)
{
    int lane = threadIdx.x % 32;
    uint32_t sum = x;
    for (int step = 1; step < 32; step <<= 1) {
        uint32_t other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();
    if (lane == 31) warp_sum[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        uint32_t w = warp_sum[lane];
        for (int step = 1; step < 32; step <<= 1) {
            uint32_t other = __shfl_up_sync(0xffffffffu, w, step);
            if (lane >= step) w += other;
        }
        warp_sum[lane] = w;
    }
    __syncthreads();
    *all = warp_sum[PICK_THREADS / 32 - 1];
    return sum - x + (threadIdx.x >= 32 ? warp_sum[threadIdx.x / 32 - 1] : 0);
}

/* One digit of the left-th largest rank: narrows prefix and mask; left becomes its place among those with the prefix.
 */
static TD_DEVICE void narrow(pick_block *b, const float *score, int n, int shift, int bits)
{
    uint32_t prefix = b->prefix, mask = b->mask, low = (1u << bits) - 1;
    for (int i = threadIdx.x; i < BINS; i += PICK_THREADS) b->bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += PICK_THREADS) {
        uint32_t rank = rank_of(score[i]);
        if ((rank & mask) == prefix) atomicAdd(&b->bins[rank >> shift & low], 1u);
    }
    __syncthreads();
    /* two bins a thread, from the largest down */
    int top = BINS - 1 - 2 * (int)threadIdx.x;
    uint32_t first = b->bins[top], second = b->bins[top - 1], all, left = (uint32_t)b->left;
    uint32_t above = block_scan(first + second, b->warp_sum, &all);
    __syncthreads();
    if (above < left && left <= above + first + second) {
        bool upper = left <= above + first;
        b->left = (int)(left - above - (upper ? 0 : first));
        b->prefix = prefix | (uint32_t)(upper ? top : top - 1) << shift;
        b->mask = mask | low << shift;
    }
    __syncthreads();
}

/* The rank of the top-th largest of n scores, and how many equal to it belong to the top. */
static TD_DEVICE uint32_t threshold(pick_block *b, const float *score, int n, int top, uint32_t *ties)
{
    if (threadIdx.x == 0) {
        b->prefix = b->mask = 0;
        b->left = top;
    }
    __syncthreads();
    narrow(b, score, n, 21, 11);
    narrow(b, score, n, 10, 11);
    narrow(b, score, n, 0, 10);
    *ties = (uint32_t)b->left;
    uint32_t least = b->prefix;
    __syncthreads();
    return least;
}

typedef struct candidates {
    float score[CANDIDATES];
    int32_t pool[CANDIDATES];
    int warp_count[PICK_THREADS / 32];
} candidates;

/* Long contexts: the top-th largest of the maxima of 32 pools each cannot exceed the top-th largest score, so what is
 * below it is out, and most groups of 32 need not be read. The others' pools, in order, are what remains to be looked
 * at; their number, or 0 when that does not help (many equal scores, NaN). */
static TD_DEVICE int filter(pick_block *b, candidates *c, const float *score, const float *most, int n, int top)
{
    uint32_t ties, count = 0;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, groups = (n + WARP_POOLS - 1) / WARP_POOLS, at = 0, all = 0;
    int part = (groups + PICK_THREADS - 1) / PICK_THREADS * 32, first = warp * part, end = min(first + part, groups);
    uint32_t least = threshold(b, most, groups, top, &ties);
    for (int pass = 0; pass < 2; pass++) {
        for (int g0 = first; g0 < end; g0 += 32) {
            bool live = g0 + lane < end && rank_of(most[g0 + lane]) >= least;
            for (uint32_t left = __ballot_sync(0xffffffffu, live); left; left &= left - 1) {
                int pool = (g0 + __ffs(left) - 1) * WARP_POOLS + lane;
                float x = pool < n ? score[pool] : 0.0f;
                bool in = pool < n && rank_of(x) >= least;
                uint32_t votes = __ballot_sync(0xffffffffu, in);
                int place = at + __popc(votes & ((1u << lane) - 1));
                if (pass && in) {
                    c->score[place] = x;
                    c->pool[place] = pool;
                }
                count += __popc(votes);
                at += pass ? __popc(votes) : 0;
            }
        }
        if (pass) break;
        if (lane == 0) c->warp_count[warp] = (int)count;
        __syncthreads();
        for (int w = 0; w < PICK_THREADS / 32; w++) {
            at += w < warp ? c->warp_count[w] : 0;
            all += c->warp_count[w];
        }
        if (all > CANDIDATES || all < top) return 0;
    }
    __syncthreads();
    return all;
}

static __global__ void __launch_bounds__(PICK_THREADS) k_select_pick(select_args a)
{
    td_begin();
    extern __shared__ __align__(16) unsigned char smem[];
    __shared__ pick_block b;
    candidates *c = (candidates *)smem;
    int row = blockIdx.x, n = pools_of(a, row);
    if (threadIdx.x == 0) a.count[row] = n <= a.top_pools ? -1 : a.top_pools;
    if (n <= a.top_pools) return;
    const float *score = a.score + row * a.score_stride;
    const int32_t *pool = NULL;
    if (n > CANDIDATES && (n + WARP_POOLS - 1) / WARP_POOLS >= a.top_pools) {
        int kept = filter(&b, c, score, a.most + row * a.score_stride / WARP_POOLS, n, a.top_pools);
        if (kept) {
            score = c->score;
            pool = c->pool;
            n = kept;
        }
    }
    uint32_t ties, listed = 0, tied = 0, least = threshold(&b, score, n, a.top_pools, &ties);
    int32_t *list = a.list + (size_t)row * a.top_pools;
    for (int p0 = 0; p0 < n; p0 += PICK_THREADS) {
        int p = p0 + threadIdx.x;
        uint32_t rank = p < n ? rank_of(score[p]) : 0, all;
        bool more = p < n && rank > least, equal = p < n && rank == least;
        uint32_t before = block_scan((more ? 1u : 0u) | (equal ? 0x10000u : 0u), b.warp_sum, &all);
        uint32_t equal_before = tied + (before >> 16), taken_ties = min(equal_before, ties);
        if (more || (equal && equal_before < ties)) list[listed + (before & 0xffffu) + taken_ties] = pool ? pool[p] : p;
        listed += all & 0xffffu;
        tied += all >> 16;
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
    return ((size_t)tokens / TD_POOL + TILE) / TILE * TILE;
}

static size_t row_bytes(size_t stride)
{
    return (stride + stride / WARP_POOLS) * sizeof(float);
}

size_t td_cuda_select_bytes(const td_dev_limits *limits)
{
    return BATCH * row_bytes(score_stride(limits->context_tokens));
}

cudaError_t td_cuda_select_init(void)
{
    return cudaFuncSetAttribute(k_select_score, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                (int)queries_bytes(QUERIES_MAX / 8, 8));
}

td_status td_cuda_dsa_select(td_dev *base, const td_dsa_select_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    const td_window *w = a->window;
    if (a->n_heads < 1 || a->n_heads > dev->limits.index_heads || a->n_heads > HEADS_MAX || a->top_pools < 1 ||
        !td_cuda_kv_fits(w, &a->cache) || w->host_pos_max >= dev->limits.context_tokens)
        return TD_EINVAL;
    if (!w->n_rows) return TD_OK;
    if ((w->host_pos_max + 1) / TD_POOL <= a->top_pools) {
        td_launch(dev, k_select_dense, td_ceil_div((size_t)w->n_rows, THREADS), THREADS, 0, w->n_rows, a->count);
        return td_cuda_launched(dev, "dsa_select");
    }
    td_arena arena;
    td_cuda_scratch(dev, &arena);
    float *score = (float *)td_cuda_take(&arena, td_cuda_select_bytes(&dev->limits));
    int heads = (a->n_heads + 7) / 8 * 8, block_rows = QUERIES_MAX / heads < 8 ? QUERIES_MAX / heads : 8;
    size_t stride = score_stride(w->host_pos_max + 1), fit = td_cuda_select_bytes(&dev->limits) / row_bytes(stride);
    int batch = fit < BATCH_MAX ? (int)fit : (int)BATCH_MAX;
    block_rows = w->n_rows < block_rows ? w->n_rows : block_rows;
    for (int r = 0; r < w->n_rows; r += batch) {
        int rows = w->n_rows - r < batch ? w->n_rows - r : batch;
        select_args s = { w->pos + r,
                          w->seg + r,
                          w->segments,
                          a->cache,
                          rows,
                          a->n_heads,
                          a->top_pools,
                          block_rows,
                          1.0f / sqrtf((float)a->n_heads),
                          (const td_bf16 *)a->q + (size_t)r * (size_t)a->n_heads * TD_HEAD,
                          a->weights + (size_t)r * (size_t)a->n_heads,
                          a->count + r,
                          a->list + (size_t)r * (size_t)a->top_pools,
                          score,
                          score + (size_t)batch * stride,
                          stride };
        unsigned tiles = td_ceil_div(stride, TILE), most = 16 * (unsigned)dev->n_sm;
        td_launch_spread(dev, k_select_score,
                         dim3(tiles < most ? tiles : most, td_ceil_div((size_t)rows, (size_t)block_rows)), THREADS,
                         queries_bytes(block_rows, heads), s);
        td_launch_spread(dev, k_select_pick, rows, PICK_THREADS, sizeof(candidates), s);
    }
    return td_cuda_launched(dev, "dsa_select");
}
