/* Encoding: added tokens cut the text, what is between is normalized (Qwen), split into pieces and merged. A tokenizer
 * never changes after open; the memory that encoding needs is lent to one call at a time from a small pool, so that the
 * cache of pieces stays warm however many threads come and go. */
#include "text/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/tokenizer_internal.h"

#define MAX_FILE_BYTES (256u * 1024 * 1024)

/* ---- ids ---- */

static td_status ids_reserve(td_ids *ids, size_t n)
{
    if (ids->cap - ids->n >= n) return TD_OK;
    size_t cap = 2 * ids->cap + n + 64;
    int32_t *data = realloc(ids->data, cap * sizeof *data);
    if (!data) return TD_ENOMEM;
    ids->data = data;
    ids->cap = cap;
    return TD_OK;
}

td_status td_ids_push(td_ids *ids, int32_t id)
{
    return td_ids_append(ids, &id, 1);
}

td_status td_ids_append(td_ids *ids, const int32_t *data, size_t n)
{
    td_status st = ids_reserve(ids, n);
    if (st != TD_OK) return st;
    for (size_t i = 0; i < n; i++) ids->data[ids->n + i] = data[i];
    ids->n += n;
    return TD_OK;
}

void td_ids_deinit(td_ids *ids)
{
    free(ids->data);
    *ids = (td_ids){ 0 };
}

/* ---- open ---- */

static td_added_token *added_by_id(const td_tokenizer *tok, int32_t id)
{
    const td_added_tokens *sets[] = { &tok->added, &tok->added_normalized };
    for (size_t k = 0; k < 2; k++)
        for (size_t i = 0; i < sets[k]->n; i++)
            if (sets[k]->tokens[i].id == id) return &sets[k]->tokens[i];
    return NULL;
}

/* The bytes of an added token replace what the vocabulary says of its id. */
static td_status place_added(td_tokenizer *tok, const td_added_tokens *set, size_t *used, td_error *err)
{
    for (size_t i = 0; i < set->n; i++) {
        const td_added_token *t = &set->tokens[i];
        if (tok->id_kind[t->id] != TD_ID_PLAIN)
            return td_fail(err, TD_EFORMAT, "added_tokens: id %d twice", (int)t->id);
        memcpy(tok->bytes + *used, t->content, t->n_bytes);
        tok->id_bytes[t->id] = (td_bpe_token){ (uint32_t)*used, (uint32_t)t->n_bytes };
        tok->id_kind[t->id] = t->special ? TD_ID_SPECIAL : TD_ID_ADDED;
        *used += t->n_bytes;
    }
    return TD_OK;
}

/* One table from id to bytes for all kinds of tokens. */
static td_status make_id_table(td_tokenizer *tok, td_error *err)
{
    const td_added_tokens *sets[] = { &tok->added, &tok->added_normalized };
    size_t n_bytes = tok->bpe.n_bytes, n_ids = tok->bpe.n_ids;
    for (size_t k = 0; k < 2; k++)
        for (size_t i = 0; i < sets[k]->n; i++) {
            n_bytes += sets[k]->tokens[i].n_bytes;
            if ((size_t)sets[k]->tokens[i].id + 1 > n_ids) n_ids = (size_t)sets[k]->tokens[i].id + 1;
        }
    if (n_bytes >= UINT32_MAX) return td_fail(err, TD_EFORMAT, "more than 4 GiB of tokens");
    tok->bytes = malloc(n_bytes + 1);
    tok->id_bytes = malloc((n_ids + 1) * sizeof *tok->id_bytes);
    tok->id_kind = calloc(n_ids + 1, 1);
    if (!tok->bytes || !tok->id_bytes || !tok->id_kind) return td_fail(err, TD_ENOMEM, "out of memory");
    memcpy(tok->bytes, tok->bpe.bytes, tok->bpe.n_bytes);
    memcpy(tok->id_bytes, tok->bpe.tokens, tok->bpe.n_ids * sizeof *tok->id_bytes);
    for (size_t i = tok->bpe.n_ids; i < n_ids; i++) tok->id_bytes[i] = (td_bpe_token){ 0, TD_BPE_NO_ID };
    tok->n_ids = (int32_t)n_ids;
    size_t used = tok->bpe.n_bytes;
    td_status st = place_added(tok, sets[0], &used, err);
    return st == TD_OK ? place_added(tok, sets[1], &used, err) : st;
}

