/* What is refused and what goes wrong: every field's refusal, a full queue, failures, clients that leave, a server that
 * stops. */
#include "server_fixture.h"

#include "base/clock.h"
#include "base/log.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#define CHAT "/v1/chat/completions"
#define TEXT "/v1/completions"
#define HI   "'messages':[{'role':'user','content':'hi'}]"

/* ---- refusals ---- */

static void test_field_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *field, *param;
    } wrong[] = {
        { "'model':3", "model" },
        { "'stream':1", "stream" },
        { "'stream_options':[]", "stream_options" },
        { "'max_tokens':0", "max_tokens" },
        { "'max_tokens':-3", "max_tokens" },
        { "'max_tokens':1.5", "max_tokens" },
        { "'max_tokens':'5'", "max_tokens" },
        { "'max_completion_tokens':0,'max_tokens':4", "max_completion_tokens" },
        { "'min_tokens':-1", "min_tokens" },
        { "'min_tokens':9,'max_tokens':8", "min_tokens" },
        { "'temperature':2.5", "temperature" },
        { "'temperature':-1", "temperature" },
        { "'temperature':true", "temperature" },
        { "'temperature':'0.5'", "temperature" },
        { "'temperature':1e999", "temperature" },
        { "'top_p':0", "top_p" },
        { "'top_p':1.1", "top_p" },
        { "'top_k':1.5", "top_k" },
        { "'min_p':-0.1", "min_p" },
        { "'seed':99999999999999999999", "seed" },
        { "'presence_penalty':3", "presence_penalty" },
        { "'frequency_penalty':'x'", "frequency_penalty" },
        { "'repetition_penalty':0", "repetition_penalty" },
        { "'logit_bias':[1]", "logit_bias" },
        { "'logit_bias':{'5':101}", "logit_bias" },
        { "'stop':5", "stop" },
        { "'stop':['']", "stop" },
        { "'stop_token_ids':[-1]", "stop_token_ids" },
        { "'stop_token_ids':[100000]", "stop_token_ids" },
        { "'ignore_eos':0", "ignore_eos" },
        { "'n':2", "n" },
        { "'best_of':3", "best_of" },
        { "'use_beam_search':true", "use_beam_search" },
        { "'priority':'high'", "priority" },
        { "'draft':1", "draft" },
        { "'return_token_ids':1", "return_token_ids" },
        { "'cache_salt':1", "cache_salt" },
        { "'response_format':{'type':'json_object'}", "response_format" },
        { "'response_format':5", "response_format" },
        { "'guided_json':{}", "guided_json" },
        { "'structured_outputs':{'regex':'a'}", "structured_outputs" },
    };
    static const struct {
        const char *field, *param;
    } chat_only[] = {
        { "'logprobs':2", "logprobs" },
        { "'top_logprobs':3", "top_logprobs" },
        { "'logprobs':true,'top_logprobs':21", "top_logprobs" },
        { "'tools':[{'type':'function','function':{'name':'f'}}]", "tools" },
        { "'tool_choice':'required'", "tool_choice" },
        { "'functions':[{'name':'f'}]", "functions" },
        { "'parallel_tool_calls':'no'", "parallel_tool_calls" },
        { "'thinking_budget':5", "thinking_budget" },
        { "'thinking_token_budget':-1", "thinking_token_budget" },
        { "'include_reasoning':2", "include_reasoning" },
        { "'modalities':['text','audio']", "modalities" },
        { "'reasoning_effort':'huge'", "reasoning_effort" },
        { "'chat_template_kwargs':7", "chat_template_kwargs" },
    };
    static const struct {
        const char *body, *param;
    } text_only[] = {
        { "{}", "prompt" },
        { "{'prompt':''}", "prompt" },
        { "{'prompt':[]}", "prompt" },
        { "{'prompt':5}", "prompt" },
        { "{'prompt':['a','b']}", "prompt" },
        { "{'prompt':[1,'b']}", "prompt" },
        { "{'prompt':[1,271]}", "prompt" },
        { "{'prompt':[-1]}", "prompt" },
        { "{'prompt':'a','echo':true}", "echo" },
        { "{'prompt':'a','suffix':'b'}", "suffix" },
        { "{'prompt':'a','logprobs':true}", "logprobs" },
        { "{'prompt':'a','logprobs':21}", "logprobs" },
        { "{'prompt':'a'," HI "}", "messages" },
    };
    fixture f;
    char body[512], param[64];
    fixture_open(&f, NULL, NULL);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        snprintf(param, sizeof param, "'param':'%s'", wrong[i].param);
        snprintf(body, sizeof body, "{'prompt':'x',%s}", wrong[i].field);
        expect(&f, TEXT, body, 400, param);
        snprintf(body, sizeof body, "{" HI ",%s}", wrong[i].field);
        expect(&f, CHAT, body, 400, param);
    }
    for (size_t i = 0; i < sizeof chat_only / sizeof chat_only[0]; i++) {
        snprintf(param, sizeof param, "'param':'%s'", chat_only[i].param);
        snprintf(body, sizeof body, "{" HI ",%s}", chat_only[i].field);
        expect(&f, CHAT, body, 400, param);
    }
    for (size_t i = 0; i < sizeof text_only / sizeof text_only[0]; i++) {
        snprintf(param, sizeof param, "'param':'%s'", text_only[i].param);
        expect(&f, TEXT, text_only[i].body, 400, param);
    }
    expect(&f, CHAT, "{}", 400, "'param':'messages'");
    expect(&f, CHAT, "{'messages':[]}", 400, "'param':'messages'");
    expect(&f, CHAT, "{'messages':[{'role':'robot','content':'x'}]}", 400, "'param':'messages[0].role'");
    expect(&f, CHAT, "{'messages':[{'role':'user','content':[{'type':'image_url','image_url':{'url':'data:x'}}]}]}",
           400, "'code':'unsupported_parameter'");
    expect(&f, CHAT, "{" HI ",'tools':[{'type':'function','function':{'name':'f'}}]}", 400,
           "tools: tools are not available yet in this version");
    fake_seen seen;
    fake_engine_seen(f.engine, &seen);
    assert_int_equal(seen.n_submitted, 0); /* nothing of all this reached the engine */
    fixture_close(&f);
}

