/* Scores of pools for selection:
 *   k_select_score  a warp keeps 32 pools (windows) or 64 (prompts) in registers as the tensor core's A while rows pass
 *                   by as B, eight heads at a time, their queries copied to shared memory a chunk ahead. What is left
 *                   to do for eight heads (relu, weights, sums) is done while the tensor core has the next eight, and
 *                   the end of a row while it has the next row: two warps a scheduler, which is what so many registers
 *                   leave for prompts, do not hide it
 * The heads of a score are summed in one order whatever the rows: a lane's ascending, then lanes t, t ^ 1, t ^ 2.
 * Blocks beyond the pools that their rows see leave at once. */
#include "ops/cuda/dsa_select.h"

#include <limits.h>
#include <stddef.h>

enum {
    BLOCK_ROWS = 256, /* at most, of prompts: a thread looks at each */
    WINDOW_ROWS = 8,
    HEADS_STEP = 16,
    HEADS = 32, /* the released model's: loops over them are unrolled */
    CHUNK = 64, /* rows x heads that are in shared memory at a time, twice: 2 x 16 KiB */
    THREADS = 256,
    WARPS = THREADS / 32
};

/* The pool, of 32, whose score a lane ends up with: see own_sum(). */
static TD_DEVICE int own_pool()
{
    int lane = threadIdx.x % 32, t = lane % 4;
    return 16 * (t & 1) + 8 * (t >> 1) + lane / 4;
}

/* A warp's pools as A operands, all 128 inputs: k[m][step] holds pools 16 m + g and 16 m + g + 8. scale[i]: what the sum
 * over heads of the lane's own pool of each 32 is multiplied with; fp8 rows' scale is a power of two, so that is the
 * same as multiplying the products. Pools that are not there become zeros; the mask also makes the compiler move what
 * it loaded to where the tensor core wants it once, here, and not before every product. */
template <td_kv_format FORMAT, int GROUPS>
static TD_DEVICE void load_keys(const td_select_batch &a, int slot, int first, int npool, uint32_t k[2 * GROUPS][8][4],
                                float scale[GROUPS])
{
    size_t bytes = td_kv_bytes(FORMAT, TD_HEAD);
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, last = npool - 1 - first;
    const uint8_t *rows = (const uint8_t *)a.cache.pools + bytes * (size_t)td_pool_row(a.cache, slot, first);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        const uint8_t *own = rows + min(TD_SELECT_GROUP * i + own_pool(), last) * bytes;
        scale[i] = FORMAT == TD_KV_FP8 ? a.head_scale * *(const float *)(own + TD_HEAD) : a.head_scale;
    }
#pragma unroll
    for (int i = 0; i < 4 * GROUPS; i++) {
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

/* Queries on their way through shared memory, at a multiple of 128 bytes. A query is 16 pieces of 8 values; odd heads
 * have bit 2 of the piece flipped, so that a load of eight lanes touches no bank twice. */
template <int PAIRS> struct chunk {
    uint4 q[PAIRS][16];  /* [rows][heads] */
    float weight[PAIRS]; /* raw */
};

template <int PAIRS> struct score_block {
    chunk<PAIRS> chunks[2];
    int2 rows[BLOCK_ROWS + 1]; /* pools that are to be scored (0: the row sees all of its pools anyway) and slot */
};

static TD_DEVICE void copy_async4(void *shared, const void *global, bool valid)
{
    uint32_t n = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(td_shared_at(shared)), "l"(global), "r"(n)
                 : "memory");
}

/* Asks for the queries and weights of rows row .. row + rows - 1, at most PAIRS / heads; heads that are only there to
 * fill up are zeros. WHOLE: there are none, and rows follow each other without gaps. */
template <bool WHOLE, int PAIRS>
static TD_DEVICE void copy_queries(const td_select_batch &a, int row, int rows, int heads, chunk<PAIRS> *to)
{
    static_assert(THREADS / 16 == HEADS_STEP && THREADS >= PAIRS, "a turn is a step of heads");
    int piece = threadIdx.x % 16, h = threadIdx.x / 16, pairs = rows * heads, at = row * a.n_heads + h;
    uint4 *q = &to->q[h][piece ^ (h & 1) * 4];
    const td_bf16 *from = a.q + 8 * piece;
    if (WHOLE) {
        from += (size_t)at * TD_HEAD;
#pragma unroll
        for (int i = 0; i < PAIRS; i += HEADS_STEP)
            if (i < pairs) td_copy_async(q + 16 * i, from + i * TD_HEAD, true);
        int i = threadIdx.x;
        if (i < pairs) copy_async4(&to->weight[i], a.weights + row * heads + i, true);
    } else {
#pragma unroll 1
        for (int i = 0; i < pairs; i += HEADS_STEP) {
            bool valid = h < a.n_heads;
            size_t pair = valid ? at : 0;
            td_copy_async(q + 16 * i, from + pair * TD_HEAD, valid);
            if (piece == 0) copy_async4(&to->weight[i + threadIdx.x / 16], a.weights + pair, valid);
            h += HEADS_STEP;
            at += HEADS_STEP;
            if (h >= heads) {
                h -= heads;
                at += a.n_heads - heads;
            }
        }
    }
    td_copy_commit();
}

