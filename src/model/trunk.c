/* The forward pass: embedding, the layers, the head; docs/model.md from "Embedding" to "End of the trunk".
 *
 * A layer is two sites: attention and MLP. Entering a site first writes the pending block's output back into the
 * streams, so each block costs one operation on the streams, and X after layer i is complete when layer i + 1 (or the
 * end) is entered. Block outputs are the only thing that crosses ranks: every rank holds all shards' partials after the
 * exchange and adds them in shard order, so all of them continue with equal bits. */
#include "model/internal.h"

#include "base/hash.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- pieces that the blocks share ---- */

td_status td_model_linear(td_model *m, const td_weight *w, int n_rows, const td_act *x, size_t x_stride, td_act *y,
                          size_t y_stride)
{
    td_linear_args args = { .n_rows = n_rows, .w = w, .x = x, .x_stride = x_stride, .y_act = y, .y_stride = y_stride };
    return m->ops->linear(m->dev, &args);
}

td_status td_model_linear_f32(td_model *m, const td_weight *w, int n_rows, const td_act *x, size_t x_stride, float *y,
                              size_t y_stride)
{
    td_linear_args args = { .n_rows = n_rows, .w = w, .x = x, .x_stride = x_stride, .y_f32 = y, .y_stride = y_stride };
    return m->ops->linear(m->dev, &args);
}

float *td_model_partial(const td_model *m, int own, int n_rows)
{
    return m->s.partials + (size_t)(m->first_own + own) * (size_t)n_rows * (size_t)m->config.hidden;
}

static td_status block_failed(td_error *err, td_status status, int layer, const char *block)
{
    return td_fail(err, status, "layer %d, %s: %s", layer, block, td_status_text(status));
}

/* ---- trace and the comparison of ranks ---- */

/* A copy of device memory for debugging, from malloc; NULL: no memory, or the device failed. */
static void *on_host(td_dev *dev, const void *device, size_t n_bytes)
{
    void *copy = malloc(n_bytes ? n_bytes : 1);
    if (copy && td_dev_download(dev, copy, device, n_bytes)) {
        free(copy);
        copy = NULL;
    }
    return copy;
}

/* The streams are complete up to and including `layer` (-1: the embedding). */
static td_status layer_done(td_model *m, int layer, int n_rows, td_error *err)
{
    size_t n = (size_t)n_rows * TD_STREAMS * (size_t)m->config.hidden;
    if (m->trace.layer) {
        td_act_to_f32(m->dev, m->trace_x, m->s.x, n);
        m->trace.layer(m->trace.user, layer, n_rows, m->trace_x);
    }
    if (!m->options.check_layers) return TD_OK;
    char what[TD_LINK_LABEL_MAX + 1];
    snprintf(what, sizeof what, "streams after layer %d", layer);
    size_t n_bytes = td_act_bytes(m->dev, n);
    void *x = on_host(m->dev, m->s.x, n_bytes);
    if (!x) return td_fail(err, TD_ENOMEM, "%s: they cannot be copied for the comparison", what);
    td_status status = td_link_check(m->link, what, td_fnv1a(TD_FNV1A_START, x, n_bytes), err);
    free(x);
    return status;
}

static void trace_pools(td_model *m, int layer, int n_rows)
{
    if (!m->trace.pools) return;
    size_t rows = (size_t)n_rows;
    int32_t *count = on_host(m->dev, m->s.pool_count, rows * sizeof *count);
    int32_t *list = on_host(m->dev, m->s.pool_list, rows * (size_t)m->top_pools * sizeof *list);
    if (count && list) m->trace.pools(m->trace.user, layer, n_rows, m->top_pools, count, list);
    free(count);
    free(list);
}

static void trace_mlp_input(td_model *m, int layer, int n_rows)
{
    if (!m->trace.mlp_input) return;
    td_act_to_f32(m->dev, m->trace_x, m->s.n, (size_t)n_rows * (size_t)m->config.hidden);
    m->trace.mlp_input(m->trace.user, layer, n_rows, m->trace_x);
}

