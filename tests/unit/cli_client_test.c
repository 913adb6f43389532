/* The HTTP client against a server that sends exactly what a case says: what arrives there, what is refused and with
 * which words, and that the key is shown to nobody but the server. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/clock.h"
#include "cli/client.h"
#include "cli/load.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define KEY "sk-very-secret"

/* Answers n_calls connections, one request each, with the same bytes; keeps the last request. */
typedef struct server {
    const char *answer;
    int n_calls, listener, port;
    bool hang; /* after the answer the connection stays open until stopped */
    atomic_bool stop;
    char seen[8192];
    pthread_t thread;
} server;

static bool request_is_whole(const char *seen, size_t n)
{
    const char *body = strstr(seen, "\r\n\r\n"), *length = strstr(seen, "Content-Length: ");
    if (!body) return false;
    size_t want = length && length < body ? (size_t)atoi(length + 16) : 0;
    return n >= (size_t)(body + 4 - seen) + want;
}

static void *answer_calls(void *user)
{
    server *s = user;
    for (int i = 0; i < s->n_calls; i++) {
        int fd = accept(s->listener, NULL, NULL);
        size_t n = 0;
        memset(s->seen, 0, sizeof s->seen);
        for (ssize_t got; !request_is_whole(s->seen, n); n += (size_t)got)
            if ((got = recv(fd, s->seen + n, sizeof s->seen - 1 - n, 0)) <= 0) break;
        (void)!send(fd, s->answer, strlen(s->answer), MSG_NOSIGNAL);
        while (s->hang && !atomic_load(&s->stop)) td_sleep_ns(1000000);
        close(fd);
    }
    return NULL;
}

static void start(server *s, const char *answer, int n_calls)
{
    struct sockaddr_in at = { .sin_family = AF_INET };
    socklen_t n = sizeof at;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    s->answer = answer;
    s->n_calls = n_calls;
    s->listener = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(s->listener, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(s->listener, 16), 0);
    assert_int_equal(getsockname(s->listener, (struct sockaddr *)&at, &n), 0);
    s->port = ntohs(at.sin_port);
    assert_int_equal(pthread_create(&s->thread, NULL, answer_calls, s), 0);
}

static void finish(server *s)
{
    atomic_store(&s->stop, true);
    pthread_join(s->thread, NULL);
    close(s->listener);
}

static td_client *open_client(const server *s, const char *key, td_client_stop_fn *stop)
{
    char url[64];
    td_client *client = NULL;
    td_error err;
    snprintf(url, sizeof url, "http://127.0.0.1:%d/v1/", s->port);
    if (td_client_open(url, key, stop, &client, &err)) fail_msg("%s", err.text);
    return client;
}

#define JSON_OK(body) "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" body

static void test_call(void **state)
{
    (void)state;
    server s = { 0 };
    td_client_reply reply;
    td_error err;
    td_buf body;
    setenv("http_proxy", "http://127.0.0.1:9", 1); /* nobody there: loopback must not go through it */
    start(&s, JSON_OK("{\"a\":[1,2]}"), 2);
    td_client *client = open_client(&s, KEY, NULL);
    td_buf_init(&body, 0);
    td_buf_puts(&body, "{\"x\":1}");
    assert_int_equal(td_client_call(client, "/v1/things", &body, 5, &reply, &err), TD_OK);
    assert_int_equal(reply.status, 200);
    assert_int_equal(td_json_count(td_json_get(reply.json, "a")), 2);
    td_client_reply_free(&reply);
    assert_non_null(strstr(s.seen, "POST /v1/things HTTP/1.1\r\n"));
    assert_non_null(strstr(s.seen, "Authorization: Bearer " KEY "\r\n"));
    assert_non_null(strstr(s.seen, "Content-Type: application/json\r\n"));
    assert_non_null(strstr(s.seen, "\r\n\r\n{\"x\":1}"));
    assert_null(strstr(s.seen, "Expect:"));
    assert_int_equal(td_client_call(client, "/health", NULL, 5, &reply, &err), TD_OK);
    td_client_reply_free(&reply);
    finish(&s);
    assert_non_null(strstr(s.seen, "GET /health HTTP/1.1\r\n"));
    td_buf_deinit(&body);
    td_client_close(client);
    unsetenv("http_proxy");
}

static void test_key_of_environment(void **state)
{
    (void)state;
    server s = { 0 };
    td_client_reply reply;
    td_error err;
    start(&s, JSON_OK("{}"), 2);
    td_client *client = open_client(&s, "", NULL); /* none anywhere */
    assert_int_equal(td_client_call(client, "/health", NULL, 5, &reply, &err), TD_OK);
    td_client_reply_free(&reply);
    assert_null(strstr(s.seen, "Authorization"));
    td_client_close(client);
    setenv("TANDEM_API_KEY", "sk-env", 1);
    client = open_client(&s, NULL, NULL);
    assert_int_equal(td_client_call(client, "/health", NULL, 5, &reply, &err), TD_OK);
    td_client_reply_free(&reply);
    finish(&s);
    assert_non_null(strstr(s.seen, "Authorization: Bearer sk-env\r\n"));
    td_client_close(client);
    unsetenv("TANDEM_API_KEY");
}

