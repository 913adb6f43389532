/* Absorbed attention. Three steps: queries into latent space (a product a head with its key matrix, transposed),
 * attention over latents, outputs back (a product a head with its value matrix).
 *
 * The middle step cuts a row's token list into partials of 64 (list index, ascending). A block takes one row, up to 32
 * heads and one partial; latents lie in shared memory once, as bf16 (fp8 rows are multiplied out, which is exact):
 *   s_t = scale * (q . l_t)                                 tensor core, 512 inputs ascending
 *   m = max s_t;  p_t = exp(s_t - m);  z = sum of p         lanes t and t + 32, then the warp's tree
 *   v = sum_t p_t l_t                                       tensor core; p as two bf16 parts, high and rest: 16 bits
 * Partials are merged in order:  M = max(m, m');  z = z exp(m - M) + z' exp(m' - M);  v alike. Windows of up to 64 rows
 * write partials and merge in a second kernel, prompts keep the running sums in registers: the same operations in the
 * same order. A row sums over its own tokens only. */
#include "ops/cuda/kv.h"
#include "ops/cuda/weight.h"

enum {
    THREADS = 512,
    WARPS = THREADS / 32,
    TOKENS = 64, /* of a partial */
    HEADS = 32,  /* of a block */
    WIDTH = TD_KV_WIDTH,
    PIECES = WIDTH / 8,
    VALUES = WIDTH / WARPS, /* of the latent, a warp's in weigh() */
    NT = VALUES / 8,
    P_PITCH = TOKENS + 8,
    SPLIT_ROWS = 64
};

typedef struct attend_args {
    const int32_t *pos, *seg;
    const td_segment *segments;
    td_dsa_cache cache;
    int n_heads, top_pools, row0;
    float scale;
    const int32_t *count, *list;
    const td_bf16 *q; /* [rows][n_heads][kv_lora] absorbed */
    td_bf16 *ol;      /* the same shape */
    float *v;         /* [rows][partials][n_heads][kv_lora], and */
    float2 *mz;       /* [rows][partials][n_heads] */
    int n_partials;   /* entries a row has in v and mz */
} attend_args;

typedef struct attend_block {
    uint4 latent[TOKENS][PIECES]; /* pieces of 8 values, exchanged by row: see piece_at() */
    int64_t row[TOKENS];          /* where they come from, in bytes; -1 behind the end of the list. No pointers: memory
                                   * that is found through shared memory is read by the slower generic loads */
    float score[HEADS][TOKENS];
    td_bf16 high[HEADS][P_PITCH], rest[HEADS][P_PITCH];
    float max[HEADS], sum[HEADS];   /* of a partial; of prompts: of all partials so far */
    float old[HEADS], fresh[HEADS]; /* prompts: factors of what was there and of what the last partial brings */
} attend_block;

/* Neighbouring rows differ in bit 2 and every eight rows take eight different places, so that neither the score's loads
 * (two rows, four pieces) nor the transposing ones (eight rows, one piece) meet in a bank. */
static TD_DEVICE int piece_at(int row, int piece)
{
    return piece ^ ((row & 1) << 2 | (row >> 1 & 3));
}

typedef struct tokens {
    const int32_t *list; /* NULL: the whole prefix */
    int n_listed, tail;  /* tokens in listed pools; first token behind them */
    int total;
} tokens;

static TD_DEVICE tokens tokens_of(const attend_args &a, int row)
{
    int seen = a.pos[row] + 1, count = a.count[row];
    if (count < 0) return { NULL, 0, 0, seen };
    count = min(count, a.top_pools) * TD_POOL;
    return { a.list + (size_t)row * a.top_pools, count, seen - seen % TD_POOL, count + seen % TD_POOL };
}

static TD_DEVICE int token_at(const tokens &u, int i)
{
    if (!u.list) return i;
    return i < u.n_listed ? u.list[i / TD_POOL] * TD_POOL + i % TD_POOL : u.tail + i - u.n_listed;
}

