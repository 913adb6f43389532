/* The safetensors container: good headers, every refusal with its words, every prefix against an inaccessible page, the
 * index, the writer, and folders whose files and index disagree. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint_fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define GOOD                                                                                                           \
    "{\"__metadata__\": {\"format\": \"pt\", \"note\": \"\\u00e9\\\"\"}, "                                             \
    "\"a.weight\": {\"dtype\": \"BF16\", \"shape\": [2, 3], \"data_offsets\": [0, 12]}, "                              \
    "\"s\": {\"data_offsets\": [12, 16], \"shape\": [], \"dtype\": \"F32\"}, "                                         \
    "\"none\": {\"dtype\": \"I8\", \"shape\": [0, 7], \"data_offsets\": [16, 16], \"later\": [{\"x\": null}]}}"

/* Bytes that end right before a page nobody may touch. */
typedef struct guarded {
    unsigned char *map, *end;
    size_t map_bytes;
} guarded;

static guarded guard_create(size_t n_bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (n_bytes + page - 1) / page * page;
    guarded g = { .map_bytes = room + page };
    g.map = mmap(NULL, g.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(g.map != MAP_FAILED);
    g.end = g.map + room;
    assert_int_equal(mprotect(g.end, page, PROT_NONE), 0);
    return g;
}

/* Length bytes and header, padded to a multiple of 8 as writers do. */
static size_t make_head(const char *json, unsigned char *out)
{
    size_t n = strlen(json), padded = (n + 7) / 8 * 8;
    for (int i = 0; i < 8; i++) out[i] = (unsigned char)(padded >> 8 * i);
    memcpy(out + 8, json, n);
    memset(out + 8 + n, ' ', padded - n);
    return 8 + padded;
}

static td_status parse(const char *json, uint64_t data_bytes, td_arena *arena, td_tensor_list *list, td_error *err)
{
    unsigned char *head = malloc(16 + strlen(json));
    size_t n = make_head(json, head);
    td_status status = td_safetensors_parse("x", head, n, n + data_bytes, arena, list, err);
    free(head);
    return status;
}

static void test_header(void **state)
{
    (void)state;
    td_arena arena;
    td_tensor_list list;
    td_error err;
    td_arena_init(&arena, 0);
    assert_int_equal(parse(GOOD, 16, &arena, &list, &err), TD_OK);
    assert_int_equal(list.n, 3);
    const td_tensor *a = &list.items[0], *s = &list.items[1], *none = &list.items[2];
    uint64_t data = 8 + (strlen(GOOD) + 7) / 8 * 8;
    assert_string_equal(a->name, "a.weight");
    assert_int_equal(a->dtype, TD_DTYPE_BF16);
    assert_int_equal(a->rank, 2);
    assert_int_equal(a->shape[1], 3);
    assert_int_equal(a->n_bytes, 12);
    assert_int_equal(a->offset, data);
    assert_int_equal(s->rank, 0);
    assert_int_equal(td_tensor_n_elements(s), 1);
    assert_int_equal(s->offset, data + 12);
    assert_int_equal(td_tensor_n_elements(none), 0);
    assert_int_equal(parse("{}", 0, &arena, &list, &err), TD_OK);
    assert_int_equal(list.n, 0);
    td_arena_deinit(&arena);
}

#define ENTRY(dtype, shape, offsets)                                                                                   \
    "{\"t\": {\"dtype\": \"" dtype "\", \"shape\": " shape ", \"data_offsets\": " offsets "}}"
#define NESTED_32 "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["

static const struct bad_header {
    const char *json;
    td_status status;
    const char *says;
} BAD_HEADERS[] = {
    { "", TD_EFORMAT, "x: header: '{' expected at byte 0" },
    { "[]", TD_EFORMAT, "x: header: '{' expected at byte 0" },
    { "{", TD_EFORMAT, "a tensor name expected" },
    { "{\"t\": 1}", TD_EFORMAT, "x: header: '{' expected at byte 6" },
    { "{\"t\": {}}", TD_EFORMAT, "a field expected" },
    { ENTRY("BF16", "[8]", "[0, 16]") "x", TD_EFORMAT, "the end expected" },
    { ENTRY("BF16", "[8]", "[0, 17]"), TD_EFORMAT,
      "x: tensor t: data_offsets [0, 17] outside the file's 16 data bytes" },
    { ENTRY("BF16", "[8]", "[16, 0]"), TD_EFORMAT, "data_offsets [16, 0] outside" },
    { ENTRY("BF16", "[8]", "[18446744073709551600, 18446744073709551615]"), TD_EFORMAT, "outside the file's 16" },
    { ENTRY("BF16", "[8]", "[0, 18446744073709551616]"), TD_EFORMAT, "[begin, end] expected" },
    { ENTRY("BF16", "[8]", "[0, 16, 32]"), TD_EFORMAT, "[begin, end] expected" },
    { ENTRY("BF16", "[8]", "[-2, 14]"), TD_EFORMAT, "[begin, end] expected" },
    { ENTRY("BF16", "[8]", "[0, 1.6e1]"), TD_EFORMAT, "[begin, end] expected" },
    { ENTRY("BF16", "[7]", "[0, 16]"), TD_EFORMAT, "x: tensor t: 16 bytes, but BF16 [7] is 14" },
    { ENTRY("F32", "[2, 4]", "[0, 16]"), TD_EFORMAT, "16 bytes, but F32 [2, 4] is 32" },
    { ENTRY("BF16", "[4294967296, 4294967296, 2]", "[0, 16]"), TD_EFORMAT,
      "shape [4294967296, 4294967296, 2] overflows" },
    { ENTRY("BF16", "[9223372036854775808]", "[0, 16]"), TD_EFORMAT, "tensor t: dimension too large" },
    { ENTRY("BF16", "[08]", "[0, 16]"), TD_EFORMAT, "a dimension expected" },
    { ENTRY("BF16", "[-8]", "[0, 16]"), TD_EFORMAT, "a dimension expected" },
    { ENTRY("BF16", "[1,1,1,1,1,1,1,1,8]", "[0, 16]"), TD_EUNSUPPORTED, "tensor t: more than 8 dimensions" },
    { ENTRY("F4", "[8]", "[0, 16]"), TD_EUNSUPPORTED, "x: tensor t: unknown dtype \"F4\"" },
    { ENTRY("BF16\\n", "[8]", "[0, 16]"), TD_EUNSUPPORTED, "unknown dtype \"\"" },
    { ENTRY("BF16", "[7]", "[1, 15]"), TD_EUNSUPPORTED, "not aligned to its BF16 elements" },
    { "{\"t\": {\"dtype\": \"BF16\", \"shape\": [8]}}", TD_EFORMAT,
      "tensor t: dtype, shape or data_offsets is missing" },
    { "{\"t\": {\"dtype\": \"I8\", \"dtype\": \"I8\"}}", TD_EFORMAT, "tensor t: a field stands twice" },
    { "{\"\": {\"dtype\": \"I8\"}}", TD_EUNSUPPORTED, "tensor name at byte 2 is empty, longer than" },
    { "{\"t\\u0041\": {\"dtype\": \"I8\"}}", TD_EUNSUPPORTED, "not printable ASCII" },
    { "{\"t\xc3\xa9\": {\"dtype\": \"I8\"}}", TD_EUNSUPPORTED, "not printable ASCII" },
    { "{\"t\n\": {\"dtype\": \"I8\"}}", TD_EFORMAT, "a tensor name expected" },
    { "{\"__metadata__\": " NESTED_32 "[", TD_EFORMAT, "metadata expected" },
    { "{\"__metadata__\": {\"a\": tru}}", TD_EFORMAT, "metadata expected" },
    { "{\"__metadata__\": {\"a\": 01}}", TD_EFORMAT, "metadata expected" },
    { "{\"__metadata__\": {\"a\": \"\\x\"}}", TD_EFORMAT, "metadata expected" },
    { "{\"a\": {\"dtype\": \"I8\", \"shape\": [10], \"data_offsets\": [0, 10]}, "
      "\"b\": {\"dtype\": \"I8\", \"shape\": [7], \"data_offsets\": [9, 16]}}",
      TD_EFORMAT, "x: tensors a and b overlap" },
    { "{\"b\": {\"dtype\": \"I8\", \"shape\": [4], \"data_offsets\": [4, 8]}, "
      "\"a\": {\"dtype\": \"I8\", \"shape\": [16], \"data_offsets\": [0, 16]}}",
      TD_EFORMAT, "x: tensors a and b overlap" },
};

static void test_bad_headers(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof BAD_HEADERS / sizeof *BAD_HEADERS; i++) {
        const struct bad_header *b = &BAD_HEADERS[i];
        td_arena arena;
        td_tensor_list list;
        td_error err = { 0 };
        td_arena_init(&arena, 0);
        td_status status = parse(b->json, 16, &arena, &list, &err);
        if (status != b->status || !strstr(err.text, b->says))
            fail_msg("%s: status %d \"%s\", expected %d \"%s\"", b->json, status, err.text, b->status, b->says);
        td_arena_deinit(&arena);
    }
}

