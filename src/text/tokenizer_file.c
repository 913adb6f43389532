/* Reading tokenizer.json: one pass cuts it into parts; the vocabulary and the merges, nearly all of it, are walked in
 * place, the small parts are read as values (base/json.h). What is not understood is refused by name: a tokenizer that
 * is almost right gives replies that are almost right. "truncation" and "padding" are ignored on purpose: fine-tuned
 * checkpoints carry settings there that would cut prompts. */
#include <stdlib.h>
#include <string.h>

#include "text/json_scan.h"
#include "text/tokenizer_internal.h"
#include "text/tokenizer_parts.h"
#include "text/utf8.h"

enum {
    MAX_TOKEN_BYTES = 4096, /* of a vocabulary entry */
    N_ALPHABET = 0x144,     /* code points of the byte alphabet are below this */
};

typedef struct part {
    const char *text; /* NULL: not in the file */
    size_t n_bytes;
} part;

typedef struct parts {
    part added_tokens, normalizer, pre_tokenizer, post_processor, decoder, model;
    part vocab, merges; /* of the model */
} parts;

typedef struct reader {
    td_tokenizer *tok;
    const char *json;
    td_error *err;
    int16_t byte_of[N_ALPHABET]; /* code point of the file's alphabet to byte, or -1 */
    parts parts;
} reader;

/* The mistake that a walk over part of the file met, with its place in the whole file. */
static td_status scan_error(const reader *r, const td_json_scan *s, const char *where)
{
    size_t at = (size_t)(s->start - r->json) + s->offset;
    return td_fail(r->err, s->status, "%s, byte %zu: %s", where, at, s->message);
}

/* The GPT-2 byte alphabet: printable bytes stand for themselves, the others for U+0100 and up, in order. */
static void make_alphabet(reader *r)
{
    int next = 0x100;
    for (int i = 0; i < N_ALPHABET; i++) r->byte_of[i] = -1;
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        r->byte_of[printable ? b : next++] = (int16_t)b;
    }
}

/* text in the file's alphabet to bytes (never more of them); false: a character is not of the alphabet, or no room. */
static bool to_bytes(const reader *r, const char *text, size_t n_bytes, char *out, size_t cap, size_t *n_out)
{
    const unsigned char *p = (const unsigned char *)text, *end = p + n_bytes;
    size_t n = 0, used;
    for (; p < end; p += used) {
        uint32_t c = *p < 0x80 ? (used = 1, *p) : td_utf8_next(p, end, &used);
        if (c >= N_ALPHABET || r->byte_of[c] < 0 || n == cap) return false;
        out[n++] = (char)r->byte_of[c];
    }
    *n_out = n;
    return true;
}

static bool is(const char *text, size_t n_bytes, const char *word)
{
    return strlen(word) == n_bytes && memcmp(text, word, n_bytes) == 0;
}

/* Stores the value that comes next where its key belongs; twice the same key is a mistake. */
static void take_part(td_json_scan *s, part *p)
{
    if (p->text) td_json_scan_fail(s, TD_EFORMAT, "the same key again");
    td_json_scan_value(s, &p->text, &p->n_bytes);
}

static td_status cut_file(reader *r, size_t n_bytes)
{
    td_json_scan s;
    td_json_scan_init(&s, r->json, n_bytes);
    part other = { 0 };
    for (bool more = td_json_scan_open(&s, '{'); more; more = td_json_scan_next(&s, '}')) {
        const char *key;
        size_t n;
        td_json_scan_key(&s, &key, &n);
        part *p = is(key, n, "added_tokens")     ? &r->parts.added_tokens
                  : is(key, n, "normalizer")     ? &r->parts.normalizer
                  : is(key, n, "pre_tokenizer")  ? &r->parts.pre_tokenizer
                  : is(key, n, "post_processor") ? &r->parts.post_processor
                  : is(key, n, "decoder")        ? &r->parts.decoder
                  : is(key, n, "model")          ? &r->parts.model
                                                 : &other;
        other.text = NULL;
        take_part(&s, p);
    }
    td_status st = td_json_scan_end(&s) == TD_OK ? TD_OK : scan_error(r, &s, "file");
    td_json_scan_deinit(&s);
    if (st == TD_OK && !r->parts.model.text) st = td_fail(r->err, TD_EFORMAT, "no model: not a tokenizer.json");
    return st;
}

