/* A model's life, and what a slot is told from outside. The work is in trunk.c and the files of the blocks. */
#include "model/builder.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Layout, memory, weights; what was taken before a failure is given back by td_model_destroy. */
static td_status build(td_model *m, const td_checkpoint *ck, td_progress_fn *progress, void *user, td_error *err)
{
    td_model_plan plan;
    TD_TRY(td_model_plan_bytes(m->dev, m->ops, ck, &m->options, &plan, err));
    m->plan = plan;
    TD_TRY(td_model_share_link(m, err));
    TD_TRY(td_memory_create(m, plan.total_bytes - plan.shared_bytes, plan.shared_bytes, err));
    td_arena mem, shared;
    td_arena_init_fixed(&mem, m->memory, plan.total_bytes - plan.shared_bytes);
    td_arena_init_fixed(&shared, m->shared, plan.shared_bytes);
    TD_TRY(td_model_layout(m, ck, &mem, &shared, err));
    td_check(memcmp(&plan, &m->plan, sizeof plan) == 0);
    size_t state_bytes = m->gather_state ? 4 * sizeof *m->gather_state : 0;
    td_status status = td_dev_fill(m->dev, m->gather_state, 0, state_bytes);
    if (status) return td_fail(err, status, "model: counters of gathers: %s", td_status_text(status));
    return td_model_load(m, ck, progress, user, err);
}

td_status td_model_create(td_dev *dev, const td_ops *ops, td_link *link, const td_checkpoint *checkpoint,
                          const td_model_options *options, td_progress_fn *progress, void *user, td_model **out,
                          td_error *err)
{
    if (!options->loopback && (td_link_rank(link) != options->rank || td_link_world(link) != options->world))
        return td_fail(err, TD_EINVAL, "model: rank %d of %d, but the link is rank %d of %d", options->rank,
                       options->world, td_link_rank(link), td_link_world(link));
    TD_TRY(td_checkpoint_verify(checkpoint, err));
    td_model *m = (td_model *)calloc(1, sizeof *m);
    if (!m) return td_fail(err, TD_ENOMEM, "model: no memory");
    td_status status = td_model_init(m, dev, ops, td_checkpoint_config(checkpoint), options, err);
    if (!status) {
        m->link = link;
        td_arena_init(&m->meta, 0);
        status = build(m, checkpoint, progress, user, err);
    }
    if (status) {
        td_model_destroy(m);
        return status;
    }
    *out = m;
    return TD_OK;
}

void td_model_destroy(td_model *m)
{
    if (!m) return;
    if (m->dev) { /* else its options were refused */
        td_model_abandon(m);
        (void)td_dev_sync(m->dev, NULL); /* a lost device says so to whoever uses it next */
        td_model_graphs_destroy(m);
        td_model_unshare_link(m);
        td_memory_destroy(m);
    }
    td_arena_deinit(&m->meta);
    for (int i = 0; i < TD_SHARDS; i++) free(m->host_logits[i]);
    free(m->trace_x);
    free(m);
}

const td_config *td_model_config(const td_model *m)
{
    return &m->config;
}

td_dev *td_model_dev(const td_model *m)
{
    return m->dev;
}

const td_ops *td_model_ops(const td_model *m)
{
    return m->ops;
}

/* ---- slots ---- */

static td_model_slot *slot_of(td_model *m, int slot)
{
    td_check(slot >= 0 && slot < m->options.n_slots);
    return &m->slots[slot];
}

void td_model_slot_reset(td_model *m, int slot)
{
    *slot_of(m, slot) = (td_model_slot){ 0 };
    for (int i = 0; i < m->n_loaded; i++) {
        if (m->layers[i].is_dsa) continue;
        for (int own = 0; own < m->n_own; own++) {
            td_model_kda_shard *shard = &m->layers[i].kda.shard[own];
            size_t width = (size_t)shard->n_heads * TD_HEAD, at = (size_t)slot * 2; /* parity 0 */
            size_t conv = (TD_CONV - 1) * 3 * width;
            float *state = shard->state.state + at * width * TD_HEAD;
            td_dev_fill(m->dev, state, 0, width * TD_HEAD * sizeof(float));
            td_dev_fill(m->dev, td_act_at(m->dev, shard->state.conv, at * conv), 0, td_act_bytes(m->dev, conv));
        }
    }
}

int32_t td_model_slot_pos(const td_model *m, int slot)
{
    return slot_of((td_model *)m, slot)->pos;
}

