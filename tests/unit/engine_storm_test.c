/* Threads that submit, read, cancel and let go at random, in a pool that is too small for them all. Whoever read to the
 * end has the reply that the request gets alone; whoever left has a beginning of it. TD_STORM_SECONDS: how long. */
#include "engine_support.h"

#include "base/clock.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { N_THREADS = 9, N_KINDS = 9, QUEUE = 3, BLOCKS = 7 };

static td_en en;
static td_en_reply alone[N_KINDS];
static int64_t until_ns;

typedef struct client {
    pthread_t thread;
    uint32_t random;
    int n_done, n_left, n_full;
    const char *wrong; /* NULL: nothing was */
} client;

static uint32_t next(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void kind(int k, int32_t *ids, td_request_options *o)
{
    td_en_request(k, ids, o);
    if (k < TD_EN_REQUESTS) return;
    o->n_ids = k == 7 ? 480 : 505; /* these outgrow the pool together */
    for (int i = 0; i < o->n_ids; i++) ids[i] = (i * 31 + k) % 90;
    o->max_tokens = 80;
}

/* One request, from submit to release; the reader leaves after `leave` tokens (never when negative). */
static void one(client *c)
{
    int32_t ids[512];
    td_request_options o;
    td_request *r;
    td_error err;
    int k = (int)(next(&c->random) % N_KINDS), n = 0;
    int leave = next(&c->random) % 3 ? -1 : (int)(next(&c->random) % 90);
    kind(k, ids, &o);
    o.background = next(&c->random) % 3 == 0; /* when it runs, not what it says */
    td_status status = td_engine_submit(en.engine, &o, &r, &err);
    if (status == TD_EFULL) {
        c->n_full++;
        td_sleep_ns(1000000);
        return;
    }
    if (status) {
        c->wrong = "a submit failed";
        return;
    }
    td_finish finish = TD_FINISH_NONE;
    while (finish == TD_FINISH_NONE && !c->wrong) {
        td_token tokens[4];
        if (leave >= 0 && n >= leave) {
            if (next(&c->random) % 2) break; /* released while it runs */
            td_request_cancel(r);
            leave = -1;
        }
        int got = td_request_next(r, tokens, 4, 1 + (int)(next(&c->random) % 50), &finish);
        for (int i = 0; i < got; i++, n++)
            if (n >= alone[k].n || tokens[i].id != alone[k].ids[n]) c->wrong = "a token differs";
    }
    if (finish == alone[k].finish && n != alone[k].n) c->wrong = "a reply is short";
    if (finish == TD_FINISH_ERROR) c->wrong = "a request failed";
    if (finish == alone[k].finish)
        c->n_done++;
    else
        c->n_left++;
    td_request_release(r);
}

static void *run(void *arg)
{
    client *c = arg;
    while (td_now_ns() < until_ns && !c->wrong) one(c);
    return NULL;
}

static void storm(int world, double seconds)
{
    client clients[N_THREADS];
    td_engine_stats stats;
    int n_done = 0, n_left = 0, n_full = 0;
    td_en_start(&en, world, "shm", BLOCKS, QUEUE);
    until_ns = td_now_ns() + (int64_t)(seconds * 1e9);
    for (int i = 0; i < N_THREADS; i++) {
        clients[i] = (client){ .random = 77u + (uint32_t)i };
        assert_int_equal(pthread_create(&clients[i].thread, NULL, run, &clients[i]), 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(clients[i].thread, NULL);
        n_done += clients[i].n_done;
        n_left += clients[i].n_left;
        n_full += clients[i].n_full;
    }
    for (int i = 0; i < N_THREADS; i++)
        if (clients[i].wrong) fail_msg("client %d: %s", i, clients[i].wrong);
    for (int i = 0; i < 200; i++) { /* whoever left is gone, and so is all that was held */
        td_engine_stats_get(en.engine, &stats);
        if (stats.running == 0 && stats.waiting == 0) break;
        td_sleep_ns(10000000);
    }
    assert_int_equal(stats.running, 0);
    assert_int_equal(stats.waiting, 0);
    assert_int_equal(stats.pool_free_tokens, stats.pool_tokens);
    print_message("%d ended, %d left, %d found the queue full, %d preemptions\n", n_done, n_left, n_full,
                  (int)stats.preemptions_total);
    assert_true(n_done > 0);
    if (n_done > 80) assert_true(n_left > 0 && n_full > 0 && stats.preemptions_total > 0); /* a long run saw it all */
    assert_int_equal(td_en_stop(&en), 0);
}

static double storm_seconds(void)
{
    const char *text = getenv("TD_STORM_SECONDS");
    return text ? atof(text) : 1.0;
}

static void test_alone(void **state)
{
    (void)state;
    td_en_start(&en, 1, "shm", 16, QUEUE);
    for (int k = 0; k < N_KINDS; k++) {
        int32_t ids[512];
        td_request_options o;
        kind(k, ids, &o);
        td_en_ask(&en, &o, &alone[k]);
    }
    assert_int_equal(td_en_stop(&en), 0);
}

static void test_one_rank(void **state)
{
    (void)state;
    storm(1, storm_seconds());
}

static void test_two_ranks(void **state)
{
    (void)state;
    storm(2, storm_seconds());
}

/* The engine stops while clients are at every stage: all of them end. */
static void test_stop_in_the_middle(void **state)
{
    (void)state;
    enum { N = 6 };
    static td_en_reply got;
    td_en_start(&en, 1, "shm", 4, QUEUE);
    td_request *r[N];
    for (int k = 0; k < N; k++) {
        int32_t ids[512];
        td_request_options o;
        kind(k + 3, ids, &o);
        r[k] = td_en_submit(&en, &o);
    }
    td_engine_stop(en.engine);
    for (int k = 0; k < N; k++) {
        td_en_collect(r[k], &got);
        assert_true(got.finish == TD_FINISH_CANCELED || got.finish == TD_FINISH_LENGTH);
        td_request_release(r[k]);
    }
    assert_int_equal(td_en_stop(&en), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_one_rank),
        cmocka_unit_test(test_two_ranks),
        cmocka_unit_test(test_stop_in_the_middle),
    };
    return cmocka_run_group_tests(tests, td_en_group_setup, td_en_group_teardown);
}
