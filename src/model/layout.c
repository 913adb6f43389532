/* Every byte of the model, in one order: weights (weights.c), caches, tables, activations of a window. td_model_layout
 * runs with a counting arena for the plan and with the real one for the model; the sums by purpose go to m->plan. */
#include "model/builder.h"

#include <stdlib.h>
#include <string.h>

/* ---- options ---- */

static td_status check_options(const td_config *config, const td_model_options *o, td_error *err)
{
    if (o->world < 1 || o->world > TD_SHARDS || o->rank < 0 || o->rank >= o->world)
        return td_fail(err, TD_EINVAL, "rank %d of %d: 1 or %d ranks", o->rank, o->world, TD_SHARDS);
    if (o->n_slots < 1 || o->n_slots > 1024) return td_fail(err, TD_EINVAL, "slots %d: 1 to 1024", o->n_slots);
    if (o->n_blocks < 1 || o->n_blocks > INT32_MAX / TD_BLOCK)
        return td_fail(err, TD_EINVAL, "pool blocks %d: 1 to %d", o->n_blocks, INT32_MAX / TD_BLOCK);
    if (o->chunk_rows < TD_GRID || o->chunk_rows % TD_GRID || o->chunk_rows > 65536)
        return td_fail(err, TD_EINVAL, "chunk rows %d: a multiple of %d up to 65536", o->chunk_rows, TD_GRID);
    if (o->context_tokens < 1 || o->context_tokens > config->max_positions)
        return td_fail(err, TD_EINVAL, "context of %lld tokens: 1 to max_position_embeddings, %d",
                       (long long)o->context_tokens, config->max_positions);
    if (o->n_logits < 0 || o->n_logits > o->chunk_rows + TD_WINDOW_MAX)
        return td_fail(err, TD_EINVAL, "logits rows %d: at most a window, %d", o->n_logits,
                       o->chunk_rows + TD_WINDOW_MAX);
    if (o->mtp && !config->n_mtp) return td_fail(err, TD_EINVAL, "the checkpoint has no MTP layer");
    return TD_OK;
}

td_status td_model_init(td_model *m, td_dev *dev, const td_ops *ops, const td_config *config,
                        const td_model_options *options, td_error *err)
{
    TD_TRY(check_options(config, options, err));
    td_range own = td_rank_shards(options->rank, options->world);
    *m = (td_model){ .dev = dev, .ops = ops, .config = *config, .options = *options };
    if (!m->options.n_logits) m->options.n_logits = TD_WINDOW_MAX;
    m->first_own = (int)own.begin;
    m->n_own = (int)td_range_n(own);
    for (int i = 0; i < m->n_own; i++) td_shard_of(config, m->first_own + i, TD_SHARDS, &m->own[i]);
    m->rows_cap = options->chunk_rows + TD_WINDOW_MAX;
    td_shard first;
    td_shard_of(config, 0, TD_SHARDS, &first);
    m->vocab_shard = (int)td_range_n(first.vocab);
    m->top_pools = config->index_topk / TD_POOL;
    m->blocks_cap = (int)((options->context_tokens + TD_BLOCK - 1) / TD_BLOCK);
    m->n_loaded = config->n_layers + (options->mtp ? 1 : 0);
    return TD_OK;
}

void td_model_dev_limits(const td_config *config, const td_model_options *options, td_dev_limits *limits)
{
    td_shard shard;
    td_shard_of(config, 0, TD_SHARDS, &shard);
    int64_t heads = td_range_n(shard.heads), kda_heads = td_range_n(shard.kda_heads);
    *limits = (td_dev_limits){ .rows = options->chunk_rows + TD_WINDOW_MAX,
                               .dim = config->hidden,
                               .n_heads = (int)(heads > kda_heads ? heads : kda_heads),
                               .n_experts = config->n_experts,
                               .top_k = config->top_k,
                               .expert_width = (int)td_range_n(shard.moe),
                               .index_heads = config->index_heads,
                               .index_topk = config->index_topk,
                               .vocab_shard = (int)td_range_n(shard.vocab),
                               .context_tokens = options->context_tokens };
}

/* ---- caches ---- */

static bool on_cpu(const td_model *m)
{
    return td_dev_backend(m->dev) == TD_CPU;
}

static td_act *take_act(td_builder *b, size_t n)
{
    return (td_act *)td_builder_take(b, td_act_bytes(b->dev, n));
}

