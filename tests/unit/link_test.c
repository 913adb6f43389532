/* The link's parsers and texts, byte by byte, and the link of one rank. What needs two processes is in tests/faults. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "link/handshake.h"
#include "link/message.h"

#define PAGE 4096

/* n bytes that end where memory that may not be touched begins. */
static uint8_t *at_the_edge(const void *bytes, size_t n)
{
    uint8_t *pages = mmap(NULL, 17 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(pages != MAP_FAILED && n <= 16 * PAGE);
    assert_int_equal(mprotect(pages + 16 * PAGE, PAGE, PROT_NONE), 0);
    memcpy(pages + 16 * PAGE - n, bytes, n);
    return pages + 16 * PAGE - n;
}

static void leave_edge(const uint8_t *at, size_t n)
{
    munmap((void *)(uintptr_t)(at + n - 16 * PAGE), 17 * PAGE);
}

/* The head of a frame, written down by hand from message.h; the checksum is FNV-1a-64 of the rest. */
static void test_frame_bytes(void **state)
{
    (void)state;
    static const uint8_t expected[24] = { 'T', 'D', 'L', 'K', 1, 0, TD_FRAME_STEP, 0, 4, 3, 2, 1, 3, 0, 0, 0, 8, 7,
                                          6,   5,   4,   3,   2, 1 };
    uint8_t head[TD_FRAME_HEAD_BYTES];
    td_frame_write(head, TD_FRAME_STEP, 0x01020304, 0x0102030405060708ull, "abc", 3);
    assert_memory_equal(head, expected, sizeof expected);
    uint64_t sum = 0xcbf29ce484222325ull;
    for (int i = 0; i < 24; i++) sum = (sum ^ head[i]) * 0x100000001b3ull;
    for (int i = 0; i < 3; i++) sum = (sum ^ (uint8_t) "abc"[i]) * 0x100000001b3ull;
    for (int i = 0; i < 8; i++) assert_int_equal(head[24 + i], (uint8_t)(sum >> (8 * i)));
}

static void test_frame_refusals(void **state)
{
    (void)state;
    uint8_t good[TD_FRAME_HEAD_BYTES], head[TD_FRAME_HEAD_BYTES];
    td_frame frame;
    td_error err;
    td_frame_write(good, TD_FRAME_PROGRESS, 5, 9, "0123456789abcdef", 16);
    assert_int_equal(td_frame_parse(good, &frame, &err), TD_OK);
    assert_int_equal(td_frame_verify(good, &frame, "0123456789abcdef", &err), TD_OK);
    assert_int_equal(td_frame_verify(good, &frame, "0123456789abcdeg", &err), TD_EFORMAT);
    assert_non_null(strstr(err.text, "checksum"));
    /* Every single bit of the head, flipped, is refused by one or the other. */
    for (int bit = 0; bit < 8 * TD_FRAME_HEAD_BYTES; bit++) {
        memcpy(head, good, sizeof head);
        head[bit / 8] ^= (uint8_t)(1 << bit % 8);
        td_status status = td_frame_parse(head, &frame, &err);
        if (status == TD_OK) {
            static uint8_t large[TD_LINK_STEP_MAX];
            memcpy(large, "0123456789abcdef", 16);
            status = td_frame_verify(head, &frame, large, &err);
        }
        assert_int_not_equal(status, TD_OK);
        assert_int_equal(status == TD_EUNSUPPORTED, bit / 8 == 4 || bit / 8 == 5); /* only the protocol's bytes */
    }
}

static const unsigned all_types = (1u << TD_FRAME_TYPES) - 2;

/* A stream cut anywhere gives the same frames. */
static void test_reader_pieces(void **state)
{
    (void)state;
    uint8_t stream[512];
    size_t n = 0;
    for (int i = 0; i < 4; i++) {
        static const char payload[] = "\1\0\0\0label";
        size_t bytes = i % 2 ? 0 : 9;
        td_frame_write(stream + n, i % 2 ? TD_FRAME_BEAT : TD_FRAME_BARRIER, (uint32_t)i, 77, payload, bytes);
        memcpy(stream + n + TD_FRAME_HEAD_BYTES, payload, bytes);
        n += TD_FRAME_HEAD_BYTES + bytes;
    }
    for (size_t piece = 1; piece <= n; piece++) {
        td_frame_reader reader;
        td_frame frame;
        const uint8_t *payload;
        td_error err;
        int seen = 0;
        assert_int_equal(td_frame_reader_init(&reader, 64, all_types), TD_OK);
        for (size_t at = 0; at < n;) {
            size_t space, add = n - at < piece ? n - at : piece;
            uint8_t *to = td_frame_space(&reader, &space);
            assert_true(space > 0);
            if (add > space) add = space;
            memcpy(to, stream + at, add);
            td_frame_added(&reader, add);
            at += add;
            td_status status;
            while ((status = td_frame_next(&reader, &frame, &payload, &err)) == TD_OK) {
                assert_int_equal(frame.seq, seen);
                assert_int_equal(frame.generation, 77);
                assert_int_equal(frame.n_bytes, seen % 2 ? 0 : 9);
                if (seen % 2 == 0) assert_memory_equal(payload, "\1\0\0\0label", 9);
                seen++;
            }
            assert_int_equal(status, TD_EAGAIN);
        }
        assert_int_equal(seen, 4);
        td_frame_reader_deinit(&reader);
    }
}

static td_status feed(const void *bytes, size_t n, unsigned allowed, td_error *err)
{
    td_frame_reader reader;
    td_frame frame;
    const uint8_t *payload;
    size_t space;
    assert_int_equal(td_frame_reader_init(&reader, 4096, allowed), TD_OK);
    void *to = td_frame_space(&reader, &space);
    assert_true(n <= space);
    memcpy(to, bytes, n);
    td_frame_added(&reader, n);
    td_status status = td_frame_next(&reader, &frame, &payload, err);
    td_frame_reader_deinit(&reader);
    return status;
}

static void test_reader_refusals(void **state)
{
    (void)state;
    uint8_t head[TD_FRAME_HEAD_BYTES];
    td_error err;
    assert_int_equal(feed("G", 1, all_types, &err), TD_EFORMAT); /* at the first byte, not at the 32nd */
    assert_int_equal(feed("TDLX", 4, all_types, &err), TD_EFORMAT);
    assert_int_equal(feed("TDLK", 4, all_types, &err), TD_EAGAIN);
    td_frame_write(head, TD_FRAME_BEAT, 0, 0, NULL, 0);
    assert_int_equal(feed(head, 32, all_types, &err), TD_OK);
    assert_int_equal(feed(head, 31, all_types, &err), TD_EAGAIN);
    assert_int_equal(feed(head, 32, 1u << TD_FRAME_HELLO, &err), TD_EFORMAT);
    assert_non_null(strstr(err.text, "beat message where none may come"));
    td_frame_write(head, TD_FRAME_STEP, 0, 0, "x", 1);
    td_put_u32(head + 12, TD_LINK_STEP_MAX);
    assert_int_equal(feed(head, 32, all_types, &err), TD_EFORMAT); /* 16 MiB will not be waited for in 4 KiB */
    assert_non_null(strstr(err.text, "too large here"));
    td_put_u32(head + 12, TD_LINK_STEP_MAX + 1);
    assert_int_equal(feed(head, 32, all_types, &err), TD_EFORMAT);
    assert_non_null(strstr(err.text, "allowed are 0 to 16777216"));
}

static td_status check_text(const char *text, size_t n, td_error *err)
{
    uint8_t *at = at_the_edge(text, n);
    td_status status = td_identity_check((const char *)at, n, err);
    leave_edge(at, n);
    return status;
}

static void test_identity_check(void **state)
{
    (void)state;
    td_error err;
    static const char good[] = "@world=2\n@rank=1\nkv=fp8\nempty=\nequals=a=b\nnon.ascii_key-1=\xc3\xa9\n";
    assert_int_equal(check_text(good, sizeof good - 1, &err), TD_OK);
    assert_int_equal(check_text("", 0, &err), TD_OK);
    for (size_t n = 1; n < sizeof good - 1; n++) /* a prefix is an identity exactly when it ends a line */
        assert_int_equal(check_text(good, n, &err), good[n - 1] == '\n' ? TD_OK : TD_EFORMAT);
    static const struct {
        const char *text, *words;
    } bad[] = {
        { "a\n", "line 1 is not key=value" },        { "a=1\n=2\n", "line 2 is not key=value" },
        { "a b=1\n", "wrong byte in the key" },      { "a=\x01\n", "control byte in the value" },
        { "a=1\nb=2\na=1\n", "line 3: a is there" }, { "a=1\n\n", "line 2 is not" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(check_text(bad[i].text, strlen(bad[i].text), &err), TD_EFORMAT);
        assert_non_null(strstr(err.text, bad[i].words));
    }
    assert_int_equal(check_text("a=\0\n", 4, &err), TD_EFORMAT);
    assert_int_equal(check_text("\0=1\n", 4, &err), TD_EFORMAT);
    char *large = malloc(TD_IDENTITY_MAX + 1);
    assert_non_null(large);
    memset(large, 'a', TD_IDENTITY_MAX + 1);
    assert_int_equal(td_identity_check(large, TD_IDENTITY_MAX + 1, &err), TD_EFORMAT);
    for (size_t i = 0; i < 600; i++)
        memcpy(large + 6 * i, (char[]){ 'k', (char)('a' + i / 26), (char)('a' + i % 26), '=', '1', '\n' }, 6);
    assert_int_equal(td_identity_check(large, 6 * 512, &err), TD_OK);
    assert_int_equal(td_identity_check(large, 6 * 513, &err), TD_EFORMAT);
    free(large);
}

static void expect_compare(const char *mine, int my_rank, const char *theirs, td_status status, const char *words)
{
    td_error err = { 0 };
    assert_int_equal(td_identity_compare(mine, strlen(mine), my_rank, theirs, strlen(theirs), 1 - my_rank, &err),
                     status);
    if (words && !strstr(err.text, words)) fail_msg("'%s' does not say '%s'", err.text, words);
}

static void test_identity_compare(void **state)
{
    (void)state;
    static const char a[] = "@rank=0\n@build=x\nkv=fp8\nctx=1\n";
    static const char b[] = "@rank=1\n@build=x\nctx=1\nkv=fp8\n";
    static const char c[] = "@rank=1\n@build=y\nctx=2\nkv=fp8\nmore=\x1b[31m\n";
    expect_compare(a, 0, b, TD_OK, NULL); /* order does not matter */
    expect_compare(b, 1, a, TD_OK, NULL);
    static const char words[] = "the ranks differ in build: rank 0 has 'x', rank 1 has 'y'";
    expect_compare(a, 0, c, TD_EINVAL, words); /* the same words on both ends */
    expect_compare(c, 1, a, TD_EINVAL, words);
    expect_compare(a, 0, "@rank=1\n@build=x\nkv=fp8\n", TD_EINVAL, "ctx: rank 0 has '1', rank 1 has no such setting");
    expect_compare(a, 0, "@rank=1\n@build=x\nkv=fp8\nctx=1\nm=2\n", TD_EINVAL,
                   "m: rank 0 has no such setting, rank 1 has '2'");
    expect_compare(a, 0, a, TD_EINVAL, "says it is rank 0, expected rank 1");
    expect_compare(a, 0, "@build=x\n", TD_EINVAL, "says it is rank nothing");
    expect_compare(a, 0, "@rank=1\n@build=\x9b\xff\nkv=fp8\nctx=1\n", TD_EINVAL,
                   "rank 1 has '?\?'"); /* no terminal codes */
}

static void test_identity_create(void **state)
{
    (void)state;
    td_link_options o;
    td_error err;
    char *text;
    size_t n;
    td_link_options_init(&o);
    o.settings = "kv=fp8\n";
    o.build = "abc";
    assert_int_equal(td_identity_create(&o, &text, &n, &err), TD_OK);
    assert_non_null(strstr(text, "@build=abc\n"));
    assert_string_equal(text + n - 7, "kv=fp8\n");
    free(text);
    o.settings = "kv";
    assert_int_equal(td_identity_create(&o, &text, &n, &err), TD_EINVAL);
    assert_int_equal(err.status, TD_EINVAL);
    assert_non_null(strstr(err.text, "this rank's own settings"));
    o.settings = "@build=other\n";
    assert_int_equal(td_identity_create(&o, &text, &n, &err), TD_EINVAL);
}

static void test_printable(void **state)
{
    (void)state;
    char text[8];
    td_printable(text, sizeof text, "a\x1b\n\x80z", 5);
    assert_string_equal(text, "a???z");
    td_printable(text, sizeof text, "0123456789", 10);
    assert_string_equal(text, "0123456");
}

static void test_one_rank(void **state)
{
    (void)state;
    td_link_options o;
    td_link *link;
    td_error err;
    td_exchange x;
    size_t have = 0;
    uint64_t done, total;
    char buf[8] = "own";
    td_link_options_init(&o);
    o.region_bytes = 8192;
    assert_int_equal(td_link_open(&o, &link, &err), TD_OK);
    assert_int_equal(td_link_world(link), 1);
    assert_string_equal(td_link_transport(link), "loop");
    unsigned char *a = td_link_buffer(link, 1), *b = td_link_buffer(link, 4096);
    assert_true(a && b && (uintptr_t)a % 4096 == 0 && b == a + 4096);
    assert_null(td_link_buffer(link, 1));
    assert_null(td_link_buffer(link, SIZE_MAX));
    assert_int_equal(td_link_gather(link, buf, 8, &err), TD_OK);
    assert_string_equal(buf, "own");
    assert_int_equal(td_link_exchange_start(link, &x, buf, 8, NULL, 8, &err), TD_OK);
    assert_int_equal(td_link_exchange_wait(link, &x, 1, &have, &err), TD_OK);
    assert_int_equal(have, 8); /* a caller's loop ends */
    assert_int_equal(td_link_exchange_finish(link, &x, &err), TD_OK);
    assert_int_equal(td_link_check(link, "layer", 3, &err), TD_OK);
    assert_int_equal(td_link_send_step(link, buf, 8, &err), TD_OK);
    assert_int_equal(td_link_recv_step(link, buf, 8, &have, 0, &err), TD_EINVAL);
    assert_int_equal(td_link_barrier(link, "loaded", 1, &err), TD_OK);
    assert_int_equal(td_link_barrier(link, "", 1, &err), TD_EINVAL);
    td_link_report_progress(link, 1, 2);
    td_link_peer_progress(link, &done, &total);
    td_link_progress(link);
    assert_int_equal(td_link_state(link), TD_LINK_UP);
    td_link_announce_stop(link);
    td_link_close(link);
    td_link_close(NULL);
}

static void test_options(void **state)
{
    (void)state;
    td_link_options o;
    td_link *link = NULL;
    td_error err;
    td_link_options_init(&o);
    o.world = 3;
    assert_int_equal(td_link_open(&o, &link, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, "world: 3, allowed are 1 to 2"));
    o.world = 2, o.rank = 2;
    assert_int_equal(td_link_open(&o, &link, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, "rank: 2, allowed are 0 to 1"));
    o.rank = 0, o.port = 65536;
    assert_int_equal(td_link_open(&o, &link, &err), TD_EINVAL);
    o.port = 1, o.transport = "udp";
    assert_int_equal(td_link_open(&o, &link, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, "'udp', allowed are auto, shm, tcp, rc"));
    o.transport = "tcp", o.master_host = "not an address";
    td_status status = td_link_open(&o, &link, &err);
    assert_true(status == TD_ENOTFOUND || status == TD_EUNSUPPORTED);
    assert_non_null(strstr(err.text, status == TD_ENOTFOUND ? "not an address" : "built without UCX"));
    assert_null(link);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_frame_bytes),     cmocka_unit_test(test_frame_refusals),
        cmocka_unit_test(test_reader_pieces),   cmocka_unit_test(test_reader_refusals),
        cmocka_unit_test(test_identity_check),  cmocka_unit_test(test_identity_compare),
        cmocka_unit_test(test_identity_create), cmocka_unit_test(test_printable),
        cmocka_unit_test(test_one_rank),        cmocka_unit_test(test_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
