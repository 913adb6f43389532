/* The routes over a real socket and a fake engine: shapes of replies and streams, what fields do. */
#include "server_fixture.h"

#include "base/clock.h"
#include "base/log.h"

#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define CHAT "/v1/chat/completions"
#define TEXT "/v1/completions"
#define HI   "'messages':[{'role':'user','content':'hi'}]"

static json_t *json_of(http_reply *reply)
{
    json_error_t error;
    json_t *root = json_loads(reply->body, 0, &error);
    if (!root) fail_msg("not JSON: %s: %.300s", error.text, reply->body);
    return root;
}

static json_t *post_json(const fixture *f, const char *path, const char *body)
{
    http_reply reply = fixture_post(f, path, body);
    if (reply.status != 200) fail_msg("%d %s", reply.status, reply.body);
    json_t *root = json_of(&reply);
    http_free(&reply);
    return root;
}

/* Follows "choices.0.message.content". */
static json_t *at(json_t *root, const char *path)
{
    char part[64];
    while (root && *path) {
        size_t n = strcspn(path, ".");
        snprintf(part, sizeof part, "%.*s", (int)n, path);
        root = json_is_array(root) ? json_array_get(root, strtoul(part, NULL, 10)) : json_object_get(root, part);
        path += n + (path[n] == '.');
    }
    return root;
}

static const char *text_at(json_t *root, const char *path)
{
    json_t *value = at(root, path);
    return json_is_string(value) ? json_string_value(value) : json_is_null(value) ? "null" : "missing";
}

static int int_at(json_t *root, const char *path)
{
    json_t *value = at(root, path);
    return json_is_integer(value) ? (int)json_integer_value(value) : -99;
}

/* ---- streams ---- */

typedef struct stream {
    json_t *chunks[256];
    int n;
    bool done; /* [DONE] came last */
    char reasoning[4096], content[4096];
} stream;

/* Also checks what every stream must hold: one id, choices everywhere, the role once, no mixed deltas. */
static stream parse_stream(const char *body, bool chat)
{
    stream s = { 0 };
    for (const char *event = body; *event;) {
        const char *end = strstr(event, "\n\n");
        assert_non_null(end);
        assert_false(s.done);
        if (*event == ':') {
            event = end + 2;
            continue;
        }
        assert_memory_equal(event, "data: ", 6);
        if (strncmp(event, "data: [DONE]", 12) == 0) {
            s.done = true;
        } else {
            json_t *chunk = json_loadb(event + 6, (size_t)(end - event - 6), 0, NULL);
            assert_non_null(chunk);
            s.chunks[s.n++] = chunk;
            assert_string_equal(text_at(chunk, "id"), text_at(s.chunks[0], "id"));
            assert_true(json_is_array(at(chunk, "choices")) || at(chunk, "error"));
            json_t *reasoning = at(chunk, "choices.0.delta.reasoning_content");
            json_t *content = at(chunk, chat ? "choices.0.delta.content" : "choices.0.text");
            assert_false(reasoning && content);
            if (chat) assert_int_equal(at(chunk, "choices.0.delta.role") != NULL, s.n == 1);
            if (reasoning) {
                assert_int_equal(s.content[0], 0);
                strcat(s.reasoning, json_string_value(reasoning));
            }
            if (content) strcat(s.content, json_string_value(content));
        }
        event = end + 2;
    }
    return s;
}

static void free_stream(stream *s)
{
    for (int i = 0; i < s->n; i++) json_decref(s->chunks[i]);
}

static stream post_stream(const fixture *f, const char *path, const char *body, bool chat)
{
    http_reply reply = fixture_post(f, path, body);
    if (reply.status != 200) fail_msg("%d %s", reply.status, reply.body);
    assert_string_equal(http_header(&reply, "Content-Type"), "text/event-stream; charset=utf-8");
    assert_string_equal(http_header(&reply, "Cache-Control"), "no-cache");
    assert_string_equal(http_header(&reply, "X-Accel-Buffering"), "no");
    stream s = parse_stream(reply.body, chat);
    http_free(&reply);
    return s;
}

