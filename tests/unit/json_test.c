/* base/json.h and json_write.h: what is accepted, what is refused, how values come out again. Numbers are compared with
 * Python's repr (tests/oracle/chat/numbers.txt). */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/json_write.h"

typedef struct parsed {
    td_arena arena;
    char *text;
    const td_json *value;
    td_error err;
    td_status status;
} parsed;

static parsed parse_n(const char *text, size_t n)
{
    parsed p = { .text = malloc(n + 1) };
    memcpy(p.text, text, n);
    td_arena_init(&p.arena, 0);
    p.status = td_json_parse(&p.arena, p.text, n, &p.value, &p.err);
    return p;
}

static void done(parsed *p)
{
    td_arena_deinit(&p->arena);
    free(p->text);
}

/* text in, compact text out again, or NULL and the refusal. */
static void expect(const char *text, const char *compact, const char *refusal)
{
    parsed p = parse_n(text, strlen(text));
    if (refusal) {
        assert_int_equal(p.status, TD_EFORMAT);
        assert_string_equal(p.err.text, refusal);
    } else {
        if (p.status) print_error("%s: %s\n", text, p.err.text);
        assert_int_equal(p.status, TD_OK);
        td_buf buf;
        td_buf_init(&buf, 0);
        td_json_writer w = { .out = &buf };
        td_json_write_value(&w, p.value);
        assert_string_equal(buf.data, compact);
        td_buf_deinit(&buf);
    }
    done(&p);
}

static void test_accepts(void **state)
{
    (void)state;
    expect("null", "null", NULL);
    expect("\xef\xbb\xbf [ ] ", "[]", NULL);
    expect("\t{ }\r\n", "{}", NULL);
    expect("[1,-0,0.50,1E+2,123456789012345678901234567890]", "[1,-0,0.50,1E+2,123456789012345678901234567890]", NULL);
    expect("{\"a\":[true,false,{\"b\":[[]]}],\"c\":\"\"}", "{\"a\":[true,false,{\"b\":[[]]}],\"c\":\"\"}", NULL);
    expect("\"\\u00e9\\u20AC\\ud83d\\ude00\\/\"", "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80/\"", NULL);
    expect("\"\\b\\f\\n\\r\\t\\\"\\\\\\u0001\\u007f\"", "\"\\b\\f\\n\\r\\t\\\"\\\\\\u0001\x7f\"", NULL);
    /* halves of surrogate pairs, alone, in the wrong order, before another escape */
    expect("\"\\ud83dx\"", "\"\xef\xbf\xbdx\"", NULL);
    expect("\"\\ude00\\ud83d\"", "\"\xef\xbf\xbd\xef\xbf\xbd\"", NULL);
    expect("\"\\ud83d\\u0041\"", "\"\xef\xbf\xbd\x41\"", NULL);
    expect("\"\\ud83d\\ud83d\\ude00\"", "\"\xef\xbf\xbd\xf0\x9f\x98\x80\"", NULL);
}

static void test_refuses(void **state)
{
    (void)state;
    expect("", NULL, "not JSON: a value expected at byte 0");
    expect("  ", NULL, "not JSON: a value expected at byte 2");
    expect("[1,]", NULL, "not JSON: a value expected at byte 3");
    expect("{\"a\":1,}", NULL, "not JSON: a member name expected at byte 7");
    expect("{\"a\" 1}", NULL, "not JSON: ':' expected at byte 5");
    expect("{a:1}", NULL, "not JSON: a member name expected at byte 1");
    expect("[1 2]", NULL, "not JSON: ',' or ']' expected at byte 3");
    expect("{\"a\":1 \"b\":2}", NULL, "not JSON: ',' or '}' expected at byte 7");
    expect("[1}", NULL, "not JSON: ',' or ']' expected at byte 2");
    expect("1 2", NULL, "not JSON: text after the value at byte 2");
    expect("\"abc", NULL, "not JSON: a string without end at byte 4");
    expect("\"a\nb\"", NULL, "not JSON: a control character in a string at byte 2");
    expect("\"\\x41\"", NULL, "not JSON: unknown escape in a string at byte 2");
    expect("\"\\u12g4\"", NULL, "not JSON: \\u without four hex digits at byte 2");
    expect("01", NULL, "not JSON: text after the value at byte 1");
    expect("-", NULL, "not JSON: a value expected at byte 1");
    expect("+1", NULL, "not JSON: a value expected at byte 0");
    expect("1.", NULL, "not JSON: a digit expected after the point at byte 2");
    expect(".5", NULL, "not JSON: a value expected at byte 0");
    expect("1e", NULL, "not JSON: a digit expected in the exponent at byte 2");
    expect("NaN", NULL, "not JSON: a value expected at byte 0");
    expect("-Infinity", NULL, "not JSON: a value expected at byte 1");
    expect("nul", NULL, "not JSON: a value expected at byte 0");
    expect("'a'", NULL, "not JSON: a value expected at byte 0");
    expect("[1]//", NULL, "not JSON: text after the value at byte 3");
    /* ill-formed UTF-8: stray, cut, overlong, surrogate, beyond U+10FFFF */
    expect("\"\x80\"", NULL, "not JSON: invalid UTF-8 at byte 1");
    expect("\"a\xe2\x82\"", NULL, "not JSON: invalid UTF-8 at byte 2");
    expect("\"\xc0\xaf\"", NULL, "not JSON: invalid UTF-8 at byte 1");
    expect("\"\xe0\x9f\xbf\"", NULL, "not JSON: invalid UTF-8 at byte 1");
    expect("\"\xed\xa0\x80\"", NULL, "not JSON: invalid UTF-8 at byte 1");
    expect("\"\xf4\x90\x80\x80\"", NULL, "not JSON: invalid UTF-8 at byte 1");
    expect("\"12345678\xff\"", NULL, "not JSON: invalid UTF-8 at byte 9");
    expect("\"\xf0\x9f\x98\"", NULL, "not JSON: invalid UTF-8 at byte 1");
}

