/* The EXL3 quantizer: errors against the published table of the format's error over the width, feedback against its
 * definition and on inputs that need it, the same bytes for any number of threads (and, by digest, on every machine).
 * `unit_exl3_quantize --table` measures every width and codebook and fails outside the table's bounds. */
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
#include "checkpoint/exl3_feedback.h"
#include "checkpoint/exl3_quantize.h"
#include "checkpoint/exl3_viterbi.h"
#include "checkpoint/hadamard.h"
#include "exl3_vectors.h"

static double next_uniform(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return ((double)(*seed >> 11) + 0.5) * 0x1p-53;
}

static double next_normal(uint64_t *seed)
{
    double a = next_uniform(seed), b = next_uniform(seed);
    return sqrt(-2 * log(a)) * cos(6.283185307179586 * b);
}

/* A quantized matrix with its own memory. */
typedef struct packed {
    td_exl3 w;
    uint16_t *memory;
    size_t n_bytes;
    td_exl3_report report;
} packed;

static packed quantize(const td_exl3_source *source, td_exl3_codebook codebook, int bits2, int n_threads)
{
    td_error err = { 0 };
    td_exl3_quantizer *q;
    packed p = { .n_bytes = td_exl3_bytes(source->k, source->n, bits2) };
    p.memory = malloc(p.n_bytes);
    assert_non_null(p.memory);
    uint16_t *suh = p.memory + td_exl3_trellis_bytes(source->k, source->n, bits2) / 2, *svh = suh + source->k;
    if (td_exl3_quantizer_create(codebook, bits2, n_threads, &q, &err)) fail_msg("%s", err.text);
    if (td_exl3_quantize(q, source, p.memory, suh, svh, &p.report, &err)) fail_msg("%s", err.text);
    td_exl3_quantizer_destroy(q);
    p.w = (td_exl3){ source->k, source->n, bits2, codebook, p.memory, suh, svh };
    return p;
}

/* sum (restored - source)^2 / sum source^2 */
static double weight_nmse(const packed *p, const float *source)
{
    size_t n_values = (size_t)p->w.k * (size_t)p->w.n;
    float *restored = malloc(n_values * sizeof *restored);
    assert_non_null(restored);
    assert_int_equal(td_exl3_restore(&p->w, restored, NULL), TD_OK);
    double lost = 0, total = 0;
    for (size_t i = 0; i < n_values; i++) {
        double e = (double)restored[i] - (double)source[i];
        lost += e * e;
        total += (double)source[i] * (double)source[i];
    }
    free(restored);
    return lost / total;
}

/* The source of the known answers, quantized again: as good as the other quantizer; report and restored weight agree.
 */
static void test_known_source(void **state)
{
    static const struct {
        const char *name;
        td_exl3_codebook codebook;
        int bits2;
    } cases[] = { { "k4_mcg", TD_EXL3_MCG, 8 }, { "k6_3inst", TD_EXL3_3INST, 12 }, { "k3_mul1", TD_EXL3_MUL1, 6 } };
    vec_case all[VEC_CASES];
    int64_t shape[3];
    size_t n_bytes;
    (void)state;
    vec_cases(all);
    vec_file file = vec_load(VEC_DIR, "source", ".safetensors");
    const float *w = vec_tensor(&file, "weight", shape, &n_bytes);
    assert_non_null(w);
    for (int c = 0; c < 3; c++) {
        td_exl3_source source = { .k = 128, .n = 256, .w = w, .input_seed = 1, .output_seed = 2 };
        packed p = quantize(&source, cases[c].codebook, cases[c].bits2, 2);
        double nmse = weight_nmse(&p, w), theirs = 0;
        for (int i = 0; i < VEC_CASES; i++)
            if (strcmp(all[i].name, cases[c].name) == 0) theirs = all[i].nmse;
        if (!(nmse < 1.05 * theirs) || !(nmse > 0.9 * theirs))
            fail_msg("%s: nmse %.4e, the other quantizer's is %.4e", cases[c].name, nmse, theirs);
        assert_true(fabs(p.report.nmse / nmse - 1) < 0.05);
        free(p.memory);
    }
    vec_free(&file);
}

