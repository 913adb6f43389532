/* Sampling rows of the last forward: each rank's device summarises its own vocabulary shards, the summaries cross the
 * link, and every rank draws the same tokens from the merged set (docs/sampling.md). */
#ifndef TD_ENGINE_SAMPLING_H
#define TD_ENGINE_SAMPLING_H

#include "engine/engine.h"

TD_BEGIN_C

typedef struct td_sample_row {
    td_sample_params params;
    uint64_t pos;          /* absolute index of the token being sampled */
    int n_logprobs;        /* -1: none */
    const int32_t *banned; /* [n_banned] ids that may not be sampled */
    int n_banned;
} td_sample_row;

typedef struct td_sample_scratch td_sample_scratch;

/* Bytes of the link's region, and of one rank's part of a gather, that sampling needs. */
size_t td_sample_region_bytes(int rows_max, int vocab_shard);
size_t td_sample_gather_bytes(int vocab_shard);

/* Buffers for up to rows_max rows: from the arena; from `shared`, memory that the device sees too; for what crosses
 * ranks, from the link. vocab_shard columns a shard, of which ids >= n_ids (all shards together) are never sampled.
 * NULL while counting or when there is no room. */
td_sample_scratch *td_sample_scratch_take(td_arena *arena, td_arena *shared, td_link *link, int rows_max,
                                          int vocab_shard, int n_ids);

/* Row i is the i-th of the last forward's logits. row_status[i]: TD_OK, or TD_EINVAL when its logits are not numbers
 * (then tokens[i] is not set). The return value is for the whole call: TD_EPEER when the link is lost,
 * TD_ECUDA when the device is. Waits for the device once for greedy rows, twice for usual sampled ones. */
td_status td_sample_rows(td_sample_scratch *scratch, const td_model *model, td_link *link, const td_sample_row *rows,
                         int n_rows, td_token *tokens, td_status *row_status, td_error *err);

TD_END_C
#endif