static float *take_f32(td_builder *b, size_t n)
{
    return (float *)td_builder_take(b, n * sizeof(float));
}

static int32_t *take_i32(td_builder *b, size_t n)
{
    return (int32_t *)td_builder_take(b, n * sizeof(int32_t));
}

/* From what host and device both see. */
static void *take_shared(td_builder *b, size_t n_bytes)
{
    td_arena *device = b->mem;
    b->mem = b->shared;
    void *p = td_builder_take(b, n_bytes);
    b->mem = device;
    return p;
}

static int32_t *take_table(td_builder *b, size_t n)
{
    return (int32_t *)take_shared(b, n * sizeof(int32_t));
}

static void layout_kda_caches(td_builder *b, td_model *m, td_model_kda *kda)
{
    for (int i = 0; i < m->n_own; i++) {
        td_model_kda_shard *shard = &kda->shard[i];
        size_t width = (size_t)shard->n_heads * TD_HEAD, slots = (size_t)m->options.n_slots;
        b->account = &m->plan.state_bytes;
        shard->state.state = take_f32(b, slots * 2 * width * TD_HEAD);
        shard->state.conv = take_act(b, slots * 2 * (TD_CONV - 1) * 3 * width);
        b->account = &m->plan.scratch_bytes;
        shard->saved.k = take_f32(b, TD_WINDOW_MAX * width);
        shard->saved.v = take_f32(b, TD_WINDOW_MAX * width);
        shard->saved.alpha = take_f32(b, TD_WINDOW_MAX * width);
        shard->saved.beta = take_f32(b, (size_t)TD_WINDOW_MAX * (size_t)shard->n_heads);
        shard->saved.raw = take_act(b, TD_WINDOW_MAX * 3 * width);
        m->plan.state_bytes_per_slot +=
            2 * width * TD_HEAD * sizeof(float) + td_act_bytes(b->dev, 2 * (TD_CONV - 1) * 3 * width);
    }
}

static void layout_dsa_caches(td_builder *b, td_model *m, td_model_dsa *dsa)
{
    const td_config *c = &m->config;
    td_dsa_cache *cache = &dsa->cache;
    size_t latent_bytes = td_kv_row_bytes(b->dev, m->options.kv, c->kv_lora);
    size_t pool_bytes = td_kv_row_bytes(b->dev, m->options.kv, TD_HEAD), n_blocks = (size_t)m->options.n_blocks;
    cache->format = m->options.kv;
    cache->ring_rows =
        m->rows_cap + TD_POOL; /* rows_cap % 4 == 0; the three earlier members of a pool survive a window */
    cache->blocks = m->device_blocks;
    cache->blocks_cap = m->blocks_cap;
    cache->kv_lora = c->kv_lora;
    b->account = &m->plan.kv_bytes;
    cache->latents = td_builder_take(b, n_blocks * TD_BLOCK * latent_bytes);
    cache->pools = td_builder_take(b, n_blocks * (TD_BLOCK / TD_POOL) * pool_bytes);
    m->plan.kv_bytes_per_token += latent_bytes + pool_bytes / TD_POOL;
    b->account = &m->plan.state_bytes;
    size_t ring = (size_t)cache->ring_rows * 2 * TD_HEAD;
    cache->ring = take_act(b, (size_t)m->options.n_slots * ring);
    m->plan.state_bytes_per_slot += td_act_bytes(b->dev, ring);
}

static void layout_caches(td_builder *b, td_model *m)
{
    b->account = &m->plan.state_bytes;
    size_t n_entries = (size_t)m->options.n_slots * (size_t)m->blocks_cap;
    m->blocks = take_table(b, n_entries);
    m->device_blocks = on_cpu(m) ? m->blocks : take_i32(b, n_entries);
    for (int i = 0; i < m->n_loaded; i++) {
        td_model_layer *layer = &m->layers[i];
        if (layer->is_dsa)
            layout_dsa_caches(b, m, &layer->dsa);
        else
            layout_kda_caches(b, m, &layer->kda);
    }
}

/* ---- a window ---- */

