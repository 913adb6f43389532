/* Between bpe_table.c and bpe.c: hashing and the look-up of a pair, inlined because encoding is made of little else. */
#ifndef TD_TEXT_BPE_INTERNAL_H
#define TD_TEXT_BPE_INTERNAL_H

#include <string.h>

#include "text/bpe.h"

TD_BEGIN_C

#define TD_BPE_NO_RANK UINT32_MAX

/* Mixes eight bytes at a time; the top bits are folded down, so that masking is enough. */
static inline uint64_t td_bpe_hash(const char *bytes, size_t n_bytes)
{
    uint64_t h = 0x9E3779B97F4A7C15u ^ n_bytes, part = 0;
    for (; n_bytes >= 8; n_bytes -= 8, bytes += 8) {
        memcpy(&part, bytes, 8);
        h = (h ^ part) * 0xFF51AFD7ED558CCDu;
        h ^= h >> 32;
    }
    part = 0;
    if (n_bytes & 4) {
        uint32_t four;
        memcpy(&four, bytes, 4);
        part = four;
        bytes += 4;
    }
    for (n_bytes &= 3; n_bytes; n_bytes--) part = part << 8 | (unsigned char)*bytes++;
    h = (h ^ part) * 0xFF51AFD7ED558CCDu;
    return h ^ h >> 32;
}

static inline size_t td_bpe_pair_slot(const td_bpe *bpe, uint32_t left, uint32_t right)
{
    return (size_t)((((uint64_t)left << 32 | right) * 0x9E3779B97F4A7C15u) >> bpe->pairs_shift);
}

static inline const td_bpe_pair *td_bpe_find_pair(const td_bpe *bpe, uint32_t left, uint32_t right)
{
    size_t i = td_bpe_pair_slot(bpe, left, right);
    for (;; i = (i + 1) & (bpe->n_pairs - 1)) {
        const td_bpe_pair *pair = &bpe->pairs[i];
        if (pair->id == TD_BPE_NO_ID) return NULL;
        if (pair->left == left && pair->right == right) return pair;
    }
}

TD_END_C
#endif
