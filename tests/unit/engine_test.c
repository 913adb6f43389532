/* The engine on a tiny random model: the same request gives the same reply alone, beside others, after a preemption, on
 * one rank and on two; requests end as they should; a lost rank ends them with an error and never hangs. */
#include "engine/engine.h"
#include "model_support.h"
#include "tiny_checkpoint.h"

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

enum { REPLY_CAP = 700, N_REQUESTS = 7, WAIT_MS = 20000 };

static char dir[256];
static int port; /* of the pair; another one for each test */

typedef struct setup {
    td_rig rig;
    td_engine *engine;
    pid_t follower;
} setup;

static void must(td_status status, const td_error *err)
{
    if (status) fail_msg("%s: %s", td_status_text(status), err->text);
}

static void rig_options(td_rig_options *o, int rank, int world, const char *transport, int n_blocks)
{
    td_rig_defaults(o, dir);
    o->transport = transport;
    o->port = port;
    o->link_extra_bytes = 1 << 20;
    o->model.rank = rank;
    o->model.world = world;
    o->model.n_blocks = n_blocks;
    o->model.chunk_rows = 128;
    o->model.context_tokens = 2048;
    o->model.mtp = false;
    o->model.n_logits = 16;
}

static td_status open_rank(setup *s, int rank, int world, const char *transport, int n_blocks, int queue_cap,
                           td_error *err)
{
    td_rig_options o;
    rig_options(&o, rank, world, transport, n_blocks);
    td_status status = td_rig_open(&s->rig, &o, err);
    if (status) return status;
    const td_config *config = td_model_config(s->rig.model);
    td_engine_options e = { .rank = rank,
                            .world = world,
                            .n_slots = 4,
                            .queue_cap = queue_cap,
                            .context_tokens = 2048,
                            .n_blocks = n_blocks,
                            .chunk_rows = 128,
                            .n_ids = config->vocab_size - 3 };
    return td_engine_create(s->rig.model, s->rig.link, &e, &s->engine, err);
}

/* Rank 0 here; rank 1, when there is one, in a child that follows. */
static void start(setup *s, int world, const char *transport, int n_blocks, int queue_cap)
{
    td_error err;
    *s = (setup){ 0 };
    port++;
    if (world == 2) {
        s->follower = fork();
        assert_true(s->follower >= 0);
        if (s->follower == 0) {
            td_status status = open_rank(s, 1, 2, transport, n_blocks, queue_cap, &err);
            if (!status) status = td_engine_follow(s->engine, &err);
            if (status && status != TD_EPEER) fprintf(stderr, "rank 1: %s\n", err.text);
            _exit(status == TD_OK ? 0 : status == TD_EPEER ? 4 : 1);
        }
    }
    must(open_rank(s, 0, world, transport, n_blocks, queue_cap, &err), &err);
}

