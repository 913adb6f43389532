/* The tables of the merge rules and how they are filled. Ranks pass 2^18 in the files that matter, so pairs are kept in
 * full: 16 bytes a slot, a quarter to a half of the slots used, one cache line touched by most look-ups. */
#include <stdlib.h>
#include <string.h>

#include "text/bpe.h"
#include "text/bpe_internal.h"

void td_bpe_init(td_bpe *bpe)
{
    *bpe = (td_bpe){ 0 };
}

void td_bpe_deinit(td_bpe *bpe)
{
    free(bpe->bytes);
    free(bpe->tokens);
    free(bpe->words);
    free(bpe->pairs);
    free(bpe->byte_pairs);
    td_bpe_init(bpe);
}

static td_status grow_ids(td_bpe *bpe, uint32_t n_ids)
{
    if (n_ids > bpe->ids_cap) {
        uint32_t cap = bpe->ids_cap ? bpe->ids_cap : 1024;
        while (cap < n_ids) cap *= 2;
        td_bpe_token *tokens = realloc(bpe->tokens, cap * sizeof *tokens);
        if (!tokens) return TD_ENOMEM;
        bpe->tokens = tokens;
        bpe->ids_cap = cap;
    }
    for (; bpe->n_ids < n_ids; bpe->n_ids++) bpe->tokens[bpe->n_ids] = (td_bpe_token){ 0, TD_BPE_NO_ID };
    return TD_OK;
}

static td_status grow_bytes(td_bpe *bpe, size_t n_bytes)
{
    if (bpe->bytes_cap - bpe->n_bytes >= n_bytes) return TD_OK;
    if (n_bytes > UINT32_MAX - 1 - bpe->n_bytes) return TD_EFULL;
    size_t cap = 2 * bpe->bytes_cap + n_bytes + 4096;
    char *bytes = realloc(bpe->bytes, cap);
    if (!bytes) return TD_ENOMEM;
    bpe->bytes = bytes;
    bpe->bytes_cap = cap;
    return TD_OK;
}

td_status td_bpe_add_token(td_bpe *bpe, uint32_t id, const char *bytes, size_t n_bytes)
{
    if (id >= TD_BPE_MAX_IDS || (id < bpe->n_ids && bpe->tokens[id].n_bytes != TD_BPE_NO_ID)) return TD_EINVAL;
    td_status st = grow_bytes(bpe, n_bytes);
    if (st == TD_OK) st = grow_ids(bpe, id + 1 > bpe->n_ids ? id + 1 : bpe->n_ids);
    if (st != TD_OK) return st;
    bpe->tokens[id] = (td_bpe_token){ (uint32_t)bpe->n_bytes, (uint32_t)n_bytes };
    if (n_bytes) memcpy(bpe->bytes + bpe->n_bytes, bytes, n_bytes);
    bpe->n_bytes += n_bytes;
    bpe->n_tokens++;
    return TD_OK;
}

static bool token_is(const td_bpe *bpe, uint32_t id, const char *bytes, size_t n_bytes)
{
    td_bpe_token t = bpe->tokens[id];
    return t.n_bytes == n_bytes && memcmp(bpe->bytes + t.offset, bytes, n_bytes) == 0;
}

/* The slot that holds these bytes, or the empty one where they belong. */
static uint32_t *word_slot(const td_bpe *bpe, const char *bytes, size_t n_bytes)
{
    size_t mask = bpe->n_words - 1, i = td_bpe_hash(bytes, n_bytes) & mask;
    while (bpe->words[i] != TD_BPE_NO_ID && !token_is(bpe, bpe->words[i], bytes, n_bytes)) i = (i + 1) & mask;
    return &bpe->words[i];
}

td_status td_bpe_index_tokens(td_bpe *bpe, const bool *skip)
{
    bpe->n_words = 1024;
    while (bpe->n_words < 2 * (size_t)bpe->n_tokens) bpe->n_words *= 2;
    bpe->words = malloc(bpe->n_words * sizeof *bpe->words);
    if (!bpe->words) return TD_ENOMEM;
    memset(bpe->words, 0xFF, bpe->n_words * sizeof *bpe->words);
    for (uint32_t id = 0; id < bpe->n_ids; id++) {
        td_bpe_token t = bpe->tokens[id];
        if (t.n_bytes == TD_BPE_NO_ID || (skip && skip[id])) continue;
        uint32_t *slot = word_slot(bpe, bpe->bytes + t.offset, t.n_bytes);
        if (*slot != TD_BPE_NO_ID) return TD_EINVAL;
        *slot = id;
    }
    return TD_OK;
}

uint32_t td_bpe_find(const td_bpe *bpe, const char *bytes, size_t n_bytes)
{
    return *word_slot(bpe, bytes, n_bytes);
}

td_status td_bpe_begin_merges(td_bpe *bpe, size_t n_merges, int *missing_byte)
{
    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        bpe->byte_ids[b] = td_bpe_find(bpe, &byte, 1);
        if (bpe->byte_ids[b] == TD_BPE_NO_ID) {
            *missing_byte = b;
            return TD_EFORMAT;
        }
    }
    bpe->n_pairs = 1024;
    bpe->pairs_shift = 54;
    while (bpe->n_pairs < 2 * n_merges) {
        bpe->n_pairs *= 2;
        bpe->pairs_shift--;
    }
    bpe->pairs = malloc(bpe->n_pairs * sizeof *bpe->pairs);
    bpe->byte_pairs = malloc(65536 * sizeof *bpe->byte_pairs);
    if (!bpe->pairs || !bpe->byte_pairs) return TD_ENOMEM;
    memset(bpe->pairs, 0xFF, bpe->n_pairs * sizeof *bpe->pairs);
    return TD_OK;
}

td_status td_bpe_add_merge(td_bpe *bpe, const char *left, size_t n_left, const char *right, size_t n_right,
                           uint32_t rank)
{
    char both[TD_BPE_MERGE_MAX_BYTES];
    if (n_left + n_right > sizeof both) return TD_ENOTFOUND;
    memcpy(both, left, n_left);
    memcpy(both + n_left, right, n_right);
    uint32_t l = td_bpe_find(bpe, left, n_left), r = td_bpe_find(bpe, right, n_right);
    uint32_t id = td_bpe_find(bpe, both, n_left + n_right);
    if (l == TD_BPE_NO_ID || r == TD_BPE_NO_ID || id == TD_BPE_NO_ID) return TD_ENOTFOUND;
    size_t i = td_bpe_pair_slot(bpe, l, r);
    while (bpe->pairs[i].id != TD_BPE_NO_ID && !(bpe->pairs[i].left == l && bpe->pairs[i].right == r))
        i = (i + 1) & (bpe->n_pairs - 1);
    bpe->pairs[i] = (td_bpe_pair){ l, r, rank, id };
    return TD_OK;
}

td_status td_bpe_finish(td_bpe *bpe)
{
    for (uint32_t i = 0; i < 65536; i++) {
        const td_bpe_pair *pair = td_bpe_find_pair(bpe, bpe->byte_ids[i >> 8], bpe->byte_ids[i & 255]);
        bpe->byte_pairs[i] =
            pair ? (td_bpe_byte_pair){ pair->rank, pair->id } : (td_bpe_byte_pair){ TD_BPE_NO_RANK, TD_BPE_NO_ID };
    }
    char *bytes = realloc(bpe->bytes, bpe->n_bytes + 1); /* + 1: never a request for nothing */
    if (bytes) {
        bpe->bytes = bytes;
        bpe->bytes_cap = bpe->n_bytes + 1;
    }
    return TD_OK;
}
