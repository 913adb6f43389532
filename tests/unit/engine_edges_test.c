/* The engine's corners: prompts at the ends of blocks, window and pool, requests that leave at every stage, the order
 * of the queue, and what the engine's thread may not do (allocate). Each reply is compared with the one the request
 * gets alone. */
#include "engine_support.h"

#include "base/clock.h"
#include "ops/dev_impl.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Allocations by another thread than the test's: the linker sends the libraries' calls here (-Wl,--wrap). */
static pthread_t test_thread;
static atomic_int foreign_allocations;

void *__real_malloc(size_t n_bytes);
void *__real_calloc(size_t n, size_t n_bytes);
void *__real_realloc(void *old, size_t n_bytes);
void *__real_aligned_alloc(size_t align, size_t n_bytes);
void *__wrap_malloc(size_t n_bytes);
void *__wrap_calloc(size_t n, size_t n_bytes);
void *__wrap_realloc(void *old, size_t n_bytes);
void *__wrap_aligned_alloc(size_t align, size_t n_bytes);

static void note_allocation(void)
{
    if (!pthread_equal(pthread_self(), test_thread)) atomic_fetch_add(&foreign_allocations, 1);
}

void *__wrap_malloc(size_t n_bytes)
{
    note_allocation();
    return __real_malloc(n_bytes);
}

void *__wrap_calloc(size_t n, size_t n_bytes)
{
    note_allocation();
    return __real_calloc(n, n_bytes);
}

void *__wrap_realloc(void *old, size_t n_bytes)
{
    note_allocation();
    return __real_realloc(old, n_bytes);
}

void *__wrap_aligned_alloc(size_t align, size_t n_bytes)
{
    note_allocation();
    return __real_aligned_alloc(align, n_bytes);
}

static int group_setup(void **state)
{
    test_thread = pthread_self();
    return td_en_group_setup(state);
}

/* A greedy request of n_ids tokens that differ with k. */
static td_request_options prompt(int k, int32_t *ids, int n_ids, int max_tokens)
{
    for (int i = 0; i < n_ids; i++) ids[i] = (i * 31 + k * 7) % 90;
    return (td_request_options){
        .ids = ids, .n_ids = n_ids, .max_tokens = max_tokens, .n_logprobs = -1, .sample = { .top_p = 1.0 }
    };
}

static void first_token(td_request *request)
{
    td_token token;
    td_finish finish;
    assert_int_equal(td_request_next(request, &token, 1, TD_EN_WAIT_MS, &finish), 1);
}

/* Prompts that end at the edges of blocks and of the window, in a pool larger than the window and in one as small as
 * the prompt allows. */
static void test_prompts_at_edges(void **state)
{
    (void)state;
    static const int lengths[] = { 496, 497, 511, 512, 513, 2032, 2033, 2047 };
    static int32_t ids[TD_EN_CONTEXT];
    static td_en_reply wide, tight;
    td_en large;
    td_en_start(&large, 1, "shm", 16, 16);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        int n = lengths[i], left = TD_EN_CONTEXT - n;
        td_request_options o = prompt(0, ids, n, 12);
        td_en_ask(&large, &o, &wide);
        assert_int_equal(wide.finish, TD_FINISH_LENGTH);
        assert_int_equal(wide.n, left < 12 ? left : 12);
        int n_blocks = (n + 12 + TD_BLOCK - 1) / TD_BLOCK;
        if (n_blocks > 2) continue;
        td_en small;
        td_en_start(&small, 1, "shm", n_blocks, 16);
        td_en_ask(&small, &o, &tight);
        td_en_assert_same(&tight, &wide);
        assert_int_equal(td_en_stop(&small), 0);
    }
    assert_int_equal(td_en_stop(&large), 0);
}

/* A pool smaller than the window is the limit of a request. */
static void test_pool_is_the_limit(void **state)
{
    (void)state;
    static int32_t ids[TD_EN_CONTEXT];
    static td_en_reply got;
    td_en en;
    td_error err;
    td_request *r;
    td_en_start(&en, 1, "shm", 1, 16);
    td_request_options o = prompt(1, ids, TD_BLOCK, 5);
    assert_int_equal(td_engine_submit(en.engine, &o, &r, &err), TD_EINVAL);
    assert_string_equal(err.text, "a prompt of 512 tokens; 1 to 511 are possible");
    static const td_sample_params bad[] = {
        { .top_p = 0 }, { .top_p = NAN }, { .top_p = 1, .min_p = -0.5 }, { .top_p = 1, .temperature = NAN }
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) { /* the other rank would refuse the message */
        o = prompt(1, ids, 10, 5);
        o.sample = bad[i];
        assert_int_equal(td_engine_submit(en.engine, &o, &r, &err), TD_EINVAL);
    }
    o = prompt(1, ids, 500, 1 << 30);
    td_en_ask(&en, &o, &got);
    assert_int_equal(got.finish, TD_FINISH_LENGTH);
    assert_int_equal(got.n, TD_BLOCK - 500);
    assert_int_equal(td_en_stop(&en), 0);
}