static void test_lengths(void **state)
{
    (void)state;
    td_arena arena;
    td_tensor_list list;
    td_error err;
    td_arena_init(&arena, 0);
    unsigned char head[8] = { 0, 0, 0, 0, 1, 0, 0, 0 };
    assert_int_equal(td_safetensors_parse("x", head, 8, 8, &arena, &list, &err), TD_EFORMAT);
    assert_non_null(strstr(err.text, "x: header of 4294967296 bytes, at most"));
    unsigned char partial[8] = { 200 };
    assert_int_equal(td_safetensors_parse("x", partial, 8, 100, &arena, &list, &err), TD_EFORMAT);
    assert_non_null(strstr(err.text, "x: header of 200 bytes reaches past the end: a partial download?"));
    assert_int_equal(td_safetensors_parse("x", head, 7, 7, &arena, &list, &err), TD_EFORMAT);
    assert_non_null(strstr(err.text, "x: shorter than the 8 bytes"));
    td_arena_deinit(&arena);
}

/* Every prefix of the file, and every prefix of the JSON with a length that claims it whole: refused, and not one byte
 * is read behind it. The arena may be as small as it likes, too. */
static void test_prefixes(void **state)
{
    (void)state;
    unsigned char head[1024];
    size_t n = make_head(GOOD, head);
    guarded g = guard_create(n);
    td_error err;
    td_tensor_list list;
    for (size_t i = 0; i <= n; i++) {
        td_arena arena;
        td_arena_init(&arena, 0);
        unsigned char *at = g.end - i;
        memcpy(at, head, i);
        assert_int_equal(td_safetensors_parse("x", at, i, n + 16, &arena, &list, &err), i == n ? TD_OK : TD_EFORMAT);
        assert_int_equal(td_safetensors_parse("x", at, i, i, &arena, &list, &err), TD_EFORMAT);
        td_arena_deinit(&arena);
    }
    for (size_t i = 0; i <= strlen(GOOD); i++) {
        td_arena arena;
        td_arena_init(&arena, 0);
        unsigned char *at = g.end - 8 - i;
        memset(at, 0, 8);
        at[0] = (unsigned char)(i & 255);
        at[1] = (unsigned char)(i >> 8);
        memcpy(at + 8, GOOD, i);
        td_status status = td_safetensors_parse("x", at, 8 + i, 8 + i + 16, &arena, &list, &err);
        if (i < strlen(GOOD)) assert_int_not_equal(status, TD_OK);
        td_arena_deinit(&arena);
    }
    for (size_t limit = 1; limit < 1000; limit += 7) {
        td_arena arena;
        td_arena_init(&arena, limit);
        memcpy(g.end - n, head, n);
        td_status status = td_safetensors_parse("x", g.end - n, n, n + 16, &arena, &list, &err);
        assert_true(status == TD_OK || status == TD_ENOMEM);
        td_arena_deinit(&arena);
    }
    munmap(g.map, g.map_bytes);
}

