/* The commands' pure parts: words of the command line, event streams cut at every byte, medians, the judge of the smoke
 * test, conversations. Expected values are written by hand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "cli/args.h"
#include "cli/conversation.h"
#include "cli/judge.h"
#include "cli/sse.h"
#include "cli/stats.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- words --- */

static const td_setting TABLE[] = {
    { .name = "count", .kind = TD_SETTING_INT, .fallback = "1", .min = 1, .max = 9, .value = "N", .help = "how many" },
    { .name = "json", .kind = TD_SETTING_FLAG, .help = "as JSON" },
};

/* line: words with one blank between; what is left is joined the same way. */
static void expect_word(const char *line, const char *word, const char *rest)
{
    char copy[256], left[256] = "", *argv[16];
    int argc = 0;
    snprintf(copy, sizeof copy, "%s", line);
    for (char *at = strtok(copy, " "); at; at = strtok(NULL, " ")) argv[argc++] = at;
    const char *got = td_args_take_word(TABLE, 2, &argc, argv);
    for (int i = 0; i < argc; i++)
        snprintf(left + strlen(left), sizeof left - strlen(left), "%s%s", i ? " " : "", argv[i]);
    if (word)
        assert_string_equal(got, word);
    else
        assert_null(got);
    assert_string_equal(left, rest);
}

static void test_take_word(void **state)
{
    (void)state;
    expect_word("smoke http://a --json", "http://a", "smoke --json");
    expect_word("smoke --json http://a", "http://a", "smoke --json");
    expect_word("smoke --count 3 http://a", "http://a", "smoke --count 3");
    expect_word("smoke --count=3 http://a --json", "http://a", "smoke --count=3 --json");
    expect_word("smoke --count 3", NULL, "smoke --count 3");
    expect_word("smoke --other word", "word", "smoke --other"); /* the parser refuses --other by name */
    expect_word("smoke a b", "a", "smoke b");
    expect_word("smoke", NULL, "smoke");
}

static void test_numbers(void **state)
{
    (void)state;
    int64_t x[3];
    int n = 0;
    td_error err;
    assert_int_equal(td_args_numbers("rows", "1,8,512", 1, 512, 3, x, &n, &err), TD_OK);
    assert_int_equal(n, 3);
    assert_true(x[0] == 1 && x[1] == 8 && x[2] == 512);
    const char *const bad[] = { "", "1,", ",1", "1,x", "1;2", "0", "513", "1,2,3,4", "1 2", "99999999999999999999" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(td_args_numbers("rows", bad[i], 1, 512, 3, x, &n, &err), TD_EINVAL);
        assert_non_null(strstr(err.text, "--rows: "));
    }
    assert_int_equal(n, 3); /* untouched */
}

/* --- events --- */

typedef struct heard {
    td_buf text; /* every event between [ and ] */
    int stop_after, n;
} heard;

static bool hear(void *user, char *data, size_t n_bytes)
{
    heard *h = user;
    td_buf_putc(&h->text, '[');
    td_buf_add(&h->text, data, n_bytes);
    td_buf_putc(&h->text, ']');
    assert_int_equal(data[n_bytes], 0);
    return ++h->n != h->stop_after;
}

/* The same whether the bytes come at once, one by one, or cut in two at any place. */
static void expect_events(const char *bytes, const char *events)
{
    size_t n = strlen(bytes);
    for (size_t cut = 0; cut <= n + 1; cut++) {
        heard h = { 0 };
        td_event_reader r;
        td_buf_init(&h.text, 0);
        td_event_reader_init(&r, 1000, hear, &h);
        if (cut > n) {
            for (size_t i = 0; i < n; i++) assert_int_equal(td_event_reader_feed(&r, bytes + i, 1), TD_OK);
        } else {
            assert_int_equal(td_event_reader_feed(&r, bytes, cut), TD_OK);
            assert_int_equal(td_event_reader_feed(&r, bytes + cut, n - cut), TD_OK);
        }
        assert_string_equal(h.text.data ? h.text.data : "", events);
        td_event_reader_deinit(&r);
        td_buf_deinit(&h.text);
    }
}

static void test_events(void **state)
{
    (void)state;
    expect_events("data: a\n\ndata: b\n\n", "[a][b]");
    expect_events("data: a\r\n\r\ndata: b\r\n\r\n", "[a][b]");
    expect_events("data: a\r\rdata: b\r\r", "[a][b]");
    expect_events("\xef\xbb\xbf"
                  "data: a\n\n",
                  "[a]");
    expect_events("data:a\ndata: b\ndata:  c\n\n", "[a\nb\n c]"); /* one blank is the format's, more are data */
    expect_events("data\n\ndata:\n\ndata: \n\n", "[][][]");
    expect_events(": keepalive\n\n:\n\ndata: a\n\n", "[a]");
    expect_events("event: x\nid: 7\nretry: 10\ndata: a\ndatum: b\nDATA: c\n\n", "[a]");
    expect_events("\n\n\n", "");
    expect_events("data: a\n\ndata: cut off", "[a]");
    expect_events("data: a\n\ndata: cut off\n", "[a]");
}