static void test_same_bytes(void **state)
{
    uint64_t seed = 8;
    enum { K = 128, N = 128 };
    float *w = malloc(K * N * sizeof *w), *h = calloc(K * K, sizeof *h);
    (void)state;
    assert_true(w && h);
    for (int i = 0; i < K * N; i++) w[i] = (float)((next_uniform(&seed) + next_uniform(&seed) - 1) * 0.05);
    for (int i = 0; i < K; i++) {
        h[i * K + i] = 1.0f + (float)(i % 7);
        if (i) h[i * K + i - 1] = h[(i - 1) * K + i] = 0.5f;
    }
    td_exl3_source source = { .k = K, .n = N, .w = w, .hessian = h, .input_seed = 3, .output_seed = 4 };
    packed one = quantize(&source, TD_EXL3_MCG, 8, 1), three = quantize(&source, TD_EXL3_MCG, 8, 3);
    assert_true(one.report.feedback);
    assert_memory_equal(one.memory, three.memory, one.n_bytes);
    /* what x86-64 (gcc, clang) and arm64 (qemu) gave */
    uint64_t digest = td_fnv1a(TD_FNV1A_START, one.memory, one.n_bytes);
    if (digest != 0x1f3269e4229aa0d8) fail_msg("digest %016llx", (unsigned long long)digest);
    source.input_seed = 5;
    packed other = quantize(&source, TD_EXL3_MCG, 8, 1);
    assert_memory_not_equal(one.memory, other.memory, one.n_bytes);
    free(one.memory);
    free(three.memory);
    free(other.memory);
    free(w);
    free(h);
}

/* Every stream closes: the states of all widths survive packing. */
static void test_streams_close(void **state)
{
    static const int widths[] = { 3, 5, 7, 6, 8, 10, 12, 14, 16 };
    uint64_t seed = 21;
    (void)state;
    for (int i = 0; i < 9; i++) {
        float target[2][256];
        uint16_t states[2][256], tile[128], again[256];
        td_exl3_viterbi *v;
        for (int j = 0; j < 512; j++) target[j / 256][j % 256] = (float)next_normal(&seed);
        assert_int_equal(td_exl3_viterbi_create(TD_EXL3_MUL1, widths[i], &v, NULL), TD_OK);
        void *scratch = aligned_alloc(64, td_exl3_viterbi_scratch_bytes(v));
        assert_non_null(scratch);
        td_exl3_viterbi_pair(v, target, states, scratch);
        for (int t = 0; t < 2; t++) {
            td_exl3_pack_tile(states[t], widths[i], tile);
            td_exl3_unpack_tile(tile, widths[i], again);
            assert_memory_equal(states[t], again, sizeof again);
        }
        free(scratch);
        td_exl3_viterbi_destroy(v);
    }
}

/* R by its definition; (I + F)^-1 R (I + F)^-T must be block diagonal: solve from the left twice. */
static void test_feedback_definition(void **state)
{
    enum { K = 128 };
    static float h[K * K], suh[K], f[K * K];
    static double r[K * K], a[K * K], hn[K * K], scaled[K * K];
    uint64_t seed = 31;
    double mean = 0, off = 0, on = 0;
    bool used = false;
    (void)state;
    for (int s = 0; s < 200; s++) {
        double x[K];
        for (int i = 0; i < K; i++) x[i] = next_normal(&seed) + (i ? 0.7 * x[i - 1] : 0);
        for (int i = 0; i < K * K; i++) h[i] += (float)(x[i / K] * x[i % K]);
    }
    for (int i = 0; i < K; i++) {
        suh[i] = (float)(next_normal(&seed) * 0.02);
        mean += (double)h[i * K + i] / K;
        for (int j = 0; j < K; j++) hn[i * K + j] = (__builtin_parity((unsigned)(i & j)) ? -1 : 1) / sqrt(128.0);
    }
    for (int i = 0; i < K * K; i++) {
        double x = (double)h[i / K >= i % K ? i : i % K * K + i / K] / mean + (i / K == i % K ? 0.025 : 0);
        scaled[i] = x * (double)suh[i / K] * (double)suh[i % K];
    }
    for (int i = 0; i < K * K; i++)
        for (int j = 0; j < K; j++) a[i] += hn[i / K * K + j] * scaled[j * K + i % K];
    for (int i = 0; i < K * K; i++)
        for (int j = 0; j < K; j++) r[i] += a[i / K * K + j] * hn[j * K + i % K];

    assert_int_equal(td_exl3_feedback(K, h, suh, f, &used, NULL), TD_OK);
    assert_true(used);
    for (int i = 0; i < K; i++)
        for (int j = i / 16 * 16; j < K; j++) assert_true(f[i * K + j] == 0.0f);
    for (int side = 0; side < 2; side++) {
        for (int i = 0; i < K; i++)
            for (int j = 0; j < i; j++)
                for (int c = 0; c < K; c++) r[i * K + c] -= (double)f[i * K + j] * r[j * K + c];
        for (int i = 0; i < K * K; i++) a[i] = r[i % K * K + i / K];
        memcpy(r, a, sizeof r);
    }
    for (int i = 0; i < K * K; i++) *(i / K / 16 == i % K / 16 ? &on : &off) += r[i] * r[i];
    assert_true(off < 1e-9 * on);

    memset(h, 0, sizeof h);
    assert_int_equal(td_exl3_feedback(K, h, suh, f, &used, NULL), TD_OK);
    assert_false(used);
}