static TD_DEVICE float2 load_weights(uint32_t at)
{
    uint2 v = td_load_shared8(at);
    return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}

/* Of a row: score_block.rows. */
static TD_DEVICE int2 load_row(uint32_t at)
{
    uint2 v = td_load_shared8(at);
    return make_int2((int)v.x, (int)v.y);
}

/* dot[m] = q_h . K of pools 16 m + g, + 8 and heads 2 t, 2 t + 1 of eight. q: where the lane's piece of head g is, the
 * first of its four. */
template <int TILES> static TD_DEVICE void multiply(uint32_t q, const uint32_t k[TILES][8][4], float dot[TILES][4])
{
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) dot[m][i] = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint4 b = td_load_shared16((j % 2 ? q ^ 64 : q) + 128 * (j / 2));
#pragma unroll
        for (int m = 0; m < TILES; m++) td_mma_bf16(dot[m], k[m][2 * j], b.x, b.y);
#pragma unroll
        for (int m = 0; m < TILES; m++) td_mma_bf16(dot[m], k[m][2 * j + 1], b.z, b.w);
    }
}

/* A row's sums over the heads that are a lane's: 2 t, 2 t + 1 of every eight, ascending. What eight heads add is added
 * while the tensor core has the next eight, and the row is finished while it has the next row's. */
template <int GROUPS> struct row_sums {
    float sum[2 * GROUPS][2]; /* of pools 16 m + g, + 8 */
    float dot[2 * GROUPS][4]; /* of the last eight heads, still to be added */
    float2 w;
    uint32_t row;
    int n_pools; /* from the warp's first; 0: there is no row */
};

/* sum[m][half] += w_h max(0, q_h . K), the lower head first. */
template <int TILES> static TD_DEVICE void weigh(const float dot[TILES][4], float2 w, float sum[TILES][2])
{
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[m][i / 2] = fmaf(i % 2 ? w.y : w.x, fmaxf(dot[m][i], 0.0f), sum[m][i / 2]);
}

/* Sums over lanes t, t ^ 1, then ^ 2, of four values; each lane has one of them, that of own_pool(). */
static TD_DEVICE float own_sum(const float sum[2][2])
{
    bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    float a = odd ? sum[1][0] : sum[0][0], b = odd ? sum[1][1] : sum[0][1];
    a += __shfl_xor_sync(0xffffffffu, odd ? sum[0][0] : sum[1][0], 1);
    b += __shfl_xor_sync(0xffffffffu, odd ? sum[0][1] : sum[1][1], 1);
    return (high ? b : a) + __shfl_xor_sync(0xffffffffu, high ? a : b, 2);
}

/* The largest of a warp's numbers; NaN counts as -infinity. */
static TD_DEVICE float warp_most(float x)
{
    int32_t bits = __float_as_int(fmaxf(x, -INFINITY));
    bits = __reduce_max_sync(0xffffffffu, bits ^ (bits >> 31 & 0x7fffffff));
    return __int_as_float(bits ^ (bits >> 31 & 0x7fffffff));
}

/* Where a lane finds and leaves things: kept in registers, because the compiler would work them out anew for every row,
 * and nothing hides that. */
typedef struct places {
    uint32_t q, w, rows; /* shared memory: of the first chunk; score_block's rows */
    uint32_t score;      /* of the block's first row and the warp's first pool; all scores are fewer than 2^32 */
    int own;             /* pool of 32 */
} places;

template <int PAIRS> static TD_DEVICE places places_of(const td_select_batch &a, void *shared, int row0, int first)
{
    uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, at = td_shared_at(shared);
    places p;
    p.q = at + (16 * g + (4 * (g & 1) ^ t)) * sizeof(uint4);
    p.w = at + offsetof(chunk<PAIRS>, weight) + t * sizeof(float2);
    p.rows = at + offsetof(score_block<PAIRS>, rows);
    p.score = row0 * a.score_stride + first;
    p.own = own_pool();
    asm volatile("" : "+r"(p.q), "+r"(p.w), "+r"(p.rows), "+r"(p.score), "+r"(p.own));
    return p;
}

