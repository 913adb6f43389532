/* Two ranks in two network namespaces joined by a veth pair, over TCP: what two machines are, as far as the link can
 * tell. Then the cable is pulled. Needs root and iproute2; says so and skips otherwise. */
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "link_harness.h"

static int run(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static int run(const char *fmt, ...)
{
    char command[256];
    va_list args;
    va_start(args, fmt);
    vsnprintf(command, sizeof command, fmt, args);
    va_end(args);
    return system(command);
}

static bool permitted(void)
{
    pid_t pid = getpid();
    if (geteuid() != 0 || run("ip -V >/dev/null 2>&1") != 0) return false;
    if (run("ip link add tdp%d type veth peer name tdq%d 2>/dev/null", pid % 100000, pid % 100000) != 0) return false;
    run("ip link del tdp%d", pid % 100000);
    return true;
}

typedef struct cable {
    int go[2][2]; /* a byte to rank r: its end of the cable is there */
} cable;

/* A cable counts as there once the kernel has noticed that both ends are up. */
static void await_carrier(void)
{
    char state[16] = "";
    for (int i = 0; i < 500 && strncmp(state, "up", 2) != 0; i++, td_sleep_ns(10000000)) {
        FILE *file = fopen("/sys/class/net/rail0/operstate", "r");
        must(file != NULL && fgets(state, sizeof state, file) != NULL);
        fclose(file);
    }
    must(strncmp(state, "up", 2) == 0);
}

/* In a rank: its own network, then its end of the cable with an address. */
static void plug_in(const rank_args *args)
{
    const cable *c = args->extra;
    char byte;
    int rank = args->options.rank;
    must(unshare(CLONE_NEWNET | CLONE_NEWNS) == 0);
    /* UCX reads /sys/class/net, which shows the network of whoever mounted it */
    must(mount("", "/", "none", MS_REC | MS_PRIVATE, NULL) == 0);
    must(mount("sysfs", "/sys", "sysfs", 0, NULL) == 0);
    must(run("ip link set lo up") == 0);
    tell(args);
    must(read(c->go[rank][0], &byte, 1) == 1);
    must(run("ip addr add 192.0.2.%d/24 dev rail0 && ip link set rail0 up", 1 + rank) == 0);
    await_carrier();
}

static void work(const rank_args *args)
{
    td_error err = { 0 };
    plug_in(args);
    td_link *link = open_link(args);
    int rank = td_link_rank(link);
    size_t got, bytes = 4 << 20;
    uint64_t *buf = td_link_buffer(link, 2 * 65536), step = 0;
    unsigned char *mine = td_link_buffer(link, bytes), *theirs = td_link_buffer(link, bytes);
    for (uint64_t n = 0; n < 300; n++) {
        for (size_t i = 0; i < 8192; i++) buf[(size_t)rank * 8192 + i] = n * 7 + i * 3 + (uint64_t)rank;
        must_err(td_link_gather(link, buf, n % 2 ? 65536 : 16, &err) == TD_OK, &err);
        for (size_t i = 0; n % 2 && i < 8192; i++) must(buf[i] == n * 7 + i * 3 && buf[8192 + i] == n * 7 + i * 3 + 1);
        if (rank == 0)
            must_err(td_link_send_step(link, &n, sizeof n, &err) == TD_OK, &err);
        else
            must_err(td_link_recv_step(link, &step, sizeof step, &got, 10000, &err) == TD_OK && step == n, &err);
    }
    memset(mine, 3 + rank, bytes);
    must_err(td_link_exchange(link, mine, theirs, bytes, &err) == TD_OK, &err);
    for (size_t i = 0; i < bytes; i++) must(theirs[i] == 4 - rank);

    /* The cable is pulled: both ranks learn it from the kernel. */
    must_err(td_link_barrier(link, "pull", 10000, &err) == TD_OK, &err);
    if (rank == 0) td_sleep_ns(50000000), must(run("ip link set rail0 down") == 0);
    int64_t start_ns = td_now_ns();
    if (rank == 0)
        must_err(td_link_gather(link, buf, 64, &err) == TD_EPEER, &err);
    else
        must_err(td_link_recv_step(link, &step, sizeof step, &got, -1, &err) == TD_EPEER, &err);
    must((td_now_ns() - start_ns) / 1000000 < 9000);
    must_err(strstr(err.text, "unreachable") || strstr(err.text, "UCX"), &err);
    td_link_close(link);
}

static void test_two_namespaces(void **state)
{
    (void)state;
    if (!permitted()) {
        print_message("skipped: network namespaces need root and the ip command\n");
        skip();
    }
    rank_args args;
    cable c;
    pid_t pids[2];
    args_init(&args, "tcp");
    args.extra = &c;
    args.options.master_host = "192.0.2.1";
    args.options.peer_host = "192.0.2.2";
    args.options.net_devices = "rail0";
    args.options.region_bytes = 12 << 20;
    args.options.cable_ms = 2000;
    for (int r = 0; r < 2; r++) assert_int_equal(pipe(c.go[r]), 0);
    for (int r = 0; r < 2; r++) pids[r] = start_rank(work, &args, r);
    hear(&args, 2);
    assert_int_equal(run("ip link add rail0 netns %d type veth peer name rail0 netns %d", pids[0], pids[1]), 0);
    for (int r = 0; r < 2; r++) assert_int_equal(write(c.go[r][1], "x", 1), 1);
    int code0 = end_rank(pids[0], 30000), code1 = end_rank(pids[1], 30000);
    assert_int_equal(code0, 0);
    assert_int_equal(code1, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_two_namespaces) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
