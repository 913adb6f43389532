/* A table of operations that times: put over a device's own, it notes every call's duration and cost, so that
 * operations are measured inside the windows of a real model, with its shapes, strides, positions and chosen experts.
 */
#ifndef TD_CLI_OP_TIMER_H
#define TD_CLI_OP_TIMER_H

#include "cli/cost.h"
#include "ops/measure.h"

TD_BEGIN_C

enum { TD_OP_ENTRIES_MAX = 64, TD_OP_SHAPE_CAP = 40, TD_OP_CALLS_MAX = 4096 };

/* Calls of one operation with one shape between start and stop. */
typedef struct td_op_entry {
    const char *op;
    char shape[TD_OP_SHAPE_CAP];
    td_cost cost;        /* of all calls, as are the next four */
    double expert_bytes; /* the part of cost.bytes that is experts' weights */
    int n_experts;       /* distinct ones, added up over the calls */
    int n_calls;
    double s;
} td_op_entry;

/* Zero before install. Entries are only ever appended, so an index stays valid. */
typedef struct td_op_timer {
    td_ops real;
    bool on;
    td_marks *marks; /* NULL: the host's clock; else the device's, see below */
    struct {
        int entry, from, to;
    } calls[TD_OP_CALLS_MAX]; /* with marks: what lies between which */
    int n_marked;
    int32_t *ids; /* [ids_cap] experts that were picked, where the host cannot read them in place */
    size_t ids_cap;
    td_op_entry entries[TD_OP_ENTRIES_MAX];
    int n_entries;
} td_op_timer;

/* Puts the timing operations into ops. One timer a process, used by one thread: the last one installed counts.
 *
 * Operations of a GPU only enqueue, so a run of them is timed with marks: the pause before each call lets the host get
 * ahead, and what lies between the call's two marks is its kernels. Costs are not counted then, because looking at the
 * picked experts would stop the device; they come from a run without marks, whose times mean nothing. */
void td_op_timer_install(td_op_timer *timer, td_ops *ops);
void td_op_timer_deinit(td_op_timer *timer);

void td_op_timer_start(td_op_timer *timer); /* from zero */
void td_op_timer_stop(td_op_timer *timer);  /* with marks: after td_dev_sync */
td_cost td_op_timer_total(const td_op_timer *timer, int *n_calls);

TD_END_C
#endif