/* The tables in one piece: base NULL counts. */
static size_t carve(const td_model *m, void *base, td_model_tables *t)
{
    td_arena arena;
    size_t rows = (size_t)m->rows_cap;
    td_arena_init_fixed(&arena, base, SIZE_MAX);
    t->ids = (int32_t *)td_arena_take(&arena, rows * sizeof *t->ids, 64);
    t->pos = (int32_t *)td_arena_take(&arena, rows * sizeof *t->pos, 64);
    t->seg = (int32_t *)td_arena_take(&arena, rows * sizeof *t->seg, 64);
    t->segments = (td_segment *)td_arena_take(&arena, TD_SEGMENTS_MAX * sizeof *t->segments, 64);
    t->keep = (int32_t *)td_arena_take(&arena, TD_SEGMENTS_MAX * sizeof *t->keep, 64);
    t->wanted = (int32_t *)td_arena_take(&arena, (size_t)m->options.n_logits * sizeof *t->wanted, 64);
    return arena.used_bytes;
}

static void layout_window(td_builder *b, td_model *m, td_model_window *window)
{
    window->tables_bytes = carve(m, NULL, &window->host);
    void *host = take_shared(b, window->tables_bytes);
    void *device = on_cpu(m) ? host : td_builder_take(b, window->tables_bytes);
    carve(m, host, &window->host);
    carve(m, device, &window->device);
    window->w = (td_window){ .ids = window->device.ids,
                             .pos = window->device.pos,
                             .seg = window->device.seg,
                             .segments = window->device.segments,
                             .host_segments = window->host.segments };
}

static void layout_kda_scratch(td_builder *b, td_model *m)
{
    size_t rows = (size_t)m->rows_cap, own = 0, shard = 0;
    for (int i = 0; i < m->n_own; i++) {
        size_t heads = (size_t)td_range_n(m->own[i].kda_heads);
        own += heads;
        if (heads > shard) shard = heads;
    }
    m->s.kda_proj = take_act(b, rows * td_model_kda_columns(own));
    m->s.kda_f = take_act(b, rows * shard * TD_HEAD);
    m->s.kda_gate = take_act(b, rows * shard * TD_HEAD);
    m->s.kda_y = take_act(b, rows * shard * TD_HEAD);
}

static void layout_dsa_scratch(td_builder *b, td_model *m)
{
    const td_config *c = &m->config;
    size_t rows = (size_t)m->rows_cap, own = 0, shard = 0;
    for (int i = 0; i < m->n_own; i++) {
        size_t heads = (size_t)td_range_n(m->own[i].heads);
        own += heads;
        if (heads > shard) shard = heads;
    }
    m->s.dsa_proj = take_act(b, rows * (size_t)(c->q_lora + c->kv_lora + 2 * TD_HEAD));
    m->s.dsa_c_q = take_act(b, rows * (size_t)c->q_lora);
    m->s.dsa_q = take_act(b, rows * own * (size_t)c->qk_dim);
    m->s.dsa_o = take_act(b, rows * shard * (size_t)c->v_dim);
    m->s.index_q = take_act(b, rows * (size_t)c->index_heads * TD_HEAD);
    m->s.index_weights = take_f32(b, rows * (size_t)c->index_heads);
    m->s.pool_count = take_i32(b, rows);
    m->s.pool_list = take_i32(b, rows * (size_t)m->top_pools);
}

static void layout_mlp_scratch(td_builder *b, td_model *m)
{
    size_t rows = (size_t)m->rows_cap, width = 0;
    for (int i = 0; i < m->n_own; i++) {
        size_t dense = (size_t)td_range_n(m->own[i].intermediate), shared = (size_t)td_range_n(m->own[i].shared);
        if (dense > width) width = dense;
        if (shared > width) width = shared;
    }
    m->s.gate_up = take_act(b, rows * 2 * width);
    m->s.mlp_a = take_act(b, rows * width);
    m->s.expert_ids = take_i32(b, rows * (size_t)m->config.top_k);
    m->s.expert_weights = take_f32(b, rows * (size_t)m->config.top_k);
}

/* The blocks' buffers, one kind over the other: a window runs one block at a time. */
static void layout_blocks_scratch(td_builder *b, td_model *m)
{
    void (*const kinds[])(td_builder *, td_model *) = { layout_kda_scratch, layout_dsa_scratch, layout_mlp_scratch };
    size_t start = b->mem->used_bytes, account = m->plan.scratch_bytes, most = start, most_account = account;
    for (int i = 0; i < 3; i++) {
        b->mem->used_bytes = start;
        m->plan.scratch_bytes = account;
        kinds[i](b, m);
        if (b->mem->used_bytes <= most) continue;
        most = b->mem->used_bytes;
        most_account = m->plan.scratch_bytes;
    }
    b->mem->used_bytes = most;
    m->plan.scratch_bytes = most_account;
}

