/* A checkpoint with plain weights into one whose routed experts are EXL3. */
#ifndef TD_CHECKPOINT_EXL3_CONVERT_H
#define TD_CHECKPOINT_EXL3_CONVERT_H

#include "checkpoint/checkpoint.h"
#include "checkpoint/exl3.h"

TD_BEGIN_C

/* Where Hessians come from: somebody who runs the model over calibration text. get fills h [k][k], symmetric, with the
 * sum of x x^T over the inputs x that this matrix saw (any positive factor), or sets *known = false when it saw none;
 * gate and up of an expert share their input. Called from one thread, in the order of the files. */
typedef struct td_hessian_source {
    void *user;
    td_status (*get)(void *user, int layer, int expert, td_projection projection, int k, float *h, bool *known,
                     td_error *err);
} td_hessian_source;

typedef struct td_convert_progress {
    int n_done, n_total; /* matrices */
    int n_feedback;      /* of those done: with a Hessian */
    double nmse_sum;     /* over those done, of td_exl3_report.nmse */
    double nmse_most;
} td_convert_progress;

typedef struct td_convert_args {
    const char *from_dir; /* a folder that td_checkpoint_verify accepts, not quantized */
    const char *to_dir;   /* must not exist or be empty; its parent exists */
    td_exl3_codebook codebook;
    int bits;                                                   /* 1 .. 8 */
    int n_threads;                                              /* 1 .. TD_PARALLEL_MAX; decides nothing but time */
    uint64_t shard_bytes_max;                                   /* of one file of the result */
    const td_hessian_source *hessian;                           /* NULL: every input counts the same */
    void (*progress)(void *user, const td_convert_progress *p); /* after each matrix; NULL: none */
    void *progress_user;
} td_convert_args;

/* Routed experts (the MTP layer's too) become trellis, suh, svh and the codebook's marker; all other tensors keep their
 * bytes; config.json gains quantization_config; every other file but weights, index, README.md and hidden files is
 * copied. Same input and arguments (threads aside): same bytes. Everything is written into "to_dir.part", checked by
 * opening it, and renamed when whole; after a failure that folder is removed again. *result is the last progress. */
td_status td_exl3_convert(const td_convert_args *args, td_convert_progress *result, td_error *err);

TD_END_C
#endif
