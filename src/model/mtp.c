/* The MTP layer: a draft head that reads the trunk's final-normed row of position i and the token at i + 1, and
 * predicts the token at i + 2; docs/model.md "MTP". Its caches are planes of the same pool blocks. One stream, plain
 * residual. */
#include "model/internal.h"

static td_status check_args(const td_model *m, const td_mtp_args *a, td_error *err)
{
    if (!m->options.mtp) return td_fail(err, TD_EINVAL, "the MTP layer is not loaded");
    if (a->slot < 0 || a->slot >= m->options.n_slots)
        return td_fail(err, TD_EINVAL, "MTP: slot %d of %d", a->slot, m->options.n_slots);
    int64_t room = (int64_t)m->slots[a->slot].n_blocks * TD_BLOCK;
    if (a->n_rows < 1 || a->n_rows > m->rows_cap || a->pos < 0 || a->pos + (int64_t)a->n_rows > room)
        return td_fail(err, TD_EINVAL, "MTP: %d rows at position %d: at most %d, room for %lld", a->n_rows, a->pos,
                       m->rows_cap, (long long)room);
    for (int i = 0; i < a->n_rows; i++)
        if (a->next_ids[i] < 0 || a->next_ids[i] >= m->config.vocab_size)
            return td_fail(err, TD_EINVAL, "MTP: token id %d of %d", a->next_ids[i], m->config.vocab_size);
    if (a->h) return TD_OK;
    const td_window *w = &m->window.w;
    if (!m->have_window || a->segment < 0 || a->segment >= w->n_segments || a->from_row < 0 ||
        (int64_t)a->from_row + a->n_rows > w->host_segments[a->segment].n_rows)
        return td_fail(err, TD_EINVAL, "MTP: rows %d.. of segment %d are not in the last window", a->from_row,
                       a->segment);
    return TD_OK;
}

static void build_window(td_model *m, const td_mtp_args *a)
{
    td_model_window *window = &m->mtp_window;
    window->host.segments[0] = (td_segment){ .n_rows = a->n_rows, .pos = a->pos, .slot = a->slot };
    for (int i = 0; i < a->n_rows; i++) {
        window->host.ids[i] = a->pos + i ? a->next_ids[i] : -1; /* the embedding at position 0 is zero */
        window->host.pos[i] = a->pos + i;
        window->host.seg[i] = 0;
    }
    window->w.n_rows = a->n_rows;
    window->w.n_segments = 1;
    window->w.host_pos_max = a->pos + a->n_rows - 1;
}

static td_status norm(td_model *m, int n_rows, const td_act *x, const float *w, td_act *y, size_t y_stride)
{
    size_t dim = (size_t)m->config.hidden;
    td_rmsnorm_args args = { .n_rows = n_rows,
                             .dim = m->config.hidden,
                             .eps = m->config.rms_eps,
                             .x = x,
                             .x_stride = dim,
                             .w = w,
                             .y = y,
                             .y_stride = y_stride };
    return m->ops->rmsnorm(m->dev, &args);
}

/* The rows h that the trunk left, or the caller's. */
static const td_act *hidden_rows(td_model *m, const td_mtp_args *a)
{
    size_t dim = (size_t)m->config.hidden;
    if (!a->h)
        return td_model_act(m, m->s.final,
                            (size_t)(m->window.w.host_segments[a->segment].first_row + a->from_row) * dim);
    td_act_from_f32(m->dev, m->s.n, a->h, (size_t)a->n_rows * dim);
    return m->s.n;
}

/* x = eh_proj [ norm(e) | norm(h) ]. The trunk's streams lend their memory: x, e, then the two halves side by side. */
static td_status combine(td_model *m, const td_mtp_args *a, td_act *x)
{
    size_t dim = (size_t)m->config.hidden, rows = (size_t)a->n_rows;
    td_act *e = td_act_at(m->dev, x, rows * dim), *both = td_act_at(m->dev, x, 2 * rows * dim);
    td_embed_args args = { .window = &m->mtp_window.w,
                           .dim = m->config.hidden,
                           .vocab = m->config.vocab_size,
                           .table = m->embed,
                           .n_streams = 1,
                           .x = e };
    TD_TRY(m->ops->embed(m->dev, &args));
    TD_TRY(norm(m, a->n_rows, e, m->enorm, both, 2 * dim));
    TD_TRY(norm(m, a->n_rows, hidden_rows(m, a), m->hnorm, td_act_at(m->dev, both, dim), 2 * dim));
    return td_model_linear(m, &m->eh_proj, a->n_rows, both, 2 * dim, x, dim);
}

static td_status residual(td_model *m, int n_rows, td_act *x)
{
    td_residual_args args = { .n_rows = n_rows, .dim = m->config.hidden, .partials = m->s.partials, .x = x };
    return m->ops->residual(m->dev, &args);
}

static td_status run(td_model *m, const td_mtp_args *a, td_error *err)
{
    int layer = m->config.n_layers, n = a->n_rows;
    size_t dim = (size_t)m->config.hidden;
    td_act *x = m->s.x;
    TD_TRY(td_model_window_send(m, &m->mtp_window));
    TD_TRY(combine(m, a, x));
    TD_TRY(norm(m, n, x, m->layers[layer].attn_site.norm, m->s.n, dim));
    TD_TRY(td_model_attention(m, layer, &m->mtp_window, err));
    TD_TRY(residual(m, n, x));
    TD_TRY(norm(m, n, x, m->layers[layer].mlp_site.norm, m->s.n, dim));
    TD_TRY(td_model_feed_forward(m, layer, &m->mtp_window, err));
    TD_TRY(residual(m, n, x));
    TD_TRY(norm(m, n, x, m->shared_head_norm, m->s.n, dim));
    return td_model_head(m, td_model_act(m, m->s.n, (size_t)(n - 1) * dim), 1);
}

td_status td_model_mtp(td_model *m, const td_mtp_args *args, td_error *err)
{
    TD_TRY(check_args(m, args, err));
    TD_TRY(td_dev_sync(m->dev, err)); /* the tables may still be read */
    build_window(m, args);
    if (err) err->status = TD_OK;
    td_status status = td_model_blocks_send(m);
    if (!status) status = run(m, args, err);
    if (!status) status = td_model_settle(m, err);
    if (status) td_model_abandon(m);
    if (status && err && !err->status) return td_fail(err, status, "MTP layer: %s", td_status_text(status));
    if (!status) status = td_dev_sync(m->dev, err);
    if (!status) status = td_model_gathered(m, err);
    if (!status && args->y) td_act_to_f32(m->dev, args->y, m->s.n, (size_t)args->n_rows * (size_t)m->config.hidden);
    return status;
}
