/* A server over a fake engine, for tests. */
#ifndef TD_TESTS_SERVER_FIXTURE_H
#define TD_TESTS_SERVER_FIXTURE_H

#include "fake_engine.h"
#include "http_client.h"
#include "server/server.h"

typedef struct fixture {
    const td_tokenizer *tokenizer; /* owned */
    td_engine *engine;
    td_server *server;
    int port;
} fixture;

/* Small, fast defaults; a test changes what it is about. */
td_server_options fixture_options(const td_tokenizer *tokenizer);

/* script, options: NULL for the defaults (the reply "Hello, world!" without delay). */
void fixture_open(fixture *f, const fake_script *script, const td_server_options *options);
void fixture_close(fixture *f);

/* POST of a body, in single quotes instead of double ones. The caller frees the reply. */
http_reply fixture_post(const fixture *f, const char *path, const char *body);

/* fixture_post, and the reply must have this status and this text in its body. */
void expect(const fixture *f, const char *path, const char *body, int status, const char *text);

/* The metrics page once it holds a line: a request is counted after its last byte was sent. */
http_reply fixture_metrics(const fixture *f, const char *line);

#endif
