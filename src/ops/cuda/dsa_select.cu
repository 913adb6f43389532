/* Which pools a row attends to. Two kernels over batches of rows:
 *   k_select_score  256 pools a block in the tensor core's A registers, kept while up to 64 rows pass by as B, 16 heads
 *                   at a time (four chains of products a warp), their queries copied to shared memory a chunk ahead;
 *                   heads are summed in a fixed order: a lane's ascending, then lanes t, t ^ 1, t ^ 2
 *   k_select_pick   a block a row: radix selection of the least score that counts (integer histograms, so no order of
 *                   work enters), then the list in ascending order, ties by number
 * Blocks beyond the pools that the row's own position makes visible leave at once, so one recording serves every
 * context length. */
#include "ops/cuda/kv.h"

enum {
    /* Rows of the longest context whose scores fit the scratch: an eighth of a window's, which is less than experts
     * take, between these two. Of shorter contexts more. */
    BATCH_MIN = 64,
    BATCH = 256,
    BATCH_MAX = 4096,
    BLOCK_ROWS = 64, /* of a block of k_select_score, for prompts */
    WINDOW_ROWS = 8, /* and for windows */
    HEADS_MAX = 64,
    HEADS_STEP = 16,
    CHUNK = 64, /* rows x heads that are in shared memory at a time, twice: 2 x 16 KiB */
    THREADS = 256,
    WARP_POOLS = 32,
    TILE = WARP_POOLS * THREADS / 32,
    PICK_THREADS = 1024,
    BINS = 1 << 11,
    CANDIDATES = 4096, /* pools that are looked at one by one */
    STAGED = 8192      /* maxima that fit shared memory: of a million tokens */
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

/* Order of floats as order of integers; +0 and -0 are one value, NaN is below all. */
static TD_DEVICE uint32_t rank_of(float score)
{
    if (score != score) return 0;
    uint32_t bits = __float_as_uint(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static TD_DEVICE float score_of_rank(uint32_t rank)
{
    return __uint_as_float(rank & 0x80000000u ? rank ^ 0x80000000u : ~rank);
}

/* The pool, of 32, whose score a lane ends up with: see own_sum(). */
static TD_DEVICE int own_pool()
{
    int lane = threadIdx.x % 32, t = lane % 4;
    return 16 * (t & 1) + 8 * (t >> 1) + lane / 4;
}

/* 32 pools as A operands, all 128 inputs: k[m][step] holds pools 16 m + g and 16 m + g + 8. *scale: of the lane's own
 * pool, a power of two, which the sum over heads can be multiplied with as well as the products. Pools that are not
 * there become zeros; the mask also makes the compiler move what it loaded to where the tensor core wants it once,
 * here, and not before every product. */
template <td_kv_format FORMAT>
static TD_DEVICE void load_keys(const select_args &a, int slot, int first, int npool, uint32_t k[2][8][4], float *scale)
{
    size_t bytes = td_kv_bytes(FORMAT, TD_HEAD);
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, last = npool - 1 - first;
    const uint8_t *rows = (const uint8_t *)a.cache.pools + bytes * (size_t)td_pool_row(a.cache, slot, first);
    if (FORMAT == TD_KV_FP8) *scale = *(const float *)(rows + min(own_pool(), last) * bytes + TD_HEAD);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int m = i / 2, half = i % 2;
        uint32_t mask = 8 * i + g <= last ? 0xffffffffu : 0;
        const uint8_t *row = rows + min(8 * i + g, last) * bytes;
#pragma unroll
        for (int j = 0; j < 4; j++) { /* 32 inputs: 8 of them in a row are this lane's */
            uint4 v;
            if (FORMAT == TD_KV_FP8) {
                uint2 codes = *(const uint2 *)(row + 32 * j + 8 * t);
                v.x = td_e4m3_pair(__byte_perm(codes.x, 0, 0x1404));
                v.y = td_e4m3_pair(__byte_perm(codes.x, 0, 0x3424));
                v.z = td_e4m3_pair(__byte_perm(codes.y, 0, 0x1404));
                v.w = td_e4m3_pair(__byte_perm(codes.y, 0, 0x3424));
            } else {
                v = *(const uint4 *)(row + 64 * j + 16 * t);
            }
            k[m][2 * j][half] = v.x & mask;
            k[m][2 * j][half + 2] = v.y & mask;
            k[m][2 * j + 1][half] = v.z & mask;
            k[m][2 * j + 1][half + 2] = v.w & mask;
        }
    }
}

/* A query is 16 pieces of 8 values; odd heads have bit 2 of the piece flipped, so that a load of eight lanes touches no
 * bank twice. */
typedef struct chunk {
    uint4 q[CHUNK][16];  /* [rows][heads] */
    float weight[CHUNK]; /* raw */
} chunk;

typedef struct score_block {
    chunk chunks[2];
    int npool[BLOCK_ROWS]; /* that are to be scored; 0: the row sees all of its pools anyway */
    int slot[BLOCK_ROWS];
} score_block;

static TD_DEVICE void copy_async4(void *shared, const void *global, bool valid)
{
    uint32_t at = (uint32_t)__cvta_generic_to_shared(shared), n = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(global), "r"(n) : "memory");
}

/* Asks for the queries and weights of rows row .. row + rows - 1, at most CHUNK / heads; heads that are only there to
 * fill up are zeros. */
static TD_DEVICE void copy_queries(const select_args &a, int row, int rows, int heads, chunk *to)
{
    int piece = threadIdx.x % 16;
#pragma unroll 1
    for (int i = threadIdx.x / 16; i < rows * heads; i += THREADS / 16) {
        int r = row + i / heads, h = i % heads;
        bool valid = h < a.n_heads;
        size_t at = valid ? (size_t)r * a.n_heads + h : 0;
        td_copy_async(&to->q[i][piece ^ (i & 1) * 4], a.q + at * TD_HEAD + 8 * piece, valid);
        if (piece == 0) copy_async4(&to->weight[i], a.weights + at, valid);
    }
    td_copy_commit();
}

/* sum[2 m + half] += w_h max(0, 128^-1/2 q_h . K) of pools 16 m + 8 half + g over the heads that are this lane's. */
static TD_DEVICE void add_heads(const chunk &c, int at, int heads, float head_scale, const uint32_t k[2][8][4],
                                float sum[4])
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 1
    for (int h0 = at; h0 < at + heads; h0 += HEADS_STEP) {
        float dot[2][2][4] = { { { 0.0f } } };
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint4 b[2];
#pragma unroll
            for (int n = 0; n < 2; n++) b[n] = c.q[h0 + 8 * n + g][(4 * j + t) ^ (g & 1) * 4];
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int m = 0; m < 2; m++) td_mma_bf16(dot[n][m], k[m][2 * j], b[n].x, b[n].y);
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int m = 0; m < 2; m++) td_mma_bf16(dot[n][m], k[m][2 * j + 1], b[n].z, b[n].w);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float2 w = *(const float2 *)(c.weight + h0 + 8 * n + 2 * t);
            w.x *= head_scale;
            w.y *= head_scale;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float d = 0.08838834764831845f * dot[n][i / 4][i % 4];
                sum[i / 2] = fmaf(i % 2 ? w.y : w.x, d > 0.0f ? d : 0.0f, sum[i / 2]);
            }
        }
    }
}

