/* See http_client.h. */
#include "http_client.h"

#include "base/clock.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

enum { READ_MS = 10000 };

int http_connect(int port)
{
    return http_connect_from(INADDR_LOOPBACK, port);
}

int http_connect_from(uint32_t address, int port)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1, failed = 0;
    socklen_t n_failed = sizeof failed;
    struct sockaddr_in from = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(address) };
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on); /* connect chooses the port */
    if (fd < 0 || bind(fd, (struct sockaddr *)&from, sizeof from) != 0 ||
        connect(fd, (struct sockaddr *)&to, sizeof to) != 0)
        failed = errno;
    if (failed == EINTR) { /* a signal came; the connection is made all the same */
        struct pollfd p = { .fd = fd, .events = POLLOUT };
        while (poll(&p, 1, READ_MS) < 0 && errno == EINTR)
            ;
        getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &n_failed);
    }
    if (failed) {
        fprintf(stderr, "connect: %s\n", strerror(failed));
        abort();
    }
    return fd;
}

void http_send(int fd, const char *bytes, size_t n_bytes)
{
    while (n_bytes > 0) {
        ssize_t sent = send(fd, bytes, n_bytes, MSG_NOSIGNAL);
        if (sent <= 0) return; /* the server may have refused already: its answer is what counts */
        bytes += sent;
        n_bytes -= (size_t)sent;
    }
}

void http_puts(int fd, const char *text)
{
    http_send(fd, text, strlen(text));
}

/* Up to cap more bytes into buf; false: end or timeout. */
static bool more(int fd, td_buf *buf, int timeout_ms)
{
    struct pollfd p = { .fd = fd, .events = POLLIN };
    if (poll(&p, 1, timeout_ms) <= 0) return false;
    char piece[65536];
    ssize_t got = recv(fd, piece, sizeof piece, 0);
    if (got <= 0) return false;
    td_buf_add(buf, piece, (size_t)got);
    return true;
}

const char *http_header(const http_reply *reply, const char *name)
{
    static char value[1024];
    size_t n_name = strlen(name);
    value[0] = 0;
    for (const char *line = reply->head; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        if (strncasecmp(line, name, n_name) != 0 || line[n_name] != ':') continue;
        const char *at = line + n_name + 1;
        while (*at == ' ') at++;
        snprintf(value, sizeof value, "%.*s", (int)strcspn(at, "\r\n"), at);
    }
    return value;
}

static bool read_exact(int fd, td_buf *in, size_t n)
{
    while (in->n_bytes < n)
        if (!more(fd, in, READ_MS)) return false;
    return true;
}

static bool read_line(int fd, td_buf *in, char *line, size_t cap)
{
    for (;;) {
        char *end = in->data ? memmem(in->data, in->n_bytes, "\r\n", 2) : NULL;
        if (end) {
            size_t n = (size_t)(end - in->data);
            snprintf(line, cap, "%.*s", (int)n, in->data);
            td_buf_drop(in, n + 2);
            return true;
        }
        if (!more(fd, in, READ_MS)) return false;
    }
}

static bool read_chunks(int fd, td_buf *in, td_buf *body)
{
    char line[256];
    for (;;) {
        if (!read_line(fd, in, line, sizeof line)) return false;
        size_t n = strtoul(line, NULL, 16);
        if (!read_exact(fd, in, n + 2)) return false;
        td_buf_add(body, in->data, n);
        td_buf_drop(in, n + 2);
        if (n == 0) return true;
    }
}

static bool read_head(int fd, td_buf *in, td_buf *head)
{
    for (;;) {
        char *end = in->data ? memmem(in->data, in->n_bytes, "\r\n\r\n", 4) : NULL;
        if (!end) {
            if (!more(fd, in, READ_MS)) return false;
            continue;
        }
        size_t n = (size_t)(end - in->data) + 4;
        bool interim = strncmp(in->data, "HTTP/1.1 100", 12) == 0;
        td_buf_add(head, in->data, n);
        td_buf_drop(in, n);
        if (!interim) return true;
    }
}

static int status_of(const char *head)
{
    int status = 0;
    for (const char *at = head; at && *at; at = strstr(at, "\r\n\r\n") + 4)
        if (sscanf(at, "HTTP/1.%*d %d", &status) == 1 && status != 100) return status;
    return 0;
}

http_reply http_read(int fd, bool wait_close)
{
    http_reply reply = { 0 };
    td_buf in, head, body;
    td_buf_init(&in, 0);
    td_buf_init(&head, 0);
    td_buf_init(&body, 0);
    int64_t begin_ns = td_now_ns();
    bool whole = read_head(fd, &in, &head);
    td_buf_puts(&head, "");
    reply.head = strdup(head.data ? head.data : "");
    reply.first_s = (double)(td_now_ns() - begin_ns) * 1e-9;
    if (whole) {
        const char *length = http_header(&reply, "Content-Length");
        int status = status_of(reply.head);
        if (strcasecmp(http_header(&reply, "Transfer-Encoding"), "chunked") == 0) {
            whole = read_chunks(fd, &in, &body);
        } else if (*(length = http_header(&reply, "Content-Length"))) {
            size_t n = strtoul(length, NULL, 10);
            whole = status == 204 || read_exact(fd, &in, n);
            if (whole) td_buf_add(&body, in.data ? in.data : "", n);
        } else if (status != 204) {
            while (more(fd, &in, READ_MS))
                ;
            td_buf_add(&body, in.data ? in.data : "", in.n_bytes);
        }
        reply.status = whole ? status : 0;
    }
    reply.last_s = (double)(td_now_ns() - begin_ns) * 1e-9;
    reply.n_body = body.n_bytes;
    reply.body = body.data ? body.data : strdup("");
    if (wait_close) {
        char byte;
        struct pollfd p = { .fd = fd, .events = POLLIN };
        reply.closed = poll(&p, 1, 100) > 0 && recv(fd, &byte, 1, MSG_PEEK) <= 0;
    }
    td_buf_deinit(&in);
    td_buf_deinit(&head);
    return reply;
}

void http_free(http_reply *reply)
{
    free(reply->head);
    free(reply->body);
    *reply = (http_reply){ 0 };
}

http_reply http_call(int port, const char *method, const char *path, const char *headers, const char *body)
{
    td_buf request;
    td_buf_init(&request, 0);
    td_buf_printf(&request, "%s %s HTTP/1.1\r\nHost: test\r\nConnection: close\r\n%s", method, path,
                  headers ? headers : "");
    if (body) td_buf_printf(&request, "Content-Length: %zu\r\n", strlen(body));
    td_buf_puts(&request, "\r\n");
    if (body) td_buf_puts(&request, body);
    int fd = http_connect(port);
    http_send(fd, request.data, request.n_bytes);
    http_reply reply = http_read(fd, false);
    close(fd);
    td_buf_deinit(&request);
    return reply;
}
