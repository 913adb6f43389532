/* Encoding a piece. Three ways, same result:
 *   - the cache: prompts repeat their words, and a short piece with few ids fits in one cache line;
 *   - up to SHORT_BYTES: an array of symbols, scanned for the lowest rank after each merge. Quadratic, but n is small
 * and the scan is what the processor does best;
 *   - longer: a heap of (rank, position) over a linked list of symbols, O(n log n), so that a megabyte of one letter
 *     costs a fraction of a second. An entry is stale when the pair at its position has another rank by now; a rank
 *     names one pair, so nothing else needs comparing. */
#include "text/bpe.h"

#include <stdlib.h>

#include "text/bpe_internal.h"

enum {
    SHORT_BYTES = 64,
    CACHED_BYTES = 26,
    CACHED_IDS = 9,
    N_CACHED = 1 << 15, /* 2 MiB */
    HEAP_WIDTH = 4,
    KEPT_SYMBOLS = 1 << 14, /* of room for long pieces; more is given back after the piece */
};

typedef struct cached {
    uint8_t n_bytes; /* 0: empty */
    uint8_t n_ids;
    char bytes[CACHED_BYTES];
    int32_t ids[CACHED_IDS];
} cached;

_Static_assert(sizeof(cached) == 64, "a cached piece is one cache line");

typedef struct symbol {
    uint32_t id;
    uint32_t prev, next; /* positions; NONE at the ends */
    uint32_t rank;       /* of the pair that this symbol makes with the next; TD_BPE_NO_RANK: none */
    uint32_t merged;     /* what that pair becomes */
} symbol;

#define NONE UINT32_MAX

struct td_bpe_scratch {
    cached *cache;
    symbol *symbols;
    uint64_t *heap; /* rank << 32 | position, smallest first */
    size_t n_heap, cap;
};

static void release_long(td_bpe_scratch *x)
{
    free(x->symbols);
    free(x->heap);
    x->symbols = NULL;
    x->heap = NULL;
    x->cap = 0;
}

td_bpe_scratch *td_bpe_scratch_create(void)
{
    td_bpe_scratch *x = calloc(1, sizeof *x);
    if (!x) return NULL;
    x->cache = aligned_alloc(64, N_CACHED * sizeof *x->cache);
    if (!x->cache) {
        free(x);
        return NULL;
    }
    memset(x->cache, 0, N_CACHED * sizeof *x->cache);
    return x;
}

void td_bpe_scratch_destroy(td_bpe_scratch *x)
{
    if (!x) return;
    release_long(x);
    free(x->cache);
    free(x);
}

/* Merges in place; returns how many ids are left. rank[i] belongs to the pair (ids[i], ids[i + 1]). */
static size_t merge_short(const td_bpe *bpe, const unsigned char *piece, size_t n, uint32_t *ids)
{
    uint32_t rank[SHORT_BYTES], merged[SHORT_BYTES];
    for (size_t i = 0; i < n; i++) ids[i] = bpe->byte_ids[piece[i]];
    for (size_t i = 0; i + 1 < n; i++) {
        td_bpe_byte_pair pair = bpe->byte_pairs[piece[i] << 8 | piece[i + 1]];
        rank[i] = pair.rank;
        merged[i] = pair.id;
    }
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best]) best = i; /* strict: the leftmost wins */
        if (rank[best] == TD_BPE_NO_RANK) break;
        ids[best] = merged[best];
        n--;
        memmove(ids + best + 1, ids + best + 2, (n - best - 1) * sizeof *ids);
        memmove(rank + best, rank + best + 1, (n - best - 1) * sizeof *rank);
        memmove(merged + best, merged + best + 1, (n - best - 1) * sizeof *merged);
        for (size_t i = best ? best - 1 : 0; i <= best && i + 1 < n; i++) {
            const td_bpe_pair *pair = td_bpe_find_pair(bpe, ids[i], ids[i + 1]);
            rank[i] = pair ? pair->rank : TD_BPE_NO_RANK;
            merged[i] = pair ? pair->id : TD_BPE_NO_ID;
        }
    }
    return n;
}

/* Four children a node: half the levels of a binary heap, and in a heap of megabytes each level is a cache miss. */
static void sift_down(uint64_t *heap, size_t n, size_t i)
{
    uint64_t item = heap[i];
    for (size_t first; (first = HEAP_WIDTH * i + 1) < n;) {
        size_t best = first, end = first + HEAP_WIDTH < n ? first + HEAP_WIDTH : n;
        for (size_t child = first + 1; child < end; child++)
            if (heap[child] < heap[best]) best = child;
        if (heap[best] >= item) break;
        heap[i] = heap[best];
        i = best;
    }
    heap[i] = item;
}

static void heap_push(td_bpe_scratch *x, uint64_t item)
{
    size_t i = x->n_heap++, up;
    for (; i && x->heap[up = (i - 1) / HEAP_WIDTH] > item; i = up) x->heap[i] = x->heap[up];
    x->heap[i] = item;
}

static uint64_t heap_pop(td_bpe_scratch *x)
{
    uint64_t top = x->heap[0];
    x->heap[0] = x->heap[--x->n_heap];
    if (x->n_heap) sift_down(x->heap, x->n_heap, 0);
    return top;
}