/* Sums over lanes t, t ^ 1, then ^ 2, of four values; each lane has one of them, that of own_pool(). */
static TD_DEVICE float own_sum(const float sum[4])
{
    bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    float a = odd ? sum[2] : sum[0], b = odd ? sum[3] : sum[1];
    a += __shfl_xor_sync(0xffffffffu, odd ? sum[0] : sum[2], 1);
    b += __shfl_xor_sync(0xffffffffu, odd ? sum[1] : sum[3], 1);
    return (high ? b : a) + __shfl_xor_sync(0xffffffffu, high ? a : b, 2);
}

template <td_kv_format FORMAT> static __global__ void __launch_bounds__(THREADS, 2) k_select_score(select_args a)
{
    td_begin();
    __shared__ __align__(16) score_block s;
    int row0 = blockIdx.y * a.block_rows, rows = min(a.n_rows - row0, a.block_rows), tid = threadIdx.x, own = 0;
    if (tid < rows) {
        own = pools_of(a, row0 + tid);
        s.npool[tid] = own = own > a.top_pools ? own : 0;
        s.slot[tid] = a.segments[a.seg[row0 + tid]].slot;
    }
    if (!__syncthreads_or(own > (int)blockIdx.x * TILE)) return;
    int heads = (a.n_heads + HEADS_STEP - 1) / HEADS_STEP * HEADS_STEP, chunk_rows = CHUNK / heads;
    int first = blockIdx.x * TILE + tid / 32 * WARP_POOLS, pool = first + own_pool(), slot = -1, part = 0;
    copy_queries(a, row0, min(rows, chunk_rows), heads, &s.chunks[0]);
    float scale = 1.0f;
    uint32_t k[2][8][4];
    for (int r = 0, next = 0; r < rows; r++) {
        int npool = s.npool[r];
        bool live = first < npool;
        if (live && s.slot[r] != slot) {
            int visible = 0; /* to any row of the sequence */
            slot = s.slot[r];
            for (int i = tid % 32; i < rows; i += 32)
                if (s.slot[i] == slot) visible = max(visible, s.npool[i]);
            load_keys<FORMAT>(a, slot, first, __reduce_max_sync(0xffffffffu, visible), k, &scale);
        }
        if (r == next) { /* the next chunk */
            td_copy_wait<0>();
            __syncthreads();
            part ^= r > 0;
            next += chunk_rows;
            if (next < rows) copy_queries(a, row0 + next, min(rows - next, chunk_rows), heads, &s.chunks[part ^ 1]);
        }
        if (live) {
            float sum[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
            add_heads(s.chunks[part], (r + chunk_rows - next) * heads, heads, a.head_scale, k, sum);
            float x = own_sum(sum);
            if (FORMAT == TD_KV_FP8) x *= scale;
            size_t at = (row0 + r) * a.score_stride;
            if (pool < npool) a.score[at + pool] = x;
            uint32_t least = ~__float_as_uint(-INFINITY), rank = pool < npool ? max(rank_of(x), least) : least;
            rank = __reduce_max_sync(0xffffffffu, rank);
            if (tid % 32 == 0) a.most[(at + first) / WARP_POOLS] = score_of_rank(rank);
        }
    }
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
    union {
        float staged[STAGED]; /* what a radix selection reads three times; then */
        struct {
            float score[CANDIDATES];
            int32_t pool[CANDIDATES];
        };
    };
    uint32_t live[STAGED / 32]; /* groups that are to be read, a bit each */
    int warp_count[PICK_THREADS / 32];
} candidates;

/* n floats into shared memory, several loads of a thread at a time. */
static TD_DEVICE void stage(float *to, const float *from, int n)
{
    enum { AT_ONCE = 4 };
    for (int i = threadIdx.x; i < n; i += AT_ONCE * PICK_THREADS) {
        float v[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) v[j] = i + j * PICK_THREADS < n ? from[i + j * PICK_THREADS] : 0.0f;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (i + j * PICK_THREADS < n) to[i + j * PICK_THREADS] = v[j];
    }
    __syncthreads();
}

/* Long contexts: the top-th largest of the maxima of 32 pools each cannot exceed the top-th largest score, so what is
 * below it is out, and most groups of 32 need not be read. The others' pools, in order, are what remains to be looked
 * at; their number, or 0 when that does not help (many equal scores, NaN). */
static TD_DEVICE int filter(pick_block *b, candidates *c, const float *score, const float *most, int n, int top)
{
    enum { AT_ONCE = 4 }; /* groups whose scores are on their way */
    uint32_t ties;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, groups = (n + WARP_POOLS - 1) / WARP_POOLS, at = 0, all = 0;
    int part = (groups + PICK_THREADS - 1) / PICK_THREADS * 32, first = warp * part, end = min(first + part, groups);
    stage(c->staged, most, groups);
    uint32_t least = threshold(b, c->staged, groups, top, &ties);
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
        for (int g0 = first; g0 < end; g0 += 32) {
            if (!pass) {
                uint32_t votes = __ballot_sync(
                    0xffffffffu, g0 + lane < end && rank_of(c->staged[min(g0 + lane, groups - 1)]) >= least);
                if (lane == 0) c->live[g0 / 32] = votes;
                __syncwarp();
            }
            for (uint32_t left = c->live[g0 / 32]; left;) {
                int group[AT_ONCE]; /* of a warp, not of a lane */
                float x[AT_ONCE];
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++, left &= left - 1) {
                    group[j] = left ? g0 + __ffs(left) - 1 : groups;
                    x[j] = group[j] * WARP_POOLS + lane < n ? score[group[j] * WARP_POOLS + lane] : 0.0f;
                }
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) {
                    bool in = group[j] * WARP_POOLS + lane < n && rank_of(x[j]) >= least;
                    uint32_t votes = __ballot_sync(0xffffffffu, in);
                    int place = at + __popc(votes & ((1u << lane) - 1));
                    if (pass && in) {
                        c->score[place] = x[j];
                        c->pool[place] = group[j] * WARP_POOLS + lane;
                    }
                    at += __popc(votes);
                }
            }
        }
        if (pass) break;
        if (lane == 0) c->warp_count[warp] = at;
        __syncthreads(); /* nobody needs what was staged any more */
        at = 0;
