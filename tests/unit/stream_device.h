/* A device that works like a GPU, made of the CPU's: operations only enqueue, a thread runs them in order, recordings
 * are kept and replayed, and the gather rings a bell and waits for its answer. With it the parts of the model that
 * exist for such devices (recordings, relayed exchanges) are tested on any machine, against the CPU's bits. */
#ifndef TD_TESTS_STREAM_DEVICE_H
#define TD_TESTS_STREAM_DEVICE_H

#include "ops/ops.h"

TD_BEGIN_C

/* Its td_dev_backend() is TD_CUDA. Fills ops too. */
td_status stream_dev_create(const td_dev_limits *limits, int n_threads, td_dev **out, td_ops *ops, td_error *err);

/* Recordings made and replayed so far. */
void stream_dev_counts(td_dev *dev, int *n_recorded, int *n_launched);

TD_END_C
#endif
