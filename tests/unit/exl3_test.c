/* EXL3 decoding against known answers: 27 packed layers (every width, every codebook) made and checked outside this
 * project (tests/oracle/exl3/README.md), codebook digests, and a decoder written from the definition, bit by bit.
 * `unit_exl3 --speed` prints decode rates instead. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/hash.h"
#include "checkpoint/exl3.h"
#include "checkpoint/hadamard.h"
#include "exl3_vectors.h"

static uint64_t next_random(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return *seed >> 33;
}

/* q of a layer, whole, as fp16 [k][n]; out malloced. */
static td_f16 *inner_f16(const td_exl3 *w)
{
    td_f16 *inner = malloc((size_t)w->k * (size_t)w->n * sizeof *inner);
    float *panel = malloc((size_t)w->k * 16 * sizeof *panel);
    assert_true(inner && panel);
    for (int nt = 0; nt < w->n / 16; nt++) {
        td_exl3_panel_f32(w, nt, 0, w->k, panel);
        for (int i = 0; i < w->k * 16; i++) {
            td_f16 h = td_f32_f16(panel[i]);
            assert_true(td_f16_f32(h) == panel[i]);
            inner[(size_t)(i / 16) * (size_t)w->n + (size_t)(nt * 16 + i % 16)] = h;
        }
    }
    free(panel);
    return inner;
}

static void assert_sha256(const char *what, const char *name, const void *data, size_t n_bytes, const char *hex)
{
    uint8_t digest[TD_SHA256_BYTES];
    char text[2 * TD_SHA256_BYTES + 1];
    td_sha256_of(data, n_bytes, digest);
    td_hex(digest, sizeof digest, text);
    if (strcmp(text, hex) != 0) fail_msg("%s %s: SHA-256 %s, expected %s", name, what, text, hex);
}

static void check_case(const vec_case *c)
{
    vec_file file = vec_load(VEC_DIR, c->name, ".safetensors");
    td_exl3 w = vec_layer(&file);
    size_t n_values = (size_t)w.k * (size_t)w.n;
    assert_int_equal(td_exl3_check(&w, NULL), TD_OK);

    td_f16 *inner = inner_f16(&w);
    assert_sha256("inner", c->name, inner, n_values * sizeof *inner, c->inner);
    float *restored = malloc(n_values * sizeof *restored);
    assert_non_null(restored);
    assert_int_equal(td_exl3_restore(&w, restored, NULL), TD_OK);
    assert_sha256("restored", c->name, restored, n_values * sizeof *restored, c->restored);

    const char *full_dir = getenv("TD_VECTORS"); /* the complete files, value by value */
    if (full_dir) {
        int64_t shape[3];
        size_t n_bytes;
        vec_file full = vec_load(full_dir, c->name, ".expect.safetensors");
        const void *expected = vec_tensor(&full, "inner", shape, &n_bytes);
        assert_int_equal(n_bytes, n_values * sizeof *inner);
        assert_memory_equal(inner, expected, n_bytes);
        expected = vec_tensor(&full, "restored", shape, &n_bytes);
        assert_int_equal(n_bytes, n_values * sizeof *restored);
        assert_memory_equal(restored, expected, n_bytes);
        vec_free(&full);
    }
    free(restored);
    free(inner);
    vec_free(&file);
}

static void test_known_answers(void **state)
{
    vec_case cases[VEC_CASES];
    (void)state;
    vec_cases(cases);
    for (int i = 0; i < VEC_CASES; i++) check_case(&cases[i]);
}

static void test_codebooks(void **state)
{
    static const struct {
        td_exl3_codebook codebook;
        uint64_t digest;
        uint16_t samples[5]; /* states 0, 1, 255, 32768, 65535 */
    } expected[] = {
        { TD_EXL3_3INST, 0xfad431e7e9266898, { 0x3a25, 0xbb5b, 0x3cd1, 0xb7f8, 0xb110 } },
        { TD_EXL3_MCG, 0x7bb36b05a3b885a7, { 0x3f60, 0x304e, 0xbd26, 0xb915, 0x3acd } },
        { TD_EXL3_MUL1, 0x55e1c748ed9f0cd7, { 0xc2e8, 0x3921, 0x3ab3, 0xbaf2, 0xb936 } },
    };
    static const uint16_t sampled[] = { 0, 1, 255, 32768, 65535 };
    static float table[TD_EXL3_STATES];
    static uint16_t halves[TD_EXL3_STATES];
    (void)state;
    for (int c = 0; c < 3; c++) {
        td_exl3_codebook_f32(expected[c].codebook, table);
        for (int s = 0; s < TD_EXL3_STATES; s++) {
            halves[s] = td_f32_f16(table[s]);
            assert_true(td_f16_f32(halves[s]) == table[s]);
        }
        for (int i = 0; i < 5; i++) {
            assert_int_equal(halves[sampled[i]], expected[c].samples[i]);
            assert_true(td_exl3_value(expected[c].codebook, sampled[i]) == table[sampled[i]]);
        }
        assert_true(td_fnv1a(TD_FNV1A_START, halves, sizeof halves) == expected[c].digest);
    }
}