/* --- index --- */

static td_status count_pair(void *user, const char *tensor, size_t tensor_bytes, const char *file, size_t file_bytes,
                            td_error *err)
{
    (void)err;
    int *n = user;
    if (tensor_bytes == 1 && tensor[0] == 'a') assert_true(file_bytes == 2 && memcmp(file, "f1", 2) == 0);
    (*n)++;
    return TD_OK;
}

#define INDEX                                                                                                          \
    "{\"metadata\": {\"x\": [1.5e3], \"total_size\": 77}, \"weight_map\": {\"a\": \"f1\", \"b\": \"f2\"}, \"z\": 0}"

static void test_index(void **state)
{
    (void)state;
    static const char *const BAD[][2] = {
        { "", "i: '{' expected at byte 0" },
        { "{}", "i: a field expected" },
        { "{\"a\": 1}", "i: weight_map is missing" },
        { "{\"weight_map\": 3}", "an object for weight_map expected" },
        { "{\"weight_map\": {\"a\": 3}}", "\"tensor\": \"file\" expected" },
        { "{\"weight_map\": {\"a\": \"f1\"}, \"weight_map\": {}}", "i: weight_map stands twice" },
        { "{\"weight_map\": {\"\\u0061\": \"f1\"}}", "weight_map: name at byte 17 is not printable ASCII" },
        { "{\"weight_map\": {\"a\": \"f1\"}} 1", "the end expected" },
        { "{\"weight_map\": {\"a\": \"f1\",}}", "\"tensor\": \"file\" expected" },
    };
    td_error err;
    uint64_t total = 0;
    int n = 0;
    assert_int_equal(td_safetensors_index_parse("i", INDEX, strlen(INDEX), count_pair, &n, &total, &err), TD_OK);
    assert_int_equal(n, 2);
    assert_int_equal(total, 77);
    const char *odd = "{\"metadata\": {\"total_size\": 7.5}, \"weight_map\": {}}";
    assert_int_equal(td_safetensors_index_parse("i", odd, strlen(odd), count_pair, &n, &total, &err), TD_OK);
    assert_int_equal(total, 0);
    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        td_status status = td_safetensors_index_parse("i", BAD[i][0], strlen(BAD[i][0]), count_pair, &n, &total, &err);
        if (status == TD_OK || !strstr(err.text, BAD[i][1])) fail_msg("%s: %d \"%s\"", BAD[i][0], status, err.text);
    }
    guarded g = guard_create(sizeof INDEX);
    for (size_t i = 0; i < strlen(INDEX); i++) {
        memcpy(g.end - i, INDEX, i);
        assert_int_equal(td_safetensors_index_parse("i", g.end - i, i, count_pair, &n, &total, &err), TD_EFORMAT);
    }
    munmap(g.map, g.map_bytes);
}

