/* A model in this process for measurements: one rank, both shards, one sequence. */
#ifndef TD_CLI_BENCH_RIG_H
#define TD_CLI_BENCH_RIG_H

#include "model/model.h"

TD_BEGIN_C

typedef struct td_rig {
    td_checkpoint *checkpoint;
    td_dev *dev;
    td_ops ops; /* the model calls through this table: entries may be replaced between two windows */
    td_link *link;
    td_model *model;
    td_model_plan plan;
    int chunk_rows;
    int32_t pos;     /* of the sequence */
    int32_t *ids;    /* [chunk_rows] the next window's */
    int32_t *blocks; /* [n_blocks] the sequence has the whole pool */
    int n_blocks;
    uint64_t state; /* of the random ids */
} td_rig;

/* context_tokens: longest the sequence may get; chunk_rows: of a prompt window, rounded up to TD_GRID. dense: "bf16",
 * "q4", "fp8". On failure everything is released. */
td_status td_rig_open(const char *dir, int n_threads, int64_t context_tokens, int chunk_rows, const char *dense,
                      td_rig *rig, td_error *err);
void td_rig_close(td_rig *rig); /* also of a rig that is all zero */

/* An empty sequence. */
void td_rig_restart(td_rig *rig);

/* The next window of n_rows random tokens: row by row, or as a prompt's chunk. Nothing is committed. */
td_status td_rig_forward(td_rig *rig, int n_rows, bool chunked, td_error *err);
td_status td_rig_commit(td_rig *rig, int n_rows, td_error *err);

/* A prompt of n_tokens from where the sequence is (a multiple of TD_GRID), in chunks, committed. */
td_status td_rig_prompt(td_rig *rig, int n_tokens, td_error *err);

/* What a rank of world would hold; nothing is loaded. */
td_status td_rig_plan(const char *dir, int world, const char *dense, td_model_plan *plan, td_config *config,
                      td_error *err);

TD_END_C
#endif