static int stream_bit(const uint16_t *tile, int n_bits, int at)
{
    at = (at % n_bits + n_bits) % n_bits;
    uint32_t word = (uint32_t)tile[at / 32 * 2] | (uint32_t)tile[at / 32 * 2 + 1] << 16;
    return (int)(word >> (31 - at % 32) & 1);
}

/* Random tiles: states taken bit by bit from the definition, packing back, and the tile decoder over them. */
static void test_random_tiles(void **state)
{
    static const int widths[] = { 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16 };
    uint64_t seed = 11;
    (void)state;
    for (int round = 0; round < 60; round++) {
        uint16_t tile[128], states[256], again[128], suh[128] = { 0 };
        float out[256];
        int bits2 = widths[round % 11];
        td_exl3_codebook codebook = bits2 % 2 ? TD_EXL3_MUL1 : (td_exl3_codebook)(round % 3);
        for (int i = 0; i < 128; i++) tile[i] = (uint16_t)next_random(&seed);
        td_exl3_unpack_tile(tile, bits2, states);
        td_exl3 w = { .k = 16, .n = 16, .bits2 = bits2, .codebook = codebook, .trellis = tile, .suh = suh, .svh = suh };
        td_exl3_tile_f32(&w, 0, 0, out);
        for (int p = 0; p < 256; p++) {
            int value = 0, end = bits2 % 2 ? ((p + 1) * bits2 - (p + 1) % 2) / 2 : (p + 1) * bits2 / 2;
            for (int b = end - 16; b < end; b++) value = value << 1 | stream_bit(tile, 128 * bits2, b);
            assert_int_equal(states[p], value);
            int lane = p / 8, j = p % 8;
            int row = 2 * (lane % 4) + j % 2 + 8 * (j / 2 % 2), column = lane / 4 + 8 * (j / 4);
            assert_true(out[16 * row + column] == td_exl3_value(codebook, states[p]));
        }
        td_exl3_pack_tile(states, bits2, again);
        assert_memory_equal(tile, again, (size_t)(16 * bits2));
    }
}

/* y[i] = sum (-1)^popcount(i & j) x[j], in double; and the order of stages, restated as plain loops. */
static void test_hadamard(void **state)
{
    uint64_t seed = 3;
    float x[256], y[256], z[256];
    (void)state;
    for (int i = 0; i < 256; i++) x[i] = y[i] = z[i] = (float)((double)next_random(&seed) / 1e9 - 1.0);
    td_hadamard128_blocks(y, 256, TD_HADAMARD_SCALE);
    for (int block = 0; block < 256; block += 128) {
        for (int i = 0; i < 128; i++) {
            double sum = 0;
            for (int j = 0; j < 128; j++)
                sum += __builtin_parity((unsigned)(i & j)) ? -(double)x[block + j] : (double)x[block + j];
            assert_true(fabs(sum / sqrt(128.0) - (double)y[block + i]) < 1e-6);
        }
        for (int stride = 1; stride < 128; stride *= 2) {
            for (int i = 0; i < 128; i++) {
                if (i & stride) continue;
                float *a = z + block + i, *b = a + stride, lower = *a + *b, upper = *a - *b;
                *a = lower;
                *b = upper;
            }
        }
    }
    for (int i = 0; i < 256; i++) z[i] *= TD_HADAMARD_SCALE;
    assert_memory_equal(y, z, sizeof y);
    float unit[128] = { 0 };
    unit[5] = 1.0f;
    td_hadamard128(unit, 1.0f);
    for (int i = 0; i < 128; i++) assert_true(unit[i] == (__builtin_parity((unsigned)(i & 5)) ? -1.0f : 1.0f));
}