static void test_events_stop_and_limit(void **state)
{
    (void)state;
    heard h = { .stop_after = 2 };
    td_event_reader r;
    td_buf_init(&h.text, 0);
    td_event_reader_init(&r, 10, hear, &h);
    assert_int_equal(td_event_reader_feed(&r, "data: a\n\ndata: b\n\ndata: c\n\n", 27), TD_ECANCELED);
    assert_string_equal(h.text.data, "[a][b]");
    assert_int_equal(td_event_reader_feed(&r, "data: d\n\n", 9), TD_ECANCELED);
    assert_string_equal(h.text.data, "[a][b]");
    td_event_reader_deinit(&r);
    td_buf_deinit(&h.text);

    td_buf_init(&h.text, 0);
    td_event_reader_init(&r, 10, hear, &h);
    assert_int_equal(td_event_reader_feed(&r, "data: 01234", 11), TD_EFORMAT); /* a line that never ends */
    td_event_reader_deinit(&r);
    td_event_reader_init(&r, 10, hear, &h);
    const char many[] = "data: 012\ndata: 345\ndata: 678\n"; /* lines that fit, an event that does not */
    assert_int_equal(td_event_reader_feed(&r, many, strlen(many)), TD_EFORMAT);
    td_event_reader_deinit(&r);
    td_buf_deinit(&h.text);
}

/* --- statistics --- */

static void test_stats(void **state)
{
    (void)state;
    double odd[] = { 5, 1, 9 }, even[] = { 4, 1, 3, 10 }, one[] = { 7 };
    td_stat s = td_stat_of(odd, 3);
    assert_true(s.median == 5 && s.low == 1 && s.high == 9 && s.n == 3);
    assert_true(td_stat_spread(&s) == 0.8); /* (9 - 1) / 2 / 5 */
    s = td_stat_of(even, 4);
    assert_true(s.median == 3.5 && s.low == 1 && s.high == 10);
    s = td_stat_of(one, 1);
    assert_true(s.median == 7 && td_stat_spread(&s) == 0);
    s = td_stat_of(NULL, 0);
    assert_true(s.n == 0 && s.median == 0 && td_stat_spread(&s) == 0);
}

/* --- judge --- */

static void test_judge(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool good;
    } cases[] = {
        { "OK", true },
        { " OK.\n", true },
        { "!", true },             /* short answers may be of one kind */
        { "!!!!!!!", true },       /* 7 */
        { "!!!!!!!!", false },     /* 8 of one kind */
        { "  !!!!!!!!\n", false }, /* trimmed first */
        { "abababab", false },     /* 8 of two kinds */
        { "abababa", true },       /* 7 of two kinds */
        { "abababac", true },      /* three kinds */
        { "! ! ! ! !", false },    /* a blank inside is a kind like any other */
        { "", false },
        { " \n\t ", false },
        { "\xc2\xa0\xe3\x80\x80\xe2\x80\x89", false },    /* no-break, ideographic, thin space */
        { "\xe4\xbd\xa0\xe4\xbd\xa0\xe4\xbd\xa0", true }, /* 3 characters in 9 bytes */
        { "\xf0\x9f\x98\x80\xf0\x9f\x98\x80\xf0\x9f\x98\x80\xf0\x9f\x98\x80"
          "\xf0\x9f\x98\x80\xf0\x9f\x98\x80\xf0\x9f\x98\x80\xf0\x9f\x98\x80",
          false }, /* 8 of one emoji */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        td_error err = { 0 };
        td_status status = td_judge_answer(cases[i].text, strlen(cases[i].text), &err);
        if ((status == TD_OK) != cases[i].good) fail_msg("'%s': %s", cases[i].text, err.text);
    }
    size_t n;
    const char *trimmed = td_judge_trim("\n a b \r\n", 8, &n);
    assert_int_equal(n, 3);
    assert_memory_equal(trimmed, "a b", 3);
    assert_int_equal(td_judge_prefix("\xc3\xa4\xc3\xb6\xc3\xbc", 6, 2), 4);
    assert_int_equal(td_judge_prefix("ab", 2, 40), 2);
    assert_int_equal(td_judge_prefix("\xf0\x9f", 2, 1), 1); /* cut off: never past the end */
}

