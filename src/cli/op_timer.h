/* A table of operations that times: put over a device's own, it notes every call's duration and cost, so that
 * operations are measured inside the windows of a real model, with its shapes, strides, positions and chosen experts.
 */
#ifndef TD_CLI_OP_TIMER_H
#define TD_CLI_OP_TIMER_H

#include "cli/cost.h"

TD_BEGIN_C

enum { TD_OP_ENTRIES_MAX = 64, TD_OP_SHAPE_CAP = 40 };

/* Calls of one operation with one shape between start and stop. */
typedef struct td_op_entry {
    const char *op;
    char shape[TD_OP_SHAPE_CAP];
    td_cost cost; /* of all calls, as are the next two */
    int n_calls;
    double s;
} td_op_entry;

/* Zero before install. Entries are only ever appended, so an index stays valid. */
typedef struct td_op_timer {
    td_ops real;
    bool on;
    td_op_entry entries[TD_OP_ENTRIES_MAX];
    int n_entries;
} td_op_timer;

/* Puts the timing operations into ops. One timer a process, used by one thread: the last one installed counts. */
void td_op_timer_install(td_op_timer *timer, td_ops *ops);

void td_op_timer_start(td_op_timer *timer); /* from zero */
void td_op_timer_stop(td_op_timer *timer);
td_cost td_op_timer_total(const td_op_timer *timer, int *n_calls);

TD_END_C
#endif
