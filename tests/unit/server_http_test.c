/* HTTP itself, byte by byte: framing, limits, deadlines, keys, CORS, connections that stay and connections that must
 * not. */
#include "server_fixture.h"

#include "base/clock.h"
#include "base/log.h"
#include "server/auth.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#define OK_BODY "{\"prompt\":\"x\"}" /* 14 bytes */
#define POST    "POST /v1/completions HTTP/1.1\r\nHost: t\r\n"

/* Sends bytes on a new connection and expects a status; text: in the head or body, NULL: anything. */
static void expect_raw(const fixture *f, const char *bytes, int status, const char *text, bool closes)
{
    int fd = http_connect(f->port);
    http_puts(fd, bytes);
    http_reply reply = http_read(fd, true);
    if (reply.status != status || (text && !strstr(reply.head, text) && !strstr(reply.body, text)) ||
        reply.closed != closes)
        fail_msg("%.400s\n-> %d (closed: %d)\n%s%.300s\nexpected %d (closed: %d) %s", bytes, reply.status, reply.closed,
                 reply.head, reply.body, status, closes, text ? text : "");
    http_free(&reply);
    close(fd);
}

static void test_lengths(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, NULL, NULL);
    expect_raw(&f, POST "Content-Length: 14\r\n\r\n" OK_BODY, 200, "Hello", false);
    expect_raw(&f, POST "Content-Length: 14\r\nContent-Length: 14\r\n\r\n" OK_BODY, 200, "Hello", false);
    expect_raw(&f, POST "Content-Length: 14\r\nContent-Length: 15\r\n\r\n" OK_BODY, 400, "unequal Content-Length",
               true);
    expect_raw(&f, POST "Content-Length: 14\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400,
               "together with Transfer-Encoding", true);
    expect_raw(&f, POST "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400, NULL, true);
    expect_raw(&f, POST "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400,
               "only chunked", true);
    expect_raw(&f, "POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "HTTP/1.1",
               true);
    static const char *const numbers[] = { "abc", "-1", "+14", "14, 14", "0x0e", "14 14", "1e1" };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        char request[256];
        snprintf(request, sizeof request, POST "Content-Length: %s\r\n\r\n" OK_BODY, numbers[i]);
        expect_raw(&f, request, 400, NULL, true);
    }
    expect_raw(&f, POST "Content-Length: 99999999999999999999999\r\n\r\n" OK_BODY, 413, NULL, true);
    expect_raw(&f, POST "\r\n", 400, "not JSON", false); /* no body at all */
    expect_raw(&f, POST "Content-Length : 14\r\n\r\n" OK_BODY, 400, NULL, true);
    expect_raw(&f, POST "Content Length: 14\r\n\r\n" OK_BODY, 400, NULL, true);
    expect_raw(&f, POST "no colon\r\n\r\n", 400, NULL, true);
    expect_raw(&f, POST "Host: u\r\nContent-Length: 14\r\n\r\n" OK_BODY, 400, "one Host", true);
    expect_raw(&f, POST "Transfer-Encoding:\r\n chunked\r\nContent-Length: 14\r\n\r\n" OK_BODY, 400, NULL, true);
    expect_raw(&f, "POST /v1/completions HTTP/1.1\r\nContent-Length: 14\r\n\r\n" OK_BODY, 400, NULL,
               true); /* no Host */
    fixture_close(&f);
}

