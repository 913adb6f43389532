/* Where the model's memory comes from. On the CPU: one anonymous mapping, so that pages of the pool that no sequence
 * has reached cost nothing. A device with memory of its own replaces these two functions. */
#include "model/internal.h"

#include <sys/mman.h>

td_status td_memory_create(td_model *m, size_t n_bytes, td_error *err)
{
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return td_fail(err, TD_ENOMEM, "model: %zu bytes are not to be had", n_bytes);
    m->memory = memory;
    m->memory_bytes = n_bytes;
    return TD_OK;
}

void td_memory_destroy(td_model *m)
{
    if (m->memory) munmap(m->memory, m->memory_bytes);
    m->memory = NULL;
}
