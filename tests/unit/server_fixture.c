/* See server_fixture.h. */
#include "server_fixture.h"

#include "base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

td_server_options fixture_options(const td_tokenizer *tokenizer)
{
    return (td_server_options){ .model_id = "test-model",
                                .version = "1.2.3",
                                .tokenizer = tokenizer,
                                .context_tokens = 400,
                                .temperature = 0.75,
                                .top_p = 0.5,
                                .max_tokens = 100,
                                .chat = { .effort = TD_EFFORT_MAX } };
}

void fixture_open(fixture *f, const fake_script *script, const td_server_options *options)
{
    td_error err;
    *f = (fixture){ .tokenizer = options ? options->tokenizer : fake_tokenizer() };
    td_server_options standard = fixture_options(f->tokenizer);
    f->engine = fake_engine_create(f->tokenizer, script ? script : &(fake_script){ .reply = "Hello, world!" });
    if (td_server_create(options ? options : &standard, &f->server, &err) != TD_OK) fail_msg("%s", err.text);
    f->port = td_server_port(f->server);
    td_server_ready(f->server, f->engine);
}

void fixture_close(fixture *f)
{
    td_server_destroy(f->server);
    td_engine_destroy(f->engine);
    td_tokenizer_destroy((td_tokenizer *)f->tokenizer);
}

http_reply fixture_post(const fixture *f, const char *path, const char *body)
{
    char *json = strdup(body);
    for (char *c = json; *c; c++)
        if (*c == '\'') *c = '"';
    http_reply reply = http_call(f->port, "POST", path, NULL, json);
    free(json);
    return reply;
}

void expect(const fixture *f, const char *path, const char *body, int status, const char *text)
{
    http_reply reply = fixture_post(f, path, body);
    char *wanted = strdup(text);
    for (char *c = wanted; *c; c++)
        if (*c == '\'') *c = '"';
    if (reply.status != status || !strstr(reply.body, wanted))
        fail_msg("POST %s %.300s\n  expected %d with %s\n  got %d %.600s", path, body, status, wanted, reply.status,
                 reply.body);
    free(wanted);
    http_free(&reply);
}

http_reply fixture_metrics(const fixture *f, const char *line)
{
    http_reply reply = { 0 };
    for (int i = 0; i < 100; i++) {
        reply = http_call(f->port, "GET", "/metrics", NULL, NULL);
        if (strstr(reply.body, line)) return reply;
        if (i < 99) http_free(&reply);
        td_sleep_ns(10000000);
    }
    fail_msg("missing: %s\nin\n%s", line, reply.body);
    return reply;
}