static void trace_experts(td_model *m, int layer, int n_rows)
{
    if (!m->trace.experts) return;
    size_t n = (size_t)n_rows * (size_t)m->config.top_k;
    int32_t *ids = on_host(m->dev, m->s.expert_ids, n * sizeof *ids);
    float *weights = on_host(m->dev, m->s.expert_weights, n * sizeof *weights);
    if (ids && weights) m->trace.experts(m->trace.user, layer, n_rows, m->config.top_k, ids, weights);
    free(ids);
    free(weights);
}

/* ---- layers ---- */

td_status td_model_attention(td_model *m, int layer, const td_model_window *window, td_error *err)
{
    const td_model_layer *l = &m->layers[layer];
    td_status status = l->is_dsa ? td_model_dsa_block(m, &l->dsa, window) : td_model_kda_block(m, &l->kda, window);
    if (status) return block_failed(err, status, layer, l->is_dsa ? "sparse attention" : "delta attention");
    if (l->is_dsa) trace_pools(m, layer, window->w.n_rows);
    td_model_ahead ahead = td_model_ahead_feed_forward(m, layer);
    return td_model_exchange(m, window->w.n_rows, &ahead, err);
}

td_status td_model_feed_forward(td_model *m, int layer, const td_model_window *window, td_error *err)
{
    const td_model_layer *l = &m->layers[layer];
    int n_rows = window->w.n_rows;
    td_status status = l->is_moe ? td_model_moe_block(m, &l->moe, n_rows) : td_model_mlp_block(m, &l->mlp, n_rows);
    if (status) return block_failed(err, status, layer, l->is_moe ? "experts" : "MLP");
    trace_mlp_input(m, layer, n_rows);
    if (l->is_moe) trace_experts(m, layer, n_rows);
    td_model_ahead ahead = td_model_ahead_attention(m, layer + 1);
    return td_model_exchange(m, n_rows, &ahead, err);
}

/* Writes the pending block's output back (unless it is the first site) and, with a site, enters it. */
static td_status enter(td_model *m, const td_model_site *site, int n_rows, bool pending)
{
    td_hyper_args args = { .n_rows = n_rows,
                           .dim = m->config.hidden,
                           .rms_eps = m->config.rms_eps,
                           .hc_eps = m->config.hc_eps,
                           .iters = m->config.hc_iters,
                           .partials = pending ? m->s.partials : NULL,
                           .x = m->s.x,
                           .post = m->s.post,
                           .comb = m->s.comb,
                           .n = m->s.n };
    if (site) args.fn = site->fn, args.base = site->base, args.scale = site->scale, args.norm = site->norm;
    return m->ops->hyper(m->dev, &args);
}

static td_status run_layers(td_model *m, const td_model_window *window, td_error *err)
{
    int n_rows = window->w.n_rows, n_layers = m->config.n_layers;
    td_status status;
    for (int i = 0; i < n_layers; i++) {
        status = enter(m, &m->layers[i].attn_site, n_rows, i > 0);
        if (status) return block_failed(err, status, i, "entering attention");
        TD_TRY(layer_done(m, i - 1, n_rows, err));
        TD_TRY(td_model_attention(m, i, window, err));
        status = enter(m, &m->layers[i].mlp_site, n_rows, true);
        if (status) return block_failed(err, status, i, "entering the MLP");
        TD_TRY(td_model_feed_forward(m, i, window, err));
    }
    status = enter(m, NULL, n_rows, true);
    if (status) return block_failed(err, status, n_layers - 1, "leaving the MLP");
    return layer_done(m, n_layers - 1, n_rows, err);
}

