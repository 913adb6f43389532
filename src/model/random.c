/* See random.h. Sizes are those of a model that runs on the stand-in weights: latents and index keys are normed, so
 * their values have deviation 1; states of KDA stay far below that. */
#include "model/random.h"

#include "model/internal.h"
#include "ops/random.h"

#define STATE_DEVIATION 0.05f

static td_status fill(td_model *m, td_random_kind kind, uint64_t *seed, float scale, void *out, size_t n)
{
    td_random_args args = { .kind = kind, .seed = (*seed)++, .scale = scale, .n = n, .out = out };
    return td_random_fill(m->dev, &args);
}

static td_status fill_act(td_model *m, uint64_t *seed, td_act *base, size_t at, size_t n)
{
    td_random_kind kind = td_dev_exact_fp32(m->dev) ? TD_RANDOM_F32 : TD_RANDOM_BF16;
    return fill(m, kind, seed, 1.0f, td_act_at(m->dev, base, at), n);
}

static td_status fill_plane(td_model *m, td_kv_format format, uint64_t *seed, void *plane, size_t n_rows, int width)
{
    if (format == TD_KV_ACT) return fill_act(m, seed, (td_act *)plane, 0, n_rows * (size_t)width);
    td_random_args args = {
        .kind = TD_RANDOM_KV_FP8, .seed = (*seed)++, .scale = 1.0f, .width = width, .n = n_rows, .out = plane
    };
    return td_random_fill(m->dev, &args);
}

td_status td_model_random_pool(td_model *m, uint64_t seed)
{
    size_t n_tokens = (size_t)m->options.n_blocks * TD_BLOCK;
    for (int i = 0; i < m->n_loaded; i++) {
        if (!m->layers[i].is_dsa) continue;
        const td_dsa_cache *cache = &m->layers[i].dsa.cache;
        TD_TRY(fill_plane(m, cache->format, &seed, cache->latents, n_tokens, cache->kv_lora));
        TD_TRY(fill_plane(m, cache->format, &seed, cache->pools, n_tokens / TD_POOL, TD_HEAD));
    }
    return TD_OK;
}

static td_status fill_kda(td_model *m, const td_model_kda *kda, size_t slot, uint64_t *seed)
{
    for (int own = 0; own < m->n_own; own++) {
        const td_model_kda_shard *shard = &kda->shard[own];
        size_t width = (size_t)shard->n_heads * TD_HEAD, conv = (TD_CONV - 1) * 3 * width; /* parity 0 of two */
        TD_TRY(fill(m, TD_RANDOM_F32, seed, STATE_DEVIATION, shard->state.state + 2 * slot * width * TD_HEAD,
                    width * TD_HEAD));
        TD_TRY(fill_act(m, seed, shard->state.conv, 2 * slot * conv, conv));
    }
    return TD_OK;
}

td_status td_model_random_slot(td_model *m, int slot, int32_t pos, uint64_t seed)
{
    if (slot < 0 || slot >= m->options.n_slots || pos < 0 || pos > m->options.context_tokens) return TD_EINVAL;
    m->slots[slot].pos = pos;
    m->slots[slot].parity = 0;
    for (int i = 0; i < m->n_loaded; i++) {
        const td_model_layer *layer = &m->layers[i];
        size_t ring = (size_t)layer->dsa.cache.ring_rows * 2 * TD_HEAD;
        if (layer->is_dsa)
            TD_TRY(fill_act(m, &seed, layer->dsa.cache.ring, (size_t)slot * ring, ring));
        else
            TD_TRY(fill_kda(m, &layer->kda, (size_t)slot, &seed));
    }
    return TD_OK;
}
