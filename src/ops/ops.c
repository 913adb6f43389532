/* The table of operations for a backend. */
#include "ops/ops.h"

static const td_ops cpu_ops = {
    .weight_bytes = td_cpu_weight_bytes,
    .weight_fill = td_cpu_weight_fill,
    .kv_b_bytes = td_cpu_kv_b_bytes,
    .kv_b_fill = td_cpu_kv_b_fill,
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
};

void td_ops_init(td_ops *ops, const td_dev *dev)
{
    (void)dev;
    *ops = cpu_ops;
}
