/* text/reasoning.h and text/stop.h: the same reply for every grouping of its tokens, by ids and by text; stop strings
 * against an obvious search. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "text/reasoning.h"

enum { THINK = 90, END_THINK, BEGIN_BOX, END_BOX, PLAIN = 1 };

static const td_reply_ids with_ids = { THINK, END_THINK, BEGIN_BOX, END_BOX }, without_ids = { -1, -1, -1, -1 };

typedef struct reply {
    td_buf reasoning, content;
    int64_t n_reasoning_tokens;
    int stopped_by;
    int n_fed; /* tokens until a stop string ended it */
} reply;

static int32_t id_of(const char *token)
{
    static const char *const tags[] = { "<think>", "</think>", "<|begin_of_box|>", "<|end_of_box|>" };
    for (int i = 0; i < 4; i++)
        if (strcmp(token, tags[i]) == 0) return THINK + i;
    return PLAIN;
}

static td_stop stop_of(td_arena *arena, const char *json)
{
    char *text = td_arena_strdup(arena, json);
    const td_json *value;
    td_error err;
    td_stop stop;
    assert_int_equal(td_json_parse(arena, text, strlen(text), &value, &err), TD_OK);
    assert_int_equal(td_stop_init(&stop, arena, value, &err), TD_OK);
    return stop;
}

/* One reply, token by token; NULL ends the list. A stop string counts from token stop_from on. */
static reply run(const char *const *tokens, td_reply_start start, const td_reply_ids *ids, const char *stops,
                 int stop_from)
{
    reply r = { 0 };
    td_arena arena;
    td_arena_init(&arena, 0);
    td_stop stop = stop_of(&arena, stops);
    td_reasoning split;
    td_buf_init(&r.reasoning, 0);
    td_buf_init(&r.content, 0);
    td_buf_puts(&r.reasoning, "");
    td_buf_puts(&r.content, "");
    td_reasoning_init(&split, start, ids, &stop);
    for (int i = 0; tokens[i]; i++) {
        size_t n_before = r.content.n_bytes, n_reasoning = r.reasoning.n_bytes;
        r.n_fed++;
        bool over = td_reasoning_feed(&split, id_of(tokens[i]), tokens[i], strlen(tokens[i]), i >= stop_from,
                                      &r.reasoning, &r.content);
        assert_true(n_before == 0 || r.reasoning.n_bytes == n_reasoning); /* no reasoning after content */
        if (over) break;
    }
    td_reasoning_finish(&split, &r.reasoning, &r.content);
    r.n_reasoning_tokens = td_reasoning_tokens(&split);
    r.stopped_by = td_reasoning_stopped_by(&split);
    td_reasoning_deinit(&split);
    td_arena_deinit(&arena);
    return r;
}

static void expect(const char *const *tokens, td_reply_start start, const td_reply_ids *ids, const char *reasoning,
                   const char *content, int n_tokens)
{
    reply r = run(tokens, start, ids, "null", 0);
    assert_string_equal(r.reasoning.data, reasoning);
    assert_string_equal(r.content.data, content);
    assert_int_equal(r.n_reasoning_tokens, n_tokens);
    assert_int_equal(r.stopped_by, -1);
    td_buf_deinit(&r.reasoning);
    td_buf_deinit(&r.content);
}

#define T(...) ((const char *const[]){ __VA_ARGS__, NULL })

static void test_split(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        const td_reply_ids *ids = k ? &without_ids : &with_ids;
        expect(T("We", " think", "</think>", "\n", "\nAnswer", "\n"), TD_REPLY_IN_REASONING, ids, "We think",
               "Answer\n", 3);
        expect(T("<think>", "a", "</think>", "b"), TD_REPLY_IN_REASONING, ids, "a", "b", 3);
        expect(T("</think>", "b"), TD_REPLY_IN_REASONING, ids, "", "b", 1);
        expect(T("a", "<think>", "</think>", "b"), TD_REPLY_IN_REASONING, ids, "a<think>", "b", 3);
        expect(T("a", "</think>", "b", "</think>", "<think>", "c"), TD_REPLY_IN_REASONING, ids, "a",
               "b</think><think>c", 2);
        expect(T("a", "</think>", "<think>", "c"), TD_REPLY_IN_REASONING, ids, "a", "<think>c", 2);
        expect(T("never", " closed"), TD_REPLY_IN_REASONING, ids, "never closed", "", 2);
        /* thinking off */
        expect(T("\n", "b", "\n", "</think>"), TD_REPLY_AT_ANSWER, ids, "", "b\n</think>", 0);
        expect(T("<think>", "a", "</think>", "\n\nb"), TD_REPLY_AT_ANSWER, ids, "a", "b", 3);
        expect(T("b", "<think>", "a"), TD_REPLY_AT_ANSWER, ids, "", "b<think>a", 0);
        /* a continued text is not touched */
        expect(T("\n", "<think>", "b"), TD_REPLY_IN_ANSWER, ids, "", "\n<think>b", 0);
    }
}