static void test_zero_bytes(void **state)
{
    (void)state;
    parsed p = parse_n("\"a\0b\"", 5);
    assert_int_equal(p.status, TD_EFORMAT);
    done(&p);
    p = parse_n("1\0", 2);
    assert_string_equal(p.err.text, "not JSON: text after the value at byte 1");
    done(&p);
    p = parse_n("{\"a\\u0000b\":\"\\u0000\"}", 21);
    size_t n;
    assert_int_equal(p.status, TD_OK);
    assert_memory_equal(td_json_key_at(p.value, 0, &n), "a\0b", 3);
    assert_int_equal(n, 3);
    assert_null(td_json_get(p.value, "a"));
    assert_non_null(td_json_string(td_json_get_n(p.value, "a\0b", 3), &n));
    assert_int_equal(n, 1);
    done(&p);
}

static void test_same_names(void **state)
{
    (void)state;
    expect("{\"a\":1,\"b\":2,\"a\":3}", "{\"a\":3,\"b\":2}", NULL);
    expect("{\"a\":1,\"a\":2,\"a\":[4],\"\":0,\"\":1}", "{\"a\":[4],\"\":1}", NULL);
    /* many members: the sorted way must agree with the obvious one */
    srand(7);
    for (int round = 0; round < 300; round++) {
        int n = 1 + rand() % 60, range = 1 + rand() % 60, last[64], order[64], n_order = 0;
        char text[2048], compact[2048];
        int at = sprintf(text, "{");
        memset(last, -1, sizeof last);
        for (int i = 0; i < n; i++) {
            int name = rand() % range;
            if (last[name] < 0) order[n_order++] = name;
            last[name] = i;
            at += sprintf(text + at, "%s\"k%d\":%d", i ? ", " : "", name, i);
        }
        sprintf(text + at, "}");
        at = sprintf(compact, "{");
        for (int i = 0; i < n_order; i++)
            at += sprintf(compact + at, "%s\"k%d\":%d", i ? "," : "", order[i], last[order[i]]);
        sprintf(compact + at, "}");
        expect(text, compact, NULL);
        parsed p = parse_n(text, strlen(text));
        for (int name = 0; name < 64; name++) {
            char key[8];
            int64_t x = -1;
            sprintf(key, "k%d", name);
            td_status status = td_json_int64(td_json_get(p.value, key), &x);
            assert_int_equal(status, name < range && last[name] >= 0 ? TD_OK : TD_EINVAL);
            assert_int_equal(x, name < range ? last[name] : -1);
        }
        done(&p);
    }
}

static char *repeat(const char *piece, size_t n, const char *end)
{
    size_t piece_bytes = strlen(piece);
    char *text = malloc(n * piece_bytes + strlen(end) + 1);
    for (size_t i = 0; i < n; i++) memcpy(text + i * piece_bytes, piece, piece_bytes);
    strcpy(text + n * piece_bytes, end);
    return text;
}

static void test_limits(void **state)
{
    (void)state;
    for (int depth = TD_JSON_MAX_DEPTH; depth <= TD_JSON_MAX_DEPTH + 1; depth++) {
        char text[2 * TD_JSON_MAX_DEPTH + 8];
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        parsed p = parse_n(text, (size_t)depth * 2);
        assert_int_equal(p.status, depth > TD_JSON_MAX_DEPTH ? TD_EFORMAT : TD_OK);
        if (p.status) assert_string_equal(p.err.text, "JSON deeper than 256 levels");
        done(&p);
    }
    char *text = repeat("[],", TD_JSON_MAX_VALUES + 10, "1]");
    text[0] = '[';
    text[1] = '1';
    parsed p = parse_n(text, strlen(text));
    assert_string_equal(p.err.text, "JSON with more than 4194304 values");
    done(&p);
    free(text);
    /* an arena that is full is no crash */
    td_error err;
    char small[] = "[1,2,3,4,5,6,7,8]";
    char room[64];
    td_arena arena;
    const td_json *value = NULL;
    td_arena_init_fixed(&arena, room, sizeof room);
    assert_int_equal(td_json_parse(&arena, small, strlen(small), &value, &err), TD_ENOMEM);
    assert_null(value);
}