/* --- folders --- */

static void expect_open(const fx_folder *fx, td_status status, const char *says)
{
    td_checkpoint *ck;
    td_error err = { 0 };
    td_status got = td_checkpoint_open_tensors(fx->dir, &ck, &err);
    if (got == TD_OK) td_checkpoint_close(ck);
    if (got != status || !strstr(err.text, says))
        fail_msg("status %d \"%s\", expected %d \"%s\"", got, err.text, status, says);
}

static void two_shards(fx_folder *fx)
{
    fx_create(fx);
    fx_add(fx, "a", "BF16", TD_SHAPE(4));
    fx_add(fx, "b", "F32", TD_SHAPE(2, 2));
    fx_add(fx, "c", "BF16", TD_SHAPE(8));
    fx_add(fx, "d", "I8", TD_SHAPE(3));
    fx_write(fx, 2);
}

#define F1 "model-00001-of-00002.safetensors"
#define F2 "model-00002-of-00002.safetensors"
#define IX "model.safetensors.index.json"

static void test_folder(void **state)
{
    (void)state;
    fx_folder fx;
    td_checkpoint *ck;
    td_error err;
    two_shards(&fx);
    assert_int_equal(td_checkpoint_open_tensors(fx.dir, &ck, &err), TD_OK);
    assert_int_equal(td_checkpoint_count(ck), 4);
    assert_int_equal(td_checkpoint_n_files(ck), 2);
    assert_int_equal(td_checkpoint_data_bytes(ck), 8 + 16 + 16 + 3);
    assert_int_equal(td_checkpoint_index_bytes(ck), 43);
    assert_null(td_checkpoint_config(ck));
    assert_null(td_checkpoint_find(ck, "e"));
    assert_null(td_checkpoint_find(ck, ""));
    assert_string_equal(td_checkpoint_at(ck, 2)->name, "c");
    assert_null(td_checkpoint_at(ck, 4));
    assert_string_equal(td_checkpoint_file_name(ck, td_checkpoint_find(ck, "d")->file), F2);
    assert_int_equal(td_checkpoint_verify(ck, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, "opened without its config"));
    td_checkpoint_close(ck);
    td_checkpoint_close(NULL);
    fx_destroy(&fx);
}

/* A file of the folder under test replaced, then opened. */
static void with_file(const char *name, const char *text, td_status status, const char *says)
{
    fx_folder fx;
    two_shards(&fx);
    if (text) {
        fx_write_text(&fx, name, text);
    } else {
        char path[256];
        snprintf(path, sizeof path, "%s/%s", fx.dir, name);
        assert_int_equal(unlink(path), 0);
    }
    expect_open(&fx, status, says);
    fx_destroy(&fx);
}

