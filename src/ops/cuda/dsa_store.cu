/* Rows of a window into the caches of a DSA layer. Two kernels: all latents, index keys and gates first, then the pools
 * whose last member is in the window, from the ring: a pool's bits do not depend on how its members came. Tables of the
 * window are older than the operation before (ops/dsa.h), so they and weights are read before the wait for it. */
#include "ops/cuda/kv.h"

enum { THREADS = 256, WARPS = THREADS / 32, HELD = 8 /* values of a row that a thread has in registers */ };

typedef struct store_args {
    const int32_t *pos, *seg;
    const td_segment *segments;
    td_dsa_cache cache;
    int q_lora;
    float rms_eps;
    const td_bf16 *proj;
    size_t proj_stride;
    const float *q_norm, *kv_norm, *k_norm_w, *k_norm_b, *ape;
    td_bf16 *c_q;
} store_args;

static TD_DEVICE float block_max(float x, float *scratch)
{
    x = td_warp_max(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) x = fmaxf(x, scratch[w]);
    return x;
}

/* x[0..width) of shared memory, already rounded, into a row of a plane; the whole block. */
static TD_DEVICE void store_row(td_kv_format format, void *plane, int64_t row, int width, const float *x,
                                float *scratch)
{
    uint8_t *to = (uint8_t *)plane + td_kv_bytes(format, width) * (size_t)row;
    if (format != TD_KV_FP8) {
        for (int i = threadIdx.x; i < width; i += THREADS) ((td_bf16 *)to)[i] = td_to_bf16(x[i]);
        return;
    }
    float max = 0.0f;
    for (int i = threadIdx.x; i < width; i += THREADS) max = fabsf(x[i]) > max ? fabsf(x[i]) : max;
    float scale = td_kv_scale(block_max(max, scratch)), inverse = 1.0f / scale; /* exact: a power of two */
    for (int i = threadIdx.x; i < width; i += THREADS) to[i] = td_f32_e4m3(x[i] * inverse);
    if (threadIdx.x < 4) ((uint32_t *)(to + width))[threadIdx.x] = threadIdx.x == 0 ? __float_as_uint(scale) : 0;
}

/* Values first + j * THREADS of a row of n; zeros beyond it. */
static TD_DEVICE void load_values(const td_bf16 *x, int first, int n, float v[HELD])
{
#pragma unroll
    for (int j = 0; j < HELD; j++) v[j] = first + j * THREADS < n ? td_load_bf16(x + first + j * THREADS) : 0.0f;
}

/* act(w act(x / rms)) of n values into y (act) or shared memory. Waits for x; weights are asked for before. */
static TD_DEVICE void norm_row(const td_bf16 *x, const float *w, int n, float eps, td_bf16 *y, float *shared,
                               float *scratch)
{
    const int CHUNK = HELD * THREADS;
    float v[HELD], weight[HELD], sum = 0.0f;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int i = threadIdx.x + j * THREADS;
        weight[j] = i < n ? w[i] : 0.0f;
    }
    td_begin();
    for (int first = threadIdx.x; first < n; first += CHUNK) {
        load_values(x, first, n, v);
#pragma unroll
        for (int j = 0; j < HELD; j++) sum = fmaf(v[j], v[j], sum); /* zeros change nothing */
    }
    float inverse = 1.0f / sqrtf(td_block_sum(sum, WARPS, scratch) / (float)n + eps);
    for (int first = threadIdx.x; first < n; first += CHUNK) {
        if (n > CHUNK) load_values(x, first, n, v);
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            int i = first + j * THREADS;
            if (i >= n) continue;
            float normed = td_round_bf16(v[j] * inverse) * (first < CHUNK ? weight[j] : w[i]);
            if (y)
                y[i] = td_to_bf16(normed);
            else
                shared[i] = td_round_bf16(normed);
        }
    }
}