/* Every prefix, ending right before a page that must not be touched: but for the one byte of room that is promised. */
static void test_prefixes(void **state)
{
    (void)state;
    const char *text =
        "\xef\xbb\xbf{\"a\\ud83d\\ude00\":[1.5e-3,\"\xf0\x9f\x98\x80 plain text of some length\",null,true],"
        "\"b\":{\"c\":-12,\"\":\"\\u00e9\\n\"}}";
    size_t n = strlen(text), page = (size_t)sysconf(_SC_PAGESIZE);
    char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_int_equal(mprotect(pages + page, page, PROT_NONE), 0);
    for (size_t k = 0; k <= n; k++) {
        char *at = pages + page - k - 1;
        memcpy(at, text, k);
        td_arena arena;
        const td_json *value;
        td_error err;
        td_arena_init(&arena, 0);
        assert_int_equal(td_json_parse(&arena, at, k, &value, &err), k == n ? TD_OK : TD_EFORMAT);
        td_arena_deinit(&arena);
    }
    munmap(pages, 2 * page);
}

static void test_getters(void **state)
{
    (void)state;
    const char *text =
        "{\"i\":-9223372036854775808,\"j\":9223372036854775808,\"r\":3.0,\"h\":0.5,\"s\":\"x\",\"t\":true,"
        "\"n\":null,\"a\":[1,2],\"z\":-0,\"big\":1e400}";
    parsed p = parse_n(text, strlen(text));
    const td_json *v = p.value;
    int64_t i = 7;
    double x = 7;
    bool b = false;
    assert_int_equal(td_json_int64(td_json_get(v, "i"), &i), TD_OK);
    assert_true(i == INT64_MIN);
    assert_int_equal(td_json_int64(td_json_get(v, "j"), &i), TD_EINVAL);
    assert_true(i == INT64_MIN);
    assert_int_equal(td_json_int64(td_json_get(v, "r"), &i), TD_OK);
    assert_int_equal(i, 3);
    assert_int_equal(td_json_int64(td_json_get(v, "h"), &i), TD_EINVAL);
    assert_int_equal(td_json_int64(td_json_get(v, "s"), &i), TD_EINVAL);
    assert_int_equal(td_json_int64(td_json_get(v, "z"), &i), TD_OK);
    assert_int_equal(i, 0);
    assert_int_equal(td_json_double(td_json_get(v, "j"), &x), TD_OK);
    assert_true(x == 0x1p63);
    assert_int_equal(td_json_double(td_json_get(v, "big"), &x), TD_OK);
    assert_true(isinf(x));
    assert_int_equal(td_json_double(td_json_get(v, "t"), &x), TD_EINVAL);
    assert_int_equal(td_json_bool(td_json_get(v, "t"), &b), TD_OK);
    assert_true(b);
    assert_int_equal(td_json_bool(td_json_get(v, "n"), &b), TD_EINVAL);
    assert_true(td_json_is_null(td_json_get(v, "n")) && td_json_is_null(td_json_get(v, "absent")));
    assert_int_equal(td_json_count(td_json_get(v, "a")), 2);
    assert_null(td_json_at(td_json_get(v, "a"), 2));
    assert_null(td_json_at(td_json_get(v, "s"), 0));
    assert_null(td_json_get(td_json_get(v, "a"), "x"));
    assert_true(td_json_equals(td_json_get(v, "s"), "x") && !td_json_equals(td_json_get(v, "s"), "xy"));
    assert_string_equal(td_json_kind_name(td_json_get(v, "a")), "an array");
    assert_string_equal(td_json_kind_name(NULL), "nothing");
    done(&p);
}

static void test_repr(void **state)
{
    (void)state;
    FILE *file = fopen("tests/oracle/chat/numbers.txt", "r");
    char line[128], repr[64], got[TD_REPR_CAP];
    unsigned long long bits;
    int n = 0;
    assert_non_null(file);
    while (fgets(line, sizeof line, file)) {
        double x;
        assert_int_equal(sscanf(line, "%llx %63s", &bits, repr), 2);
        memcpy(&x, &bits, sizeof x);
        assert_int_equal(td_double_repr(x, got), strlen(repr));
        assert_string_equal(got, repr);
        n++;
    }
    assert_true(n > 3000);
    fclose(file);
    td_double_repr(INFINITY, got);
    assert_string_equal(got, "inf");
    td_double_repr(-NAN, got);
    assert_string_equal(got, "nan");
}