/* ---- replies ---- */

static void test_completion(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, NULL, NULL);
    json_t *root = post_json(&f, TEXT, "{'prompt':'abc'}");
    assert_string_equal(text_at(root, "object"), "text_completion");
    assert_memory_equal(text_at(root, "id"), "cmpl-", 5);
    assert_string_equal(text_at(root, "model"), "test-model");
    assert_string_equal(text_at(root, "choices.0.text"), "Hello, world!");
    assert_string_equal(text_at(root, "choices.0.finish_reason"), "stop");
    assert_string_equal(text_at(root, "choices.0.stop_reason"), "null");
    assert_string_equal(text_at(root, "system_fingerprint"), "null");
    assert_int_equal(int_at(root, "usage.prompt_tokens"), 3);
    assert_int_equal(int_at(root, "usage.completion_tokens"), 14); /* the end token counts */
    assert_int_equal(int_at(root, "usage.total_tokens"), 17);
    assert_int_equal(int_at(root, "usage.prompt_tokens_details.cached_tokens"), 1);
    assert_int_equal(int_at(root, "usage.completion_tokens_details.reasoning_tokens"), 0);
    /* sha256 of "Hello, world!" as 32-bit numbers and the end token 259, by python's hashlib */
    assert_string_equal(text_at(root, "tandem.token_sha"), "e013fa914cae300c");
    json_decref(root);

    fake_seen seen;
    fake_engine_seen(f.engine, &seen);
    assert_int_equal(seen.options.n_ids, 3);
    assert_int_equal(seen.options.ids[0], 'a');
    assert_int_equal(seen.options.max_tokens, 100);
    assert_true(seen.options.seed_from_prompt);
    assert_true(seen.options.sample.temperature == 0.75 && seen.options.sample.top_p == 0.5);
    assert_int_equal(seen.options.n_logprobs, -1);
    fixture_close(&f);
}

static void test_prompt_forms(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, NULL, NULL);
    static const char *const same[] = { "{'prompt':'hi'}", "{'prompt':['hi']}", "{'prompt':[104,105]}",
                                        "{'prompt':[[104,105]],'suffix':null}",
                                        "\xef\xbb\xbf{'prompt':'hi','model':'x'}" };
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++) {
        fake_seen seen;
        json_decref(post_json(&f, TEXT, same[i]));
        fake_engine_seen(f.engine, &seen);
        assert_int_equal(seen.options.n_ids, 2);
        assert_int_equal(seen.options.ids[1], 'i');
    }
    fixture_close(&f);
}

static void test_chat(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, &(fake_script){ .reply = "Hm.</think>\n\nGood d\xc3\xa4y" }, NULL);
    json_t *root = post_json(&f, CHAT, "{" HI ",'model':'other'}");
    assert_string_equal(text_at(root, "object"), "chat.completion");
    assert_memory_equal(text_at(root, "id"), "chatcmpl-", 9);
    assert_int_equal(strlen(text_at(root, "id")), 9 + 24);
    assert_string_equal(text_at(root, "model"), "other");
    assert_string_equal(text_at(root, "choices.0.message.role"), "assistant");
    assert_string_equal(text_at(root, "choices.0.message.content"), "Good d\xc3\xa4y");
    assert_string_equal(text_at(root, "choices.0.message.reasoning_content"), "Hm.");
    assert_null(at(root, "choices.0.message.reasoning"));
    assert_null(at(root, "choices.0.message.tool_calls"));
    assert_true(json_is_null(at(root, "choices.0.message.refusal")));
    assert_true(json_is_null(at(root, "choices.0.logprobs")));
    assert_int_equal(int_at(root, "usage.completion_tokens_details.reasoning_tokens"), 4); /* "Hm." and </think> */
    json_decref(root);

    root = post_json(&f, CHAT, "{" HI ",'include_reasoning':false}");
    assert_null(at(root, "choices.0.message.reasoning_content"));
    assert_int_equal(int_at(root, "usage.completion_tokens_details.reasoning_tokens"), 4);
    json_decref(root);

    /* thinking off: what looks like an opened block is one, but nothing has to be closed */
    fake_engine_set(f.engine, &(fake_script){ .reply = "Yes" });
    root = post_json(&f, CHAT, "{" HI ",'reasoning_effort':'none'}");
    assert_string_equal(text_at(root, "choices.0.message.content"), "Yes");
    assert_null(at(root, "choices.0.message.reasoning_content"));
    json_decref(root);

    /* an end inside the think block: all of it is reasoning, content stays a string */
    root = post_json(&f, CHAT, "{" HI "}");
    assert_string_equal(text_at(root, "choices.0.message.content"), "");
    assert_string_equal(text_at(root, "choices.0.message.reasoning_content"), "Yes");
    json_decref(root);
    fixture_close(&f);
}

