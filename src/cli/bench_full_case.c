/* One measurement of `tandem bench full`: sequences put at their positions, the window run until everything is warm,
 * timed, counted, and once more operation by operation. */
#include "cli/bench_full.h"

#include "base/clock.h"
#include "model/random.h"
#include "ops/random.h"

#include <math.h>
#include <string.h>

enum { WARM_RUNS = 2, SEED = 0xca5e };

/* ---- the window ---- */

static int64_t room_of(const td_full_rig *rig)
{
    int64_t pool = (int64_t)rig->model_options.n_blocks * TD_BLOCK, longest = rig->model_options.context_tokens;
    return pool < longest ? pool : longest;
}

/* Where a segment of n_rows after `context` tokens begins: there, or, when the context is all that there may be, so
 * that its last row is the last one possible. -1: it does not fit. */
static int64_t position(int64_t context, int n_rows, bool prompt, int64_t room)
{
    int64_t pos = context;
    if (context > room) return -1;
    if (pos + n_rows > room) pos = room - n_rows;
    if (prompt) pos = pos / TD_GRID * TD_GRID;
    return pos < 0 || context - pos > context / 16 + 2 * n_rows ? -1 : pos;
}

/* Each sequence's blocks begin a quarter of the pool further on: apart when the pool has room for all. */
static td_status place(td_full_rig *rig, int slot, int32_t pos, int n_rows, td_error *err)
{
    int n_blocks = rig->model_options.n_blocks, used = (pos + n_rows + TD_BLOCK - 1) / TD_BLOCK;
    int64_t first = (int64_t)slot * (n_blocks / TD_FULL_SLOTS);
    for (int i = 0; i < used; i++) rig->blocks[i] = (int32_t)((first + i) % n_blocks);
    td_model_slot_reset(rig->model, slot);
    td_model_slot_blocks(rig->model, slot, rig->blocks, used);
    if (!pos) return TD_OK;
    td_status status = td_model_random_slot(rig->model, slot, pos, SEED + 1000u * (unsigned)slot);
    return status ? td_fail(err, status, "a context of %d tokens: %s", pos, td_status_text(status)) : TD_OK;
}

static td_status make_batch(td_full_rig *rig, td_full_case *c, td_batch *batch, bool *fits, td_error *err)
{
    int n = c->prompt || c->n_rows < TD_FULL_SLOTS ? (c->prompt ? 1 : c->n_rows) : TD_FULL_SLOTS, first = 0;
    int64_t pos = position(c->context, (c->n_rows + n - 1) / n, c->prompt, room_of(rig));
    *batch = (td_batch){ .n_segments = n };
    *fits = pos >= 0;
    if (!*fits) return TD_OK;
    c->pos = (int32_t)pos;
    for (int i = 0; i < c->n_rows; i++)
        rig->ids[i] = (int32_t)(td_random_bits(SEED, (uint64_t)i) % (uint64_t)rig->config.vocab_size);
    for (int i = 0; i < n; i++) {
        int n_rows = c->n_rows / n + (i < c->n_rows % n);
        td_status status = place(rig, i, c->pos, n_rows, err);
        if (status) return status;
        batch->segments[i] = (td_batch_segment){ .slot = i,
                                                 .pos = c->pos,
                                                 .n_rows = n_rows,
                                                 .ids = rig->ids + first,
                                                 .chunked = c->prompt,
                                                 .logits_last = c->prompt,
                                                 .logits_all = !c->prompt };
        first += n_rows;
    }
    return TD_OK;
}

/* ---- runs ---- */

static td_status timed_forward(td_full_rig *rig, const td_batch *batch, double *seconds, td_error *err)
{
    int64_t start = td_now_ns();
    td_status status = td_model_forward(rig->model, batch, err);
    *seconds = (double)(td_now_ns() - start) * 1e-9;
    return status;
}

