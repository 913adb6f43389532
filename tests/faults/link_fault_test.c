/* What happens to a rank when the other one dies, stops, is late, disagrees, is restarted, or when strangers talk to
 * the control port. Every wait must end, with words that name the case. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "link/handshake.h"
#include "link/message.h"
#include "link/net.h"
#include "link_harness.h"

static const char *const transports[] = { "shm", "tcp" };

static int64_t now_ms(void)
{
    return td_now_ns() / 1000000;
}

/* Opens with what must go wrong, and sees that the error says so. */
static void expect_open(const rank_args *args, td_status status, const char *a, const char *b)
{
    td_link *link = NULL;
    td_error err = { 0 };
    must_err(td_link_open(&args->options, &link, &err) == status, &err);
    must(link == NULL && err.status == status);
    must_err(strstr(err.text, a) && strstr(err.text, b), &err);
}

/* --- death --- */

static void gather_until_lost(const rank_args *args)
{
    td_error err = { 0 };
    td_status status = TD_OK;
    td_link *link = open_link(args);
    unsigned char *buf = td_link_buffer(link, 2 << 16);
    for (int n = 0; status == TD_OK; n++) {
        if (n == 50) tell(args);
        status = td_link_gather(link, buf, 1 << 16, &err);
    }
    must_err(status == TD_EPEER && td_link_state(link) == TD_LINK_LOST, &err);
    must_err(strstr(err.text, "gone") != NULL, &err);
    must(td_link_gather(link, buf, 16, &err) == TD_EPEER); /* and stays so */
    must(td_link_barrier(link, "more", 0, &err) == TD_EPEER);
    td_link_close(link);
}

static void exchange_until_lost(const rank_args *args)
{
    td_error err = { 0 };
    td_status status = TD_OK;
    td_link *link = open_link(args);
    unsigned char *mine = td_link_buffer(link, 4 << 20), *theirs = td_link_buffer(link, 4 << 20);
    for (int n = 0; status == TD_OK; n++) {
        if (n == 3) tell(args);
        status = td_link_exchange(link, mine, theirs, 4 << 20, &err);
    }
    must_err(status == TD_EPEER && strstr(err.text, "gone"), &err);
    must(td_link_exchange(link, mine, theirs, 16, &err) == TD_EPEER);
    td_link_close(link);
}

static void idle_until_lost(const rank_args *args)
{
    td_error err = { 0 };
    char buf[16];
    size_t n;
    td_link *link = open_link(args);
    tell(args);
    if (args->options.rank == 1)
        must_err(td_link_recv_step(link, buf, sizeof buf, &n, 15000, &err) == TD_EPEER, &err);
    else
        while (td_link_state(link) == TD_LINK_UP) td_sleep_ns(1000000);
    must(td_link_lost_reason(link, &err) == TD_EPEER);
    must_err(strstr(err.text, "gone") != NULL, &err);
    if (args->options.rank == 0) must(td_link_send_step(link, buf, 1, &err) == TD_EPEER);
    td_link_close(link);
}

static void load_until_lost(const rank_args *args)
{
    td_error err = { 0 };
    td_link *link = open_link(args);
    tell(args);
    td_link_report_progress(link, 1, 2);
    must_err(td_link_barrier(link, "loaded", 0, &err) == TD_EPEER, &err);
    must_err(strstr(err.text, "gone") != NULL, &err);
    td_link_close(link);
}

static void load_for_ever(const rank_args *args)
{
    td_link *link = open_link(args);
    tell(args);
    for (;;) td_link_report_progress(link, 1, 2), td_sleep_ns(1000000);
}

/* `victim` is killed once both ranks are at work; the other must notice within a second. */
static void kill_one(rank_fn *fn, rank_fn *victim_fn, const char *transport, int victim)
{
    rank_args args;
    pid_t pids[2];
    args_init(&args, transport);
    for (int r = 0; r < 2; r++) pids[r] = start_rank(r == victim ? victim_fn : fn, &args, r);
    hear(&args, 2);
    td_sleep_ns(30000000);
    int64_t at = now_ms();
    kill(pids[victim], SIGKILL);
    assert_int_equal(end_rank(pids[1 - victim], 10000), 0);
    assert_true(now_ms() - at < 2000);
    assert_int_equal(end_rank(pids[victim], 1000), 128 + SIGKILL);
    close(args.pipe[0]);
    close(args.pipe[1]);
}