/* --- conversations --- */

static void test_request(void **state)
{
    (void)state;
    td_conversation c = { .model = "m", .temperature = -1 };
    td_buf out;
    td_buf_init(&out, 0);
    td_conversation_request(&c, "Hi \"you\"", &out);
    assert_string_equal(out.data, "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"Hi \\\"you\\\"\"}],"
                                  "\"stream\":true,\"stream_options\":{\"include_usage\":true}}");
    assert_int_equal(td_conversation_system(&c, "Be brief."), TD_OK);
    assert_int_equal(td_conversation_add(&c, "Hi", "Hello.", "A greeting."), TD_OK);
    assert_int_equal(td_conversation_add(&c, "Bye", "Bye.", ""), TD_OK);
    c.effort = "low";
    c.max_tokens = 5;
    c.temperature = 0.5;
    td_buf_clear(&out);
    td_conversation_request(&c, "Still there?", &out);
    assert_string_equal(
        out.data,
        "{\"model\":\"m\",\"messages\":[{\"role\":\"system\",\"content\":\"Be brief.\"},"
        "{\"role\":\"user\",\"content\":\"Hi\"},"
        "{\"role\":\"assistant\",\"content\":\"Hello.\",\"reasoning_content\":\"A greeting.\"},"
        "{\"role\":\"user\",\"content\":\"Bye\"},{\"role\":\"assistant\",\"content\":\"Bye.\"},"
        "{\"role\":\"user\",\"content\":\"Still there?\"}],\"stream\":true,\"stream_options\":{\"include_usage\":true},"
        "\"reasoning_effort\":\"low\",\"max_tokens\":5,\"temperature\":0.5}");
    td_conversation_clear(&c);
    assert_int_equal(td_conversation_system(&c, NULL), TD_OK);
    assert_int_equal(c.n_turns, 0);
    assert_null(c.system);
    td_conversation_deinit(&c);
    td_buf_deinit(&out);
}

static td_status read_piece(td_arena *arena, const char *text, td_chat_piece *piece, td_error *err)
{
    static char data[512];
    snprintf(data, sizeof data, "%s", text);
    return td_chat_piece_read(arena, data, strlen(data), piece, err);
}

static void test_pieces(void **state)
{
    (void)state;
    td_arena arena;
    td_chat_piece p;
    td_error err;
    td_arena_init(&arena, 0);
    assert_int_equal(
        read_piece(&arena, "{\"choices\":[{\"delta\":{\"content\":\"a\\n\"},\"finish_reason\":null}]}", &p, &err),
        TD_OK);
    assert_string_equal(p.content, "a\n");
    assert_true(!p.reasoning && !p.finish && !p.done && p.completion_tokens == -1);
    assert_int_equal(
        read_piece(&arena, "{\"choices\":[{\"delta\":{\"reasoning_content\":\"t\"}}],\"usage\":null}", &p, &err),
        TD_OK);
    assert_string_equal(p.reasoning, "t");
    assert_int_equal(read_piece(&arena, "{\"choices\":[{\"delta\":{},\"finish_reason\":\"length\"}]}", &p, &err),
                     TD_OK);
    assert_string_equal(p.finish, "length");
    assert_int_equal(read_piece(&arena, "{\"choices\":[],\"usage\":{\"completion_tokens\":34}}", &p, &err), TD_OK);
    assert_true(p.completion_tokens == 34 && !p.content);
    assert_int_equal(read_piece(&arena, "[DONE]", &p, &err), TD_OK);
    assert_true(p.done);

    assert_int_equal(read_piece(&arena, "{\"error\":{\"message\":\"the engine has stopped\"}}", &p, &err), TD_EIO);
    assert_non_null(strstr(err.text, "the engine has stopped"));
    assert_int_equal(read_piece(&arena, "{\"error\":\"odd\"}", &p, &err), TD_EIO);
    assert_int_equal(read_piece(&arena, "{}", &p, &err), TD_EFORMAT);
    assert_int_equal(read_piece(&arena, "{\"choices\":{}}", &p, &err), TD_EFORMAT);
    assert_int_equal(read_piece(&arena, "<html>", &p, &err), TD_EFORMAT);
    assert_int_equal(read_piece(&arena, "{\"choices\":[{\"delta\":{\"content\":7}}]}", &p, &err), TD_OK);
    assert_null(p.content);
    td_arena_deinit(&arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_take_word), cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_events),    cmocka_unit_test(test_events_stop_and_limit),
        cmocka_unit_test(test_stats),     cmocka_unit_test(test_judge),
        cmocka_unit_test(test_request),   cmocka_unit_test(test_pieces),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