#define MAP(pairs) "{\"weight_map\": {" pairs "}}"

static void test_bad_folders(void **state)
{
    (void)state;
    with_file(F2, NULL, TD_ENOTFOUND, "/" F2 ": No such file or directory");
    with_file(F2, "", TD_EFORMAT, "/" F2 ": empty");
    with_file(F2, "short", TD_EFORMAT, "/" F2 ": shorter than the 8 bytes");
    with_file(F2, "<!DOCTYPE html>", TD_EFORMAT, F2 ": header of ");
    with_file(IX, "", TD_EFORMAT, "/" IX ": empty");
    with_file(IX, "{}", TD_EFORMAT, "/" IX ": a field expected");
    with_file(IX, MAP("\"x\": \"" F1 "\""), TD_ENOTFOUND, IX ": tensor x: not in " F1);
    with_file(IX, MAP("\"a\": \"" F1 "\", \"c\": \"" F1 "\""), TD_ENOTFOUND, IX ": tensor c: not in " F1);
    with_file(IX, MAP("\"a\": \"" F2 "\", \"c\": \"" F1 "\""), TD_EFORMAT, "tensor a: listed in " F2 ", found in " F1);
    with_file(IX, MAP("\"a\": \"" F1 "\", \"a\": \"" F1 "\""), TD_EFORMAT, IX ": tensor a stands twice");
    with_file(IX, MAP("\"a\": \"../" F1 "\""), TD_EUNSUPPORTED, "tensor a: file \"../" F1 "\" is not a plain name");
    with_file(IX, MAP("\"a\": \"/etc/passwd\""), TD_EUNSUPPORTED, "file \"/etc/passwd\" is not a plain name");
    with_file(IX, MAP("\"a\": \"sub/m.safetensors\""), TD_EUNSUPPORTED, "is not a plain name ending in .safetensors");
    with_file(IX, MAP("\"a\": \".safetensors\""), TD_EUNSUPPORTED, "is not a plain name");
    with_file(IX, MAP("\"a\": \"pickle.bin\""), TD_EUNSUPPORTED, "is not a plain name");
    with_file(IX, MAP(""), TD_ENOTFOUND, ": no .safetensors file");
}

static void test_odd_folders(void **state)
{
    (void)state;
    fx_folder fx;
    char path[256];
    fx_create(&fx);
    expect_open(&fx, TD_ENOTFOUND, ": no .safetensors file");
    snprintf(path, sizeof path, "%s/model.safetensors", fx.dir);
    assert_int_equal(mkdir(path, 0700), 0);
    expect_open(&fx, TD_EFORMAT, "model.safetensors: not a regular file");
    rmdir(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    expect_open(&fx, TD_EFORMAT, "model.safetensors: not a regular file");
    unlink(path);
    fx_add(&fx, "a", "BF16", TD_SHAPE(4));
    fx_write(&fx, 1); /* no index: every *.safetensors counts, others do not */
    fx_write_text(&fx, "notes.txt", "x");
    fx_write_text(&fx, ".hidden.safetensors", "x");
    expect_open(&fx, TD_OK, "");
    fx_find(&fx, "a")->shape[0] = 5;
    fx_write(&fx, 2); /* the same name in another file (an empty first one is a file, too) */
    snprintf(path, sizeof path, "%s/" IX, fx.dir);
    unlink(path);
    expect_open(&fx, TD_EFORMAT, "tensor a stands twice: in model-00002-of-00002.safetensors and in model.safetensors");
    fx_destroy(&fx);
    fx_folder none = { .dir = "/nonexistent" };
    expect_open(&none, TD_ENOTFOUND, "/nonexistent: No such file or directory");
}

/* Twice in one header. */
static void test_duplicate(void **state)
{
    (void)state;
    fx_folder fx;
    fx_create(&fx);
    fx_add(&fx, "a", "BF16", TD_SHAPE(4));
    fx_add(&fx, "a", "BF16", TD_SHAPE(4));
    fx_write(&fx, 1);
    expect_open(&fx, TD_EFORMAT, "tensor a stands twice: in model.safetensors and in model.safetensors");
    fx_destroy(&fx);
}

/* --- writer --- */

static td_status write_three(const char *dir, uint64_t shard_bytes, size_t piece, td_error *err)
{
    td_safetensors_writer *w;
    unsigned char data[40];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)(i + 1);
    td_status status = td_safetensors_writer_create(dir, shard_bytes, &w, err);
    if (status) return status;
    td_safetensors_writer_declare(w, "f", TD_DTYPE_F32, TD_SHAPE(2, 3), err);
    td_safetensors_writer_declare(w, "nothing", TD_DTYPE_F16, TD_SHAPE(0), err);
    td_safetensors_writer_declare(w, "h", TD_DTYPE_BF16, TD_SHAPE(6), err);
    td_safetensors_writer_declare(w, "scalar", TD_DTYPE_I32, 0, NULL, err);
    status = td_safetensors_writer_begin(w, err);
    for (size_t i = 0; i < 40 && !status; i += piece)
        status = td_safetensors_writer_put(w, data + i, i + piece < 40 ? piece : 40 - i, err);
    if (!status) status = td_safetensors_writer_finish(w, err);
    td_safetensors_writer_destroy(w);
    return status;
}