static void test_killed_in_gather(void **state)
{
    (void)state;
    for (int t = 0; t < 2; t++)
        for (int victim = 0; victim < 2; victim++)
            kill_one(gather_until_lost, gather_until_lost, transports[t], victim);
}

static void test_killed_in_exchange(void **state)
{
    (void)state;
    for (int t = 0; t < 2; t++) kill_one(exchange_until_lost, exchange_until_lost, transports[t], t);
}

static void test_killed_idle(void **state)
{
    (void)state;
    for (int victim = 0; victim < 2; victim++) kill_one(idle_until_lost, idle_until_lost, transports[victim], victim);
}

static void test_killed_loading(void **state)
{
    (void)state;
    for (int victim = 0; victim < 2; victim++) kill_one(load_until_lost, load_for_ever, transports[victim], victim);
}

/* --- stopped, late, hanging --- */

static void gather_1000(const rank_args *args)
{
    td_error err = { 0 };
    td_link *link = open_link(args);
    uint64_t *buf = td_link_buffer(link, 2 * 16384);
    int rank = td_link_rank(link);
    for (uint64_t n = 0; n < 1000; n++) {
        for (int i = 0; i < 2048; i++) buf[rank * 2048 + i] = n * 3 + (uint64_t)i + (uint64_t)rank;
        if (n == 300) tell(args);
        if (n > 300 && n < 320) td_sleep_ns(2000000);
        must_err(td_link_gather(link, buf, 16384, &err) == TD_OK, &err);
        for (int i = 0; i < 2048; i++) must(buf[i] == n * 3 + (uint64_t)i && buf[2048 + i] == n * 3 + (uint64_t)i + 1);
    }
    must_err(td_link_barrier(link, "end", 5000, &err) == TD_OK, &err);
    td_link_close(link);
}

/* SIGSTOP of one rank in the middle of gathers: the other waits, and both go on with the right contents. */
static void stop_one(const char *transport, int victim, int stop_ms)
{
    rank_args args;
    pid_t pids[2];
    args_init(&args, transport);
    for (int r = 0; r < 2; r++) pids[r] = start_rank(gather_1000, &args, r);
    hear(&args, 2);
    kill(pids[victim], SIGSTOP);
    td_sleep_ns((int64_t)stop_ms * 1000000);
    kill(pids[victim], SIGCONT);
    for (int r = 0; r < 2; r++) assert_int_equal(end_rank(pids[r], 20000), 0);
    close(args.pipe[0]);
    close(args.pipe[1]);
}

static void test_stopped_2s(void **state)
{
    (void)state;
    stop_one("tcp", 0, 1000);
    stop_one("shm", 1, 2000);
}

static void test_stopped_10s(void **state)
{
    (void)state;
    stop_one("tcp", 1, 10000);
    stop_one("shm", 0, 10000);
}

static void gather_until_hanging(const rank_args *args)
{
    td_error err = { 0 };
    td_status status = TD_OK;
    td_link *link = open_link(args);
    unsigned char *buf = td_link_buffer(link, 2 * 1024);
    for (int n = 0; status == TD_OK; n++) {
        if (n == 50) tell(args);
        status = td_link_gather(link, buf, 1024, &err);
    }
    must_err(status == TD_EPEER && strstr(err.text, "hangs or is stopped"), &err);
    td_link_close(link);
}

static void gather_until_ended(const rank_args *args)
{
    td_error err = { 0 };
    td_status status = TD_OK;
    td_link *link = open_link(args);
    unsigned char *buf = td_link_buffer(link, 2 * 1024);
    for (int n = 0; status == TD_OK; n++) {
        if (n == 50) tell(args);
        status = td_link_gather(link, buf, 1024, &err);
    }
    must_err(status == TD_EPEER && (strstr(err.text, "ended") || strstr(err.text, "gone")), &err);
    td_link_close(link);
}

