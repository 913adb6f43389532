/* Where the model's memory comes from: one allocation on the device, for weights, caches and activations, and one that
 * host and device both see at the same address, for what the host writes before a window (tables) or sends to other
 * ranks. On the CPU both are ordinary memory, and pages of the pool that no sequence has reached cost nothing. */
#include "model/internal.h"

td_status td_memory_create(td_model *m, size_t n_bytes, size_t shared_bytes, td_error *err)
{
    TD_TRY(td_dev_alloc(m->dev, n_bytes, &m->memory, err));
    m->memory_bytes = n_bytes;
    TD_TRY(td_dev_host_alloc(m->dev, shared_bytes, &m->shared, err));
    m->shared_bytes = shared_bytes;
    return TD_OK;
}

void td_memory_destroy(td_model *m)
{
    td_dev_free(m->dev, m->memory, m->memory_bytes);
    td_dev_host_free(m->dev, m->shared, m->shared_bytes);
    m->memory = m->shared = NULL;
}
