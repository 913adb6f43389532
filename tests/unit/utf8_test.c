/* UTF-8 in pieces: against Python's decoder (tests/oracle/tokenizer/utf8.txt), for every way to cut a text in two and
 * for random cuts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/utf8.h"
#include "text/utf8_stream.h"

enum { MAX_BYTES = 64, MAX_OUT = 3 * (MAX_BYTES + 3) + 3 };

static size_t from_hex(const char *hex, unsigned char *out)
{
    size_t n = 0;
    unsigned value;
    if (strcmp(hex, "-") == 0) return 0;
    for (; hex[0] && hex[1]; hex += 2) {
        assert_int_equal(sscanf(hex, "%2x", &value), 1);
        out[n++] = (unsigned char)value;
    }
    return n;
}

/* in, cut at the places whose bit is set, through a stream. */
static size_t decode_cut(const unsigned char *in, size_t n_in, uint64_t cuts, char *out)
{
    td_utf8_stream stream;
    size_t n_out = 0, from = 0;
    td_utf8_stream_init(&stream);
    for (size_t i = 1; i <= n_in; i++) {
        if (i < n_in && !(cuts >> (i & 63) & 1)) continue;
        size_t n = td_utf8_stream_push(&stream, in + from, i - from, out + n_out);
        assert_int_equal(td_utf8_valid_prefix(out + n_out, n), n); /* each piece alone is valid */
        n_out += n;
        from = i;
    }
    return n_out + td_utf8_stream_finish(&stream, out + n_out);
}

static void check_line(const char *in_hex, const char *out_hex, uint64_t *random)
{
    unsigned char in[MAX_BYTES], expected[MAX_OUT];
    char out[MAX_OUT];
    size_t n_in = from_hex(in_hex, in), n_expected = from_hex(out_hex, expected);
    for (size_t i = 0; i < 64; i++) {
        *random = *random * 6364136223846793005u + 1442695040888963407u;
        uint64_t cuts = i == 0 ? 0 : i == 1 ? UINT64_MAX : i < n_in + 2 ? 1ull << (i - 1) : *random >> 3;
        size_t n = decode_cut(in, n_in, cuts, out);
        assert_int_equal(n, n_expected);
        assert_memory_equal(out, expected, n);
    }
    bool valid = n_in == n_expected && memcmp(in, expected, n_in) == 0;
    assert_int_equal(td_utf8_valid_prefix((char *)in, n_in) == n_in, valid);
}

static void test_python_answers(void **state)
{
    (void)state;
    char line[1024], in_hex[512], out_hex[512];
    uint64_t random = 1;
    int n = 0;
    FILE *f = fopen("tests/oracle/tokenizer/utf8.txt", "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        if (line[0] == '#') continue;
        assert_int_equal(sscanf(line, "%511s %511s", in_hex, out_hex), 2);
        check_line(in_hex, out_hex, &random);
        n++;
    }
    fclose(f);
    assert_true(n > 300);
}

static void test_waits_only_for_what_may_come(void **state)
{
    (void)state;
    td_utf8_stream stream;
    char out[TD_UTF8_STREAM_ROOM(4)];
    td_utf8_stream_init(&stream);
    assert_int_equal(td_utf8_stream_push(&stream, "\xF0\x9F\x98", 3, out), 0);
    assert_int_equal(td_utf8_stream_push(&stream, "\x80", 1, out), 4);
    assert_memory_equal(out, "\xF0\x9F\x98\x80", 4);
    assert_int_equal(td_utf8_stream_push(&stream, "\xED\xA0", 2, out), 6); /* a surrogate is wrong at its second byte */
    assert_int_equal(td_utf8_stream_push(&stream, "\xE2\x82", 2, out), 0);
    assert_int_equal(td_utf8_stream_push(&stream, "a", 1, out), 4);
    assert_memory_equal(out,
                        "\xEF\xBF\xBD"
                        "a",
                        4);
    assert_int_equal(td_utf8_stream_push(&stream, "", 0, out), 0);
    assert_int_equal(td_utf8_stream_finish(&stream, out), 0);
}

static void test_every_code_point(void **state)
{
    (void)state;
    for (uint32_t c = 0; c <= 0x10FFFF; c++) {
        char text[4];
        size_t n, n_put;
        if (c >= 0xD800 && c < 0xE000) continue;
        n_put = td_utf8_put(c, text);
        assert_int_equal(td_utf8_next((unsigned char *)text, (unsigned char *)text + n_put, &n), c);
        assert_int_equal(n, n_put);
        for (size_t k = 1; k < n_put; k++)
            assert_true(td_utf8_is_partial((unsigned char *)text, (unsigned char *)text + k));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_python_answers),
        cmocka_unit_test(test_waits_only_for_what_may_come),
        cmocka_unit_test(test_every_code_point),
    };
    return cmocka_run_group_tests_name("utf8", tests, NULL, NULL);
}