static void test_chunked(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, NULL, NULL);
    int fd = http_connect(f.port);
    static const char *const pieces[] = {
        POST "Transfer-Encoding: chunked\r\n", "\r\n",           "5\r",
        "\n{\"pro\r\n6\r\nmpt\":\"\r\n",       "3\r\nx\"}\r\n0", "\r\nTrailer: yes\r\n\r\n"
    };
    for (size_t i = 0; i < sizeof pieces / sizeof pieces[0]; i++) {
        http_puts(fd, pieces[i]);
        td_sleep_ns(2000000);
    }
    http_reply reply = http_read(fd, false);
    assert_int_equal(reply.status, 200);
    http_free(&reply);
    http_puts(fd, "GET /ping HTTP/1.1\r\nHost: t\r\n\r\n"); /* the connection is where it should be */
    reply = http_read(fd, true);
    assert_int_equal(reply.status, 200);
    assert_false(reply.closed);
    http_free(&reply);
    close(fd);
    expect_raw(&f, POST "Transfer-Encoding: Chunked\r\n\r\ne\r\n" OK_BODY "\r\n0\r\n\r\n", 200, "Hello", false);
    expect_raw(&f, POST "Transfer-Encoding: chunked\r\n\r\nzz\r\n" OK_BODY "\r\n0\r\n\r\n", 400, NULL, true);
    expect_raw(&f, POST "Transfer-Encoding: chunked\r\n\r\n2\r\n" OK_BODY "\r\n0\r\n\r\n", 400, NULL, true);
    expect_raw(&f, POST "Transfer-Encoding: chunked\r\n\r\n-1\r\n" OK_BODY "\r\n0\r\n\r\n", 400, NULL, true);
    expect_raw(&f, POST "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 413, NULL, true);
    fixture_close(&f);
}

static void test_expect(void **state)
{
    (void)state;
    fixture f;
    td_tokenizer *tok = fake_tokenizer();
    td_server_options options = fixture_options(tok);
    options.body_limit_bytes = 1000;
    fixture_open(&f, NULL, &options);
    int fd = http_connect(f.port);
    http_puts(fd, POST "Content-Length: 14\r\nExpect: 100-continue\r\n\r\n");
    char interim[64] = "";
    assert_int_equal(recv(fd, interim, 25, MSG_WAITALL), 25);
    assert_string_equal(interim, "HTTP/1.1 100 Continue\r\n\r\n");
    http_puts(fd, OK_BODY);
    http_reply reply = http_read(fd, false);
    assert_int_equal(reply.status, 200);
    http_free(&reply);
    close(fd);

    fd = http_connect(f.port);
    http_puts(fd, POST "Content-Length: 1001\r\nExpect: 100-continue\r\n\r\n");
    reply = http_read(fd, true);
    assert_int_equal(reply.status, 413);
    assert_null(strstr(reply.head, "100 Continue"));
    assert_true(reply.closed);
    assert_string_equal(http_header(&reply, "Connection"), "close");
    assert_non_null(
        strstr(reply.body, "\"type\":\"invalid_request_error\",\"param\":null,\"code\":\"request_too_large\""));
    http_free(&reply);
    close(fd);
    fixture_close(&f);
}

/* The answer arrives although the client goes on sending for a while. */
static void test_body_limit(void **state)
{
    (void)state;
    fixture f;
    td_tokenizer *tok = fake_tokenizer();
    td_server_options options = fixture_options(tok);
    options.body_limit_bytes = 100000;
    fixture_open(&f, NULL, &options);
    char *body = malloc(4000001);
    memset(body, ' ', 4000000);
    body[4000000] = 0;
    http_reply reply = http_call(f.port, "POST", "/v1/completions", NULL, body);
    assert_int_equal(reply.status, 413);
    http_free(&reply);

    int fd = http_connect(f.port);
    http_puts(fd, POST "Transfer-Encoding: chunked\r\n\r\n");
    for (int i = 0; i < 50; i++) {
        http_puts(fd, "2710\r\n");
        http_send(fd, body, 10000);
        http_puts(fd, "\r\n");
    }
    reply = http_read(fd, true);
    assert_int_equal(reply.status, 413);
    assert_true(reply.closed);
    http_free(&reply);
    close(fd);

    memcpy(body, OK_BODY, strlen(OK_BODY));
    body[100000] = 0; /* exactly the limit */
    reply = http_call(f.port, "POST", "/v1/completions", NULL, body);
    assert_int_equal(reply.status, 200);
    http_free(&reply);
    free(body);
    fixture_close(&f);
}

