/* See op_timer.h. */
#include "cli/op_timer.h"

#include "base/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HOLD_NS 40000 /* longer than the host needs to enqueue any one operation */

/* The entries of a table of operations carry no user data, so the timing ones find their timer here. */
static td_op_timer *timing;

static td_op_entry *entry_of(td_op_timer *r, const char *op, const char *shape)
{
    for (int i = 0; i < r->n_entries; i++)
        if (strcmp(r->entries[i].op, op) == 0 && strcmp(r->entries[i].shape, shape) == 0) return &r->entries[i];
    if (r->n_entries == TD_OP_ENTRIES_MAX) return NULL; /* more shapes than any model here has: they go uncounted */
    td_op_entry *e = &r->entries[r->n_entries++];
    *e = (td_op_entry){ .op = op };
    snprintf(e->shape, sizeof e->shape, "%s", shape);
    return e;
}

/* Now: a mark's number or nanoseconds. */
static int64_t moment(void)
{
    return timing->on && timing->marks ? td_mark(timing->marks) : td_now_ns();
}

static int64_t before(void)
{
    if (timing->on && timing->marks) (void)td_marks_hold(timing->marks, HOLD_NS); /* a lost device shows at its sync */
    return moment();
}

static td_status note(const char *op, const char *shape, td_cost cost, int64_t start, int64_t end, td_status status)
{
    td_op_entry *e = timing->on ? entry_of(timing, op, shape) : NULL;
    if (!e) return status;
    e->n_calls++;
    if (!timing->marks) {
        e->s += (double)(end - start) * 1e-9;
        e->cost.bytes += cost.bytes;
        e->cost.flops += cost.flops;
    } else if (timing->n_marked < TD_OP_CALLS_MAX) {
        timing->calls[timing->n_marked].entry = (int)(e - timing->entries);
        timing->calls[timing->n_marked].from = (int)start;
        timing->calls[timing->n_marked++].to = (int)end;
    }
    return status;
}

static td_status timed_embed(td_dev *dev, const td_embed_args *a)
{
    int64_t start = before();
    td_status status = timing->real.embed(dev, a);
    int64_t end = moment();
    return note("embed", "", td_cost_embed(dev, a), start, end, status);
}

static td_status timed_hyper(td_dev *dev, const td_hyper_args *a)
{
    int64_t start = before();
    td_status status = timing->real.hyper(dev, a);
    int64_t end = moment();
    const char *what = !a->fn ? "leave" : a->partials ? "leave and enter" : "enter";
    return note("hyper", what, td_cost_hyper(dev, a), start, end, status);
}

static td_status timed_rmsnorm(td_dev *dev, const td_rmsnorm_args *a)
{
    int64_t start = before();
    td_status status = timing->real.rmsnorm(dev, a);
    int64_t end = moment();
    return note("rmsnorm", "", td_cost_rmsnorm(dev, a), start, end, status);
}

static td_status timed_stream_mean(td_dev *dev, const td_stream_mean_args *a)
{
    int64_t start = before();
    td_status status = timing->real.stream_mean(dev, a);
    int64_t end = moment();
    return note("stream_mean", "", td_cost_stream_mean(dev, a), start, end, status);
}

static td_status timed_linear(td_dev *dev, const td_linear_args *a)
{
    static const char *const FORMATS[] = { [TD_W_BF16] = "bf16", [TD_W_Q4] = "q4", [TD_W_FP8] = "fp8" };
    char shape[TD_OP_SHAPE_CAP];
    int64_t start = before();
    td_status status = timing->real.linear(dev, a);
    int64_t end = moment();
    snprintf(shape, sizeof shape, "%d x %d %s", a->w->out, a->w->in, FORMATS[a->w->format]);
    return note("linear", shape, td_cost_linear(dev, a), start, end, status);
}

static td_status timed_kda(td_dev *dev, const td_kda_args *a)
{
    char shape[TD_OP_SHAPE_CAP];
    int64_t start = before();
    td_status status = timing->real.kda(dev, a);
    int64_t end = moment();
    snprintf(shape, sizeof shape, "%d heads", a->n_heads);
    return note("kda", shape, td_cost_kda(dev, a), start, end, status);
}

static td_status timed_kda_replay(td_dev *dev, const td_kda_replay_args *a)
{
    char shape[TD_OP_SHAPE_CAP];
    int64_t start = before();
    td_status status = timing->real.kda_replay(dev, a);
    int64_t end = moment();
    snprintf(shape, sizeof shape, "%d heads", a->n_heads);
    td_cost cost = { 0 };
    if (td_dev_backend(dev) == TD_CPU) cost = td_cost_kda_replay(dev, a); /* else `keep` is the device's */
    return note("kda_replay", shape, cost, start, end, status);
}

static td_status timed_dsa_store(td_dev *dev, const td_dsa_store_args *a)
{
    int64_t start = before();
    td_status status = timing->real.dsa_store(dev, a);
    int64_t end = moment();
    return note("dsa_store", "", td_cost_dsa_store(dev, a), start, end, status);
}

static td_status timed_dsa_select(td_dev *dev, const td_dsa_select_args *a)
{
    int64_t start = before();
    td_status status = timing->real.dsa_select(dev, a);
    int64_t end = moment();
    return note("dsa_select", "", td_cost_dsa_select(dev, a), start, end, status);
}

