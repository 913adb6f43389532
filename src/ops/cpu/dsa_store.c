/* Rows of a window into the caches of a DSA layer. Two passes: all latents, index keys and gates first, then the pools
 * whose last member is in the window, from the ring: a pool's bits do not depend on how its members came. */
#include "ops/cpu/kv.h"
#include "ops/math.h"
#include "ops/simd.h"

size_t td_kv_row_bytes(const td_dev *dev, td_kv_format format, int width)
{
    return format == TD_KV_FP8 ? (size_t)width + TD_KV_FP8_EXTRA : td_act_bytes(dev, (size_t)width);
}

/* scale = 2^(e - 8) for the largest value m * 2^e, 1/2 <= m < 1: codes reach 128 .. 256, nothing saturates. */
static float fp8_scale(const float *x, int width)
{
    float max = 0.0f;
    for (int i = 0; i < width; i++) max = fabsf(x[i]) > max ? fabsf(x[i]) : max;
    if (!(max >= 0x1p-117f)) return 1.0f;       /* zeros, and what would need a subnormal scale */
    uint32_t exponent = td_f32_bits(max) >> 23; /* biased; frexp's e is exponent - 126 */
    return td_bits_f32((exponent - 126 - 8 + 127) << 23);
}

void td_kv_store(const td_cpu_dev *dev, td_kv_format format, void *plane, int64_t row, int width, const float *x)
{
    uint8_t *to = (uint8_t *)plane + td_kv_row_bytes(&dev->base, format, width) * (size_t)row;
    if (format != TD_KV_FP8) {
        td_store_act(dev, (td_act *)(void *)to, 0, x, (size_t)width);
        return;
    }
    float scale = fp8_scale(x, width), inverse = 1.0f / scale; /* exact: a power of two */
    for (int i = 0; i < width; i++) to[i] = td_f32_e4m3(x[i] * inverse);
    uint32_t bits = td_f32_bits(scale);
    for (int i = 0; i < 4; i++) to[width + i] = (uint8_t)(bits >> 8 * i);
    memset(to + width + 4, 0, TD_KV_FP8_EXTRA - 4);
}

void td_kv_load(const td_cpu_dev *dev, td_kv_format format, const void *plane, int64_t row, int width, float *x)
{
    const uint8_t *from = (const uint8_t *)plane + td_kv_row_bytes(&dev->base, format, width) * (size_t)row;
    if (format != TD_KV_FP8) {
        td_load_act(dev, (const td_act *)(const void *)from, 0, x, (size_t)width);
        return;
    }
    float scale = td_kv_scale(from, width);
    for (int i = 0; i < width; i += TD_LANES) td_v16_store(x + i, td_kv_values(TD_KV_ROW_FP8, from, (size_t)i, scale));
}

bool td_kv_window_fits(const td_window *window, const td_dsa_cache *cache)
{
    if (cache->kv_lora < 16 || cache->kv_lora > TD_KV_WIDTH_MAX || cache->kv_lora % 16 || cache->ring_rows < 1)
        return false;
    for (int i = 0; i < window->n_segments; i++) {
        const td_segment *s = window->host_segments + i;
        if (s->n_rows < 0 || s->first_row < 0 || s->n_rows > window->n_rows - s->first_row) return false;
        if (s->n_rows && (s->pos < 0 || s->slot < 0 || s->n_rows + TD_POOL - 1 > cache->ring_rows ||
                          ((int64_t)s->pos + s->n_rows - 1) / TD_BLOCK >= cache->blocks_cap))
            return false;
    }
    return true;
}

typedef struct store_job {
    td_cpu_dev *dev;
    const td_dsa_store_args *a;
} store_job;

/* LayerNorm over 128 with bias, eps 1e-6, biased variance. */
static void index_key(const store_job *job, float x[TD_HEAD])
{
    float mean = td_sum(x, TD_HEAD) / TD_HEAD;
    for (int c = 0; c < TD_HEAD; c++) x[c] -= mean;
    float inverse = 1.0f / sqrtf(td_dot(x, x, TD_HEAD) / TD_HEAD + 1e-6f);
    for (int c = 0; c < TD_HEAD; c++) x[c] = fmaf(x[c] * inverse, job->a->k_norm_w[c], job->a->k_norm_b[c]);
}