#pragma unroll 4
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
    int groups = (n + WARP_POOLS - 1) / WARP_POOLS;
    if (n > CANDIDATES && groups >= a.top_pools && groups <= STAGED) {
        int kept = filter(&b, c, score, a.most + row * a.score_stride / WARP_POOLS, n, a.top_pools);
        if (kept) {
            score = c->score;
            pool = c->pool;
            n = kept;
        }
    } else if (n <= STAGED) {
        stage(c->staged, score, n);
        score = c->staged;
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
    int rows = limits->rows / 8 < BATCH_MIN ? (int)BATCH_MIN : limits->rows / 8;
    rows = rows < BATCH ? rows : (int)BATCH;
    return (size_t)rows * row_bytes(score_stride(limits->context_tokens));
}

cudaError_t td_cuda_select_init(void)
{
    return cudaFuncSetAttribute(k_select_pick, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(candidates));
}

/* Rows of a batch: as many as fit, all batches about as large. */
static int batch_rows(const td_cuda_dev *dev, int n_rows, size_t stride)
{
    size_t fit = td_cuda_select_bytes(&dev->limits) / row_bytes(stride);
    fit = fit < BATCH_MAX ? fit : (size_t)BATCH_MAX;
    unsigned even = td_ceil_div((size_t)n_rows, td_ceil_div((size_t)n_rows, fit)), whole = BLOCK_ROWS;
    unsigned rounded = (even + whole - 1) / whole * whole;
    return (int)(rounded <= fit ? rounded : even);
}

