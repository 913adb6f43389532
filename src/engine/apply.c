/* Applying a step: the same code on every rank, from the same message, on the same state. What it computes (blocks,
 * ids, positions) is therefore equal everywhere and never exchanged; the digest in the next message proves it. */
#include "engine/internal.h"

#include "base/clock.h"
#include "base/hash.h"

#include <string.h>

uint64_t td_engine_digest(const td_engine *engine)
{
    uint64_t hash = TD_FNV1A_START;
    for (int i = 0; i < engine->options.n_slots; i++) {
        const td_slot *slot = &engine->slots[i];
        const int32_t words[] = { (int32_t)slot->state, slot->pos, slot->pending, slot->n_sampled, slot->n_blocks };
        hash = td_fnv1a(hash, words, sizeof words);
        if (slot->n_blocks) hash = td_fnv1a(hash, &slot->blocks[slot->n_blocks - 1], sizeof *slot->blocks);
    }
    return td_fnv1a(hash, &engine->pool.n_free, sizeof engine->pool.n_free);
}

static void release_slot(td_engine *engine, td_slot *slot)
{
    for (int i = slot->n_blocks - 1; i >= 0; i--) td_kv_pool_release(&engine->pool, slot->blocks[i]);
    slot->n_blocks = 0;
    slot->state = TD_SLOT_FREE;
    slot->pos = slot->pending = slot->n_sampled = slot->n_prompt = 0;
    slot->finish = TD_FINISH_NONE;
    slot->paused = false;
}

/* need blocks in all. The scheduler has counted them: a lack here is a rank out of step. */
static td_status grow(td_engine *engine, int index, int need, td_error *err)
{
    td_slot *slot = &engine->slots[index];
    if (need <= slot->n_blocks) return TD_OK;
    if (need > engine->blocks_cap ||
        td_kv_pool_reserve(&engine->pool, need - slot->n_blocks, slot->blocks + slot->n_blocks))
        return td_fail(err, TD_EPEER, "step: slot %d wants %d KV blocks of %d free: the ranks disagree about the pool",
                       index, need - slot->n_blocks, engine->pool.n_free);
    slot->n_blocks = need;
    td_model_slot_blocks(engine->model, index, slot->blocks, slot->n_blocks);
    return TD_OK;
}

int td_engine_admit_blocks(const td_engine *engine, int32_t n_prompt)
{
    enum { REPLY_ROWS = 16 /* a reply writes these before it takes its first block of its own */ };
    int need = td_kv_pool_blocks((int64_t)n_prompt + REPLY_ROWS);
    if (need > engine->blocks_cap) need = engine->blocks_cap;
    return need < engine->pool.n_blocks ? need : engine->pool.n_blocks;
}

static td_status admit(td_engine *engine, const td_step_admit *a, td_error *err)
{
    td_slot *slot = &engine->slots[a->slot];
    if (slot->state != TD_SLOT_FREE) return td_fail(err, TD_EPEER, "step: slot %d is taken already", a->slot);
    memcpy(slot->prompt, a->ids, (size_t)a->n_ids * sizeof *slot->prompt);
    slot->state = TD_SLOT_FILLING;
    slot->n_prompt = a->n_ids;
    slot->max_tokens = a->max_tokens;
    slot->min_tokens = a->min_tokens;
    slot->n_logprobs = a->n_logprobs;
    slot->n_end_ids = a->n_end_ids;
    memcpy(slot->end_ids, a->end_ids, sizeof slot->end_ids);
    slot->sample = a->sample;
    td_model_slot_reset(engine->model, a->slot);
    return grow(engine, a->slot, td_engine_admit_blocks(engine, a->n_ids), err);
}

static td_status build_batch(td_engine *engine, const td_step *step, td_batch *batch, td_error *err)
{
    batch->n_segments = step->n_rows;
    for (int i = 0; i < step->n_rows; i++) {
        const td_step_rows *rows = &step->rows[i];
        td_slot *slot = &engine->slots[rows->slot];
        bool fits = rows->prompt ? slot->state == TD_SLOT_FILLING && rows->n_rows <= slot->n_prompt - slot->pos
                                 : slot->state == TD_SLOT_DECODING && rows->n_rows == 1;
        if (!fits) return td_fail(err, TD_EPEER, "step: slot %d is not where the step expects it", rows->slot);
        td_status status = grow(engine, rows->slot, td_kv_pool_blocks((int64_t)slot->pos + rows->n_rows), err);
        if (status) return status;
        batch->segments[i] =
            (td_batch_segment){ .slot = rows->slot,
                                .pos = slot->pos,
                                .n_rows = rows->n_rows,
                                .ids = rows->prompt ? slot->prompt + slot->pos : &slot->pending,
                                .chunked = rows->prompt,
                                .logits_last = !rows->prompt || slot->pos + rows->n_rows == slot->n_prompt };
    }
    return TD_OK;
}

