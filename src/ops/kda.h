/* Kimi delta attention of one shard's heads. Arithmetic: docs/model.md "KDA".
 *
 * A slot has two states (parities). A window reads the committed one and writes the state after all its rows to the
 * other; commit then either flips (all rows kept) or replays the kept rows into the other and flips. The replay gives
 * the bits that serial steps have. Chunked segments (prompts) run in chunks of TD_GRID rows on the absolute grid: their
 * bits do not depend on how the prompt was cut into windows, but differ from the row-by-row form's. */
#ifndef TD_OPS_KDA_H
#define TD_OPS_KDA_H

#include "ops/linear.h"

TD_BEGIN_C

/* Bytes a slot and layer of one shard: state [2][n_heads][128 key][128 value] fp32; conv [2][3][3 * n_heads * 128] act
 * (raw q | k | v projections of the last rows; zeros before the sequence starts). */
typedef struct td_kda_state {
    float *state; /* [n_slots][2][n_heads][128][128] */
    td_act *conv; /* [n_slots][2][TD_CONV - 1][3 * n_heads * 128] */
} td_kda_state;

/* Rows of the current window's row-by-row segments, kept for commit: one segment after the other without gaps (rows of
 * chunked segments take no place), so that TD_WINDOW_MAX rows always suffice. */
typedef struct td_kda_saved {
    float *k;     /* [TD_WINDOW_MAX][n_heads * 128] normalised keys; the others: as many rows */
    float *v;     /* [..][n_heads * 128] */
    float *alpha; /* [..][n_heads * 128] decays */
    float *beta;  /* [..][n_heads] */
    td_act *raw;  /* [..][3 * n_heads * 128] raw projections */
} td_kda_saved;

/* Row of saved where segment's first row is. */
static inline int td_kda_saved_row(const td_segment *segments, int segment)
{
    int row = 0;
    for (int i = 0; i < segment; i++) row += segments[i].chunked ? 0 : segments[i].n_rows;
    return row;
}

typedef struct td_kda_weights {
    const float *conv;    /* [3 * n_heads * 128][TD_CONV] taps, oldest row first */
    const float *neg_a;   /* [n_heads]  exp(A_log) */
    const float *dt_bias; /* [n_heads * 128] */
    const float *o_norm;  /* [128] */
} td_kda_weights;

/* Gates of low rank, which the operation makes for itself: f = f_b f_a, gate = g_b g_a, as td_linear does. */
typedef struct td_kda_low_rank {
    const td_weight *f_b, *g_b; /* [n_heads * 128][128], both of one format */
    const td_act *f_a, *g_a;    /* [rows][128] */
    size_t stride;              /* of both */
} td_kda_low_rank;

/* proj rows hold  q | k | v (each n_heads * 128, raw)  then anything; beta_raw, f, gate as projected.
 *   conv, SiLU, l2 norms, decay alpha = exp(lower_bound * sigmoid(neg_a * (f + dt_bias))),
 *   beta = act(sigmoid(beta_raw)),
 *   M = diag(alpha) M;  u = beta (v - M^T k);  M = M + k u^T;  o = act(M^T q);  y = gated norm of o
 * saved may be NULL when every segment is chunked. Tables and states are older than the operation that comes right
 * before: a device may read them while that one ends. */
typedef struct td_kda_args {
    const td_window *window;
    int n_heads;                /* of this shard */
    float rms_eps, lower_bound; /* 1e-5, -5 */
    td_kda_weights w;
    td_kda_state state; /* of this layer and shard */
    td_kda_saved saved; /* of this layer and shard; saved.k == NULL: nothing is kept */
    const td_act *proj;
    size_t proj_stride;
    const td_act *beta_raw;
    size_t beta_stride;  /* [rows][n_heads] */
    td_kda_low_rank low; /* f_b NULL: f and gate are there */
    td_act *f, *gate;    /* [rows][n_heads * 128]; with `low` room for them, left with anything */
    td_act *y;           /* [rows][n_heads * 128] out */
} td_kda_args;
typedef td_status td_kda_fn(td_dev *dev, const td_kda_args *a);

static inline bool td_kda_segments_fit(const td_kda_args *a)
{
    int kept = 0;
    for (int i = 0; i < a->window->n_segments; i++) {
        const td_segment *s = a->window->host_segments + i;
        if (s->n_rows < 0 || s->first_row < 0 || s->n_rows > a->window->n_rows - s->first_row) return false;
        if (s->chunked && s->n_rows && s->pos % TD_GRID) return false;
        kept += s->chunked ? 0 : s->n_rows;
    }
    return !a->saved.k || kept <= TD_WINDOW_MAX;
}

static inline bool td_kda_low_rank_fits(const td_kda_args *a)
{
    const td_weight *w[] = { a->low.f_b, a->low.g_b };
    if (!a->low.f_b) return true;
    if (a->low.stride < TD_HEAD) return false;
    for (int i = 0; i < 2; i++)
        if (!w[i] || w[i]->out != a->n_heads * TD_HEAD || w[i]->in != TD_HEAD || w[i]->format != w[0]->format)
            return false;
    return true;
}

/* Whether sizes and positions are what the operation takes; TD_EINVAL otherwise. */
static inline bool td_kda_fits(const td_kda_args *a)
{
    return a->n_heads >= 0 && td_kda_segments_fit(a) && td_kda_low_rank_fits(a);
}

/* The gates of `low` into f and gate, by products of `linear`. */
static inline td_status td_kda_make_gates(td_dev *dev, td_linear_fn *linear, const td_kda_args *a)
{
    int rows = a->window->n_rows;
    size_t width = (size_t)a->n_heads * TD_HEAD;
    td_linear_args f = { rows, a->low.f_b, a->low.f_a, a->low.stride, a->f, width, NULL };
    td_linear_args gate = { rows, a->low.g_b, a->low.g_a, a->low.stride, a->gate, width, NULL };
    td_status status = linear(dev, &f);
    return status == TD_OK ? linear(dev, &gate) : status;
}

/* For each segment i with 0 < keep[i] < n_rows: the state and conv window after its first keep[i] rows go into the
 * other parity (from the committed parity and saved). Segments with keep[i] == n_rows, 0, or chunked: untouched. The
 * caller flips. */
typedef struct td_kda_replay_args {
    const td_window *window;
    const int32_t *keep; /* [n_segments] device-visible */
    int n_heads;
    td_kda_state state;
    td_kda_saved saved;
} td_kda_replay_args;
typedef td_status td_kda_replay_fn(td_dev *dev, const td_kda_replay_args *a);

td_kda_fn td_cpu_kda;
td_kda_replay_fn td_cpu_kda_replay;

TD_END_C
#endif