td_status td_tokenizer_open_memory(const char *name, const void *json, size_t n_bytes, td_tokenizer **out,
                                   td_error *err)
{
    td_tokenizer *tok = calloc(1, sizeof *tok);
    td_scratch_pool *pool = calloc(1, sizeof *pool);
    if (!tok || !pool) {
        free(tok);
        free(pool);
        return td_fail(err, TD_ENOMEM, "%s: out of memory", name);
    }
    pthread_mutex_init(&pool->mutex, NULL);
    tok->pool = pool;
    td_status st = td_tokenizer_read(tok, json, n_bytes, err);
    if (st == TD_OK) st = make_id_table(tok, err);
    if (st != TD_OK) {
        td_tokenizer_destroy(tok);
        td_error_prefix(err, "%s", name);
        return st;
    }
    *out = tok;
    return TD_OK;
}

static td_status read_file(const char *path, char **data, size_t *n_bytes, td_error *err)
{
    FILE *f = fopen(path, "rb");
    if (!f) return td_fail(err, TD_EIO, "%s: %m", path);
    td_status st = TD_OK;
    char *buffer = NULL;
    long end = fseek(f, 0, SEEK_END) == 0 ? ftell(f) : -1;
    if (end < 0 || fseek(f, 0, SEEK_SET) != 0) {
        st = td_fail(err, TD_EIO, "%s: %m", path);
    } else if ((unsigned long)end > MAX_FILE_BYTES) {
        st = td_fail(err, TD_EFORMAT, "%s: %ld bytes, at most %u", path, end, MAX_FILE_BYTES);
    } else if (!(buffer = malloc((size_t)end + 1))) {
        st = td_fail(err, TD_ENOMEM, "%s: out of memory", path);
    } else if (fread(buffer, 1, (size_t)end, f) != (size_t)end) {
        st = td_fail(err, TD_EIO, "%s: read failed", path);
    }
    fclose(f);
    if (st != TD_OK) {
        free(buffer);
        return st;
    }
    *data = buffer;
    *n_bytes = (size_t)end;
    return TD_OK;
}

td_status td_tokenizer_open(const char *path, td_tokenizer **out, td_error *err)
{
    char *data = NULL;
    size_t n_bytes = 0;
    td_status st = read_file(path, &data, &n_bytes, err);
    if (st != TD_OK) return st;
    st = td_tokenizer_open_memory(path, data, n_bytes, out, err);
    free(data);
    return st;
}

void td_tokenizer_destroy(td_tokenizer *tok)
{
    if (!tok) return;
    for (int i = 0; i < tok->pool->n_kept; i++) td_bpe_scratch_destroy(tok->pool->kept[i]);
    pthread_mutex_destroy(&tok->pool->mutex);
    free(tok->pool);
    for (int i = 0; i < tok->n_splitters; i++) td_splitter_destroy(tok->splitters[i]);
    td_added_tokens_deinit(&tok->added);
    td_added_tokens_deinit(&tok->added_normalized);
    td_bpe_deinit(&tok->bpe);
    td_unicode_deinit(&tok->unicode);
    free(tok->id_bytes);
    free(tok->bytes);
    free(tok->id_kind);
    free(tok);
}

td_status td_tokenizer_reserve(td_tokenizer *tok, int32_t id)
{
    td_added_token *t = added_by_id(tok, id);
    if (!t) return TD_ENOTFOUND;
    t->reserved = true;
    return TD_OK;
}

/* ---- encode ---- */

static td_bpe_scratch *borrow_scratch(td_scratch_pool *pool)
{
    td_bpe_scratch *scratch = NULL;
    pthread_mutex_lock(&pool->mutex);
    if (pool->n_kept) scratch = pool->kept[--pool->n_kept];
    pthread_mutex_unlock(&pool->mutex);
    return scratch ? scratch : td_bpe_scratch_create();
}

static void return_scratch(td_scratch_pool *pool, td_bpe_scratch *scratch)
{
    pthread_mutex_lock(&pool->mutex);
    if (pool->n_kept < TD_MAX_KEPT_SCRATCH) {
        pool->kept[pool->n_kept++] = scratch;
        scratch = NULL;
    }
    pthread_mutex_unlock(&pool->mutex);
    td_bpe_scratch_destroy(scratch);
}

typedef struct encoding {
    const td_tokenizer *tok;
    td_bpe_scratch *scratch;
    unsigned flags;
    td_ids *ids;
} encoding;

/* Splits by step and gives the pieces to the next one, or to BPE behind the last. */
static td_status encode_pieces(encoding *e, int step, const char *text, size_t n_bytes)
{
    if (step == e->tok->n_splitters) return td_bpe_encode(&e->tok->bpe, e->scratch, text, n_bytes, e->ids);
    td_split_walk walk;
    const char *piece;
    size_t n_piece;
    td_status st = td_split_walk_init(&walk, e->tok->splitters[step], text, n_bytes);
    while (st == TD_OK) {
        st = td_split_walk_next(&walk, &piece, &n_piece);
        if (st != TD_OK || n_piece == 0) break;
        st = encode_pieces(e, step + 1, piece, n_piece);
    }
    td_split_walk_deinit(&walk);
    return st;
}

