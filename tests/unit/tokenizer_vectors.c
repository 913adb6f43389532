/* The tokenizer against the Hugging Face library: tests/oracle/tokenizer/vectors.bin (made by make_vectors.py there,
 * which describes the format) for the demo's file, two variants of it, and the real files of Qwen 3 and Llama 3, which
 * fetch.sh has brought to the folder in argv[1]. Every id must be equal. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

#define ORACLE "tests/oracle/tokenizer/"

enum { LITERAL, REPEAT, RANGE, RANDOM, MAX_TOKENIZERS = 8, DIGEST_BYTES = 8, MAX_SHOWN = 10 };

typedef struct cursor {
    const unsigned char *p, *end;
} cursor;

typedef struct text_case {
    uint8_t kind, mask;
    uint64_t a, b;
    const char *text;
    size_t n_bytes;
} text_case;

typedef struct named_tokenizer {
    char name[32];
    td_tokenizer *tok;
    unsigned flags;
} named_tokenizer;

static char *read_file(const char *path, size_t *n_bytes)
{
    FILE *f = fopen(path, "rb");
    if (!f) fail_msg("%s: cannot be read", path);
    fseek(f, 0, SEEK_END);
    *n_bytes = (size_t)ftell(f);
    rewind(f);
    char *data = malloc(*n_bytes + 1);
    assert_int_equal(fread(data, 1, *n_bytes, f), *n_bytes);
    fclose(f);
    return data;
}

static uint64_t take_fixed(cursor *c, int n_bytes)
{
    uint64_t value = 0;
    assert_true(c->end - c->p >= n_bytes);
    for (int i = 0; i < n_bytes; i++) value |= (uint64_t)*c->p++ << (8 * i);
    return value;
}

static uint64_t take_varint(cursor *c)
{
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
        uint64_t byte = take_fixed(c, 1);
        value |= (byte & 0x7F) << shift;
        if (byte < 0x80) return value;
    }
}

static text_case take_case(cursor *c)
{
    text_case k = { .kind = (uint8_t)take_fixed(c, 1) };
    k.a = take_varint(c);
    k.b = take_varint(c);
    k.n_bytes = take_varint(c);
    k.text = (const char *)c->p;
    assert_true((size_t)(c->end - c->p) > k.n_bytes);
    c->p += k.n_bytes;
    k.mask = (uint8_t)take_fixed(c, 1);
    return k;
}

/* ---- the text a case stands for; as expand() in cases.py ---- */

static size_t put_range(const text_case *k, char *out)
{
    size_t n = 0;
    for (uint32_t code = (uint32_t)k->a; code < k->b; code++) {
        if (code >= 0xD800 && code < 0xE000) continue;
        for (size_t i = 0; i < k->n_bytes; i++) {
            if (k->text[i] == 1)
                n += td_utf8_put(code, out + n);
            else
                out[n++] = k->text[i];
        }
    }
    return n;
}

static size_t put_random(const text_case *k, char *out)
{
    size_t starts[257], n_chars = 0, n = 0;
    for (size_t i = 0; i < k->n_bytes; i++)
        if (((unsigned char)k->text[i] & 0xC0) != 0x80) starts[n_chars++] = i;
    starts[n_chars] = k->n_bytes;
    uint64_t x = k->a;
    for (uint64_t i = 0; i < k->b; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        size_t pick = (x >> 33) % n_chars, length = starts[pick + 1] - starts[pick];
        memcpy(out + n, k->text + starts[pick], length);
        n += length;
    }
    return n;
}

static char *expand(const text_case *k, size_t *n_bytes)
{
    size_t most = k->kind == REPEAT   ? k->a * k->n_bytes
                  : k->kind == RANGE  ? (k->b - k->a) * 4 * k->n_bytes
                  : k->kind == RANDOM ? 4 * k->b
                                      : k->n_bytes;
    char *out = malloc(most + 1);
    assert_non_null(out);
    if (k->kind == LITERAL) memcpy(out, k->text, k->n_bytes);
    for (uint64_t i = 0; k->kind == REPEAT && i < k->a; i++) memcpy(out + i * k->n_bytes, k->text, k->n_bytes);
    *n_bytes = k->kind == RANGE ? put_range(k, out) : k->kind == RANDOM ? put_random(k, out) : most;
    return out;
}

/* ---- the tokenizers ---- */

static void merges_as_strings(json_t *model)
{
    const json_t *merges = json_object_get(model, "merges"), *merge;
    json_t *strings = json_array();
    size_t i;
    json_array_foreach(merges, i, merge)
    {
        const char *left = json_string_value(json_array_get(merge, 0)),
                   *right = json_string_value(json_array_get(merge, 1));
        json_array_append_new(strings, json_sprintf("%s %s", left, right));
    }
    json_object_set_new(model, "merges", strings);
}