/* Eight codes times a power of two, as bf16. */
static TD_DEVICE uint4 dequantise(uint2 codes, float scale)
{
    __nv_bfloat162 s = __float2bfloat162_rn(scale);
    uint32_t w[4] = { td_e4m3_pair(__byte_perm(codes.x, 0, 0x1404)), td_e4m3_pair(__byte_perm(codes.x, 0, 0x3424)),
                      td_e4m3_pair(__byte_perm(codes.y, 0, 0x1404)), td_e4m3_pair(__byte_perm(codes.y, 0, 0x3424)) };
    for (int i = 0; i < 4; i++) {
        __nv_bfloat162 v = __hmul2(*(__nv_bfloat162 *)&w[i], s);
        w[i] = *(uint32_t *)&v;
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* Addresses of the partial's rows: two dependent reads, so they are asked for early. */
static TD_DEVICE void find_rows(const attend_args &a, const tokens &u, int slot, int first, attend_block *s)
{
    int t = threadIdx.x;
    if (t >= TOKENS) return;
    s->row[t] = first + t >= u.total ? -1
                                     : (int64_t)(td_kv_bytes(a.cache.format, a.cache.kv_lora) *
                                                 (size_t)td_latent_row(a.cache, slot, token_at(u, first + t)));
}

/* Rows of find_rows() on their way into shared memory; a thread keeps to one piece of every eighth row. */
enum { STEP = THREADS / PIECES };

typedef struct codes {
    uint2 row[TOKENS / STEP];
    float scale[TOKENS / STEP];
} codes;

/* fp8: all on their way before the first is needed. */
static TD_DEVICE void ask_codes(const attend_args &a, const attend_block *s, codes *c)
{
    int piece = threadIdx.x % PIECES, first = threadIdx.x / PIECES;
    bool inside = piece < a.cache.kv_lora / 8;
    const uint8_t *latents = (const uint8_t *)a.cache.latents;
#pragma unroll
    for (int j = 0; j < TOKENS / STEP; j++) {
        int64_t at = inside ? s->row[first + j * STEP] : -1;
        c->row[j] = at >= 0 ? *(const uint2 *)(latents + at + piece * 8) : make_uint2(0, 0);
        c->scale[j] = at >= 0 ? *(const float *)(latents + at + a.cache.kv_lora) : 1.0f;
    }
}

static TD_DEVICE void put_codes(const codes *c, attend_block *s)
{
    int piece = threadIdx.x % PIECES, first = threadIdx.x / PIECES;
#pragma unroll
    for (int j = 0; j < TOKENS / STEP; j++) {
        int t = first + j * STEP;
        s->latent[t][piece_at(t, piece)] = dequantise(c->row[j], c->scale[j]);
    }
}

static TD_DEVICE void load_latents(const attend_args &a, attend_block *s)
{
    int piece = threadIdx.x % PIECES, first = threadIdx.x / PIECES;
    bool inside = piece < a.cache.kv_lora / 8;
    const uint8_t *latents = (const uint8_t *)a.cache.latents;
    if (a.cache.format == TD_KV_FP8) {
        codes c;
        ask_codes(a, s, &c);
        put_codes(&c, s);
        return;
    }
#pragma unroll
    for (int j = 0; j < TOKENS / STEP; j++) {
        int t = first + j * STEP;
        int64_t at = inside ? s->row[t] : -1;
        td_copy_async(&s->latent[t][piece_at(t, piece)], latents + (at >= 0 ? at + piece * 16 : 0), at >= 0);
    }
    td_copy_commit();
    td_copy_wait<0>();
}

/* A warp: 16 heads x 8 tokens. Queries of AHEAD steps of 32 inputs are on their way together; AHEAD > 1: kv_lora is a
 * multiple of as many. Heads beyond the last take the last one's queries; nobody reads their results. */
template <int AHEAD> static TD_DEVICE void scores(const attend_args &a, int row, int head0, attend_block *s)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int head = warp % 2 * 16 + g, token = warp / 2 * 8, last = a.n_heads - 1 - head0;
    const td_bf16 *q = a.q + ((size_t)row * a.n_heads + head0 + min(head, last)) * a.cache.kv_lora + 8 * t;
    int second_head = (min(head + 8, last) - min(head, last)) * a.cache.kv_lora;
    /* piece_at() exchanges the low three bits only: two places serve all steps. */
    const uint4 *even = &s->latent[token + g][piece_at(token + g, t)],
                *odd = &s->latent[token + g][piece_at(token + g, 4 + t)];
    float c[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
#pragma unroll 1
    for (int k = 0; k < a.cache.kv_lora; k += 32 * AHEAD) {
        uint4 next[AHEAD][2];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            bool valid = AHEAD > 1 || k + 8 * t < a.cache.kv_lora;
            next[i][0] = valid ? *(const uint4 *)(q + k + 32 * i) : make_uint4(0, 0, 0, 0);
            next[i][1] = valid ? *(const uint4 *)(q + second_head + k + 32 * i) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            uint4 b = AHEAD == 1 ? s->latent[token + g][piece_at(token + g, k / 8 + t)]
                                 : (i % 2 ? odd : even)[k / 8 + i / 2 * 8];
            uint32_t first[4] = { next[i][0].x, next[i][1].x, next[i][0].y, next[i][1].y },
                     second[4] = { next[i][0].z, next[i][1].z, next[i][0].w, next[i][1].w };
            td_mma_bf16(c, first, b.x, b.y);
            td_mma_bf16(c, second, b.z, b.w);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) s->score[head + i / 2 * 8][token + 2 * t + i % 2] = c[i] * a.scale;
}

/* Factors of what is there and of what comes. */
static TD_DEVICE void merge(float *max, float *sum, float m, float z, float *old, float *fresh)
{
    float most = fmaxf(m, *max);
    *old = td_expf(*max - most);
    *fresh = td_expf(m - most);
    *max = most;
    *sum = fmaf(z, *fresh, *sum * *old);
}

/* Scores of n tokens become p in two parts; maximum and sum of each head. A warp two heads. RUNNING: merged with those
 * of the partials before, if this is not the first, and the factors of both. */
template <bool RUNNING> static TD_DEVICE void softmax(int n, bool is_first, attend_block *s)
{
    int lane = threadIdx.x % 32;
    for (int h = threadIdx.x / 32; h < HEADS; h += WARPS) {
        float x0 = lane < n ? s->score[h][lane] : -INFINITY, x1 = lane + 32 < n ? s->score[h][lane + 32] : -INFINITY;
        float max = td_warp_max(fmaxf(x0, x1)); /* fmaxf passes NaN by */
        if (max == -INFINITY) max = 0.0f;       /* only NaN or -infinity: keep NaN, do not make it of infinities */
        float p0 = lane < n ? td_expf(x0 - max) : 0.0f, p1 = lane + 32 < n ? td_expf(x1 - max) : 0.0f;
        float h0 = td_round_bf16(p0), h1 = td_round_bf16(p1), sum = td_warp_sum(p0 + p1);
        s->high[h][lane] = td_to_bf16(h0);
        s->high[h][lane + 32] = td_to_bf16(h1);
        s->rest[h][lane] = td_to_bf16(p0 - h0);
        s->rest[h][lane + 32] = td_to_bf16(p1 - h1);
        if (RUNNING && !is_first) {
            float all_max = s->max[h], all_sum = s->sum[h], old, fresh;
            merge(&all_max, &all_sum, max, sum, &old, &fresh);
            max = all_max;
            sum = all_sum;
            __syncwarp();
            if (lane == 0) {
                s->old[h] = old;
                s->fresh[h] = fresh;
            }
        }
        if (lane == 0) {
            s->max[h] = max;
            s->sum[h] = sum;
        }
    }
}

static TD_DEVICE void load_p(const td_bf16 (*p)[P_PITCH], int head, int token, uint32_t a[4])
{
    a[0] = *(const uint32_t *)&p[head][token];
    a[1] = *(const uint32_t *)&p[head + 8][token];
    a[2] = *(const uint32_t *)&p[head][token + 8];
    a[3] = *(const uint32_t *)&p[head + 8][token + 8];
}

/* A warp: all 32 heads x 32 of the latent's values. v[m][nt]: heads 16 m + g (+ 8), values 8 nt + 2t (+ 1). UNROLL: 1
 * keeps the window's kernel at 64 registers, two blocks a multiprocessor. */
template <int UNROLL> static TD_DEVICE void weigh(const attend_block *s, float v[2][NT][4])
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 8 * NT; i++) v[i / (4 * NT)][i / 4 % NT][i % 4] = 0.0f;
#pragma unroll UNROLL
    for (int k = 0; k < TOKENS; k += 16) {
        uint32_t high[2][4], rest[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++) {
            load_p(s->high, 16 * m + g, k + 2 * t, high[m]);
            load_p(s->rest, 16 * m + g, k + 2 * t, rest[m]);
        }
#pragma unroll
        for (int nt = 0; nt < NT; nt += 2) {
            uint32_t b[4];
            int token = k + lane % 16, piece = warp * NT + nt + lane / 16;
            td_ldmatrix_trans(b, &s->latent[token][piece_at(token, piece)]);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                td_mma_bf16(v[m][nt], high[m], b[0], b[1]);
                td_mma_bf16(v[m][nt], rest[m], b[0], b[1]);
                td_mma_bf16(v[m][nt + 1], high[m], b[2], b[3]);
                td_mma_bf16(v[m][nt + 1], rest[m], b[2], b[3]);
            }
        }
    }
}