static void test_ids_and_text_differ(void **state)
{
    (void)state;
    /* spelled with other tokens: reasoning by ids, a tag by text */
    expect(T("a", "</", "think", ">", "b"), TD_REPLY_IN_REASONING, &with_ids, "a</think>b", "", 5);
    expect(T("a", "</", "think", ">", "b"), TD_REPLY_IN_REASONING, &without_ids, "a", "b", 4);
    expect(T("a</thin", "g></", "think>b"), TD_REPLY_IN_REASONING, &without_ids, "a</thing>", "b", 3);
    expect(T("a<", "</think>", "b"), TD_REPLY_IN_REASONING, &without_ids, "a<", "b", 2);
    expect(T("a</", "think"), TD_REPLY_IN_REASONING, &without_ids, "a</think", "", 2);
    expect(T("<thi", "s"), TD_REPLY_AT_ANSWER, &without_ids, "", "<this", 0);
    expect(T("<th", "</think>x"), TD_REPLY_IN_REASONING, &without_ids, "<th", "x", 2);
    /* what the detokenizer held back comes with the tag */
    const char *const tail[] = { "a", "\xef\xbf\xbd</think>", "b", NULL };
    td_reasoning split;
    td_buf reasoning, content;
    td_buf_init(&reasoning, 0);
    td_buf_init(&content, 0);
    td_reasoning_init(&split, TD_REPLY_IN_REASONING, &with_ids, NULL);
    for (int i = 0; i < 3; i++)
        td_reasoning_feed(&split, i == 1 ? END_THINK : PLAIN, tail[i], strlen(tail[i]), true, &reasoning, &content);
    assert_string_equal(reasoning.data, "a\xef\xbf\xbd");
    assert_string_equal(content.data, "b");
    assert_false(td_reasoning_open(&split));
    td_reasoning_deinit(&split);
    td_buf_deinit(&reasoning);
    td_buf_deinit(&content);
    /* boxes around an answer */
    expect(T("a", "<|begin_of_box|>", "</think>", "<|begin_of_box|>", "42", "<|end_of_box|>", "\n"),
           TD_REPLY_IN_REASONING, &with_ids, "a<|begin_of_box|>", "42\n", 3);
}

static void expect_stop(const char *const *tokens, const char *stops, int stop_from, const char *reasoning,
                        const char *content, int stopped_by, int n_fed)
{
    reply r = run(tokens, TD_REPLY_IN_REASONING, &with_ids, stops, stop_from);
    assert_string_equal(r.reasoning.data, reasoning);
    assert_string_equal(r.content.data, content);
    assert_int_equal(r.stopped_by, stopped_by);
    assert_int_equal(r.n_fed, n_fed);
    td_buf_deinit(&r.reasoning);
    td_buf_deinit(&r.content);
}

static void test_stops(void **state)
{
    (void)state;
    expect_stop(T("a", "</think>", "one ", "ST", "O", "P two"), "\"STOP\"", 0, "a", "one ", 0, 6);
    expect_stop(T("a", "</think>", "one ", "ST", "O"), "\"STOP\"", 0, "a", "one STO", -1, 5);
    expect_stop(T("aSTO", "P", "</think>", "b"), "[\"x\",\"STOP\"]", 0, "a", "", 1, 2);
    expect_stop(T("a", "</think>", "b"), "\"</think>\"", 0, "a", "", 0, 2);               /* tags are text, too */
    expect_stop(T("a", "</think>", "\n", "b"), "\"k>\\n\"", 0, "a", "", 0, 3);            /* across the border */
    expect_stop(T("a", "</think>", "abababac!"), "\"ababac\"", 0, "a", "ab", 0, 3);       /* overlap with itself */
    expect_stop(T("a", "</think>", "xaby"), "[\"b\",\"ab\",\"aby\"]", 0, "a", "x", 1, 3); /* first end, then longest */
    expect_stop(T("a", "</think>", "q\xc3\xa8\xc3", "\xa9z"), "\"\xc3\xa9\"", 0, "a", "q\xc3\xa8", 0, 4);
    /* min_tokens: complete too early does not count, completed later does */
    expect_stop(T("a", "</think>", "STOP", "b", "STOP"), "\"STOP\"", 4, "a", "STOPb", 0, 5);
    expect_stop(T("a", "</think>", "STO", "P", "b"), "\"STOP\"", 3, "a", "", 0, 4);
    expect_stop(T("a", "</think>", "aaaa"), "[]", 0, "a", "aaaa", -1, 3);
}

