/* Text to token ids and back: byte-level BPE as a Hugging Face tokenizer.json describes it (docs/tokenizer.md).
 *
 *     td_tokenizer *tok;
 *     td_status st = td_tokenizer_open("models/demo/tokenizer.json", &tok, err);
 *     td_ids ids = { 0 };
 *     st = td_tokenizer_encode(tok, text, n_bytes, 0, &ids, err);
 *     ... ids.data[0 .. ids.n - 1] ...
 *     td_ids_deinit(&ids);
 *     td_tokenizer_destroy(tok);
 *
 * A file that this code would encode differently from the reference library is refused at open, with the name of the
 * part that is not known. */
#ifndef TD_TEXT_TOKENIZER_H
#define TD_TEXT_TOKENIZER_H

#include "base/status.h"

TD_BEGIN_C

typedef struct td_tokenizer td_tokenizer;

/* A growing list of ids; all zero is empty. The caller owns it and frees it with td_ids_deinit(). */
typedef struct td_ids {
    int32_t *data;
    size_t n;
    size_t cap;
} td_ids;

td_status td_ids_push(td_ids *ids, int32_t id); /* TD_ENOMEM: the list is as it was */
td_status td_ids_append(td_ids *ids, const int32_t *data, size_t n);
void td_ids_deinit(td_ids *ids);

/* Reads the file whole. *out is the caller's, destroyed with td_tokenizer_destroy(). TD_EIO: cannot be read;
 * TD_EFORMAT: not a tokenizer.json or inconsistent; TD_EUNSUPPORTED: a part that is not known. err names file and
 * field. */
td_status td_tokenizer_open(const char *path, td_tokenizer **out, td_error *err);

/* The same from memory, which may be freed afterwards; name stands in error texts. */
td_status td_tokenizer_open_memory(const char *name, const void *json, size_t n_bytes, td_tokenizer **out,
                                   td_error *err);

void td_tokenizer_destroy(td_tokenizer *tok); /* NULL is allowed; no encode may be running */

/* From now on the added token with this id never arises from text: its string is encoded as ordinary text, unless the
 * call says TD_ENCODE_RESERVED. For media placeholders, which a person may quote. Call before other threads use tok.
 * TD_ENOTFOUND: not an added token. */
td_status td_tokenizer_reserve(td_tokenizer *tok, int32_t id);

enum {
    TD_ENCODE_PLAIN = 1,       /* no added token is recognised: all is ordinary text */
    TD_ENCODE_RESERVED = 2,    /* reserved tokens are recognised as well: text that the server itself wrote */
    TD_ENCODE_ADD_SPECIAL = 4, /* what the file's post-processor puts around the text (BOS; nothing for GLM) */
};

/* Appends the ids of text to *ids. Safe from many threads at once. Time is linear in n_bytes but for a logarithm in the
 * length of the longest piece. text should be UTF-8; a byte that is not part of a valid sequence is kept and counts as
 * one character that is no letter, number or space. After a failure (TD_ENOMEM; TD_EINVAL: 2 GiB or more) *ids holds
 * what it held before. */
td_status td_tokenizer_encode(const td_tokenizer *tok, const char *text, size_t n_bytes, unsigned flags, td_ids *ids,
                              td_error *err);

/* The bytes an id stands for: not always whole UTF-8 characters (utf8_stream.h joins them). *bytes belongs to tok.
 * TD_ENOTFOUND: no such id (outputs untouched). */
td_status td_tokenizer_id_bytes(const td_tokenizer *tok, int32_t id, const char **bytes, size_t *n_bytes);

/* Id of the added token with exactly this content, or -1. */
int32_t td_tokenizer_find_added(const td_tokenizer *tok, const char *content);

/* Highest id + 1: ids are 0 .. n_ids - 1, and a file may leave holes. */
int32_t td_tokenizer_n_ids(const td_tokenizer *tok);

bool td_tokenizer_is_added(const td_tokenizer *tok, int32_t id);   /* in the file's added_tokens */
bool td_tokenizer_is_special(const td_tokenizer *tok, int32_t id); /* added, and marked "special" */

TD_END_C
#endif
