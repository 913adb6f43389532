/* See kv_pool.h. */
#include "engine/kv_pool.h"

#include "ops/dev.h"

td_status td_kv_pool_init(td_kv_pool *pool, int n_blocks, td_arena *arena)
{
    td_check(n_blocks >= 0);
    *pool = (td_kv_pool){ .n_blocks = n_blocks, .n_free = n_blocks };
    pool->free = td_arena_take(arena, (size_t)n_blocks * sizeof *pool->free, 64);
    pool->refs = td_arena_take(arena, (size_t)n_blocks * sizeof *pool->refs, 64);
    if (!pool->free || !pool->refs) return arena->base ? TD_ENOMEM : TD_OK;
    for (int i = 0; i < n_blocks; i++) {
        pool->free[i] = n_blocks - 1 - i; /* block 0 goes first */
        pool->refs[i] = 0;
    }
    return TD_OK;
}

td_status td_kv_pool_reserve(td_kv_pool *pool, int n, int32_t *out)
{
    td_check(n >= 0);
    if (n > pool->n_free) return TD_EFULL;
    for (int i = 0; i < n; i++) {
        out[i] = pool->free[--pool->n_free];
        pool->refs[out[i]] = 1;
    }
    return TD_OK;
}

void td_kv_pool_share(td_kv_pool *pool, int32_t block)
{
    td_check(block >= 0 && block < pool->n_blocks && pool->refs[block] > 0);
    pool->refs[block]++;
}

void td_kv_pool_release(td_kv_pool *pool, int32_t block)
{
    td_check(block >= 0 && block < pool->n_blocks && pool->refs[block] > 0);
    if (--pool->refs[block] == 0) pool->free[pool->n_free++] = block;
}

bool td_kv_pool_shared(const td_kv_pool *pool, int32_t block)
{
    td_check(block >= 0 && block < pool->n_blocks);
    return pool->refs[block] > 1;
}

int td_kv_pool_blocks(int64_t n_tokens)
{
    return (int)((n_tokens + TD_BLOCK - 1) / TD_BLOCK);
}