static void test_all_bodies_limit(void **state)
{
    (void)state;
    fixture f;
    td_tokenizer *tok = fake_tokenizer();
    td_server_options options = fixture_options(tok);
    options.bodies_limit_bytes = 1000;
    fixture_open(&f, NULL, &options);
    char body[700];
    memset(body, ' ', sizeof body);
    int first = http_connect(f.port), second = http_connect(f.port);
    http_puts(first, POST "Content-Length: 700\r\n\r\n");
    http_send(first, body, 600); /* held, not complete */
    td_sleep_ns(20000000);
    http_puts(second, POST "Content-Length: 700\r\n\r\n");
    http_send(second, body, 700);
    http_reply reply = http_read(second, true);
    assert_int_equal(reply.status, 503);
    http_free(&reply);
    close(second);
    close(first);
    td_sleep_ns(20000000);
    reply = http_call(f.port, "POST", "/v1/completions", NULL, OK_BODY);
    assert_int_equal(reply.status, 200); /* what was held is free again */
    http_free(&reply);
    fixture_close(&f);
}

/* A refused request's body does not become the next request. */
static void test_refused_bodies(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, NULL, NULL);
    static const struct {
        const char *head;
        int status;
        const char *text;
    } cases[] = {
        { "POST /v1/nothing HTTP/1.1\r\nHost: t\r\nContent-Length: 14\r\n\r\n" OK_BODY, 404, "\"code\":\"not_found\"" },
        { "POST /v1/models HTTP/1.1\r\nHost: t\r\nContent-Length: 14\r\n\r\n" OK_BODY, 405,
          "Allow: GET, HEAD, OPTIONS\r\n" },
        { "PUT /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 14\r\n\r\n" OK_BODY, 405,
          "Allow: POST, OPTIONS\r\n" },
        { "GET /v1/completions HTTP/1.1\r\nHost: t\r\n\r\n", 405, "\"param\":null,\"code\":null" },
        { "DELETE /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", 405,
          "Allow" },
        { POST "Content-Encoding: gzip\r\nContent-Length: 14\r\n\r\n" OK_BODY, 415, "Content-Encoding" },
        { POST "Content-Encoding: identity\r\nContent-Length: 14\r\n\r\n" OK_BODY, 200, "Hello" },
        { "GET /ping HTTP/1.1\r\nHost: t\r\nContent-Length: 14\r\n\r\n" OK_BODY, 200, NULL },
        { POST "Content-Length: 2\r\n\r\n{]", 400, "not JSON" },
    };
    int fd = http_connect(f.port); /* one connection for all */
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        http_puts(fd, cases[i].head);
        http_reply reply = http_read(fd, false);
        if (reply.status != cases[i].status ||
            (cases[i].text && !strstr(reply.head, cases[i].text) && !strstr(reply.body, cases[i].text)))
            fail_msg("%s\n-> %s%s", cases[i].head, reply.head, reply.body);
        http_free(&reply);
    }
    close(fd);
    fixture_close(&f);
}

static void test_pipelined(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, NULL, NULL);
    int fd = http_connect(f.port);
    http_puts(fd, POST "Content-Length: 14\r\n\r\n" OK_BODY "GET /version HTTP/1.1\r\nHost: t\r\n\r\n");
    td_sleep_ns(50000000);
    char text[4096] = "";
    assert_true(recv(fd, text, sizeof text - 1, 0) > 0);
    char *second = strstr(text + 1, "HTTP/1.1 200 OK");
    assert_non_null(strstr(text, "Hello, world!"));
    assert_true(second && strstr(second, "{\"version\":\"1.2.3\"}"));
    close(fd);
    fixture_close(&f);
}

static char *long_request(const char *before, char fill, size_t n, const char *after)
{
    char *text = malloc(strlen(before) + n + strlen(after) + 1);
    size_t at = (size_t)sprintf(text, "%s", before);
    memset(text + at, fill, n);
    strcpy(text + at + n, after);
    return text;
}