static td_status embed(td_model *m, const td_window *w)
{
    td_embed_args args = { .window = w,
                           .dim = m->config.hidden,
                           .vocab = m->config.vocab_size,
                           .table = m->embed,
                           .n_streams = TD_STREAMS,
                           .x = m->s.x };
    return m->ops->embed(m->dev, &args);
}

/* ---- head ---- */

/* Logits of n_rows normed rows. */
td_status td_model_head(td_model *m, const td_act *rows, int n_rows)
{
    size_t dim = (size_t)m->config.hidden, columns = (size_t)m->vocab_shard;
    m->n_logits = n_rows;
    if (!n_rows) return TD_OK;
    for (int own = 0; own < m->n_own; own++)
        TD_TRY(td_model_linear_f32(m, &m->head[own], n_rows, rows, dim, m->s.logits[own], columns));
    return TD_OK;
}

static td_status final_norm(td_model *m, int n_rows, const int32_t *row, const td_act *mean, td_act *out)
{
    size_t dim = (size_t)m->config.hidden;
    td_rmsnorm_args args = { .n_rows = n_rows,
                             .dim = m->config.hidden,
                             .eps = m->config.rms_eps,
                             .row = row,
                             .x = mean,
                             .x_stride = dim,
                             .w = m->final_norm,
                             .y = out,
                             .y_stride = dim };
    return m->ops->rmsnorm(m->dev, &args);
}

/* The stream mean of all rows goes into n, which no block needs any more; normed rows where they are wanted. */
static td_status finish(td_model *m, const td_model_window *window)
{
    td_act *mean = m->s.n;
    size_t dim = (size_t)m->config.hidden;
    int n_rows = window->w.n_rows;
    td_stream_mean_args args = { .n_rows = n_rows, .dim = m->config.hidden, .x = m->s.x, .h = mean, .h_stride = dim };
    TD_TRY(m->ops->stream_mean(m->dev, &args));
    if (m->s.final) TD_TRY(final_norm(m, n_rows, NULL, mean, m->s.final));
    if (window->n_wanted) TD_TRY(final_norm(m, window->n_wanted, window->device.wanted, mean, m->s.wanted));
    TD_TRY(td_model_head(m, m->s.wanted, window->n_wanted));
    if (!m->trace.layer) return TD_OK;
    TD_TRY(final_norm(m, n_rows, NULL, mean, m->s.x)); /* the streams are of no more use either */
    td_act_to_f32(m->dev, m->trace_x, m->s.x, (size_t)n_rows * dim);
    m->trace.layer(m->trace.user, m->config.n_layers, n_rows, m->trace_x);
    return TD_OK;
}

td_status td_model_trunk(td_model *m, const td_model_window *window, td_error *err)
{
    td_status status = td_model_window_send(m, window);
    if (!status) status = embed(m, &window->w);
    if (status) return block_failed(err, status, -1, "embedding");
    TD_TRY(run_layers(m, window, err));
    status = finish(m, window);
    return status ? block_failed(err, status, m->config.n_layers, "head") : TD_OK;
}

td_status td_model_forward(td_model *m, const td_batch *batch, td_error *err)
{
    TD_TRY(td_dev_sync(m->dev, err)); /* the tables may still be read, by a replay */
    TD_TRY(td_model_window_build(m, &m->window, batch, err));
    m->have_window = false;
    m->n_logits = 0;
    bool recorded = td_model_graph_serves(m, &m->window);
    td_status status = td_model_blocks_send(m);
    if (status) status = td_fail(err, status, "block tables: %s", td_status_text(status));
    if (!status) status = recorded ? td_model_graph_run(m, &m->window, err) : td_model_trunk(m, &m->window, err);
    if (!status) status = td_model_settle(m, err);
    if (status) td_model_abandon(m);
    if (!status) status = td_dev_sync(m->dev, err);
    if (!status) status = td_model_gathered(m, err);
    if (status) return status;
    m->have_window = true;
    m->committed = false;
    return TD_OK;
}
