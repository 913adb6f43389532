/* Absorbed attention. Three steps: queries into latent space (a product a head with its key matrix, transposed),
 * attention over latents, outputs back (a product a head with its value matrix).
 *
 * The middle step cuts a row's token list into partials of 64 (list index, ascending). A block of eight warps takes one
 * row and up to 32 heads; l_t is scale_t times its codes (bf16 rows: scale_t = 1), a power of two:
 *   s_t = scale * scale_t * (q . codes_t)         tensor core; slices of 128 inputs from zero, added in order
 *   m = max s_t;  p_t = exp(s_t - m)
 *   z = sum of p                                  a tree of a lane's eight, then of eight lanes
 *   v = sum_t (p_t scale_t) codes_t               tensor core, 16 tokens a step; p as two parts, high and rest
 * Partials are merged in order from (-infinity, 0, 0):  M = max(m, m');  z = z exp(m - M) + z' exp(m' - M);  v alike.
 * Windows of up to 64 rows write partials and merge in a second kernel, prompts keep the running sums in registers: the
 * same operations in the same order. A row sums over its own tokens only.
 *
 * Codes are exact as fp16, so rows of fp8 make fp16 products: queries take a power of two a head for that, p scale_t one
 * a partial. bf16 rows make bf16 products. */
#include "ops/cuda/attend_steps.h"
#include "ops/cuda/weight.h"

enum {
    SPLIT_ROWS = 64, /* more: a prompt */
    MERGE_THREADS = 64,
    MERGE_AHEAD = 11
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
    partial *of;      /* [rows][partials][n_heads] */
    int n_partials;   /* entries a row has in v and of */
} attend_args;

static TD_DEVICE attend_tokens tokens_of(const attend_args &a, int row)
{
    int seen = a.pos[row] + 1, count = a.count[row];
    const int32_t *blocks = a.cache.blocks + (size_t)a.segments[a.seg[row]].slot * a.cache.blocks_cap;
    const int32_t *list = a.list + (size_t)row * a.top_pools;
    if (count < 0) return { list, blocks, 0, 0, seen }; /* the whole prefix */
    count = min(count, a.top_pools) * TD_POOL;
    return { list, blocks, count, seen - seen % TD_POOL, count + seen % TD_POOL };
}

/* What a window's block keeps of its partial. */
static TD_DEVICE void put_partial(const attend_args &a, size_t at, int head0, const float v[2][NT][4])
{
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int h = head_of(m, i), c = value_of(i);
            float4 *to = (float4 *)(a.v + (at + h) * a.cache.kv_lora + c);
            if (head0 + h >= a.n_heads || c >= a.cache.kv_lora) continue;
            to[0] = make_float4(v[m][0][i], v[m][1][i], v[m][2][i], v[m][3][i]);
            to[1] = make_float4(v[m][4][i], v[m][5][i], v[m][6][i], v[m][7][i]);
        }
}

/* A block a row, 32 heads and a partial. Everything but the queries is older than the kernel before (their product, which
 * waited for it), so codes are asked for before the wait. */
template <bool FP8> static __global__ void __launch_bounds__(THREADS, 2) k_attend_partial(attend_args a)
{
    extern __shared__ __align__(128) unsigned char smem[];
    attend_block *s = (attend_block *)smem;
    int row = a.row0 + blockIdx.z, head0 = blockIdx.y * HEADS, first = blockIdx.x * TOKENS;
    attend_tokens u = tokens_of(a, row);
    if (first >= u.total) return;
    uint32_t tile = td_shared_at(s->tile);
    attend_search found = {};
    attend_ask_pool(u, first, &found);
    attend_ask_block(u, first, &found);
    attend_gather<FP8>(a.cache, found, tile, td_shared_at(s->scale));
    td_begin();
    float factor = a.scale * LOG2_E;
    {
        queries q;
        load_queries(a.q + ((size_t)row * a.n_heads + head0) * a.cache.kv_lora, a.n_heads - head0, a.cache.kv_lora, &q);
        if (FP8) factor *= narrow_queries(&q, s);
        td_copy_wait<0>();
        __syncthreads();
        scores<FP8>(q, tile, s);
    }
    scales f = scales_of<FP8>(s->scale[0], factor);
    __syncthreads();
    partial r = softmax<FP8>(min(u.total - first, (int)TOKENS), f, s);
    __syncthreads();
    float v[2][NT][4];
    weigh<FP8>(s, tile, v);
    size_t at = ((size_t)blockIdx.z * a.n_partials + blockIdx.x) * a.n_heads + head0;
    put_partial(a, at, head0, v);
    int head = softmax_head();
    if (threadIdx.x % 8 == 0 && head0 + head < a.n_heads) a.of[at + head] = r;
}

