/* Entry points of the CUDA operations, for the table (ops/ops.c). Each does what its CPU twin's header says. */
#ifndef TD_OPS_CUDA_CUDA_OPS_H
#define TD_OPS_CUDA_CUDA_OPS_H

#include "ops/ops.h"

TD_BEGIN_C

size_t td_cuda_weight_bytes(td_format format, int out, int in);
td_status td_cuda_weight_fill(td_dev *dev, const td_weight *w, int out0, int n_out, const td_bf16 *src,
                              size_t src_stride, int in0);
size_t td_cuda_kv_b_bytes(const td_dev *dev, int n_heads, int k_dim, int v_dim, int kv_lora);
td_status td_cuda_kv_b_fill(td_dev *dev, const td_kv_b *w, const td_bf16 *src);
td_status td_cuda_exl3_fill(td_dev *dev, td_exl3 *w, const td_exl3 *whole, int k0, int k1, int n0, int n1,
                            td_error *err);
size_t td_cuda_experts_table_bytes(const td_experts *experts);
td_status td_cuda_experts_table_fill(td_dev *dev, const td_experts *experts);
td_embed_fn td_cuda_embed;
td_hyper_fn td_cuda_hyper;
td_rmsnorm_fn td_cuda_rmsnorm;
td_stream_mean_fn td_cuda_stream_mean;
td_residual_fn td_cuda_residual;
td_linear_fn td_cuda_linear;
td_kda_fn td_cuda_kda;
td_kda_replay_fn td_cuda_kda_replay;
td_dsa_store_fn td_cuda_dsa_store;
td_dsa_select_fn td_cuda_dsa_select;
td_dsa_attend_fn td_cuda_dsa_attend;
td_swiglu_fn td_cuda_swiglu;
td_router_fn td_cuda_router;
td_experts_fn td_cuda_experts;
td_gather_fn td_cuda_gather;
td_sample_fn td_cuda_sample_max;
td_sample_fn td_cuda_sample_summary;

TD_END_C
#endif