/* The end of a row: scores of the lane's own pools, and the largest of each 32. */
template <int GROUPS>
static TD_DEVICE void finish(const td_select_batch &a, const places &p, const float scale[GROUPS], row_sums<GROUPS> *r)
{
    weigh<2 * GROUPS>(r->dot, r->w, r->sum);
    uint32_t at = p.score + r->row * a.score_stride;
    float most[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        int pool = TD_SELECT_GROUP * i + p.own;
        float x = own_sum(r->sum + 2 * i) * scale[i];
        if (pool < r->n_pools) a.score[at + p.own + TD_SELECT_GROUP * i] = x;
        most[i] = warp_most(pool < r->n_pools ? x : -INFINITY);
    }
    if (p.own == 0 && r->n_pools > 0) {
        float *to = a.most + at / TD_SELECT_GROUP;
        if (GROUPS == 2)
            *(float2 *)to = make_float2(most[0], most[GROUPS - 1]);
        else
            *to = most[0];
    }
}

/* The scores of a row whose first eight heads are at q and w (a lane's part of them), as far as they go without the
 * next row; the row before is finished. */
template <int GROUPS, int N_HEADS>
static TD_DEVICE void add_heads(const td_select_batch &a, const places &p, uint32_t q, uint32_t w, int heads,
                                const uint32_t k[2 * GROUPS][8][4], const float scale[GROUPS], row_sums<GROUPS> *r,
                                uint32_t row, int n_pools)
{
    enum { TILES = 2 * GROUPS, EIGHT = 8 * TD_HEAD * sizeof(td_bf16) };
    float even[TILES][4];
    multiply<TILES>(q, k, even);
    finish<GROUPS>(a, p, scale, r);
#pragma unroll
    for (int m = 0; m < TILES; m++) r->sum[m][0] = r->sum[m][1] = 0.0f;
    r->row = row;
    r->n_pools = n_pools;
    multiply<TILES>(q + EIGHT, k, r->dot);
    weigh<TILES>(even, load_weights(w), r->sum);
    r->w = load_weights(w + 32);
#pragma unroll(N_HEADS ? N_HEADS / HEADS_STEP : 1)
    for (int h = HEADS_STEP; h < heads; h += HEADS_STEP) {
        q += 2 * EIGHT;
        w += 64;
        multiply<TILES>(q, k, even);
        weigh<TILES>(r->dot, r->w, r->sum);
        multiply<TILES>(q + EIGHT, k, r->dot);
        weigh<TILES>(even, load_weights(w), r->sum);
        r->w = load_weights(w + 32);
    }
}

/* N_HEADS: how many there are, or 0: any number. */
template <td_kv_format FORMAT, int GROUPS, int N_HEADS>
static __global__ void __launch_bounds__(THREADS, 3 - GROUPS) k_select_score(td_select_batch a, int block_rows)
{
    td_begin();
    enum { POOLS = TD_SELECT_GROUP * GROUPS, BLOCK_POOLS = POOLS * WARPS, PAIRS = CHUNK * GROUPS };
    extern __shared__ __align__(128) unsigned char smem[];
    score_block<PAIRS> &s = *(score_block<PAIRS> *)smem;
    int row0 = blockIdx.y * block_rows, rows = min(a.n_rows - row0, block_rows), tid = threadIdx.x, own = 0;
    if (tid < rows) {
        own = td_pools_of(a, row0 + tid);
        own = own > a.top_pools ? own : 0;
        s.rows[tid] = make_int2(own, a.segments[a.seg[row0 + tid]].slot);
    }
    if (!__syncthreads_or(own > (int)blockIdx.x * BLOCK_POOLS)) return;
    if (N_HEADS) a.n_heads = N_HEADS; /* a constant from here on */
    int heads = (a.n_heads + HEADS_STEP - 1) / HEADS_STEP * HEADS_STEP, chunk_rows = PAIRS / heads;
    int first = blockIdx.x * BLOCK_POOLS + tid / 32 * POOLS, slot = -1, part = 0;
    places p = places_of<PAIRS>(a, smem, row0, first);
    copy_queries<N_HEADS != 0>(a, row0, min(rows, chunk_rows), heads, &s.chunks[0]);
    float scale[GROUPS] = { 0.0f };
    uint32_t k[2 * GROUPS][8][4];
    row_sums<GROUPS> sums = {};
    int2 ahead = load_row(p.rows);
    for (int r = 0, next = 0; r < rows; r++) {
        int npool = ahead.x, of = ahead.y;
        ahead = load_row(p.rows + (r + 1) * sizeof(int2));
        if (r == next) { /* the next chunk */
            td_copy_wait<0>();
            __syncthreads();
            part ^= r > 0;
            next += chunk_rows;
            if (next < rows)
                copy_queries<N_HEADS != 0>(a, row0 + next, min(rows - next, chunk_rows), heads, &s.chunks[part ^ 1]);
        }
        if (npool <= first) continue;
        if (of != slot) {
            if (sums.n_pools) finish<GROUPS>(a, p, scale, &sums);
            sums.n_pools = 0;
            slot = of;
            int visible = 0; /* to any row of the sequence */
            for (int i = tid % 32; i < rows; i += 32)
                if (s.rows[i].y == slot) visible = max(visible, s.rows[i].x);
            load_keys<FORMAT, GROUPS>(a, slot, first, __reduce_max_sync(0xffffffffu, visible), k, scale);
        }
        uint32_t here = part * sizeof(chunk<PAIRS>), pair = (r + chunk_rows - next) * heads;
        uint32_t q = p.q + here + pair * sizeof(s.chunks[0].q[0]), w = p.w + here + pair * sizeof(float);
        add_heads<GROUPS, N_HEADS>(a, p, q, w, heads, k, scale, &sums, r, npool - first);
    }
    if (sums.n_pools) finish<GROUPS>(a, p, scale, &sums);
}

