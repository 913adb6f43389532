/* See link_harness.h. */
#include "link_harness.h"

#include <arpa/inet.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/log.h"

void must_(const char *file, int line, const char *text, const td_error *err, bool ok)
{
    if (ok) return;
    fprintf(stderr, "%s:%d: %s%s%s\n", file, line, text, err ? ": " : "", err ? err->text : "");
    _exit(99);
}

/* Below the range from which the system takes ports for outgoing connections, so that nobody else gets it meanwhile. */
int free_port(void)
{
    static int n_given;
    for (int i = 0; i < 1000; i++) {
        int port = 20000 + (int)(((unsigned)getpid() * 37u + (unsigned)n_given++ * 11u) % 12000u);
        struct sockaddr_in addr = { .sin_family = AF_INET,
                                    .sin_port = htons((uint16_t)port),
                                    .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        bool is_free = fd >= 0 && bind(fd, (struct sockaddr *)&addr, sizeof addr) == 0;
        if (fd >= 0) close(fd);
        if (is_free) return port;
    }
    fail_msg("no free port");
    return 0;
}

td_link_options pair_options(const char *transport)
{
    td_link_options o;
    td_link_options_init(&o);
    o.world = 2;
    o.port = free_port();
    o.transport = transport;
    o.wait_ms = 20000;
    o.beat_ms = 100;
    o.warn_ms = 500;
    o.peer_timeout_ms = 20000;
    o.late_ms = 20000;
    o.settings = "kv=fp8\ncontext=4096\n";
    o.build = "b1";
    o.checkpoint = "c1";
    return o;
}

void args_init(rank_args *args, const char *transport)
{
    *args = (rank_args){ .options = pair_options(transport) };
    assert_int_equal(pipe(args->pipe), 0);
}

void tell(const rank_args *args)
{
    must(write(args->pipe[1], "x", 1) == 1);
}

void hear(const rank_args *args, int n)
{
    char byte;
    for (int i = 0; i < n; i++) {
        struct pollfd p = { .fd = args->pipe[0], .events = POLLIN };
        assert_int_equal(poll(&p, 1, 20000), 1);
        assert_int_equal(read(args->pipe[0], &byte, 1), 1);
    }
}

pid_t start_rank(rank_fn *fn, rank_args *args, int rank)
{
    args->options.rank = rank;
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0) return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* nothing outlives the test */
    td_log_init(TD_LOG_WARN, rank);
    fn(args);
    exit(0); /* not _exit: the sanitizers look for leaks */
}

int end_rank(pid_t pid, int limit_ms)
{
    int status;
    int64_t end_ns = td_now_ns() + (int64_t)limit_ms * 1000000;
    while (td_now_ns() < end_ns) {
        if (waitpid(pid, &status, WNOHANG) == pid)
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        td_sleep_ns(2000000);
    }
    kill(pid, SIGKILL);
    kill(pid, SIGCONT);
    waitpid(pid, &status, 0);
    return -1;
}

void run_pair(rank_args *args, rank_fn *rank0, rank_fn *rank1, int limit_ms)
{
    pid_t a = start_rank(rank0, args, 0), b = start_rank(rank1, args, 1);
    int code_a = end_rank(a, limit_ms), code_b = end_rank(b, limit_ms);
    close(args->pipe[0]);
    close(args->pipe[1]);
    assert_int_equal(code_a, 0);
    assert_int_equal(code_b, 0);
}

td_link *open_link(const rank_args *args)
{
    td_link *link = NULL;
    td_error err = { 0 };
    must_err(td_link_open(&args->options, &link, &err) == TD_OK, &err);
    return link;
}