static void test_stopped_too_long(void **state)
{
    (void)state;
    rank_args args;
    args_init(&args, "shm");
    args.options.peer_timeout_ms = 800;
    args.options.warn_ms = 300;
    pid_t a = start_rank(gather_until_hanging, &args, 0), b = start_rank(gather_until_ended, &args, 1);
    hear(&args, 2);
    int64_t at = now_ms();
    kill(b, SIGSTOP);
    assert_int_equal(end_rank(a, 10000), 0);
    assert_in_range(now_ms() - at, 700, 4000);
    kill(b, SIGCONT);
    assert_int_equal(end_rank(b, 10000), 0);
    close(args.pipe[0]);
    close(args.pipe[1]);
}

static void late_rank(const rank_args *args)
{
    td_error err = { 0 };
    td_link *link = open_link(args);
    while (td_link_state(link) == TD_LINK_UP) td_sleep_ns(5000000); /* computes, and beats */
    must(td_link_lost_reason(link, &err) == TD_EPEER);
    must_err(strstr(err.text, "rank 0 ended: rank 1 is late"), &err);
    td_link_close(link);
}

static void waits_for_late(const rank_args *args)
{
    td_error err = { 0 };
    td_link *link = open_link(args);
    unsigned char *buf = td_link_buffer(link, 64);
    int64_t at = now_ms();
    must_err(td_link_gather(link, buf, 32, &err) == TD_EPEER, &err);
    must(now_ms() - at >= 590);
    must_err(strstr(err.text, "rank 1 is late") && strstr(err.text, "beats arrive"), &err);
    td_link_close(link);
}

static void test_late_beyond_limit(void **state)
{
    (void)state;
    rank_args args;
    args_init(&args, "tcp");
    args.options.late_ms = 600;
    run_pair(&args, waits_for_late, late_rank, 10000);
}

static void barrier_times_out(const rank_args *args)
{
    td_error err = { 0 };
    td_link *link = open_link(args);
    must_err(td_link_barrier(link, "loaded", 300, &err) == TD_ETIMEOUT, &err);
    must_err(strstr(err.text, "rank 1") && strstr(err.text, "'loaded'"), &err);
    td_link_announce_failure(link, "checkpoint: tensor x: wrong shape");
    td_link_close(link);
}

static void hears_of_failure(const rank_args *args)
{
    td_error err = { 0 };
    char buf[16];
    size_t n;
    td_link *link = open_link(args);
    must(td_link_recv_step(link, buf, sizeof buf, &n, 10000, &err) == TD_EPEER);
    must_err(strstr(err.text, "rank 0 ended: checkpoint: tensor x: wrong shape"), &err);
    td_link_close(link);
}

static void test_barrier_limit_and_failure_text(void **state)
{
    (void)state;
    rank_args args;
    args_init(&args, "tcp");
    run_pair(&args, barrier_times_out, hears_of_failure, 10000);
}

/* --- a clean stop is no loss, wherever the other rank is --- */

static void stops_at_once(const rank_args *args)
{
    td_link *link = open_link(args);
    td_link_announce_stop(link);
    td_link_close(link);
}

static void stopped_in_gather(const rank_args *args)
{
    td_error err = { 0 };
    td_link *link = open_link(args);
    unsigned char *buf = td_link_buffer(link, 64);
    must_err(td_link_gather(link, buf, 32, &err) == TD_ECANCELED, &err);
    must(td_link_state(link) == TD_LINK_STOPPED);
    td_link_close(link);
}

static void stopped_in_barrier(const rank_args *args)
{
    td_error err = { 0 };
    td_link *link = open_link(args);
    must_err(td_link_barrier(link, "loaded", 0, &err) == TD_ECANCELED, &err);
    td_link_close(link);
}

static void test_clean_stop(void **state)
{
    (void)state;
    for (int t = 0; t < 2; t++) {
        rank_args args;
        args_init(&args, transports[t]);
        run_pair(&args, stops_at_once, stopped_in_gather, 10000);
        args_init(&args, transports[t]);
        run_pair(&args, stopped_in_barrier, stops_at_once, 10000);
    }
}

