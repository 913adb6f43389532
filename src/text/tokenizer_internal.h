/* What a tokenizer is made of; shared by tokenizer.c (using it) and tokenizer_file.c (reading it). */
#ifndef TD_TEXT_TOKENIZER_INTERNAL_H
#define TD_TEXT_TOKENIZER_INTERNAL_H

#include <pthread.h>

#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/pretokenize.h"
#include "text/tokenizer.h"

TD_BEGIN_C

enum {
    TD_MAX_SPLITTERS = 8,     /* steps of one pre_tokenizer */
    TD_MAX_SPECIAL_IDS = 16,  /* before or behind the text, by the post_processor */
    TD_MAX_KEPT_SCRATCH = 16, /* 2 MiB each; a call beyond that many at once makes its own and frees it */
};

/* Scratch memory that no call is using. */
typedef struct td_scratch_pool {
    pthread_mutex_t mutex;
    td_bpe_scratch *kept[TD_MAX_KEPT_SCRATCH];
    int n_kept;
} td_scratch_pool;

/* added_by_id[id]: how the id got its bytes. */
enum { TD_ID_PLAIN, TD_ID_ADDED, TD_ID_SPECIAL };

struct td_tokenizer {
    td_unicode unicode;
    td_bpe bpe;                       /* without added tokens */
    td_added_tokens added;            /* searched in the text as given */
    td_added_tokens added_normalized; /* searched in the normalized text */
    td_bpe_token *id_bytes;           /* [n_ids], offsets into bytes */
    char *bytes;
    uint8_t *id_kind; /* [n_ids] */
    int32_t n_ids;
    bool nfc;
    td_splitter *splitters[TD_MAX_SPLITTERS]; /* each splits the pieces of the one before */
    int n_splitters;
    int32_t before[TD_MAX_SPECIAL_IDS], behind[TD_MAX_SPECIAL_IDS];
    int n_before, n_behind;
    td_scratch_pool *pool; /* a pointer, so that encoding with a const tokenizer can lock it */
};

/* Fills a zeroed tokenizer from a tokenizer.json; on failure the caller destroys what is there.
 * err does not name the file yet. */
td_status td_tokenizer_read(td_tokenizer *tok, const char *json, size_t n_bytes, td_error *err);

TD_END_C
#endif
