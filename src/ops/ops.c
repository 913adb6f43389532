/* The table of operations for a backend. */
#include "ops/ops.h"
#ifdef TD_WITH_CUDA
#include "ops/cuda/cuda_ops.h"
#endif

/* The CPU reads packed experts as they are in the files, through the views. */
td_status td_cpu_exl3_fill(td_dev *dev, td_exl3 *w, const td_exl3 *whole, int k0, int k1, int n0, int n1, td_error *err)
{
    (void)dev;
    return td_exl3_slice(whole, k0, k1, n0, n1, (void *)w->trellis, w, err);
}

size_t td_cpu_experts_table_bytes(const td_experts *experts)
{
    (void)experts;
    return 0;
}

td_status td_cpu_experts_table_fill(td_dev *dev, const td_experts *experts)
{
    (void)dev;
    (void)experts;
    return TD_OK;
}

static const td_ops cpu_ops = {
    .weight_bytes = td_cpu_weight_bytes,
    .weight_fill = td_cpu_weight_fill,
    .kv_b_bytes = td_cpu_kv_b_bytes,
    .kv_b_fill = td_cpu_kv_b_fill,
    .exl3_fill = td_cpu_exl3_fill,
    .experts_table_bytes = td_cpu_experts_table_bytes,
    .experts_table_fill = td_cpu_experts_table_fill,
    .embed = td_cpu_embed,
    .hyper = td_cpu_hyper,
    .rmsnorm = td_cpu_rmsnorm,
    .stream_mean = td_cpu_stream_mean,
    .residual = td_cpu_residual,
    .linear = td_cpu_linear,
    .kda = td_cpu_kda,
    .kda_replay = td_cpu_kda_replay,
    .dsa_store = td_cpu_dsa_store,
    .dsa_select = td_cpu_dsa_select,
    .dsa_attend = td_cpu_dsa_attend,
    .swiglu = td_cpu_swiglu,
    .router = td_cpu_router,
    .experts = td_cpu_experts,
    .gather = td_cpu_gather,
    .sample_max = td_cpu_sample_max,
    .sample_summary = td_cpu_sample_summary,
};

#ifdef TD_WITH_CUDA
static const td_ops cuda_ops = {
    .weight_bytes = td_cuda_weight_bytes,
    .weight_fill = td_cuda_weight_fill,
    .kv_b_bytes = td_cuda_kv_b_bytes,
    .kv_b_fill = td_cuda_kv_b_fill,
    .exl3_fill = td_cuda_exl3_fill,
    .experts_table_bytes = td_cuda_experts_table_bytes,
    .experts_table_fill = td_cuda_experts_table_fill,
    .embed = td_cuda_embed,
    .hyper = td_cuda_hyper,
    .rmsnorm = td_cuda_rmsnorm,
    .stream_mean = td_cuda_stream_mean,
    .residual = td_cuda_residual,
    .linear = td_cuda_linear,
    .kda = td_cuda_kda,
    .kda_replay = td_cuda_kda_replay,
    .dsa_store = td_cuda_dsa_store,
    .dsa_select = td_cuda_dsa_select,
    .dsa_attend = td_cuda_dsa_attend,
    .swiglu = td_cuda_swiglu,
    .router = td_cuda_router,
    .experts = td_cuda_experts,
    .gather = td_cuda_gather,
    .sample_max = td_cuda_sample_max,
    .sample_summary = td_cuda_sample_summary,
};
#endif

void td_ops_init(td_ops *ops, const td_dev *dev)
{
    *ops = cpu_ops;
#ifdef TD_WITH_CUDA
    if (td_dev_backend(dev) == TD_CUDA) *ops = cuda_ops;
#else
    (void)dev;
#endif
}