/* --- disagreement --- */

static void expect_difference(const rank_args *args)
{
    const char *const *words = args->extra;
    rank_args changed = *args;
    if (args->options.rank == 1) {
        if (words[2]) changed.options.settings = words[2];
        if (words[3]) changed.options.checkpoint = words[3];
    }
    expect_open(&changed, TD_EINVAL, words[0], words[1]);
}

static void test_settings_differ(void **state)
{
    (void)state;
    static const char *const cases[][4] = {
        { "kv", "rank 0 has 'fp8', rank 1 has 'bf16'", "kv=bf16\ncontext=4096\n", NULL },
        { "context", "rank 0 has '4096', rank 1 has no such setting", "kv=fp8\n", NULL },
        { "extra", "rank 0 has no such setting, rank 1 has '1'", "kv=fp8\ncontext=4096\nextra=1\n", NULL },
        { "checkpoint", "rank 0 has 'c1', rank 1 has 'c2'", NULL, "c2" },
    };
    for (int c = 0; c < 4; c++) {
        rank_args args;
        args_init(&args, "tcp");
        args.extra = cases[c];
        run_pair(&args, expect_difference, expect_difference, 5000);
    }
}

static void same_rank_twice(const rank_args *args)
{
    rank_args changed = *args;
    changed.options.wait_ms = 300;
    if (args->options.rank == 1) changed.options.rank = 0; /* both listen: the second cannot */
    if (args->options.rank == 0)
        expect_open(&changed, TD_ETIMEOUT, "rank 1 did not connect", "300 ms");
    else
        td_sleep_ns(100000000), expect_open(&changed, TD_EIO, "cannot listen", "127.0.0.1");
}

static void test_no_peer(void **state)
{
    (void)state;
    rank_args args;
    args_init(&args, "tcp");
    run_pair(&args, same_rank_twice, same_rank_twice, 5000);
}

static bool until_200ms(void *arg)
{
    return now_ms() < *(const int64_t *)arg + 200;
}

static void loses_interest(const rank_args *args)
{
    rank_args changed = *args;
    int64_t start = now_ms();
    changed.options.keep_waiting = until_200ms;
    changed.options.keep_waiting_arg = &start;
    if (args->options.rank == 1) changed.options.port = free_port(); /* nobody there for either */
    expect_open(&changed, TD_ECANCELED, "stopped while waiting", "rank");
    must(now_ms() - start < 3000);
}

static void test_canceled_open(void **state)
{
    (void)state;
    rank_args args;
    args_init(&args, "tcp");
    run_pair(&args, loses_interest, loses_interest, 5000);
}

static void checks_differ(const rank_args *args)
{
    td_error err = { 0 };
    td_link *link = open_link(args);
    must_err(td_link_check(link, "layer 3", 7, &err) == TD_OK, &err);
    must(td_link_check(link, "layer 4", 7 + (uint64_t)args->options.rank, &err) == TD_EPEER);
    must_err(strstr(err.text, "layer 4") &&
                 strstr(err.text, "rank 0 has 0000000000000007, rank 1 has 0000000000000008"),
             &err);
    td_link_close(link);
}

static void sizes_differ(const rank_args *args)
{
    td_error err = { 0 };
    td_link *link = open_link(args);
    unsigned char *buf = td_link_buffer(link, 4096);
    must_err(td_link_gather(link, buf, args->options.rank ? 512 : 256, &err) == TD_EPEER, &err);
    must_err(strstr(err.text, "out of step") != NULL, &err);
    td_link_close(link);
}

static void labels_differ(const rank_args *args)
{
    td_error err = { 0 };
    td_link *link = open_link(args);
    td_status status = td_link_barrier(link, args->options.rank ? "loaded" : "started", 3000, &err);
    if (status == TD_OK) { /* the other rank saw it first */
        while (td_link_state(link) == TD_LINK_UP) td_sleep_ns(1000000);
        status = td_link_lost_reason(link, &err);
    }
    must_err(status == TD_EPEER && strstr(err.text, "'loaded'") && strstr(err.text, "'started'"), &err);
    td_link_close(link);
}

