/* A model with everything around it, for tests of the model, the engine and the comparison with the reference:
 * checkpoint, device, link (alone or one rank of two), slots that own pool blocks, and short ways to run prompts and
 * steps. */
#ifndef TD_TESTS_MODEL_SUPPORT_H
#define TD_TESTS_MODEL_SUPPORT_H

#include "model/model.h"

TD_BEGIN_C

typedef struct td_rig_options {
    const char *dir; /* checkpoint folder */
    int n_threads;   /* 0: all cores */
    bool exact_fp32;
    bool stream;           /* on the device of stream_device.h: recordings, relayed exchanges */
    const char *transport; /* with world 2: "shm", "tcp" */
    int port;
    size_t link_extra_bytes; /* of the link's region, for what is not the model's */
    td_model_options model;
} td_rig_options;

/* Rank 0 of 1, 1 thread, 4 slots, 16 blocks, chunks of 512, 4,096 tokens of context, MTP, logits of 512 rows. */
void td_rig_defaults(td_rig_options *options, const char *dir);

typedef struct td_rig {
    td_rig_options options;
    td_checkpoint *ck;
    td_ops ops;
    td_dev *dev;
    td_link *link;
    td_model_plan plan;
    td_model *model;
} td_rig;

/* On failure nothing is left open. */
td_status td_rig_open(td_rig *rig, const td_rig_options *options, td_error *err);
void td_rig_close(td_rig *rig);

/* A TCP port of the loopback that is free just now; 0: none. */
int td_rig_free_port(void);

/* Where a BF16 demo checkpoint is ($TD_DEMO_BF16), else the bundled one, models/demo; NULL: neither is there. */
const char *td_rig_demo_dir(void);

/* Resets slot and gives it n_blocks blocks: first, first + step, first + 2 * step, ... */
void td_rig_slot(td_rig *rig, int slot, int first, int step, int n_blocks);

/* Runs one segment at the slot's position and commits all of it. */
td_status td_rig_run(td_rig *rig, int slot, const int32_t *ids, int n_rows, bool chunked, bool all, td_error *err);

/* Prompt rows in windows of chunk_rows; logits of the last row are left. */
td_status td_rig_prefill(td_rig *rig, int slot, const int32_t *ids, int n, int chunk_rows, td_error *err);

/* Logits row of the last forward joined over the shards that are here, [vocab_size]; absent shards: untouched. */
void td_rig_logits(const td_rig *rig, int row, float *out);
int td_rig_vocab(const td_rig *rig);

/* Largest logit; equal ones: the lower id. */
int32_t td_rig_argmax(const float *logits, int n);

/* Prefills ids into slot, then decodes greedily row by row until an end id (which is stored) or cap. World 1. */
td_status td_rig_greedy(td_rig *rig, int slot, const int32_t *ids, int n, int32_t *out, int cap, int *n_out,
                        td_error *err);

TD_END_C
#endif