static void test_writer(void **state)
{
    (void)state;
    td_buf buf;
    td_buf_init(&buf, 0);
    td_json_writer w = { .out = &buf };
    td_json_write_begin(&w, '{');
    td_json_write_member_text(&w, "id", "a\"b");
    td_json_write_member_text(&w, "none", NULL);
    td_json_write_key(&w, "list");
    td_json_write_begin(&w, '[');
    td_json_write_int(&w, -5);
    td_json_write_uint(&w, UINT64_MAX);
    td_json_write_double(&w, 0.1);
    td_json_write_double(&w, NAN);
    td_json_write_begin(&w, '{');
    td_json_write_end(&w, '}');
    td_json_write_end(&w, ']');
    td_json_write_member_bool(&w, "ok", true);
    td_json_write_member_int(&w, "n", 3);
    td_json_write_end(&w, '}');
    assert_string_equal(buf.data, "{\"id\":\"a\\\"b\",\"none\":null,\"list\":[-5,18446744073709551615,0.1,null,{}],"
                                  "\"ok\":true,\"n\":3}");
    td_buf_clear(&buf);
    /* ill-formed text: one U+FFFD a maximal ill-formed part, as Python's errors="replace" */
    td_json_escape(&buf, "a\xff\xe2\x82z\xf0\x9f\x98\xc0\xaf\xed\xa0\x80\xe2\x82", 15);
    assert_string_equal(buf.data, "\"a\xef\xbf\xbd\xef\xbf\xbdz\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"
                                  "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"");
    td_buf_deinit(&buf);
}

static void test_buf(void **state)
{
    (void)state;
    td_buf buf;
    td_buf_init(&buf, 600);
    for (int i = 0; i < 100; i++) td_buf_printf(&buf, "%d,", 10 + i % 90);
    assert_int_equal(buf.n_bytes, 300);
    td_buf_printf(&buf, "%0300d", 1);
    assert_false(buf.failed);
    assert_int_equal(buf.n_bytes, 600);
    td_buf_putc(&buf, 'x');
    assert_true(buf.failed);
    assert_int_equal(buf.n_bytes, 600);
    td_buf_clear(&buf);
    td_buf_puts(&buf, "abcdef");
    td_buf_drop(&buf, 4);
    assert_string_equal(buf.data, "ef");
    td_buf_deinit(&buf);
}

/* Files: the text stays as it was, mistakes are named by line (line ends inside strings, escaped ones, do not count),
 * and one name twice is a mistake in small objects and in sorted ones. */
static void test_files(void **state)
{
    (void)state;
    const struct {
        const char *text, *refusal; /* NULL: none */
    } cases[] = {
        { "{\n \"a\": \"x\\ny\",\n \"b\": [1,\n2]\n}\n", NULL },
        { "{\"a\": {\"k\": 1}, \"b\": {\"k\": 1}}", NULL },
        { "{\n\"a\": 1\n\"b\": 2}", "line 3: ',' or '}' expected" },
        { "[\"\\n\\n\\n\",\n nope]", "line 2: a value expected" },
        { "", "line 1: a value expected" },
        { "{}\n{}", "line 2: text after the value" },
        { "{\n\"a\": 1,\n\"b\": 2,\n\"a\": 1\n}", "line 5: duplicate names in the object that ends here" },
        { "{\"a\":0,\"b\":0,\"c\":0,\"d\":0,\"e\":0,\"f\":0,\"g\":0,\"h\":0,\"i\":0,\"j\":0,\"k\":0,\"l\":0,\"m\":0,"
          "\"n\":0,\"o\":0,\"p\":0,\"q\":0,\"\\u0062\":0}",
          "line 1: duplicate names in the object that ends here" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        td_arena arena;
        td_error err;
        const td_json *value = NULL;
        char before[256];
        snprintf(before, sizeof before, "%s", cases[i].text);
        td_arena_init(&arena, 0);
        td_status status = td_json_parse_file(&arena, before, strlen(before), &value, &err);
        assert_int_equal(status, cases[i].refusal ? TD_EFORMAT : TD_OK);
        if (cases[i].refusal) assert_string_equal(err.text, cases[i].refusal);
        assert_string_equal(before, cases[i].text);
        td_arena_deinit(&arena);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accepts),    cmocka_unit_test(test_refuses), cmocka_unit_test(test_zero_bytes),
        cmocka_unit_test(test_same_names), cmocka_unit_test(test_limits),  cmocka_unit_test(test_prefixes),
        cmocka_unit_test(test_getters),    cmocka_unit_test(test_repr),    cmocka_unit_test(test_writer),
        cmocka_unit_test(test_buf),        cmocka_unit_test(test_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
