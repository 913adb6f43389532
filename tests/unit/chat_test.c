/* text/chat.h: the prompts of 140 conversations as the original template renders them (tests/oracle/chat), the cases
 * that other implementations got wrong, and every refusal with its field. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/json_write.h"
#include "text/chat.h"

typedef struct rendering {
    td_arena arena;
    char *body;
    td_status status;
    td_chat_prompt prompt;
    char param[TD_CHAT_PARAM_CAP];
    td_error err;
} rendering;

static const td_chat_options plain = { .effort = TD_EFFORT_MAX };

static rendering render_with(const char *body, const td_chat_options *options)
{
    rendering r = { .body = strdup(body) };
    const td_json *request;
    td_arena_init(&r.arena, 0);
    if (td_json_parse(&r.arena, r.body, strlen(body), &request, &r.err)) fail_msg("%s: %s", body, r.err.text);
    r.status = td_chat_render(&r.arena, request, options, &r.prompt, r.param, &r.err);
    return r;
}

static void done(rendering *r)
{
    td_arena_deinit(&r->arena);
    free(r->body);
}

#define HEAD "[gMASK]<sop><|system|>Reasoning Effort: Max"
#define GEN  "<|assistant|><think>"

static void expect_with(const char *body, const td_chat_options *options, const char *prompt)
{
    rendering r = render_with(body, options);
    if (r.status) fail_msg("%s: %s", body, r.err.text);
    assert_string_equal(r.prompt.text, prompt);
    assert_int_equal(r.prompt.n_bytes, strlen(prompt));
    done(&r);
}

static void expect(const char *body, const char *prompt)
{
    expect_with(body, &plain, prompt);
}

/* messages as the inside of the array; rest: further members, with their comma */
static void expect_messages(const char *messages, const char *rest, const char *prompt)
{
    char *body = malloc(strlen(messages) + strlen(rest) + 64);
    sprintf(body, "{\"messages\":[%s]%s}", messages, rest);
    expect(body, prompt);
    free(body);
}

static void refuse(const char *body, const char *param, const char *text)
{
    rendering r = render_with(body, &plain);
    assert_int_equal(r.status, TD_EINVAL);
    assert_string_equal(r.param, param);
    assert_string_equal(r.err.text, text);
    done(&r);
}

#define USER(text)      "{\"role\":\"user\",\"content\":\"" text "\"}"
#define ASSISTANT(text) "{\"role\":\"assistant\",\"content\":\"" text "\"}"
#define SYSTEM(text)    "{\"role\":\"system\",\"content\":\"" text "\"}"

/* ---- the template's own prompts ---- */

static char *read_file(const char *path, size_t *n_bytes)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    *n_bytes = (size_t)ftell(file);
    rewind(file);
    char *text = malloc(*n_bytes + 1);
    assert_int_equal(fread(text, 1, *n_bytes, file), *n_bytes);
    fclose(file);
    return text;
}

static void test_vectors(void **state)
{
    (void)state;
    size_t n_bytes, wanted_bytes;
    char *text = read_file("tests/oracle/chat/render.json", &n_bytes), param[TD_CHAT_PARAM_CAP];
    td_arena arena;
    td_error err;
    const td_json *cases;
    td_chat_prompt prompt;
    td_arena_init(&arena, 0);
    assert_int_equal(td_json_parse(&arena, text, n_bytes, &cases, &err), TD_OK);
    assert_int_equal(td_json_count(cases), 140);
    for (size_t i = 0; i < td_json_count(cases); i++) {
        const td_json *request = td_json_at(cases, i);
        const char *wanted = td_json_string(td_json_get(request, "rendered"), &wanted_bytes);
        if (td_chat_render(&arena, request, &plain, &prompt, param, &err)) fail_msg("case %zu: %s", i, err.text);
        if (prompt.n_bytes != wanted_bytes || memcmp(prompt.text, wanted, wanted_bytes) != 0)
            fail_msg("case %zu:\n%s\nexpected:\n%s", i, prompt.text, wanted);
        for (size_t k = 0; k < prompt.n_media; k++) {
            const td_chat_media *m = &prompt.media[k];
            assert_memory_equal(prompt.text + m->at, m->kind == TD_MEDIA_IMAGE ? "<|image|>" : "<|video|>", m->n_bytes);
            assert_int_equal(m->n_bytes, 9);
            assert_true(k == 0 || m->at > prompt.media[k - 1].at);
        }
    }
    td_arena_deinit(&arena);
    free(text);
}

/* ---- thinking ---- */