/* What was written reads back, for one shard and for several, whatever the pieces. */
static void test_writer(void **state)
{
    (void)state;
    for (int shards = 1; shards <= 3; shards++) {
        for (size_t piece = 1; piece <= 40; piece += 13) {
            fx_folder fx;
            td_checkpoint *ck;
            td_error err;
            fx_create(&fx);
            uint64_t shard_bytes = shards == 1 ? 1000 : shards == 2 ? 24 : 1;
            assert_int_equal(write_three(fx.dir, shard_bytes, piece, &err), TD_OK);
            assert_int_equal(td_checkpoint_open_tensors(fx.dir, &ck, &err), TD_OK);
            assert_int_equal(td_checkpoint_n_files(ck), shards);
            assert_int_equal(td_checkpoint_index_bytes(ck), shards == 1 ? 0 : 40);
            assert_int_equal(td_checkpoint_count(ck), 4);
            const td_tensor *h = td_checkpoint_find(ck, "h"), *scalar = td_checkpoint_find(ck, "scalar");
            assert_int_equal(((const unsigned char *)td_checkpoint_find(ck, "f")->data)[0], 1);
            assert_int_equal(((const unsigned char *)h->data)[0], 25);
            assert_int_equal(((const unsigned char *)scalar->data)[3], 40);
            assert_int_equal(scalar->rank, 0);
            td_checkpoint_close(ck);
            fx_destroy(&fx);
        }
    }
}

static bool exists(const fx_folder *fx, const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", fx->dir, name);
    return access(path, F_OK) == 0;
}

static void test_writer_errors(void **state)
{
    (void)state;
    fx_folder fx;
    td_safetensors_writer *w;
    td_error err;
    char byte[8] = { 0 };
    fx_create(&fx);
    assert_int_equal(td_safetensors_writer_create(fx.dir, 100, &w, &err), TD_OK);
    assert_int_equal(td_safetensors_writer_begin(w, &err), TD_EINVAL);
    assert_int_equal(td_safetensors_writer_declare(w, "a\"b", TD_DTYPE_I8, TD_SHAPE(1), &err), TD_EINVAL);
    assert_int_equal(td_safetensors_writer_declare(w, "a", TD_DTYPE_I8, TD_SHAPE(-1), &err), TD_EINVAL);
    assert_int_equal(td_safetensors_writer_declare(w, "a", TD_DTYPE_I8, TD_SHAPE(3), &err), TD_OK);
    assert_int_equal(td_safetensors_writer_begin(w, &err), TD_OK);
    assert_int_equal(td_safetensors_writer_declare(w, "b", TD_DTYPE_I8, TD_SHAPE(3), &err), TD_EINVAL);
    assert_int_equal(td_safetensors_writer_put(w, byte, 2, &err), TD_OK);
    assert_int_equal(td_safetensors_writer_finish(w, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, "tensor a: 1 bytes were not written"));
    assert_true(exists(&fx, "model.safetensors.part") && !exists(&fx, "model.safetensors"));
    td_safetensors_writer_destroy(w);
    assert_false(exists(&fx, "model.safetensors.part"));

    assert_int_equal(td_safetensors_writer_create(fx.dir, 100, &w, &err), TD_OK);
    assert_int_equal(td_safetensors_writer_declare(w, "a", TD_DTYPE_I8, TD_SHAPE(3), &err), TD_OK);
    assert_int_equal(td_safetensors_writer_declare(w, "b", TD_DTYPE_F32, TD_SHAPE(3), &err), TD_OK);
    assert_int_equal(td_safetensors_writer_begin(w, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, "tensor b: would not be aligned"));
    td_safetensors_writer_destroy(w);

    assert_int_equal(td_safetensors_writer_create("/nonexistent", 100, &w, &err), TD_OK);
    assert_int_equal(td_safetensors_writer_declare(w, "a", TD_DTYPE_I8, TD_SHAPE(3), &err), TD_OK);
    assert_int_equal(td_safetensors_writer_begin(w, &err), TD_EIO);
    assert_int_equal(td_safetensors_writer_put(w, byte, 3, &err), TD_EINVAL);
    td_safetensors_writer_destroy(w);
    fx_destroy(&fx);
}

