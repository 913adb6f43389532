/* Shared by the dense and the routed MLPs of the CPU. */
#ifndef TD_OPS_CPU_MOE_IMPL_H
#define TD_OPS_CPU_MOE_IMPL_H

#include "ops/cpu/cpu.h"
#include "ops/moe.h"

/* y = act( act(silu(min(gate, limit))) * clamp(up, -limit, limit) ) in floats */
void td_swiglu_row(const td_cpu_dev *dev, const float *gate, const float *up, size_t n, float limit, float *y);

#endif
