/* Which rows of the last window really happened; docs/model-code.md "Commit". A slot's two KDA states trade places: the
 * other parity holds the state after all rows of the window, so a segment kept whole needs a flip; one kept in part is
 * first replayed from the committed state over the kept rows. Attention rows need nothing: those after the kept ones
 * are dead and are overwritten. */
#include "model/internal.h"

static td_status check_keep(const td_model *m, const int *keep, td_error *err)
{
    if (!m->have_window || m->committed) return td_fail(err, TD_EINVAL, "commit: there is no window to commit");
    for (int i = 0; i < m->window.w.n_segments; i++) {
        const td_segment *s = &m->window.host.segments[i];
        if (keep[i] < 0 || keep[i] > s->n_rows || (s->chunked && keep[i] != 0 && keep[i] != s->n_rows))
            return td_fail(err, TD_EINVAL, "commit: %d rows of segment %d, which has %d%s", keep[i], i, s->n_rows,
                           s->chunked ? ", all or none" : "");
    }
    return TD_OK;
}

static td_status replay(td_model *m, const td_model_kda *kda)
{
    for (int own = 0; own < m->n_own; own++) {
        const td_model_kda_shard *shard = &kda->shard[own];
        td_kda_replay_args args = { .window = &m->window.w,
                                    .keep = m->window.device.keep,
                                    .n_heads = shard->n_heads,
                                    .state = shard->state,
                                    .saved = shard->saved };
        TD_TRY(m->ops->kda_replay(m->dev, &args));
    }
    return TD_OK;
}

td_status td_model_commit(td_model *m, const int *keep, td_error *err)
{
    TD_TRY(check_keep(m, keep, err));
    bool partly = false;
    for (int i = 0; i < m->window.w.n_segments; i++) {
        m->window.host.keep[i] = keep[i];
        partly |= keep[i] > 0 && keep[i] < m->window.host.segments[i].n_rows;
    }
    td_status sent = partly ? td_model_window_send(m, &m->window) : TD_OK;
    if (sent) return td_fail(err, sent, "commit: %s", td_status_text(sent));
    for (int i = 0; partly && i < m->n_loaded; i++) {
        if (m->layers[i].is_dsa) continue;
        td_status status = replay(m, &m->layers[i].kda);
        if (status) return td_fail(err, status, "commit: layer %d: %s", i, td_status_text(status));
    }
    for (int i = 0; i < m->window.w.n_segments; i++) {
        td_model_slot *slot = &m->slots[m->window.host.segments[i].slot];
        slot->pos += keep[i];
        if (keep[i]) slot->parity ^= 1;
    }
    m->committed = true;
    return TD_OK;
}