/* null, unknown members, and what is accepted without effect. */
static void test_tolerated(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, NULL, NULL);
    expect(&f, CHAT,
           "{" HI ",'temperature':null,'max_tokens':null,'stop':null,'tools':[],'tool_choice':'auto','n':1,'logit_bias'"
           ":{'5':-100},"
           "'presence_penalty':0.5,'user':'u','metadata':{},'store':true,'service_tier':'auto','prediction':null,"
           "'modalities':['text'],'verbosity':'low','prompt_cache_key':'k','safety_identifier':'s','web_search_options'"
           ":{},"
           "'response_format':{'type':'text'},'guided_json':null,'priority':1,'draft':false,'cache_salt':'x',"
           "'thinking_budget':0,'unknown':[1,{}]}",
           200, "'finish_reason':'stop'");
    fake_seen seen;
    fake_engine_seen(f.engine, &seen);
    assert_true(seen.options.background);
    expect(&f, CHAT, "{" HI ",'tools':[{'type':'function','function':{'name':'f'}}],'tool_choice':'none'}", 200,
           "'stop'");
    expect(&f, CHAT, "{" HI ",'max_completion_tokens':2,'max_tokens':50,'reasoning_effort':'none'}", 200,
           "'content':'He'");
    fixture_close(&f);
}

