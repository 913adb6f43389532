/* y = W x for a stacked weight. Arithmetic: docs/model.md "Linear". */
#ifndef TD_OPS_LINEAR_H
#define TD_OPS_LINEAR_H

#include "ops/dev.h"

TD_BEGIN_C

typedef enum td_format {
    TD_W_BF16, /* as stored */
    TD_W_Q4,   /* affine 4 bits, groups of 64 inputs: w = s * q + b, s and b bf16 (docs/model.md "Quantised dense
                  weights") */
    TD_W_FP8   /* e4m3, one fp32 scale an output row */
} td_format;

/* A packed matrix [out][in]. The layout of data belongs to the backend: sized by weight_bytes, written by weight_fill.
 * Several matrices with the same input can be stacked along out; each part starts at a multiple of TD_STACK rows. */
enum { TD_STACK = 16 };

typedef struct td_weight {
    td_format format;
    int out, in; /* in % 16 == 0; out any */
    void *data;  /* device-visible, 64-byte aligned */
} td_weight;

size_t td_cpu_weight_bytes(td_format format, int out, int in);

/* Packs rows out0 .. out0+n_out-1 (out0 % TD_STACK == 0) from bf16: row i starts at src + i * src_stride, column in0
 * onwards, w->in values. Rows never filled count as zero only if the caller cleared data. Quantises for Q4 / FP8. src is
 * memory of the host, the caller's again on return, or of the device. */
td_status td_cpu_weight_fill(td_dev *dev, const td_weight *w, int out0, int n_out, const td_bf16 *src,
                             size_t src_stride, int in0);

/*   y[r][o] = sum_i w[o][i] * x[r][i]          fp32; CPU: one chain of fmaf over i ascending, from +0
 * Exactly one of y_act, y_f32 is set. y rows are y_stride apart (>= out), x rows x_stride apart. A row's bits depend
 * neither on the other rows nor on n_rows nor on the stacking. x and y do not overlap. */
typedef struct td_linear_args {
    int n_rows;
    const td_weight *w;
    const td_act *x;
    size_t x_stride;
    td_act *y_act;
    size_t y_stride;
    float *y_f32;
} td_linear_args;

typedef td_status td_linear_fn(td_dev *dev, const td_linear_args *a);
td_linear_fn td_cpu_linear;

TD_END_C
#endif
