/* What the routed experts of a model saw: the rows that enter each MoE layer and which experts they went to, for more
 * rows than memory holds. */
#ifndef TD_CLI_EXPERT_INPUTS_H
#define TD_CLI_EXPERT_INPUTS_H

#include "base/num.h"

TD_BEGIN_C

typedef struct td_expert_inputs {
    int n_layers, dim, top_k;
    int64_t n_tokens;
    td_bf16 *rows;   /* [n_layers][n_tokens][dim] */
    uint16_t *picks; /* [n_layers][n_tokens][top_k] expert + 1; 0: none */
    void *map;
    size_t map_bytes;
} td_expert_inputs;

/* Takes a nameless file beside `path` (in its folder), with its whole space reserved, and maps it: no row and no pick
 * yet. TD_EIO: the folder cannot be written or has too little room; err says how much is wanted. */
td_status td_expert_inputs_open(const char *path, int n_layers, int64_t n_tokens, int dim, int top_k,
                                td_expert_inputs *out, td_error *err);
void td_expert_inputs_close(td_expert_inputs *in); /* also of one that is all zero */

/* Rows first .. first + n_rows - 1 of a layer: x [n_rows][dim], values that bf16 holds exactly. */
void td_expert_inputs_put_rows(td_expert_inputs *in, int layer, int64_t first, int n_rows, const float *x);
/* Their experts: ids [n_rows][top_k]. */
void td_expert_inputs_put_picks(td_expert_inputs *in, int layer, int64_t first, int n_rows, const int32_t *ids);

/* How many rows of a layer went to an expert. */
int64_t td_expert_inputs_count(const td_expert_inputs *in, int layer, int expert);

/* The next rows of a layer that went to an expert, at most cap, from token *next on, into x [cap][dim]; *next moves
 * behind the last. Returns how many; 0: no more. */
int td_expert_inputs_take(const td_expert_inputs *in, int layer, int expert, int64_t *next, int cap, float *x);

TD_END_C
#endif