static TD_DEVICE void any_scores(const attend_args &a, int row, int head0, attend_block *s)
{
    if (a.cache.kv_lora % 128 == 0)
        scores<4>(a, row, head0, s);
    else
        scores<1>(a, row, head0, s);
}

/* Head and value index of element i of v, as weigh() leaves them. */
static TD_DEVICE int head_of(int i)
{
    return i / (4 * NT) * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
}

static TD_DEVICE int value_of(int i)
{
    return threadIdx.x / 32 * VALUES + i / 4 % NT * 8 + threadIdx.x % 4 * 2 + i % 2;
}

static __global__ void __launch_bounds__(THREADS, 2) k_attend_partial(attend_args a)
{
    td_begin();
    extern __shared__ __align__(16) unsigned char smem[];
    attend_block *s = (attend_block *)smem;
    int row = a.row0 + blockIdx.z, head0 = blockIdx.y * HEADS, partial = blockIdx.x;
    tokens u = tokens_of(a, row);
    if (partial * TOKENS >= u.total) return;
    float v[2][NT][4];
    find_rows(a, u, a.segments[a.seg[row]].slot, partial * TOKENS, s);
    __syncthreads();
    load_latents(a, s);
    __syncthreads();
    any_scores(a, row, head0, s);
    __syncthreads();
    softmax<false>(min(u.total - partial * TOKENS, (int)TOKENS), true, s);
    __syncthreads();
    weigh<1>(s, v);
    size_t at = ((size_t)blockIdx.z * a.n_partials + partial) * a.n_heads + head0;
#pragma unroll
    for (int i = 0; i < 8 * NT; i += 2) {
        int h = head_of(i), c = value_of(i);
        if (head0 + h < a.n_heads && c < a.cache.kv_lora)
            *(float2 *)(a.v + (at + h) * a.cache.kv_lora + c) =
                make_float2(v[i / (4 * NT)][i / 4 % NT][i % 4], v[i / (4 * NT)][i / 4 % NT][i % 4 + 1]);
    }
    if (threadIdx.x < HEADS && head0 + threadIdx.x < a.n_heads)
        a.mz[at + threadIdx.x] = make_float2(s->max[threadIdx.x], s->sum[threadIdx.x]);
}