static void test_chat_stream(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, &(fake_script){ .reply = "Hm.</think>\n\nGood d\xc3\xa4y", .token_s = 0.001 }, NULL);
    stream s = post_stream(&f, CHAT, "{" HI ",'stream':true}", true);
    assert_true(s.done);
    assert_string_equal(text_at(s.chunks[0], "object"), "chat.completion.chunk");
    assert_string_equal(text_at(s.chunks[0], "choices.0.delta.content"), "");
    assert_string_equal(s.reasoning, "Hm.");
    assert_string_equal(s.content, "Good d\xc3\xa4y");
    assert_true(s.n > 4);
    for (int i = 0; i + 1 < s.n; i++) {
        assert_true(json_is_null(at(s.chunks[i], "choices.0.finish_reason")));
        assert_null(at(s.chunks[i], "usage"));
    }
    assert_string_equal(text_at(s.chunks[s.n - 1], "choices.0.finish_reason"), "stop");
    assert_int_equal(json_object_size(at(s.chunks[s.n - 1], "choices.0.delta")), 0);
    assert_int_equal(int_at(s.chunks[s.n - 1], "usage.completion_tokens"), 16);
    free_stream(&s);

    s = post_stream(&f, CHAT, "{" HI ",'stream':true,'stream_options':{'include_usage':true},'return_token_ids':true}",
                    true);
    assert_int_equal(json_array_size(at(s.chunks[s.n - 1], "choices")), 0);
    assert_int_equal(int_at(s.chunks[s.n - 1], "usage.completion_tokens_details.reasoning_tokens"), 4);
    assert_string_equal(text_at(s.chunks[s.n - 2], "choices.0.finish_reason"), "stop");
    size_t n_ids = 0;
    for (int i = 0; i + 1 < s.n; i++) {
        assert_true(json_is_null(at(s.chunks[i], "usage")));
        n_ids += json_array_size(at(s.chunks[i], "choices.0.token_ids"));
    }
    assert_int_equal(n_ids, 16);
    assert_true(json_array_size(at(s.chunks[0], "prompt_token_ids")) > 4);
    free_stream(&s);

    s = post_stream(&f, CHAT, "{" HI ",'stream':true,'stream_options':{'continuous_usage_stats':true}}", true);
    assert_int_equal(int_at(s.chunks[0], "usage.completion_tokens"), 0);
    assert_true(int_at(s.chunks[s.n - 2], "usage.completion_tokens") > 0);
    free_stream(&s);
    fixture_close(&f);
}