/* demo.json with the members of spec put over it. */
static td_tokenizer *open_variant(const json_t *spec)
{
    json_error_t json_err;
    td_error err;
    td_tokenizer *tok = NULL;
    json_t *root = json_load_file(ORACLE "demo.json", 0, &json_err), *model = json_object_get(root, "model");
    assert_non_null(model);
    json_object_update(root, json_object_get(spec, "root"));
    json_object_update(model, json_object_get(spec, "model"));
    if (json_is_true(json_object_get(spec, "merges_as_strings"))) merges_as_strings(model);
    char *text = json_dumps(root, JSON_COMPACT);
    if (td_tokenizer_open_memory("variant", text, strlen(text), &tok, &err) != TD_OK) fail_msg("%s", err.text);
    free(text);
    json_decref(root);
    return tok;
}

static td_tokenizer *open_file(const char *dir, const char *name)
{
    char path[512];
    td_error err;
    td_tokenizer *tok = NULL;
    snprintf(path, sizeof path, "%s/%s.json", dir, name);
    if (td_tokenizer_open(path, &tok, &err) != TD_OK)
        fail_msg("%s (tests/oracle/tokenizer/fetch.sh brings it)", err.text);
    return tok;
}

/* In the order of the vectors: demo, qwen3, llama3, variants. */
static int open_all(const char *fetched, named_tokenizer *list)
{
    static const char *const files[] = { "demo", "qwen3", "llama3" };
    json_error_t err;
    json_t *specs = json_load_file(ORACLE "variants.json", 0, &err);
    const json_t *spec;
    size_t i;
    int n = 0;
    assert_non_null(specs);
    for (; n < 3; n++) {
        snprintf(list[n].name, sizeof list[n].name, "%s", files[n]);
        list[n].tok = open_file(n ? fetched : ORACLE, files[n]);
        list[n].flags = 0;
    }
    json_array_foreach(specs, i, spec)
    {
        snprintf(list[n].name, sizeof list[n].name, "%s", json_string_value(json_object_get(spec, "name")));
        list[n].tok = open_variant(spec);
        list[n++].flags = json_is_true(json_object_get(spec, "add_special")) ? TD_ENCODE_ADD_SPECIAL : 0;
    }
    json_decref(specs);
    return n;
}

/* ---- comparison ---- */

static void show(const text_case *k, const named_tokenizer *t, const td_ids *got, size_t n_expected)
{
    printf("%s: kind %d a %llu b %llu: %zu ids, expected %zu; text:", t->name, k->kind, (unsigned long long)k->a,
           (unsigned long long)k->b, got->n, n_expected);
    for (size_t i = 0; i < k->n_bytes && i < 100; i++) printf(" %02X", (unsigned char)k->text[i]);
    printf("\n  got:");
    for (size_t i = 0; i < got->n && i < 40; i++) printf(" %d", (int)got->data[i]);
    printf("\n");
}

static bool same_ids(cursor *c, const text_case *k, const td_ids *got, size_t n_expected)
{
    bool same = got->n == n_expected;
    if (k->kind == LITERAL) {
        for (size_t i = 0; i < n_expected; i++) {
            uint64_t id = take_varint(c);
            if (same && (uint64_t)got->data[i] != id) same = false;
        }
        return same;
    }
    uint8_t digest[TD_SHA256_BYTES];
    td_sha256_of(got->data, got->n * sizeof *got->data, digest);
    same = same && memcmp(digest, c->p, DIGEST_BYTES) == 0;
    (void)take_fixed(c, DIGEST_BYTES);
    return same;
}

static void test_vectors(void **state)
{
    size_t n_bytes, wrong = 0, compared = 0;
    named_tokenizer list[MAX_TOKENIZERS];
    char *data = read_file(ORACLE "vectors.bin", &n_bytes);
    cursor c = { (unsigned char *)data + 8, (unsigned char *)data + n_bytes };
    assert_memory_equal(data, "TDTOKV1\n", 8);
    int n_tokenizers = (int)take_fixed(&c, 1);
    uint64_t n_cases = take_fixed(&c, 4);
    assert_int_equal(open_all(*state, list), n_tokenizers);
    for (uint64_t i = 0; i < n_cases; i++) {
        size_t n_text;
        text_case k = take_case(&c);
        char *text = expand(&k, &n_text);
        for (int t = 0; t < n_tokenizers; t++) {
            td_ids ids = { 0 };
            td_error err;
            if (!(k.mask >> t & 1)) continue;
            if (td_tokenizer_encode(list[t].tok, text, n_text, list[t].flags, &ids, &err) != TD_OK)
                fail_msg("%s", err.text);
            size_t n_expected = take_varint(&c);
            compared++;
            if (!same_ids(&c, &k, &ids, n_expected) && wrong++ < MAX_SHOWN) show(&k, &list[t], &ids, n_expected);
            td_ids_deinit(&ids);
        }
        free(text);
    }
    for (int t = 0; t < n_tokenizers; t++) td_tokenizer_destroy(list[t].tok);
    assert_true(c.p == c.end);
    free(data);
    printf("%zu encodings of %llu texts compared, %zu differ\n", compared, (unsigned long long)n_cases, wrong);
    assert_true(compared >= 9000);
    assert_int_equal(wrong, 0);
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: %s FOLDER_OF_FETCHED_FILES\n", argv[0]);
        return 2;
    }
    const struct CMUnitTest tests[] = { cmocka_unit_test_prestate(test_vectors, argv[1]) };
    return cmocka_run_group_tests_name("tokenizer vectors", tests, NULL, NULL);
}