/* A block a row and head, a thread two values. */
static __global__ void k_attend_merge(attend_args a)
{
    td_begin();
    int row = a.row0 + blockIdx.y, head = blockIdx.x, c = threadIdx.x * 2;
    int n = (tokens_of(a, row).total + TOKENS - 1) / TOKENS;
    if (c >= a.cache.kv_lora) return;
    size_t at = (size_t)blockIdx.y * a.n_partials * a.n_heads + head;
    float2 mz = a.mz[at], v = *(const float2 *)(a.v + at * a.cache.kv_lora + c);
    float max = mz.x, sum = mz.y;
#pragma unroll 4
    for (int i = 1; i < n; i++) {
        at += a.n_heads;
        mz = a.mz[at];
        float2 part = *(const float2 *)(a.v + at * a.cache.kv_lora + c);
        float old, fresh;
        merge(&max, &sum, mz.x, mz.y, &old, &fresh);
        v.x = fmaf(part.x, fresh, v.x * old);
        v.y = fmaf(part.y, fresh, v.y * old);
    }
    *(uint32_t *)(a.ol + ((size_t)row * a.n_heads + head) * a.cache.kv_lora + c) = td_pack_bf16(v.x / sum, v.y / sum);
}

/* sum_v = v, or joined by the factors of softmax<true>(). */
static TD_DEVICE void join(const attend_block *s, bool is_first, const float v[2][NT][4], float sum_v[2][NT][4])
{
#pragma unroll
    for (int h = 0; h < 4; h++) { /* heads g, g + 8, g + 16, g + 24 */
        int head = h * 8 + threadIdx.x % 32 / 4;
        float old = s->old[head], fresh = s->fresh[head];
#pragma unroll
        for (int i = 0; i < 2 * NT; i++) {
            float *to = &sum_v[h / 2][i / 2][h % 2 * 2 + i % 2], part = v[h / 2][i / 2][h % 2 * 2 + i % 2];
            *to = is_first ? part : fmaf(part, fresh, *to * old);
        }
    }
}

