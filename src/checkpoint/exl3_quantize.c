/* The quantizer: regularise, find the scale, search tile by tile from the last rows to the first, pack.
 *
 * Regularising makes any matrix look like independent normal numbers, which is what the codebook is: random signs,
 * column and row scales, a rotation on each side. Scales are rounded to fp16 before the matrix is divided by them, so
 * what is stored is what was used. Columns of tiles do not depend on each other (feedback runs down the rows), so
 * threads take pairs of columns and the result does not depend on their number; all sums that decide something run in
 * double in one order. */
#include "checkpoint/exl3_quantize.h"

#include "checkpoint/exl3_feedback.h"
#include "checkpoint/exl3_viterbi.h"
#include "checkpoint/hadamard.h"
#include "checkpoint/parallel.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TILE = TD_EXL3_TILE, VALUES = TD_EXL3_TILE_VALUES, PAIR = 2 * TILE };

struct td_exl3_quantizer {
    td_exl3_codebook codebook;
    int bits2, n_threads;
    td_exl3_viterbi *viterbi;
    void **scratch; /* [n_threads] */
};

/* Everything about one matrix while it is quantized. */
typedef struct matrix {
    td_exl3_quantizer *q;
    size_t k, n;
    float *w;              /* [k][n] regularised */
    const float *feedback; /* [k][k] or NULL */
    float *errors;         /* [n / PAIR][k][PAIR] with feedback, else NULL */
    uint16_t *trellis;
    double *sums; /* [n / PAIR][2]: squares of the errors, of the weights */
} matrix;

void td_exl3_quantizer_destroy(td_exl3_quantizer *q)
{
    if (!q) return;
    for (int i = 0; q->scratch && i < q->n_threads; i++) free(q->scratch[i]);
    free(q->scratch);
    td_exl3_viterbi_destroy(q->viterbi);
    free(q);
}

td_status td_exl3_quantizer_create(td_exl3_codebook codebook, int bits2, int n_threads, td_exl3_quantizer **out,
                                   td_error *err)
{
    const uint16_t none = 0;
    td_exl3 shape = { 128, 128, bits2, codebook, &none, &none, &none };
    td_status status = td_exl3_check(&shape, err);
    if (status) return status;
    if (n_threads < 1 || n_threads > TD_PARALLEL_MAX)
        return td_fail(err, TD_EINVAL, "%d threads, expected 1 to %d", n_threads, TD_PARALLEL_MAX);
    td_exl3_quantizer *q = calloc(1, sizeof *q);
    if (!q) return td_fail(err, TD_ENOMEM, "exl3: no memory for a quantizer");
    *q = (td_exl3_quantizer){ .codebook = codebook, .bits2 = bits2, .n_threads = n_threads };
    status = td_exl3_viterbi_create(codebook, bits2, &q->viterbi, err);
    q->scratch = calloc((size_t)n_threads, sizeof *q->scratch);
    for (int i = 0; !status && i < n_threads; i++) {
        if (q->scratch) q->scratch[i] = aligned_alloc(64, td_exl3_viterbi_scratch_bytes(q->viterbi));
        if (!q->scratch || !q->scratch[i])
            status = td_fail(err, TD_ENOMEM, "exl3: no memory for %d threads", n_threads);
    }
    if (status)
        td_exl3_quantizer_destroy(q);
    else
        *out = q;
    return status;
}

/* +1 or -1: bit 0 of a mixed counter. */
static float random_sign(uint64_t seed, uint64_t i)
{
    uint64_t x = seed + (i + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return (x ^ x >> 31) & 1 ? -1.0f : 1.0f;
}

/* Columns: RMS against the mean RMS into svh, divided out; columns too small for that are dead (svh = 0, values 0). */
static td_status scale_columns(size_t k, size_t n, float *w, uint64_t seed, td_f16 *svh)
{
    double *rms = calloc(n, sizeof *rms), mean = 0;
    float *factor = malloc(n * sizeof *factor);
    if (!rms || !factor) {
        free(rms);
        free(factor);
        return TD_ENOMEM;
    }
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j < n; j++) rms[j] += (double)w[i * n + j] * (double)w[i * n + j];
    for (size_t j = 0; j < n; j++) mean += rms[j] = sqrt(rms[j] / (double)k);
    mean /= (double)n;
    for (size_t j = 0; j < n; j++) {
        double a = mean > 0 ? fmin(rms[j] / mean, 65504.0) : 0.0;
        svh[j] = td_f32_f16((float)a);
        factor[j] = td_f16_f32(svh[j]);
        if (factor[j] == 0.0f) continue;
        factor[j] *= random_sign(seed, j);
        svh[j] = td_f32_f16(factor[j]);
    }
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j < n; j++) w[i * n + j] = factor[j] == 0.0f ? 0.0f : w[i * n + j] / factor[j];
    free(rms);
    free(factor);
    return TD_OK;
}