static void test_header_limits(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, NULL, NULL);
    static const struct {
        size_t n_target, n_header;
        int status;
    } cases[] = { { 8000, 10, 404 },  { 8300, 10, 414 },  { 300000, 10, 414 },
                  { 10, 60000, 404 }, { 10, 66000, 431 }, { 10, 300000, 431 } };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char *target = long_request("GET /", 'a', cases[i].n_target, " HTTP/1.1\r\nHost: t\r\nX-Long: ");
        char *request = long_request(target, 'b', cases[i].n_header, "\r\n\r\n");
        expect_raw(&f, request, cases[i].status, NULL, cases[i].status != 404);
        free(target);
        free(request);
    }
    /* Thousands of short headers cost more memory than bytes. */
    td_buf many;
    td_buf_init(&many, 0);
    td_buf_puts(&many, "GET /ping HTTP/1.1\r\nHost: t\r\n");
    for (int i = 0; i < 10000; i++) td_buf_puts(&many, "a:b\r\n");
    td_buf_puts(&many, "\r\n");
    expect_raw(&f, many.data, 431, NULL, true);
    td_buf_deinit(&many);
    fixture_close(&f);
}

static void test_deadlines(void **state)
{
    (void)state;
    fixture f;
    td_tokenizer *tok = fake_tokenizer();
    td_server_options options = fixture_options(tok);
    options.header_timeout_s = 0.3;
    options.body_timeout_s = 0.3;
    options.idle_timeout_s = 0.2;
    fixture_open(&f, NULL, &options);
    int header = http_connect(f.port), body = http_connect(f.port), idle = http_connect(f.port);
    http_puts(header, "GET /pi");
    http_puts(body, POST "Content-Length: 14\r\n\r\n{");
    http_reply reply = http_read(header, true);
    assert_int_equal(reply.status, 408);
    assert_true(reply.closed);
    assert_non_null(strstr(reply.body, "did not arrive in time"));
    http_free(&reply);
    reply = http_read(body, true);
    assert_int_equal(reply.status, 408);
    assert_true(reply.closed);
    http_free(&reply);
    reply = http_read(idle, true);
    assert_int_equal(reply.status, 0); /* closed without a word */
    http_free(&reply);
    close(header);
    close(body);
    close(idle);
    fixture_close(&f);
}

/* ---- methods and headers ---- */

static void test_head_and_cors(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, NULL, NULL);
    int fd = http_connect(f.port);
    http_puts(fd, "HEAD /health HTTP/1.1\r\nHost: t\r\n\r\nOPTIONS /v1/anything HTTP/1.1\r\nHost: t\r\n\r\n");
    td_sleep_ns(50000000);
    char text[4096] = "";
    ssize_t n = recv(fd, text, sizeof text - 1, 0);
    assert_true(n > 0);
    text[n] = 0;
    char *second = strstr(text + 1, "HTTP/1.1 ");
    assert_memory_equal(text, "HTTP/1.1 200 OK", 15);
    assert_non_null(second); /* right behind the first header block: no body came between */
    assert_memory_equal(second - 4, "\r\n\r\n", 4);
    assert_memory_equal(second, "HTTP/1.1 204 ", 13);
    assert_non_null(strstr(second, "Access-Control-Allow-Origin: *\r\n"));
    assert_non_null(strstr(second, "Access-Control-Allow-Methods: GET, POST, DELETE, OPTIONS\r\n"));
    assert_non_null(strstr(second, "Access-Control-Allow-Headers: Authorization, *\r\n"));
    assert_non_null(strstr(second, "Access-Control-Max-Age: 86400\r\n"));
    close(fd);
    expect_raw(&f, "GET /nothing HTTP/1.1\r\nHost: t\r\n\r\n", 404, "Access-Control-Allow-Origin: *", false);
    fixture_close(&f);

    td_tokenizer *tok = fake_tokenizer();
    td_server_options options = fixture_options(tok);
    options.no_cors = true;
    fixture_open(&f, NULL, &options);
    http_reply reply = http_call(f.port, "GET", "/ping", NULL, NULL);
    assert_string_equal(http_header(&reply, "Access-Control-Allow-Origin"), "");
    http_free(&reply);
    fixture_close(&f);
}

