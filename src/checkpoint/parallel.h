/* Jobs over threads, for tools: each thread takes the next job until none is left. Which thread runs a job is not
 * defined, so a job writes only what belongs to it. */
#ifndef TD_CHECKPOINT_PARALLEL_H
#define TD_CHECKPOINT_PARALLEL_H

#include "base/status.h"

TD_BEGIN_C

#define TD_PARALLEL_MAX 256

/* worker: 0 .. n_threads - 1, for scratch of its own. */
typedef void td_job(void *user, int worker, int job);

/* Runs job 0 .. n_jobs - 1 on the calling thread and up to n_threads - 1 more; returns when all are done. A thread that
 * cannot be started is done without. */
void td_parallel(int n_threads, int n_jobs, td_job *job, void *user);

TD_END_C
#endif