static void test_effort(void **state)
{
    (void)state;
    static const char *const low = "[gMASK]<sop><|system|>Reasoning Effort: Low<|user|>Hi" GEN;
    static const char *const high = "[gMASK]<sop><|system|>Reasoning Effort: High<|user|>Hi" GEN;
    static const char *const max = HEAD "<|user|>Hi" GEN;
    static const char *const off = "[gMASK]<sop><|user|>Hi<|assistant|><think></think>";
    static const struct {
        const char *rest, *prompt;
    } cases[] = {
        { "", max },
        { ",\"reasoning_effort\":null", max },
        { ",\"reasoning_effort\":\"minimal\"", low },
        { ",\"reasoning_effort\":\"low\"", low },
        { ",\"reasoning_effort\":\"medium\"", high },
        { ",\"reasoning_effort\":\"high\"", high },
        { ",\"reasoning_effort\":\"xhigh\"", max },
        { ",\"reasoning_effort\":\"max\"", max },
        { ",\"reasoning_effort\":\"none\"", off },
        { ",\"chat_template_kwargs\":{\"reasoning_effort\":\"low\",\"unknown\":1}", low },
        { ",\"reasoning_effort\":\"high\",\"chat_template_kwargs\":{\"reasoning_effort\":\"low\"}", high },
        { ",\"chat_template_kwargs\":null", max },
        { ",\"chat_template_kwargs\":{\"enable_thinking\":false},\"reasoning_effort\":\"low\"", off },
        { ",\"chat_template_kwargs\":{\"enable_thinking\":true},\"reasoning_effort\":\"none\"", max },
        { ",\"chat_template_kwargs\":{\"enable_thinking\":true},\"reasoning_effort\":\"low\"", low },
        { ",\"chat_template_kwargs\":{\"thinking\":false}", off },
        { ",\"chat_template_kwargs\":{\"thinking\":{\"type\":\"disabled\"}}", off },
        { ",\"chat_template_kwargs\":{\"thinking\":{\"type\":\"auto\"}}", max },
        { ",\"chat_template_kwargs\":{\"thinking\":false,\"enable_thinking\":true}", max },
        { ",\"thinking\":{\"type\":\"disabled\"}", off },
        { ",\"thinking\":{\"type\":\"enabled\"},\"reasoning_effort\":\"none\"", max },
        { ",\"enable_thinking\":false", off },
        { ",\"enable_thinking\":false,\"chat_template_kwargs\":{\"enable_thinking\":true}", max },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_messages(USER("Hi"), cases[i].rest, cases[i].prompt);

    const td_chat_options none = { .effort = TD_EFFORT_NONE },
                          tail = { .effort = TD_EFFORT_LOW, .effort_at_tail = true };
    expect_with("{\"messages\":[" USER("Hi") "]}", &none, off);
    expect_with("{\"messages\":[" USER("Hi") "],\"enable_thinking\":true}", &none, max);
    expect_with("{\"messages\":[" USER("Hi") "],\"reasoning_effort\":\"low\"}", &none, low);
    expect_with("{\"messages\":[" USER("Hi") "]}", &tail,
                "[gMASK]<sop><|user|>Hi<|system|>Reasoning Effort: Low<|assistant|><think>");
    refuse("{\"messages\":[" USER("Hi") "],\"reasoning_effort\":\"fast\"}", "reasoning_effort",
           "reasoning_effort: must be one of none, minimal, low, medium, high, xhigh, max");
    refuse("{\"messages\":[" USER("Hi") "],\"reasoning_effort\":1}", "reasoning_effort",
           "reasoning_effort: must be one of none, minimal, low, medium, high, xhigh, max");
    refuse("{\"messages\":[" USER("Hi") "],\"chat_template_kwargs\":[]}", "chat_template_kwargs",
           "chat_template_kwargs: must be an object");
    refuse("{\"messages\":[" USER("Hi") "],\"chat_template_kwargs\":{\"clear_thinking\":1}}",
           "chat_template_kwargs.clear_thinking", "chat_template_kwargs.clear_thinking: must be true or false");
}

static void test_reply_start(void **state)
{
    (void)state;
    static const struct {
        const char *body;
        td_reply_start start;
        td_chat_effort effort;
    } cases[] = {
        { "{\"messages\":[" USER("q") "]}", TD_REPLY_IN_REASONING, TD_EFFORT_MAX },
        { "{\"messages\":[" USER("q") "],\"reasoning_effort\":\"none\"}", TD_REPLY_AT_ANSWER, TD_EFFORT_NONE },
        { "{\"messages\":[" USER("q") "," ASSISTANT("ab") "],\"add_generation_prompt\":false,"
                                                          "\"continue_final_message\":true}",
          TD_REPLY_IN_ANSWER, TD_EFFORT_MAX },
        { "{\"messages\":[" USER("q") ",{\"role\":\"assistant\",\"reasoning\":\"r\"}],\"add_generation_prompt\":false,"
                                      "\"continue_final_message\":true}",
          TD_REPLY_IN_REASONING, TD_EFFORT_MAX },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rendering r = render_with(cases[i].body, &plain);
        assert_int_equal(r.status, TD_OK);
        assert_int_equal(r.prompt.start, cases[i].start);
        assert_int_equal(r.prompt.effort, cases[i].effort);
        done(&r);
    }
}

static void test_earlier_reasoning(void **state)
{
    (void)state;
    /* thinking off now: what was thought before still shows */
    expect_messages(USER("q") ",{\"role\":\"assistant\",\"reasoning_content\":\"r\",\"content\":\"a\"}," USER("z"),
                    ",\"reasoning_effort\":\"none\"",
                    "[gMASK]<sop><|user|>q<|assistant|><think>r</think>a<|user|>z<|assistant|><think></think>");
    expect_messages(USER("q") ",{\"role\":\"assistant\",\"reasoning\":\"r\",\"content\":\"a\"}," USER("z"), "",
                    HEAD "<|user|>q<|assistant|><think>r</think>a<|user|>z" GEN);
    expect_messages(
        USER("q") ",{\"role\":\"assistant\",\"reasoning_content\":\"\",\"reasoning\":\"s\",\"content\":\"a\"}",
        ",\"add_generation_prompt\":false", HEAD "<|user|>q<|assistant|><think>s</think>a");
    /* R is not stripped, the body is, by Python's idea of white space */
    expect_messages("{\"role\":\"assistant\",\"reasoning_content\":\" r\\n\",\"content\":\"\\u001c\\u3000\\u2029a "
                    "b\\u0085\\u00a0 \"}",
                    ",\"add_generation_prompt\":false", HEAD "<|assistant|><think> r\n</think>a b");
    expect_messages(ASSISTANT("\\u200ba\\ufeff"), ",\"add_generation_prompt\":false",
                    HEAD "<|assistant|><think></think>\xe2\x80\x8b"
                         "a\xef\xbb\xbf");
    expect_messages(ASSISTANT(" \\n\\u2003 "), ",\"add_generation_prompt\":false", HEAD "<|assistant|><think></think>");
    /* tags in the text */
    expect_messages(ASSISTANT("<think>part1</think>mid</think>visible"), ",\"add_generation_prompt\":false",
                    HEAD "<|assistant|><think>part1</think>visible");
    expect_messages(ASSISTANT("x<think>a<think>b</think>c"), ",\"add_generation_prompt\":false",
                    HEAD "<|assistant|><think>b</think>c");
    expect_messages(ASSISTANT("</think>c<think>d"), ",\"add_generation_prompt\":false",
                    HEAD "<|assistant|><think></think>c<think>d");
    expect_messages(ASSISTANT("<think>abc"), ",\"add_generation_prompt\":false",
                    HEAD "<|assistant|><think></think><think>abc");
    /* with a field of its own the text stays whole */
    expect_messages("{\"role\":\"assistant\",\"reasoning_content\":\"r\",\"content\":\"a</think>b\"}",
                    ",\"add_generation_prompt\":false", HEAD "<|assistant|><think>r</think>a</think>b");
    /* clear_thinking: only what follows the last user message keeps it */
    static const char *const loop =
        USER("q") ",{\"role\":\"assistant\",\"reasoning_content\":\"r\",\"content\":\"done\"}," USER(
            "q2") ","
                  "{\"role\":\"assistant\",\"reasoning_content\":\"r3\",\"content\":null,\"tool_calls\":[{\"id\":\"c\","
                  "\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"c\","
                  "\"content\":\"C\"}";
    static const char *const cleared =
        HEAD "<|user|>q<|assistant|><think></think>done<|user|>q2<|assistant|><think>r3</think><tool_call>f</tool_call>"
             "<|observation|><tool_response>C</tool_response>" GEN;
    expect_messages(loop, ",\"chat_template_kwargs\":{\"clear_thinking\":true}", cleared);
    expect_messages(loop, ",\"clear_thinking\":true", cleared);
    expect_messages(USER("q") "," ASSISTANT("<think>r</think>a") "," USER("z"), ",\"clear_thinking\":true",
                    HEAD "<|user|>q<|assistant|><think></think>a<|user|>z" GEN);
}

static const char *remembered(void *context, const char *id, size_t n_bytes, size_t *n_text_bytes)
{
    *n_text_bytes = 99;
    if (n_bytes != 2 || memcmp(id, "c2", 2) != 0) return NULL;
    *n_text_bytes = strlen((const char *)context);
    return (const char *)context;
}

static void test_recall(void **state)
{
    (void)state;
    const td_chat_options options = { .effort = TD_EFFORT_MAX, .recall = remembered, .recall_context = "thought" };
    const char *calls = "\"tool_calls\":[{\"id\":\"c1\",\"function\":{\"name\":\"f\"}},{\"id\":\"c2\",\"function\":"
                        "{\"name\":\"g\",\"arguments\":null}}]}],\"add_generation_prompt\":false}";
    char body[512];
    sprintf(body, "{\"messages\":[{\"role\":\"assistant\",\"content\":null,%s", calls);
    expect_with(body, &options,
                HEAD "<|assistant|><think>thought</think><tool_call>f</tool_call><tool_call>g</tool_call>");
    sprintf(body, "{\"messages\":[{\"role\":\"assistant\",\"reasoning\":\"own\",%s", calls);
    expect_with(body, &options, HEAD "<|assistant|><think>own</think><tool_call>f</tool_call><tool_call>g</tool_call>");
    sprintf(body, "{\"messages\":[{\"role\":\"assistant\",\"content\":\"w</think>x\",%s", calls);
    expect_with(body, &options, HEAD "<|assistant|><think>w</think>x<tool_call>f</tool_call><tool_call>g</tool_call>");
}

/* ---- messages ---- */

static void test_messages(void **state)
{
    (void)state;
    expect_messages(SYSTEM("You are terse.") "," USER("Hi"), "", HEAD "<|system|>You are terse.<|user|>Hi" GEN);
    expect_messages(USER("  hi \\n"), "", HEAD "<|user|>  hi \n" GEN);
    expect_messages("{\"role\":\"user\",\"content\":null},{\"role\":\"user\"}", "", HEAD "<|user|><|user|>" GEN);
    /* leading system and developer messages merge, later ones stay where they are */
    expect_messages(SYSTEM("A") ",{\"role\":\"developer\",\"content\":[{\"type\":\"text\",\"text\":\"B\"}]}," SYSTEM(
                        "C") "," USER("u") "," ASSISTANT("ok") ",{\"role\":\"developer\",\"content\":\"D\"}," USER("v"),
                    "", HEAD "<|system|>A\n\nB\n\nC<|user|>u<|assistant|><think></think>ok<|system|>D<|user|>v" GEN);
    /* parts concatenate without separator */
    expect_messages(
        "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"input_text\",\"text\":"
        "\"b\"},\"c\",{\"type\":\"output_text\",\"text\":\"d\"},{\"type\":\"refusal\",\"refusal\":\"e\"}]},"
        "{\"role\":\"user\",\"content\":[]}",
        "", HEAD "<|user|>abcde<|user|>" GEN);
    /* tags in user text are text of the prompt like any other */
    expect_messages(USER("<|user|></think>"), "", HEAD "<|user|><|user|></think>" GEN);
}

static void test_zero_byte(void **state)
{
    (void)state;
    rendering r = render_with("{\"messages\":[" USER("a\\u0000b") "]}", &plain);
    assert_int_equal(r.prompt.n_bytes, strlen(HEAD "<|user|>a") + 2 + strlen(GEN));
    done(&r);
}

static void test_media(void **state)
{
    (void)state;
    rendering r =
        render_with("{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"<|image|>\"},{"
                    "\"type\":\"image_url\","
                    "\"image_url\":{\"url\":\"data:x\"}},{\"type\":\"text\",\"text\":\"What?\"}]},{\"role\":"
                    "\"assistant\",\"content\":"
                    "[{\"type\":\"text\",\"text\":\" </think> <|image|> \"},{\"type\":\"image\",\"image\":\"y\"}]},"
                    "{\"role\":\"tool\",\"content\":[{\"type\":\"video_url\",\"video_url\":{\"url\":\"z\"}}]}]}",
                    &plain);
    assert_int_equal(r.status, TD_OK);
    assert_string_equal(r.prompt.text, HEAD
                        "<|user|><|image|><|begin_of_image|><|image|><|end_of_image|>What?<|assistant|><think> "
                        "</think><|image|> <|begin_of_image|><|image|><|end_of_image|><|observation|><tool_response>"
                        "<|begin_of_video|><|video|><|end_of_video|></tool_response>" GEN);
    assert_int_equal(r.prompt.n_media, 3);
    static const char *const params[] = { "messages[0].content[1]", "messages[1].content[1]",
                                          "messages[2].content[0]" };
    static const char *const before[] = { "<|begin_of_image|>", "<|begin_of_image|>", "<|begin_of_video|>" };
    for (int i = 0; i < 3; i++) {
        const td_chat_media *m = &r.prompt.media[i];
        assert_string_equal(m->param, params[i]);
        assert_memory_equal(r.prompt.text + m->at - 18, before[i], 18); /* not one of the quoted ones */
        assert_memory_equal(r.prompt.text + m->at, i < 2 ? "<|image|>" : "<|video|>", 9);
        assert_int_equal(m->kind, i < 2 ? TD_MEDIA_IMAGE : TD_MEDIA_VIDEO);
    }
    assert_true(td_json_equals(td_json_get(r.prompt.media[1].part, "image"), "y"));
    done(&r);
}

static void test_continue(void **state)
{
    (void)state;
    static const char *const ending = ",\"add_generation_prompt\":false,\"continue_final_message\":true";
    expect_messages(USER("q") "," ASSISTANT(" The answer "), ending,
                    HEAD "<|user|>q<|assistant|><think></think>The answer");
    expect_messages(USER("q") ",{\"role\":\"assistant\",\"reasoning_content\":\"so far \",\"content\":\"\"}", ending,
                    HEAD "<|user|>q<|assistant|><think>so far ");
    expect_messages(USER("q") ",{\"role\":\"assistant\",\"reasoning_content\":\"r\",\"content\":\"a\",\"tool_calls\":"
                              "[{\"function\":{\"name\":\"f\"}}]}",
                    ending, HEAD "<|user|>q<|assistant|><think>r</think>a");
    expect_messages(USER("q") "," ASSISTANT(""), ending, HEAD "<|user|>q<|assistant|><think></think>");
    expect_messages(USER("q") ",{\"role\":\"assistant\",\"reasoning_content\":\"r\"}",
                    ",\"add_generation_prompt\":false", HEAD "<|user|>q<|assistant|><think>r</think>");
    refuse("{\"messages\":[" ASSISTANT("a") "],\"continue_final_message\":true}", "continue_final_message",
           "continue_final_message: cannot be set together with add_generation_prompt");
    refuse("{\"messages\":[" USER("a") "],\"continue_final_message\":true,\"add_generation_prompt\":false}",
           "continue_final_message", "continue_final_message: the last message must be an assistant message");
    refuse("{\"messages\":[" USER("a") "],\"add_generation_prompt\":\"no\"}", "add_generation_prompt",
           "add_generation_prompt: must be true or false");
}

static void test_refusals(void **state)
{
    (void)state;
    refuse("{}", "messages", "messages must be a non-empty list");
    refuse("[]", "messages", "messages must be a non-empty list");
    refuse("{\"messages\":[]}", "messages", "messages must be a non-empty list");
    refuse("{\"messages\":{\"role\":\"user\"}}", "messages", "messages must be a non-empty list");
    refuse("{\"messages\":[" USER("a") ",5]}", "messages[1]", "messages[1]: must be an object");
    refuse("{\"messages\":[{\"role\":\"critic\"}]}", "messages[0].role",
           "messages[0].role: must be one of system, developer, user, assistant, tool");
    refuse("{\"messages\":[{\"content\":\"a\"}]}", "messages[0].role",
           "messages[0].role: must be one of system, developer, user, assistant, tool");
    static const char *const contents[] = { "5", "true", "{\"type\":\"text\",\"text\":\"a\"}", "1.5" };
    for (int i = 0; i < 4; i++)
        for (int tool = 0; tool < 2; tool++) {
            char body[256];
            sprintf(body, "{\"messages\":[{\"role\":\"%s\",\"content\":%s}]}", tool ? "tool" : "user", contents[i]);
            refuse(body, "messages[0].content", "messages[0].content: must be a string or an array of content parts");
        }
    refuse("{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}", "messages[0].content[0].text",
           "messages[0].content[0].text: must be a string");
    refuse("{\"messages\":[{\"role\":\"user\",\"content\":[7]}]}", "messages[0].content[0]",
           "messages[0].content[0]: content parts must be objects");
    refuse("{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"input_audio\"}]}]}",
           "messages[0].content[0].type", "messages[0].content[0].type: this model does not take audio");
    refuse("{\"messages\":[{\"role\":\"user\",\"content\":[\"\",{\"type\":\"file\"}]}]}", "messages[0].content[1].type",
           "messages[0].content[1].type: unknown type of content part (text, image_url and video_url are known)");
    refuse("{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":{}}]}", "messages[0].tool_calls",
           "messages[0].tool_calls: must be an array");
    refuse("{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"arguments\":\"{}\"}}]}]}",
           "messages[0].tool_calls[0].function.name",
           "messages[0].tool_calls[0].function.name: must be a non-empty string");
    refuse("{\"messages\":[{\"role\":\"tool\",\"content\":[{\"output\":3}]}]}", "messages[0].content[0].output",
           "messages[0].content[0].output: must be a string or an array of content parts");
}

