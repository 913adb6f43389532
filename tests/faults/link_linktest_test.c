/* tandem linktest as two processes: both end well, say the same sizes, find no mismatch; wrong arguments are refused.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/json.h"
#include "cli/cli.h"
#include "link_harness.h"

static void output_path(char path[64], pid_t parent)
{
    snprintf(path, 64, "/tmp/td-linktest-%d.json", (int)parent);
}

/* One end, its report written to a file.*/
static int run_end(const rank_args *args, const char *ops, const char *report)
{
    char peer[64];
    snprintf(peer, sizeof peer, "127.0.0.1:%d", args->options.port);
    const char *argv[] = {
        "linktest", "--role",      args->options.rank ? "b" : "a", "--peer",         peer, "--ops", ops,
        "--json",   "--transport", args->options.transport,        "--exchange-mib", "2",  NULL
    };
    must(freopen(report, "w", stdout) != NULL);
    return td_cli_linktest(12, (char **)(uintptr_t)argv);
}

static void good_end(const rank_args *args)
{
    char path[64];
    output_path(path, getppid());
    must(run_end(args, "40", args->options.rank ? "/dev/null" : path) == TD_EXIT_OK);
}

static void other_end(const rank_args *args)
{
    must(run_end(args, args->options.rank ? "41" : "40", "/dev/null") == TD_EXIT_ARGUMENTS);
}

static void check_report(const td_json *report, const char *transport)
{
    const td_json *gathers = td_json_get(report, "gathers"), *exchanges = td_json_get(report, "exchanges");
    double p50, p99, most, rate;
    int64_t mismatches;
    assert_true(td_json_equals(td_json_get(report, "transport"), transport));
    assert_int_equal(td_json_count(gathers), 9);
    for (size_t i = 0; i < 9; i++) {
        const td_json *l = td_json_at(gathers, i);
        assert_true(td_json_double(td_json_get(l, "p50_us"), &p50) == TD_OK &&
                    td_json_double(td_json_get(l, "p99_us"), &p99) == TD_OK &&
                    td_json_double(td_json_get(l, "max_us"), &most) == TD_OK);
        assert_true(p50 > 0 && p50 <= p99 && p99 <= most && most < 10e6);
    }
    assert_int_equal(td_json_count(exchanges), 2);
    assert_true(td_json_double(td_json_get(td_json_at(exchanges, 1), "gb_per_s"), &rate) == TD_OK && rate > 0.001 &&
                rate < 1000);
    assert_true(td_json_int64(td_json_get(report, "mismatches"), &mismatches) == TD_OK && mismatches == 0);
}

static void test_both_ends(void **state)
{
    (void)state;
    static const char *const transports[] = { "shm", "tcp" };
    for (int t = 0; t < 2; t++) {
        rank_args args;
        char path[64], text[8192];
        td_error err;
        td_arena arena;
        const td_json *report;
        args_init(&args, transports[t]);
        run_pair(&args, good_end, good_end, 20000);
        output_path(path, getpid());
        FILE *file = fopen(path, "r");
        assert_non_null(file);
        size_t n = fread(text, 1, sizeof text - 1, file);
        fclose(file);
        unlink(path);
        td_arena_init(&arena, 0);
        assert_int_equal(td_json_parse(&arena, text, n, &report, &err), TD_OK);
        check_report(report, transports[t]);
        td_arena_deinit(&arena);
    }
}

static void test_ends_differ(void **state)
{
    (void)state;
    rank_args args;
    args_init(&args, "tcp");
    run_pair(&args, other_end, other_end, 20000);
}

static void test_wrong_arguments(void **state)
{
    (void)state;
    static const char *const wrong[][5] = {
        { "linktest", NULL },
        { "linktest", "--role", "c", NULL },
        { "linktest", "--role=a", "--peer=nowhere", NULL },
        { "linktest", "--role=a", "--peer=127.0.0.1:0", NULL },
        { "linktest", "--role=a", "--peer=127.0.0.1:65536", NULL },
        { "linktest", "--role=a", "--peer=:2000", NULL },
        { "linktest", "--role=a", "--ops=0", NULL },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        int argc = 0;
        while (wrong[i][argc]) argc++;
        assert_int_equal(td_cli_linktest(argc, (char **)(uintptr_t)wrong[i]), TD_EXIT_ARGUMENTS);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_ends),
        cmocka_unit_test(test_ends_differ),
        cmocka_unit_test(test_wrong_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
