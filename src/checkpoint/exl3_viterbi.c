/* Tail-biting Viterbi search over the EXL3 trellis.
 *
 * A node is what neighbouring states share, their overlap of 16 - own bits; the edge of step p is the 16-bit state
 * itself, from node s >> own(p) to node s mod 2^(16 - own(p + 1)). Whatever the width, a step looks at 65,536 edges:
 *
 *   cost'(n) = min over k of  cost(s >> own(p)) + (value(s) - target(p))^2,   s = k << (16 - own(p + 1)) | n
 *
 * The stream is circular: the node after the last step must be the one before the first. Trying all start nodes is out
 * of reach, so, as the format's authors do: a first pass over the tile turned by half (positions 128..255, 0..127),
 * free at both ends, shows which node the best path has in its middle, at position 0; a second pass in natural order is
 * pinned to that node at both ends. Costs are fp32, one fused step an edge.
 *
 * Speed. For fixed k edges are contiguous in n, so vectors run over n, and 2^own of them share a start. The table is
 * stored in the order of the loop, [n / 16][k][n % 16], a line at a time; it is 256 KiB and comes from L2, so two tiles
 * are searched together. Choices k are not recorded: costs of all steps are kept and the 256 choices on the final path
 * are recomputed, which saves a compare and a blend an edge: 4 operations and a load are left. */
#include "checkpoint/exl3_viterbi.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define VALUES  TD_EXL3_TILE_VALUES
#define INLINE  static inline __attribute__((always_inline))
#define SHUFFLE __builtin_shufflevector

typedef float f8 __attribute__((vector_size(32)));

struct td_exl3_viterbi {
    int bits2;
    int max_nodes;   /* of any step: 2^(16 - smallest own) */
    float *table[2]; /* values for the step whose next position is even, odd; the same table in whole widths */
};

/* a * a + b and the smaller of two, each lane; the same bits on every machine (no NaN gets here). */
#if defined(__AVX2__) && defined(__FMA__)
INLINE f8 square_add(f8 a, f8 b)
{
    return (f8)_mm256_fmadd_ps((__m256)a, (__m256)a, (__m256)b);
}

INLINE f8 smaller(f8 a, f8 b)
{
    return (f8)_mm256_min_ps((__m256)a, (__m256)b);
}
#elif defined(__aarch64__)
INLINE f8 square_add(f8 a, f8 b)
{
    float32x4_t a0 = SHUFFLE(a, a, 0, 1, 2, 3), a1 = SHUFFLE(a, a, 4, 5, 6, 7);
    float32x4_t b0 = SHUFFLE(b, b, 0, 1, 2, 3), b1 = SHUFFLE(b, b, 4, 5, 6, 7);
    return SHUFFLE(vfmaq_f32(b0, a0, a0), vfmaq_f32(b1, a1, a1), 0, 1, 2, 3, 4, 5, 6, 7);
}

INLINE f8 smaller(f8 a, f8 b)
{
    float32x4_t a0 = SHUFFLE(a, a, 0, 1, 2, 3), a1 = SHUFFLE(a, a, 4, 5, 6, 7);
    float32x4_t b0 = SHUFFLE(b, b, 0, 1, 2, 3), b1 = SHUFFLE(b, b, 4, 5, 6, 7);
    return SHUFFLE(vminq_f32(a0, b0), vminq_f32(a1, b1), 0, 1, 2, 3, 4, 5, 6, 7);
}
#else
INLINE f8 square_add(f8 a, f8 b)
{
    for (int i = 0; i < 8; i++) b[i] = fmaf(a[i], a[i], b[i]);
    return b;
}

INLINE f8 smaller(f8 a, f8 b)
{
    for (int i = 0; i < 8; i++) a[i] = a[i] < b[i] ? a[i] : b[i];
    return a;
}
#endif

