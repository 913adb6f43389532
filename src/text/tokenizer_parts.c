/* normalizer, pre_tokenizer, post_processor, decoder and added_tokens: what the byte-level BPE files of the GLM, Qwen,
 * Llama 3 and GPT-2 kinds hold there. */
#include "text/tokenizer_parts.h"

#include <stdlib.h>
#include <string.h>

static const char *type_of(const td_json *part)
{
    const char *type = td_json_string(td_json_get(part, "type"), NULL);
    return type ? type : "(no type)";
}

static bool is_type(const td_json *part, const char *type)
{
    return td_json_equals(td_json_get(part, "type"), type);
}

/* Elements of a list; anything else has none. */
static size_t n_items(const td_json *list)
{
    return td_json_kind_of(list) == TD_JSON_ARRAY ? td_json_count(list) : 0;
}

/* Writes an id of the vocabulary; false: it is none. */
static bool read_id(const td_json *value, int32_t *id)
{
    int64_t x;
    if (td_json_kind_of(value) != TD_JSON_INT || td_json_int64(value, &x) || x < 0 || x >= (int64_t)TD_BPE_MAX_IDS)
        return false;
    *id = (int32_t)x;
    return true;
}

/* A boolean member, or what its absence means. */
static bool flag(const td_json *part, const char *name, bool absent)
{
    const td_json *value = td_json_get(part, name);
    return value ? td_json_kind_of(value) == TD_JSON_TRUE : absent;
}

static td_status unsupported(td_error *err, const char *what, const td_json *part)
{
    return td_fail(err, TD_EUNSUPPORTED, "%s of type %.100s is not supported", what, type_of(part));
}

td_status td_tokenizer_read_normalizer(td_tokenizer *tok, const td_json *root, td_error *err)
{
    if (!root) return TD_OK;
    if (is_type(root, "NFC")) {
        tok->nfc = true;
        return TD_OK;
    }
    if (!is_type(root, "Sequence")) return unsupported(err, "normalizer", root);
    const td_json *list = td_json_get(root, "normalizers");
    for (size_t i = 0; i < n_items(list); i++) {
        const td_json *step = td_json_at(list, i);
        if (!is_type(step, "NFC")) return unsupported(err, "normalizer", step); /* no sequence within one either */
        tok->nfc = true;
    }
    return TD_OK;
}

static td_status add_splitter(td_tokenizer *tok, const char *pattern, size_t n_bytes, bool literal, td_error *err)
{
    if (tok->n_splitters == TD_MAX_SPLITTERS)
        return td_fail(err, TD_EUNSUPPORTED, "pre_tokenizer: more than %d steps", TD_MAX_SPLITTERS);
    td_status st = td_splitter_create(&tok->unicode, pattern, n_bytes, literal, &tok->splitters[tok->n_splitters], err);
    if (st != TD_OK) {
        td_error_prefix(err, "pre_tokenizer");
        return st;
    }
    tok->n_splitters++;
    return TD_OK;
}

static td_status read_split(td_tokenizer *tok, const td_json *step, td_error *err)
{
    const td_json *pattern = td_json_get(step, "pattern");
    const td_json *regex = td_json_get(pattern, "Regex"), *literal = td_json_get(pattern, "String");
    const td_json *text = regex ? regex : literal;
    const td_json *behavior = td_json_get(step, "behavior");
    if (!td_json_equals(behavior, "Isolated"))
        return td_fail(err, TD_EUNSUPPORTED, "pre_tokenizer Split: behavior %.100s is not supported, only Isolated",
                       td_json_string(behavior, NULL) ? td_json_string(behavior, NULL) : "(none)");
    if (flag(step, "invert", false))
        return td_fail(err, TD_EUNSUPPORTED, "pre_tokenizer Split: invert is not supported");
    size_t n_bytes = 0;
    const char *bytes = td_json_string(text, &n_bytes);
    if (!bytes) return td_fail(err, TD_EFORMAT, "pre_tokenizer Split: no pattern");
    return add_splitter(tok, bytes, n_bytes, !regex, err);
}

static td_status read_byte_level(td_tokenizer *tok, const td_json *step, td_error *err)
{
    static const char gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    if (flag(step, "add_prefix_space", true))
        return td_fail(err, TD_EUNSUPPORTED, "pre_tokenizer ByteLevel: add_prefix_space is not supported");
    return flag(step, "use_regex", true) ? add_splitter(tok, gpt2, sizeof gpt2 - 1, false, err) : TD_OK;
}

td_status td_tokenizer_read_pre_tokenizer(td_tokenizer *tok, const td_json *root, td_error *err)
{
    const td_json *list = is_type(root, "Sequence") ? td_json_get(root, "pretokenizers") : NULL;
    size_t n = list ? n_items(list) : root ? 1 : 0;
    bool byte_level = false;
    for (size_t i = 0; i < n; i++) {
        const td_json *step = list ? td_json_at(list, i) : root;
        td_status st;
        if (byte_level) return td_fail(err, TD_EUNSUPPORTED, "pre_tokenizer: a step behind ByteLevel");
        if (is_type(step, "Split")) {
            st = read_split(tok, step, err);
        } else if (is_type(step, "ByteLevel")) {
            byte_level = true;
            st = read_byte_level(tok, step, err);
        } else {
            st = unsupported(err, "pre_tokenizer", step);
        }
        if (st != TD_OK) return st;
    }
    if (!byte_level)
        return td_fail(err, TD_EUNSUPPORTED, "pre_tokenizer has no ByteLevel: only byte-level BPE is supported");
    return TD_OK;
}