/* xh = fp16(Hn(x * suh)), z = xh q, y = Hn(z) * svh against vectors computed elsewhere. */
static void check_product(const char *name)
{
    int64_t shape[3];
    size_t n_bytes;
    vec_file layer = vec_load(VEC_DIR, name, ".safetensors"), product = vec_load(VEC_DIR, name, ".product.safetensors");
    td_exl3 w = vec_layer(&layer);
    const td_f16 *x = vec_tensor(&product, "x", shape, &n_bytes), *xh = vec_tensor(&product, "xh", shape, &n_bytes);
    int rows = (int)shape[0];
    const float *z = vec_tensor(&product, "z", shape, &n_bytes), *y = vec_tensor(&product, "y", shape, &n_bytes);
    assert_true(x && xh && z && y && shape[1] == w.n && w.n <= 256);
    td_f16 *inner = inner_f16(&w);
    int n_apart = 0;
    double worst_z = 0, worst_y = 0, largest_z = 0, largest_y = 0;
    for (int r = 0; r < rows; r++) {
        float rotated[128], out[256];
        for (int i = 0; i < 128; i++) rotated[i] = td_f16_f32(x[r * 128 + i]) * td_f16_f32(w.suh[i]);
        td_hadamard128(rotated, TD_HADAMARD_SCALE);
        for (int i = 0; i < 128; i++) {
            int apart = abs(td_f32_f16(rotated[i]) - xh[r * 128 + i]);
            assert_true(apart <= 1); /* theirs was rounded from double: a near tie may fall to the other side */
            n_apart += apart;
        }
        for (int n = 0; n < w.n; n++) {
            float sum = 0;
            for (int i = 0; i < 128; i++) sum = fmaf(td_f16_f32(xh[r * 128 + i]), td_f16_f32(inner[i * w.n + n]), sum);
            out[n] = sum;
            worst_z = fmax(worst_z, fabs((double)sum - (double)z[r * w.n + n]));
            largest_z = fmax(largest_z, fabs((double)z[r * w.n + n]));
        }
        td_hadamard128_blocks(out, (size_t)w.n, TD_HADAMARD_SCALE);
        for (int n = 0; n < w.n; n++) {
            double e = (double)(out[n] * td_f16_f32(w.svh[n])) - (double)y[r * w.n + n];
            worst_y = fmax(worst_y, fabs(e));
            largest_y = fmax(largest_y, fabs((double)y[r * w.n + n]));
        }
    }
    assert_true(n_apart <= rows * 128 / 100);
    assert_true(worst_z < 1e-6 * largest_z);
    assert_true(worst_y < 1e-6 * largest_y);
    free(inner);
    vec_free(&layer);
    vec_free(&product);
}

static void test_products(void **state)
{
    (void)state;
    check_product("k4_mcg");
    check_product("k3_3inst");
    check_product("k2_mul1");
}

/* A random 4-bit layer of k x n; everything in one malloc, returned through *memory. */
static td_exl3 random_layer(int k, int n, uint16_t **memory)
{
    uint64_t seed = 5;
    size_t words = td_exl3_bytes(k, n, 8) / 2, trellis = td_exl3_trellis_bytes(k, n, 8) / 2;
    *memory = malloc(2 * words);
    assert_non_null(*memory);
    for (size_t i = 0; i < words; i++)
        (*memory)[i] = i < trellis ? (uint16_t)next_random(&seed) : (uint16_t)(0x2000 + next_random(&seed) % 0x800);
    return (td_exl3){ .k = k,
                      .n = n,
                      .bits2 = 8,
                      .codebook = TD_EXL3_MCG,
                      .trellis = *memory,
                      .suh = *memory + trellis,
                      .svh = *memory + trellis + k };
}

/* A slice's restored weight is that part of the whole. */
static void test_slices(void **state)
{
    static const int cuts[][4] = { { 0, 256, 128, 384 }, { 128, 256, 0, 384 }, { 0, 128, 256, 384 } };
    uint16_t *memory;
    td_exl3 w = random_layer(256, 384, &memory);
    float *whole = malloc(256 * 384 * sizeof(float)), *part = malloc(256 * 384 * sizeof(float));
    (void)state;
    assert_true(whole && part);
    assert_int_equal(td_exl3_restore(&w, whole, NULL), TD_OK);
    for (int c = 0; c < 3; c++) {
        int k0 = cuts[c][0], k1 = cuts[c][1], n0 = cuts[c][2], n1 = cuts[c][3];
        void *buffer = malloc(td_exl3_bytes(k1 - k0, n1 - n0, w.bits2));
        td_exl3 slice;
        assert_int_equal(td_exl3_slice(&w, k0, k1, n0, n1, buffer, &slice, NULL), TD_OK);
        assert_int_equal(td_exl3_check(&slice, NULL), TD_OK);
        assert_int_equal(td_exl3_restore(&slice, part, NULL), TD_OK);
        for (int i = 0; i < slice.k; i++)
            assert_memory_equal(part + i * slice.n, whole + (k0 + i) * w.n + n0, (size_t)slice.n * sizeof *part);
        free(buffer);
    }
    free(whole);
    free(part);
    free(memory);
}

