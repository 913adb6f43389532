/* JSON reader and writer: any bytes. What was accepted, written compactly and read again must be the same text. */
#include <stdlib.h>
#include <string.h>

#include "base/json_write.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static bool parse(td_arena *arena, char *text, size_t n_bytes, td_buf *out)
{
    const td_json *value;
    td_error err;
    if (td_json_parse(arena, text, n_bytes, &value, &err)) return false;
    td_json_writer w = { .out = out };
    td_json_write_value(&w, value);
    for (size_t i = 0; i < td_json_count(value); i++) {
        double x;
        int64_t n;
        size_t key_bytes;
        const char *key = td_json_key_at(value, i, &key_bytes);
        if (key) td_check(td_json_get_n(value, key, key_bytes) == td_json_at(value, i));
        (void)td_json_double(td_json_at(value, i), &x);
        (void)td_json_int64(td_json_at(value, i), &n);
    }
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    char *text = malloc(n_bytes + 1);
    td_arena arena, again_arena;
    td_buf once, twice;
    td_arena_init(&arena, 0);
    td_arena_init(&again_arena, 0);
    td_buf_init(&once, 0);
    td_buf_init(&twice, 0);
    if (n_bytes) memcpy(text, data, n_bytes);
    if (parse(&arena, text, n_bytes, &once)) {
        char *copy = malloc(once.n_bytes + 1);
        memcpy(copy, once.data, once.n_bytes);
        td_check(parse(&again_arena, copy, once.n_bytes, &twice));
        td_check(once.n_bytes == twice.n_bytes && memcmp(once.data, twice.data, once.n_bytes) == 0);
        free(copy);
    }
    td_buf_deinit(&once);
    td_buf_deinit(&twice);
    td_arena_deinit(&arena);
    td_arena_deinit(&again_arena);
    free(text);
    return 0;
}