static void test_request_id(void **state)
{
    (void)state;
    fixture f;
    char line[400];
    fixture_open(&f, NULL, NULL);
    http_reply reply = http_call(f.port, "GET", "/ping", "x-request-id: abc 1\r\n", NULL);
    assert_string_equal(http_header(&reply, "x-request-id"), "abc 1");
    http_free(&reply);
    static const char *const unusable[] = { "a\tb", "\xc3\xa4" };
    for (int i = 0; i < 3; i++) {
        if (i < 2)
            snprintf(line, sizeof line, "x-request-id: %s\r\n", unusable[i]);
        else
            snprintf(line, sizeof line, "x-request-id: %0129d\r\n", 0);
        reply = http_call(f.port, "GET", "/ping", line, NULL);
        assert_memory_equal(http_header(&reply, "x-request-id"), "req_", 4);
        assert_int_equal(strlen(http_header(&reply, "x-request-id")), 28);
        http_free(&reply);
    }
    fixture_close(&f);
}

static void test_http_1_0(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, NULL, NULL);
    expect_raw(&f, "POST /v1/completions HTTP/1.0\r\nContent-Length: 28\r\n\r\n{\"prompt\":\"x\",\"stream\":true}", 200,
               "data: [DONE]", true);
    int fd = http_connect(f.port);
    http_puts(fd, "POST /v1/completions HTTP/1.0\r\nContent-Length: 28\r\n\r\n{\"prompt\":\"x\",\"stream\":true}");
    http_reply reply = http_read(fd, false);
    assert_string_equal(http_header(&reply, "Transfer-Encoding"), "");
    http_free(&reply);
    close(fd);
    fixture_close(&f);
}

/* Where releases of libmicrohttpd differ, both ways are harmless here (docs/server.md): understood, or refused. */
static void test_lax(void **state)
{
    (void)state;
    static const char *const requests[] = {
        "GET /ping HTTP/1.1\nHost: t\n\n",                                          /* bare line feeds */
        "\r\n\r\nGET /ping HTTP/1.1\r\nHost: t\r\n\r\n",                            /* empty lines before */
        "GET /%70ing HTTP/1.1\r\nHost: t\r\n\r\n",                                  /* an escaped path */
        POST "Content-Length:\r\n 14\r\n\r\n" OK_BODY,                              /* a folded header */
        POST "Transfer-Encoding: chunked\r\n\r\ne;x=y\r\n" OK_BODY "\r\n0\r\n\r\n", /* a chunk's extension */
    };
    fixture f;
    fixture_open(&f, NULL, NULL);
    for (size_t i = 0; i < sizeof requests / sizeof requests[0]; i++) {
        int fd = http_connect(f.port);
        http_puts(fd, requests[i]);
        http_reply reply = http_read(fd, false);
        if (reply.status != 200 && reply.status != 400 && reply.status != 404)
            fail_msg("%s%d", requests[i], reply.status);
        http_free(&reply);
        close(fd);
    }
    fixture_close(&f);
}

/* ---- keys ---- */

static void expect_key(const fixture *f, const char *path, const char *header, int status)
{
    http_reply reply = http_call(f->port, "GET", path, header, NULL);
    if (reply.status != status) fail_msg("%s %s: %d, expected %d", path, header ? header : "", reply.status, status);
    if (status == 401) {
        assert_string_equal(http_header(&reply, "WWW-Authenticate"), "Bearer");
        assert_non_null(strstr(reply.body, "\"code\":\"invalid_api_key\""));
    }
    http_free(&reply);
}

static void write_file(const char *path, const char *text, mode_t mode)
{
    unlink(path); /* a new inode, as editors make one */
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    assert_int_equal(fchmod(fd, mode), 0);
    close(fd);
}