/* tr(E^T H E) / tr(W^T H W) of the restored weight. */
static double proxy(const packed *p, const float *w, const float *h)
{
    enum { K = 128, N = 128 };
    static float restored[K * N];
    double lost = 0, total = 0;
    assert_int_equal(td_exl3_restore(&p->w, restored, NULL), TD_OK);
    for (int i = 0; i < K; i++) {
        for (int j = 0; j < K; j++) {
            for (int n = 0; n < N; n++) {
                double ei = (double)restored[i * N + n] - (double)w[i * N + n];
                double ej = (double)restored[j * N + n] - (double)w[j * N + n];
                lost += ei * (double)h[i * K + j] * ej;
                total += (double)w[i * N + n] * (double)h[i * K + j] * (double)w[j * N + n];
            }
        }
    }
    return lost / total;
}

/* Inputs that live mostly in a 24-dimensional subspace: feedback must cut the error that matters about to a third, and
 * the plain error must rise. */
static void test_feedback_pays(void **state)
{
    enum { K = 128, N = 128, DIM = 24, SAMPLES = 1024 };
    static float w[K * N], h[K * K], basis[DIM * K];
    uint64_t seed = 41;
    (void)state;
    for (int i = 0; i < DIM * K; i++) basis[i] = (float)next_normal(&seed);
    for (int s = 0; s < SAMPLES; s++) {
        float x[K];
        for (int i = 0; i < K; i++) x[i] = 0.5f * (float)next_normal(&seed);
        for (int d = 0; d < DIM; d++) {
            float c = (float)next_normal(&seed);
            for (int i = 0; i < K; i++) x[i] += c * basis[d * K + i];
        }
        for (int i = 0; i < K * K; i++) h[i] += x[i / K] * x[i % K];
    }
    for (int i = 0; i < K * N; i++) w[i] = (float)(0.02 * next_normal(&seed));
    td_exl3_source source = { .k = K, .n = N, .w = w, .input_seed = 1, .output_seed = 2 };
    packed plain = quantize(&source, TD_EXL3_MCG, 8, 2);
    source.hessian = h;
    packed led = quantize(&source, TD_EXL3_MCG, 8, 2);
    double p0 = proxy(&plain, w, h), p1 = proxy(&led, w, h);
    double m0 = weight_nmse(&plain, w), m1 = weight_nmse(&led, w);
    print_message("4 bits: proxy %.3e -> %.3e, plain error %.3e -> %.3e\n", p0, p1, m0, m1);
    assert_true(led.report.feedback && !plain.report.feedback);
    assert_true(p1 < 0.4 * p0);
    assert_true(m1 > 1.2 * m0);
    free(plain.memory);
    free(led.memory);
}

/* Dead outputs and inputs, an empty matrix, tiny weights; what is refused. */
static void test_edges(void **state)
{
    enum { K = 128, N = 128 };
    static float w[K * N], restored[K * N];
    uint64_t seed = 51;
    td_error err;
    (void)state;
    for (int i = 0; i < K * N; i++) w[i] = i % N == 7 || i / N == 9 ? 0.0f : (float)(1e-6 * next_normal(&seed));
    td_exl3_source source = { .k = K, .n = N, .w = w, .input_seed = 1, .output_seed = 2 };
    packed p = quantize(&source, TD_EXL3_MCG, 12, 2);
    assert_int_equal(p.w.svh[7], 0);
    assert_true(weight_nmse(&p, w) < 1e-2);
    free(p.memory);
    memset(w, 0, sizeof w);
    p = quantize(&source, TD_EXL3_MCG, 8, 2);
    assert_int_equal(td_exl3_restore(&p.w, restored, NULL), TD_OK);
    for (int i = 0; i < K * N; i++) assert_true(restored[i] == 0.0f);
    free(p.memory);

    td_exl3_quantizer *q;
    uint16_t out[K * N / 4 + K + N];
    td_exl3_report report;
    assert_int_equal(td_exl3_quantizer_create(TD_EXL3_MCG, 7, 1, &q, &err), TD_EFORMAT);
    assert_int_equal(td_exl3_quantizer_create(TD_EXL3_MCG, 8, 0, &q, &err), TD_EINVAL);
    assert_int_equal(td_exl3_quantizer_create(TD_EXL3_MCG, 8, 1, &q, &err), TD_OK);
    w[3 * N + 5] = NAN;
    assert_int_equal(td_exl3_quantize(q, &source, out, out, out, &report, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, "input 3, output 5 is not finite"));
    source.k = 100;
    assert_int_equal(td_exl3_quantize(q, &source, out, out, out, &report, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, "100 inputs"));
    td_exl3_quantizer_destroy(q);
}

