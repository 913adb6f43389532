/* The KV pool's bookkeeping: blocks of TD_BLOCK tokens with reference counts. The rows themselves live in the model's
 * planes; a sequence owns a table of block numbers in order of position. Sequences that share a prefix hold the same
 * blocks; only a partly filled last block is copied when a second writer continues it. Nothing is ever moved, so
 * nothing is compacted and no request waits for a contiguous gap (docs/kv-pool.md).
 *
 * Every rank applies the same calls in the same order, so block numbers are equal and never exchanged. One thread. */
#ifndef TD_ENGINE_KV_POOL_H
#define TD_ENGINE_KV_POOL_H

#include "base/arena.h"

TD_BEGIN_C

typedef struct td_kv_pool {
    int n_blocks, n_free;
    int32_t *free; /* [n_blocks] the first n_free are free; the last of them goes next */
    int32_t *refs; /* [n_blocks] 0: free */
} td_kv_pool;

/* Memory from the arena (counting arenas too: TD_OK, nothing usable). TD_ENOMEM: arena full. */
td_status td_kv_pool_init(td_kv_pool *pool, int n_blocks, td_arena *arena);

/* n fresh blocks, each with one reference, into out; TD_EFULL (and nothing taken) when fewer are free. */
td_status td_kv_pool_reserve(td_kv_pool *pool, int n, int32_t *out);
void td_kv_pool_share(td_kv_pool *pool, int32_t block);        /* one more holder of a held block */
void td_kv_pool_release(td_kv_pool *pool, int32_t block);      /* one holder less; the last one frees it */
bool td_kv_pool_shared(const td_kv_pool *pool, int32_t block); /* held more than once: copy before writing */

/* Blocks that n_tokens take. */
int td_kv_pool_blocks(int64_t n_tokens);

TD_END_C
#endif
