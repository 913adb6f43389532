/* Byte-pair encoding: a piece of text to vocabulary ids, by merging the adjacent pair of lowest rank (leftmost first)
 * until none is left. Everything is in bytes: the GPT-2 byte alphabet exists only in the file. */
#ifndef TD_TEXT_BPE_H
#define TD_TEXT_BPE_H

#include "base/status.h"
#include "text/tokenizer.h"

TD_BEGIN_C

#define TD_BPE_NO_ID           UINT32_MAX
#define TD_BPE_MAX_IDS         (1u << 21) /* an id at or above this is refused: tables are sized by the largest */
#define TD_BPE_MERGE_MAX_BYTES 1024       /* of a token that a merge makes; the longest in known files has 256 */

typedef struct td_bpe_token {
    uint32_t offset;
    uint32_t n_bytes; /* TD_BPE_NO_ID: no token has this id */
} td_bpe_token;

typedef struct td_bpe_pair {
    uint32_t left, right;
    uint32_t rank;
    uint32_t id; /* of the merged token; TD_BPE_NO_ID: an empty slot */
} td_bpe_pair;

typedef struct td_bpe_byte_pair {
    uint32_t rank, id; /* id TD_BPE_NO_ID: the two bytes do not merge */
} td_bpe_byte_pair;

typedef struct td_bpe {
    char *bytes; /* of all tokens, one behind the other */
    size_t n_bytes, bytes_cap;
    td_bpe_token *tokens; /* [n_ids] */
    uint32_t n_ids, ids_cap;
    uint32_t n_tokens; /* of them in use */

    uint32_t *words; /* open addressing: ids by hash of their bytes; n_words a power of two */
    size_t n_words;
    td_bpe_pair *pairs; /* open addressing by (left, right); n_pairs a power of two */
    size_t n_pairs;
    unsigned pairs_shift; /* 64 - log2(n_pairs) */
    uint32_t byte_ids[256];
    td_bpe_byte_pair *byte_pairs; /* [256 * 256]: the first look-ups of every piece, without hashing */
    bool ignore_merges;           /* a piece that is a token as a whole becomes that token */
} td_bpe;

/* Building: init, add_token for each, index_tokens, begin_merges, add_merge for each in order of rank, finish. */
void td_bpe_init(td_bpe *bpe);
void td_bpe_deinit(td_bpe *bpe);

/* TD_EINVAL: id too large, or taken. TD_EFULL: 4 GiB of token bytes. */
td_status td_bpe_add_token(td_bpe *bpe, uint32_t id, const char *bytes, size_t n_bytes);

/* Makes tokens findable by their bytes; skip[id] (may be NULL) leaves one out. TD_EINVAL: two have the same bytes. */
td_status td_bpe_index_tokens(td_bpe *bpe, const bool *skip);

/* TD_EFORMAT: *missing_byte is a byte that is no token. */
td_status td_bpe_begin_merges(td_bpe *bpe, size_t n_merges, int *missing_byte);

/* TD_ENOTFOUND: left, right or their concatenation is no token. The same pair again replaces the earlier rank. */
td_status td_bpe_add_merge(td_bpe *bpe, const char *left, size_t n_left, const char *right, size_t n_right,
                           uint32_t rank);
td_status td_bpe_finish(td_bpe *bpe);

uint32_t td_bpe_find(const td_bpe *bpe, const char *bytes, size_t n_bytes); /* or TD_BPE_NO_ID */

/* One thread's memory for encoding: a cache of short pieces, and room for a long one. */
typedef struct td_bpe_scratch td_bpe_scratch;
td_bpe_scratch *td_bpe_scratch_create(void); /* NULL: out of memory */
void td_bpe_scratch_destroy(td_bpe_scratch *scratch);

/* Appends the ids of one piece; at most 2^31 - 1 bytes. TD_ENOMEM: *ids as before. */
td_status td_bpe_encode(const td_bpe *bpe, td_bpe_scratch *scratch, const char *piece, size_t n_bytes, td_ids *ids);

TD_END_C
#endif