static void test_keys(void **state)
{
    (void)state;
    fixture f;
    char path[] = "/tmp/td-keys-XXXXXX";
    close(mkstemp(path));
    write_file(path, "# people\nalice: k-alice\n\n k-nobody \n", 0600);
    td_tokenizer *tok = fake_tokenizer();
    td_server_options options = fixture_options(tok);
    static const char *const keys[] = { "k-cli" };
    options.keys = keys;
    options.n_keys = 1;
    options.keys_env = "k-env, k-two,";
    options.keys_file = path;
    fixture_open(&f, NULL, &options);
    expect_key(&f, "/v1/models", NULL, 401);
    expect_key(&f, "/v1/models", "Authorization: Bearer nope\r\n", 401);
    expect_key(&f, "/v1/models", "Authorization: Bearer \r\n", 401);
    expect_key(&f, "/v1/models", "Authorization: Bearerk-cli\r\n", 401);
    expect_key(&f, "/v1/models", "Authorization: Basic k-cli\r\n", 401);
    expect_key(&f, "/v1/models", "Authorization: Bearer k-cl\r\n", 401);
    expect_key(&f, "/v1/models", "Authorization: Bearer k-cli\r\n", 200);
    expect_key(&f, "/v1/models", "Authorization: bEARER   k-env\r\n", 200);
    expect_key(&f, "/v1/models", "x-api-key: k-two\r\n", 200);
    expect_key(&f, "/v1/models", "Authorization: Bearer k-alice\r\n", 200);
    expect_key(&f, "/v1/models", "Authorization: Bearer k-nobody\r\n", 200);
    expect_key(&f, "/metrics", NULL, 401);
    expect_key(&f, "/health", NULL, 200);
    http_reply reply = http_call(f.port, "GET", "/health", NULL, NULL);
    assert_string_equal(reply.body, "{\"status\":\"ok\"}");
    http_free(&reply);
    reply = http_call(f.port, "GET", "/health", "x-api-key: k-cli\r\n", NULL);
    assert_non_null(strstr(reply.body, "requests_running"));
    http_free(&reply);

    /* Refused on the header block alone: the body is never asked for. */
    int fd = http_connect(f.port);
    http_puts(fd, POST "Content-Length: 5000000\r\nExpect: 100-continue\r\n\r\n");
    reply = http_read(fd, true);
    assert_int_equal(reply.status, 401);
    assert_null(strstr(reply.head, "100 Continue"));
    assert_true(reply.closed);
    http_free(&reply);
    close(fd);

    write_file(path, "bob: k-bob\n", 0600);
    td_server_reload_keys(f.server);
    expect_key(&f, "/v1/models", "x-api-key: k-alice\r\n", 401);
    expect_key(&f, "/v1/models", "x-api-key: k-bob\r\n", 200);
    write_file(path, "bad label!: k\n", 0600);
    td_server_reload_keys(f.server);
    expect_key(&f, "/v1/models", "x-api-key: k-bob\r\n", 503);
    expect_key(&f, "/v1/models", "x-api-key: k-cli\r\n", 503); /* closed for everyone */
    expect_key(&f, "/health", NULL, 200);
    write_file(path, "k-new\n", 0600);
    td_server_reload_keys(f.server);
    expect_key(&f, "/v1/models", "x-api-key: k-new\r\n", 200);
    http_reply done = http_call(f.port, "POST", "/v1/completions", "x-api-key: k-new\r\n", OK_BODY);
    http_free(&done);
    for (int i = 0; i < 50; i++) {
        reply = http_call(f.port, "GET", "/metrics", "x-api-key: k-cli\r\n", NULL);
        bool found = strstr(reply.body, "tandem:requests_total{key=\"file-1\",status=\"stop\"} 1") != NULL;
        assert_null(strstr(reply.body, "k-new"));
        http_free(&reply);
        if (found) break;
        assert_true(i < 49);
        td_sleep_ns(10000000);
    }
    unlink(path);
    fixture_close(&f);
}