static void expect_refused(const char *answer, td_status status, const char *words)
{
    server s = { 0 };
    td_client_reply reply = { .status = -1 };
    td_error err;
    start(&s, answer, 1);
    td_client *client = open_client(&s, KEY, NULL);
    assert_int_equal(td_client_call(client, "/v1/models", NULL, 5, &reply, &err), status);
    if (!strstr(err.text, words)) fail_msg("expected \"%s\" in: %s", words, err.text);
    assert_null(strstr(err.text, KEY));
    assert_int_equal(reply.status, -1); /* untouched */
    finish(&s);
    td_client_close(client);
}

static void test_refusals(void **state)
{
    (void)state;
    expect_refused("HTTP/1.1 429 Too Many\r\nConnection: close\r\n\r\n{\"error\":{\"message\":\"the server is busy\"}}",
                   TD_EFULL, "/v1/models: the server says 429: the server is busy");
    expect_refused("HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\nno such page", TD_ENOTFOUND,
                   "404: no such page");
    expect_refused("HTTP/1.1 500 Oops\r\nConnection: close\r\n\r\n", TD_EIO, "500: no reason given");
    expect_refused("HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nConnection: close\r\n\r\n", TD_EIO, "302");
    expect_refused(JSON_OK("<html>hello</html>"), TD_EFORMAT, "the reply is not JSON");
    expect_refused(JSON_OK(""), TD_EFORMAT, "the reply is empty");
    expect_refused("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"a\":1}", TD_EIO, "/v1/models: ");
    expect_refused("", TD_EIO, "/v1/models: ");
    expect_refused("not HTTP at all\r\n\r\n", TD_EIO, "/v1/models: ");
}

static void test_addresses(void **state)
{
    (void)state;
    static const struct {
        const char *url, *base;
    } good[] = {
        { "http://127.0.0.1:8888", "http://127.0.0.1:8888" },    { "http://127.0.0.1:8888/", "http://127.0.0.1:8888" },
        { "http://127.0.0.1:8888/v1", "http://127.0.0.1:8888" }, { "localhost:8888/v1/", "http://localhost:8888" },
        { "https://host/proxy/v1", "https://host/proxy" },
    };
    static const char *const bad[] = { "",
                                       "http://",
                                       "ftp://host",
                                       "file:///etc/passwd",
                                       "http://a b",
                                       "http://h/?x=1",
                                       "http://user:pass@host",
                                       "http://h/#x",
                                       "/v1" };
    td_client *client;
    td_error err;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        assert_int_equal(td_client_open(good[i].url, NULL, NULL, &client, &err), TD_OK);
        assert_string_equal(td_client_base(client), good[i].base);
        td_client_close(client);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (td_client_open(bad[i], NULL, NULL, &client, &err) != TD_EINVAL) fail_msg("'%s' was taken", bad[i]);
    assert_int_equal(td_client_open("http://h", "a\r\nHost: evil", NULL, &client, &err), TD_EINVAL);
    assert_null(strstr(err.text, "evil"));
}

static void test_nobody_there(void **state)
{
    (void)state;
    server s = { 0 };
    td_client_reply reply;
    td_error err;
    start(&s, "", 0); /* a port that was free a moment ago */
    finish(&s);
    td_client *client = open_client(&s, NULL, NULL);
    assert_int_equal(td_client_call(client, "/health", NULL, 5, &reply, &err), TD_EIO);
    assert_non_null(strstr(err.text, "is the server running?"));
    td_client_close(client);
}

static void test_time_limit(void **state)
{
    (void)state;
    server s = { .hang = true };
    td_client_reply reply;
    td_error err;
    start(&s, "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", 1);
    td_client *client = open_client(&s, NULL, NULL);
    assert_int_equal(td_client_call(client, "/health", NULL, 0.05, &reply, &err), TD_ETIMEOUT);
    finish(&s);
    td_client_close(client);
}

/* --- streams --- */

#define STREAM(events) "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" events

static bool count_events(void *user, char *data, size_t n_bytes)
{
    (void)data, (void)n_bytes;
    return ++*(int *)user < 3;
}

static td_status stream(const server *s, td_client_stop_fn *stop, int *n, td_error *err)
{
    td_buf body;
    td_buf_init(&body, 0);
    td_buf_puts(&body, "{}");
    td_client *client = open_client(s, KEY, stop);
    td_status status = td_client_stream(client, "/v1/chat/completions", &body, 5, count_events, n, err);
    td_client_close(client);
    td_buf_deinit(&body);
    return status;
}

static atomic_bool stop_now;

static bool is_stopped(void)
{
    return atomic_load(&stop_now);
}

static void *set_soon(void *user)
{
    (void)user;
    td_sleep_ns(50000000);
    atomic_store(&stop_now, true);
    return NULL;
}

