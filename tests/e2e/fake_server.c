/* A server over the fake engine, for clients: prints its URL, runs until its standard input ends. What the end-to-end
 * scripts ask of a server does not depend on what the model says, so they run against this one and against real
 * ranks. */
#include "fake_engine.h"

#include "base/log.h"
#include "server/server.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(void)
{
    static const char reply[] =
        "The question is short.</think>\n\nHello! Here is an answer of some length, with d\xc3\xa4ys, "
        "\xe2\x82\xac and \xf0\x9f\x98\x80 in it, one, two, three, four, five.";
    td_log_init(TD_LOG_INFO, -1);
    td_tokenizer *tokenizer = fake_tokenizer();
    fake_script script = { .reply = reply, .prefill_s = 0.01, .token_s = 0.002, .slots = 4, .queue_cap = 512 };
    td_engine *engine = fake_engine_create(tokenizer, &script);
    td_server_options options = { .model_id = "fake",
                                  .version = "0",
                                  .tokenizer = tokenizer,
                                  .context_tokens = 4096,
                                  .temperature = 1.0,
                                  .top_p = 1.0,
                                  .keepalive_s = 1.0,
                                  .chat = { .effort = TD_EFFORT_MAX } };
    td_server *server;
    td_error err;
    if (td_server_create(&options, &server, &err) != TD_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    td_server_ready(server, engine);
    printf("http://127.0.0.1:%d\n", td_server_port(server));
    fflush(stdout);
    char byte;
    while (read(STDIN_FILENO, &byte, 1) > 0)
        ;
    td_server_stop(server, 1.0);
    td_server_destroy(server);
    td_engine_destroy(engine);
    td_tokenizer_destroy(tokenizer);
    return 0;
}