static bool ends(const td_slot *slot, int32_t id)
{
    for (int i = 0; i < slot->n_end_ids; i++)
        if (slot->end_ids[i] == id) return true;
    return false;
}

/* A sampled token: it becomes the pending one, the reader gets it, and it may end the reply. */
static void take_token(td_engine *engine, td_slot *slot, const td_token *token)
{
    slot->pending = token->id;
    slot->n_sampled++;
    if (ends(slot, token->id))
        slot->finish = TD_FINISH_END;
    else if (slot->n_sampled >= slot->max_tokens)
        slot->finish = TD_FINISH_LENGTH;
    if (!slot->request) return;
    if (slot->state == TD_SLOT_FILLING)
        td_request_prefilled(slot->request, 0);
    else
        td_request_round(slot->request);
    engine->n_delivered += td_request_deliver(slot->request, token);
}

/* The rows whose logits the forward left, sampled together. A numerical error ends its request, not the engine. */
static td_status sample(td_engine *engine, const td_step *step, const td_batch *batch, td_error *err)
{
    td_sample_row rows[TD_STEP_SLOTS_MAX];
    td_token tokens[TD_STEP_SLOTS_MAX];
    td_status row_status[TD_STEP_SLOTS_MAX];
    int slots[TD_STEP_SLOTS_MAX], n = 0;
    for (int i = 0; i < step->n_rows; i++) {
        if (!batch->segments[i].logits_last) continue;
        const td_slot *slot = &engine->slots[step->rows[i].slot];
        bool no_end = slot->n_sampled < slot->min_tokens;
        slots[n] = step->rows[i].slot;
        rows[n++] = (td_sample_row){ .params = slot->sample,
                                     .pos = (uint64_t)(slot->n_prompt + slot->n_sampled),
                                     .n_logprobs = slot->n_logprobs,
                                     .banned = slot->end_ids,
                                     .n_banned = no_end ? slot->n_end_ids : 0 };
    }
    if (n == 0) return TD_OK;
    td_status status =
        td_sample_rows(engine->sample_scratch, engine->model, engine->link, rows, n, tokens, row_status, err);
    if (status) return status;
    for (int i = 0; i < n; i++) {
        td_slot *slot = &engine->slots[slots[i]];
        if (row_status[i]) {
            slot->finish = TD_FINISH_ERROR;
            td_error why;
            td_fail(&why, row_status[i], "numerical error: the model's output is not a number");
            if (slot->request) td_request_finish(slot->request, TD_FINISH_ERROR, &why);
        } else {
            take_token(engine, slot, &tokens[i]);
        }
        slot->state = TD_SLOT_DECODING;
    }
    return TD_OK;
}

static td_status apply(td_engine *engine, const td_step *step, td_error *err)
{
    td_status status;
    td_batch batch;
    int keep[TD_STEP_SLOTS_MAX];
    for (int i = 0; i < step->n_releases; i++) release_slot(engine, &engine->slots[step->releases[i]]);
    for (int i = 0; i < step->n_admits; i++)
        if ((status = admit(engine, &step->admits[i], err))) return status;
    if (step->n_rows == 0) return TD_OK;
    if ((status = build_batch(engine, step, &batch, err))) return status;
    int64_t start = td_now_ns();
    if ((status = td_model_forward(engine->model, &batch, err))) return status;
    engine->forward_s = (double)(td_now_ns() - start) * 1e-9;
    for (int i = 0; i < step->n_rows; i++) keep[i] = step->rows[i].n_rows;
    if ((status = td_model_commit(engine->model, keep, err))) return status;
    for (int i = 0; i < step->n_rows; i++) engine->slots[step->rows[i].slot].pos += step->rows[i].n_rows;
    return sample(engine, step, &batch, err);
}

/* Whoever noticed that the device failed knows what it was doing; the device knows what happened, and what to look for.
 */
td_status td_engine_apply(td_engine *engine, const td_step *step, td_error *err)
{
    td_status status = apply(engine, step, err);
    if (status == TD_ECUDA) (void)td_dev_sync(td_model_dev(engine->model), err);
    return status;
}