/* ---- tools ---- */

#define TOOLS_HEAD                                                                                                     \
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided "    \
    "with "                                                                                                            \
    "function signatures within <tools></tools> XML tags:\n<tools>\n"
#define TOOLS_TAIL                                                                                                     \
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"    \
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value><arg_key>{arg-key-2}" \
    "</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
#define TWO_TOOLS                                                                                                      \
    ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"strict\":true,\"d\\\"\":"                       \
    "\"M\xc3\xa9t\xc3\xa9o\"}},"                                                                                       \
    "{\"name\":\"now\",\"parameters\":{}}]"
#define F_JSON   "{\"name\": \"f\", \"d\"\": \"M\xc3\xa9t\xc3\xa9o\"}\n"
#define NOW_JSON "{\"name\": \"now\", \"parameters\": {}}\n"

static void test_tools(void **state)
{
    (void)state;
    expect_messages(SYSTEM("Be brief.") "," USER("W?"), TWO_TOOLS ",\"reasoning_effort\":\"high\"",
                    "[gMASK]<sop><|system|>Reasoning Effort: High" TOOLS_HEAD F_JSON NOW_JSON TOOLS_TAIL
                    "<|system|>Be brief.<|user|>W?" GEN);
    expect_messages(USER("W?"), TWO_TOOLS ",\"tool_choice\":\"none\"", HEAD "<|user|>W?" GEN);
    expect_messages(USER("W?"), TWO_TOOLS ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"now\"}}",
                    HEAD TOOLS_HEAD NOW_JSON TOOLS_TAIL "<|user|>W?" GEN);
    expect_messages(USER("W?"),
                    TWO_TOOLS ",\"tool_choice\":{\"type\":\"allowed_tools\",\"allowed_tools\":{\"mode\":"
                              "\"required\",\"tools\":[]}}",
                    HEAD TOOLS_HEAD F_JSON NOW_JSON TOOLS_TAIL "<|user|>W?" GEN);
    expect_messages(USER("W?"), ",\"functions\":[{\"name\":\"now\",\"parameters\":{}}],\"function_call\":\"auto\"",
                    HEAD TOOLS_HEAD NOW_JSON TOOLS_TAIL "<|user|>W?" GEN);
    expect_messages(USER("W?"), ",\"tools\":[{\"type\":\"function\",\"name\":\"g\",\"defer_loading\":false}]",
                    HEAD TOOLS_HEAD "{\"type\": \"function\", \"name\": \"g\"}\n" TOOLS_TAIL "<|user|>W?" GEN);
    /* a number's digits, floats as Python prints them */
    expect_messages(
        USER("W?"),
        ",\"tools\":[{\"name\":\"n\",\"x\":{\"a\":1.0,\"b\":1e100,\"c\":1e-7,\"d\":-0,\"e\":-0.0,\"f\":1e400,"
        "\"g\":100000000000000000.0,\"h\":12345678.90,\"j\":123456789012345678901234567890,\"k\":[null,true,"
        "[],{}],\"l\":\"\\u2028/\\u007f\\u0001\\n\\ud800\"}}]",
        HEAD TOOLS_HEAD
        "{\"name\": \"n\", \"x\": {\"a\": 1.0, \"b\": 1e+100, \"c\": 1e-07, \"d\": 0, \"e\": "
        "-0.0, \"f\": Infinity, \"g\": 1e+17, \"h\": 12345678.9, \"j\": 123456789012345678901234567890, "
        "\"k\": [null, true, [], {}], \"l\": \"\xe2\x80\xa8/\x7f\\u0001\\n\xef\xbf\xbd\"}}\n" TOOLS_TAIL
        "<|user|>W?" GEN);
    rendering r = render_with("{\"messages\":[" USER("a") "]" TWO_TOOLS ",\"tool_choice\":\"required\"}", &plain);
    assert_int_equal(r.prompt.choice, TD_CHOICE_REQUIRED);
    assert_int_equal(r.prompt.n_tools, 2);
    assert_true(td_json_equals(td_json_get(r.prompt.tools[1], "name"), "now"));
    done(&r);
}

