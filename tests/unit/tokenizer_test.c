/* The tokenizer without outside files: the GLM form (the demo's file), splitting, classes of characters, refusals. That
 * ids equal the reference library's is tokenizer_vectors.c's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "text/pretokenize.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

#define DEMO "tests/oracle/tokenizer/demo.json"
#define GLM                                                                                                            \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"           \
    "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

static td_tokenizer *open_demo(void)
{
    td_tokenizer *tok = NULL;
    td_error err;
    if (td_tokenizer_open(DEMO, &tok, &err) != TD_OK) fail_msg("%s", err.text);
    return tok;
}

static td_ids encode(const td_tokenizer *tok, const char *text, size_t n_bytes, unsigned flags)
{
    td_ids ids = { 0 };
    td_error err;
    if (td_tokenizer_encode(tok, text, n_bytes, flags, &ids, &err) != TD_OK) fail_msg("%s", err.text);
    return ids;
}

/* The bytes of all ids, one behind the other. */
static char *decode(const td_tokenizer *tok, const td_ids *ids, size_t *n_bytes)
{
    char *out = NULL;
    *n_bytes = 0;
    for (size_t i = 0; i < ids->n; i++) {
        const char *bytes;
        size_t n;
        assert_int_equal(td_tokenizer_id_bytes(tok, ids->data[i], &bytes, &n), TD_OK);
        out = realloc(out, *n_bytes + n + 1);
        memcpy(out + *n_bytes, bytes, n);
        *n_bytes += n;
    }
    return out;
}

static uint64_t next_random(uint64_t *x)
{
    *x = *x * 6364136223846793005u + 1442695040888963407u;
    return *x >> 33;
}

/* ---- classes ---- */

/* Counted over Unicode 16.0 by the reference; also the ranges, so that a shifted table cannot pass. */
static void test_classes_are_unicode_16(void **state)
{
    (void)state;
    td_unicode unicode;
    assert_int_equal(td_unicode_init(&unicode), TD_OK);
    static const struct {
        unsigned bit, count, ranges;
    } expected[] = { { TD_UNICODE_LETTER, 140976, 675 },
                     { TD_UNICODE_NUMBER, 1901, 143 },
                     { TD_UNICODE_SPACE, 19, 8 } };
    for (size_t k = 0; k < 3; k++) {
        unsigned count = 0, ranges = 0;
        bool before = false;
        for (uint32_t c = 0x80; c <= 0x110000; c++) {
            bool in = (td_unicode_class(&unicode, c) & expected[k].bit) != 0;
            count += in;
            ranges += in && !before;
            before = in;
        }
        assert_int_equal(count, expected[k].count);
        assert_int_equal(ranges, expected[k].ranges);
    }
    static const uint32_t no_space[] = { 0x200B, 0xFEFF, 0x180E, 0x1C, 0x1D, 0x1E, 0x1F, 0x08, 0x0E };
    for (size_t i = 0; i < sizeof no_space / sizeof *no_space; i++)
        assert_false(td_unicode_class(&unicode, no_space[i]) & TD_UNICODE_SPACE);
    td_unicode_deinit(&unicode);
}

/* ---- splitting ---- */

typedef struct split_case {
    const char *text;
    const char *pieces; /* joined by U+00A6 */
} split_case;

static void join_pieces(const td_splitter *splitter, const char *text, size_t n_bytes, char *out)
{
    td_split_walk walk;
    const char *piece;
    size_t n, n_out = 0;
    assert_int_equal(td_split_walk_init(&walk, splitter, text, n_bytes), TD_OK);
    for (;;) {
        assert_int_equal(td_split_walk_next(&walk, &piece, &n), TD_OK);
        if (n == 0) break;
        if (n_out) n_out += (size_t)sprintf(out + n_out, "\u00A6");
        memcpy(out + n_out, piece, n);
        n_out += n;
    }
    td_split_walk_deinit(&walk);
    out[n_out] = 0;
}