/* Factors of all partials of a row and head, by the first warp; z of a partial in w. */
static TD_DEVICE void find_factors(const partial *of, int n_heads, int n, float4 *factor)
{
    int lane = threadIdx.x;
    float before = -INFINITY; /* largest maximum of the groups of 32 before */
    if (lane >= 32) return;
    for (int i = lane; i - lane < n; i += 32) {
        partial p = { -INFINITY, 0.0f, 1.0f };
        if (i < n) p = of[(size_t)i * n_heads];
        float most = p.max;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            float other = __shfl_up_sync(0xffffffffu, most, step);
            if (lane >= step) most = fmaxf(most, other);
        }
        float last = __shfl_up_sync(0xffffffffu, most, 1);
        float3 f = merge_factors(lane ? fmaxf(before, last) : before, p);
        if (i < n) factor[i] = make_float4(f.x, f.y, f.z, p.sum);
        before = fmaxf(before, __shfl_sync(0xffffffffu, most, 31));
    }
}

/* A block a row, head and 128 values, a thread two; MERGE_AHEAD partials at once, the next ones on their way. */
static __global__ void __launch_bounds__(MERGE_THREADS) k_attend_merge(attend_args a)
{
    td_begin();
    extern __shared__ __align__(128) unsigned char smem[];
    float4 *factor = (float4 *)smem;
    int row = a.row0 + blockIdx.y, head = blockIdx.x, c = (blockIdx.z * MERGE_THREADS + threadIdx.x) * 2;
    int n = (tokens_of(a, row).total + TOKENS - 1) / TOKENS;
    size_t first = (size_t)blockIdx.y * a.n_partials * a.n_heads + head, step = (size_t)a.n_heads * a.cache.kv_lora;
    const float *from = a.v + first * a.cache.kv_lora + min(c, a.cache.kv_lora - 2);
    const float2 none = make_float2(-0.0f, -0.0f); /* adding -0 changes nothing, not even a zero's sign */
    float2 next[MERGE_AHEAD], v = make_float2(0.0f, 0.0f);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < MERGE_AHEAD; j++) next[j] = j < n ? *(const float2 *)(from + j * step) : none;
    find_factors(a.of + first, a.n_heads, n, factor);
    __syncthreads();
    for (int i = 0; i < n; i += MERGE_AHEAD) {
        float2 part[MERGE_AHEAD];
#pragma unroll
        for (int j = 0; j < MERGE_AHEAD; j++) {
            part[j] = next[j];
            next[j] = i + MERGE_AHEAD + j < n ? *(const float2 *)(from + (i + MERGE_AHEAD + j) * step) : none;
        }
#pragma unroll
        for (int j = 0; j < MERGE_AHEAD; j++) {
            float4 f = i + j < n ? factor[i + j] : make_float4(1.0f, 0.0f, 0.0f, -0.0f);
            sum = fmaf(f.w, f.y, sum * f.x);
            v.x = fmaf(part[j].x, f.z, v.x * f.x);
            v.y = fmaf(part[j].y, f.z, v.y * f.x);
        }
    }
    if (c < a.cache.kv_lora)
        *(uint32_t *)(a.ol + ((size_t)row * a.n_heads + head) * a.cache.kv_lora + c) =
            td_pack_bf16(v.x / sum, v.y / sum);
}

static TD_DEVICE void join(const attend_block *s, const float v[2][NT][4], float sum_v[2][NT][4])
{
#pragma unroll
    for (int h = 0; h < 4; h++) {
        float2 f = s->factor[8 * h + threadIdx.x % 32 / 4];
#pragma unroll
        for (int i = 0; i < 2 * NT; i++) {
            float *to = &sum_v[h / 2][i / 2][h % 2 * 2 + i % 2], part = v[h / 2][i / 2][h % 2 * 2 + i % 2];
            *to = fmaf(part, f.y, *to * f.x);
        }
    }
}

static TD_DEVICE void put_outputs(const attend_args &a, const attend_block *s, int row, int head0,
                                  const float v[2][NT][4])
{
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int h = head_of(m, i), c = value_of(i);
            float z = s->sum[h];
            uint4 *to = (uint4 *)(a.ol + ((size_t)row * a.n_heads + head0 + h) * a.cache.kv_lora + c);
            if (head0 + h >= a.n_heads || c >= a.cache.kv_lora) continue;
            *to =
                make_uint4(td_pack_bf16(v[m][0][i] / z, v[m][1][i] / z), td_pack_bf16(v[m][2][i] / z, v[m][3][i] / z),
                           td_pack_bf16(v[m][4][i] / z, v[m][5][i] / z), td_pack_bf16(v[m][6][i] / z, v[m][7][i] / z));
        }
}

/* A block a row and 32 heads, partials one after the other. The next one's codes are on their way while one is worked
 * on, the addresses of the one after that too; bf16 rows fill both tiles and have to wait. */
