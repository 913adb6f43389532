/* EXL3 views: what is legal, cutting for a rank, and the weight written out for tests and tools. */
#include "checkpoint/exl3.h"

#include "checkpoint/hadamard.h"

#include <stdlib.h>
#include <string.h>

static const char *const CODEBOOK_NAMES[] = { "3inst", "mcg", "mul1" };

const char *td_exl3_codebook_name(td_exl3_codebook codebook)
{
    return CODEBOOK_NAMES[codebook];
}

td_status td_exl3_codebook_parse(const char *name, td_exl3_codebook *out, td_error *err)
{
    for (int i = 0; i < 3; i++) {
        if (strcmp(name, CODEBOOK_NAMES[i]) != 0) continue;
        *out = (td_exl3_codebook)i;
        return TD_OK;
    }
    return td_fail(err, TD_EINVAL, "codebook \"%s\": known are 3inst, mcg and mul1", name);
}

static bool whole_blocks(int x)
{
    return x > 0 && x % TD_EXL3_BLOCK == 0;
}

td_status td_exl3_check(const td_exl3 *w, td_error *err)
{
    if (!whole_blocks(w->k)) return td_fail(err, TD_EFORMAT, "exl3: %d inputs, expected a multiple of 128", w->k);
    if (!whole_blocks(w->n)) return td_fail(err, TD_EFORMAT, "exl3: %d outputs, expected a multiple of 128", w->n);
    if ((unsigned)w->codebook > TD_EXL3_MUL1)
        return td_fail(err, TD_EFORMAT, "exl3: codebook %d, expected 3inst, mcg or mul1", (int)w->codebook);
    bool half = w->bits2 % 2 != 0;
    if (w->bits2 < 2 || w->bits2 > 16 || (half && (w->bits2 < 3 || w->bits2 > 7)))
        return td_fail(err, TD_EFORMAT,
                       "exl3: trellis of %d words a tile, expected 16 * bits with 1 to 8, 1.5, 2.5 or 3.5 bits",
                       8 * w->bits2);
    if (half && w->codebook != TD_EXL3_MUL1)
        return td_fail(err, TD_EFORMAT, "exl3: %d.5 bits with codebook %s, half widths exist for mul1 only",
                       w->bits2 / 2, td_exl3_codebook_name(w->codebook));
    if (!w->trellis || !w->suh || !w->svh) return td_fail(err, TD_EFORMAT, "exl3: trellis, suh or svh is missing");
    return TD_OK;
}

size_t td_exl3_trellis_bytes(int k, int n, int bits2)
{
    size_t tiles, bytes;
    if (k <= 0 || n <= 0 || bits2 <= 0) return 0;
    if (td_mul_size((size_t)(k / TD_EXL3_TILE), (size_t)(n / TD_EXL3_TILE), &tiles)) return 0;
    if (td_mul_size(tiles, 16 * (size_t)bits2, &bytes)) return 0;
    return bytes;
}

size_t td_exl3_bytes(int k, int n, int bits2)
{
    size_t trellis = td_exl3_trellis_bytes(k, n, bits2), bytes;
    if (!trellis || td_add_size(trellis, 2 * ((size_t)k + (size_t)n), &bytes)) return 0;
    return bytes;
}

static td_status check_range(const char *what, int from, int to, int count, td_error *err)
{
    if (from < 0 || to > count || from >= to)
        return td_fail(err, TD_EINVAL, "exl3 slice: %s %d to %d, expected a part of 0 to %d", what, from, to, count);
    if (from % TD_EXL3_BLOCK || to % TD_EXL3_BLOCK)
        return td_fail(err, TD_EINVAL, "exl3 slice: %s %d to %d, expected multiples of 128", what, from, to);
    return TD_OK;
}

td_status td_exl3_slice(const td_exl3 *w, int k0, int k1, int n0, int n1, void *buffer, td_exl3 *out, td_error *err)
{
    td_status status = check_range("inputs", k0, k1, w->k, err);
    if (!status) status = check_range("outputs", n0, n1, w->n, err);
    if (status) return status;

    int k = k1 - k0, n = n1 - n0;
    size_t tile_words = (size_t)(8 * w->bits2);
    size_t from_words = (size_t)(w->n / TD_EXL3_TILE) * tile_words, to_words = (size_t)(n / TD_EXL3_TILE) * tile_words;
    uint16_t *trellis = buffer;
    uint16_t *suh = trellis + (size_t)(k / TD_EXL3_TILE) * to_words, *svh = suh + k;
    const uint16_t *from =
        w->trellis + (size_t)(k0 / TD_EXL3_TILE) * from_words + (size_t)(n0 / TD_EXL3_TILE) * tile_words;
    for (int kt = 0; kt < k / TD_EXL3_TILE; kt++)
        memcpy(trellis + (size_t)kt * to_words, from + (size_t)kt * from_words, to_words * sizeof *trellis);
    memcpy(suh, w->suh + k0, (size_t)k * sizeof *suh);
    memcpy(svh, w->svh + n0, (size_t)n * sizeof *svh);
    *out = (td_exl3){
        .k = k, .n = n, .bits2 = w->bits2, .codebook = w->codebook, .trellis = trellis, .suh = suh, .svh = svh
    };
    return TD_OK;
}

/* Block (kb, nb) of 128 x 128: both rotations in double (the sums are exact: 16,384 multiples of 2^-17 below 4), the
 * scales, one rounding. block and turned are scratch. */
static void restore_block(const td_exl3 *w, int kb, int nb, double *block, double *turned, float *out)
{
    enum { N = TD_EXL3_BLOCK, T = TD_EXL3_TILE };
    float tile[TD_EXL3_TILE_VALUES];
    for (int kt = 0; kt < N / T; kt++) {
        for (int nt = 0; nt < N / T; nt++) {
            td_exl3_tile_f32(w, kb * (N / T) + kt, nb * (N / T) + nt, tile);
            for (int i = 0; i < TD_EXL3_TILE_VALUES; i++)
                block[(kt * T + i / T) * N + nt * T + i % T] = (double)tile[i];
        }
    }
    td_hadamard128_down_f64(block, N, N, 1.0);
    for (int i = 0; i < N * N; i++) turned[(i % N) * N + i / N] = block[i];
    td_hadamard128_down_f64(turned, N, N, 1.0);
    for (int i = 0; i < N; i++) {
        size_t row = (size_t)kb * N + (size_t)i;
        double suh = (double)td_f16_f32(w->suh[row]);
        for (int j = 0; j < N; j++) {
            double svh = (double)td_f16_f32(w->svh[nb * N + j]);
            out[row * (size_t)w->n + (size_t)(nb * N + j)] = (float)(suh * svh * turned[j * N + i] / 128.0);
        }
    }
}

td_status td_exl3_restore(const td_exl3 *w, float *out, td_error *err)
{
    size_t block_values = (size_t)TD_EXL3_BLOCK * TD_EXL3_BLOCK;
    double *scratch = malloc(2 * block_values * sizeof *scratch);
    if (!scratch) return td_fail(err, TD_ENOMEM, "exl3: no memory to write out a matrix");
    for (int kb = 0; kb < w->k / TD_EXL3_BLOCK; kb++)
        for (int nb = 0; nb < w->n / TD_EXL3_BLOCK; nb++)
            restore_block(w, kb, nb, scratch, scratch + block_values, out);
    free(scratch);
    return TD_OK;
}