static void test_tool_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *rest, *param, *text;
    } cases[] = {
        { ",\"tools\":{}", "tools", "tools: must be an array" },
        { ",\"tools\":[1]", "tools[0]", "tools[0]: must be an object" },
        { ",\"tools\":[{\"type\":\"web_search\"}]", "tools[0].type",
          "tools[0].type: only tools of type \"function\" are known" },
        { ",\"tools\":[{\"type\":\"function\",\"function\":1}]", "tools[0].function",
          "tools[0].function: must be an object" },
        { ",\"tools\":[{\"name\":\"a\"},{\"type\":\"function\",\"function\":{}}]", "tools[1].function.name",
          "tools[1].function.name: must be a non-empty string" },
        { ",\"tools\":[{\"name\":\"\"}]", "tools[0].name", "tools[0].name: must be a non-empty string" },
        { TWO_TOOLS ",\"tool_choice\":\"any\"", "tool_choice",
          "tool_choice: must be none, auto, required, or an object that names a function" },
        { TWO_TOOLS ",\"tool_choice\":3", "tool_choice",
          "tool_choice: must be none, auto, required, or an object that names a function" },
        { TWO_TOOLS ",\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"g\"}}", "tool_choice",
          "tool_choice requested unknown tool g" },
        { TWO_TOOLS ",\"tool_choice\":{\"type\":\"function\"}", "tool_choice",
          "tool_choice: the function's name is missing" },
        { TWO_TOOLS ",\"tool_choice\":{\"type\":\"mcp\"}", "tool_choice.type",
          "tool_choice.type: only type \"function\" and \"allowed_tools\" are known" },
        { ",\"tool_choice\":\"required\"", "tool_choice", "tool_choice: there are no tools to choose from" },
        { ",\"tools\":[],\"tool_choice\":{\"name\":\"f\"}", "tool_choice",
          "tool_choice: there are no tools to choose from" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char body[1024];
        sprintf(body, "{\"messages\":[" USER("a") "]%s}", cases[i].rest);
        refuse(body, cases[i].param, cases[i].text);
    }
}