/* Rows that share a block's keys: many, but not so many that multiprocessors are left without a block. A window's rows
 * are of several sequences, and a recording's longest context says little about how many blocks will have work. */
static int block_rows(const td_cuda_dev *dev, int n_rows, unsigned tiles)
{
    int most = n_rows > TD_WINDOW_MAX ? (int)BLOCK_ROWS : (int)WINDOW_ROWS, rows = n_rows < most ? n_rows : most;
    while (rows > 1 && tiles * td_ceil_div((size_t)n_rows, (size_t)rows) < 2 * (unsigned)dev->n_sm)
        rows = (rows + 1) / 2;
    return rows;
}

td_status td_cuda_dsa_select(td_dev *base, const td_dsa_select_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    const td_window *w = a->window;
    if (a->n_heads < 1 || a->n_heads > dev->limits.index_heads || a->n_heads > HEADS_MAX || a->top_pools < 1 ||
        w->n_rows > dev->limits.rows || !td_cuda_kv_fits(w, &a->cache) || w->host_pos_max >= dev->limits.context_tokens)
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
    unsigned tiles = td_ceil_div(((size_t)w->host_pos_max + 1) / TD_POOL, TILE);
    int batch = batch_rows(dev, w->n_rows, stride);
    for (int r = 0; r < w->n_rows; r += batch) {
        int rows = w->n_rows - r < batch ? w->n_rows - r : batch, share = block_rows(dev, rows, tiles);
        select_args s = { w->pos + r,
                          w->seg + r,
                          w->segments,
                          a->cache,
                          rows,
                          a->n_heads,
                          a->top_pools,
                          share,
                          1.0f / sqrtf((float)a->n_heads),
                          (const td_bf16 *)a->q + (size_t)r * (size_t)a->n_heads * TD_HEAD,
                          a->weights + (size_t)r * (size_t)a->n_heads,
                          a->count + r,
                          a->list + (size_t)r * (size_t)a->top_pools,
                          score,
                          score + (size_t)batch * stride,
                          stride };
        td_launch_spread(dev, a->cache.format == TD_KV_FP8 ? k_select_score<TD_KV_FP8> : k_select_score<TD_KV_ACT>,
                         dim3(tiles, td_ceil_div((size_t)rows, (size_t)share)), THREADS, 0, s);
        td_launch_spread(dev, k_select_pick, rows, PICK_THREADS, sizeof(candidates), s);
    }
    return td_cuda_launched(dev, "dsa_select");
}
