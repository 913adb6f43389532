/* A reply cut in two ways: the first bytes choose how, the rest is its text. By text form both cuts must give the same
 * reasoning, content and stop string. */
#include <stdlib.h>
#include <string.h>

#include "text/reasoning.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static int run(const uint8_t *text, size_t n_bytes, unsigned step, td_reply_start start, td_buf *reasoning,
               td_buf *content)
{
    static const td_reply_ids ids = { -1, -1, -1, -1 };
    char json[] = "[\"<t\",\"aab\",\"k>a\",\"</think></think>\"]";
    const td_json *value;
    td_arena arena;
    td_error err;
    td_stop stop;
    td_reasoning split;
    td_arena_init(&arena, 0);
    td_check(td_json_parse(&arena, json, strlen(json), &value, &err) == TD_OK);
    td_check(td_stop_init(&stop, &arena, value, &err) == TD_OK);
    td_reasoning_init(&split, start, &ids, &stop);
    for (size_t at = 0, n; at < n_bytes; at += n) {
        n = step < n_bytes - at ? step : n_bytes - at;
        if (td_reasoning_feed(&split, 1, (const char *)text + at, n, true, reasoning, content)) break;
        if (step > 1) step = step * 5 % 31 + 1;
    }
    td_reasoning_finish(&split, reasoning, content);
    int stopped_by = td_reasoning_stopped_by(&split);
    td_reasoning_deinit(&split);
    td_arena_deinit(&arena);
    return stopped_by;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes < 2) return 0;
    td_reply_start start = (td_reply_start)(data[0] % 3);
    td_buf out[4];
    for (int i = 0; i < 4; i++) {
        td_buf_init(&out[i], 0);
        td_buf_puts(&out[i], "");
    }
    int a = run(data + 2, n_bytes - 2, 1, start, &out[0], &out[1]);
    int b = run(data + 2, n_bytes - 2, 2 + data[1] % 30, start, &out[2], &out[3]);
    td_check(a == b);
    for (int i = 0; i < 2; i++)
        td_check(out[i].n_bytes == out[i + 2].n_bytes && memcmp(out[i].data, out[i + 2].data, out[i].n_bytes) == 0);
    td_check(start == TD_REPLY_IN_REASONING || !out[0].n_bytes || start == TD_REPLY_AT_ANSWER);
    for (int i = 0; i < 4; i++) td_buf_deinit(&out[i]);
    return 0;
}