/* --- conversion --- */

static void test_convert(void **state)
{
    (void)state;
    static const float FULL[] = { 1.0f, -2.5f, 1.00390625f, 3.0e38f }; /* third: a tie in bf16, to even */
    static const uint16_t BF16[] = { 0x3f80, 0xc020, 0x3f80, 0x7f62 };
    static const uint16_t HALF[] = { 0x3c00, 0xc100, 0x0001, 0x7bff };
    td_tensor full = { .name = "f", .dtype = TD_DTYPE_F32, .rank = 1, .shape = { 4 }, .n_bytes = 16, .data = FULL };
    td_tensor bf16 = { .name = "b", .dtype = TD_DTYPE_BF16, .rank = 1, .shape = { 4 }, .n_bytes = 8, .data = BF16 };
    td_tensor half = { .name = "h", .dtype = TD_DTYPE_F16, .rank = 1, .shape = { 4 }, .n_bytes = 8, .data = HALF };
    td_tensor ints = { .name = "i", .dtype = TD_DTYPE_I16, .rank = 1, .shape = { 4 }, .n_bytes = 8, .data = HALF };
    td_bf16 b[4];
    float f[4];
    td_error err;
    assert_int_equal(td_tensor_to_bf16(&full, 0, 4, b, &err), TD_OK);
    assert_memory_equal(b, BF16, 8);
    assert_int_equal(td_tensor_to_bf16(&bf16, 1, 3, b, &err), TD_OK);
    assert_memory_equal(b, BF16 + 1, 6);
    assert_int_equal(td_tensor_to_f32(&bf16, 0, 2, f, &err), TD_OK);
    assert_true(f[0] == 1.0f && f[1] == -2.5f);
    assert_int_equal(td_tensor_to_f32(&half, 0, 4, f, &err), TD_OK);
    assert_true(f[0] == 1.0f && f[1] == -2.5f && f[2] == 0x1p-24f && f[3] == 65504.0f);
    assert_int_equal(td_tensor_to_bf16(&half, 0, 2, b, &err), TD_OK);
    assert_int_equal(b[1], 0xc020);
    assert_int_equal(td_tensor_to_f32(&full, 3, 1, f, &err), TD_OK);
    assert_true(f[0] == 3.0e38f);
    assert_int_equal(td_tensor_to_f32(&full, 4, 0, f, &err), TD_OK);
    assert_int_equal(td_tensor_to_f32(&full, 3, 2, f, &err), TD_EINVAL);
    assert_string_equal(err.text, "tensor f: 2 elements from element 3 on, it has 4");
    assert_int_equal(td_tensor_to_f32(&full, -1, 2, f, &err), TD_EINVAL);
    assert_int_equal(td_tensor_to_f32(&full, INT64_MAX, 2, f, &err), TD_EINVAL);
    assert_int_equal(td_tensor_to_bf16(&ints, 0, 1, b, &err), TD_EUNSUPPORTED);
    assert_string_equal(err.text, "tensor i: I16 is not BF16, F16 or F32");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_header),      cmocka_unit_test(test_bad_headers),   cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_prefixes),    cmocka_unit_test(test_index),         cmocka_unit_test(test_folder),
        cmocka_unit_test(test_bad_folders), cmocka_unit_test(test_odd_folders),   cmocka_unit_test(test_duplicate),
        cmocka_unit_test(test_writer),      cmocka_unit_test(test_writer_errors), cmocka_unit_test(test_convert),
    };
    return cmocka_run_group_tests_name("safetensors", tests, NULL, NULL);
}
