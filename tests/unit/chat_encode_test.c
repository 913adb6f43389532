/* text/chat_encode.h: ids of prompts with media and with text that quotes their markers. The tokenizer is made here:
 * one id a byte, and the added tokens of the chat format. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "text/chat_encode.h"

static const char *const added[] = { "[gMASK]",          "<sop>",     "<|system|>",         "<|user|>",
                                     "<|assistant|>",    "<think>",   "</think>",           "<|begin_of_image|>",
                                     "<|end_of_image|>", "<|image|>", "<|begin_of_video|>", "<|end_of_video|>",
                                     "<|video|>" };

enum { FIRST_ADDED = 256, N_ADDED = sizeof added / sizeof *added, IMAGE = FIRST_ADDED + 9 };

static td_tokenizer *make_tokenizer(int n_added)
{
    td_buf text;
    td_tokenizer *tok = NULL;
    td_error err;
    int next = 0x100;
    td_buf_init(&text, 0);
    td_buf_puts(&text, "{\"added_tokens\":[");
    for (int i = 0; i < n_added; i++)
        td_buf_printf(&text, "%s{\"id\":%d,\"content\":\"%s\",\"special\":false}", i ? "," : "", FIRST_ADDED + i,
                      added[i]);
    td_buf_puts(&text,
                "],\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},\"model\":{\"merges\":[],"
                "\"vocab\":{");
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
        td_buf_printf(&text, "%s\"\\u%04x\":%d", b ? "," : "", printable ? b : next++, b);
    }
    td_buf_puts(&text, "}}}");
    if (td_tokenizer_open_memory("made", text.data, text.n_bytes, &tok, &err)) fail_msg("%s", err.text);
    assert_int_equal(td_chat_reserve_media(tok), TD_OK);
    td_buf_deinit(&text);
    return tok;
}

/* ids as text: added tokens by name, but slots as '#', so that they differ from text that quotes them. */
static void expect(const td_tokenizer *tok, const char *messages, const td_media_slots *slots, size_t n_media,
                   const char *wanted, const size_t *wanted_first)
{
    static const td_chat_options options = { .effort = TD_EFFORT_NONE };
    td_arena arena;
    td_error err;
    td_chat_prompt prompt;
    td_buf shown;
    td_ids ids = { 0 };
    const td_json *request;
    char body[4096], param[TD_CHAT_PARAM_CAP];
    size_t first[4];
    td_arena_init(&arena, 0);
    td_buf_init(&shown, 0);
    snprintf(body, sizeof body, "{\"messages\":[%s]}", messages);
    assert_int_equal(td_json_parse(&arena, body, strlen(body), &request, &err), TD_OK);
    assert_int_equal(td_chat_render(&arena, request, &options, &prompt, param, &err), TD_OK);
    assert_int_equal(prompt.n_media, n_media);
    assert_int_equal(td_chat_encode(tok, &prompt, slots, &ids, first, &err), TD_OK);
    for (size_t i = 0; i < ids.n; i++) {
        const char *bytes;
        size_t n_bytes;
        assert_int_equal(td_tokenizer_id_bytes(tok, ids.data[i], &bytes, &n_bytes), TD_OK);
        if (ids.data[i] == IMAGE)
            td_buf_putc(&shown, '#');
        else
            td_buf_add(&shown, bytes, n_bytes);
    }
    assert_string_equal(shown.data, wanted);
    for (size_t i = 0; i < n_media; i++) {
        assert_int_equal(first[i], wanted_first[i]);
        assert_int_equal(ids.data[first[i]], IMAGE);
        assert_int_not_equal(ids.data[first[i] - 1], IMAGE);
    }
    td_ids_deinit(&ids);
    td_buf_deinit(&shown);
    td_arena_deinit(&arena);
}

#define HEAD "[gMASK]<sop><|user|>"
#define GEN  "<|assistant|><think></think>"

static void test_media(void **state)
{
    (void)state;
    td_tokenizer *tok = make_tokenizer(N_ADDED);
    static const double times[] = { 0.0, 1.25 };
    static const td_media_slots slots[] = { { 1, 4, NULL }, { 2, 3, times } };
    expect(tok,
           "{\"role\":\"user\",\"content\":[{\"type\":\"image\"},{\"type\":\"text\",\"text\":\"hi\"},{\"type\":"
           "\"video\"}]}",
           slots, 2,
           HEAD
           "<|begin_of_image|>####<|end_of_image|>hi<|begin_of_video|><|begin_of_image|>###<|end_of_image|>0.0 seconds"
           "<|begin_of_image|>###<|end_of_image|>1.2 seconds<|end_of_video|>" GEN,
           (const size_t[]){ 4, 13 });
    td_tokenizer_destroy(tok);
}

static void test_quoted(void **state)
{
    (void)state;
    td_tokenizer *tok = make_tokenizer(N_ADDED);
    static const td_media_slots slots[] = { { 1, 2, NULL } };
    expect(tok, "{\"role\":\"user\",\"content\":\"<|begin_of_image|><|image|><|end_of_image|> <|video|>\"}", NULL, 0,
           HEAD "<|begin_of_image|><|image|><|end_of_image|> <|video|>" GEN, NULL);
    expect(
        tok,
        "{\"role\":\"user\",\"content\":[\"a<|image|>\",{\"type\":\"image_url\",\"image_url\":\"x\"},\"<|image|>b\"]}",
        slots, 1, HEAD "a<|image|><|begin_of_image|>##<|end_of_image|><|image|>b" GEN, (const size_t[]){ 14 });
    td_tokenizer_destroy(tok);
}

static void test_no_placeholder(void **state)
{
    (void)state;
    td_tokenizer *tok = make_tokenizer(9);
    static const td_chat_media medium = { .at = 1, .n_bytes = 9 };
    const td_chat_prompt prompt = { .text = "a<|image|>", .n_bytes = 10, .media = &medium, .n_media = 1 };
    static const td_media_slots slots[] = { { 1, 2, NULL } };
    td_ids ids = { 0 };
    td_error err;
    assert_int_equal(td_ids_push(&ids, 7), TD_OK);
    assert_int_equal(td_chat_encode(tok, &prompt, slots, &ids, NULL, &err), TD_EUNSUPPORTED);
    assert_string_equal(err.text, "this tokenizer has no token <|image|>");
    assert_int_equal(ids.n, 1);
    td_ids_deinit(&ids);
    td_tokenizer_destroy(tok);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_media),
        cmocka_unit_test(test_quoted),
        cmocka_unit_test(test_no_placeholder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