#define CALLS(text) "{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[" text "]}"
#define CALL(id, name, arguments)                                                                                      \
    "{\"id\":\"" id "\",\"type\":\"function\",\"function\":{\"name\":\"" name "\",\"arguments\":" arguments "}}"
#define RESULT(id, text) "{\"role\":\"tool\",\"tool_call_id\":\"" id "\",\"content\":\"" text "\"}"

static void expect_call(const char *arguments, const char *rendered)
{
    char messages[1024], prompt[1024];
    sprintf(messages, "{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":%s}}]}",
            arguments);
    sprintf(prompt, HEAD "<|assistant|><think></think><tool_call>f%s</tool_call>", rendered);
    expect_messages(messages, ",\"add_generation_prompt\":false", prompt);
}

static void test_calls(void **state)
{
    (void)state;
    expect_call("{}", "");
    expect_call("null", "");
    expect_call("\"\"", "");
    expect_call("\" \\n\"", "");
    expect_call("\"null\"", "");
    expect_call("\"{\\\"a\\\": 1.0, \\\"b\\\": \\\" x\\\\n\\\"}\"",
                "<arg_key>a</arg_key><arg_value>1.0</arg_value><arg_key>b</arg_key><arg_value> x\n</arg_value>");
    expect_call("{\"opts\":{\"u\":\"C\",\"l\":[\"\xc3\xa9\",true,null,1.5]},\"n\":null}",
                "<arg_key>opts</arg_key><arg_value>{\"u\": \"C\", \"l\": [\"\xc3\xa9\", true, null, 1.5]}</arg_value>"
                "<arg_key>n</arg_key><arg_value>null</arg_value>");
    /* what cannot be read is kept as it is */
    expect_call("\"{\\\"a\\\": \"", "<arg_key>_invalid_arguments</arg_key><arg_value>{\"a\": </arg_value>");
    expect_call("\"[1]\"", "<arg_key>_invalid_arguments</arg_key><arg_value>[1]</arg_value>");
    expect_call("[1,2.50]", "<arg_key>_invalid_arguments</arg_key><arg_value>[1, 2.5]</arg_value>");
    expect_messages(
        "{\"role\":\"assistant\",\"content\":\" Let me. \",\"tool_calls\":[{\"name\":\"bare\",\"arguments\":{}}]}",
        ",\"add_generation_prompt\":false", HEAD "<|assistant|><think></think>Let me.<tool_call>bare</tool_call>");
}

