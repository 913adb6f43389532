/* Bytes of a client on a connection: framing, headers, bodies, pipelined requests. The first byte says how the rest is
 * cut into pieces, so that limits of the reader are met at every offset. The server must answer or close and stay
 * usable. */
#include "fake_engine.h"
#include "http_client.h"

#include "base/log.h"
#include "server/server.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum { ADDRESSES = 0x7f000100, INPUTS_PER_ADDRESS = 1000 }; /* 127.0.1.0 to 127.0.1.255 */

static td_server *server; /* lives as long as the process: a start would cost more than an input */
static uint64_t n_inputs;

static void start(void)
{
    td_error err;
    td_log_init(TD_LOG_ERROR + 1, -1);
    td_tokenizer *tokenizer = fake_tokenizer();
    td_engine *engine =
        fake_engine_create(tokenizer, &(fake_script){ .reply = "a</think>b", .slots = 64, .queue_cap = 64 });
    td_server_options options = { .model_id = "fuzz",
                                  .tokenizer = tokenizer,
                                  .context_tokens = 1000,
                                  .temperature = 1,
                                  .top_p = 1,
                                  .max_tokens = 20,
                                  .body_limit_bytes = 20000,
                                  .chat = { .effort = TD_EFFORT_MAX } };
    td_check(td_server_create(&options, &server, &err) == TD_OK);
    td_server_ready(server, engine);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (!server) start();
    if (n_bytes < 1) return 0;
    size_t piece = data[0] ? data[0] : n_bytes;
    int fd = http_connect_from(ADDRESSES + (uint32_t)(n_inputs++ / INPUTS_PER_ADDRESS % 256), td_server_port(server));
    for (size_t at = 1; at < n_bytes; at += piece)
        http_send(fd, (const char *)data + at, n_bytes - at < piece ? n_bytes - at : piece);
    shutdown(fd, SHUT_WR);
    char drop[4096];
    struct pollfd p = { .fd = fd, .events = POLLIN };
    for (;;) { /* answered or closed, not forgotten */
        int n = poll(&p, 1, 10000);
        if (n < 0 && errno == EINTR) continue; /* the fuzzer's own timer */
        td_check(n > 0);
        if (recv(fd, drop, sizeof drop, 0) <= 0) break;
    }
    close(fd);
    return 0;
}