/* Requests that leave while they wait, fill, decode, and after a preemption; the one beside them notices nothing. */
static void test_leaving(void **state)
{
    (void)state;
    enum { STAYS, LEAVERS = 3 };
    static int32_t ids[1 + LEAVERS][TD_EN_CONTEXT];
    static td_en_reply alone, beside, got;
    td_en en;
    td_en_start(&en, 1, "shm", 16, 16);
    td_request_options stays = prompt(STAYS, ids[STAYS], 40, 250);
    td_en_ask(&en, &stays, &alone);
    for (int stage = 0; stage < 3; stage++) { /* at once, while filling, while decoding */
        td_request *keep = td_en_submit(&en, &stays), *r[LEAVERS];
        for (int k = 0; k < LEAVERS; k++) {
            td_request_options o = prompt(k + 1, ids[k + 1], stage == 2 ? 20 : 1000, 100);
            r[k] = td_en_submit(&en, &o);
        }
        if (stage == 1) td_sleep_ns(5000000);
        if (stage == 2) first_token(r[0]);
        for (int k = 0; k < LEAVERS; k++) td_request_cancel(r[k]);
        for (int k = 0; k < LEAVERS; k++) {
            td_en_collect(r[k], &got);
            assert_true(got.finish == TD_FINISH_CANCELED || (stage == 2 && got.finish == TD_FINISH_LENGTH));
            td_request_release(r[k]);
        }
        td_en_collect(keep, &beside);
        td_request_release(keep);
        td_en_assert_same(&beside, &alone);
    }
    td_engine_stats stats;
    for (int i = 0; i < 100; i++) {
        td_engine_stats_get(en.engine, &stats);
        if (stats.pool_free_tokens == stats.pool_tokens && stats.running == 0) break;
        td_sleep_ns(10000000);
    }
    assert_int_equal(stats.pool_free_tokens, stats.pool_tokens);
    assert_int_equal(stats.running, 0);
    assert_int_equal(stats.waiting, 0);
    assert_int_equal(td_en_stop(&en), 0);
}

static int64_t preemptions(td_en *en)
{
    td_engine_stats stats;
    td_engine_stats_get(en->engine, &stats);
    return stats.preemptions_total;
}

/* Replies that outgrow the pool, with log-probabilities: the replay delivers nothing twice and changes nothing; one
 * that is canceled while it waits for its second turn leaves; what is counted is what clients got. */
static void test_preempted(void **state)
{
    (void)state;
    enum { N = 2, LONG = 540 }; /* both outgrow two blocks; there are three */
    static int32_t ids[N][512];
    static td_en_reply alone[N], got[N];
    td_en en;
    td_request *r[N];
    td_request_options o[N];
    td_en_start(&en, 1, "shm", 16, 16);
    for (int k = 0; k < N; k++) {
        o[k] = prompt(k, ids[k], 495, LONG);
        o[k].n_logprobs = 0;
        td_en_ask(&en, &o[k], &alone[k]);
    }
    assert_int_equal(td_en_stop(&en), 0);

    td_en_start(&en, 1, "shm", 3, 16);
    for (int k = 0; k < N; k++) r[k] = td_en_submit(&en, &o[k]);
    for (int k = 0; k < N; k++) {
        td_en_collect(r[k], &got[k]);
        td_request_release(r[k]);
        td_en_assert_same(&got[k], &alone[k]);
    }
    td_engine_stats stats;
    td_engine_stats_get(en.engine, &stats);
    assert_true(stats.preemptions_total > 0);
    assert_int_equal(stats.requests_total, N);
    assert_int_equal(stats.completion_tokens_total, N * LONG);

    int64_t before = preemptions(&en);
    for (int k = 0; k < N; k++) r[k] = td_en_submit(&en, &o[k]);
    for (int i = 0; preemptions(&en) == before && i < 2000; i++) td_sleep_ns(5000000);
    assert_true(preemptions(&en) > before);
    td_request_cancel(r[N - 1]); /* the youngest: the one that was sent back */
    for (int k = 0; k < N; k++) {
        td_en_collect(r[k], &got[k]);
        td_request_release(r[k]);
        if (k < N - 1) td_en_assert_same(&got[k], &alone[k]);
    }
    assert_int_equal(got[N - 1].finish, TD_FINISH_CANCELED);
    assert_memory_equal(got[N - 1].ids, alone[N - 1].ids, (size_t)got[N - 1].n * sizeof(int32_t));
    assert_int_equal(td_en_stop(&en), 0);
}

static double first_token_s(td_request *request)
{
    td_request_stats stats;
    td_request_stats_get(request, &stats);
    return stats.ttft_s;
}

/* A short prompt behind long ones does not wait for all of their chunks, and they get on too. */
static void test_short_prompt_behind_long(void **state)
{
    (void)state;
    static int32_t ids[4][TD_EN_CONTEXT];
    static td_en_reply got;
    td_en en;
    td_request *r[4];
    td_en_start(&en, 1, "shm", 16, 16);
    for (int k = 0; k < 4; k++) {
        td_request_options o = prompt(k, ids[k], k < 3 ? 700 : 40, 4);
        r[k] = td_en_submit(&en, &o);
    }
    for (int k = 0; k < 4; k++) {
        td_en_collect(r[k], &got);
        assert_int_equal(got.finish, TD_FINISH_LENGTH);
    }
    for (int k = 0; k < 3; k++) assert_true(first_token_s(r[3]) < first_token_s(r[k]));
    for (int k = 0; k < 4; k++) td_request_release(r[k]);
    assert_int_equal(td_en_stop(&en), 0);
}