/* A block a row and 32 heads, partials one after the other. The next one's rows are found during the scores, and asked
 * for before the softmax. */
static __global__ void __launch_bounds__(THREADS) k_attend_prompt(attend_args a)
{
    td_begin();
    extern __shared__ __align__(16) unsigned char smem[];
    attend_block *s = (attend_block *)smem;
    int row = a.row0 + blockIdx.x, head0 = blockIdx.y * HEADS;
    tokens u = tokens_of(a, row);
    float v[2][NT][4], sum_v[2][NT][4];
    codes c;
    bool fp8 = a.cache.format == TD_KV_FP8;
    int slot = a.segments[a.seg[row]].slot;
    find_rows(a, u, slot, 0, s);
    __syncthreads();
    if (fp8) ask_codes(a, s, &c);
    for (int first = 0; first < u.total; first += TOKENS) {
        bool more = first + TOKENS < u.total;
        if (fp8)
            put_codes(&c, s);
        else
            load_latents(a, s);
        __syncthreads();
        any_scores(a, row, head0, s);
        if (more) find_rows(a, u, slot, first + TOKENS, s);
        __syncthreads();
        if (fp8 && more) ask_codes(a, s, &c);
        softmax<true>(min(u.total - first, (int)TOKENS), first == 0, s);
        __syncthreads();
        weigh<TOKENS / 16>(s, v);
        join(s, first == 0, v, sum_v);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8 * NT; i += 2) {
        int h = head_of(i), c = value_of(i);
        float z = s->sum[h];
        if (head0 + h < a.n_heads && c < a.cache.kv_lora)
            *(uint32_t *)(a.ol + ((size_t)row * a.n_heads + head0 + h) * a.cache.kv_lora + c) = td_pack_bf16(
                sum_v[i / (4 * NT)][i / 4 % NT][i % 4] / z, sum_v[i / (4 * NT)][i / 4 % NT][i % 4 + 1] / z);
    }
}

/* Partials of the longest token list: all pools that may be listed, or a prefix that is not longer than they are. */
static size_t most_partials(int top_pools)
{
    return ((size_t)top_pools * TD_POOL + TD_POOL - 1 + TOKENS - 1) / TOKENS;
}

