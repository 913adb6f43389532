/* The engine on a tiny random model: the same request gives the same reply alone, beside others, after a preemption, on
 * one rank and on two; requests end as they should; a lost rank ends them with an error and never hangs. */
#include "engine/engine.h"
#include "engine_support.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { N_REQUESTS = TD_EN_REQUESTS, WAIT_MS = TD_EN_WAIT_MS };

static void ask(td_en *s, int k, td_en_reply *out)
{
    int32_t ids[512];
    td_request_options o;
    td_request *r;
    td_error err;
    td_en_request(k, ids, &o);
    td_en_must(td_engine_submit(s->engine, &o, &r, &err), &err);
    td_en_collect(r, out);
    td_request_release(r);
}

static void ask_all(td_en *s, td_en_reply *replies)
{
    td_request *r[N_REQUESTS];
    td_error err;
    for (int k = 0; k < N_REQUESTS; k++) {
        int32_t ids[512];
        td_request_options o;
        td_en_request(k, ids, &o);
        td_en_must(td_engine_submit(s->engine, &o, &r[k], &err), &err);
    }
    for (int k = 0; k < N_REQUESTS; k++) {
        td_en_collect(r[k], &replies[k]);
        td_request_release(r[k]);
    }
}

static td_en_reply alone[N_REQUESTS];

static void assert_same(const td_en_reply *got)
{
    for (int k = 0; k < N_REQUESTS; k++) {
        assert_int_equal(got[k].finish, TD_FINISH_LENGTH);
        assert_int_equal(got[k].n, alone[k].n);
        assert_memory_equal(got[k].ids, alone[k].ids, (size_t)alone[k].n * sizeof(int32_t));
    }
}

static void test_alone_is_the_model(void **state)
{
    (void)state;
    td_en s;
    td_en_start(&s, 1, "shm", 16, 16);
    for (int k = 0; k < N_REQUESTS; k++) ask(&s, k, &alone[k]);
    assert_int_equal(td_en_stop(&s), 0);
    for (int k = 0; k < N_REQUESTS; k += 2) { /* the greedy ones, against the model driven by hand */
        int32_t ids[512];
        td_request_options o;
        td_rig rig;
        td_rig_options ro;
        td_error err;
        float *logits;
        td_en_request(k, ids, &o);
        td_en_rig_options(&ro, 0, 1, "shm", 16);
        td_en_must(td_rig_open(&rig, &ro, &err), &err);
        logits = malloc((size_t)td_rig_vocab(&rig) * sizeof *logits);
        td_rig_slot(&rig, 0, 3, 1, 2);
        td_en_must(td_rig_prefill(&rig, 0, ids, o.n_ids, 64, &err), &err);
        for (int i = 0; i < alone[k].n; i++) {
            td_rig_logits(&rig, 0, logits);
            int32_t best = td_rig_argmax(logits, td_rig_vocab(&rig) - 3);
            assert_int_equal(alone[k].ids[i], best);
            td_en_must(td_rig_run(&rig, 0, &best, 1, false, false, &err), &err);
        }
        free(logits);
        td_rig_close(&rig);
    }
}

static void test_together(void **state)
{
    (void)state;
    td_en s;
    static td_en_reply got[N_REQUESTS];
    td_en_start(&s, 1, "shm", 16, 16);
    ask_all(&s, got);
    assert_same(got);
    td_engine_stats stats;
    td_engine_stats_get(s.engine, &stats);
    assert_int_equal(stats.requests_total, N_REQUESTS);
    assert_int_equal(td_en_stop(&s), 0);
}

static void two_ranks(const char *transport)
{
    td_en s;
    static td_en_reply got[N_REQUESTS];
    td_en_start(&s, 2, transport, 16, 16);
    ask_all(&s, got);
    assert_same(got);
    assert_int_equal(td_en_stop(&s), 0);
}

static void test_two_ranks_shm(void **state)
{
    (void)state;
    two_ranks("shm");
}

static void test_two_ranks_tcp(void **state)
{
    (void)state;
    two_ranks("tcp");
}

/* Replies that outgrow the pool together: some pause, the youngest are preempted and decoded again. */
static void test_preemption(void **state)
{
    (void)state;
    enum { N = 3, LONG = 690 };
    static td_en_reply one[N], many[N];
    for (int together = 0; together < 2; together++) {
        td_en s;
        td_request *r[N];
        td_error err;
        td_en_start(&s, 1, "shm", together ? 5 : 16, 16);
        for (int k = 0; k < N; k++) {
            int32_t ids[512];
            td_request_options o;
            td_en_request(k, ids, &o);
            o.n_ids = 450; /* two blocks by half of the reply, three at its end */
            for (int i = 0; i < o.n_ids; i++) ids[i] = (i * 31 + k) % 90;
            o.max_tokens = LONG;
            td_en_must(td_engine_submit(s.engine, &o, &r[k], &err), &err);
            if (!together) td_en_collect(r[k], &one[k]);
        }
        for (int k = 0; k < N; k++) {
            if (together) td_en_collect(r[k], &many[k]);
            td_request_release(r[k]);
        }
        td_engine_stats stats;
        td_engine_stats_get(s.engine, &stats);
        if (together) assert_true(stats.preemptions_total > 0);
        assert_int_equal(td_en_stop(&s), 0);
    }
    for (int k = 0; k < N; k++) {
        assert_int_equal(many[k].finish, TD_FINISH_LENGTH);
        assert_int_equal(many[k].n, one[k].n);
        assert_memory_equal(many[k].ids, one[k].ids, (size_t)one[k].n * sizeof(int32_t));
    }
}

