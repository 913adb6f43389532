/* Clamped SwiGLU, router and routed experts. Arithmetic: docs/model.md "MLP", "Router", "Experts". */
#ifndef TD_OPS_MOE_H
#define TD_OPS_MOE_H

#include "checkpoint/exl3.h"
#include "ops/dev.h"
#include "ops/linear.h"

TD_BEGIN_C

enum { TD_EXPERTS_MAX = 512, TD_TOP_K_MAX = 32 };

/* y[r][i] = act( act( silu(min(g, limit)) ) * clamp(u, -limit, limit) ),  g | u = halves of gate_up[r] */
typedef struct td_swiglu_args {
    int n_rows, width;
    float limit;
    const td_act *gate_up; /* [rows][2 * width] */
    td_act *y;             /* [rows][width] out */
} td_swiglu_args;
typedef td_status td_swiglu_fn(td_dev *dev, const td_swiglu_args *a);

/*   z[r][e]    = sum_d x[r][d] * w[e][d]           fp32 as td_linear
 *   key[r][e]  = sigmoid(z[r][e]) + bias[e]         fp32; the bias chooses, it never weighs
 *   ids        = the top_k largest keys, largest first; equal keys: the lower id first
 *   weights[k] = sigmoid(z)[ids[k]] / (sum over the picks + 1e-20) * scale        (norm false: without the division)
 * A row's bits depend neither on the other rows nor on n_rows. NaN in a row: ids in range, weights NaN. */
typedef struct td_router_args {
    int n_rows, dim, n_experts, top_k;
    bool norm;
    float scale;        /* routed_scaling_factor, 2.5 */
    const td_act *x;    /* [rows][dim] */
    const td_weight *w; /* [n_experts][dim] bf16, the same on every rank */
    const float *bias;  /* [n_experts] stays fp32: bf16 would change the picks */
    int32_t *ids;       /* [rows][top_k] out */
    float *weights;     /* [rows][top_k] out */
} td_router_args;
typedef td_status td_router_fn(td_dev *dev, const td_router_args *a);

/* A shard's half of every expert of a layer: gate, up [width][dim], down [dim][width]. Either EXL3 or plain bf16. */
typedef struct td_experts {
    int n_experts, dim, width; /* width: of this shard */
    bool exl3;
    const td_exl3 *gate_x, *up_x, *down_x; /* [n_experts] when exl3 (views of packed slices, from exl3_fill) */
    const td_weight *gate, *up, *down;     /* [n_experts] otherwise */
    void *table;                           /* device-visible, experts_table_bytes(); NULL where that is 0 */
} td_experts;

/* Cuts inputs k0 .. k1-1, outputs n0 .. n1-1 out of `whole` (host memory) into the device-visible td_exl3_bytes() bytes
 * at w->trellis (64-byte aligned) and makes *w a view of them. The order of the bytes belongs to the backend. */
td_status td_cpu_exl3_fill(td_dev *dev, td_exl3 *w, const td_exl3 *whole, int k0, int k1, int n0, int n1,
                           td_error *err);

/* Where the experts' matrices are, for kernels: filled once all matrices are, before the first td_experts_fn. CPU: 0
 * bytes. */
size_t td_cpu_experts_table_bytes(const td_experts *experts);
td_status td_cpu_experts_table_fill(td_dev *dev, const td_experts *experts);

/*   y[r] = ( sum over k of weights[r][k] * expert_{ids[r][k]}(x[r]) ) + shared[r]      fp32, pick order, shared last
 * EXL3: xh = f16(H(x * suh)), z = xh Wq (fp32 chain over k ascending), y = H(z) * svh; gate and up rounded to act,
 * SwiGLU as above, then down. ids outside [0, n_experts) are skipped. y may be shared. */
typedef struct td_experts_args {
    int n_rows, top_k;
    float limit;
    const td_experts *experts;
    const td_act *x;      /* [rows][dim] */
    const int32_t *ids;   /* [rows][top_k] */
    const float *weights; /* [rows][top_k] */
    const float *shared;  /* [rows][dim] or NULL */
    bool join;            /* `shared` comes from an open branch (td_dev_fork), which is joined before it is read */
    float *y;             /* [rows][dim] out */
} td_experts_args;
typedef td_status td_experts_fn(td_dev *dev, const td_experts_args *a);

td_swiglu_fn td_cpu_swiglu;
td_router_fn td_cpu_router;
td_experts_fn td_cpu_experts;

TD_END_C
#endif