void td_model_slot_blocks(td_model *m, int slot, const int32_t *blocks, int n_blocks)
{
    td_check(n_blocks >= 0 && n_blocks <= m->blocks_cap);
    for (int i = 0; i < n_blocks; i++) td_check(blocks[i] >= 0 && blocks[i] < m->options.n_blocks);
    slot_of(m, slot)->n_blocks = n_blocks;
    memcpy(m->blocks + (size_t)slot * (size_t)m->blocks_cap, blocks, (size_t)n_blocks * sizeof *blocks);
    m->blocks_changed = true;
}

static td_status copy_rows(td_dev *dev, void *plane, int32_t from, int32_t to, int block_rows, int n_rows,
                           size_t row_bytes)
{
    size_t block_bytes = (size_t)block_rows * row_bytes;
    return td_dev_copy(dev, (char *)plane + (size_t)to * block_bytes, (const char *)plane + (size_t)from * block_bytes,
                       (size_t)n_rows * row_bytes);
}

td_status td_model_block_copy(td_model *m, int32_t from, int32_t to, int n_tokens)
{
    int32_t n_blocks = m->options.n_blocks;
    if (from < 0 || from >= n_blocks || to < 0 || to >= n_blocks || from == to || n_tokens < 0 || n_tokens > TD_BLOCK)
        return TD_EINVAL;
    for (int i = 0; i < m->n_loaded; i++) {
        if (!m->layers[i].is_dsa) continue;
        const td_dsa_cache *cache = &m->layers[i].dsa.cache;
        TD_TRY(copy_rows(m->dev, cache->latents, from, to, TD_BLOCK, n_tokens,
                         td_kv_row_bytes(m->dev, cache->format, cache->kv_lora)));
        TD_TRY(copy_rows(m->dev, cache->pools, from, to, TD_BLOCK / TD_POOL, n_tokens / TD_POOL,
                         td_kv_row_bytes(m->dev, cache->format, TD_HEAD)));
    }
    return TD_OK;
}

/* ---- what a forward leaves ---- */

const float *td_model_logits_device(const td_model *m, int shard)
{
    int own = shard - m->first_own;
    return own >= 0 && own < m->n_own ? m->s.logits[own] : NULL;
}

/* The logits of an own shard where the host can read and write them. */
static float *on_host(td_model *m, int own)
{
    size_t row_bytes = (size_t)m->vocab_shard * sizeof(float);
    if (td_dev_backend(m->dev) == TD_CPU) return m->s.logits[own];
    if (!m->host_logits[own]) m->host_logits[own] = (float *)malloc((size_t)m->options.n_logits * row_bytes);
    float *host = m->host_logits[own];
    bool copied = host && !td_dev_download(m->dev, host, m->s.logits[own], (size_t)m->n_logits * row_bytes);
    return copied ? host : NULL;
}

/* Where the vocabulary is cut unevenly, the columns that a shard lacks are -inf. */
const float *td_model_logits(td_model *m, int shard)
{
    int own = shard - m->first_own;
    float *logits = own >= 0 && own < m->n_own ? on_host(m, own) : NULL;
    size_t columns = (size_t)m->vocab_shard;
    for (size_t r = 0; logits && r < (size_t)m->n_logits; r++)
        for (size_t c = (size_t)m->head[own].out; c < columns; c++) logits[r * columns + c] = -INFINITY;
    return logits;
}

int td_model_vocab_shard(const td_model *m)
{
    return m->vocab_shard;
}

int td_model_n_logits(const td_model *m)
{
    return m->n_logits;
}

td_status td_model_hidden(const td_model *m, int segment, int from_row, int n_rows, float *out)
{
    const td_window *w = &m->window.w;
    if (!m->options.mtp || !m->have_window || segment < 0 || segment >= w->n_segments) return TD_EINVAL;
    const td_segment *s = &w->host_segments[segment];
    if (from_row < 0 || n_rows < 0 || from_row + n_rows > s->n_rows) return TD_EINVAL;
    size_t dim = (size_t)m->config.hidden, first = (size_t)(s->first_row + from_row);
    td_act_to_f32(m->dev, out, td_model_act(m, m->s.final, first * dim), (size_t)n_rows * dim);
    return TD_OK;
}

void td_model_trace(td_model *m, const td_trace *trace)
{
    m->trace = trace ? *trace : (td_trace){ 0 };
    if ((!m->trace.layer && !m->trace.mlp_input) || m->trace_x) return;
    m->trace_x = (float *)malloc((size_t)m->rows_cap * TD_STREAMS * (size_t)m->config.hidden * sizeof(float));
    td_check(m->trace_x != NULL);
}
