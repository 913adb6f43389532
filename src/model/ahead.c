/* Which weights come after an exchange, for its gather (ops/gather.h). A small window reads each weight once and computes
 * next to nothing, so memory sets its pace; but while ranks exchange, memory idles. */
#include "model/internal.h"

static void add_weight(const td_model *m, td_model_ahead *ahead, const td_weight *w)
{
    size_t n_bytes = m->ops->weight_bytes(w->format, w->out, w->in);
    if (ahead->n < TD_GATHER_NEXT) ahead->span[ahead->n++] = (td_span){ .data = w->data, .n_bytes = n_bytes };
}

static void add_kda(const td_model *m, td_model_ahead *ahead, const td_model_kda *kda)
{
    add_weight(m, ahead, &kda->in);
    for (int own = 0; own < m->n_own; own++) {
        add_weight(m, ahead, &kda->shard[own].f_b);
        add_weight(m, ahead, &kda->shard[own].g_b);
    }
}

static void add_dsa(const td_model *m, td_model_ahead *ahead, const td_model_dsa *dsa)
{
    add_weight(m, ahead, &dsa->latent_in);
    add_weight(m, ahead, &dsa->index_in);
    add_weight(m, ahead, &dsa->index_q);
    add_weight(m, ahead, &dsa->q_b);
}

static void add_mlp(const td_model *m, td_model_ahead *ahead, const td_model_mlp *mlp)
{
    for (int own = 0; own < m->n_own; own++) {
        add_weight(m, ahead, &mlp->shard[own].gate_up);
        add_weight(m, ahead, &mlp->shard[own].down);
    }
}

td_model_ahead td_model_ahead_attention(const td_model *m, int layer)
{
    td_model_ahead ahead = { .n = 0 };
    if (layer >= m->config.n_layers)
        for (int own = 0; own < m->n_own; own++) add_weight(m, &ahead, &m->head[own]);
    else if (m->layers[layer].is_dsa)
        add_dsa(m, &ahead, &m->layers[layer].dsa);
    else
        add_kda(m, &ahead, &m->layers[layer].kda);
    return ahead;
}

/* Which experts come is not known yet. */
td_model_ahead td_model_ahead_feed_forward(const td_model *m, int layer)
{
    td_model_ahead ahead = { .n = 0 };
    const td_model_layer *of = &m->layers[layer];
    if (of->is_moe) add_weight(m, &ahead, &of->moe.router);
    if (of->is_moe && m->config.n_shared_experts > 0) add_mlp(m, &ahead, &of->moe.shared);
    if (!of->is_moe) add_mlp(m, &ahead, &of->mlp);
    return ahead;
}