/* Two ranks on CPUs: where the link sends from, its own region (exchange.c). */
static bool partials_in_link(const td_model *m)
{
    return m->options.world > 1 && !td_model_gathers_on_device(m);
}

static void layout_partials(td_builder *b, td_model *m)
{
    if (!partials_in_link(m)) m->s.partials = take_f32(b, TD_SHARDS * (size_t)m->rows_cap * (size_t)m->config.hidden);
    if (td_model_gathers_on_device(m)) m->gather_state = (uint32_t *)take_i32(b, 4);
}

static size_t link_bytes(const td_model *m)
{
    size_t n_bytes = TD_SHARDS * (size_t)m->rows_cap * (size_t)m->config.hidden * sizeof(float);
    if (m->options.world == 1 || m->options.loopback) return 0;
    if (!partials_in_link(m)) n_bytes = td_model_gather_bytes(m);
    return (n_bytes + 4095) / 4096 * 4096;
}

static void layout_scratch(td_builder *b, td_model *m)
{
    size_t rows = (size_t)m->rows_cap, dim = (size_t)m->config.hidden, n_logits = (size_t)m->options.n_logits;
    b->account = &m->plan.scratch_bytes;
    layout_window(b, m, &m->window);
    layout_window(b, m, &m->mtp_window);
    m->s.x = take_act(b, rows * TD_STREAMS * dim);
    m->s.post = take_f32(b, rows * TD_STREAMS);
    m->s.comb = take_f32(b, rows * TD_STREAMS * TD_STREAMS);
    m->s.n = take_act(b, rows * dim);
    m->s.wanted = take_act(b, n_logits * dim);
    if (m->options.mtp) m->s.final = take_act(b, rows * dim);
    for (int i = 0; i < m->n_own; i++) m->s.logits[i] = take_f32(b, n_logits * (size_t)m->vocab_shard);
    layout_partials(b, m);
    layout_blocks_scratch(b, m);
}

/* ---- all of it ---- */

td_status td_model_layout(td_model *m, const td_checkpoint *ck, td_arena *mem, td_arena *shared, td_error *err)
{
    td_builder b = {
        .dev = m->dev, .ops = m->ops, .ck = ck, .meta = &m->meta, .err = err, .mem = mem, .shared = shared
    };
    size_t row_bytes = (size_t)m->config.hidden * sizeof(float);
    memset(&m->plan, 0, sizeof m->plan);
    m->layers =
        (td_model_layer *)td_arena_take(&m->meta, (size_t)m->n_loaded * sizeof *m->layers, _Alignof(td_model_layer));
    m->slots = (td_model_slot *)td_arena_take(&m->meta, (size_t)m->options.n_slots * sizeof *m->slots,
                                              _Alignof(td_model_slot));
    if (!m->layers || !m->slots) return td_fail(err, TD_ENOMEM, "model: no memory for its structures");
    td_build_weights(&b, m);
    if (b.status) return b.status;
    layout_caches(&b, m);
    layout_scratch(&b, m);
    m->plan.total_bytes = mem->used_bytes + shared->used_bytes;
    m->plan.shared_bytes = shared->used_bytes;
    m->plan.link_region_bytes = link_bytes(m);
    m->plan.link_gather_bytes = TD_WINDOW_MAX * row_bytes;
    return b.status;
}

td_status td_model_plan_bytes(const td_dev *dev, const td_ops *ops, const td_checkpoint *checkpoint,
                              const td_model_options *options, td_model_plan *plan, td_error *err)
{
    td_model *m = (td_model *)malloc(sizeof *m);
    if (!m) return td_fail(err, TD_ENOMEM, "model: no memory for a plan");
    /* The layout asks dev for sizes only. */
    td_status status = td_model_init(m, (td_dev *)dev, ops, td_checkpoint_config(checkpoint), options, err);
    if (!status) {
        td_arena counting, shared;
        td_arena_init_fixed(&counting, NULL, SIZE_MAX);
        td_arena_init_fixed(&shared, NULL, SIZE_MAX);
        td_arena_init(&m->meta, 0);
        status = td_model_layout(m, checkpoint, &counting, &shared, err);
        if (!status) *plan = m->plan;
        td_arena_deinit(&m->meta);
    }
    free(m);
    return status;
}