static void test_window(void **state)
{
    (void)state;
    fixture f;
    char body[4096];
    fixture_open(&f, NULL, NULL);
    expect(&f, TEXT, "{'prompt':'abc','max_tokens':398}", 400,
           "s maximum context length is 400 tokens. However, you requested 401 tokens (3 in the prompt, "
           "398 in "
           "the completion).");
    http_reply reply = fixture_post(&f, TEXT, "{'prompt':'abc','max_tokens':398}");
    assert_non_null(strstr(reply.body, "{\"message\":\"This server's maximum context length is 400 tokens. However,"));
    http_free(&reply);
    expect(&f, TEXT, "{'prompt':'abc','max_tokens':398}", 400, "'param':'prompt','code':'context_length_exceeded'");
    expect(&f, TEXT, "{'prompt':'abc','max_tokens':9223372036854775807}", 400, "context_length_exceeded");
    expect(&f, TEXT, "{'prompt':'abc','max_tokens':397}", 200, "'stop'");
    snprintf(body, sizeof body, "{'prompt':'%0400d'}", 0);
    expect(&f, TEXT, body, 400, "requested 400 tokens (400 in the prompt, 0 in the completion)");
    snprintf(body, sizeof body, "{'prompt':'%0399d','ignore_eos':true}", 0);
    expect(&f, TEXT, body, 200, "'text':'H','logprobs':null,'finish_reason':'length'"); /* cut, not refused */
    snprintf(body, sizeof body, "{'messages':[{'role':'user','content':'%0400d'}]}", 0);
    expect(&f, CHAT, body, 400, "'param':'messages','code':'context_length_exceeded'");
    fixture_close(&f);
}

static void test_bodies(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, NULL, NULL);
    expect(&f, CHAT, "", 400, "the request body is not JSON");
    expect(&f, CHAT, "{", 400, "'code':'invalid_json'");
    expect(&f, CHAT, "[]", 400, "must be a JSON object, not an array");
    expect(&f, CHAT, "{'messages':'\xff'}", 400, "the request body is not JSON");
    char deep[1200] = "{'a':";
    memset(deep + 5, '[', 400);
    memset(deep + 405, ']', 400);
    strcpy(deep + 805, "}");
    expect(&f, CHAT, deep, 400, "invalid_json");
    fixture_close(&f);
}

/* ---- trouble ---- */

static void test_queue_full(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, &(fake_script){ .reply = "abc", .prefill_s = 0.3, .slots = 1, .queue_cap = 0 }, NULL);
    int fd = http_connect(f.port);
    static const char body[] = "{\"prompt\":\"x\",\"stream\":true}";
    char head[256];
    snprintf(head, sizeof head, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %zu\r\n\r\n%s",
             strlen(body), body);
    http_puts(fd, head);
    td_sleep_ns(50000000);
    http_reply reply = fixture_post(&f, TEXT, "{'prompt':'x','stream':true}");
    assert_int_equal(reply.status, 429); /* plain HTTP, also for a stream */
    assert_string_equal(http_header(&reply, "Retry-After"), "5");
    assert_string_equal(http_header(&reply, "Content-Type"), "application/json");
    assert_non_null(strstr(reply.body, "\"type\":\"rate_limit_error\",\"param\":null,\"code\":\"overloaded\""));
    http_free(&reply);
    reply = http_read(fd, false);
    assert_int_equal(reply.status, 200);
    http_free(&reply);
    close(fd);
    fixture_close(&f);
}

static void test_failures(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, &(fake_script){ .reply = "abcdef", .fail_at = 3, .fail_status = TD_ECUDA }, NULL);
    expect(&f, TEXT, "{'prompt':'x'}", 500, "'type':'server_error','param':null,'code':'internal_error'");
    http_reply reply = fixture_post(&f, TEXT, "{'prompt':'x','stream':true}");
    assert_int_equal(reply.status, 200);
    assert_non_null(strstr(reply.body, "data: {\"error\":{\"message\":\"generation failed: scripted failure\""));
    const char *done = strstr(reply.body, "data: [DONE]\n\n");
    assert_true(done && done[14] == 0);
    http_free(&reply);
    fake_engine_set(f.engine, &(fake_script){ .reply = "abcdef", .fail_at = 3, .fail_status = TD_EPEER });
    expect(&f, TEXT, "{'prompt':'x'}", 503, "'code':'unavailable'");
    fixture_close(&f);
}

static void wait_for_cancel(const fixture *f, int n)
{
    fake_seen seen;
    for (int i = 0; i < 50; i++) {
        fake_engine_seen(f->engine, &seen);
        if (seen.n_canceled >= n && seen.n_running == 0) return;
        td_sleep_ns(10000000);
    }
    fail_msg("the engine was not told within half a second: %d of %d", seen.n_canceled, n);
}