/* Random text over few letters: first end of any stop string, longest there, found by comparing at every place. */
static void test_stops_obvious(void **state)
{
    (void)state;
    srand(11);
    for (int round = 0; round < 3000; round++) {
        char stops[3][8], json[64], text[48];
        int n_stops = 1 + rand() % 3, n = 8 + rand() % 32;
        for (int s = 0; s < n_stops; s++) {
            int k = 1 + rand() % 6;
            for (int i = 0; i < k; i++) stops[s][i] = (char)('a' + rand() % 2);
            stops[s][k] = 0;
        }
        int at = sprintf(json, "[");
        for (int s = 0; s < n_stops; s++) at += sprintf(json + at, "%s\"%s\"", s ? "," : "", stops[s]);
        sprintf(json + at, "]");
        for (int i = 0; i < n; i++) text[i] = (char)(rand() % 6 ? 'a' + rand() % 2 : 'c');
        text[n] = 0;
        int cut = n, which = -1;
        for (int end = 1; end <= n && which < 0; end++)
            for (int s = 0; s < n_stops; s++) {
                int k = (int)strlen(stops[s]);
                if (k > end || memcmp(text + end - k, stops[s], (size_t)k) != 0) continue;
                if (which >= 0 && k <= (int)strlen(stops[which])) continue;
                which = s;
                cut = end - k;
            }
        /* cut into random pieces */
        const char *tokens[50];
        char pieces[128];
        int n_tokens = 0, to = 0;
        for (int i = 0; i < n;) {
            int k = 1 + rand() % 5;
            if (k > n - i) k = n - i;
            tokens[n_tokens++] = pieces + to;
            memcpy(pieces + to, text + i, (size_t)k);
            pieces[to + k] = 0;
            to += k + 1;
            i += k;
        }
        tokens[n_tokens] = NULL;
        reply r = run(tokens, TD_REPLY_IN_ANSWER, rand() % 2 ? &with_ids : &without_ids, json, 0);
        assert_int_equal(r.content.n_bytes, cut);
        assert_memory_equal(r.content.data, text, (size_t)cut);
        assert_int_equal(r.stopped_by >= 0, which >= 0);
        if (which >= 0) assert_string_equal(stops[r.stopped_by], stops[which]);
        td_buf_deinit(&r.reasoning);
        td_buf_deinit(&r.content);
    }
}

/* By text: any cut of the same characters gives the same split. */
static void test_every_cut(void **state)
{
    (void)state;
    const char *text = "<think>ab</thin</think>\n\n</think>c<think>";
    size_t n = strlen(text);
    for (size_t i = 0; i <= n; i++)
        for (size_t j = i; j <= n; j++) {
            char first[64] = { 0 }, second[64] = { 0 }, third[64] = { 0 };
            memcpy(first, text, i);
            memcpy(second, text + i, j - i);
            memcpy(third, text + j, n - j);
            reply r = run(T(first, second, third), TD_REPLY_AT_ANSWER, &without_ids, "[\"zzz\",\"<think>q\"]", 0);
            assert_string_equal(r.reasoning.data, "ab</thin");
            assert_string_equal(r.content.data, "</think>c<think>");
            td_buf_deinit(&r.reasoning);
            td_buf_deinit(&r.content);
        }
}

static void test_stop_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *json, *text;
    } cases[] = {
        { "5", "stop: strings expected, got an integer" },
        { "\"\"", "stop: a stop string is empty" },
        { "[\"a\",\"\"]", "stop: a stop string is empty" },
        { "[\"a\",null]", "stop: strings expected, got null" },
        { "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]", "stop: 17 stop strings, at most 16 allowed" },
        { "{}", "stop: strings expected, got an object" },
    };
    td_arena arena;
    td_error err;
    td_stop stop;
    const td_json *value;
    td_arena_init(&arena, 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = td_arena_strdup(&arena, cases[i].json);
        assert_int_equal(td_json_parse(&arena, text, strlen(text), &value, &err), TD_OK);
        assert_int_equal(td_stop_init(&stop, &arena, value, &err), TD_EINVAL);
        assert_string_equal(err.text, cases[i].text);
    }
    for (size_t n = TD_STOP_MAX_BYTES; n <= TD_STOP_MAX_BYTES + 1; n++) {
        char *text = td_arena_take(&arena, n + 3, 1);
        memset(text, 'a', n + 2);
        text[0] = text[n + 1] = '"';
        assert_int_equal(td_json_parse(&arena, text, n + 2, &value, &err), TD_OK);
        assert_int_equal(td_stop_init(&stop, &arena, value, &err), n > TD_STOP_MAX_BYTES ? TD_EINVAL : TD_OK);
    }
    assert_string_equal(err.text, "stop: a stop string of 1025 bytes, at most 1024 allowed");
    assert_int_equal(td_stop_init(&stop, &arena, NULL, &err), TD_OK);
    assert_int_equal(stop.n_strings, 0);
    td_arena_deinit(&arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split),     cmocka_unit_test(test_ids_and_text_differ),
        cmocka_unit_test(test_stops),     cmocka_unit_test(test_stops_obvious),
        cmocka_unit_test(test_every_cut), cmocka_unit_test(test_stop_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