static const split_case split_cases[] = {
    { "'\u017Ft", "'\u017F\u00A6t" },
    { "DON'T don't", "DON\u00A6'T\u00A6 don\u00A6't" },
    { "x'y", "x\u00A6'y" },
    { "they'LLs we'Vex I'm", "they\u00A6'LL\u00A6s\u00A6 we\u00A6'Ve\u00A6x\u00A6 I\u00A6'm" },
    { "it\u2019s", "it\u00A6\u2019s" },
    { "12345", "123\u00A645" },
    { "a \n \n b", "a\u00A6 \n \n\u00A6 b" },
    { "\tabc", "\tabc" },
    { "\u00A0abc", "\u00A0abc" },
    { "\u2460\u2461\u2462\u00BD", "\u2460\u2461\u2462\u00A6\u00BD" },
    { "\u0928\u092E\u0938\u094D\u0924\u0947", "\u0928\u092E\u0938\u00A6\u094D\u0924\u00A6\u0947" },
    { "a   b", "a\u00A6  \u00A6 b" },
    { "a   ", "a\u00A6   " },
    { "a\u3000\u3000b", "a\u00A6\u3000\u00A6\u3000b" },
    { "a  !", "a\u00A6 \u00A6 !" },
    { "a\u00A0!", "a\u00A6\u00A0\u00A6!" },
    { "a  1", "a\u00A6 \u00A6 \u00A61" },
    { "!!\r\n\r\nx", "!!\r\n\r\n\u00A6x" },
    { "x\r\n  y", "x\u00A6\r\n\u00A6 \u00A6 y" },
    { "\n\n x", "\n\n\u00A6 x" },
    { " \n", " \n" },
    { "(a) _b", "(a\u00A6)\u00A6 _\u00A6b" },
    { "x\u200By", "x\u00A6\u200By" },
    { "\x80\xFFz 1\xC3", "\x80\xFF\u00A6z\u00A6 \u00A6"
                         "1\u00A6\xC3" },
    { "", "" },
};

static td_splitter *make_splitter(const td_unicode *unicode, const char *pattern)
{
    td_splitter *splitter = NULL;
    td_error err;
    if (td_splitter_create(unicode, pattern, strlen(pattern), false, &splitter, &err) != TD_OK)
        fail_msg("%s", err.text);
    return splitter;
}

static void test_pieces(void **state)
{
    (void)state;
    td_unicode unicode;
    char out[256];
    assert_int_equal(td_unicode_init(&unicode), TD_OK);
    td_splitter *splitter = make_splitter(&unicode, GLM);
    assert_true(td_splitter_is_native(splitter));
    for (size_t i = 0; i < sizeof split_cases / sizeof *split_cases; i++) {
        join_pieces(splitter, split_cases[i].text, strlen(split_cases[i].text), out);
        assert_string_equal(out, split_cases[i].pieces);
    }
    td_splitter_destroy(splitter);
    td_unicode_deinit(&unicode);
}

/* PCRE2 knows the pattern too: random texts of characters old enough for its tables must be cut alike. */
static void test_native_splitter_equals_pcre2(void **state)
{
    (void)state;
    static const char *const bits[] = { "a",          "Z",      "'",      "s",        "t",       "re",
                                        "LL",         "\u017F", " ",      "  ",       "\n",      "\r",
                                        "\t",         "1",      "23",     "!",        "_",       "-",
                                        "\u00A0",     "\u3000", "\u0301", "\u00E9",   "\u6F22",  "\u2460",
                                        "\U0001F600", "\u2028", "\x80",   "\xE2\x82", "\xC2\x85" };
    td_unicode unicode;
    uint64_t random = 3;
    assert_int_equal(td_unicode_init(&unicode), TD_OK);
    td_splitter *native = make_splitter(&unicode, GLM), *regex = make_splitter(&unicode, "(?:" GLM ")");
    assert_false(td_splitter_is_native(regex));
    for (int round = 0; round < 20000; round++) {
        char text[128] = "", one[512], two[512];
        for (uint64_t n = next_random(&random) % 12; n > 0; n--)
            strcat(text, bits[next_random(&random) % (sizeof bits / sizeof *bits)]);
        join_pieces(native, text, strlen(text), one);
        join_pieces(regex, text, strlen(text), two);
        assert_string_equal(one, two);
    }
    td_splitter_destroy(native);
    td_splitter_destroy(regex);
    td_unicode_deinit(&unicode);
}

