/* Embedding, hyper-connections and norms: the residual side of a layer. Arithmetic: docs/model.md
 * "Hyper-connections". */
#ifndef TD_OPS_HYPER_H
#define TD_OPS_HYPER_H

#include "ops/dev.h"

TD_BEGIN_C

/*   x[r][s][d] = table[ids[r]][d]   for the 4 streams s; where media_row[r] >= 0: media[media_row[r]][d] instead
 * ids outside [0, vocab) give zero rows (never a stray read). */
typedef struct td_embed_args {
    const td_window *window;
    int dim, vocab;
    const td_bf16 *table;     /* [vocab][dim] */
    const int32_t *media_row; /* [n_rows] or NULL */
    const td_bf16 *media;     /* [...][dim] or NULL */
    int n_streams;            /* 4 for the trunk, 1 for the MTP layer */
    td_act *x;                /* [n_rows][n_streams][dim] out */
} td_embed_args;
typedef td_status td_embed_fn(td_dev *dev, const td_embed_args *a);

/* Leaves the pending site (when partials is set), then enters the next one:
 *   b        = act( sum over shards s of partials[s][r] )                 fp32, in shard order
 *   X_s      = act( post[s] * b + (((C[0][s] X_0 + C[1][s] X_1) + C[2][s] X_2) + C[3][s] X_3) )   of the old X
 * then, from the new X, with x = X[r] flattened [4 * dim] and rms = 1 / sqrt(mean(x^2) + rms_eps):
 *   m_k      = rms * sum_c fn[k][c] * x[c]                                 k = 0..23
 *   post, C  = gates and Sinkhorn-normalised mixing of this site (docs/model.md)
 *   n        = rmsnorm( act( ((pre_0 X_0 + pre_1 X_1) + pre_2 X_2) + pre_3 X_3 ), norm )
 * post and comb are read (pending site) and written (this site) in place. fn == NULL: only leave (end of the trunk).
 * With partials, x is older than the operation that comes right before (the one that makes the partials complete): a
 * device may read it while that one ends. */
typedef struct td_hyper_args {
    int n_rows, dim;
    float rms_eps, hc_eps;
    int iters;                      /* 20: hc_sinkhorn_iters */
    const float *partials;          /* [TD_SHARDS][n_rows][dim], or NULL: nothing pending */
    const float *fn, *base, *scale; /* [24][4 * dim], [24], [3] */
    const float *norm;              /* [dim] the site's RMSNorm weight */
    td_act *x;                      /* [n_rows][4][dim] in and out */
    float *post;                    /* [n_rows][4]  in (pending) and out */
    float *comb;                    /* [n_rows][4][4]  C[i][j], in (pending) and out */
    td_act *n;                      /* [n_rows][dim] out */
} td_hyper_args;
typedef td_status td_hyper_fn(td_dev *dev, const td_hyper_args *a);

/* y[i] = rmsnorm(x[row[i]]) = act( w * act( x / sqrt(mean(x^2) + eps) ) ); row == NULL: row i. */
typedef struct td_rmsnorm_args {
    int n_rows, dim;
    float eps;
    const int32_t *row; /* [n_rows] or NULL */
    const td_act *x;
    size_t x_stride;
    const float *w; /* [dim] */
    td_act *y;
    size_t y_stride;
} td_rmsnorm_args;
typedef td_status td_rmsnorm_fn(td_dev *dev, const td_rmsnorm_args *a);

/* h[i] = act( (X_0 + X_1 + X_2 + X_3) / 4 ) of row[i] (row == NULL: row i), summed left to right: drafter taps, and
 * before the final norm. */
typedef struct td_stream_mean_args {
    int n_rows, dim;
    const int32_t *row;
    const td_act *x; /* [...][4][dim] */
    td_act *h;
    size_t h_stride;
} td_stream_mean_args;
typedef td_status td_stream_mean_fn(td_dev *dev, const td_stream_mean_args *a);

/* Plain residual of the MTP layer: x[r] = act( x[r] + act( sum over shards of partials[s][r] ) ). */
typedef struct td_residual_args {
    int n_rows, dim;
    const float *partials; /* [TD_SHARDS][n_rows][dim] */
    td_act *x;             /* [n_rows][dim] in and out */
} td_residual_args;
typedef td_status td_residual_fn(td_dev *dev, const td_residual_args *a);

td_embed_fn td_cpu_embed;
td_hyper_fn td_cpu_hyper;
td_rmsnorm_fn td_cpu_rmsnorm;
td_stream_mean_fn td_cpu_stream_mean;
td_residual_fn td_cpu_residual;

TD_END_C
#endif