/* Rows that share a block's keys. Prompts: what ends soonest if keys cost as much as four rows. A window's rows are of
 * several sequences, and a recording's longest context says little about how many blocks will have work: few rows, and
 * no multiprocessor without a block. */
static int block_rows(const td_cuda_dev *dev, int n_rows, unsigned tiles, bool prompt)
{
    enum { KEYS = 4 };
    unsigned n_sm = (unsigned)dev->n_sm, least = UINT_MAX;
    int most = prompt ? (int)BLOCK_ROWS : (int)WINDOW_ROWS, rows = n_rows < most ? n_rows : most, best = 1;
    if (!prompt) {
        while (rows > 1 && tiles * td_ceil_div((size_t)n_rows, (size_t)rows) < 2 * n_sm) rows = (rows + 1) / 2;
        return rows;
    }
    for (; rows; rows--) {
        unsigned turns = td_ceil_div((size_t)tiles * td_ceil_div((size_t)n_rows, (size_t)rows), n_sm);
        unsigned cost = turns * (unsigned)(rows + KEYS);
        if (cost < least) {
            least = cost;
            best = rows;
        }
    }
    return best;
}

cudaError_t td_cuda_score_init(void)
{
    const cudaFuncAttribute attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const int bytes = sizeof(score_block<2 * CHUNK>);
    cudaError_t error = cudaFuncSetAttribute(k_select_score<TD_KV_ACT, 2, 0>, attribute, bytes);
    if (error == cudaSuccess) error = cudaFuncSetAttribute(k_select_score<TD_KV_FP8, 2, 0>, attribute, bytes);
    if (error == cudaSuccess) error = cudaFuncSetAttribute(k_select_score<TD_KV_ACT, 2, HEADS>, attribute, bytes);
    if (error == cudaSuccess) error = cudaFuncSetAttribute(k_select_score<TD_KV_FP8, 2, HEADS>, attribute, bytes);
    return error;
}

template <int GROUPS, int N_HEADS>
static void launch(const td_cuda_dev *dev, const td_select_batch *b, int64_t pools, bool prompt)
{
    enum { BLOCK_POOLS = TD_SELECT_GROUP * WARPS * GROUPS };
    static_assert(TD_SELECT_WHOLE % BLOCK_POOLS == 0, "a block writes whole groups of maxima");
    unsigned tiles = td_ceil_div((size_t)pools, BLOCK_POOLS);
    int rows = block_rows(dev, b->n_rows, tiles, prompt);
    td_launch_spread(dev,
                     b->cache.format == TD_KV_FP8 ? k_select_score<TD_KV_FP8, GROUPS, N_HEADS>
                                                  : k_select_score<TD_KV_ACT, GROUPS, N_HEADS>,
                     dim3(tiles, td_ceil_div((size_t)b->n_rows, (size_t)rows)), THREADS,
                     sizeof(score_block<CHUNK * GROUPS>), *b, rows);
}

void td_cuda_score(td_cuda_dev *dev, const td_select_batch *batch, int64_t pools, bool window)
{
    if (window)
        launch<1, 0>(dev, batch, pools, false);
    else if (batch->n_heads == HEADS)
        launch<2, HEADS>(dev, batch, pools, true);
    else
        launch<2, 0>(dev, batch, pools, true);
}
