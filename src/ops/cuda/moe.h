/* Shared by the dense and the routed MLPs of the GPU. */
#ifndef TD_OPS_CUDA_MOE_H
#define TD_OPS_CUDA_MOE_H

#include "ops/cuda/device.h"

/* act(silu(min(gate, limit))) * clamp(up, -limit, limit), not yet rounded; gate and up as the product stored them */
TD_DEVICE float td_swiglu_value(float gate, float up, float limit)
{
    return td_round_bf16(td_siluf(td_min_f(gate, limit))) * td_clamp_f(up, limit);
}

#endif
