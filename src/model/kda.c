/* A KDA layer from the normed rows to this rank's partials; docs/model.md "KDA". */
#include "model/internal.h"

/* Columns of a projected row of in: own shards' q | k | v, f_a, g_a, own heads' b, and what td_model_kda_columns() adds. */
typedef struct columns {
    size_t f_a, g_a, b, n;
} columns;

static columns columns_of(const td_model *m, const td_model_kda *kda)
{
    size_t heads = 0;
    for (int i = 0; i < m->n_own; i++) heads += (size_t)kda->shard[i].n_heads;
    columns c = { .f_a = 3 * heads * TD_HEAD };
    c.g_a = c.f_a + TD_HEAD;
    c.b = c.g_a + TD_HEAD;
    c.n = td_model_kda_columns(heads);
    return c;
}

static td_status shard_block(td_model *m, const td_model_kda *kda, const td_model_window *window, const columns *c,
                             int own, size_t first_head)
{
    const td_model_kda_shard *shard = &kda->shard[own];
    size_t at = first_head * TD_HEAD, width = (size_t)shard->n_heads * TD_HEAD;
    td_kda_args args = { .window = &window->w,
                         .n_heads = shard->n_heads,
                         .rms_eps = m->config.rms_eps,
                         .lower_bound = m->config.kda_lower_bound,
                         .w = shard->w,
                         .state = shard->state,
                         .proj = td_model_act(m, m->s.kda_proj, 3 * at),
                         .proj_stride = c->n,
                         .beta_raw = td_model_act(m, m->s.kda_proj, c->b + first_head),
                         .beta_stride = c->n,
                         .low = { .f_b = &shard->f_b,
                                  .g_b = &shard->g_b,
                                  .f_a = td_model_act(m, m->s.kda_proj, c->f_a),
                                  .g_a = td_model_act(m, m->s.kda_proj, c->g_a),
                                  .stride = c->n },
                         .f = m->s.kda_f,
                         .gate = m->s.kda_gate,
                         .y = m->s.kda_y };
    if (window->n_serial) args.saved = shard->saved; /* for the commit */
    TD_TRY(m->ops->kda(m->dev, &args));
    return td_model_linear_f32(m, &shard->out, window->w.n_rows, m->s.kda_y, width,
                               td_model_partial(m, own, window->w.n_rows), (size_t)m->config.hidden);
}

td_status td_model_kda_block(td_model *m, const td_model_kda *kda, const td_model_window *window)
{
    columns c = columns_of(m, kda);
    size_t first_head = 0;
    TD_TRY(td_model_linear(m, &kda->in, window->w.n_rows, m->s.n, (size_t)m->config.hidden, m->s.kda_proj, c.n));
    for (int own = 0; own < m->n_own; own++) {
        TD_TRY(shard_block(m, kda, window, &c, own, first_head));
        first_head += (size_t)kda->shard[own].n_heads;
    }
    return TD_OK;
}