/* A model setting that changes the result in ways this code does not know must be off. */
static td_status check_off(const reader *r, const char *name, size_t n_name, part value)
{
    static const char *const names[] = { "dropout", "continuing_subword_prefix", "end_of_word_suffix",
                                         "byte_fallback" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (is(name, n_name, names[i]) && !is(value.text, value.n_bytes, "null") &&
            !is(value.text, value.n_bytes, "false") && !is(value.text, value.n_bytes, "\"\""))
            return td_fail(r->err, TD_EUNSUPPORTED, "model.%s is %.*s: only unset or false is supported", names[i],
                           (int)(value.n_bytes < 100 ? value.n_bytes : 100), value.text);
    return TD_OK;
}

static td_status take_model_member(reader *r, td_json_scan *s, const char *key, size_t n_key)
{
    char name[32];
    part value = { 0 };
    if (n_key >= sizeof name) n_key = 0; /* none that matters is that long */
    memcpy(name, key, n_key);
    if (is(name, n_key, "vocab")) {
        take_part(s, &r->parts.vocab);
    } else if (is(name, n_key, "merges")) {
        take_part(s, &r->parts.merges);
    } else {
        take_part(s, &value);
        if (s->status != TD_OK) return TD_OK;
        if (is(name, n_key, "type") && !is(value.text, value.n_bytes, "\"BPE\""))
            return td_fail(r->err, TD_EUNSUPPORTED, "model.type is %.*s: only \"BPE\" is supported",
                           (int)(value.n_bytes < 100 ? value.n_bytes : 100), value.text);
        if (is(name, n_key, "ignore_merges")) r->tok->bpe.ignore_merges = is(value.text, value.n_bytes, "true");
        return check_off(r, name, n_key, value);
    }
    return TD_OK;
}

static td_status cut_model(reader *r)
{
    td_json_scan s;
    td_status st = TD_OK;
    td_json_scan_init(&s, r->parts.model.text, r->parts.model.n_bytes);
    for (bool more = td_json_scan_open(&s, '{'); more && st == TD_OK; more = td_json_scan_next(&s, '}')) {
        const char *key;
        size_t n;
        td_json_scan_key(&s, &key, &n);
        st = take_model_member(r, &s, key, n);
    }
    if (st == TD_OK && td_json_scan_end(&s) != TD_OK) st = scan_error(r, &s, "model");
    td_json_scan_deinit(&s);
    if (st != TD_OK) return st;
    if (!r->parts.vocab.text || !r->parts.merges.text)
        return td_fail(r->err, TD_EFORMAT, "model has no %s", r->parts.vocab.text ? "merges" : "vocab");
    return TD_OK;
}

/* One entry. literal[id]: it has characters outside the byte alphabet, so BPE never makes it and it means itself. */
static td_status add_vocab_entry(reader *r, const char *key, size_t n_key, int64_t id, bool *literal)
{
    char bytes[MAX_TOKEN_BYTES];
    size_t n;
    if (n_key > sizeof bytes)
        return td_fail(r->err, TD_EFORMAT, "vocab: an entry of %zu bytes, at most %d", n_key, MAX_TOKEN_BYTES);
    if (id < 0 || id >= (int64_t)TD_BPE_MAX_IDS)
        return td_fail(r->err, TD_EFORMAT, "vocab: \"%.*s\" has id %lld, allowed are 0 to %u",
                       (int)(n_key < 100 ? n_key : 100), key, (long long)id, TD_BPE_MAX_IDS - 1);
    bool plain = to_bytes(r, key, n_key, bytes, sizeof bytes, &n) && n > 0;
    td_status st = td_bpe_add_token(&r->tok->bpe, (uint32_t)id, plain ? bytes : key, plain ? n : n_key);
    if (st == TD_EINVAL) return td_fail(r->err, TD_EFORMAT, "vocab: id %lld twice", (long long)id);
    if (st != TD_OK) return td_fail(r->err, st, "vocab: %s", td_status_text(st));
    literal[id] = !plain;
    return TD_OK;
}

static td_status read_vocab(reader *r)
{
    td_json_scan s;
    td_status st = TD_OK;
    bool *literal = calloc(TD_BPE_MAX_IDS, sizeof *literal);
    if (!literal) return td_fail(r->err, TD_ENOMEM, "out of memory");
    td_json_scan_init(&s, r->parts.vocab.text, r->parts.vocab.n_bytes);
    for (bool more = td_json_scan_open(&s, '{'); more && st == TD_OK; more = td_json_scan_next(&s, '}')) {
        const char *key;
        size_t n;
        td_json_scan_key(&s, &key, &n);
        int64_t id = td_json_scan_integer(&s);
        if (s.status == TD_OK) st = add_vocab_entry(r, key, n, id, literal);
    }
    if (st == TD_OK && td_json_scan_end(&s) != TD_OK) st = scan_error(r, &s, "vocab");
    td_json_scan_deinit(&s);
    if (st == TD_OK) {
        st = td_bpe_index_tokens(&r->tok->bpe, literal);
        if (st == TD_EINVAL) st = td_fail(r->err, TD_EFORMAT, "vocab: the same entry twice");
        if (st == TD_ENOMEM) st = td_fail(r->err, TD_ENOMEM, "out of memory");
    }
    free(literal);
    return st;
}

/* How many merges there are: the table is made once, of the right size. */
static td_status count_merges(reader *r, size_t *n_merges)
{
    td_json_scan s;
    part value;
    *n_merges = 0;
    td_json_scan_init(&s, r->parts.merges.text, r->parts.merges.n_bytes);
    for (bool more = td_json_scan_open(&s, '['); more; more = td_json_scan_next(&s, ']')) {
        td_json_scan_value(&s, &value.text, &value.n_bytes);
        ++*n_merges;
    }
    td_status st = td_json_scan_end(&s) == TD_OK ? TD_OK : scan_error(r, &s, "merges");
    td_json_scan_deinit(&s);
    return st;
}

typedef struct merge {
    char left[TD_BPE_MERGE_MAX_BYTES], right[TD_BPE_MERGE_MAX_BYTES];
    size_t n_left, n_right;
    bool known; /* both are of the byte alphabet, and short enough */
} merge;

/* ["l", "r"], or "l r" in older files: a space is no letter of the alphabet, so the first one separates. */
static void read_merge(const reader *r, td_json_scan *s, merge *m)
{
    const char *text, *space;
    size_t n;
    m->n_left = m->n_right = 0;
    if (td_json_scan_peek(s) == '"') {
        td_json_scan_string(s, &text, &n);
        space = memchr(text, ' ', n);
        m->known = space && to_bytes(r, text, (size_t)(space - text), m->left, sizeof m->left, &m->n_left) &&
                   to_bytes(r, space + 1, (size_t)(text + n - space - 1), m->right, sizeof m->right, &m->n_right);
        return;
    }
    bool more = td_json_scan_open(s, '[');
    td_json_scan_string(s, &text, &n);
    m->known = to_bytes(r, text, n, m->left, sizeof m->left, &m->n_left);
    if (!more || !td_json_scan_next(s, ']')) td_json_scan_fail(s, TD_EFORMAT, "expected two strings");
    td_json_scan_string(s, &text, &n);
    m->known = to_bytes(r, text, n, m->right, sizeof m->right, &m->n_right) && m->known;
    if (td_json_scan_next(s, ']')) td_json_scan_fail(s, TD_EFORMAT, "expected two strings");
}

static td_status read_merges(reader *r)
{
    td_json_scan s;
    size_t n_merges;
    int missing = 0;
    td_status st = count_merges(r, &n_merges);
    if (st != TD_OK) return st;
    st = td_bpe_begin_merges(&r->tok->bpe, n_merges, &missing);
    if (st == TD_EFORMAT) return td_fail(r->err, st, "vocab: no entry for byte 0x%02X", (unsigned)missing);
    if (st != TD_OK) return td_fail(r->err, st, "out of memory");
    uint32_t rank = 0;
    td_json_scan_init(&s, r->parts.merges.text, r->parts.merges.n_bytes);
    for (bool more = td_json_scan_open(&s, '['); more && st == TD_OK; more = td_json_scan_next(&s, ']')) {
        merge m;
        read_merge(r, &s, &m);
        if (s.status != TD_OK) break;
        if (m.known) st = td_bpe_add_merge(&r->tok->bpe, m.left, m.n_left, m.right, m.n_right, rank);
        if (!m.known || st == TD_ENOTFOUND)
            st = td_fail(r->err, TD_EFORMAT, "merges[%u] joins or makes what is not in vocab", rank);
        rank++;
    }
    if (st == TD_OK && td_json_scan_end(&s) != TD_OK) st = scan_error(r, &s, "merges");
    td_json_scan_deinit(&s);
    if (st == TD_OK) td_bpe_finish(&r->tok->bpe);
    return st;
}

typedef td_status part_reader(td_tokenizer *tok, const td_json *root, td_error *err);

/* A small part as a value; absent and null are both NULL to its reader. */
static td_status read_part(const reader *r, const char *name, part p, part_reader *read)
{
    td_arena arena;
    const td_json *root = NULL;
    td_status st = TD_OK;
    td_arena_init(&arena, 0);
    if (p.text && !is(p.text, p.n_bytes, "null")) st = td_json_parse_file(&arena, p.text, p.n_bytes, &root, r->err);
    if (st == TD_OK)
        st = read(r->tok, root, r->err);
    else
        td_error_prefix(r->err, "%s, lines counted from its start", name);
    td_arena_deinit(&arena);
    return st;
}

td_status td_tokenizer_read(td_tokenizer *tok, const char *json, size_t n_bytes, td_error *err)
{
    reader r = { .tok = tok, .json = json, .err = err };
    make_alphabet(&r);
    td_status st = cut_file(&r, n_bytes);
    if (st == TD_OK) st = cut_model(&r);
    if (st == TD_OK && td_unicode_init(&tok->unicode) != TD_OK) st = td_fail(err, TD_ENOMEM, "out of memory");
    /* Small parts first: what cannot be served is said before the large ones are read. */
    if (st == TD_OK) st = read_part(&r, "normalizer", r.parts.normalizer, td_tokenizer_read_normalizer);
    if (st == TD_OK) st = read_part(&r, "pre_tokenizer", r.parts.pre_tokenizer, td_tokenizer_read_pre_tokenizer);
    if (st == TD_OK) st = read_part(&r, "post_processor", r.parts.post_processor, td_tokenizer_read_post_processor);
    if (st == TD_OK) st = read_part(&r, "decoder", r.parts.decoder, td_tokenizer_read_decoder);
    if (st == TD_OK) st = read_part(&r, "added_tokens", r.parts.added_tokens, td_tokenizer_read_added);
    if (st == TD_OK) st = read_vocab(&r);
    if (st == TD_OK) st = read_merges(&r);
    return st;
}