static void store_rows(void *ctx, int thread, int begin, int end)
{
    const store_job *job = (const store_job *)ctx;
    const td_dsa_store_args *a = job->a;
    const td_window *window = a->window;
    td_rmsnorm_args norm = { .n_rows = 1, .dim = a->q_lora, .eps = a->rms_eps, .w = a->q_norm };
    (void)thread;
    for (int r = begin; r < end; r++) {
        const td_segment *segment = window->segments + window->seg[r];
        size_t at = (size_t)r * a->proj_stride;
        norm.x = td_act_at(&job->dev->base, a->proj, at);
        norm.y = td_act_at(&job->dev->base, a->c_q, (size_t)r * (size_t)a->q_lora);
        td_rmsnorm_one(job->dev, &norm, 0);
        at += (size_t)a->q_lora;
        float latent[TD_KV_WIDTH_MAX], key[TD_HEAD], gate[TD_HEAD];
        td_rmsnorm_row(job->dev, a->proj, at, a->kv_norm, (size_t)a->cache.kv_lora, a->rms_eps, latent);
        td_kv_store(job->dev, a->cache.format, a->cache.latents,
                    td_kv_latent_row(&a->cache, segment->slot, window->pos[r]), a->cache.kv_lora, latent);
        at += (size_t)a->cache.kv_lora;
        td_load_act(job->dev, a->proj, at, key, TD_HEAD);
        td_load_act(job->dev, a->proj, at + TD_HEAD, gate, TD_HEAD);
        index_key(job, key);
        size_t ring = td_kv_ring_at(&a->cache, segment->slot, window->pos[r]);
        td_store_act(job->dev, a->cache.ring, ring, key, TD_HEAD);
        td_store_act(job->dev, a->cache.ring, ring + TD_HEAD, gate, TD_HEAD);
    }
}

/* K_c = act( sum_j act( act(softmax_j(gate_jc + ape_jc)) key_jc ) ), j ascending. */
static void complete_pool(const store_job *job, int slot, int64_t pool)
{
    const td_dsa_cache *cache = &job->a->cache;
    float e[TD_POOL][TD_HEAD], key[TD_POOL][TD_HEAD], sum[TD_HEAD], max[TD_HEAD];
    for (int j = 0; j < TD_POOL; j++) {
        size_t ring = td_kv_ring_at(cache, slot, TD_POOL * pool + j);
        td_load_act(job->dev, cache->ring, ring, key[j], TD_HEAD);
        td_load_act(job->dev, cache->ring, ring + TD_HEAD, e[j], TD_HEAD);
        for (int c = 0; c < TD_HEAD; c++) e[j][c] += job->a->ape[j * TD_HEAD + c];
        for (int c = 0; c < TD_HEAD; c++) max[c] = j && !(e[j][c] > max[c]) ? max[c] : e[j][c];
    }
    for (int j = 0; j < TD_POOL; j++)
        for (int c = 0; c < TD_HEAD; c++) e[j][c] = td_expf(e[j][c] - max[c]);
    for (int c = 0; c < TD_HEAD; c++) sum[c] = ((e[0][c] + e[1][c]) + e[2][c]) + e[3][c];
    for (int j = 0; j < TD_POOL; j++) {
        for (int c = 0; c < TD_HEAD; c++) e[j][c] = e[j][c] / sum[c];
        td_round_act(job->dev, e[j], TD_HEAD);
        for (int c = 0; c < TD_HEAD; c++) e[j][c] *= key[j][c];
        td_round_act(job->dev, e[j], TD_HEAD);
    }
    for (int c = 0; c < TD_HEAD; c++) sum[c] = ((e[0][c] + e[1][c]) + e[2][c]) + e[3][c];
    td_round_act(job->dev, sum, TD_HEAD);
    td_kv_store(job->dev, cache->format, cache->pools, td_kv_pool_row(cache, slot, pool), TD_HEAD, sum);
}

static void complete_pools(void *ctx, int thread, int begin, int end)
{
    const store_job *job = (const store_job *)ctx;
    const td_window *window = job->a->window;
    (void)thread;
    for (int r = begin; r < end; r++)
        if (window->pos[r] % TD_POOL == TD_POOL - 1)
            complete_pool(job, window->segments[window->seg[r]].slot, window->pos[r] / TD_POOL);
}

td_status td_cpu_dsa_store(td_dev *dev, const td_dsa_store_args *a)
{
    if (a->q_lora < 1 || !td_kv_window_fits(a->window, &a->cache)) return TD_EINVAL;
    store_job job = { td_cpu(dev), a };
    td_cpu_for(job.dev, a->window->n_rows, 4.0 * (a->q_lora + a->cache.kv_lora + 256), store_rows, &job);
    td_cpu_for(job.dev, a->window->n_rows, 1024.0, complete_pools, &job);
    return TD_OK;
}
