/* What the two halves of selection share: scores (dsa_score.cu) and the choice among them (dsa_select.cu). */
#ifndef TD_OPS_CUDA_DSA_SELECT_H
#define TD_OPS_CUDA_DSA_SELECT_H

#include "ops/cuda/kv.h"

enum {
    TD_SELECT_GROUP = 32,  /* pools that have a maximum */
    TD_SELECT_WHOLE = 512, /* a row's scores are a multiple of it: of what a block of k_select_score has */
    TD_SELECT_HEADS_MAX = 64
};

/* A batch of rows; the pointers start at its first. */
typedef struct td_select_batch {
    const int32_t *pos, *seg;
    const td_segment *segments;
    td_dsa_cache cache;
    int n_rows, n_heads, top_pools;
    float head_scale; /* n_heads^-1/2 128^-1/2 */
    const td_bf16 *q;
    const float *weights;
    int32_t *count, *list;
    float *score; /* [n_rows][score_stride] */
    float *most;  /* [n_rows][score_stride / TD_SELECT_GROUP] the largest of each 32 */
    uint32_t score_stride;
} td_select_batch;

TD_DEVICE int td_pools_of(const td_select_batch &a, int row)
{
    return (a.pos[row] + 1) / TD_POOL;
}

cudaError_t td_cuda_score_init(void);

/* Scores of a batch whose longest context is `pools`, and the maxima of every 32; window: of few rows each of which may
 * be of another sequence. */
void td_cuda_score(td_cuda_dev *dev, const td_select_batch *batch, int64_t pools, bool window);

#endif