/* What a pattern does not match is a piece as well; an empty match cuts. */
static void test_other_patterns(void **state)
{
    (void)state;
    td_unicode unicode;
    td_splitter *splitter;
    td_error err;
    char out[256];
    assert_int_equal(td_unicode_init(&unicode), TD_OK);
    splitter = make_splitter(&unicode, "[0-9]+");
    join_pieces(splitter, "ab12c3", 6, out);
    assert_string_equal(out, "ab\u00A6"
                             "12\u00A6"
                             "c\u00A6"
                             "3");
    td_splitter_destroy(splitter);
    splitter = make_splitter(&unicode, "(?=b)|c*");
    join_pieces(splitter, "abcb", 4, out);
    assert_string_equal(out, "a\u00A6"
                             "b\u00A6"
                             "c\u00A6"
                             "b");
    td_splitter_destroy(splitter);
    assert_int_equal(td_splitter_create(&unicode, ".", 1, true, &splitter, &err), TD_OK);
    join_pieces(splitter, "a.b", 3, out);
    assert_string_equal(out, "a\u00A6.\u00A6"
                             "b");
    td_splitter_destroy(splitter);
    assert_int_equal(td_splitter_create(&unicode, "a(", 2, false, &splitter, &err), TD_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "byte 2"));
    td_unicode_deinit(&unicode);
}

/* ---- the demo's file ---- */

static void test_added_tokens(void **state)
{
    (void)state;
    static const char *const names[] = {
        "<|endoftext|>",
        "[MASK]",
        "[gMASK]",
        "[sMASK]",
        "<sop>",
        "<eop>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
        "<|begin_of_audio|>",
        "<|end_of_audio|>",
        "<|begin_of_transcription|>",
        "<|end_of_transcription|>",
        "<|code_prefix|>",
        "<|code_middle|>",
        "<|code_suffix|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "/nothink",
        "<|begin_of_box|>",
        "<|end_of_box|>",
        "<|image|>",
        "<|video|>",
    };
    td_tokenizer *tok = open_demo();
    assert_int_equal(td_tokenizer_n_ids(tok), 4088);
    for (int i = 0; i < 36; i++) {
        td_ids ids = encode(tok, names[i], strlen(names[i]), 0);
        assert_int_equal(ids.n, 1);
        assert_int_equal(ids.data[0], 4052 + i);
        assert_int_equal(td_tokenizer_find_added(tok, names[i]), 4052 + i);
        assert_true(td_tokenizer_is_added(tok, 4052 + i));
        assert_int_equal(td_tokenizer_is_special(tok, 4052 + i), !(i >= 21 && i <= 31)); /* <think> .. /nothink */
        size_t n;
        char *text = decode(tok, &ids, &n);
        assert_int_equal(n, strlen(names[i]));
        assert_memory_equal(text, names[i], n);
        free(text);
        td_ids_deinit(&ids);
    }
    const char *bytes = "unchanged";
    size_t n = 7;
    assert_int_equal(td_tokenizer_id_bytes(tok, 4088, &bytes, &n), TD_ENOTFOUND);
    assert_int_equal(td_tokenizer_id_bytes(tok, -1, &bytes, &n), TD_ENOTFOUND);
    assert_string_equal(bytes, "unchanged");
    assert_int_equal(td_tokenizer_find_added(tok, "<thin"), -1);
    assert_false(td_tokenizer_is_added(tok, 17));
    td_tokenizer_destroy(tok);
}

static bool has_id(const td_ids *ids, int32_t id)
{
    for (size_t i = 0; i < ids->n; i++)
        if (ids->data[i] == id) return true;
    return false;
}