static void test_completion_stream(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, &(fake_script){ .reply = "<think>a</think>b", .together = 3 }, NULL);
    stream s = post_stream(&f, TEXT, "{'prompt':'x','stream':true,'stream_options':{'include_usage':true}}", false);
    assert_true(s.done);
    assert_string_equal(s.content, "<think>a</think>b"); /* no split here */
    assert_string_equal(text_at(s.chunks[s.n - 2], "choices.0.text"), "");
    assert_string_equal(text_at(s.chunks[s.n - 2], "choices.0.finish_reason"), "stop");
    assert_int_equal(int_at(s.chunks[s.n - 1], "usage.completion_tokens"), 5);
    free_stream(&s);
    fixture_close(&f);
}

/* Whole and streamed replies say the same, for every grouping of tokens. */
static void test_stop(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, NULL, NULL);
    for (int together = 1; together <= 17; together += 4) {
        fake_engine_set(f.engine,
                        &(fake_script){ .reply = "one two three four", .together = together, .token_s = 0.001 });
        json_t *root = post_json(&f, TEXT, "{'prompt':'x','stop':['zzz','o th']}");
        assert_string_equal(text_at(root, "choices.0.text"), "one tw");
        assert_string_equal(text_at(root, "choices.0.finish_reason"), "stop");
        assert_string_equal(text_at(root, "choices.0.stop_reason"), "o th");
        assert_int_equal(int_at(root, "usage.completion_tokens"), 10);
        char sha[32];
        snprintf(sha, sizeof sha, "%s", text_at(root, "tandem.token_sha"));
        json_decref(root);
        stream s = post_stream(&f, TEXT, "{'prompt':'x','stop':'o th','stream':true}", false);
        assert_string_equal(s.content, "one tw");
        assert_string_equal(text_at(s.chunks[s.n - 1], "tandem.token_sha"), sha);
        free_stream(&s);
    }
    fake_seen seen;
    fake_engine_seen(f.engine, &seen);
    assert_int_equal(seen.n_running, 0);
    assert_true(seen.n_canceled > 0); /* the engine was told */

    fake_engine_set(f.engine, &(fake_script){ .reply = "abcabcabc" });
    json_t *root = post_json(&f, TEXT, "{'prompt':'x','stop':'bc','min_tokens':5}");
    assert_string_equal(text_at(root, "choices.0.text"), "abca"); /* the first match ended before */
    json_decref(root);
    root = post_json(&f, TEXT, "{'prompt':'x','stop_token_ids':[99]}");
    assert_string_equal(text_at(root, "choices.0.finish_reason"), "stop");
    json_decref(root);
    fake_engine_seen(f.engine, &seen);
    assert_int_equal(seen.options.end_ids[seen.options.n_end_ids - 1], 99);
    assert_int_equal(seen.options.n_end_ids, 5); /* four role tags of this tokenizer */

    root = post_json(
        &f, TEXT, "{'prompt':'x','ignore_eos':true,'max_tokens':20,'temperature':0,'top_k':7,'seed':-1,'min_p':0.25}");
    assert_string_equal(text_at(root, "choices.0.text"), "abcabcabcabcabcabcab");
    assert_string_equal(text_at(root, "choices.0.finish_reason"), "length");
    json_decref(root);
    fake_engine_seen(f.engine, &seen);
    assert_int_equal(seen.options.n_end_ids, 0);
    assert_int_equal(seen.options.sample.top_k, 7);
    assert_true(seen.options.sample.seed == UINT64_MAX && !seen.options.seed_from_prompt);
    assert_true(seen.options.sample.min_p == 0.25 && seen.options.sample.temperature == 0);
    fixture_close(&f);
}

/* A reply cut in the middle of a character ends in U+FFFD, streamed or not. */
static void test_cut_character(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, &(fake_script){ .reply = "\xe2\x82\xac\xf0\x9f\x98\x80" }, NULL);
    json_t *root = post_json(&f, TEXT, "{'prompt':'x','max_tokens':5}");
    assert_string_equal(text_at(root, "choices.0.text"), "\xe2\x82\xac\xef\xbf\xbd");
    assert_string_equal(text_at(root, "choices.0.finish_reason"), "length");
    json_decref(root);
    stream s = post_stream(&f, TEXT, "{'prompt':'x','max_tokens':5,'stream':true}", false);
    assert_string_equal(s.content, "\xe2\x82\xac\xef\xbf\xbd");
    free_stream(&s);
    fixture_close(&f);
}

