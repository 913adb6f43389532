/* Two ranks that do what they should: every size of gather and exchange with contents that change each time, step
 * messages, checks, barriers, clean stops; over shared memory and TCP. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "link_harness.h"

/* What rank r puts at byte i of message n: changes with all three, so a stale or swapped byte shows. */
static unsigned char byte_of(int r, int n, size_t i)
{
    return (unsigned char)((i * 2654435761u >> 7) + (size_t)n * 31 + (size_t)r * 101);
}

static void fill(unsigned char *at, int r, int n, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) at[i] = byte_of(r, n, i);
}

static bool holds(const unsigned char *at, int r, int n, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (at[i] != byte_of(r, n, i)) return false;
    return true;
}

static void gathers(td_link *link, unsigned char *buf)
{
    static const size_t sizes[] = { 1,    4,     8,     13,    64,    448,   1000,   4096,
                                    8191, 16384, 16385, 32768, 32769, 65536, 131072, 1048576 };
    td_error err = { 0 };
    int rank = td_link_rank(link);
    for (int n = 0; n < 160; n++) {
        size_t bytes = sizes[n % 16];
        if (bytes == 1048576 && n > 32) bytes = 24; /* the large one twice is enough */
        fill(buf + (size_t)rank * bytes, rank, n, bytes);
        must_err(td_link_gather(link, buf, bytes, &err) == TD_OK, &err);
        must(holds(buf, 0, n, bytes));
        must(holds(buf + bytes, 1, n, bytes));
    }
    must(td_link_gather(link, buf, 0, &err) == TD_EINVAL);
    must(td_link_gather(link, buf, 1048577, &err) == TD_EINVAL && strstr(err.text, "1048577"));
}

/* Memory that is not the link's own must work, too. */
static void foreign_gather(td_link *link)
{
    td_error err = { 0 };
    int rank = td_link_rank(link);
    unsigned char *buf = malloc(2 * 100000);
    must(buf != NULL);
    fill(buf + rank * 100000, rank, 3, 100000);
    must_err(td_link_gather(link, buf, 100000, &err) == TD_OK, &err);
    must(holds(buf, 0, 3, 100000) && holds(buf + 100000, 1, 3, 100000));
    free(buf);
}

/* Rank 0 sends a bytes, rank 1 b bytes; pieces arrive in order, a gather runs in between. */
static void exchange(td_link *link, unsigned char *mine, unsigned char *theirs, size_t a, size_t b, int n,
                     unsigned char *small)
{
    td_error err = { 0 };
    td_exchange x;
    int rank = td_link_rank(link), peer = 1 - rank;
    size_t send = rank == 0 ? a : b, recv = rank == 0 ? b : a, have = 0;
    fill(mine, rank, n, send);
    must_err(td_link_exchange_start(link, &x, mine, send, theirs, recv, &err) == TD_OK, &err);
    must(td_link_exchange_start(link, &x, mine, send, theirs, recv, &err) == TD_EINVAL);
    fill(small + (size_t)rank * 64, rank, n, 64);
    must_err(td_link_gather(link, small, 64, &err) == TD_OK, &err);
    must(holds(small + (size_t)peer * 64, peer, n, 64));
    while (have < recv) {
        size_t before = have;
        must_err(td_link_exchange_wait(link, &x, have + 1, &have, &err) == TD_OK, &err);
        must(have > before && have <= recv);
        must(holds(theirs, peer, n, have));
        td_link_progress(link);
    }
    must_err(td_link_exchange_finish(link, &x, &err) == TD_OK, &err);
    must(td_link_exchange_wait(link, &x, 0, &have, &err) == TD_EINVAL);
}

static void exchanges(td_link *link, unsigned char *small)
{
    unsigned char *mine = td_link_buffer(link, 9 << 20), *theirs = td_link_buffer(link, 9 << 20);
    td_error err = { 0 };
    must(mine && theirs);
    exchange(link, mine, theirs, 1 << 20, 1 << 20, 1, small);
    exchange(link, mine, theirs, 9 << 20, (5 << 20) + 3, 2, small);
    exchange(link, mine, theirs, 0, 700000, 3, small);
    exchange(link, mine, theirs, 1, 0, 4, small);
    fill(mine, td_link_rank(link), 9, 3 << 20);
    must_err(td_link_exchange(link, mine, theirs, 3 << 20, &err) == TD_OK, &err);
    must(holds(theirs, 1 - td_link_rank(link), 9, 3 << 20));
}

static void steps(td_link *link)
{
    static const size_t sizes[] = { 0, 1, 100, 65504, 65505, 65536, 300000, 4 << 20, 16 << 20, 5 };
    td_error err = { 0 };
    size_t got = 0, cap = TD_LINK_STEP_MAX;
    unsigned char *buf = malloc(cap);
    must(buf != NULL);
    for (int n = 0; n < 10; n++) {
        if (td_link_rank(link) == 0) {
            fill(buf, 0, n, sizes[n]);
            must_err(td_link_send_step(link, buf, sizes[n], &err) == TD_OK, &err);
            continue;
        }
        must_err(td_link_recv_step(link, buf, cap, &got, -1, &err) == TD_OK, &err);
        must(got == sizes[n] && holds(buf, 0, n, got));
    }
    if (td_link_rank(link) == 0) {
        must(td_link_recv_step(link, buf, cap, &got, 0, &err) == TD_EINVAL);
        must(td_link_send_step(link, buf, cap + 1, &err) == TD_EINVAL);
    } else {
        must(td_link_send_step(link, buf, 1, &err) == TD_EINVAL);
        must(td_link_recv_step(link, buf, cap, &got, 30, &err) == TD_ETIMEOUT);
    }
    free(buf);
}