static void step_too_large(const rank_args *args)
{
    td_error err = { 0 };
    char buf[64] = { 0 };
    size_t n;
    td_link *link = open_link(args);
    if (args->options.rank == 0) {
        must_err(td_link_send_step(link, buf, 33, &err) == TD_OK, &err);
        while (td_link_state(link) == TD_LINK_UP) td_sleep_ns(1000000);
    } else {
        must(td_link_recv_step(link, buf, 32, &n, 5000, &err) == TD_EPEER);
        must_err(strstr(err.text, "33 bytes, at most 32") != NULL, &err);
    }
    td_link_close(link);
}

static void test_out_of_step(void **state)
{
    (void)state;
    rank_fn *const cases[] = { checks_differ, sizes_differ, labels_differ, step_too_large };
    for (int c = 0; c < 4; c++) {
        rank_args args;
        args_init(&args, transports[c % 2]);
        run_pair(&args, cases[c], cases[c], 10000);
    }
}

/* --- restart of one rank --- */

static void pair_broken_by_restart(const rank_args *args)
{
    td_error err = { 0 };
    td_link *link = open_link(args);
    tell(args);
    while (td_link_state(link) == TD_LINK_UP) td_sleep_ns(1000000);
    must(td_link_lost_reason(link, &err) == TD_EPEER);
    must_err(strstr(err.text, "rank 1 was started again") != NULL, &err);
    td_link_close(link);
}

static void refused_restart(const rank_args *args)
{
    expect_open(args, TD_EPEER, "refused", "already formed");
}

static void test_restarted_rank(void **state)
{
    (void)state;
    rank_args args;
    args_init(&args, "tcp");
    pid_t a = start_rank(pair_broken_by_restart, &args, 0), b = start_rank(pair_broken_by_restart, &args, 1);
    hear(&args, 2);
    pid_t again = start_rank(refused_restart, &args, 1);
    assert_int_equal(end_rank(again, 5000), 0);
    assert_int_equal(end_rank(a, 5000), 0);
    assert_int_equal(end_rank(b, 5000), 0);
    close(args.pipe[0]);
    close(args.pipe[1]);
}

/* --- strangers on the control port --- */

static int dial(int port)
{
    int fd = -1;
    for (int i = 0; i < 200 && td_net_connect("127.0.0.1", port, 1000, &fd, NULL) != TD_OK; i++) td_sleep_ns(10000000);
    assert_true(fd >= 0);
    return fd;
}

static void frame_to(int fd, const uint8_t *head, const void *payload, size_t n)
{
    assert_int_equal(td_net_send_all(fd, head, TD_FRAME_HEAD_BYTES, 1000), TD_OK);
    if (n > 0) assert_int_equal(td_net_send_all(fd, payload, n, 1000), TD_OK);
}

static void short_pair(const rank_args *args)
{
    td_error err = { 0 };
    td_link *link = open_link(args);
    tell(args);
    td_sleep_ns(700000000); /* the strangers' time */
    must_err(td_link_barrier(link, "strangers came", 15000, &err) == TD_OK, &err);
    td_link_announce_stop(link);
    td_link_close(link);
}

static void visit_badly(int port, int *fds, int n)
{
    uint8_t head[TD_FRAME_HEAD_BYTES], junk[4096];
    for (size_t i = 0; i < sizeof junk; i++) junk[i] = (uint8_t)(i * 7 + 1);
    for (int i = 0; i < n; i++) {
        fds[i] = dial(port);
        switch (i % 6) {
        case 0: break; /* silent */
        case 1: (void)td_net_send_all(fds[i], "GET / HTTP/1.1\r\n\r\n", 18, 1000); break;
        case 2: (void)td_net_send_all(fds[i], "TDL", 3, 1000); break; /* slow */
        case 3: (void)td_net_send_all(fds[i], junk, sizeof junk, 1000); break;
        case 4: /* a hello of 4 GiB */
            td_frame_write(head, TD_FRAME_HELLO, 0, 0, "x", 1);
            td_put_u32(head + 12, 0xffffffffu);
            frame_to(fds[i], head, NULL, 0);
            break;
        case 5: /* well framed, but no identity; then a join */
            td_frame_write(head, i % 12 == 5 ? TD_FRAME_HELLO : TD_FRAME_JOIN, 0, 99, "x", i % 12 == 5);
            frame_to(fds[i], head, "x", i % 12 == 5);
            break;
        }
    }
}

