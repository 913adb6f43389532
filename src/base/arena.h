/* Arenas: one owner, many pieces, freed whole. Two kinds share one type:
 *   a fixed arena (td_arena_init_fixed) hands out a given buffer, never grows: what the plan sized, process lifetime;
 *   a growing arena (td_arena_init) takes blocks from malloc: request lifetime, parsers.
 * With base == NULL and cap_bytes == SIZE_MAX a fixed arena only counts: the plan runs the same code that later
 * takes. */
#ifndef TD_BASE_ARENA_H
#define TD_BASE_ARENA_H

#include "base/status.h"

TD_BEGIN_C

typedef struct td_arena_block td_arena_block;

typedef struct td_arena {
    unsigned char *base;    /* current block (NULL: counting, or nothing taken yet) */
    size_t used_bytes;      /* of the current block */
    size_t cap_bytes;       /* of the current block */
    size_t limit_bytes;     /* growing: total that may be taken; 0 = no limit */
    size_t total_bytes;     /* growing: sum of all blocks */
    td_arena_block *blocks; /* growing: blocks to free */
    bool fixed;
} td_arena;

void td_arena_init(td_arena *arena, size_t limit_bytes);
void td_arena_init_fixed(td_arena *arena, void *base, size_t cap_bytes);
void td_arena_deinit(td_arena *arena); /* frees a growing arena's blocks; a fixed arena's buffer is the caller's */

/* n_bytes at a multiple of align (a power of two); growing arenas return zeroed memory, fixed ones do not touch it.
 * NULL when the arena is full or malloc fails (and always NULL while counting: look at used_bytes). */
void *td_arena_take(td_arena *arena, size_t n_bytes, size_t align);

/* Copies of bytes or a string into the arena, with a terminating zero; NULL as above. */
char *td_arena_strndup(td_arena *arena, const char *text, size_t n_bytes);
char *td_arena_strdup(td_arena *arena, const char *text);

TD_END_C
#endif