/* Room for n symbols. Each merge takes an entry out and puts at most two in, and there are fewer than n merges. */
static td_status reserve_long(td_bpe_scratch *x, size_t n)
{
    if (x->cap >= n) return TD_OK;
    release_long(x);
    if (n < 1024) n = 1024;
    x->symbols = malloc(n * sizeof *x->symbols);
    x->heap = malloc(2 * n * sizeof *x->heap);
    if (!x->symbols || !x->heap) {
        release_long(x);
        return TD_ENOMEM;
    }
    x->cap = n;
    return TD_OK;
}

static void start_long(const td_bpe *bpe, td_bpe_scratch *x, const unsigned char *piece, uint32_t n)
{
    x->n_heap = 0;
    for (uint32_t i = 0; i < n; i++) {
        bool last = i + 1 == n;
        td_bpe_byte_pair pair =
            last ? (td_bpe_byte_pair){ TD_BPE_NO_RANK, TD_BPE_NO_ID } : bpe->byte_pairs[piece[i] << 8 | piece[i + 1]];
        x->symbols[i] = (symbol){ bpe->byte_ids[piece[i]], i ? i - 1 : NONE, last ? NONE : i + 1, pair.rank, pair.id };
        if (pair.rank != TD_BPE_NO_RANK) x->heap[x->n_heap++] = (uint64_t)pair.rank << 32 | i;
    }
    for (size_t i = x->n_heap < 2 ? 0 : (x->n_heap - 2) / HEAP_WIDTH + 1; i-- > 0;) sift_down(x->heap, x->n_heap, i);
}

/* The symbol at pos changed, or the one after it did. */
static void update_pair(const td_bpe *bpe, td_bpe_scratch *x, uint32_t pos)
{
    symbol *s = &x->symbols[pos];
    const td_bpe_pair *pair = s->next == NONE ? NULL : td_bpe_find_pair(bpe, s->id, x->symbols[s->next].id);
    s->rank = pair ? pair->rank : TD_BPE_NO_RANK;
    s->merged = pair ? pair->id : TD_BPE_NO_ID;
    if (pair) heap_push(x, (uint64_t)pair->rank << 32 | pos);
}

static void merge_long(const td_bpe *bpe, td_bpe_scratch *x)
{
    while (x->n_heap) {
        uint64_t top = heap_pop(x);
        uint32_t pos = (uint32_t)top;
        symbol *left = &x->symbols[pos];
        if (left->rank != (uint32_t)(top >> 32)) continue;
        symbol *right = &x->symbols[left->next];
        left->id = left->merged;
        right->rank = TD_BPE_NO_RANK; /* gone: its entries are stale from now on */
        left->next = right->next;
        if (left->next != NONE) x->symbols[left->next].prev = pos;
        update_pair(bpe, x, pos);
        if (left->prev != NONE) update_pair(bpe, x, left->prev);
    }
}

static td_status encode_long(const td_bpe *bpe, td_bpe_scratch *x, const char *piece, size_t n_bytes, td_ids *ids)
{
    size_t n_before = ids->n;
    td_status st = reserve_long(x, n_bytes);
    if (st != TD_OK) return st;
    start_long(bpe, x, (const unsigned char *)piece, (uint32_t)n_bytes);
    merge_long(bpe, x);
    for (uint32_t pos = 0; pos != NONE && st == TD_OK; pos = x->symbols[pos].next)
        st = td_ids_push(ids, (int32_t)x->symbols[pos].id);
    if (st != TD_OK) ids->n = n_before;
    if (x->cap > KEPT_SYMBOLS) release_long(x);
    return st;
}

/* As cached[hash]: a newer piece replaces what stood there. */
static td_status encode_short(const td_bpe *bpe, cached *slot, const char *piece, size_t n_bytes, td_ids *ids)
{
    uint32_t found[SHORT_BYTES];
    size_t n = 1;
    found[0] = bpe->ignore_merges ? td_bpe_find(bpe, piece, n_bytes) : TD_BPE_NO_ID;
    if (found[0] == TD_BPE_NO_ID) n = merge_short(bpe, (const unsigned char *)piece, n_bytes, found);
    td_status st = td_ids_append(ids, (const int32_t *)found, n);
    if (st == TD_OK && n_bytes <= CACHED_BYTES && n <= CACHED_IDS) {
        slot->n_bytes = (uint8_t)n_bytes;
        slot->n_ids = (uint8_t)n;
        memcpy(slot->bytes, piece, n_bytes);
        memcpy(slot->ids, found, n * sizeof *found);
    }
    return st;
}

td_status td_bpe_encode(const td_bpe *bpe, td_bpe_scratch *x, const char *piece, size_t n_bytes, td_ids *ids)
{
    if (n_bytes == 0) return TD_OK;
    if (n_bytes <= SHORT_BYTES) {
        cached *slot = &x->cache[td_bpe_hash(piece, n_bytes) & (N_CACHED - 1)];
        if (slot->n_bytes == n_bytes && memcmp(slot->bytes, piece, n_bytes) == 0)
            return td_ids_append(ids, slot->ids, slot->n_ids);
        return encode_short(bpe, slot, piece, n_bytes, ids);
    }
    if (bpe->ignore_merges) {
        uint32_t id = td_bpe_find(bpe, piece, n_bytes);
        if (id != TD_BPE_NO_ID) return td_ids_push(ids, (int32_t)id);
    }
    return encode_long(bpe, x, piece, n_bytes, ids);
}
