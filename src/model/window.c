/* A batch becomes a window: checked against the slots' committed state, then written into device-visible tables.
 * Nothing is changed when a check fails. */
#include "model/internal.h"

static td_status check_segment(const td_model *m, const td_batch *batch, int i, td_error *err)
{
    const td_batch_segment *s = &batch->segments[i];
    if (s->slot < 0 || s->slot >= m->options.n_slots)
        return td_fail(err, TD_EINVAL, "segment %d: slot %d of %d", i, s->slot, m->options.n_slots);
    for (int j = 0; j < i; j++)
        if (batch->segments[j].slot == s->slot)
            return td_fail(err, TD_EINVAL, "segments %d and %d: the same slot, %d", j, i, s->slot);
    if (i && !s->chunked && batch->segments[i - 1].chunked)
        return td_fail(err, TD_EINVAL, "segment %d: row-by-row segments come before prompts", i);
    const td_model_slot *slot = &m->slots[s->slot];
    if (s->pos != slot->pos)
        return td_fail(err, TD_EINVAL, "segment %d: position %d, slot %d has %d rows", i, s->pos, s->slot, slot->pos);
    if (s->chunked && s->pos % TD_GRID)
        return td_fail(err, TD_EINVAL, "segment %d: a prompt at position %d, not a multiple of %d", i, s->pos, TD_GRID);
    int64_t room = (int64_t)slot->n_blocks * TD_BLOCK;
    if (room > m->options.context_tokens) room = m->options.context_tokens;
    if (s->n_rows < 1 || s->pos + (int64_t)s->n_rows > room)
        return td_fail(err, TD_EINVAL, "segment %d: %d rows at position %d, slot %d has room for %lld", i, s->n_rows,
                       s->pos, s->slot, (long long)room);
    for (int r = 0; r < s->n_rows; r++)
        if (s->ids[r] < 0 || s->ids[r] >= m->config.vocab_size)
            return td_fail(err, TD_EINVAL, "segment %d: token id %d of %d", i, s->ids[r], m->config.vocab_size);
    return TD_OK;
}

static td_status check_batch(const td_model *m, const td_batch *batch, td_error *err)
{
    int64_t serial = 0, chunked = 0, wanted = 0;
    if (batch->n_segments < 1 || batch->n_segments > TD_SEGMENTS_MAX)
        return td_fail(err, TD_EINVAL, "a window of %d segments: 1 to %d", batch->n_segments, TD_SEGMENTS_MAX);
    for (int i = 0; i < batch->n_segments; i++) {
        const td_batch_segment *s = &batch->segments[i];
        TD_TRY(check_segment(m, batch, i, err));
        *(s->chunked ? &chunked : &serial) += s->n_rows;
        wanted += s->logits_all ? s->n_rows : s->logits_last;
    }
    if (serial > TD_WINDOW_MAX || chunked > m->options.chunk_rows)
        return td_fail(err, TD_EINVAL, "a window of %lld rows and %lld prompt rows: at most %d and %d",
                       (long long)serial, (long long)chunked, TD_WINDOW_MAX, m->options.chunk_rows);
    if (wanted > m->options.n_logits)
        return td_fail(err, TD_EINVAL, "logits of %lld rows are wanted, at most %d", (long long)wanted,
                       m->options.n_logits);
    return TD_OK;
}

static void add_segment(const td_model *m, td_model_window *window, int i, const td_batch_segment *s)
{
    int first = window->w.n_rows;
    window->host.segments[i] = (td_segment){ .first_row = first,
                                             .n_rows = s->n_rows,
                                             .pos = s->pos,
                                             .slot = s->slot,
                                             .parity = m->slots[s->slot].parity,
                                             .chunked = s->chunked };
    for (int r = 0; r < s->n_rows; r++) {
        window->host.ids[first + r] = s->ids[r];
        window->host.pos[first + r] = s->pos + r;
        window->host.seg[first + r] = i;
        if (s->logits_all || (s->logits_last && r == s->n_rows - 1))
            window->host.wanted[window->n_wanted++] = first + r;
    }
    int64_t last = (int64_t)s->pos + s->n_rows - 1;
    if (last > window->w.host_pos_max) window->w.host_pos_max = last;
    if (!s->chunked) window->n_serial += s->n_rows;
    window->w.n_rows += s->n_rows;
}

td_status td_model_window_build(const td_model *m, td_model_window *window, const td_batch *batch, td_error *err)
{
    TD_TRY(check_batch(m, batch, err));
    window->w.n_rows = 0;
    window->w.n_segments = batch->n_segments;
    window->w.host_pos_max = 0;
    window->n_wanted = 0;
    window->n_serial = 0;
    for (int i = 0; i < batch->n_segments; i++) add_segment(m, window, i, &batch->segments[i]);
    for (int i = batch->n_segments; i < TD_SEGMENTS_MAX; i++) window->host.segments[i] = (td_segment){ 0 };
    return TD_OK;
}

bool td_model_window_sparse(const td_model *m, const td_window *w)
{
    return (w->host_pos_max + 1) / TD_POOL > m->top_pools;
}

td_status td_model_window_send(td_model *m, const td_model_window *window)
{
    if (window->device.ids == window->host.ids) return TD_OK;
    return td_dev_copy(m->dev, window->device.ids, window->host.ids, window->tables_bytes);
}

td_status td_model_blocks_send(td_model *m)
{
    bool changed = m->blocks_changed;
    m->blocks_changed = false;
    if (!changed || m->device_blocks == m->blocks) return TD_OK;
    return td_dev_copy(m->dev, m->device_blocks, m->blocks,
                       (size_t)m->options.n_slots * (size_t)m->blocks_cap * sizeof *m->blocks);
}