/* A text without tokens of `set`, or all of it when nothing is to be recognised. */
typedef td_status segment_fn(encoding *e, const char *text, size_t n_bytes);

/* Cuts the text at the tokens of set; what is between goes to segment. */
static td_status encode_around(encoding *e, const td_added_tokens *set, segment_fn *segment, const char *text,
                               size_t n_bytes)
{
    size_t pos = 0, taken = 0;
    if (set->n == 0 || (e->flags & TD_ENCODE_PLAIN)) return segment(e, text, n_bytes);
    while (taken < n_bytes) {
        td_added_match m = td_added_tokens_next(set, &e->tok->unicode, text, n_bytes,
                                                (e->flags & TD_ENCODE_RESERVED) != 0, &pos, taken);
        td_status st = m.start > taken ? segment(e, text + taken, m.start - taken) : TD_OK;
        if (st == TD_OK && m.token) st = td_ids_push(e->ids, m.token->id);
        if (st != TD_OK) return st;
        taken = m.end;
        if (!m.token) break;
    }
    return TD_OK;
}

static td_status encode_plain(encoding *e, const char *text, size_t n_bytes)
{
    return encode_pieces(e, 0, text, n_bytes);
}

static td_status encode_unnormalized(encoding *e, const char *text, size_t n_bytes)
{
    char *owned = NULL;
    td_status st = TD_OK;
    if (e->tok->nfc) st = td_nfc(&e->tok->unicode, text, n_bytes, &text, &n_bytes, &owned);
    if (st == TD_OK) st = encode_around(e, &e->tok->added_normalized, encode_plain, text, n_bytes);
    free(owned);
    return st;
}

td_status td_tokenizer_encode(const td_tokenizer *tok, const char *text, size_t n_bytes, unsigned flags, td_ids *ids,
                              td_error *err)
{
    if (n_bytes > INT32_MAX) return td_fail(err, TD_EINVAL, "text of %zu bytes: at most 2 GiB", n_bytes);
    encoding e = { .tok = tok, .scratch = borrow_scratch(tok->pool), .flags = flags, .ids = ids };
    if (!e.scratch) return td_fail(err, TD_ENOMEM, "tokenizer: out of memory");
    size_t n_before = ids->n;
    bool add_special = (flags & TD_ENCODE_ADD_SPECIAL) != 0;
    td_status st = add_special ? td_ids_append(ids, tok->before, (size_t)tok->n_before) : TD_OK;
    if (st == TD_OK) st = encode_around(&e, &tok->added, encode_unnormalized, text, n_bytes);
    if (st == TD_OK && add_special) st = td_ids_append(ids, tok->behind, (size_t)tok->n_behind);
    return_scratch(tok->pool, e.scratch);
    if (st == TD_OK) return TD_OK;
    ids->n = n_before;
    return td_fail(err, st, "tokenizer: %s",
                   st == TD_EINVAL ? "the file's pattern takes too many steps on this text" : td_status_text(st));
}

/* ---- ids to text ---- */

static bool is_id(const td_tokenizer *tok, int32_t id)
{
    return id >= 0 && id < tok->n_ids && tok->id_bytes[id].n_bytes != TD_BPE_NO_ID;
}

td_status td_tokenizer_id_bytes(const td_tokenizer *tok, int32_t id, const char **bytes, size_t *n_bytes)
{
    if (!is_id(tok, id)) return TD_ENOTFOUND;
    *bytes = tok->bytes + tok->id_bytes[id].offset;
    *n_bytes = tok->id_bytes[id].n_bytes;
    return TD_OK;
}

int32_t td_tokenizer_find_added(const td_tokenizer *tok, const char *content)
{
    const td_added_token *t = td_added_tokens_find(&tok->added, content, strlen(content));
    if (!t) t = td_added_tokens_find(&tok->added_normalized, content, strlen(content));
    return t ? t->id : -1;
}

int32_t td_tokenizer_n_ids(const td_tokenizer *tok)
{
    return tok->n_ids;
}

bool td_tokenizer_is_added(const td_tokenizer *tok, int32_t id)
{
    return is_id(tok, id) && tok->id_kind[id] != TD_ID_PLAIN;
}

bool td_tokenizer_is_special(const td_tokenizer *tok, int32_t id)
{
    return is_id(tok, id) && tok->id_kind[id] == TD_ID_SPECIAL;
}