static void test_results(void **state)
{
    (void)state;
#define AB CALLS(CALL("a", "f", "{}") "," CALL("b", "g", "{}"))
    static const char *const head = HEAD "<|assistant|><think></think><tool_call>f</tool_call><tool_call>g</tool_call>"
                                         "<|observation|>";
    static const struct {
        const char *messages, *results;
    } cases[] = {
        { AB "," RESULT("b", "2") "," RESULT("a", "1"), "12" },
        { AB "," RESULT("b", "2"), "2" },
        { AB "," RESULT("b", "2") "," RESULT("x", "1"), "21" },                       /* unknown id */
        { AB "," RESULT("b", "2") "," RESULT("a", "1") "," RESULT("b", "3"), "213" }, /* twice */
        { AB "," RESULT("b", "2") ",{\"role\":\"tool\",\"content\":\"1\"}", "21" },   /* no id */
        { AB "," RESULT("b", "2") ",{\"role\":\"tool\",\"id\":\"a\",\"content\":\"1\"}", "12" },
        { AB "," RESULT("b", "2") ",{\"role\":\"tool\",\"tool_call_id\":\"\",\"id\":\"a\",\"content\":\"1\"}", "12" },
        { AB ",{\"role\":\"tool\",\"content\":[{\"tool_call_id\":\"b\",\"output\":\"2\"},{\"id\":\"a\",\"output\":"
             "[{\"type\":\"text\",\"text\":\"1\"}]}]}",
          "12" },
        { AB ",{\"role\":\"tool\",\"content\":[{\"output\":\"2\"},{\"id\":\"a\",\"output\":\"1\"}]}", "21" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char prompt[1024];
        int n = sprintf(prompt, "%s", head);
        for (const char *c = cases[i].results; *c; c++)
            n += sprintf(prompt + n, "<tool_response>%c</tool_response>", *c);
        sprintf(prompt + n, GEN);
        expect_messages(cases[i].messages, "", prompt);
    }
    /* calls whose ids are not unique, or missing, cannot sort anything */
    expect_messages(CALLS(CALL("a", "f", "{}") "," CALL("a", "g", "{}")) "," RESULT("a", "1"), "",
                    HEAD "<|assistant|><think></think><tool_call>f</tool_call><tool_call>g</tool_call><|observation|>"
                         "<tool_response>1</tool_response>" GEN);
    expect_messages(RESULT("x", "lone") "," USER("after"), "",
                    HEAD "<|observation|><tool_response>lone</tool_response><|user|>after" GEN);
    expect_messages(RESULT("x", "1") "," USER("u") "," RESULT("y", "2"), ",\"add_generation_prompt\":false",
                    HEAD "<|observation|><tool_response>1</tool_response><|user|>u<|observation|><tool_response>2"
                         "</tool_response>");
    /* deferred tools are not listed, and appear where a search found them */
    expect_messages("{\"role\":\"tool\",\"content\":[{\"type\":\"tool_reference\",\"name\":\"now\"},{\"type\":"
                    "\"tool_reference\",\"name\":\"missing\"}]}",
                    ",\"tools\":[{\"name\":\"now\",\"parameters\":{},\"defer_loading\":true},{\"name\":\"g\"}]",
                    HEAD TOOLS_HEAD "{\"name\": \"g\"}\n" TOOLS_TAIL "<|observation|><tool_response><tools>\n" NOW_JSON
                                    "</tools></tool_response>" GEN);
    expect_messages("{\"role\":\"tool\",\"content\":[{\"type\":\"tool_reference\",\"name\":\"now\"}]}", "",
                    HEAD "<|observation|><tool_response><tools>\n</tools></tool_response>" GEN);
}

/* ---- size ---- */

/* 20,000 calls and their results in reverse order, and as many references: fast, or something is quadratic. */
static void test_large(void **state)
{
    (void)state;
    enum { N = 20000 };
    td_buf body;
    td_buf_init(&body, 0);
    td_buf_puts(&body, "{\"tools\":[");
    for (int i = 0; i < TD_CHAT_MAX_TOOLS; i++) td_buf_printf(&body, "%s{\"name\":\"t%d\"}", i ? "," : "", i);
    td_buf_puts(&body, "],\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[");
    for (int i = 0; i < N; i++)
        td_buf_printf(&body, "%s{\"id\":\"c%d\",\"function\":{\"name\":\"f\"}}", i ? "," : "", i);
    td_buf_puts(&body, "]}");
    for (int i = N - 1; i >= 0; i--)
        td_buf_printf(&body,
                      ",{\"role\":\"tool\",\"tool_call_id\":\"c%d\",\"content\":[{\"type\":\"tool_reference\","
                      "\"name\":\"t%d\"}]}",
                      i, i % 5000);
    td_buf_puts(&body, "]}");
    clock_t begin = clock();
    rendering r = render_with(body.data, &plain);
    assert_int_equal(r.status, TD_OK);
    const char *results = strstr(r.prompt.text, "<|observation|>");
    static const char first[] = "<|observation|><tool_response><tools>\n{\"name\": \"t0\"}\n</tools>";
    assert_memory_equal(results, first, sizeof first - 1);
    assert_true((double)(clock() - begin) / CLOCKS_PER_SEC < 2.0);
    done(&r);
    td_buf_deinit(&body);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_vectors),     cmocka_unit_test(test_effort),
        cmocka_unit_test(test_reply_start), cmocka_unit_test(test_earlier_reasoning),
        cmocka_unit_test(test_recall),      cmocka_unit_test(test_messages),
        cmocka_unit_test(test_zero_byte),   cmocka_unit_test(test_media),
        cmocka_unit_test(test_continue),    cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_tools),       cmocka_unit_test(test_tool_refusals),
        cmocka_unit_test(test_calls),       cmocka_unit_test(test_results),
        cmocka_unit_test(test_large),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