static int stop(setup *s)
{
    int status = 0;
    td_engine_destroy(s->engine);
    if (s->rig.link) td_link_announce_stop(s->rig.link);
    td_rig_close(&s->rig);
    if (s->follower > 0) waitpid(s->follower, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* Requests of different lengths, temperatures and limits. */
static void request(int k, int32_t *ids, td_request_options *o)
{
    static const int lengths[N_REQUESTS] = { 5, 1, 64, 200, 130, 17, 300 };
    int n = lengths[k % N_REQUESTS];
    for (int i = 0; i < n; i++) ids[i] = (int32_t)((i * 7919 + k * 104729 + 13) % 90);
    *o = (td_request_options){ .ids = ids,
                               .n_ids = n,
                               .max_tokens = 40 + 3 * k,
                               .n_logprobs = k == 3 ? 4 : -1,
                               .sample = { .temperature = k % 2 ? 0.8 : 0.0,
                                           .top_p = k % 3 ? 0.9 : 1.0,
                                           .top_k = k == 5 ? 7 : 0,
                                           .seed = 1234u + (unsigned)k } };
}

typedef struct reply {
    int32_t ids[REPLY_CAP];
    int n;
    td_finish finish;
} reply;

static void collect(td_request *r, reply *out)
{
    td_token tokens[16];
    out->n = 0;
    do {
        int n = td_request_next(r, tokens, 16, WAIT_MS, &out->finish);
        if (n == 0 && out->finish == TD_FINISH_NONE) fail_msg("no token within %d ms", WAIT_MS);
        for (int i = 0; i < n; i++) out->ids[out->n++] = tokens[i].id;
    } while (out->finish == TD_FINISH_NONE);
}

static void ask(setup *s, int k, reply *out)
{
    int32_t ids[512];
    td_request_options o;
    td_request *r;
    td_error err;
    request(k, ids, &o);
    must(td_engine_submit(s->engine, &o, &r, &err), &err);
    collect(r, out);
    td_request_release(r);
}

static void ask_all(setup *s, reply *replies)
{
    td_request *r[N_REQUESTS];
    td_error err;
    for (int k = 0; k < N_REQUESTS; k++) {
        int32_t ids[512];
        td_request_options o;
        request(k, ids, &o);
        must(td_engine_submit(s->engine, &o, &r[k], &err), &err);
    }
    for (int k = 0; k < N_REQUESTS; k++) {
        collect(r[k], &replies[k]);
        td_request_release(r[k]);
    }
}

static reply alone[N_REQUESTS];

static void assert_same(const reply *got)
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
    setup s;
    start(&s, 1, "shm", 16, 16);
    for (int k = 0; k < N_REQUESTS; k++) ask(&s, k, &alone[k]);
    assert_int_equal(stop(&s), 0);
    for (int k = 0; k < N_REQUESTS; k += 2) { /* the greedy ones, against the model driven by hand */
        int32_t ids[512];
        td_request_options o;
        td_rig rig;
        td_rig_options ro;
        td_error err;
        float *logits;
        request(k, ids, &o);
        rig_options(&ro, 0, 1, "shm", 16);
        must(td_rig_open(&rig, &ro, &err), &err);
        logits = malloc((size_t)td_rig_vocab(&rig) * sizeof *logits);
        td_rig_slot(&rig, 0, 3, 1, 2);
        must(td_rig_prefill(&rig, 0, ids, o.n_ids, 64, &err), &err);
        for (int i = 0; i < alone[k].n; i++) {
            td_rig_logits(&rig, 0, logits);
            int32_t best = td_rig_argmax(logits, td_rig_vocab(&rig) - 3);
            assert_int_equal(alone[k].ids[i], best);
            must(td_rig_run(&rig, 0, &best, 1, false, false, &err), &err);
        }
        free(logits);
        td_rig_close(&rig);
    }
}

static void test_together(void **state)
{
    (void)state;
    setup s;
    static reply got[N_REQUESTS];
    start(&s, 1, "shm", 16, 16);
    ask_all(&s, got);
    assert_same(got);
    td_engine_stats stats;
    td_engine_stats_get(s.engine, &stats);
    assert_int_equal(stats.requests_total, N_REQUESTS);
    assert_int_equal(stop(&s), 0);
}

static void two_ranks(const char *transport)
{
    setup s;
    static reply got[N_REQUESTS];
    start(&s, 2, transport, 16, 16);
    ask_all(&s, got);
    assert_same(got);
    assert_int_equal(stop(&s), 0);
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
    static reply one[N], many[N];
    for (int together = 0; together < 2; together++) {
        setup s;
        td_request *r[N];
        td_error err;
        start(&s, 1, "shm", together ? 5 : 16, 16);
        for (int k = 0; k < N; k++) {
            int32_t ids[512];
            td_request_options o;
            request(k, ids, &o);
            o.n_ids = 450; /* two blocks by half of the reply, three at its end */
            for (int i = 0; i < o.n_ids; i++) ids[i] = (i * 31 + k) % 90;
            o.max_tokens = LONG;
            must(td_engine_submit(s.engine, &o, &r[k], &err), &err);
            if (!together) collect(r[k], &one[k]);
        }
        for (int k = 0; k < N; k++) {
            if (together) collect(r[k], &many[k]);
            td_request_release(r[k]);
        }
        td_engine_stats stats;
        td_engine_stats_get(s.engine, &stats);
        if (together) assert_true(stats.preemptions_total > 0);
        assert_int_equal(stop(&s), 0);
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
    setup s;
    td_error err;
    int32_t ids[512];
    td_request_options o;
    td_request *r;
    reply got;
    start(&s, 1, "shm", 16, 16);

    request(0, ids, &o); /* ends at a token that is known to come */
    int32_t end = alone[0].ids[10];
    int first = 0;
    while (alone[0].ids[first] != end) first++;
    o.end_ids = &end;
    o.n_end_ids = 1;
    must(td_engine_submit(s.engine, &o, &r, &err), &err);
    collect(r, &got);
    td_request_release(r);
    assert_int_equal(got.finish, TD_FINISH_END);
    assert_int_equal(got.n, first + 1);

    o.min_tokens = 20; /* the same, but not before 20 tokens */
    must(td_engine_submit(s.engine, &o, &r, &err), &err);
    collect(r, &got);
    td_request_release(r);
    for (int i = 0; i < got.n - 1; i++) assert_int_not_equal(got.ids[i], end);
    assert_true(got.n > 20);

    request(3, ids, &o); /* log-probabilities */
    td_token token;
    td_finish finish;
    must(td_engine_submit(s.engine, &o, &r, &err), &err);
    assert_int_equal(td_request_next(r, &token, 1, WAIT_MS, &finish), 1);
    assert_int_equal(token.n_top, 4);
    assert_true(token.logprob < 0.0f && token.top_logprobs[0] >= token.top_logprobs[1]);
    td_request_release(r); /* while it runs */

    request(0, ids, &o);
    o.max_tokens = 1 << 30; /* cut to what the context leaves */
    must(td_engine_submit(s.engine, &o, &r, &err), &err);
    td_request_cancel(r);
    collect(r, &got);
    assert_int_equal(got.finish, TD_FINISH_CANCELED);
    td_request_release(r);

    o.n_ids = 0;
    assert_int_equal(td_engine_submit(s.engine, &o, &r, &err), TD_EINVAL);
    o.n_ids = 5;
    ids[2] = 1 << 20;
    assert_int_equal(td_engine_submit(s.engine, &o, &r, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, "token id 1048576 at 2"));
    assert_int_equal(stop(&s), 0);
}

static void test_queue(void **state)
{
    (void)state;
    enum { RUNNING = 4, WAITING = 2 };
    setup s;
    td_error err;
    int32_t ids[512];
    td_request_options o;
    td_request *r[RUNNING + WAITING + 1];
    reply got;
    start(&s, 1, "shm", 16, WAITING);
    request(0, ids, &o);
    o.max_tokens = 500;
    for (int k = 0; k < RUNNING + WAITING; k++) must(td_engine_submit(s.engine, &o, &r[k], &err), &err);
    assert_int_equal(td_engine_submit(s.engine, &o, &r[RUNNING + WAITING], &err), TD_EFULL);
    td_request_cancel(r[RUNNING + WAITING - 1]); /* still waiting: leaves at once */
    collect(r[RUNNING + WAITING - 1], &got);
    assert_int_equal(got.finish, TD_FINISH_CANCELED);
    assert_int_equal(got.n, 0);
    for (int k = 0; k < RUNNING; k++) td_request_cancel(r[k]);
    collect(r[RUNNING], &got); /* the other one gets its turn */
    assert_int_equal(got.finish, TD_FINISH_LENGTH);
    for (int k = 0; k < RUNNING + WAITING; k++) td_request_release(r[k]);

    td_request *last;
    must(td_engine_submit(s.engine, &o, &last, &err), &err);
    td_engine_stop(s.engine);
    collect(last, &got);
    assert_int_equal(got.finish, TD_FINISH_CANCELED);
    td_request_release(last);
    assert_int_equal(td_engine_submit(s.engine, &o, &last, &err), TD_ECANCELED);
    assert_int_equal(stop(&s), 0);
}

static void test_rank_killed(void **state)
{
    (void)state;
    setup s;
    td_error err;
    int32_t ids[512];
    td_request_options o;
    td_request *r;
    reply got;
    start(&s, 2, "tcp", 16, 16);
    request(0, ids, &o);
    o.max_tokens = 600;
    must(td_engine_submit(s.engine, &o, &r, &err), &err);
    td_token token;
    td_finish finish;
    assert_int_equal(td_request_next(r, &token, 1, WAIT_MS, &finish), 1);
    kill(s.follower, SIGKILL);
    collect(r, &got);
    assert_int_equal(got.finish, TD_FINISH_ERROR);
    assert_int_equal(td_request_error(r)->status, TD_EPEER);
    td_request_release(r);
    assert_int_equal(td_engine_health(s.engine, &err), TD_EPEER);
    assert_int_equal(td_engine_submit(s.engine, &o, &r, &err), TD_EPEER);
    stop(&s);
}

static int group_setup(void **state)
{
    (void)state;
    td_error err;
    port = 20000 + (int)(getpid() % 1000) * 8; /* below the ports that systems hand out */
    return td_tiny_create(TD_TINY_PLAIN, dir, &err);
}

static int group_teardown(void **state)
{
    (void)state;
    td_tiny_remove(dir);
    return 0;
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
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