static void work(const rank_args *args)
{
    td_error err = { 0 };
    uint64_t done, total;
    td_link *link = open_link(args);
    int rank = td_link_rank(link);
    must(td_link_world(link) == 2 && td_link_generation(link) != 0);
    td_link_report_progress(link, 5 + (uint64_t)rank, 7);
    td_link_report_progress(link, 7, 7);
    must_err(td_link_barrier(link, "loaded", 10000, &err) == TD_OK, &err);
    unsigned char *buf = td_link_buffer(link, 2 << 20), *small = td_link_buffer(link, 128);
    must(buf && small && (uintptr_t)buf % 4096 == 0 && buf[0] == 0 && buf[(2 << 20) - 1] == 0);
    gathers(link, buf);
    foreign_gather(link);
    exchanges(link, small);
    steps(link);
    for (uint64_t i = 0; i < 5; i++) must_err(td_link_check(link, "layer", i * i, &err) == TD_OK, &err);
    must(td_link_state(link) == TD_LINK_UP && td_link_lost_reason(link, &err) == TD_OK);
    must_err(td_link_barrier(link, "done", 10000, &err) == TD_OK, &err);
    td_link_peer_progress(link, &done, &total);
    must(done == 7 && total == 7);
    must(td_link_buffer(link, 1 << 30) == NULL);
    if (rank == 0) {
        td_link_announce_stop(link);
    } else {
        size_t got;
        must(td_link_recv_step(link, buf, 1, &got, 5000, &err) == TD_ECANCELED);
        must(td_link_state(link) == TD_LINK_STOPPED);
    }
    td_link_close(link);
}

static void run_work(const char *transport)
{
    rank_args args;
    args_init(&args, transport);
    args.options.region_bytes = 21 << 20;
    run_pair(&args, work, work, 30000);
}

static void test_shm(void **state)
{
    (void)state;
    run_work("shm");
}

static void test_tcp(void **state)
{
    (void)state;
    run_work("tcp");
}

static void test_auto(void **state)
{
    (void)state;
    run_work("auto");
}

static void late_starter(const rank_args *args)
{
    td_error err = { 0 };
    td_sleep_ns(400000000);
    td_link *link = open_link(args);
    must_err(td_link_check(link, "start", 1, &err) == TD_OK, &err);
    td_link_announce_stop(link);
    td_link_close(link);
}

static void early_starter(const rank_args *args)
{
    td_error err = { 0 };
    td_link *link = open_link(args);
    must_err(td_link_check(link, "start", 1, &err) == TD_OK, &err);
    td_link_announce_stop(link);
    td_link_close(link);
}

static void test_either_starts_first(void **state)
{
    (void)state;
    rank_args args;
    args_init(&args, "tcp");
    run_pair(&args, late_starter, early_starter, 10000);
    args_init(&args, "tcp");
    run_pair(&args, early_starter, late_starter, 10000);
}

/* A rank that computes between its parts of the exchange makes the other wait, never fail; and what it sent last must
 * reach the other although it does not look at the link again. */
static void lazy0(const rank_args *args)
{
    td_error err = { 0 };
    td_link *link = open_link(args);
    unsigned char *buf = td_link_buffer(link, 2 << 20);
    for (int n = 0; n < 6; n++) {
        size_t bytes = (size_t)4096 << n;
        td_sleep_ns(30000000);
        fill(buf, 0, n, bytes);
        must_err(td_link_gather(link, buf, bytes, &err) == TD_OK, &err);
    }
    tell(args);
    td_sleep_ns(1500000000); /* busy elsewhere */
    td_link_announce_stop(link);
    td_link_close(link);
}

static void lazy1(const rank_args *args)
{
    td_error err = { 0 };
    td_link *link = open_link(args);
    unsigned char *buf = td_link_buffer(link, 2 << 20);
    int64_t start_ns = 0;
    for (int n = 0; n < 6; n++) {
        size_t bytes = (size_t)4096 << n;
        fill(buf + bytes, 1, n, bytes);
        if (n == 5) start_ns = td_now_ns();
        must_err(td_link_gather(link, buf, bytes, &err) == TD_OK, &err);
        must(holds(buf, 0, n, bytes));
    }
    must(td_now_ns() - start_ns < 1000000000);
    td_link_close(link);
}

static void test_last_gather_arrives(void **state)
{
    (void)state;
    static const char *const transports[] = { "shm", "tcp" };
    for (int t = 0; t < 2; t++) {
        rank_args args;
        args_init(&args, transports[t]);
        run_pair(&args, lazy0, lazy1, 10000);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shm),
        cmocka_unit_test(test_tcp),
        cmocka_unit_test(test_auto),
        cmocka_unit_test(test_either_starts_first),
        cmocka_unit_test(test_last_gather_arrives),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