/* rms[k] of the rows, at least what suh can hold: a row of zeros gets the smallest scale, so its errors vanish. */
static void row_scales(size_t k, size_t n, const float *w, double *rms)
{
    for (size_t i = 0; i < k; i++) {
        double sum = 0;
        for (size_t j = 0; j < n; j++) sum += (double)w[i * n + j] * (double)w[i * n + j];
        rms[i] = fmax(sqrt(sum / (double)n), 0x1p-24);
    }
}

/* out = Hn * diag(1 / scale) * w */
static void divide_rows(size_t k, size_t n, const float *w, const float *scale, float *out)
{
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j < n; j++) out[i * n + j] = w[i * n + j] / scale[i];
    for (size_t b = 0; b < k; b += TD_HADAMARD_N) td_hadamard128_down(out + b * n, n, n, TD_HADAMARD_SCALE);
}

/* suh = sign * rms / g in fp16, never 0 or infinite; and as float. */
static void round_row_scales(size_t k, const double *rms, double g, uint64_t seed, td_f16 *suh, float *scale)
{
    for (size_t i = 0; i < k; i++) {
        float magnitude = fmaxf(0x1p-24f, fminf((float)(rms[i] / g), 65504.0f));
        suh[i] = td_f32_f16(magnitude * random_sign(seed, i));
        scale[i] = td_f16_f32(suh[i]);
    }
}

typedef struct trial {
    td_exl3_quantizer *q;
    const float *tiles;
    int n_tiles;
    double g;
    double *sums; /* one a pair */
} trial;

static void trial_job(void *user, int worker, int job)
{
    trial *t = user;
    float target[2][VALUES];
    uint16_t state[2][VALUES];
    for (int i = 0; i < 2; i++) {
        int tile = 2 * job + i < t->n_tiles ? 2 * job + i : 2 * job; /* an odd last one is searched twice */
        for (int p = 0; p < VALUES; p++)
            target[i][p] = (float)(t->g * (double)t->tiles[tile * VALUES + td_exl3_tile_index(p)]);
    }
    td_exl3_viterbi_pair(t->q->viterbi, target, state, t->q->scratch[worker]);
    double sum = 0;
    for (int i = 0; i < 2 && 2 * job + i < t->n_tiles; i++) {
        for (int p = 0; p < VALUES; p++) {
            double e = (double)td_exl3_value(t->q->codebook, state[i][p]) - (double)target[i][p];
            sum += e * e;
        }
    }
    t->sums[job] = sum / (t->g * t->g);
}

#define TRIAL_TILES_MAX 512

double td_exl3_trial(td_exl3_quantizer *q, const float *tiles, int n_tiles, double g)
{
    double sums[TRIAL_TILES_MAX / 2], total = 0;
    for (int from = 0; from < n_tiles; from += TRIAL_TILES_MAX) {
        int n = n_tiles - from < TRIAL_TILES_MAX ? n_tiles - from : TRIAL_TILES_MAX, n_pairs = (n + 1) / 2;
        trial t = { q, tiles + (size_t)from * VALUES, n, g, sums };
        td_parallel(q->n_threads, n_pairs, trial_job, &t);
        for (int i = 0; i < n_pairs; i++) total += sums[i];
    }
    return total;
}

double td_exl3_start_scale(td_exl3_codebook codebook, int bits2)
{
    /* 1, 1.5, .. 8 bits; measured with `unit_exl3_quantize --table` */
    static const double halves[] = { 1.42, 0, 1.24, 0, 1.19, 0, 1.15, 0, 1.12, 0, 1.07, 0, 1.02, 0, 1.01 };
    static const double bytes[] = { 1.11, 1.04, 0.99, 0.99, 0.96, 0.94, 0.93, 0, 0.92, 0, 0.91, 0, 0.87, 0, 0.82 };
    return codebook == TD_EXL3_MUL1 ? bytes[bits2 - 2] : halves[bits2 - 2];
}

static void copy_tile(const float *w, size_t n, size_t kt, size_t nt, float *tile)
{
    for (size_t r = 0; r < TILE; r++) memcpy(tile + r * TILE, w + (kt * TILE + r) * n + nt * TILE, TILE * sizeof *tile);
}

/* Tiles that stand for the matrix: spread over rows and columns, and those of largest and smallest RMS and of the
 * largest value: at 7 and 8 bits the tails decide, values beyond the codebook's reach cost more than all rounding. */