/* Without a reload: the file's time is looked at, at most once a second. */
static void test_key_file_time(void **state)
{
    (void)state;
    char path[] = "/tmp/td-keys-XXXXXX", label[TD_KEY_LABEL_CAP];
    td_auth *auth;
    td_error err;
    close(mkstemp(path));
    write_file(path, "one\n", 0600);
    assert_int_equal(td_auth_create(NULL, 0, NULL, path, &auth, &err), TD_OK);
    assert_int_equal(td_auth_check(auth, "one", label), TD_AUTH_OK);
    assert_string_equal(label, "file-1");
    write_file(path, "x: two\n", 0600);
    td_sleep_ns(1010000000);
    assert_int_equal(td_auth_check(auth, "one", label), TD_AUTH_REFUSED);
    assert_int_equal(td_auth_check(auth, "two", label), TD_AUTH_OK);
    assert_string_equal(label, "x");
    td_auth_destroy(auth);

    static const struct {
        const char *text;
        mode_t mode;
        const char *reason;
    } refused[] = { { "", 0600, "holds no API key" },        { "# nothing\n", 0600, "holds no API key" },
                    { "a b: k\n", 0600, ":1: a label" },     { "ok\n: k\n", 0600, ":2: a label" },
                    { "x: k y\n", 0600, "printable ASCII" }, { "x:\n", 0600, "is empty" },
                    { "k\n", 0640, "may be read by others" } };
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        write_file(path, refused[i].text, refused[i].mode);
        assert_int_not_equal(td_auth_create(NULL, 0, NULL, path, &auth, &err), TD_OK);
        if (!strstr(err.text, refused[i].reason)) fail_msg("%s", err.text);
    }
    unlink(path);
    assert_int_equal(td_auth_create(NULL, 0, NULL, path, &auth, &err), TD_EIO);
    const char *const empty[] = { "" };
    assert_int_equal(td_auth_create(empty, 1, NULL, NULL, &auth, &err), TD_EFORMAT);
    assert_int_equal(td_auth_create(NULL, 0, " , ,", NULL, &auth, &err), TD_EFORMAT); /* not: open to everyone */
}

static void test_metrics_open(void **state)
{
    (void)state;
    fixture f;
    td_tokenizer *tok = fake_tokenizer();
    td_server_options options = fixture_options(tok);
    options.keys_env = "k";
    options.metrics_open = true;
    fixture_open(&f, NULL, &options);
    expect_key(&f, "/metrics", NULL, 200);
    expect_key(&f, "/v1/models", NULL, 401);
    fixture_close(&f);
}

/* ---- connections ---- */

/* A reader that takes nothing costs its own reply after the write timeout, and nobody else anything. */
static void test_slow_reader(void **state)
{
    (void)state;
    fixture f;
    td_tokenizer *tok = fake_tokenizer();
    td_server_options options = fixture_options(tok);
    options.write_timeout_s = 0.4;
    options.context_tokens = 4000000;
    options.max_tokens = 3000000;
    fixture_open(&f, &(fake_script){ .reply = "0123456789abcdef", .together = 16 }, &options);
    int fd = http_connect(f.port), small = 4096;
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    http_puts(fd, POST "Content-Length: 46\r\n\r\n{\"prompt\":\"x\",\"stream\":true,\"ignore_eos\":true}");
    td_sleep_ns(300000000);
    int64_t begin_ns = td_now_ns();
    for (int i = 0; i < 20; i++) {
        http_reply reply = http_call(f.port, "POST", "/v1/completions", NULL, OK_BODY);
        assert_int_equal(reply.status, 200);
        http_free(&reply);
    }
    assert_true((double)(td_now_ns() - begin_ns) * 1e-9 < 1.0);
    fake_seen seen;
    for (int i = 0; i < 2000; i++) {
        fake_engine_seen(f.engine, &seen);
        if (seen.n_running == 0) break;
        td_sleep_ns(10000000);
    }
    assert_int_equal(seen.n_running, 0);
    assert_int_equal(seen.n_canceled, 1);
    close(fd);
    fixture_close(&f);
}

static void test_connection_limit(void **state)
{
    (void)state;
    fixture f;
    td_tokenizer *tok = fake_tokenizer();
    td_server_options options = fixture_options(tok);
    options.max_connections = 3;
    fixture_open(&f, NULL, &options);
    int fds[3];
    for (int i = 0; i < 3; i++) {
        fds[i] = http_connect(f.port);
        http_puts(fds[i], "GET /ping HTTP/1.1\r\nHost: t\r\n\r\n");
        http_reply reply = http_read(fds[i], false);
        assert_int_equal(reply.status, 200);
        http_free(&reply);
    }
    expect_raw(&f, "GET /ping HTTP/1.1\r\nHost: t\r\n\r\n", 503, "more than 3 connections", true);
    for (int i = 0; i < 3; i++) close(fds[i]);
    td_sleep_ns(50000000);
    expect_raw(&f, "GET /ping HTTP/1.1\r\nHost: t\r\n\r\n", 200, NULL, false);
    fixture_close(&f);
}