static void test_ends_and_limits(void **state)
{
    (void)state;
    td_en s;
    td_error err;
    int32_t ids[512];
    td_request_options o;
    td_request *r;
    td_en_reply got;
    td_en_start(&s, 1, "shm", 16, 16);

    td_en_request(0, ids, &o); /* ends at a token that is known to come */
    int32_t end = alone[0].ids[10];
    int first = 0;
    while (alone[0].ids[first] != end) first++;
    o.end_ids = &end;
    o.n_end_ids = 1;
    td_en_must(td_engine_submit(s.engine, &o, &r, &err), &err);
    td_en_collect(r, &got);
    td_request_release(r);
    assert_int_equal(got.finish, TD_FINISH_END);
    assert_int_equal(got.n, first + 1);

    o.min_tokens = 20; /* the same, but not before 20 tokens */
    td_en_must(td_engine_submit(s.engine, &o, &r, &err), &err);
    td_en_collect(r, &got);
    td_request_release(r);
    for (int i = 0; i < got.n - 1; i++) assert_int_not_equal(got.ids[i], end);
    assert_true(got.n > 20);

    td_en_request(3, ids, &o); /* log-probabilities */
    td_token token;
    td_finish finish;
    td_en_must(td_engine_submit(s.engine, &o, &r, &err), &err);
    assert_int_equal(td_request_next(r, &token, 1, WAIT_MS, &finish), 1);
    assert_int_equal(token.n_top, 4);
    assert_true(token.logprob < 0.0f && token.top_logprobs[0] >= token.top_logprobs[1]);
    td_request_release(r); /* while it runs */

    td_en_request(0, ids, &o);
    o.max_tokens = 1 << 30; /* cut to what the context leaves */
    td_en_must(td_engine_submit(s.engine, &o, &r, &err), &err);
    td_request_cancel(r);
    td_en_collect(r, &got);
    assert_int_equal(got.finish, TD_FINISH_CANCELED);
    td_request_release(r);

    o.n_ids = 0;
    assert_int_equal(td_engine_submit(s.engine, &o, &r, &err), TD_EINVAL);
    o.n_ids = 5;
    ids[2] = 1 << 20;
    assert_int_equal(td_engine_submit(s.engine, &o, &r, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, "token id 1048576 at 2"));
    assert_int_equal(td_en_stop(&s), 0);
}

static void test_queue(void **state)
{
    (void)state;
    enum { RUNNING = 4, WAITING = 2 };
    td_en s;
    td_error err;
    int32_t ids[512];
    td_request_options o;
    td_request *r[RUNNING + WAITING + 1];
    td_en_reply got;
    td_en_start(&s, 1, "shm", 16, WAITING);
    td_en_request(0, ids, &o);
    o.max_tokens = 500;
    for (int k = 0; k < RUNNING + WAITING; k++) td_en_must(td_engine_submit(s.engine, &o, &r[k], &err), &err);
    assert_int_equal(td_engine_submit(s.engine, &o, &r[RUNNING + WAITING], &err), TD_EFULL);
    td_request_cancel(r[RUNNING + WAITING - 1]); /* still waiting: leaves at once */
    td_en_collect(r[RUNNING + WAITING - 1], &got);
    assert_int_equal(got.finish, TD_FINISH_CANCELED);
    assert_int_equal(got.n, 0);
    for (int k = 0; k < RUNNING; k++) td_request_cancel(r[k]);
    td_en_collect(r[RUNNING], &got); /* the other one gets its turn */
    assert_int_equal(got.finish, TD_FINISH_LENGTH);
    for (int k = 0; k < RUNNING + WAITING; k++) td_request_release(r[k]);

    td_request *last;
    td_en_must(td_engine_submit(s.engine, &o, &last, &err), &err);
    td_engine_stop(s.engine);
    td_en_collect(last, &got);
    assert_int_equal(got.finish, TD_FINISH_CANCELED);
    td_request_release(last);
    assert_int_equal(td_engine_submit(s.engine, &o, &last, &err), TD_ECANCELED);
    assert_int_equal(td_en_stop(&s), 0);
}

static void test_rank_killed(void **state)
{
    (void)state;
    td_en s;
    td_error err;
    int32_t ids[512];
    td_request_options o;
    td_request *r;
    td_en_reply got;
    td_en_start(&s, 2, "tcp", 16, 16);
    td_en_request(0, ids, &o);
    o.max_tokens = 600;
    td_en_must(td_engine_submit(s.engine, &o, &r, &err), &err);
    td_token token;
    td_finish finish;
    assert_int_equal(td_request_next(r, &token, 1, WAIT_MS, &finish), 1);
    kill(s.follower, SIGKILL);
    td_en_collect(r, &got);
    assert_int_equal(got.finish, TD_FINISH_ERROR);
    assert_int_equal(td_request_error(r)->status, TD_EPEER);
    td_request_release(r);
    assert_int_equal(td_engine_health(s.engine, &err), TD_EPEER);
    assert_int_equal(td_engine_submit(s.engine, &o, &r, &err), TD_EPEER);
    td_en_stop(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alone_is_the_model),
        cmocka_unit_test(test_together),
        cmocka_unit_test(test_two_ranks_shm),
        cmocka_unit_test(test_two_ranks_tcp),
        cmocka_unit_test(test_preemption),
        cmocka_unit_test(test_ends_and_limits),
        cmocka_unit_test(test_queue),
        cmocka_unit_test(test_rank_killed),
    };
    return cmocka_run_group_tests(tests, td_en_group_setup, td_en_group_teardown);
}