INLINE f8 load8(const float *p)
{
    f8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE f8 splat(float x)
{
    return (f8){ x, x, x, x, x, x, x, x };
}

/* Start costs of 16 edges in a row: each of in[] holds for 2^own of them. */
INLINE void spread(const float *in, int own, f8 *first, f8 *second)
{
    if (own == 1) {
        f8 v = load8(in);
        *first = SHUFFLE(v, v, 0, 0, 1, 1, 2, 2, 3, 3);
        *second = SHUFFLE(v, v, 4, 4, 5, 5, 6, 6, 7, 7);
    } else if (own == 2) {
        *first = SHUFFLE(splat(in[0]), splat(in[1]), 0, 0, 0, 0, 8, 8, 8, 8);
        *second = SHUFFLE(splat(in[2]), splat(in[3]), 0, 0, 0, 0, 8, 8, 8, 8);
    } else {
        *first = splat(in[0]);
        *second = own == 3 ? splat(in[1]) : *first;
    }
}

/* One step of two tiles: in -> out. own: bits of this position; next: of the following one. */
INLINE void step_own(int own, int next, const float *table, const float *const in[2], const float target[2],
                     float *const out[2])
{
    int n_choices = 1 << next, n_nodes = 65536 >> next;
    f8 ta = splat(target[0]), tb = splat(target[1]);
    for (int n = 0; n < n_nodes; n += 16) {
        f8 a0 = splat(INFINITY), a1 = a0, b0 = a0, b1 = a0;
        for (int k = 0; k < n_choices; k++, table += 16) {
            f8 v0 = load8(table), v1 = load8(table + 8), e0, e1;
            int from = (k * n_nodes + n) >> own;
            spread(in[0] + from, own, &e0, &e1);
            a0 = smaller(a0, square_add(v0 - ta, e0));
            a1 = smaller(a1, square_add(v1 - ta, e1));
            spread(in[1] + from, own, &e0, &e1);
            b0 = smaller(b0, square_add(v0 - tb, e0));
            b1 = smaller(b1, square_add(v1 - tb, e1));
        }
        memcpy(out[0] + n, &a0, sizeof a0);
        memcpy(out[0] + n + 8, &a1, sizeof a1);
        memcpy(out[1] + n, &b0, sizeof b0);
        memcpy(out[1] + n + 8, &b1, sizeof b1);
    }
}

static void step(int own, int next, const float *table, const float *const in[2], const float target[2],
                 float *const out[2])
{
    switch (own) {
    case 1: step_own(1, next, table, in, target, out); break;
    case 2: step_own(2, next, table, in, target, out); break;
    case 3: step_own(3, next, table, in, target, out); break;
    case 4: step_own(4, next, table, in, target, out); break;
    default: step_own(own, next, table, in, target, out); break;
    }
}

INLINE int own_at(const td_exl3_viterbi *v, int position)
{
    return td_exl3_own_bits(position & (VALUES - 1), v->bits2);
}

/* Costs of tile t after i steps. */
INLINE float *cost_row(const td_exl3_viterbi *v, float *costs, int t, int i)
{
    return costs + ((size_t)i * 2 + (size_t)t) * (size_t)v->max_nodes;
}

/* All 256 steps of both tiles from position first; costs of step 0 are set. */
static void forward(const td_exl3_viterbi *v, const float targets[2][VALUES], int first, float *costs)
{
    for (int i = 0; i < VALUES; i++) {
        int p = (first + i) & (VALUES - 1), next = p + 1;
        const float *in[2] = { cost_row(v, costs, 0, i), cost_row(v, costs, 1, i) };
        float *out[2] = { cost_row(v, costs, 0, i + 1), cost_row(v, costs, 1, i + 1) };
        const float target[2] = { targets[0][p], targets[1][p] };
        step(own_at(v, p), own_at(v, next), v->table[next & 1], in, target, out);
    }
}

/* Back from node after i_last steps to the node before step i_first of tile t; states on the way go to state (or NULL).
 */
static int trace_back(const td_exl3_viterbi *v, const float *target, int first, float *costs, int t, int node,
                      int i_last, int i_first, uint16_t *state)
{
    for (int i = i_last - 1; i >= i_first; i--) {
        int p = (first + i) & (VALUES - 1), own = own_at(v, p), next = own_at(v, p + 1), best_k = 0;
        const float *in = cost_row(v, costs, t, i);
        const float *table = v->table[(p + 1) & 1] + ((size_t)(node >> 4) << next << 4) + (node & 15);
        float best = INFINITY;
        for (int k = 0; k < 1 << next; k++) {
            float d = table[16 * k] - target[p], cost = fmaf(d, d, in[((k << (16 - next)) | node) >> own]);
            if (!(cost < best)) continue;
            best = cost;
            best_k = k;
        }
        int s = best_k << (16 - next) | node;
        if (state) state[p] = (uint16_t)s;
        node = s >> own;
    }
    return node;
}

static int cheapest(const float *cost, int n)
{
    int best = 0;
    for (int i = 1; i < n; i++)
        if (cost[i] < cost[best]) best = i;
    return best;
}

void td_exl3_viterbi_pair(const td_exl3_viterbi *v, const float targets[2][VALUES], uint16_t state[2][VALUES],
                          void *scratch)
{
    enum { HALF = VALUES / 2 };
    float *costs = scratch;
    int pin[2];
    memset(costs, 0, 2 * (size_t)v->max_nodes * sizeof *costs);
    forward(v, targets, HALF, costs);
    for (int t = 0; t < 2; t++) {
        int end = cheapest(cost_row(v, costs, t, VALUES), 65536 >> own_at(v, HALF));
        pin[t] = trace_back(v, targets[t], HALF, costs, t, end, VALUES, HALF, NULL);
    }
    for (int t = 0; t < 2; t++) {
        float *start = cost_row(v, costs, t, 0);
        for (int n = 0; n < v->max_nodes; n++) start[n] = INFINITY;
        start[pin[t]] = 0.0f;
    }
    forward(v, targets, 0, costs);
    for (int t = 0; t < 2; t++) {
        int before = trace_back(v, targets[t], 0, costs, t, pin[t], VALUES, 0, state[t]);
        td_check(before == pin[t]);
    }
}

size_t td_exl3_viterbi_scratch_bytes(const td_exl3_viterbi *v)
{
    return (size_t)(VALUES + 1) * 2 * (size_t)v->max_nodes * sizeof(float);
}

/* The table for edges into nodes of 16 - next bits. */
static float *make_table(const float *values, int next)
{
    float *table = aligned_alloc(64, TD_EXL3_STATES * sizeof *table);
    if (!table) return NULL;
    int n_choices = 1 << next, n_nodes = 65536 >> next;
    size_t at = 0;
    for (int n = 0; n < n_nodes; n += 16)
        for (int k = 0; k < n_choices; k++)
            for (int i = 0; i < 16; i++) table[at++] = values[k * n_nodes + n + i];
    return table;
}

td_status td_exl3_viterbi_create(td_exl3_codebook codebook, int bits2, td_exl3_viterbi **out, td_error *err)
{
    td_exl3_viterbi *v = calloc(1, sizeof *v);
    float *values = malloc(TD_EXL3_STATES * sizeof *values);
    if (!v || !values) goto fail;
    v->bits2 = bits2;
    v->max_nodes = 65536 >> td_exl3_own_bits(0, bits2);
    td_exl3_codebook_f32(codebook, values);
    v->table[0] = make_table(values, td_exl3_own_bits(0, bits2));
    v->table[1] = bits2 % 2 ? make_table(values, td_exl3_own_bits(1, bits2)) : v->table[0];
    if (!v->table[0] || !v->table[1]) goto fail;
    free(values);
    *out = v;
    return TD_OK;
fail:
    free(values);
    td_exl3_viterbi_destroy(v);
    return td_fail(err, TD_ENOMEM, "exl3: no memory for the search tables");
}

void td_exl3_viterbi_destroy(td_exl3_viterbi *v)
{
    if (!v) return;
    if (v->table[1] != v->table[0]) free(v->table[1]);
    free(v->table[0]);
    free(v);
}