static void test_logprobs(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, &(fake_script){ .reply = "h\xc3\xa4" }, NULL);
    json_t *root = post_json(&f, CHAT, "{" HI ",'reasoning_effort':'none','logprobs':true,'top_logprobs':2}");
    assert_int_equal(json_array_size(at(root, "choices.0.logprobs.content")), 3); /* not the end token */
    assert_string_equal(text_at(root, "choices.0.logprobs.content.0.token"), "h");
    assert_true(json_real_value(at(root, "choices.0.logprobs.content.0.logprob")) == -0.5);
    assert_string_equal(text_at(root, "choices.0.logprobs.content.1.token"), "\xef\xbf\xbd");
    assert_int_equal(int_at(root, "choices.0.logprobs.content.1.bytes.0"), 0xc3);
    assert_int_equal(json_array_size(at(root, "choices.0.logprobs.content.0.top_logprobs")), 2);
    assert_string_equal(text_at(root, "choices.0.logprobs.content.0.top_logprobs.1.token"), "i");
    json_decref(root);

    root = post_json(&f, TEXT, "{'prompt':'x','logprobs':2}");
    assert_string_equal(text_at(root, "choices.0.logprobs.tokens.0"), "h");
    assert_string_equal(text_at(root, "choices.0.logprobs.tokens.1"), "bytes:\\xc3");
    assert_int_equal(int_at(root, "choices.0.logprobs.text_offset.1"), 1);
    assert_true(json_real_value(json_object_get(at(root, "choices.0.logprobs.top_logprobs.0"), "i")) == -1.5);
    json_decref(root);

    stream s = post_stream(&f, CHAT, "{" HI ",'stream':true,'logprobs':true}", true);
    size_t n = 0;
    for (int i = 0; i < s.n; i++) n += json_array_size(at(s.chunks[i], "choices.0.logprobs.content"));
    assert_int_equal(n, 3);
    free_stream(&s);
    fixture_close(&f);
}

/* ---- other routes ---- */

static void test_models(void **state)
{
    (void)state;
    fixture f;
    td_tokenizer *tok = fake_tokenizer();
    static const char *const aliases[] = { "alias/one" };
    td_server_options options = fixture_options(tok);
    options.aliases = aliases;
    options.n_aliases = 1;
    options.strict_model = true;
    fixture_open(&f, NULL, &options);
    http_reply reply = http_call(f.port, "GET", "/v1/models/?x=1", NULL, NULL);
    assert_int_equal(reply.status, 200);
    json_t *root = json_of(&reply);
    assert_int_equal(json_array_size(at(root, "data")), 2);
    assert_string_equal(text_at(root, "data.0.id"), "test-model");
    assert_int_equal(int_at(root, "data.1.max_model_len"), 400);
    assert_int_equal(int_at(root, "data.1.context_length"), 400);
    assert_null(at(root, "data.0.max_tokens"));
    json_decref(root);
    http_free(&reply);
    reply = http_call(f.port, "GET", "/v1/models/alias/one", NULL, NULL);
    assert_int_equal(reply.status, 200);
    assert_non_null(strstr(reply.body, "\"id\":\"alias/one\""));
    http_free(&reply);
    reply = http_call(f.port, "GET", "/models/nope", NULL, NULL);
    assert_int_equal(reply.status, 404);
    assert_non_null(strstr(reply.body, "model_not_found"));
    http_free(&reply);
    expect(&f, TEXT, "{'prompt':'x','model':'nope'}", 404, "'param':'model','code':'model_not_found'");
    expect(&f, TEXT, "{'prompt':'x','model':'alias/one'}", 200, "'model':'alias/one'");
    fixture_close(&f);
}