static void test_reserved_and_plain(void **state)
{
    (void)state;
    static const char text[] = "see <|begin_of_image|><|image|><|end_of_image|> there";
    td_tokenizer *tok = open_demo();
    int32_t image = td_tokenizer_find_added(tok, "<|image|>"),
            begin = td_tokenizer_find_added(tok, "<|begin_of_image|>");
    td_ids before = encode(tok, text, sizeof text - 1, 0);
    assert_true(has_id(&before, image));
    assert_int_equal(td_tokenizer_reserve(tok, 17), TD_ENOTFOUND);
    assert_int_equal(td_tokenizer_reserve(tok, image), TD_OK);
    td_ids quoted = encode(tok, text, sizeof text - 1, 0), own = encode(tok, text, sizeof text - 1, TD_ENCODE_RESERVED);
    td_ids plain = encode(tok, text, sizeof text - 1, TD_ENCODE_PLAIN);
    assert_false(has_id(&quoted, image));
    assert_true(has_id(&quoted, begin));
    assert_int_equal(own.n, before.n);
    assert_memory_equal(own.data, before.data, own.n * sizeof *own.data);
    for (int32_t id = 4052; id < 4088; id++) assert_false(has_id(&plain, id));
    const td_ids *all[] = { &before, &quoted, &own, &plain };
    for (size_t i = 0; i < 4; i++) { /* whatever the ids, the text is the same */
        size_t n;
        char *back = decode(tok, all[i], &n);
        assert_int_equal(n, sizeof text - 1);
        assert_memory_equal(back, text, n);
        free(back);
    }
    td_ids_deinit(&before);
    td_ids_deinit(&quoted);
    td_ids_deinit(&own);
    td_ids_deinit(&plain);
    td_tokenizer_destroy(tok);
}

/* Any bytes at all come back, and ids are appended to what the list holds. */
static void test_bytes_come_back(void **state)
{
    (void)state;
    static const char few[] = "ab <|>?\n 12'\xC3\xA9\xE2";
    td_tokenizer *tok = open_demo();
    uint64_t random = 5;
    for (int round = 0; round < 3000; round++) {
        char text[200];
        size_t n_text = next_random(&random) % sizeof text, n;
        unsigned flags = (unsigned)next_random(&random) % 4;
        for (size_t i = 0; i < n_text; i++)
            text[i] = round % 2 ? (char)next_random(&random) : few[next_random(&random) % (sizeof few - 1)];
        td_ids ids = { 0 };
        assert_int_equal(td_ids_push(&ids, 65), TD_OK);
        assert_int_equal(td_tokenizer_encode(tok, text, n_text, flags, &ids, NULL), TD_OK);
        assert_int_equal(ids.data[0], 65);
        ids.data++;
        ids.n--;
        char *back = decode(tok, &ids, &n);
        assert_int_equal(n, n_text);
        if (n) assert_memory_equal(back, text, n);
        free(back);
        ids.data--;
        td_ids_deinit(&ids);
    }
    td_tokenizer_destroy(tok);
}

typedef struct worker {
    const td_tokenizer *tok;
    const td_ids *expected;
    const char *text;
    bool same;
} worker;

static void *encode_often(void *arg)
{
    worker *w = arg;
    w->same = true;
    for (int i = 0; i < 50; i++) {
        td_ids ids = { 0 };
        if (td_tokenizer_encode(w->tok, w->text, strlen(w->text), 0, &ids, NULL) != TD_OK || ids.n != w->expected->n ||
            memcmp(ids.data, w->expected->data, ids.n * sizeof *ids.data) != 0)
            w->same = false;
        td_ids_deinit(&ids);
    }
    return NULL;
}

static void test_many_threads(void **state)
{
    (void)state;
    static const char text[] =
        "<|user|>Write a Python fibonacci function, isn't it 12345?\n<|assistant|><think></think>def fib(n):";
    td_tokenizer *tok = open_demo();
    td_ids expected = encode(tok, text, sizeof text - 1, 0);
    worker workers[24];
    pthread_t threads[24];
    for (int i = 0; i < 24; i++) {
        workers[i] = (worker){ tok, &expected, text, false };
        assert_int_equal(pthread_create(&threads[i], NULL, encode_often, &workers[i]), 0);
    }
    for (int i = 0; i < 24; i++) {
        pthread_join(threads[i], NULL);
        assert_true(workers[i].same);
    }
    td_ids_deinit(&expected);
    td_tokenizer_destroy(tok);
}

/* ---- refusals ---- */

typedef struct refusal {
    const char *patch; /* members put over the demo's file */
    const char *model; /* members put over its model */
    td_status status;
    const char *message; /* part of the error text */
} refusal;

