/* A small HTTP client for tests: sends exactly the bytes it is given and shows exactly what came back. */
#ifndef TD_TESTS_HTTP_CLIENT_H
#define TD_TESTS_HTTP_CLIENT_H

#include "base/buf.h"

typedef struct http_reply {
    int status; /* 0: the connection closed without a complete response */
    char *head; /* status line and headers, zero-terminated */
    char *body; /* unchunked, zero-terminated */
    size_t n_body;
    bool closed;            /* the server closed the connection after it */
    double first_s, last_s; /* from the call to the head, to the end */
} http_reply;

/* A connection to 127.0.0.1:port; from: the client's own address (host byte order). One address has about 28,000 ports,
 * and a closed connection holds its port for a minute: who connects more often takes another address of 127/8. */
int http_connect(int port);
int http_connect_from(uint32_t address, int port);
void http_send(int fd, const char *bytes, size_t n_bytes);
void http_puts(int fd, const char *text);

/* Reads one response (an interim 100 is skipped and noted in the head). wait_close: also whether the server closes
 * within 100 ms. */
http_reply http_read(int fd, bool wait_close);
void http_free(http_reply *reply);

/* A header's value, "" if it is missing; valid until the next call. */
const char *http_header(const http_reply *reply, const char *name);

/* One request on a connection of its own: method, path, further header lines (each with \r\n) and a body (NULL: none).
 */
http_reply http_call(int port, const char *method, const char *path, const char *headers, const char *body);

#endif