static void test_strangers(void **state)
{
    (void)state;
    rank_args args;
    int fds[36];
    args_init(&args, "tcp");
    pid_t a = start_rank(short_pair, &args, 0);
    visit_badly(args.options.port, fds, 18); /* before the pair is formed: more than there are seats */
    int64_t at = now_ms();
    pid_t b = start_rank(short_pair, &args, 1);
    hear(&args, 2);
    assert_true(now_ms() - at < 3000);
    visit_badly(args.options.port, fds + 18, 18); /* and after */
    assert_int_equal(end_rank(a, 10000), 0);
    assert_int_equal(end_rank(b, 10000), 0);
    for (int i = 0; i < 36; i++) close(fds[i]);
    close(args.pipe[0]);
    close(args.pipe[1]);
}

static void other_protocol(const rank_args *args)
{
    expect_open(args, TD_EINVAL, "protocol", "rank 0 speaks 1, rank 1 speaks 7");
}

static void test_wrong_protocol(void **state)
{
    (void)state;
    rank_args args;
    uint8_t head[TD_FRAME_HEAD_BYTES], answer[256];
    const char *why = NULL;
    args_init(&args, "tcp");
    pid_t a = start_rank(other_protocol, &args, 0);
    int fd = dial(args.options.port);
    td_frame_write(head, TD_FRAME_HELLO, 0, 0, "x", 1);
    head[4] = 7;
    frame_to(fd, head, "x", 1);
    long n = 0;
    for (int i = 0; i < 300 && n == 0; i++, td_sleep_ns(10000000)) n = td_net_recv(fd, answer, sizeof answer, &why);
    assert_true(n > TD_FRAME_HEAD_BYTES && answer[6] == TD_FRAME_REFUSE); /* told why before the end */
    close(fd);
    assert_int_equal(end_rank(a, 5000), 0);
    close(args.pipe[0]);
    close(args.pipe[1]);
}

static void only_from_elsewhere(const rank_args *args)
{
    rank_args changed = *args;
    changed.options.wait_ms = 500;
    changed.options.peer_host = "127.0.0.9";
    if (args->options.rank == 0)
        expect_open(&changed, TD_ETIMEOUT, "rank 1 did not connect", "");
    else
        expect_open(&changed, TD_ETIMEOUT, "no rank 0", "127.0.0.1");
}

static void test_peer_address(void **state)
{
    (void)state;
    rank_args args;
    args_init(&args, "tcp");
    run_pair(&args, only_from_elsewhere, only_from_elsewhere, 5000);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest slow[] = { cmocka_unit_test(test_stopped_10s) };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed_in_gather),  cmocka_unit_test(test_killed_in_exchange),
        cmocka_unit_test(test_killed_idle),       cmocka_unit_test(test_killed_loading),
        cmocka_unit_test(test_stopped_2s),        cmocka_unit_test(test_stopped_too_long),
        cmocka_unit_test(test_late_beyond_limit), cmocka_unit_test(test_barrier_limit_and_failure_text),
        cmocka_unit_test(test_clean_stop),        cmocka_unit_test(test_settings_differ),
        cmocka_unit_test(test_no_peer),           cmocka_unit_test(test_canceled_open),
        cmocka_unit_test(test_out_of_step),       cmocka_unit_test(test_restarted_rank),
        cmocka_unit_test(test_strangers),         cmocka_unit_test(test_wrong_protocol),
        cmocka_unit_test(test_peer_address),
    };
    if (argc > 1 && strcmp(argv[1], "slow") == 0) return cmocka_run_group_tests(slow, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
