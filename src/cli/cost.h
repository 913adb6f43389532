/* Bytes that must move and fp32 operations that must happen: what times are compared with. One file, so that every
 * ratio that tandem prints rests on the same formulas (docs/bench.md explains them).
 *
 * The rules. A multiply-add is two operations; so is every operation that is not a multiply-add one. Weights count
 * once a call however many rows use them, activations once read and once written, recurrent states once read and once
 * written a window, cached rows once a window. What an implementation does beside that (decoding EXL3, exponentials,
 * sorting, reading something twice) is its own business and makes its share smaller, not the cost larger. */
#ifndef TD_CLI_COST_H
#define TD_CLI_COST_H

#include "model/model.h"
#include "ops/ops.h"

TD_BEGIN_C

typedef struct td_cost {
    double bytes, flops;
} td_cost;

/* --- one call of an operation; ids of experts, keep of a replay: memory that the host reads --- */
td_cost td_cost_embed(const td_dev *dev, const td_embed_args *a);
td_cost td_cost_hyper(const td_dev *dev, const td_hyper_args *a);
td_cost td_cost_rmsnorm(const td_dev *dev, const td_rmsnorm_args *a);
td_cost td_cost_stream_mean(const td_dev *dev, const td_stream_mean_args *a);
td_cost td_cost_linear(const td_dev *dev, const td_linear_args *a);
td_cost td_cost_kda(const td_dev *dev, const td_kda_args *a);
td_cost td_cost_kda_replay(const td_dev *dev, const td_kda_replay_args *a);
td_cost td_cost_dsa_store(const td_dev *dev, const td_dsa_store_args *a);
td_cost td_cost_dsa_select(const td_dev *dev, const td_dsa_select_args *a);
td_cost td_cost_dsa_attend(const td_dev *dev, const td_dsa_attend_args *a);
td_cost td_cost_swiglu(const td_dev *dev, const td_swiglu_args *a);
td_cost td_cost_router(const td_dev *dev, const td_router_args *a);
td_cost td_cost_experts(const td_dev *dev, const td_experts_args *a);
td_cost td_cost_gather(const td_gather_args *a);

/* The part of it that is weights: those of the experts that were picked. n_distinct: how many, or NULL. */
double td_cost_expert_bytes(const td_experts_args *a, int *n_distinct);

/* --- a rank's share of the model --- */

/* Weights that one decoded token reads, in the format that the rank holds: everything but the embedding (one row of
 * it), the experts that are not chosen, and the MTP layer. plan: of that rank. */
double td_cost_active_bytes(const td_config *config, const td_model_plan *plan);

/* Operations of one row at position pos without the head, and of a prompt of n rows from position 0 with the head once,
 * for rank 0 of world. What every rank computes alike (latents, router, indexer, hyper-connections) counts whole. */
double td_cost_row_flops(const td_config *config, int world, int64_t pos);
double td_cost_prompt_flops(const td_config *config, int world, int64_t n_rows);

TD_END_C
#endif