/* Ids of one special token of a template, appended to list. */
static td_status add_special_ids(const td_json *root, const td_json *item, int32_t *list, int *n_list, td_error *err)
{
    const char *name = td_json_string(td_json_get(item, "id"), NULL);
    const td_json *tokens = td_json_get(root, "special_tokens");
    const td_json *ids = td_json_get(name ? td_json_get(tokens, name) : NULL, "ids");
    if (td_json_kind_of(ids) != TD_JSON_ARRAY)
        return td_fail(err, TD_EFORMAT, "post_processor: special token %.100s has no ids", name ? name : "(no name)");
    for (size_t i = 0; i < td_json_count(ids); i++) {
        int32_t id;
        if (!read_id(td_json_at(ids, i), &id))
            return td_fail(err, TD_EFORMAT, "post_processor: an id of %.100s is out of range", name);
        if (*n_list == TD_MAX_SPECIAL_IDS)
            return td_fail(err, TD_EUNSUPPORTED, "post_processor: more than %d special ids", TD_MAX_SPECIAL_IDS);
        list[(*n_list)++] = id;
    }
    return TD_OK;
}

static td_status read_template(td_tokenizer *tok, const td_json *root, td_error *err)
{
    const td_json *single = td_json_get(root, "single");
    bool behind = false; /* the text itself has been passed */
    for (size_t i = 0; i < n_items(single); i++) {
        const td_json *item = td_json_at(single, i);
        const td_json *special = td_json_get(item, "SpecialToken");
        if (special) {
            td_status st = behind ? add_special_ids(root, special, tok->behind, &tok->n_behind, err)
                                  : add_special_ids(root, special, tok->before, &tok->n_before, err);
            if (st != TD_OK) return st;
        } else if (td_json_get(item, "Sequence") && !behind) {
            behind = true;
        } else {
            return td_fail(err, TD_EFORMAT, "post_processor: single[%zu] is not known", i);
        }
    }
    return behind ? TD_OK : td_fail(err, TD_EFORMAT, "post_processor: single has no text");
}

static td_status read_processor(td_tokenizer *tok, const td_json *part, td_error *err)
{
    if (is_type(part, "ByteLevel")) return TD_OK; /* moves offsets, which nobody asks for */
    if (!is_type(part, "TemplateProcessing")) return unsupported(err, "post_processor", part);
    if (tok->n_before || tok->n_behind)
        return td_fail(err, TD_EUNSUPPORTED, "post_processor: more than one TemplateProcessing");
    return read_template(tok, part, err);
}

td_status td_tokenizer_read_post_processor(td_tokenizer *tok, const td_json *root, td_error *err)
{
    if (!root) return TD_OK;
    if (!is_type(root, "Sequence")) return read_processor(tok, root, err);
    const td_json *list = td_json_get(root, "processors");
    td_status st = TD_OK;
    for (size_t i = 0; i < n_items(list) && st == TD_OK; i++) st = read_processor(tok, td_json_at(list, i), err);
    return st;
}

td_status td_tokenizer_read_decoder(td_tokenizer *tok, const td_json *root, td_error *err)
{
    (void)tok;
    return !root || is_type(root, "ByteLevel") ? TD_OK : unsupported(err, "decoder", root);
}

/* content in the form in which it is searched for: normalized when the text is. */
static td_status add_token(td_tokenizer *tok, const td_added_token *token, const char *content, size_t n_bytes)
{
    const char *form = content;
    char *owned = NULL;
    td_status st = TD_OK;
    if (token->normalized && tok->nfc) st = td_nfc(&tok->unicode, content, n_bytes, &form, &n_bytes, &owned);
    if (st == TD_OK)
        st = td_added_tokens_add(token->normalized ? &tok->added_normalized : &tok->added, token, form, n_bytes);
    free(owned);
    return st;
}

static td_status read_added_token(td_tokenizer *tok, const td_json *item, size_t i, td_error *err)
{
    int32_t id;
    size_t n_bytes = 0;
    const char *content = td_json_string(td_json_get(item, "content"), &n_bytes);
    if (!content || n_bytes == 0 || n_bytes > TD_ADDED_MAX_BYTES)
        return td_fail(err, TD_EFORMAT, "added_tokens[%zu]: content must be 1 to %d bytes", i, TD_ADDED_MAX_BYTES);
    if (!read_id(td_json_get(item, "id"), &id))
        return td_fail(err, TD_EFORMAT, "added_tokens[%zu]: id must be 0 to %u", i, TD_BPE_MAX_IDS - 1);
    bool special = flag(item, "special", false);
    td_added_token token = {
        .id = id,
        .special = special,
        .single_word = flag(item, "single_word", false),
        .lstrip = flag(item, "lstrip", false),
        .rstrip = flag(item, "rstrip", false),
        .normalized = flag(item, "normalized", !special),
    };
    td_status st = add_token(tok, &token, content, n_bytes);
    return st == TD_OK ? TD_OK : td_fail(err, st, "out of memory");
}

td_status td_tokenizer_read_added(td_tokenizer *tok, const td_json *root, td_error *err)
{
    if (root && td_json_kind_of(root) != TD_JSON_ARRAY) return td_fail(err, TD_EFORMAT, "added_tokens is not an array");
    for (size_t i = 0; i < td_json_count(root); i++) {
        td_status st = read_added_token(tok, td_json_at(root, i), i, err);
        if (st != TD_OK) return st;
    }
    td_added_tokens *sets[] = { &tok->added, &tok->added_normalized };
    for (size_t k = 0; k < 2; k++) {
        td_status st = td_added_tokens_index(sets[k]);
        if (st == TD_EINVAL) return td_fail(err, TD_EFORMAT, "added_tokens: the same content twice");
        if (st != TD_OK) return td_fail(err, st, "out of memory");
    }
    return TD_OK;
}
