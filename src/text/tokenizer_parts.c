/* normalizer, pre_tokenizer, post_processor, decoder and added_tokens: what the byte-level BPE files of the GLM, Qwen,
 * Llama 3 and GPT-2 kinds hold there. */
#include "text/tokenizer_parts.h"

#include <stdlib.h>
#include <string.h>

static const char *type_of(const json_t *part)
{
    const char *type = json_string_value(json_object_get(part, "type"));
    return type ? type : "(no type)";
}

static bool is_type(const json_t *part, const char *type)
{
    return strcmp(type_of(part), type) == 0;
}

/* A boolean member, or what its absence means. */
static bool flag(const json_t *part, const char *name, bool absent)
{
    const json_t *value = json_object_get(part, name);
    return value ? json_is_true(value) : absent;
}

static td_status unsupported(td_error *err, const char *what, const json_t *part)
{
    return td_fail(err, TD_EUNSUPPORTED, "%s of type %.100s is not supported", what, type_of(part));
}

td_status td_tokenizer_read_normalizer(td_tokenizer *tok, const json_t *root, td_error *err)
{
    if (!root) return TD_OK;
    if (is_type(root, "NFC")) {
        tok->nfc = true;
        return TD_OK;
    }
    if (!is_type(root, "Sequence")) return unsupported(err, "normalizer", root);
    size_t i;
    const json_t *list = json_object_get(root, "normalizers"), *step;
    json_array_foreach(list, i, step)
    {
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

static td_status read_split(td_tokenizer *tok, const json_t *step, td_error *err)
{
    const json_t *pattern = json_object_get(step, "pattern");
    const json_t *regex = json_object_get(pattern, "Regex"), *literal = json_object_get(pattern, "String");
    const json_t *text = regex ? regex : literal;
    const char *behavior = json_string_value(json_object_get(step, "behavior"));
    if (!behavior || strcmp(behavior, "Isolated") != 0)
        return td_fail(err, TD_EUNSUPPORTED, "pre_tokenizer Split: behavior %.100s is not supported, only Isolated",
                       behavior ? behavior : "(none)");
    if (flag(step, "invert", false))
        return td_fail(err, TD_EUNSUPPORTED, "pre_tokenizer Split: invert is not supported");
    if (!json_is_string(text)) return td_fail(err, TD_EFORMAT, "pre_tokenizer Split: no pattern");
    return add_splitter(tok, json_string_value(text), json_string_length(text), !regex, err);
}

static td_status read_byte_level(td_tokenizer *tok, const json_t *step, td_error *err)
{
    static const char gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
    if (flag(step, "add_prefix_space", true))
        return td_fail(err, TD_EUNSUPPORTED, "pre_tokenizer ByteLevel: add_prefix_space is not supported");
    return flag(step, "use_regex", true) ? add_splitter(tok, gpt2, sizeof gpt2 - 1, false, err) : TD_OK;
}

td_status td_tokenizer_read_pre_tokenizer(td_tokenizer *tok, const json_t *root, td_error *err)
{
    const json_t *list = is_type(root, "Sequence") ? json_object_get(root, "pretokenizers") : NULL;
    size_t n = list ? json_array_size(list) : root ? 1 : 0;
    bool byte_level = false;
    for (size_t i = 0; i < n; i++) {
        const json_t *step = list ? json_array_get(list, i) : root;
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
static td_status add_special_ids(const json_t *root, const json_t *item, int32_t *list, int *n_list, td_error *err)
{
    const char *name = json_string_value(json_object_get(item, "id"));
    const json_t *tokens = json_object_get(root, "special_tokens");
    const json_t *ids = json_object_get(name ? json_object_get(tokens, name) : NULL, "ids"), *id;
    size_t i;
    if (!json_is_array(ids))
        return td_fail(err, TD_EFORMAT, "post_processor: special token %.100s has no ids", name ? name : "(no name)");
    json_array_foreach(ids, i, id)
    {
        json_int_t value = json_is_integer(id) ? json_integer_value(id) : -1;
        if (value < 0 || value >= (json_int_t)TD_BPE_MAX_IDS)
            return td_fail(err, TD_EFORMAT, "post_processor: an id of %.100s is out of range", name);
        if (*n_list == TD_MAX_SPECIAL_IDS)
            return td_fail(err, TD_EUNSUPPORTED, "post_processor: more than %d special ids", TD_MAX_SPECIAL_IDS);
        list[(*n_list)++] = (int32_t)value;
    }
    return TD_OK;
}

static td_status read_template(td_tokenizer *tok, const json_t *root, td_error *err)
{
    const json_t *single = json_object_get(root, "single"), *item;
    bool behind = false; /* the text itself has been passed */
    size_t i;
    json_array_foreach(single, i, item)
    {
        const json_t *special = json_object_get(item, "SpecialToken");
        if (special) {
            td_status st = behind ? add_special_ids(root, special, tok->behind, &tok->n_behind, err)
                                  : add_special_ids(root, special, tok->before, &tok->n_before, err);
            if (st != TD_OK) return st;
        } else if (json_object_get(item, "Sequence") && !behind) {
            behind = true;
        } else {
            return td_fail(err, TD_EFORMAT, "post_processor: single[%zu] is not known", i);
        }
    }
    return behind ? TD_OK : td_fail(err, TD_EFORMAT, "post_processor: single has no text");
}

static td_status read_processor(td_tokenizer *tok, const json_t *part, td_error *err)
{
    if (is_type(part, "ByteLevel")) return TD_OK; /* moves offsets, which nobody asks for */
    if (!is_type(part, "TemplateProcessing")) return unsupported(err, "post_processor", part);
    if (tok->n_before || tok->n_behind)
        return td_fail(err, TD_EUNSUPPORTED, "post_processor: more than one TemplateProcessing");
    return read_template(tok, part, err);
}

td_status td_tokenizer_read_post_processor(td_tokenizer *tok, const json_t *root, td_error *err)
{
    if (!root) return TD_OK;
    if (!is_type(root, "Sequence")) return read_processor(tok, root, err);
    const json_t *list = json_object_get(root, "processors"), *step;
    td_status st = TD_OK;
    size_t i;
    json_array_foreach(list, i, step)
    {
        st = read_processor(tok, step, err);
        if (st != TD_OK) break;
    }
    return st;
}

td_status td_tokenizer_read_decoder(td_tokenizer *tok, const json_t *root, td_error *err)
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

static td_status read_added_token(td_tokenizer *tok, const json_t *item, size_t i, td_error *err)
{
    const json_t *content = json_object_get(item, "content"), *id = json_object_get(item, "id");
    json_int_t value = json_is_integer(id) ? json_integer_value(id) : -1;
    size_t n_bytes = json_string_length(content);
    if (!json_is_string(content) || n_bytes == 0 || n_bytes > TD_ADDED_MAX_BYTES)
        return td_fail(err, TD_EFORMAT, "added_tokens[%zu]: content must be 1 to %d bytes", i, TD_ADDED_MAX_BYTES);
    if (value < 0 || value >= (json_int_t)TD_BPE_MAX_IDS)
        return td_fail(err, TD_EFORMAT, "added_tokens[%zu]: id must be 0 to %u", i, TD_BPE_MAX_IDS - 1);
    bool special = flag(item, "special", false);
    td_added_token token = {
        .id = (int32_t)value,
        .special = special,
        .single_word = flag(item, "single_word", false),
        .lstrip = flag(item, "lstrip", false),
        .rstrip = flag(item, "rstrip", false),
        .normalized = flag(item, "normalized", !special),
    };
    td_status st = add_token(tok, &token, json_string_value(content), n_bytes);
    return st == TD_OK ? TD_OK : td_fail(err, st, "out of memory");
}

td_status td_tokenizer_read_added(td_tokenizer *tok, const json_t *root, td_error *err)
{
    const json_t *item;
    size_t i;
    if (root && !json_is_array(root)) return td_fail(err, TD_EFORMAT, "added_tokens is not an array");
    json_array_foreach(root, i, item)
    {
        td_status st = read_added_token(tok, item, i, err);
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
