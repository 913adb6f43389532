/* Shared by the three forms of KDA on the CPU: what precedes the recurrence (convolution, norms, gates), the recurrence
 * step itself, which the window and the replay must have in common to the last bit, and what follows it. */
#ifndef TD_OPS_CPU_KDA_IMPL_H
#define TD_OPS_CPU_KDA_IMPL_H

#include "ops/cpu/cpu.h"
#include "ops/kda.h"
#include "ops/math.h"
#include "ops/simd.h"

enum { TD_KDA_D = TD_HEAD, TD_KDA_ROWS = TD_GRID, TD_KDA_STATE = TD_HEAD * TD_HEAD };

/* One head's rows of up to 64 positions, fp32. */
typedef struct td_kda_rows {
    float *raw;                              /* [3 + 64][128] raw projection rows, the 3 before the block first */
    float *q, *k;                            /* [64][128] normalised; q carries 128^-1/2 */
    float *v;                                /* [64][128] */
    float *alpha;                            /* [64][128] decays */
    float *beta;                             /* [64] */
    float *o;                                /* [64][128] */
    float *qs, *ks, *kd, *x, *y, *u, *a, *b; /* of the chunked form: kda_chunk.c */
} td_kda_rows;

void td_kda_carve(td_arena *arena, td_kda_rows *rows);

/* What a call is about: one head of one segment. */
typedef struct td_kda_task {
    td_cpu_dev *dev;
    const td_kda_args *a;
    const td_segment *segment;
    int head;
    int saved_row; /* of the segment's first row */
} td_kda_task;

/* Fills raw .. beta for rows t0 .. t0+n-1 of the segment (n <= 64). Conv history comes from the committed parity. */
void td_kda_prepare(const td_kda_task *task, int t0, int n, td_kda_rows *rows);

/* y = gated norm of act(o) for the same rows; changes o. */
void td_kda_finish(const td_kda_task *task, int t0, int n, td_kda_rows *rows);

/* A chunk of n <= 64 rows, to = state after them from the state at from (may be the same); fills rows->o. kda_chunk.c
 */
void td_kda_chunk(int n, const float *from, float *to, td_kda_rows *rows);

/* The 3 raw rows (this head's channels) before position n_rows of [old 3; raw rows] go to the other parity. raw row t
 * is at element t * stride of raw, channels as in proj. */
void td_kda_conv_write(const td_cpu_dev *dev, const td_kda_state *state, const td_segment *segment, int n_heads,
                       int head, int n_rows, const td_act *raw, size_t first, size_t stride);

static inline float *td_kda_state_at(const td_kda_state *state, const td_segment *segment, int parity, int n_heads,
                                     int head)
{
    size_t slot = 2 * (size_t)segment->slot + (size_t)(parity & 1);
    return state->state + (slot * (size_t)n_heads + (size_t)head) * TD_KDA_STATE;
}

/* Element index of row j (0..2) of a parity's conv window. */
static inline size_t td_kda_conv_at(const td_segment *segment, int parity, int n_heads, int j)
{
    size_t slot = 2 * (size_t)segment->slot + (size_t)(parity & 1);
    return (slot * (TD_CONV - 1) + (size_t)j) * 3 * TD_HEAD * (size_t)n_heads;
}

enum {
    TD_KDA_STRIP = 64
}; /* value channels at a time: [128][64] floats of state stay in L1 over the rows of a window */

/* One row on value channels d0 .. d0+63, state rows 128 apart:
 *   M = diag(alpha) M;  r = M^T k;  u = beta (v - r);  M = M + k u^T;  o = M^T q (with_output)
 * r and o: fma chains over ascending key channels from +0. */
TD_INLINE void td_kda_step(bool with_output, const float *from, float *to, const float *k, const float *v,
                           const float *alpha, float beta, const float *q, float *o)
{
    enum { V = TD_KDA_STRIP / TD_LANES };
    td_v16 sum[V];
    TD_UNROLL
    for (int j = 0; j < V; j++) sum[j] = td_v16_splat(0.0f);
    for (int c = 0; c < TD_KDA_D; c++) {
        td_v16 decay = td_v16_splat(alpha[c]), kc = td_v16_splat(k[c]);
        TD_UNROLL
        for (int j = 0; j < V; j++) {
            td_v16 m = td_v16_mul(decay, td_v16_load(from + c * TD_KDA_D + j * TD_LANES));
            sum[j] = td_v16_fma(kc, m, sum[j]);
            td_v16_store(to + c * TD_KDA_D + j * TD_LANES, m);
        }
    }
    td_v16 u[V], minus = td_v16_splat(-1.0f), b = td_v16_splat(beta);
    TD_UNROLL
    for (int j = 0; j < V; j++) {
        u[j] = td_v16_mul(b, td_v16_fma(minus, sum[j], td_v16_load(v + j * TD_LANES)));
        sum[j] = td_v16_splat(0.0f);
    }
    for (int c = 0; c < TD_KDA_D; c++) {
        td_v16 kc = td_v16_splat(k[c]);
        TD_UNROLL
        for (int j = 0; j < V; j++) {
            td_v16 m = td_v16_fma(kc, u[j], td_v16_load(to + c * TD_KDA_D + j * TD_LANES));
            td_v16_store(to + c * TD_KDA_D + j * TD_LANES, m);
            if (with_output) sum[j] = td_v16_fma(td_v16_splat(q[c]), m, sum[j]);
        }
    }
    TD_UNROLL
    for (int j = 0; with_output && j < V; j++) td_v16_store(o + j * TD_LANES, sum[j]);
}

#endif