/* Background requests wait behind foreground ones, give a slot back to one that waits, and lose no token by it. */
static void test_background(void **state)
{
    (void)state;
    enum { LONG = 120 };
    static int32_t ids[TD_EN_SLOTS + 1][64];
    static td_en_reply alone[TD_EN_SLOTS + 1], got[TD_EN_SLOTS + 1];
    td_en en;
    td_request *r[TD_EN_SLOTS + 1];
    td_request_options o[TD_EN_SLOTS + 1];
    td_en_start(&en, 1, "shm", 16, 16);
    for (int k = 0; k <= TD_EN_SLOTS; k++) {
        o[k] = prompt(k, ids[k], 30 + k, k < TD_EN_SLOTS ? LONG : 5);
        o[k].background = k < TD_EN_SLOTS;
        td_en_ask(&en, &o[k], &alone[k]);
    }
    for (int k = 0; k < TD_EN_SLOTS; k++) r[k] = td_en_submit(&en, &o[k]);
    for (int k = 0; k < TD_EN_SLOTS; k++) first_token(r[k]);
    td_request *foreground = td_en_submit(&en, &o[TD_EN_SLOTS]);
    td_en_collect(foreground, &got[TD_EN_SLOTS]);
    td_en_assert_same(&got[TD_EN_SLOTS], &alone[TD_EN_SLOTS]);
    int n_ended = 0;
    for (int k = 0; k < TD_EN_SLOTS; k++) {
        td_request_stats stats;
        td_request_stats_get(r[k], &stats);
        n_ended += stats.completion_tokens == LONG;
    }
    assert_int_equal(n_ended, 0);
    td_request_release(foreground);
    for (int k = 0; k < TD_EN_SLOTS; k++) {
        td_en_collect(r[k], &got[k]);
        td_request_release(r[k]);
        assert_int_equal(got[k].n, LONG - 1); /* one was read before */
        assert_memory_equal(got[k].ids, alone[k].ids + 1, (size_t)(LONG - 1) * sizeof(int32_t));
    }
    assert_true(preemptions(&en) > 0);
    assert_int_equal(td_en_stop(&en), 0);
}

/* A device that is lost at its first router: what the device says of it is what everyone hears. */
static bool lost;

static td_status lost_router(td_dev *dev, const td_router_args *a)
{
    (void)dev;
    (void)a;
    lost = true;
    return TD_ECUDA;
}

static td_status lost_sync(td_dev *dev, td_error *err)
{
    (void)dev;
    return lost ? td_fail(err, TD_ECUDA, "GPU 0 is lost: router: an illegal memory access") : TD_OK;
}

static void test_device_is_lost(void **state)
{
    (void)state;
    static td_en_reply got;
    int32_t ids[64];
    td_error err;
    td_en en;
    td_en_start(&en, 1, "shm", 16, 16);
    const td_dev_calls *calls = en.rig.dev->calls;
    td_dev_calls failing = *calls;
    failing.sync = lost_sync;
    en.rig.dev->calls = &failing;
    en.rig.ops.router = lost_router;
    td_request_options o = prompt(0, ids, 20, 5);
    td_en_ask(&en, &o, &got);
    assert_int_equal(got.finish, TD_FINISH_ERROR);
    assert_int_equal(td_engine_health(en.engine, &err), TD_ECUDA);
    assert_string_equal(err.text, "GPU 0 is lost: router: an illegal memory access");
    en.rig.dev->calls = calls;
    assert_int_equal(td_en_stop(&en), 0);
}

static void test_no_allocation(void **state)
{
    (void)state;
    static td_en_reply got;
    int32_t ids[512];
    td_request_options o;
    td_en en;
    td_en_start(&en, 1, "shm", 16, 16);
    td_en_request(3, ids, &o);
    td_en_ask(&en, &o, &got);
    atomic_store(&foreign_allocations, 0);
    for (int k = 0; k < TD_EN_REQUESTS; k++) {
        td_en_request(k, ids, &o);
        o.n_logprobs = 20;
        td_en_ask(&en, &o, &got);
    }
    assert_int_equal(atomic_load(&foreign_allocations), 0);
    assert_int_equal(td_en_stop(&en), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prompts_at_edges),
        cmocka_unit_test(test_pool_is_the_limit),
        cmocka_unit_test(test_leaving),
        cmocka_unit_test(test_preempted),
        cmocka_unit_test(test_short_prompt_behind_long),
        cmocka_unit_test(test_background),
        cmocka_unit_test(test_device_is_lost),
        cmocka_unit_test(test_no_allocation),
    };
    return cmocka_run_group_tests(tests, group_setup, td_en_group_teardown);
}