static void test_tokenize(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, NULL, NULL);
    expect(&f, "/tokenize", "{'prompt':'h\xc3\xa4<think>'}", 200,
           "{'count':4,'max_model_len':400,'tokens':[104,195,164,265],'token_strs':null}");
    expect(&f, "/v1/tokenize", "{'prompt':'h\xc3\xa4','return_token_strs':true}", 200,
           "'token_strs':['h','\xef\xbf\xbd','\xef\xbf\xbd']");
    expect(&f, "/tokenize", "{'prompt':'<|image|>'}", 200, "'count':9"); /* quoted: text */
    expect(&f, "/tokenize", "{" HI ",'reasoning_effort':'none'}", 200, "'tokens':[257,258,260,104,105,261,265,266]");
    expect(&f, "/tokenize", "{}", 400, "prompt or messages must be given");
    expect(&f, "/tokenize", "{'prompt':5}", 400, "'param':'prompt'");
    expect(&f, "/tokenize", "{" HI ",'chat_template':'x'}", 400, "'param':'chat_template'");
    expect(&f, "/tokenize", "{" HI ",'add_generation_prompt':true,'continue_final_message':true}", 400,
           "'param':'continue_final_message'");
    expect(&f, "/detokenize", "{'tokens':[104,195,164,265]}", 200, "{'prompt':'h\xc3\xa4<think>'}");
    expect(&f, "/v1/detokenize", "{'tokens':[195]}", 200, "{'prompt':'\xef\xbf\xbd'}");
    expect(&f, "/detokenize", "{'tokens':[]}", 200, "{'prompt':''}");
    expect(&f, "/detokenize", "{'tokens':[271]}", 400, "'param':'tokens'");
    expect(&f, "/detokenize", "{'tokens':[-1]}", 400, "'param':'tokens'");
    expect(&f, "/detokenize", "{'tokens':'x'}", 400, "'param':'tokens'");
    fixture_close(&f);
}

static void expect_get(const fixture *f, const char *path, int status, const char *text)
{
    http_reply reply = http_call(f->port, "GET", path, NULL, NULL);
    if (reply.status != status || !strstr(reply.body, text)) fail_msg("GET %s: %d %s", path, reply.status, reply.body);
    http_free(&reply);
}

static void test_states(void **state)
{
    (void)state;
    fixture f = { .tokenizer = fake_tokenizer() };
    td_server_options options = fixture_options(f.tokenizer);
    td_error err;
    f.engine = fake_engine_create(f.tokenizer, &(fake_script){ .reply = "x" });
    assert_int_equal(td_server_create(&options, &f.server, &err), TD_OK);
    f.port = td_server_port(f.server);
    expect_get(&f, "/health", 503, "\"status\":\"loading\",\"progress\":null");
    td_server_progress(f.server, 3, 10);
    expect_get(&f, "/v1/health", 503, "\"progress\":{\"done\":3,\"total\":10}");
    http_reply reply = http_call(f.port, "GET", "/v1/models", NULL, NULL);
    assert_int_equal(reply.status, 503);
    assert_string_equal(http_header(&reply, "Retry-After"), "30");
    assert_non_null(strstr(reply.body, "\"code\":\"loading\""));
    http_free(&reply);
    expect(&f, CHAT, "{" HI "}", 503, "'code':'loading'");
    expect_get(&f, "/ping", 200, "");
    expect_get(&f, "/version", 200, "{\"version\":\"1.2.3\"}");
    expect_get(&f, "/metrics", 200, "process_start_time_seconds");

    td_server_ready(f.server, f.engine);
    expect_get(&f, "/health", 200, "\"status\":\"ok\",\"ok\":true");
    expect_get(&f, "/health/", 200, "\"streams\":{\"decoding\":0,");
    expect(&f, TEXT, "{'prompt':'x'}", 200, "'text':'x'");

    fake_engine_set(f.engine, &(fake_script){ .reply = "x", .health = TD_EPEER });
    expect_get(&f, "/health", 503, "\"message\":\"the other rank is gone\"");
    td_server_failed(f.server, "rank 1 is gone");
    expect_get(&f, "/health", 503, "\"status\":\"unhealthy\"");
    expect(&f, TEXT, "{'prompt':'x'}", 503, "'code':'unavailable'");
    fixture_close(&f);
}

