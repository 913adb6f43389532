/* The KV pool against an obvious version with random operations, and step messages: round trip, every prefix, every
 * changed byte. */
#include "engine/kv_pool.h"
#include "engine/step.h"
#include "ops/dev.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { BLOCKS = 37 };

static uint32_t next(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void test_pool_random(void **state)
{
    (void)state;
    _Alignas(64) unsigned char memory[1024];
    td_arena arena;
    td_kv_pool pool;
    int refs[BLOCKS] = { 0 };
    uint32_t seed = 7;
    td_arena_init_fixed(&arena, memory, sizeof memory);
    assert_int_equal(td_kv_pool_init(&pool, BLOCKS, &arena), TD_OK);
    for (int step = 0; step < 200000; step++) {
        int n_free = 0, n_held = 0, held[BLOCKS];
        for (int b = 0; b < BLOCKS; b++) {
            if (refs[b])
                held[n_held++] = b;
            else
                n_free++;
        }
        assert_int_equal(pool.n_free, n_free);
        int what = (int)(next(&seed) % 3);
        if (what == 0) {
            int32_t out[BLOCKS];
            int n = (int)(next(&seed) % 6);
            td_status status = td_kv_pool_reserve(&pool, n, out);
            assert_int_equal(status, n <= n_free ? TD_OK : TD_EFULL);
            for (int i = 0; status == TD_OK && i < n; i++) {
                assert_in_range(out[i], 0, BLOCKS - 1);
                assert_int_equal(refs[out[i]], 0);
                refs[out[i]] = 1;
            }
        } else if (n_held) {
            int b = held[next(&seed) % (uint32_t)n_held];
            if (what == 1) {
                td_kv_pool_share(&pool, b);
                refs[b]++;
            } else {
                td_kv_pool_release(&pool, b);
                refs[b]--;
            }
            assert_int_equal(td_kv_pool_shared(&pool, b), refs[b] > 1);
        }
    }
}

static void test_pool_same_on_ranks(void **state)
{
    (void)state;
    _Alignas(64) unsigned char memory[2][512];
    td_kv_pool pools[2];
    int32_t out[2][8];
    for (int i = 0; i < 2; i++) {
        td_arena arena;
        td_arena_init_fixed(&arena, memory[i], sizeof memory[i]);
        td_kv_pool_init(&pools[i], 16, &arena);
        td_kv_pool_reserve(&pools[i], 5, out[i]);
        td_kv_pool_release(&pools[i], out[i][2]);
        td_kv_pool_reserve(&pools[i], 8, out[i]);
    }
    assert_memory_equal(out[0], out[1], sizeof out[0]); /* the same calls, the same blocks */
    assert_int_equal(td_kv_pool_blocks(0), 0);
    assert_int_equal(td_kv_pool_blocks(1), 1);
    assert_int_equal(td_kv_pool_blocks(TD_BLOCK), 1);
    assert_int_equal(td_kv_pool_blocks(TD_BLOCK + 1), 2);
}

static const td_step_limits limits = { .n_slots = 4, .vocab = 1000, .context_tokens = 4096, .chunk_rows = 512 };

static void fill_step(td_step *step, const int32_t *ids)
{
    *step = (td_step){ .digest = 0x1122334455667788ull, .n_releases = 1, .n_admits = 1, .n_rows = 2 };
    step->releases[0] = 3;
    step->admits[0] = (td_step_admit){
        .slot = 1, .n_ids = 9, .ids = ids, .max_tokens = 77, .min_tokens = 3, .n_logprobs = -1, .n_end_ids = 2
    };
    step->admits[0].end_ids[0] = 5;
    step->admits[0].end_ids[1] = 999;
    step->admits[0].sample = (td_sample_params){
        .temperature = 0.7, .top_p = 0.95, .min_p = 0.05, .top_k = 40, .seed = 0xfedcba9876543210ull
    };
    step->rows[0] = (td_step_rows){ .slot = 1, .n_rows = 9, .prompt = 1 };
    step->rows[1] = (td_step_rows){ .slot = 0, .n_rows = 1, .prompt = 0 };
}

static void test_step_round_trip(void **state)
{
    (void)state;
    const int32_t ids[] = { 1, 2, 3, 4, 5, 6, 7, 8, 999 };
    td_step step, back;
    td_error err;
    fill_step(&step, ids);
    size_t cap = td_step_bytes_max(9);
    uint32_t *message = malloc(cap);
    size_t n = td_step_encode(&step, message, cap);
    assert_true(n <= cap);
    assert_int_equal(td_step_decode(message, n, &limits, &back, &err), TD_OK);
    assert_true(back.digest == step.digest && back.releases[0] == 3);
    assert_memory_equal(back.admits[0].ids, ids, sizeof ids);
    assert_memory_equal(&back.admits[0].sample, &step.admits[0].sample, sizeof step.admits[0].sample);
    assert_int_equal(back.admits[0].end_ids[1], 999);
    assert_int_equal(back.admits[0].n_logprobs, -1);
    assert_memory_equal(back.rows, step.rows, 2 * sizeof step.rows[0]);
    for (size_t k = 0; k < n;
         k++) { /* every prefix, in a block of its own so that the sanitizer sees one byte too far */
        uint32_t *cut = malloc(k ? k : 1);
        memcpy(cut, message, k);
        assert_int_equal(td_step_decode(cut, k, &limits, &back, &err), TD_EFORMAT);
        free(cut);
    }
    for (size_t k = 0; k < n; k++)
        for (int bit = 0; bit < 8; bit++) { /* decodes to something or refuses; never reads outside */
            ((unsigned char *)message)[k] ^= (unsigned char)(1 << bit);
            td_step_decode(message, n, &limits, &back, &err);
            ((unsigned char *)message)[k] ^= (unsigned char)(1 << bit);
        }
    free(message);
}

static void test_step_ranges(void **state)
{
    (void)state;
    const int32_t ids[] = { 1, 2, 3, 4, 5, 6, 7, 8, 1000 };
    uint32_t message[1200];
    td_step step, back;
    td_error err;
    fill_step(&step, ids);
    size_t n = td_step_encode(&step, message, sizeof message);
    assert_int_equal(td_step_decode(message, n, &limits, &back, &err), TD_EFORMAT);
    assert_string_equal(err.text, "step message: token id 1000 is out of range");
    fill_step(&step, ids);
    step.admits[0].n_ids = 8;
    step.rows[1].n_rows = TD_WINDOW_MAX + 1;
    n = td_step_encode(&step, message, sizeof message);
    assert_int_equal(td_step_decode(message, n, &limits, &back, &err), TD_EFORMAT);
    assert_string_equal(err.text, "step message: decode rows 65 is out of range");
    step.rows[1] = step.rows[0];
    n = td_step_encode(&step, message, sizeof message);
    assert_int_equal(td_step_decode(message, n, &limits, &back, &err), TD_EFORMAT);
    assert_string_equal(err.text, "step message: a second use of slot 1 is out of range");
    step.rows[1] = (td_step_rows){ .slot = 0, .n_rows = 1, .prompt = 2 };
    n = td_step_encode(&step, message, sizeof message);
    assert_int_equal(td_step_decode(message, n, &limits, &back, &err), TD_EFORMAT);
    assert_string_equal(err.text, "step message: kind of rows 2 is out of range");
    step.rows[1].prompt = 0;
    for (int bad = -2; bad <= 21; bad += 23) {
        step.admits[0].n_logprobs = bad;
        n = td_step_encode(&step, message, sizeof message);
        assert_int_equal(td_step_decode(message, n, &limits, &back, &err), TD_EFORMAT);
        assert_non_null(strstr(err.text, "number of log-probabilities"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pool_random),
        cmocka_unit_test(test_pool_same_on_ranks),
        cmocka_unit_test(test_step_round_trip),
        cmocka_unit_test(test_step_ranges),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
