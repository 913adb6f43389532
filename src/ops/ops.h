/* The table of block operations: the seam between the model, which is written once, and the devices. The CPU entries
 * are the reference: short, obvious, exact in their order of summation. A device replaces entry by entry and is
 * compared with the CPU operation by operation (tests/opcheck). */
#ifndef TD_OPS_OPS_H
#define TD_OPS_OPS_H

#include "ops/dsa.h"
#include "ops/gather.h"
#include "ops/hyper.h"
#include "ops/kda.h"
#include "ops/linear.h"
#include "ops/moe.h"
#include "ops/sample.h"

TD_BEGIN_C

typedef struct td_ops {
    size_t (*weight_bytes)(td_format format, int out, int in);
    td_status (*weight_fill)(td_dev *dev, const td_weight *w, int out0, int n_out, const td_bf16 *src,
                             size_t src_stride, int in0);
    size_t (*kv_b_bytes)(const td_dev *dev, int n_heads, int k_dim, int v_dim, int kv_lora);
    td_status (*kv_b_fill)(td_dev *dev, const td_kv_b *w, const td_bf16 *src);
    td_status (*exl3_fill)(td_dev *dev, td_exl3 *w, const td_exl3 *whole, int k0, int k1, int n0, int n1,
                           td_error *err);
    size_t (*experts_table_bytes)(const td_experts *experts);
    td_status (*experts_table_fill)(td_dev *dev, const td_experts *experts);
    td_embed_fn *embed;
    td_hyper_fn *hyper;
    td_rmsnorm_fn *rmsnorm;
    td_stream_mean_fn *stream_mean;
    td_residual_fn *residual;
    td_linear_fn *linear;
    td_kda_fn *kda;
    td_kda_replay_fn *kda_replay;
    td_dsa_store_fn *dsa_store;
    td_dsa_select_fn *dsa_select;
    td_dsa_attend_fn *dsa_attend;
    td_swiglu_fn *swiglu;
    td_router_fn *router;
    td_experts_fn *experts;
    td_gather_fn *gather;
    td_sample_fn *sample_max;
    td_sample_fn *sample_summary;
} td_ops;

/* Fills the table for the device's backend. */
void td_ops_init(td_ops *ops, const td_dev *dev);

TD_END_C
#endif
