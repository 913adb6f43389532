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

/* The shared expert's partial is in y already; the experts operation adds it after its own sum. */
static td_status experts_shard(td_model *m, const td_model_moe *moe, int own, int n_rows, bool join)
{
    bool shared = m->config.n_shared_experts > 0;
    float *y = td_model_partial(m, own, n_rows);
    td_experts_args args = { .n_rows = n_rows,
                             .top_k = m->config.top_k,
                             .limit = m->config.swiglu_limit,
                             .experts = &moe->experts[own],
                             .x = m->s.n,
                             .ids = m->s.expert_ids,
                             .weights = m->s.expert_weights,
                             .shared = shared ? y : NULL,
                             .join = join,
                             .y = y };
    return m->ops->experts(m->dev, &args);
}

/* The shared expert depends on the normed rows alone: in a small window it runs beside the router and the first
 * experts, which wait for it when they need it. */
td_status td_model_moe_block(td_model *m, const td_model_moe *moe, int n_rows)
{
    bool beside = m->config.n_shared_experts > 0 && td_model_branches(m, n_rows);
    if (beside) TD_TRY(td_dev_fork(m->dev));
    if (m->config.n_shared_experts > 0) TD_TRY(td_model_mlp_block(m, &moe->shared, n_rows));
    if (beside) TD_TRY(td_dev_main(m->dev));
    TD_TRY(route(m, moe, n_rows));
    for (int own = 0; own < m->n_own; own++) TD_TRY(experts_shard(m, moe, own, n_rows, beside && own == 0));
    return TD_OK;
}