static void test_metrics(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, NULL, NULL);
    expect(&f, TEXT, "{'prompt':'abc'}", 200, "'stop'");
    expect(&f, TEXT, "{'prompt':'abc','max_tokens':2}", 200, "'length'");
    expect(&f, TEXT, "{'prompt':5}", 400, "error");
    http_reply reply =
        fixture_metrics(&f, "\nhttp_requests_total{handler=\"/v1/completions\",method=\"POST\",status=\"4xx\"} 1\n");
    assert_string_equal(http_header(&reply, "Content-Type"), "text/plain; version=0.0.4; charset=utf-8");
    static const char *const lines[] = {
        "\ntandem:requests_total{key=\"\",status=\"stop\"} 1\n",
        "\ntandem:requests_total{key=\"\",status=\"refused\"} 1\n",
        "\nvllm:request_success_total{model_name=\"test-model\",finished_reason=\"length\"} 1\n",
        "\ntandem:generation_tokens_total 16\n",
        "\nvllm:generation_tokens_total{model_name=\"test-model\"} 16\n",
        "\ntandem:generation_tokens_running 0\n",
        "\ntandem:prompt_tokens_total 6\n",
        "\ntandem:request_latency_seconds_count 2\n",
        "\ntandem:request_generation_tokens_sum 16\n",
        "\nvllm:e2e_request_latency_seconds_bucket{model_name=\"test-model\",le=\"+Inf\"} 2\n",
        "\ntandem:kv_cache_usage_ratio{pool=\"kv\"} 0.5\n",
        "# TYPE tandem:request_queue_seconds histogram\n",
        "\nprocess_open_fds ",
        "\nprocess_resident_memory_bytes ",
    };
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++)
        if (!strstr(reply.body, lines[i])) fail_msg("missing: %s\nin\n%s", lines[i], reply.body);
    http_free(&reply);
    fixture_close(&f);
}

static void test_keepalive(void **state)
{
    (void)state;
    fixture f;
    td_tokenizer *tok = fake_tokenizer();
    td_server_options options = fixture_options(tok);
    options.keepalive_s = 0.1;
    fixture_open(&f, &(fake_script){ .reply = "abc", .prefill_s = 0.45 }, &options);
    http_reply reply = fixture_post(&f, TEXT, "{'prompt':'x','stream':true}");
    assert_true(reply.first_s < 0.1); /* headers do not wait for the prompt */
    int n = 0;
    for (const char *c = reply.body; (c = strstr(c, ": keepalive\n\n")); c++) n++;
    assert_in_range(n, 1, 4);
    assert_null(strstr(strstr(reply.body, "[DONE]"), "keepalive"));
    stream s = parse_stream(reply.body, false);
    assert_string_equal(s.content, "abc");
    free_stream(&s);
    http_free(&reply);
    fixture_close(&f);
}

int main(void)
{
    td_log_init(getenv("TD_TEST_LOG") ? TD_LOG_DEBUG : TD_LOG_ERROR, -1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_completion),
        cmocka_unit_test(test_prompt_forms),
        cmocka_unit_test(test_chat),
        cmocka_unit_test(test_chat_stream),
        cmocka_unit_test(test_completion_stream),
        cmocka_unit_test(test_stop),
        cmocka_unit_test(test_cut_character),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_models),
        cmocka_unit_test(test_tokenize),
        cmocka_unit_test(test_states),
        cmocka_unit_test(test_metrics),
        cmocka_unit_test(test_keepalive),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
