/* A DSA layer from the normed rows to this rank's partials; docs/model.md "DSA", "Indexer". Latents, pools and
 * selections are computed alike on every rank; each shard attends with its own heads. */
#include "model/internal.h"

#include <math.h>

static size_t proj_columns(const td_model *m)
{
    return (size_t)(m->config.q_lora + m->config.kv_lora + 2 * TD_HEAD);
}

/* Projections of the normed row: latent and query, index key, and with `sparse` the weights of the index heads. */
static td_status project(td_model *m, const td_model_dsa *dsa, const td_window *w, bool sparse)
{
    size_t dim = (size_t)m->config.hidden, stride = proj_columns(m), heads = (size_t)m->config.index_heads;
    td_act *index = td_act_at(m->dev, m->s.dsa_proj, stride - 2 * TD_HEAD);
    bool beside = td_model_branches(m, w->n_rows);
    if (beside) TD_TRY(td_dev_fork(m->dev));
    TD_TRY(td_model_linear(m, &dsa->index_in, w->n_rows, m->s.n, dim, index, stride));
    if (beside) TD_TRY(td_dev_main(m->dev));
    TD_TRY(td_model_linear(m, &dsa->latent_in, w->n_rows, m->s.n, dim, m->s.dsa_proj, stride));
    if (sparse) TD_TRY(td_model_linear_f32(m, &dsa->index_weights, w->n_rows, m->s.n, dim, m->s.index_weights, heads));
    return beside ? td_dev_join(m->dev) : TD_OK;
}

/* Latent and index key into the caches, c_q. */
static td_status store(td_model *m, const td_model_dsa *dsa, const td_window *w)
{
    size_t stride = proj_columns(m);
    td_dsa_store_args args = { .window = w,
                               .cache = dsa->cache,
                               .q_lora = m->config.q_lora,
                               .rms_eps = m->config.rms_eps,
                               .proj = m->s.dsa_proj,
                               .proj_stride = stride,
                               .q_norm = dsa->q_norm,
                               .kv_norm = dsa->kv_norm,
                               .k_norm_w = dsa->k_norm_w,
                               .k_norm_b = dsa->k_norm_b,
                               .ape = dsa->ape,
                               .c_q = m->s.dsa_c_q };
    return m->ops->dsa_store(m->dev, &args);
}

/* Pools that each row attends to. Scores are needed only once some row sees more pools than it may keep. */
static td_status select_pools(td_model *m, const td_model_dsa *dsa, const td_window *w, bool sparse)
{
    size_t heads = (size_t)m->config.index_heads, q_lora = (size_t)m->config.q_lora;
    if (sparse)
        TD_TRY(td_model_linear(m, &dsa->index_q, w->n_rows, m->s.dsa_c_q, q_lora, m->s.index_q, heads * TD_HEAD));
    td_dsa_select_args args = { .window = w,
                                .cache = dsa->cache,
                                .n_heads = m->config.index_heads,
                                .top_pools = m->top_pools,
                                .q = m->s.index_q,
                                .weights = m->s.index_weights,
                                .count = m->s.pool_count,
                                .list = m->s.pool_list };
    return m->ops->dsa_select(m->dev, &args);
}

static td_status attend(td_model *m, const td_model_dsa *dsa, const td_window *w, int own, size_t first_head,
                        size_t q_stride)
{
    const td_model_dsa_shard *shard = &dsa->shard[own];
    td_dsa_attend_args args = { .window = w,
                                .cache = dsa->cache,
                                .kv_b = shard->kv_b,
                                .scale = 1.0f / sqrtf((float)m->config.qk_dim),
                                .top_pools = m->top_pools,
                                .count = m->s.pool_count,
                                .list = m->s.pool_list,
                                .q = td_model_act(m, m->s.dsa_q, first_head * (size_t)m->config.qk_dim),
                                .q_stride = q_stride,
                                .o = m->s.dsa_o };
    TD_TRY(m->ops->dsa_attend(m->dev, &args));
    size_t width = (size_t)shard->kv_b.n_heads * (size_t)m->config.v_dim;
    return td_model_linear_f32(m, &shard->out, w->n_rows, m->s.dsa_o, width, td_model_partial(m, own, w->n_rows),
                               (size_t)m->config.hidden);
}

td_status td_model_dsa_block(td_model *m, const td_model_dsa *dsa, const td_model_window *window)
{
    const td_window *w = &window->w;
    size_t q_stride = (size_t)dsa->q_b.out, first_head = 0;
    bool sparse = td_model_window_sparse(m, w), beside = td_model_branches(m, w->n_rows);
    TD_TRY(project(m, dsa, w, sparse));
    TD_TRY(store(m, dsa, w));
    if (beside) TD_TRY(td_dev_fork(m->dev));
    TD_TRY(td_model_linear(m, &dsa->q_b, w->n_rows, m->s.dsa_c_q, (size_t)m->config.q_lora, m->s.dsa_q, q_stride));
    if (beside) TD_TRY(td_dev_main(m->dev));
    TD_TRY(select_pools(m, dsa, w, sparse));
    if (beside) TD_TRY(td_dev_join(m->dev));
    for (int own = 0; own < m->n_own; own++) {
        TD_TRY(attend(m, dsa, w, own, first_head, q_stride));
        first_head += (size_t)dsa->shard[own].kv_b.n_heads;
    }
    return TD_OK;
}