/* Descriptors of 1024 and more work like all others. */
static void test_high_descriptors(void **state)
{
    (void)state;
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_max < 1400) skip();
    limit.rlim_cur = 1400;
    setrlimit(RLIMIT_NOFILE, &limit);
    int held[1100], n = 0;
    while (n < 1100 && (held[n] = open("/dev/null", O_RDONLY)) >= 0) n++;
    assert_int_equal(n, 1100);
    fixture f;
    fixture_open(&f, &(fake_script){ .reply = "abc", .prefill_s = 0.15 }, NULL);
    int fd = http_connect(f.port);
    assert_true(fd > 1024);
    http_puts(fd, POST "Content-Length: 28\r\n\r\n{\"prompt\":\"x\",\"stream\":true}");
    http_reply reply = http_read(fd, false);
    assert_int_equal(reply.status, 200);
    assert_non_null(strstr(reply.body, "[DONE]"));
    http_free(&reply);
    http_puts(fd, POST "Content-Length: 14\r\n\r\n" OK_BODY);
    td_sleep_ns(20000000);
    close(fd); /* and leaving is noticed there as well */
    fake_seen seen = { 0 };
    for (int i = 0; i < 50 && seen.n_canceled == 0; i++) {
        td_sleep_ns(10000000);
        fake_engine_seen(f.engine, &seen);
    }
    assert_int_equal(seen.n_canceled, 1);
    fixture_close(&f);
    while (n > 0) close(held[--n]);
}

static void test_options(void **state)
{
    (void)state;
    fixture f;
    td_server *server;
    td_error err;
    fixture_open(&f, NULL, NULL);
    td_server_options options = fixture_options(f.tokenizer);
    options.port = f.port;
    assert_int_equal(td_server_create(&options, &server, &err), TD_EIO);
    assert_non_null(strstr(err.text, "cannot listen on 127.0.0.1 port"));
    options = fixture_options(f.tokenizer);
    options.host = "256.1.1.1";
    assert_int_equal(td_server_create(&options, &server, &err), TD_EINVAL);
    options = fixture_options(f.tokenizer);
    options.model_id = "";
    assert_int_equal(td_server_create(&options, &server, &err), TD_EINVAL);
    options = fixture_options(f.tokenizer);
    options.port = 70000;
    assert_int_equal(td_server_create(&options, &server, &err), TD_EINVAL);
    options = fixture_options(f.tokenizer);
    options.host = "::1";
    if (td_server_create(&options, &server, &err) == TD_OK) td_server_destroy(server); /* where there is IPv6 */
    fixture_close(&f);
}

int main(void)
{
    td_log_init(getenv("TD_TEST_LOG") ? TD_LOG_DEBUG : TD_LOG_ERROR + 1, -1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lengths),
        cmocka_unit_test(test_chunked),
        cmocka_unit_test(test_expect),
        cmocka_unit_test(test_body_limit),
        cmocka_unit_test(test_all_bodies_limit),
        cmocka_unit_test(test_refused_bodies),
        cmocka_unit_test(test_pipelined),
        cmocka_unit_test(test_header_limits),
        cmocka_unit_test(test_deadlines),
        cmocka_unit_test(test_head_and_cors),
        cmocka_unit_test(test_request_id),
        cmocka_unit_test(test_http_1_0),
        cmocka_unit_test(test_lax),
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_key_file_time),
        cmocka_unit_test(test_metrics_open),
        cmocka_unit_test(test_slow_reader),
        cmocka_unit_test(test_connection_limit),
        cmocka_unit_test(test_high_descriptors),
        cmocka_unit_test(test_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
