/* Measuring a device: marks in its stream, and what it could do at best. Only `tandem bench` uses this. */
#ifndef TD_OPS_MEASURE_H
#define TD_OPS_MEASURE_H

#include "ops/dev.h"

TD_BEGIN_C

/* Marks between operations: moments of the device's own time, so that what lies between two of them is the operations
 * and not the host that called them. On the CPU, where a call returns when it is done, they are the clock's. */
typedef struct td_marks td_marks;

/* cap marks for dev, which is borrowed. */
td_status td_marks_create(td_dev *dev, int cap, td_marks **out, td_error *err);
void td_marks_destroy(td_marks *marks); /* NULL is allowed */

void td_marks_clear(td_marks *marks); /* the next mark is number 0 */

/* Puts a mark behind what was enqueued; its number, or -1 when all are used or the device failed. */
int td_mark(td_marks *marks);

/* Keeps a GPU from starting what comes next for ns: short operations can then be enqueued faster than they run, and
 * none of them waits for its host. The CPU: nothing. */
td_status td_marks_hold(td_marks *marks, int64_t ns);

/* Seconds from one mark to a later one; both were reached (td_dev_sync). 0 when either is -1. */
double td_marks_seconds(const td_marks *marks, int from, int to);

/* Enqueues nothing but multiplications of bf16 numbers in registers, sums in fp32, on all of a GPU; *flops is how many
 * operations those are. TD_EUNSUPPORTED on the CPU, whose ceiling is cli/ceilings.h. */
td_status td_dev_multiply(td_dev *dev, double *flops);

/* The GPU's half. */
td_status td_cuda_event_create(void **out);
void td_cuda_event_destroy(void *event);
td_status td_cuda_event_record(td_dev *dev, void *event);
double td_cuda_event_seconds(void *from, void *to);
td_status td_cuda_hold(td_dev *dev, int64_t ns);
td_status td_cuda_multiply(td_dev *dev, double *flops);

TD_END_C
#endif