static int sample_tiles(size_t k, size_t n, const float *w, int n_spread, float *tiles)
{
    size_t n_kt = k / TILE, n_nt = n / TILE, chosen[3] = { 0 };
    double largest = -1, smallest = INFINITY, peak = -1;
    for (size_t t = 0; t < n_kt * n_nt; t++) {
        double sum = 0, max = 0;
        for (size_t i = 0; i < VALUES; i++) {
            double x = (double)w[(t / n_nt * TILE + i / TILE) * n + t % n_nt * TILE + i % TILE];
            sum += x * x;
            max = fmax(max, fabs(x));
        }
        if (sum > largest) largest = sum, chosen[0] = t;
        if (sum < smallest) smallest = sum, chosen[1] = t;
        if (max > peak) peak = max, chosen[2] = t;
    }
    for (int i = 0; i < n_spread; i++) {
        size_t kt = (size_t)i * n_kt / (size_t)n_spread, nt = (size_t)i * 2654435761u / 65536 % n_nt;
        copy_tile(w, n, kt, nt, tiles + i * VALUES);
    }
    for (int i = 0; i < 3; i++) copy_tile(w, n, chosen[i] / n_nt, chosen[i] % n_nt, tiles + (n_spread + i) * VALUES);
    return n_spread + 3;
}

/* The g of least error on the sample: steps of 4 % from the usual one until a middle is below both sides, then the
 * vertex of the parabola through the three. The curve is flat: 2 % off costs less than 0.5 % of error. */
static double find_scale(td_exl3_quantizer *q, const float *tiles, int n_tiles)
{
    const double step = 1.04;
    double g = td_exl3_start_scale(q->codebook, q->bits2);
    double below = td_exl3_trial(q, tiles, n_tiles, g / step), here = td_exl3_trial(q, tiles, n_tiles, g);
    double above = td_exl3_trial(q, tiles, n_tiles, g * step);
    for (int i = 0; i < 20 && (below < here || above < here); i++) {
        if (below < here) {
            g /= step, above = here, here = below;
            below = td_exl3_trial(q, tiles, n_tiles, g / step);
        } else {
            g *= step, below = here, here = above;
            above = td_exl3_trial(q, tiles, n_tiles, g * step);
        }
    }
    double bend = below - 2 * here + above;
    return bend > 0 ? g * (1 + (step - 1) * 0.5 * (below - above) / bend) : g;
}

/* target[16][PAIR] += sum over rows below of feedback^T * errors, row by row from the top. */
static void add_feedback(const matrix *m, size_t row, const float *errors, float target[TILE][PAIR])
{
    for (size_t r = 0; r < TILE; r++) {
        for (size_t j = row + TILE; j < m->k; j++) {
            float f = m->feedback[j * m->k + row + r];
            for (size_t c = 0; c < PAIR; c++) target[r][c] += f * errors[j * PAIR + c];
        }
    }
}

/* Two tiles: search, pack; q's values into value. */
static void quantize_pair(const matrix *m, size_t kt, size_t nt, float target[TILE][PAIR], void *scratch,
                          float value[TILE][PAIR])
{
    float stream[2][VALUES];
    uint16_t state[2][VALUES];
    size_t tile_words = (size_t)(8 * m->q->bits2);
    for (int i = 0; i < 2; i++) {
        for (int p = 0; p < VALUES; p++) {
            int at = td_exl3_tile_index(p);
            stream[i][p] = target[at / TILE][i * TILE + at % TILE];
        }
    }
    td_exl3_viterbi_pair(m->q->viterbi, stream, state, scratch);
    for (int i = 0; i < 2; i++) {
        td_exl3_pack_tile(state[i], m->q->bits2, m->trellis + (kt * (m->n / TILE) + nt + (size_t)i) * tile_words);
        for (int p = 0; p < VALUES; p++) {
            int at = td_exl3_tile_index(p);
            value[at / TILE][i * TILE + at % TILE] = td_exl3_value(m->q->codebook, state[i][p]);
        }
    }
}

/* Two columns of tiles, from the last row to the first. */
static void columns_job(void *user, int worker, int job)
{
    const matrix *m = user;
    float *errors = m->errors ? m->errors + (size_t)job * m->k * PAIR : NULL;
    double lost = 0, total = 0;
    for (size_t kt = m->k / TILE; kt-- > 0;) {
        float target[TILE][PAIR], value[TILE][PAIR];
        const float *w = m->w + kt * TILE * m->n + (size_t)job * PAIR;
        for (size_t r = 0; r < TILE; r++) memcpy(target[r], w + r * m->n, sizeof target[r]);
        if (errors) add_feedback(m, kt * TILE, errors, target);
        quantize_pair(m, kt, 2 * (size_t)job, target, m->q->scratch[worker], value);
        for (size_t r = 0; r < TILE; r++) {
            for (size_t c = 0; c < PAIR; c++) {
                float e = w[r * m->n + c] - value[r][c];
                if (errors) errors[(kt * TILE + r) * PAIR + c] = e;
                lost += (double)e * (double)e;
                total += (double)w[r * m->n + c] * (double)w[r * m->n + c];
            }
        }
    }
    m->sums[2 * job] = lost;
    m->sums[2 * job + 1] = total;
}