/* Published error of the format on normally distributed weights, nmse at the best scale. Rows: 3inst, mcg, mul1. */
static const struct {
    int bits2;
    double nmse[3];
} TABLE[] = {
    { 2, { 0.266, 0.267, 0.272 } },        { 3, { 0, 0, 0.137 } },
    { 4, { 0.0683, 0.0680, 0.0682 } },     { 5, { 0, 0, 0.0344 } },
    { 6, { 0.0176, 0.0174, 0.0173 } },     { 7, { 0, 0, 0.00876 } },
    { 8, { 0.00461, 0.00455, 0.00440 } },  { 10, { 0.00120, 0.00120, 0.00117 } },
    { 12, { 3.26e-4, 3.24e-4, 3.19e-4 } }, { 14, { 8.75e-5, 8.83e-5, 8.61e-5 } },
    { 16, { 2.68e-5, 2.71e-5, 2.10e-5 } },
};

/* nmse of n_tiles normal tiles at the best of a few scales around the usual one. */
static double measure(td_exl3_quantizer *q, const float *tiles, int n_tiles, double usual, double *best_g)
{
    double total = 0, best = INFINITY;
    for (int i = 0; i < n_tiles * 256; i++) total += (double)tiles[i] * (double)tiles[i];
    for (int i = -1; i <= 1; i++) {
        double g = usual * (1 + 0.03 * i), lost = td_exl3_trial(q, tiles, n_tiles, g);
        if (lost < best) best = lost, *best_g = g;
    }
    return best / total;
}

/* One width and codebook against the table; prints a line; false outside 2 % (10 % at 7 and 8 bits). */
static bool check_row(size_t row, int codebook, const float *tiles, int n_tiles, int n_threads)
{
    int bits2 = TABLE[row].bits2;
    double expected = TABLE[row].nmse[codebook], g = 0;
    td_exl3_quantizer *q;
    if (td_exl3_quantizer_create((td_exl3_codebook)codebook, bits2, n_threads, &q, NULL)) return false;
    int64_t start = td_now_ns();
    double nmse = measure(q, tiles, n_tiles, td_exl3_start_scale((td_exl3_codebook)codebook, bits2), &g);
    double ms = (double)(td_now_ns() - start) / 1e6 / (3 * n_tiles) * n_threads;
    td_exl3_quantizer_destroy(q);
    bool good = nmse < expected * (bits2 > 12 ? 1.1 : 1.02) && nmse > pow(0.5, bits2); /* nothing beats 4^-bits */
    printf("%3.1f bits %-5s nmse %.3e (g %.2f)  table %.3e  %+5.1f %%  %5.2f ms/tile  %s\n", bits2 / 2.0,
           td_exl3_codebook_name((td_exl3_codebook)codebook), nmse, g, expected, 100 * (nmse / expected - 1), ms,
           good ? "ok" : "TOO LARGE");
    return good;
}

static float *normal_tiles(int n_tiles)
{
    uint64_t seed = 2024;
    float *tiles = malloc((size_t)n_tiles * 256 * sizeof *tiles);
    for (int i = 0; tiles && i < n_tiles * 256; i++) tiles[i] = (float)next_normal(&seed);
    return tiles;
}

static int print_table(void)
{
    enum { TILES = 64, THREADS = 2 };
    float *tiles = normal_tiles(TILES);
    bool good = tiles != NULL;
    for (size_t row = 0; good && row < sizeof TABLE / sizeof *TABLE; row++)
        for (int c = 0; c < 3; c++)
            if (TABLE[row].nmse[c] > 0) good &= check_row(row, c, tiles, TILES, THREADS);
    free(tiles);
    return good ? 0 : 1;
}

static void test_error_of_released_width(void **state)
{
    enum { TILES = 64 };
    float *tiles = normal_tiles(TILES);
    (void)state;
    assert_non_null(tiles);
    assert_true(check_row(6, TD_EXL3_MCG, tiles, TILES, 2));
    free(tiles);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--table") == 0) return print_table();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_streams_close),
        cmocka_unit_test(test_known_source),
        cmocka_unit_test(test_same_bytes),
        cmocka_unit_test(test_feedback_definition),
        cmocka_unit_test(test_feedback_pays),
        cmocka_unit_test(test_edges),
        cmocka_unit_test(test_error_of_released_width),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
