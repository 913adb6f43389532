/* The MLP of a layer, dense or routed, from the normed rows to this rank's partials; docs/model.md "MLP", "Router",
 * "Experts". */
#include "model/internal.h"

static td_status mlp_shard(td_model *m, const td_model_mlp_shard *shard, int n_rows, float *y)
{
    size_t dim = (size_t)m->config.hidden, width = (size_t)shard->width;
    TD_TRY(td_model_linear(m, &shard->gate_up, n_rows, m->s.n, dim, m->s.gate_up, 2 * width));
    td_swiglu_args args = { .n_rows = n_rows,
                            .width = shard->width,
                            .limit = m->config.swiglu_limit,
                            .gate_up = m->s.gate_up,
                            .y = m->s.mlp_a };
    TD_TRY(m->ops->swiglu(m->dev, &args));
    return td_model_linear_f32(m, &shard->down, n_rows, m->s.mlp_a, width, y, dim);
}

td_status td_model_mlp_block(td_model *m, const td_model_mlp *mlp, int n_rows)
{
    for (int own = 0; own < m->n_own; own++)
        TD_TRY(mlp_shard(m, &mlp->shard[own], n_rows, td_model_partial(m, own, n_rows)));
    return TD_OK;
}

static td_status route(td_model *m, const td_model_moe *moe, int n_rows)
{
    td_router_args args = { .n_rows = n_rows,
                            .dim = m->config.hidden,
                            .n_experts = m->config.n_experts,
                            .top_k = m->config.top_k,
                            .norm = m->config.norm_topk,
                            .scale = m->config.routed_scale,
                            .x = m->s.n,
                            .w = &moe->router,
                            .bias = moe->bias,
                            .ids = m->s.expert_ids,
                            .weights = m->s.expert_weights };
    return m->ops->router(m->dev, &args);
}

/* The shared expert's partial goes first into y; the experts operation adds it after its own sum. */
static td_status experts_shard(td_model *m, const td_model_moe *moe, int own, int n_rows)
{
    bool shared = m->config.n_shared_experts > 0;
    float *y = td_model_partial(m, own, n_rows);
    if (shared) TD_TRY(mlp_shard(m, &moe->shared.shard[own], n_rows, y));
    td_experts_args args = { .n_rows = n_rows,
                             .top_k = m->config.top_k,
                             .limit = m->config.swiglu_limit,
                             .experts = &moe->experts[own],
                             .x = m->s.n,
                             .ids = m->s.expert_ids,
                             .weights = m->s.expert_weights,
                             .shared = shared ? y : NULL,
                             .y = y };
    return m->ops->experts(m->dev, &args);
}

td_status td_model_moe_block(td_model *m, const td_model_moe *moe, int n_rows)
{
    TD_TRY(route(m, moe, n_rows));
    for (int own = 0; own < m->n_own; own++) TD_TRY(experts_shard(m, moe, own, n_rows));
    return TD_OK;
}