static td_status check_source(const td_exl3_source *s, td_error *err)
{
    if (s->k <= 0 || s->n <= 0 || s->k % TD_EXL3_BLOCK || s->n % TD_EXL3_BLOCK)
        return td_fail(err, TD_EINVAL, "exl3: %d inputs x %d outputs, expected multiples of 128", s->k, s->n);
    for (size_t i = 0; i < (size_t)s->k * (size_t)s->n; i++)
        if (!isfinite(s->w[i]))
            return td_fail(err, TD_EINVAL, "exl3: weight of input %zu, output %zu is not finite", i / (size_t)s->n,
                           i % (size_t)s->n);
    return TD_OK;
}

/* All memory of one matrix. */
typedef struct buffers {
    float *w, *rotated, *scale, *feedback, *errors, *tiles;
    double *rms, *sums;
} buffers;

static void free_buffers(buffers *b)
{
    free(b->w);
    free(b->rotated);
    free(b->scale);
    free(b->feedback);
    free(b->errors);
    free(b->tiles);
    free(b->rms);
    free(b->sums);
}

static td_status take_buffers(buffers *b, size_t k, size_t n, int n_tiles, bool hessian, td_error *err)
{
    *b = (buffers){ .w = malloc(k * n * sizeof(float)),
                    .rotated = malloc(k * n * sizeof(float)),
                    .scale = malloc(k * sizeof(float)),
                    .feedback = hessian ? malloc(k * k * sizeof(float)) : NULL,
                    .errors = hessian ? malloc(k * n * sizeof(float)) : NULL,
                    .tiles = malloc((size_t)n_tiles * VALUES * sizeof(float)),
                    .rms = malloc(k * sizeof(double)),
                    .sums = malloc(n / PAIR * 2 * sizeof(double)) };
    if (b->w && b->rotated && b->scale && b->tiles && b->rms && b->sums && (!hessian || (b->feedback && b->errors)))
        return TD_OK;
    free_buffers(b);
    return td_fail(err, TD_ENOMEM, "exl3: no memory to quantize %zu x %zu", k, n);
}

td_status td_exl3_quantize(td_exl3_quantizer *q, const td_exl3_source *source, uint16_t *trellis, td_f16 *suh,
                           td_f16 *svh, td_exl3_report *report, td_error *err)
{
    td_status status = check_source(source, err);
    if (status) return status;
    size_t k = (size_t)source->k, n = (size_t)source->n;
    int n_spread = q->bits2 > 12 ? 61 : 15; /* with the three extremes an even number */
    buffers b;
    status = take_buffers(&b, k, n, n_spread + 3, source->hessian != NULL, err);
    if (status) return status;

    memcpy(b.rotated, source->w, k * n * sizeof *b.rotated);
    status = scale_columns(k, n, b.rotated, source->output_seed, svh);
    if (status) {
        free_buffers(&b);
        return td_fail(err, status, "exl3: no memory to quantize %zu x %zu", k, n);
    }
    td_hadamard128_blocks(b.rotated, k * n, TD_HADAMARD_SCALE);
    row_scales(k, n, b.rotated, b.rms);
    for (size_t i = 0; i < k; i++) b.scale[i] = (float)b.rms[i] * random_sign(source->input_seed, i);
    divide_rows(k, n, b.rotated, b.scale, b.w);
    double g = find_scale(q, b.tiles, sample_tiles(k, n, b.w, n_spread, b.tiles));
    round_row_scales(k, b.rms, g, source->input_seed, suh, b.scale);
    divide_rows(k, n, b.rotated, b.scale, b.w);

    bool feedback = false;
    if (source->hessian) status = td_exl3_feedback(source->k, source->hessian, b.scale, b.feedback, &feedback, err);
    if (!status) {
        matrix m = { .q = q,
                     .k = k,
                     .n = n,
                     .w = b.w,
                     .feedback = feedback ? b.feedback : NULL,
                     .errors = feedback ? b.errors : NULL,
                     .trellis = trellis,
                     .sums = b.sums };
        td_parallel(q->n_threads, (int)(n / PAIR), columns_job, &m);
        double lost = 0, total = 0;
        for (size_t i = 0; i < n / PAIR; i++) lost += b.sums[2 * i], total += b.sums[2 * i + 1];
        *report = (td_exl3_report){ .scale = g, .nmse = total > 0 ? lost / total : 0, .feedback = feedback };
    }
    free_buffers(&b);
    return status;
}