/* Numbers that are none would be fast, too. */
static td_status check_logits(const td_full_rig *rig, const td_full_case *c, td_error *err)
{
    int columns = td_model_vocab_shard(rig->model), n_rows = td_model_n_logits(rig->model);
    const float *logits = td_model_logits(rig->model, 0);
    if (!logits) return td_fail(err, TD_ENOMEM, "%d rows at %d: no memory for their logits", c->n_rows, c->pos);
    for (int r = 0; r < n_rows; r++)
        for (int i = 0; i < columns && i < rig->config.vocab_size; i++)
            if (!isfinite(logits[(size_t)r * (size_t)columns + (size_t)i]))
                return td_fail(err, TD_EFORMAT, "%d rows at %d: logit %d of row %d is not a number", c->n_rows, c->pos,
                               i, r);
    return TD_OK;
}

static td_status time_window(td_full_rig *rig, const td_batch *batch, int n_runs, td_full_case *c, td_error *err)
{
    double seconds[TD_BENCH_RUNS_MAX], warm;
    td_status status = TD_OK;
    for (int i = 0; i < WARM_RUNS && !status; i++) status = timed_forward(rig, batch, &warm, err);
    if (!status) status = check_logits(rig, c, err);
    for (int i = 0; i < n_runs && !status; i++) status = timed_forward(rig, batch, &seconds[i], err);
    if (!status) c->s = td_stat_of(seconds, n_runs);
    return status;
}

/* One forward with every call seen. A trace that wants nothing keeps the model from replaying a recording. */
static td_status seen_forward(td_full_rig *rig, const td_batch *batch, td_marks *marks, td_error *err)
{
    td_trace eager = { .user = rig };
    rig->timer.marks = marks;
    td_model_trace(rig->model, &eager);
    td_op_timer_start(&rig->timer);
    td_status status = td_model_forward(rig->model, batch, err);
    td_op_timer_stop(&rig->timer);
    td_model_trace(rig->model, NULL);
    rig->timer.marks = NULL;
    return status;
}

/* On a GPU counting stops the device at every layer of experts, so times are taken in a forward of their own. */
static td_status count_window(td_full_rig *rig, const td_batch *batch, td_full_case *c, td_error *err)
{
    rig->timer.n_entries = 0;
    td_status status = seen_forward(rig, batch, NULL, err);
    if (status) return status;
    c->n_ops = rig->timer.n_entries;
    memcpy(c->ops, rig->timer.entries, (size_t)c->n_ops * sizeof *c->ops);
    if (rig->backend != TD_CUDA) return TD_OK;
    status = seen_forward(rig, batch, rig->marks, err);
    for (int i = 0; i < c->n_ops && !status; i++) c->ops[i].s = rig->timer.entries[i].s;
    return status;
}

/* Which of two ceilings is nearer decides: bytes at their rates, or operations at theirs. */
static void compare(const td_full_rig *rig, td_full_case *c)
{
    const td_full_ceilings *top = &rig->ceilings;
    int n_expert_calls = 0, n_experts = 0;
    for (int i = 0; i < c->n_ops; i++) {
        const td_op_entry *e = &c->ops[i];
        c->bytes += e->cost.bytes;
        c->expert_bytes += e->expert_bytes;
        c->flops += e->cost.flops;
        if (strcmp(e->op, "gather") == 0)
            c->link_s += (double)e->n_calls * (double)rig->model_options.loopback_ns * 1e-9;
        if (strcmp(e->op, "experts") != 0) continue;
        n_expert_calls += e->n_calls;
        n_experts += e->n_experts;
    }
    double bytes_s = (c->bytes - c->expert_bytes) / top->copy_bytes_per_s + c->expert_bytes / top->expert_bytes_per_s;
    double flops_s = c->flops / top->multiply_flops_per_s;
    c->floor_s = bytes_s > flops_s ? bytes_s : flops_s;
    c->ratio = (c->s.median - c->link_s) / c->floor_s;
    c->experts_a_layer = n_expert_calls ? (double)n_experts / n_expert_calls : 0;
}

td_status td_full_case_run(td_full_rig *rig, const td_full_options *o, td_full_case *c, bool *fits, td_error *err)
{
    td_batch batch;
    td_status status = make_batch(rig, c, &batch, fits, err);
    if (status || !*fits) return status;
    status = time_window(rig, &batch, c->prompt ? o->prompt_runs : o->decode_runs, c, err);
    if (!status) status = count_window(rig, &batch, c, err);
    if (!status) compare(rig, c);
    return status;
}
