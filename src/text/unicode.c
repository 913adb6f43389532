/* The class table. One byte a code point would be 1.1 MB, most of it equal: blocks of 256 that hold one value share
 * storage, which leaves about 100 KB, and what text uses of that stays in the first caches. */
#include "text/unicode.h"

#include <stdlib.h>
#include <string.h>

#define N_CODE_POINTS 0x110000u

static void mark_ranges(uint8_t *flat, const td_unicode_range *ranges, size_t n, uint8_t bit)
{
    for (size_t i = 0; i < n; i++)
        for (uint32_t c = ranges[i].first; c <= ranges[i].last; c++) flat[c] |= bit;
}

/* A character is already in form C and cannot join its predecessor unless it combines, is the second of a pair that
 * composes (Hangul vowels and trailing consonants too), or decomposes for good. */
static void mark_compose(uint8_t *flat, const td_unicode_tables *t)
{
    for (size_t i = 0; i < t->n_combining; i++)
        for (uint32_t c = t->combining[i].first; c <= t->combining[i].last; c++) flat[c] |= TD_UNICODE_COMPOSE;
    for (size_t i = 0; i < t->n_decompositions; i++) flat[t->decompositions[i].a] |= TD_UNICODE_COMPOSE;
    for (size_t i = 0; i < t->n_compositions; i++) flat[t->compositions[i].c] &= (uint8_t)~TD_UNICODE_COMPOSE;
    for (size_t i = 0; i < t->n_compositions; i++) flat[t->compositions[i].b] |= TD_UNICODE_COMPOSE;
    for (uint32_t c = 0x1161; c <= 0x1175; c++) flat[c] |= TD_UNICODE_COMPOSE;
    for (uint32_t c = 0x11A8; c <= 0x11C2; c++) flat[c] |= TD_UNICODE_COMPOSE;
}

static bool is_uniform(const uint8_t *block)
{
    return memcmp(block, block + 1, 255) == 0;
}

/* Moves the blocks to the front of flat, where each is kept; returns the bytes in use. */
static size_t share_blocks(td_unicode *unicode, uint8_t *flat)
{
    uint32_t uniform_at[256], n = 0;
    memset(uniform_at, 0xFF, sizeof uniform_at);
    for (uint32_t i = 0; i < N_CODE_POINTS >> 8; i++) {
        uint8_t *block = flat + (size_t)i * 256, value = block[0];
        bool uniform = is_uniform(block);
        if (uniform && uniform_at[value] != UINT32_MAX) {
            unicode->first_of_block[i] = uniform_at[value];
            continue;
        }
        memmove(flat + n, block, 256);
        unicode->first_of_block[i] = n;
        if (uniform) uniform_at[value] = n;
        n += 256;
    }
    return n;
}

td_status td_unicode_init(td_unicode *unicode)
{
    const td_unicode_tables *t = td_unicode_tables_get();
    uint8_t *flat = calloc(N_CODE_POINTS, 1);
    if (!flat) return TD_ENOMEM;
    mark_ranges(flat, t->letter, t->n_letter, TD_UNICODE_LETTER);
    mark_ranges(flat, t->number, t->n_number, TD_UNICODE_NUMBER);
    mark_ranges(flat, t->space, t->n_space, TD_UNICODE_SPACE);
    mark_ranges(flat, t->word, t->n_word, TD_UNICODE_WORD);
    mark_compose(flat, t);
    size_t n_bytes = share_blocks(unicode, flat);
    uint8_t *shrunk = realloc(flat, n_bytes);
    unicode->classes = shrunk ? shrunk : flat;
    return TD_OK;
}

void td_unicode_deinit(td_unicode *unicode)
{
    free(unicode->classes);
    unicode->classes = NULL;
}
