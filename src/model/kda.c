/* A KDA layer from the normed rows to this rank's partials; docs/model.md "KDA". */
#include "model/internal.h"

/* Columns of a projected row of in: own shards' q | k | v, f_a, g_a, own heads' b. */
typedef struct columns {
    size_t f_a, g_a, b, n;
    size_t own_width; /* heads * 128 of all own shards */
} columns;

static columns columns_of(const td_model *m, const td_model_kda *kda)
{
    size_t heads = 0;
    for (int i = 0; i < m->n_own; i++) heads += (size_t)kda->shard[i].n_heads;
    columns c = { .own_width = heads * TD_HEAD };
    c.f_a = 3 * c.own_width;
    c.g_a = c.f_a + TD_HEAD;
    c.b = c.g_a + TD_HEAD;
    c.n = c.b + heads;
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
                         .f = td_model_act(m, m->s.kda_f, at),
                         .f_stride = c->own_width,
                         .gate = td_model_act(m, m->s.kda_gate, at),
                         .gate_stride = c->own_width,
                         .y = m->s.kda_y };
    if (window->n_serial) args.saved = shard->saved; /* for the commit */
    TD_TRY(m->ops->kda(m->dev, &args));
    return td_model_linear_f32(m, &shard->out, window->w.n_rows, m->s.kda_y, width,
                               td_model_partial(m, own, window->w.n_rows), (size_t)m->config.hidden);
}

td_status td_model_kda_block(td_model *m, const td_model_kda *kda, const td_model_window *window)
{
    columns c = columns_of(m, kda);
    int n_rows = window->w.n_rows;
    const td_act *proj = m->s.kda_proj;
    /* Rows of proj that do not start at multiples of 16 bytes are copied by a GPU, which a branch has no room for. */
    bool beside = td_model_branches(m, n_rows) && c.n % 8 == 0;
    TD_TRY(td_model_linear(m, &kda->in, n_rows, m->s.n, (size_t)m->config.hidden, m->s.kda_proj, c.n));
    if (beside) TD_TRY(td_dev_fork(m->dev));
    TD_TRY(td_model_linear(m, &kda->g_b, n_rows, td_model_act(m, proj, c.g_a), c.n, m->s.kda_gate, c.own_width));
    if (beside) TD_TRY(td_dev_main(m->dev));
    TD_TRY(td_model_linear(m, &kda->f_b, n_rows, td_model_act(m, proj, c.f_a), c.n, m->s.kda_f, c.own_width));
    if (beside) TD_TRY(td_dev_join(m->dev));
    size_t first_head = 0;
    for (int own = 0; own < m->n_own; own++) {
        TD_TRY(shard_block(m, kda, window, &c, own, first_head));
        first_head += (size_t)kda->shard[own].n_heads;
    }
    return TD_OK;
}