static void test_streams(void **state)
{
    (void)state;
    td_error err;
    server s = { 0 };
    int n = 0;
    start(&s, STREAM("data: 1\n\n: still here\n\ndata: 2\n\n"), 1);
    assert_int_equal(stream(&s, NULL, &n, &err), TD_OK);
    finish(&s);
    assert_int_equal(n, 2);

    server enough = { .hang = true }; /* the third event ends it although the server keeps the connection */
    start(&enough, STREAM("data: 1\n\ndata: 2\n\ndata: 3\n\ndata: 4\n\n"), 1);
    n = 0;
    assert_int_equal(stream(&enough, NULL, &n, &err), TD_OK);
    finish(&enough);
    assert_int_equal(n, 3);

    server refuses = { 0 };
    start(&refuses,
          "HTTP/1.1 400 Bad\r\nConnection: close\r\n\r\n{\"error\":{\"message\":\"messages must be a list\"}}", 1);
    n = 0;
    assert_int_equal(stream(&refuses, NULL, &n, &err), TD_EIO);
    finish(&refuses);
    assert_non_null(strstr(err.text, "400: messages must be a list"));
    assert_int_equal(n, 0);
}

static void test_stop_flag(void **state)
{
    (void)state;
    td_error err;
    server s = { .hang = true };
    pthread_t setter;
    int n = 0;
    start(&s, STREAM("data: 1\n\n"), 1);
    int64_t begin = td_now_ns();
    pthread_create(&setter, NULL, set_soon, NULL);
    assert_int_equal(stream(&s, is_stopped, &n, &err), TD_ECANCELED);
    pthread_join(setter, NULL);
    assert_true(td_now_ns() - begin < 2000000000);
    assert_int_equal(n, 1);
    finish(&s);
}

/* --- several at once --- */

static void test_load(void **state)
{
    (void)state;
    enum { N = 3 };
    server s = { 0 };
    td_load_request requests[N] = { 0 };
    char url[64];
    td_error err;
    start(
        &s,
        STREAM("data: {\"choices\":[{\"text\":\"\"}]}\n\ndata: {\"choices\":[{\"text\":\"a\"}]}\n\n"
               "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":9,\"prompt_tokens_details\":"
               "{\"cached_tokens\":2}},\"tandem\":{\"prefill_s\":0.5,\"decode_s\":0.25}}\n\ndata: [DONE]\n\n"),
        N);
    snprintf(url, sizeof url, "http://127.0.0.1:%d", s.port);
    for (int i = 0; i < N; i++) {
        requests[i].path = "/v1/completions";
        td_buf_init(&requests[i].body, 0);
        td_buf_puts(&requests[i].body, "{}");
    }
    assert_int_equal(td_load_run(url, NULL, requests, N, 5, &err), TD_OK);
    finish(&s);
    for (int i = 0; i < N; i++) {
        const td_load_request *r = &requests[i];
        if (r->status) fail_msg("%s", r->err.text);
        assert_true(r->prompt_tokens == 7 && r->completion_tokens == 9 && r->cached_tokens == 2);
        assert_true(r->prefill_s == 0.5 && r->decode_s == 0.25);
        assert_true(r->sent_s >= 0 && r->first_s >= r->sent_s && r->last_s == r->first_s);
        td_buf_deinit(&requests[i].body);
    }
}

static void expect_broken(const char *answer, const char *words)
{
    server s = { 0 };
    td_load_request r = { .path = "/v1/completions" };
    char url[64];
    td_error err;
    start(&s, answer, 1);
    snprintf(url, sizeof url, "http://127.0.0.1:%d", s.port);
    td_buf_init(&r.body, 0);
    td_buf_puts(&r.body, "{}");
    assert_int_equal(td_load_run(url, NULL, &r, 1, 5, &err), TD_OK);
    finish(&s);
    assert_int_not_equal(r.status, TD_OK);
    if (!strstr(r.err.text, words)) fail_msg("expected \"%s\" in: %s", words, r.err.text);
    td_buf_deinit(&r.body);
}

static void test_load_broken(void **state)
{
    (void)state;
    expect_broken(STREAM("data: {\"choices\":[{\"text\":\"a\"}]}\n\n"), "the stream ended early");
    expect_broken(STREAM("data: {\"error\":{\"message\":\"rank 1 is gone\"}}\n\n"), "rank 1 is gone");
    expect_broken(STREAM("data: nonsense\n\n"), "");
    expect_broken("HTTP/1.1 503 No\r\nConnection: close\r\n\r\n", "503");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_call),         cmocka_unit_test(test_key_of_environment),
        cmocka_unit_test(test_refusals),     cmocka_unit_test(test_addresses),
        cmocka_unit_test(test_nobody_there), cmocka_unit_test(test_time_limit),
        cmocka_unit_test(test_streams),      cmocka_unit_test(test_stop_flag),
        cmocka_unit_test(test_load),         cmocka_unit_test(test_load_broken),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
