/* The routes over a real socket and a fake engine: shapes of replies and streams, every field, every refusal. */
#include "server_fixture.h"

#include "base/clock.h"
#include "base/log.h"

#include <jansson.h>
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

/* The metrics page once it holds a line: a request is counted after its last byte was sent. */
static http_reply metrics_with(const fixture *f, const char *line)
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

static void test_metrics(void **state)
{
    (void)state;
    fixture f;
    fixture_open(&f, NULL, NULL);
    expect(&f, TEXT, "{'prompt':'abc'}", 200, "'stop'");
    expect(&f, TEXT, "{'prompt':'abc','max_tokens':2}", 200, "'length'");
    expect(&f, TEXT, "{'prompt':5}", 400, "error");
    http_reply reply =
        metrics_with(&f, "\nhttp_requests_total{handler=\"/v1/completions\",method=\"POST\",status=\"4xx\"} 1\n");
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
    http_reply reply = metrics_with(&f, "\ntandem:client_disconnections_total 8\n");
    assert_non_null(strstr(reply.body, "status=\"canceled\"} 8\n"));
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
        cmocka_unit_test(test_completion),
        cmocka_unit_test(test_prompt_forms),
        cmocka_unit_test(test_chat),
        cmocka_unit_test(test_chat_stream),
        cmocka_unit_test(test_completion_stream),
        cmocka_unit_test(test_stop),
        cmocka_unit_test(test_cut_character),
        cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_field_refusals),
        cmocka_unit_test(test_tolerated),
        cmocka_unit_test(test_window),
        cmocka_unit_test(test_bodies),
        cmocka_unit_test(test_models),
        cmocka_unit_test(test_tokenize),
        cmocka_unit_test(test_states),
        cmocka_unit_test(test_metrics),
        cmocka_unit_test(test_queue_full),
        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_client_leaves),
        cmocka_unit_test(test_keepalive),
        cmocka_unit_test(test_stop_server),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
