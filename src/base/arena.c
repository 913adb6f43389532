/* See arena.h. */
#include "base/arena.h"

#include <stdlib.h>
#include <string.h>

struct td_arena_block {
    td_arena_block *next;
};

enum { BLOCK_MIN_BYTES = 64 << 10, BLOCK_HEAD_BYTES = 64 };

void td_arena_init(td_arena *arena, size_t limit_bytes)
{
    *arena = (td_arena){ .limit_bytes = limit_bytes };
}

void td_arena_init_fixed(td_arena *arena, void *base, size_t cap_bytes)
{
    *arena = (td_arena){ .base = (unsigned char *)base, .cap_bytes = cap_bytes, .fixed = true };
}

void td_arena_deinit(td_arena *arena)
{
    td_arena_block *next;
    for (td_arena_block *block = arena->blocks; block; block = next) {
        next = block->next;
        free(block);
    }
    *arena = (td_arena){ 0 };
}

static bool grow(td_arena *arena, size_t n_bytes)
{
    size_t bytes = arena->total_bytes / 2; /* grow geometrically: few blocks, at most half wasted */
    if (bytes < BLOCK_MIN_BYTES) bytes = BLOCK_MIN_BYTES;
    if (bytes < n_bytes) bytes = n_bytes;
    if (bytes > SIZE_MAX - BLOCK_HEAD_BYTES) return false;
    if (arena->limit_bytes &&
        (arena->total_bytes > arena->limit_bytes || bytes > arena->limit_bytes - arena->total_bytes)) {
        if (arena->total_bytes > arena->limit_bytes || n_bytes > arena->limit_bytes - arena->total_bytes) return false;
        bytes = n_bytes;
    }
    td_arena_block *block = (td_arena_block *)calloc(1, BLOCK_HEAD_BYTES + bytes);
    if (!block) return false;
    block->next = arena->blocks;
    arena->blocks = block;
    arena->base = (unsigned char *)block + BLOCK_HEAD_BYTES;
    arena->used_bytes = 0;
    arena->cap_bytes = bytes;
    arena->total_bytes += bytes;
    return true;
}

void *td_arena_take(td_arena *arena, size_t n_bytes, size_t align)
{
    td_check(align && (align & (align - 1)) == 0);
    if (n_bytes > SIZE_MAX - align) return NULL;
    size_t at = ((uintptr_t)arena->base + arena->used_bytes + align - 1) / align * align - (uintptr_t)arena->base;
    if (at > arena->cap_bytes || n_bytes > arena->cap_bytes - at) {
        if (arena->fixed || !grow(arena, n_bytes + align - 1)) return NULL;
        at = ((uintptr_t)arena->base + align - 1) / align * align - (uintptr_t)arena->base;
    }
    arena->used_bytes = at + n_bytes;
    return arena->base ? arena->base + at : NULL;
}

char *td_arena_strndup(td_arena *arena, const char *text, size_t n_bytes)
{
    if (n_bytes == SIZE_MAX) return NULL;
    char *copy = (char *)td_arena_take(arena, n_bytes + 1, 1);
    if (!copy) return NULL;
    memcpy(copy, text, n_bytes);
    copy[n_bytes] = '\0';
    return copy;
}

char *td_arena_strdup(td_arena *arena, const char *text)
{
    return td_arena_strndup(arena, text, strlen(text));
}