static void expect_text(const td_error *err, const char *text)
{
    if (!strstr(err->text, text)) fail_msg("\"%s\" does not say \"%s\"", err->text, text);
}

static void test_refusals(void **state)
{
    uint16_t *memory;
    td_exl3 w = random_layer(256, 256, &memory), bad, slice;
    td_error err;
    (void)state;
    assert_int_equal(td_exl3_slice(&w, 0, 144, 0, 256, memory, &slice, &err), TD_EINVAL);
    expect_text(&err, "inputs 0 to 144, expected multiples of 128");
    assert_int_equal(td_exl3_slice(&w, 0, 256, 128, 384, memory, &slice, &err), TD_EINVAL);
    expect_text(&err, "outputs 128 to 384, expected a part of 0 to 256");
    assert_int_equal(td_exl3_slice(&w, 128, 128, 0, 256, memory, &slice, &err), TD_EINVAL);
    bad = w, bad.k = 144;
    assert_int_equal(td_exl3_check(&bad, &err), TD_EFORMAT);
    expect_text(&err, "144 inputs");
    bad = w, bad.n = 0;
    assert_int_equal(td_exl3_check(&bad, &err), TD_EFORMAT);
    bad = w, bad.bits2 = 9;
    assert_int_equal(td_exl3_check(&bad, &err), TD_EFORMAT);
    expect_text(&err, "72 words");
    bad = w, bad.bits2 = 7;
    assert_int_equal(td_exl3_check(&bad, &err), TD_EFORMAT);
    expect_text(&err, "mul1 only");
    bad = w, bad.svh = NULL;
    assert_int_equal(td_exl3_check(&bad, &err), TD_EFORMAT);
    td_exl3_codebook codebook;
    assert_int_equal(td_exl3_codebook_parse("mul1", &codebook, &err), TD_OK);
    assert_int_equal(codebook, TD_EXL3_MUL1);
    assert_int_equal(td_exl3_codebook_parse("mcg2", &codebook, &err), TD_EINVAL);
    expect_text(&err, "\"mcg2\": known are 3inst, mcg and mul1");
    assert_int_equal(td_exl3_trellis_bytes(2147483632, 2147483632, 16) != 0, sizeof(size_t) == 8);
    free(memory);
}

/* Best of several runs over a matrix that stays in L2. */
static void print_speed(int bits2, td_exl3_codebook codebook)
{
    enum { K = 4096, N = 64 };
    uint16_t *memory;
    static float out[K * 16];
    td_exl3 w = random_layer(K, 128, &memory);
    w.bits2 = bits2; /* a narrower width reads a part of the words */
    w.codebook = codebook;
    w.n = N;
    int64_t best = INT64_MAX;
    for (int run = 0; run < 20; run++) {
        int64_t start = td_now_ns();
        for (int nt = 0; nt < N / 16; nt++) td_exl3_panel_f32(&w, nt, 0, K, out);
        int64_t ns = td_now_ns() - start;
        if (ns < best) best = ns;
    }
    printf("%4.1f bits %-5s %6.2f Gweights/s\n", bits2 / 2.0, td_exl3_codebook_name(codebook),
           (double)K * N / (double)best);
    free(memory);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--speed") == 0) {
        for (int bits2 = 2; bits2 <= 16; bits2 += 2) print_speed(bits2, TD_EXL3_MCG);
        print_speed(8, TD_EXL3_3INST);
        print_speed(8, TD_EXL3_MUL1);
        print_speed(7, TD_EXL3_MUL1);
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_codebooks), cmocka_unit_test(test_random_tiles), cmocka_unit_test(test_known_answers),
        cmocka_unit_test(test_hadamard),  cmocka_unit_test(test_products),     cmocka_unit_test(test_slices),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