template <bool FP8> static __global__ void __launch_bounds__(THREADS, 1) k_attend_prompt(attend_args a)
{
    td_begin();
    extern __shared__ __align__(128) unsigned char smem[];
    attend_block *s = (attend_block *)smem;
    int row = a.row0 + blockIdx.x, head0 = blockIdx.y * HEADS, head = softmax_head();
    attend_tokens u = tokens_of(a, row);
    uint32_t tile = td_shared_at(s->tile);
    attend_search found = {};
    queries q;
    float sum_v[2][NT][4] = {}, max = -INFINITY, sum = 0.0f, factor = a.scale * LOG2_E;
    attend_ask_pool(u, 0, &found);
    attend_ask_block(u, 0, &found);
    attend_ask_pool(u, TOKENS, &found);
    if (FP8) {
        attend_gather<FP8>(a.cache, found, tile, td_shared_at(s->scale));
        attend_ask_block(u, TOKENS, &found);
        attend_ask_pool(u, 2 * TOKENS, &found);
    }
    load_queries(a.q + ((size_t)row * a.n_heads + head0) * a.cache.kv_lora, a.n_heads - head0, a.cache.kv_lora, &q);
    if (FP8) factor *= narrow_queries(&q, s);
    for (int first = 0; first < u.total; first += TOKENS) {
        int now = FP8 ? first / TOKENS % 2 : 0;
        if (!FP8) {
            __syncthreads();
            attend_gather<FP8>(a.cache, found, tile, 0);
            attend_ask_block(u, first + TOKENS, &found);
            attend_ask_pool(u, first + 2 * TOKENS, &found);
        }
        td_copy_wait<0>();
        __syncthreads();
        scales of = scales_of<FP8>(s->scale[now], factor); /* here: behind the copies its loads would wait for them */
        scores<FP8>(q, tile + now * ATTEND_TILE_FP8, s);
        if (FP8 && first + TOKENS < u.total) {
            attend_gather<FP8>(a.cache, found, tile + (1 - now) * ATTEND_TILE_FP8, td_shared_at(s->scale[1 - now]));
            attend_ask_block(u, first + 2 * TOKENS, &found);
            attend_ask_pool(u, first + 3 * TOKENS, &found);
        }
        __syncthreads();
        float v[2][NT][4];
        partial r = softmax<FP8>(min(u.total - first, (int)TOKENS), of, s);
        float3 f = merge_factors(max, r);
        max = fmaxf(r.max, max);
        sum = fmaf(r.sum, f.y, sum * f.x);
        if (threadIdx.x % 8 == 0) s->factor[head] = make_float2(f.x, f.z);
        __syncthreads();
        weigh<FP8>(s, tile + now * ATTEND_TILE_FP8, v);
        join(s, v, sum_v);
    }
    if (threadIdx.x % 8 == 0) s->sum[head] = sum;
    __syncthreads();
    put_outputs(a, s, row, head0, sum_v);
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
    a->of = (partial *)td_cuda_take(arena, split * (size_t)a->n_partials * heads * sizeof(partial));
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
    const void *const kernels[] = { (const void *)k_attend_partial<false>, (const void *)k_attend_partial<true>,
                                    (const void *)k_attend_prompt<false>, (const void *)k_attend_prompt<true> };
    for (int i = 0; i < 4; i++) {
        cudaError_t error =
            cudaFuncSetAttribute(kernels[i], cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(attend_block));
        if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
}

template <bool FP8> static void attend_rows(const td_cuda_dev *dev, attend_args *a, int n_rows)
{
    unsigned groups = td_ceil_div((size_t)a->n_heads, HEADS), rows = (unsigned)n_rows;
    if (n_rows > SPLIT_ROWS) {
        td_launch_spread(dev, k_attend_prompt<FP8>, dim3(rows, groups), THREADS, sizeof(attend_block), *a);
        return;
    }
    unsigned blocks = (unsigned)a->n_partials * groups * rows;
    td_launch_as(blocks >= 2 * (unsigned)dev->n_sm, dev, k_attend_partial<FP8>,
                 dim3((unsigned)a->n_partials, groups, rows), THREADS,
                 sizeof(attend_block) - (FP8 ? ATTEND_TILE_FP8 : 0), *a);
    td_launch(dev, k_attend_merge, dim3((unsigned)a->n_heads, rows, WIDTH / 2 / MERGE_THREADS), MERGE_THREADS,
              (size_t)a->n_partials * sizeof(float4), *a);
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
    if (a->cache.format == TD_KV_FP8)
        attend_rows<true>(dev, &s, w->n_rows);
    else
        attend_rows<false>(dev, &s, w->n_rows);
    status = td_cuda_launched(dev, "dsa_attend");
    return status == TD_OK ? td_cuda_product(dev, &values) : status;
}