static td_status timed_dsa_attend(td_dev *dev, const td_dsa_attend_args *a)
{
    char shape[TD_OP_SHAPE_CAP];
    int64_t start = before();
    td_status status = timing->real.dsa_attend(dev, a);
    int64_t end = moment();
    snprintf(shape, sizeof shape, "%d heads", a->kv_b.n_heads);
    return note("dsa_attend", shape, td_cost_dsa_attend(dev, a), start, end, status);
}

static td_status timed_swiglu(td_dev *dev, const td_swiglu_args *a)
{
    char shape[TD_OP_SHAPE_CAP];
    int64_t start = before();
    td_status status = timing->real.swiglu(dev, a);
    int64_t end = moment();
    snprintf(shape, sizeof shape, "%d wide", a->width);
    return note("swiglu", shape, td_cost_swiglu(dev, a), start, end, status);
}

static td_status timed_router(td_dev *dev, const td_router_args *a)
{
    char shape[TD_OP_SHAPE_CAP];
    int64_t start = before();
    td_status status = timing->real.router(dev, a);
    int64_t end = moment();
    snprintf(shape, sizeof shape, "%d of %d", a->top_k, a->n_experts);
    return note("router", shape, td_cost_router(dev, a), start, end, status);
}

/* The picks where the host can read them; NULL: no memory, or the device failed, which its next sync will say. */
static const int32_t *ids_of(td_dev *dev, const td_experts_args *a)
{
    size_t n = (size_t)a->n_rows * (size_t)a->top_k;
    if (td_dev_backend(dev) == TD_CPU) return a->ids;
    if (n > timing->ids_cap) {
        int32_t *grown = (int32_t *)realloc(timing->ids, n * sizeof *grown);
        if (!grown) return NULL;
        timing->ids = grown;
        timing->ids_cap = n;
    }
    return td_dev_download(dev, timing->ids, a->ids, n * sizeof *timing->ids) ? NULL : timing->ids;
}

static td_cost cost_of_experts(td_dev *dev, const td_experts_args *a, const char *shape)
{
    td_experts_args seen = *a;
    int n_distinct;
    if (!timing->on || timing->marks) return (td_cost){ 0 };
    td_op_entry *e = entry_of(timing, "experts", shape);
    if (!e || !(seen.ids = ids_of(dev, a))) return (td_cost){ 0 };
    e->expert_bytes += td_cost_expert_bytes(&seen, &n_distinct);
    e->n_experts += n_distinct;
    return td_cost_experts(dev, &seen);
}

static td_status timed_experts(td_dev *dev, const td_experts_args *a)
{
    char shape[TD_OP_SHAPE_CAP];
    const td_experts *e = a->experts;
    int64_t start = before();
    td_status status = timing->real.experts(dev, a);
    int64_t end = moment();
    snprintf(shape, sizeof shape, "%d x %d %s", e->width, e->dim, e->exl3 ? "exl3" : "plain");
    return note("experts", shape, cost_of_experts(dev, a, shape), start, end, status);
}

static td_status timed_gather(td_dev *dev, const td_gather_args *a)
{
    int64_t start = before();
    td_status status = timing->real.gather(dev, a);
    int64_t end = moment();
    return note("gather", "", td_cost_gather(a), start, end, status);
}

void td_op_timer_install(td_op_timer *r, td_ops *ops)
{
    r->real = *ops;
    ops->embed = timed_embed;
    ops->hyper = timed_hyper;
    ops->rmsnorm = timed_rmsnorm;
    ops->stream_mean = timed_stream_mean;
    ops->linear = timed_linear;
    ops->kda = timed_kda;
    ops->kda_replay = timed_kda_replay;
    ops->dsa_store = timed_dsa_store;
    ops->dsa_select = timed_dsa_select;
    ops->dsa_attend = timed_dsa_attend;
    ops->swiglu = timed_swiglu;
    ops->router = timed_router;
    ops->experts = timed_experts;
    ops->gather = timed_gather;
    timing = r;
}

void td_op_timer_start(td_op_timer *r)
{
    for (int i = 0; i < r->n_entries; i++) {
        td_op_entry *e = &r->entries[i];
        e->s = e->expert_bytes = 0;
        e->n_calls = e->n_experts = 0;
        e->cost = (td_cost){ 0 };
    }
    r->n_marked = 0;
    if (r->marks) td_marks_clear(r->marks);
    r->on = true;
}

void td_op_timer_stop(td_op_timer *r)
{
    for (int i = 0; r->marks && i < r->n_marked; i++)
        r->entries[r->calls[i].entry].s += td_marks_seconds(r->marks, r->calls[i].from, r->calls[i].to);
    r->on = false;
}

void td_op_timer_deinit(td_op_timer *r)
{
    free(r->ids);
    r->ids = NULL;
    r->ids_cap = 0;
}

td_cost td_op_timer_total(const td_op_timer *timer, int *n_calls)
{
    td_cost all = { 0 };
    *n_calls = 0;
    for (int i = 0; i < timer->n_entries; i++) {
        all.bytes += timer->entries[i].cost.bytes;
        all.flops += timer->entries[i].cost.flops;
        *n_calls += timer->entries[i].n_calls;
    }
    return all;
}