/* Streamed, whole, waiting in the queue: in every case a client that leaves is noticed within half a second. */
static void test_client_leaves(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, &(fake_script){ .reply = "abc", .prefill_s = 30, .slots = 1, .queue_cap = 8 }, NULL);
    static const char *const bodies[] = { "{\"prompt\":\"x\",\"stream\":true}", "{\"prompt\":\"x\"}" };
    int n = 0;
    for (int i = 0; i < 4; i++) {
        char head[256];
        const char *body = bodies[i & 1];
        int fd[2] = { http_connect(f.port), http_connect(f.port) };
        snprintf(head, sizeof head, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %zu\r\n\r\n%s",
                 strlen(body), body);
        http_puts(fd[0], head);
        http_puts(fd[1], head); /* waits behind the other */
        td_sleep_ns(30000000);
        if (i < 2) {
            close(fd[1]);
            close(fd[0]);
        } else { /* reset instead of a clean close */
            struct linger hard = { .l_onoff = 1 };
            setsockopt(fd[0], SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
            close(fd[0]);
            shutdown(fd[1], SHUT_WR);
        }
        wait_for_cancel(&f, n += 2);
        if (i >= 2) close(fd[1]);
    }
    http_reply reply = fixture_metrics(&f, "\ntandem:client_disconnections_total 8\n");
    assert_non_null(strstr(reply.body, "status=\"canceled\"} 8\n"));
    http_free(&reply);
    fixture_close(&f);
}

typedef struct stopper {
    td_server *server;
    double limit_s;
} stopper;

static void *stop_thread(void *context)
{
    stopper *s = context;
    td_server_stop(s->server, s->limit_s);
    return NULL;
}

/* Running replies finish; the ones that take too long end with an error event; new requests are refused meanwhile. */
static void test_stop_server(void **state)
{
    (void)state;
    for (int slow = 0; slow < 2; slow++) {
        fixture f;
        fixture_open(&f, &(fake_script){ .reply = "abc", .prefill_s = slow ? 60 : 0.3 }, NULL);
        static const char body[] = "{\"prompt\":\"x\",\"stream\":true}";
        char head[256];
        int running = http_connect(f.port), kept = http_connect(f.port);
        snprintf(head, sizeof head, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %zu\r\n\r\n%s",
                 strlen(body), body);
        http_puts(kept, "GET /ping HTTP/1.1\r\nHost: x\r\n\r\n");
        http_reply reply = http_read(kept, false);
        http_free(&reply);
        http_puts(running, head);
        td_sleep_ns(50000000);
        pthread_t thread;
        stopper s = { f.server, slow ? 0.2 : 5 };
        pthread_create(&thread, NULL, stop_thread, &s);
        td_sleep_ns(50000000);
        http_puts(kept, head);
        reply = http_read(kept, false);
        assert_int_equal(reply.status, 503);
        assert_non_null(strstr(reply.body, "stopping"));
        http_free(&reply);
        reply = http_read(running, false);
        assert_int_equal(reply.status, 200);
        if (slow)
            assert_non_null(strstr(reply.body, "{\"error\":{\"message\":\"the server is stopping\""));
        else
            assert_non_null(strstr(reply.body, "\"finish_reason\":\"stop\""));
        assert_non_null(strstr(reply.body, "data: [DONE]\n\n"));
        http_free(&reply);
        pthread_join(thread, NULL);
        close(running);
        close(kept);
        fixture_close(&f);
    }
}

int main(void)
{
    td_log_init(getenv("TD_TEST_LOG") ? TD_LOG_DEBUG : TD_LOG_ERROR, -1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_field_refusals), cmocka_unit_test(test_tolerated),   cmocka_unit_test(test_window),
        cmocka_unit_test(test_bodies),         cmocka_unit_test(test_queue_full),  cmocka_unit_test(test_failures),
        cmocka_unit_test(test_client_leaves),  cmocka_unit_test(test_stop_server),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
