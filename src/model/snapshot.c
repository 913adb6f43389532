/* A kept state: what a slot needs beside its pool blocks to go on as if it had computed the rows itself. Flat in the
 * length of the context: the committed KDA states and convolution rows of this rank's shards, and of every DSA layer
 * the last four rows of index key and gate, of which the pool that is being filled may need up to three. (Four, because
 * the MTP layer is one position behind the trunk.) */
#include "model/internal.h"

typedef struct cursor {
    td_dev *dev;
    char *bytes; /* NULL: only count */
    size_t n_bytes;
    bool save;
    td_status status;
} cursor;

static void move(cursor *c, void *device, size_t n_bytes)
{
    if (c->bytes && !c->status)
        c->status = c->save ? td_dev_download(c->dev, c->bytes + c->n_bytes, device, n_bytes)
                            : td_dev_upload(c->dev, device, c->bytes + c->n_bytes, n_bytes);
    c->n_bytes += n_bytes;
}

static void move_kda(const td_model *m, const td_model_kda *kda, int slot, cursor *c)
{
    int parity = m->slots[slot].parity;
    for (int own = 0; own < m->n_own; own++) {
        const td_model_kda_shard *shard = &kda->shard[own];
        size_t width = (size_t)shard->n_heads * TD_HEAD, at = (size_t)slot * 2 + (size_t)parity;
        size_t conv = (TD_CONV - 1) * 3 * width;
        move(c, shard->state.state + at * width * TD_HEAD, width * TD_HEAD * sizeof(float));
        move(c, td_act_at(m->dev, shard->state.conv, at * conv), td_act_bytes(m->dev, conv));
    }
}

/* Rows pos - 4 .. pos - 1; those before the start of the sequence are whatever the ring holds and are never read. */
static void move_ring(const td_model *m, const td_dsa_cache *cache, int slot, int32_t pos, cursor *c)
{
    size_t row = 2 * TD_HEAD, first = (size_t)slot * (size_t)cache->ring_rows;
    for (int i = 1; i <= TD_RING_TAIL; i++) {
        size_t at = (size_t)((pos + cache->ring_rows - i) % cache->ring_rows);
        move(c, td_act_at(m->dev, cache->ring, (first + at) * row), td_act_bytes(m->dev, row));
    }
}

static cursor move_slot(const td_model *m, int slot, int32_t pos, void *bytes, bool save)
{
    cursor c = { .dev = m->dev, .bytes = (char *)bytes, .save = save };
    for (int i = 0; i < m->n_loaded; i++) {
        if (m->layers[i].is_dsa)
            move_ring(m, &m->layers[i].dsa.cache, slot, pos, &c);
        else
            move_kda(m, &m->layers[i].kda, slot, &c);
    }
    return c;
}

size_t td_model_snapshot_bytes(const td_model *m)
{
    return move_slot(m, 0, 0, NULL, true).n_bytes;
}

td_status td_model_snapshot_save(td_model *m, int slot, int32_t pos, void *dst)
{
    if (slot < 0 || slot >= m->options.n_slots || pos != m->slots[slot].pos) return TD_EINVAL;
    return move_slot(m, slot, pos, dst, true).status;
}

td_status td_model_snapshot_load(td_model *m, int slot, int32_t pos, const void *src)
{
    if (slot < 0 || slot >= m->options.n_slots || pos < 0 || pos > m->options.context_tokens) return TD_EINVAL;
    m->slots[slot].pos = pos;
    m->slots[slot].parity = 0;
    return move_slot(m, slot, pos, (void *)src, false).status;
}