static const refusal refusals[] = {
    { "{\"normalizer\":{\"type\":\"Lowercase\"}}", "{}", TD_EUNSUPPORTED, "normalizer of type Lowercase" },
    { "{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":\"NFKD\"}]}}", "{}",
      TD_EUNSUPPORTED, "NFKD" },
    { "{\"pre_tokenizer\":{\"type\":\"Metaspace\"}}", "{}", TD_EUNSUPPORTED, "pre_tokenizer of type Metaspace" },
    { "{\"pre_tokenizer\":null}", "{}", TD_EUNSUPPORTED, "no ByteLevel" },
    { "{\"pre_tokenizer\":{\"type\":\"ByteLevel\"}}", "{}", TD_EUNSUPPORTED, "add_prefix_space" },
    { "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Removed\"}}", "{}",
      TD_EUNSUPPORTED, "Removed" },
    { "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},\"behavior\":\"Isolated\"}}", "{}",
      TD_EUNSUPPORTED, "pattern" },
    { "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{},\"behavior\":\"Isolated\"}}", "{}", TD_EFORMAT,
      "no pattern" },
    { "{\"post_processor\":{\"type\":\"BertProcessing\"}}", "{}", TD_EUNSUPPORTED, "BertProcessing" },
    { "{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"x\"}}]}}", "{}",
      TD_EFORMAT, "special token x" },
    { "{\"decoder\":{\"type\":\"WordPiece\"}}", "{}", TD_EUNSUPPORTED, "decoder of type WordPiece" },
    { "{\"added_tokens\":[{\"id\":4052,\"content\":\"\"}]}", "{}", TD_EFORMAT, "added_tokens[0]: content" },
    { "{\"added_tokens\":[{\"id\":-1,\"content\":\"x\"}]}", "{}", TD_EFORMAT, "added_tokens[0]: id" },
    { "{\"added_tokens\":[{\"id\":4052,\"content\":\"x\"},{\"id\":4053,\"content\":\"x\"}]}", "{}", TD_EFORMAT,
      "same content" },
    { "{\"added_tokens\":[{\"id\":4052,\"content\":\"x\"},{\"id\":4052,\"content\":\"y\"}]}", "{}", TD_EFORMAT,
      "id 4052 twice" },
    { "{\"added_tokens\":3}", "{}", TD_EFORMAT, "added_tokens is not an array" },
    { "{\"model\":{\"type\":\"BPE\"}}", NULL, TD_EFORMAT, "model has no vocab" },
    { "{\"model\":{\"type\":\"Unigram\"}}", NULL, TD_EUNSUPPORTED, "model.type is \"Unigram\"" },
    { "{}", "{\"dropout\":0.1}", TD_EUNSUPPORTED, "model.dropout is 0.1" },
    { "{}", "{\"continuing_subword_prefix\":\"##\"}", TD_EUNSUPPORTED, "continuing_subword_prefix" },
    { "{}", "{\"byte_fallback\":true}", TD_EUNSUPPORTED, "byte_fallback" },
    { "{}", "{\"merges\":[[\"q\",\"zzz\"]]}", TD_EFORMAT, "merges[0]" },
    { "{}", "{\"merges\":[\"qz\"]}", TD_EFORMAT, "merges[0]" },
    { "{}", "{\"merges\":[[\"a\"]]}", TD_EFORMAT, "two strings" },
    { "{}", "{\"merges\":[[\"a\",\"b\",\"c\"]]}", TD_EFORMAT, "two strings" },
    { "{}", "{\"merges\":7}", TD_EFORMAT, "expected an array" },
    { "{}", "{\"vocab\":{\"a\":0}}", TD_EFORMAT, "no entry for byte 0x00" },
    { "{}", "{\"vocab\":{\"a\":1,\"b\":1}}", TD_EFORMAT, "id 1 twice" },
    { "{}", "{\"vocab\":{\"a\":-1}}", TD_EFORMAT, "\"a\" has id -1" },
    { "{}", "{\"vocab\":{\"a\":99999999999}}", TD_EFORMAT, "\"a\" has id 99999999999" },
    { "{}", "{\"vocab\":{\"a\":1.5}}", TD_EFORMAT, "expected an integer" },
};

