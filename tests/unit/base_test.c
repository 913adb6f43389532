/* base/: number formats against their definitions, arenas at their limits, error texts, hashes. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/arena.h"
#include "base/clock.h"
#include "base/hash.h"
#include "base/num.h"

/* Nearest of n codes to x, ties to the even code: the definition, searched. */
static int nearest(float x, float (*value)(int), int n)
{
    int best = 0;
    for (int q = 1; q < n; q++) {
        double d = fabs((double)value(q) - x), e = fabs((double)value(best) - x);
        if (d < e || (d == e && q % 2 == 0)) best = q;
    }
    return best;
}

static float e4m3_value(int q)
{
    return td_e4m3_f32((td_e4m3)q);
}

static void test_e4m3(void **state)
{
    (void)state;
    assert_true(isnan(td_e4m3_f32(0x7f)));
    assert_true(td_e4m3_f32(0x7e) == 448.0f);
    assert_true(td_e4m3_f32(0x01) == 0x1p-9f);
    for (int q = 0; q < 256; q++)
        if ((q & 0x7f) != 0x7f) assert_int_equal(td_f32_e4m3(e4m3_value(q)), q);
    for (int i = 0; i < 20000; i++) {
        float x = 460.0f * (float)i / 20000.0f * (i % 3 ? 1.0f : 0.01f) * (i % 7 ? 1.0f : 0.001f);
        assert_int_equal(td_f32_e4m3(x), nearest(x, e4m3_value, 127));
        assert_int_equal(td_f32_e4m3(-x), td_f32_e4m3(x) | 0x80);
    }
    for (int q = 0; q < 126; q++) { /* exact ties */
        float tie = (e4m3_value(q) + e4m3_value(q + 1)) / 2;
        assert_int_equal(td_f32_e4m3(tie), q % 2 ? q + 1 : q);
    }
}

static void test_f16(void **state)
{
    (void)state;
    for (int h = 0; h < 65536; h++) {
        float x = td_f16_f32((td_f16)h);
        if (isnan(x)) continue;
        assert_int_equal(td_f32_f16(x), h);
        if ((h & 0x7fff) < 0x7bff) {
            float next = td_f16_f32((td_f16)(h + 1)), tie = (x + next) / 2; /* exact in fp32 */
            assert_int_equal(td_f32_f16(tie), h % 2 ? h + 1 : h);
            assert_int_equal(td_f32_f16(nextafterf(tie, x)), h);
            assert_int_equal(td_f32_f16(nextafterf(tie, next)), h + 1);
        }
    }
    assert_int_equal(td_f32_f16(65519.0f), 0x7bff);
    assert_int_equal(td_f32_f16(65520.0f), 0x7c00);
}

static void test_bf16(void **state)
{
    (void)state;
    for (int h = 0; h < 65536; h++) {
        float x = td_bf16_f32((td_bf16)h);
        if (isnan(x)) {
            assert_true(isnan(td_bf16_f32(td_f32_bf16(x))));
            continue;
        }
        assert_int_equal(td_f32_bf16(x), h);
        if ((h & 0x7fff) >= 0x7f7f) continue;
        uint32_t bits = td_f32_bits(x);
        assert_int_equal(td_f32_bf16(td_bits_f32(bits + 0x7fff)), h);
        assert_int_equal(td_f32_bf16(td_bits_f32(bits + 0x8000)), h % 2 ? h + 1 : h);
        assert_int_equal(td_f32_bf16(td_bits_f32(bits + 0x8001)), h + 1);
    }
}

static void test_arena(void **state)
{
    (void)state;
    td_arena arena;
    td_arena_init_fixed(&arena, NULL, SIZE_MAX); /* counts */
    assert_null(td_arena_take(&arena, 3, 1));
    assert_null(td_arena_take(&arena, 100, 64));
    assert_int_equal(arena.used_bytes, 164);

    _Alignas(64) unsigned char buffer[164];
    td_arena_init_fixed(&arena, buffer, sizeof buffer);
    assert_ptr_equal(td_arena_take(&arena, 3, 1), buffer);
    assert_ptr_equal(td_arena_take(&arena, 100, 64), buffer + 64);
    assert_null(td_arena_take(&arena, 1, 1));

    td_arena_init(&arena, 1 << 20);
    for (int i = 0; i < 1000; i++) assert_non_null(td_arena_take(&arena, 1000, 8));
    assert_null(td_arena_take(&arena, 1 << 20, 8)); /* over the limit */
    assert_string_equal(td_arena_strdup(&arena, "ok"), "ok");
    assert_null(td_arena_take(&arena, SIZE_MAX, 8));
    td_arena_deinit(&arena);
}

static void test_error(void **state)
{
    (void)state;
    td_error err;
    char big[3000];
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    assert_int_equal(td_fail(&err, TD_EIO, "%s", big), TD_EIO);
    assert_int_equal(strlen(err.text), TD_ERROR_TEXT_CAP - 1);
    td_fail(&err, TD_EFORMAT, "line %d", 3);
    assert_int_equal(td_error_prefix(&err, "%s", "file.json"), TD_EFORMAT);
    assert_string_equal(err.text, "file.json: line 3");
    assert_int_equal(td_fail(NULL, TD_EPEER, "x"), TD_EPEER);
    size_t size = 7;
    assert_int_equal(td_mul_size(SIZE_MAX, 2, &size), TD_EINVAL);
    assert_int_equal(size, 7);
}

static void test_hash(void **state)
{
    (void)state;
    uint8_t digest[TD_SHA256_BYTES];
    char hex[65];
    td_sha256_of("abc", 3, digest);
    td_hex(digest, sizeof digest, hex);
    assert_string_equal(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    td_sha256 *sha = td_sha256_create();
    td_sha256_update(sha, "a", 1);
    td_sha256_update(sha, "bc", 2);
    td_sha256_finish(sha, digest);
    td_hex(digest, sizeof digest, hex);
    assert_string_equal(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    assert_true(td_fnv1a(TD_FNV1A_START, "a", 1) == 0xaf63dc4c8601ec8cull);
}

/* A wait counts a second at most for a time in which it did not look: the process may have been stopped. */
static void test_ticks(void **state)
{
    (void)state;
    int64_t now = td_now_ns(), last = now - 90000000000ll;
    assert_int_equal(td_clock_tick(&last), 1000000000);
    assert_true(last >= now);
    int64_t passed = td_clock_tick(&last);
    assert_true(passed >= 0 && passed < 1000000000);
}

static void test_pause(void **state)
{
    (void)state;
    td_pace pace = { .spin_ns = 1000, .yield_ns = 2000, .sleep_ns = 20000000 };
    int64_t start = td_now_ns();
    td_pause(&pace, 2000);
    assert_true(td_now_ns() - start >= pace.sleep_ns);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_e4m3),  cmocka_unit_test(test_f16),   cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_arena), cmocka_unit_test(test_error), cmocka_unit_test(test_hash),
        cmocka_unit_test(test_ticks), cmocka_unit_test(test_pause),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