/* The index key: LayerNorm over 128 with bias, eps 1e-6, biased variance; the gate follows it, in proj as in the ring. */
static TD_DEVICE void store_key(const store_args &a, const td_bf16 *key, td_bf16 *ring, float *scratch)
{
    int c = threadIdx.x;
    float weight = c < TD_HEAD ? a.k_norm_w[c] : 0.0f, bias = c < TD_HEAD ? a.k_norm_b[c] : 0.0f;
    td_begin();
    td_bf16 raw = key[c];
    float x = c < TD_HEAD ? td_load_bf16(&raw) : 0.0f;
    float mean = td_block_sum(x, WARPS, scratch) / TD_HEAD;
    x = c < TD_HEAD ? x - mean : 0.0f;
    float inverse = 1.0f / sqrtf(td_block_sum(x * x, WARPS, scratch) / TD_HEAD + 1e-6f);
    ring[c] = c < TD_HEAD ? td_to_bf16(fmaf(x * inverse, weight, bias)) : raw;
}

/* Three blocks a row: query, latent, index key. */
static __global__ void __launch_bounds__(THREADS) k_dsa_store(store_args a)
{
    __shared__ float latent[TD_KV_WIDTH], scratch[WARPS + 1];
    size_t r = blockIdx.x;
    int slot = a.segments[a.seg[r]].slot;
    int64_t pos = a.pos[r];
    const td_bf16 *proj = a.proj + r * a.proj_stride;
    if (blockIdx.y == 0) {
        norm_row(proj, a.q_norm, a.q_lora, a.rms_eps, a.c_q + r * a.q_lora, NULL, scratch);
    } else if (blockIdx.y == 1) {
        int64_t row = td_latent_row(a.cache, slot, pos);
        norm_row(proj + a.q_lora, a.kv_norm, a.cache.kv_lora, a.rms_eps, NULL, latent, scratch);
        __syncthreads();
        store_row(a.cache.format, a.cache.latents, row, a.cache.kv_lora, latent, scratch);
    } else {
        td_bf16 *ring = (td_bf16 *)a.cache.ring + td_ring_at(a.cache, slot, pos);
        store_key(a, proj + a.q_lora + a.cache.kv_lora, ring, scratch);
    }
}

/* K_c = act( sum_j act( act(softmax_j(gate_jc + ape_jc)) key_jc ) ), j ascending; a thread a channel. */
static __global__ void __launch_bounds__(THREADS) k_dsa_store_pools(store_args a)
{
    __shared__ float key[TD_HEAD], scratch[WARPS + 1];
    size_t r = blockIdx.x;
    int slot = a.segments[a.seg[r]].slot, c = threadIdx.x;
    int64_t pos = a.pos[r], pool = pos / TD_POOL;
    td_begin();
    if (pos % TD_POOL != TD_POOL - 1) return;
    if (c < TD_HEAD) {
        float e[TD_POOL], k[TD_POOL], max = 0.0f;
        for (int j = 0; j < TD_POOL; j++) {
            const td_bf16 *ring = (const td_bf16 *)a.cache.ring + td_ring_at(a.cache, slot, TD_POOL * pool + j);
            k[j] = td_load_bf16(ring + c);
            e[j] = td_load_bf16(ring + TD_HEAD + c) + a.ape[j * TD_HEAD + c];
            max = j && !(e[j] > max) ? max : e[j];
        }
        for (int j = 0; j < TD_POOL; j++) e[j] = td_expf(e[j] - max);
        float sum = ((e[0] + e[1]) + e[2]) + e[3];
        for (int j = 0; j < TD_POOL; j++) e[j] = td_round_bf16(td_round_bf16(e[j] / sum) * k[j]);
        key[c] = td_round_bf16(((e[0] + e[1]) + e[2]) + e[3]);
    }
    __syncthreads();
    store_row(a.cache.format, a.cache.pools, td_pool_row(a.cache, slot, pool), TD_HEAD, key, scratch);
}

td_status td_cuda_dsa_store(td_dev *base, const td_dsa_store_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    const td_window *w = a->window;
    if (a->q_lora < 1 || !td_cuda_kv_fits(w, &a->cache)) return TD_EINVAL;
    if (!w->n_rows) return TD_OK;
    store_args s = {
        w->pos,         w->seg,    w->segments, a->cache,    a->q_lora,   a->rms_eps, (const td_bf16 *)a->proj,
        a->proj_stride, a->q_norm, a->kv_norm,  a->k_norm_w, a->k_norm_b, a->ape,     (td_bf16 *)a->c_q
    };
    td_launch(dev, k_dsa_store, dim3((unsigned)w->n_rows, 3), THREADS, 0, s);
    td_launch(dev, k_dsa_store_pools, w->n_rows, THREADS, 0, s);
    return td_cuda_launched(dev, "dsa_store");
}