static void test_refusals(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const refusal *r = &refusals[i];
        td_tokenizer *tok = NULL;
        td_error err;
        json_t *root = json_load_file(DEMO, 0, NULL), *patch = json_loads(r->patch, 0, NULL);
        json_t *model = r->model ? json_loads(r->model, 0, NULL) : NULL;
        assert_non_null(patch);
        json_object_update(root, patch);
        if (model) json_object_update(json_object_get(root, "model"), model);
        char *text = json_dumps(root, JSON_COMPACT);
        assert_int_equal(td_tokenizer_open_memory("file.json", text, strlen(text), &tok, &err), r->status);
        if (!strstr(err.text, r->message)) fail_msg("case %zu: \"%s\" lacks \"%s\"", i, err.text, r->message);
        assert_int_equal(strncmp(err.text, "file.json: ", 11), 0);
        assert_null(tok);
        free(text);
        json_decref(root);
        json_decref(patch);
        json_decref(model);
    }
    td_tokenizer *tok = NULL;
    td_error err;
    assert_int_equal(td_tokenizer_open("no/such.json", &tok, &err), TD_EIO);
    assert_non_null(strstr(err.text, "no/such.json: No such file"));
}

/* A small file of the same form: the byte alphabet, one merge, one added token with an escaped name. */
static char *small_file(size_t *n_bytes)
{
    char *text = malloc(16384), *p = text;
    int next = 0x100;
    p += sprintf(
        p,
        "{\"added_tokens\":[{\"id\":300,\"content\":\"\\ud83d\\ude00<\",\"special\":true}],\"pre_tokenizer\":"
        "{\"type\":\"ByteLevel\",\"add_prefix_space\":false},\"model\":{\"merges\":[[\"\\u0120\",\"a\"]],\"vocab\":{");
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        p += sprintf(p, "\"\\u%04x\":%d,", printable ? b : next++, b);
    }
    p += sprintf(p, "\"\\u0120a\":256,\"\xE2\x96\x81lit\":257}}}");
    *n_bytes = (size_t)(p - text);
    return text;
}

static void test_small_file(void **state)
{
    (void)state;
    size_t n, n_bytes;
    td_tokenizer *tok = NULL;
    td_error err;
    const char *bytes;
    char *text = small_file(&n);
    if (td_tokenizer_open_memory("small", text, n, &tok, &err) != TD_OK) fail_msg("%s", err.text);
    td_ids ids = encode(tok, "b a\xF0\x9F\x98\x80<a", 9, 0);
    static const int32_t expected[] = { 'b', 256, 300, 'a' };
    assert_int_equal(ids.n, 4);
    assert_memory_equal(ids.data, expected, sizeof expected);
    assert_int_equal(td_tokenizer_n_ids(tok), 301);
    assert_int_equal(td_tokenizer_id_bytes(tok, 299, &bytes, &n_bytes), TD_ENOTFOUND); /* a hole */
    assert_int_equal(td_tokenizer_id_bytes(tok, 257, &bytes, &n_bytes), TD_OK);
    assert_int_equal(n_bytes, 6); /* not of the byte alphabet: means itself */
    td_ids_deinit(&ids);
    td_tokenizer_destroy(tok);
    free(text);
}

/* Every prefix of a file, against a page that may not be read. */
static void test_every_prefix(void **state)
{
    (void)state;
    size_t n, page = 4096, room;
    char *text = small_file(&n);
    room = (n + page - 1) / page * page;
    char *map = mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(map != MAP_FAILED);
    assert_int_equal(mprotect(map + room, page, PROT_NONE), 0);
    for (size_t length = 0; length < n; length += length < 400 || length > n - 60 ? 1 : 37) {
        td_tokenizer *tok = NULL;
        td_error err;
        memcpy(map + room - length, text, length);
        assert_int_equal(td_tokenizer_open_memory("prefix", map + room - length, length, &tok, &err), TD_EFORMAT);
    }
    munmap(map, room + page);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_classes_are_unicode_16),
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_native_splitter_equals_pcre2),
        cmocka_unit_test(test_other_patterns),
        cmocka_unit_test(test_added_tokens),
        cmocka_unit_test(test_reserved_and_plain),
        cmocka_unit_test(test_bytes_come_back),
        cmocka_unit_test(test_many_threads),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_small_file),
        cmocka_unit_test(test_every_prefix),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, NULL, NULL);
}