static void carve(td_arena *arena, size_t rows, size_t heads, int top_pools, attend_args *a)
{
    size_t split = rows < SPLIT_ROWS ? rows : (size_t)SPLIT_ROWS;
    a->n_partials = (int)most_partials(top_pools);
    a->q = (const td_bf16 *)td_cuda_take(arena, rows * heads * WIDTH * sizeof(td_bf16));
    a->ol = (td_bf16 *)td_cuda_take(arena, rows * heads * WIDTH * sizeof(td_bf16));
    a->mz = (float2 *)td_cuda_take(arena, split * (size_t)a->n_partials * heads * sizeof(float2));
    a->v = (float *)td_cuda_take(arena, split * (size_t)a->n_partials * heads * WIDTH * sizeof(float));
}

size_t td_cuda_attend_bytes(const td_dev_limits *limits)
{
    td_arena arena;
    attend_args a;
    td_arena_init_fixed(&arena, NULL, SIZE_MAX);
    carve(&arena, (size_t)limits->rows, (size_t)limits->n_heads, limits->index_topk / TD_POOL, &a);
    return arena.used_bytes;
}

cudaError_t td_cuda_attend_init(void)
{
    cudaError_t error =
        cudaFuncSetAttribute(k_attend_partial, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(attend_block));
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(k_attend_prompt, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(attend_block));
}

static void attend_rows(const td_cuda_dev *dev, attend_args *a, int n_rows)
{
    unsigned groups = td_ceil_div((size_t)a->n_heads, HEADS), rows = (unsigned)n_rows;
    if (n_rows > SPLIT_ROWS) {
        td_launch_spread(dev, k_attend_prompt, dim3(rows, groups), THREADS, sizeof(attend_block), *a);
        return;
    }
    td_launch_spread(dev, k_attend_partial, dim3((unsigned)a->n_partials, groups, rows), THREADS, sizeof(attend_block),
                     *a);
    td_launch(dev, k_attend_merge, dim3((unsigned)a->n_heads, rows), WIDTH / 2, 0, *a);
}

td_status td_cuda_dsa_attend(td_dev *base, const td_dsa_attend_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    const td_window *w = a->window;
    const td_kv_b *b = &a->kv_b;
    if (b->n_heads < 0 || b->n_heads > dev->limits.n_heads || b->kv_lora != a->cache.kv_lora || a->top_pools < 0 ||
        a->top_pools * TD_POOL > dev->limits.index_topk || w->n_rows > dev->limits.rows ||
        !td_cuda_kv_fits(w, &a->cache))
        return TD_EINVAL;
    if (!b->n_heads || !w->n_rows) return TD_OK;
    td_arena arena;
    attend_args s = { w->pos, w->seg, w->segments, a->cache, b->n_heads, a->top_pools, 0, a->scale, a->count, a->list };
    td_cuda_scratch(dev, &arena);
    carve(&arena, (size_t)w->n_rows, (size_t)b->n_heads, a->top_pools, &s);
    size_t heads = (size_t)b->n_heads, lora = (size_t)b->kv_lora, k_dim = (size_t)b->k_dim, v_dim = (size_t)b->v_dim;
    size_t key_bytes = td_cuda_weight_bytes(TD_W_BF16, b->kv_lora, b->k_dim);
    size_t head_bytes = key_bytes + td_cuda_weight_bytes(TD_W_BF16, b->v_dim, b->kv_lora);
    td_cuda_product_args keys = { TD_W_BF16,    b->data,   head_bytes,     b->kv_lora,
                                  b->k_dim,     w->n_rows, b->n_heads,     (const td_bf16 *)a->q,
                                  a->q_stride,  k_dim,     (td_bf16 *)s.q, NULL,
                                  heads * lora, lora };
    td_cuda_product_args values = { TD_W_BF16,       (const uint8_t *)b->data + key_bytes,
                                    head_bytes,      b->v_dim,
                                    b->kv_lora,      w->n_rows,
                                    b->n_heads,      s.ol,
                                    heads * lora,    lora,
                                    (td_bf16 *)a->o, NULL,
                                    heads * v_dim,   v_dim };
    td_status status = td_cuda_product(dev, &keys);
    if (status != TD_OK) return status;
    attend_rows(dev, &s, w->n_rows);
    status = td_cuda_launched(dev, "dsa_attend");
    return status == TD_OK ? td_cuda_product(dev, &values) : status;
}
