/* What happens next: rank 0 looks at requests, slots and the pool and writes one step. Rules (docs/engine.md):
 *
 *   - a request that ended or whose client left gives its slot back first;
 *   - requests are admitted in order, foreground before background, and nothing overtakes one that waits for room;
 *   - an admitted request holds blocks for its whole prompt; a reply takes blocks as it grows;
 *   - when foreground requests wait and no slot is free, the youngest background request goes back to its queue;
 *   - prompt chunks and decode rounds alternate while both have work; chunks alternate between the oldest prompt and
 * the one with the least left, foreground first, so that a short prompt is soon done and a long one never stands still;
 *   - a reply that cannot grow pauses; if all of them do and nothing fills, the youngest (of the background ones, if
 * any) is preempted: it goes back to the head of its queue and is decoded again later. Sampling is keyed by position,
 * so it samples the same tokens, and those that were delivered are not delivered twice. */
#include "engine/internal.h"

static void queue_pop(td_queue *queue)
{
    td_request *request = queue->head;
    queue->head = request->next;
    if (!queue->head) queue->tail = NULL;
    request->next = NULL;
}

static void queue_push_front(td_queue *queue, td_request *request)
{
    request->next = queue->head;
    queue->head = request;
    if (!queue->tail) queue->tail = request;
}

static td_queue *queue_of(td_engine *engine, const td_request *request)
{
    return request->options.background ? &engine->background : &engine->foreground;
}

/* Requests whose client left before they got a slot. */
static void drop_canceled(td_engine *engine, td_queue *queue)
{
    td_queue kept = { 0 };
    for (td_request *request = queue->head, *next; request; request = next) {
        next = request->next;
        request->next = NULL;
        if (atomic_load(&request->cancel)) {
            td_request_finish(request, TD_FINISH_CANCELED, NULL);
            td_request_drop(request);
            engine->n_waiting--;
            continue;
        }
        if (kept.tail)
            kept.tail->next = request;
        else
            kept.head = request;
        kept.tail = request;
    }
    *queue = kept;
}

/* Blocks that come free when the slot lets go: those it alone holds. */
static int exclusive_blocks(const td_engine *engine, const td_slot *slot)
{
    int n = 0;
    for (int i = 0; i < slot->n_blocks; i++) n += !td_kv_pool_shared(&engine->pool, slot->blocks[i]);
    return n;
}

static void release(td_engine *engine, int slot, int *n_free)
{
    engine->step.releases[engine->step.n_releases++] = slot;
    *n_free += exclusive_blocks(engine, &engine->slots[slot]);
}

static bool released(const td_step *step, int slot)
{
    for (int i = 0; i < step->n_releases; i++)
        if (step->releases[i] == slot) return true;
    return false;
}

/* Ended and abandoned requests. Their readers are told here, at the latest one iteration after the last token. */
static void plan_releases(td_engine *engine, int *n_free)
{
    for (int i = 0; i < engine->options.n_slots; i++) {
        td_slot *slot = &engine->slots[i];
        if (slot->state == TD_SLOT_FREE) continue;
        bool canceled = atomic_load(&slot->request->cancel);
        if (slot->finish == TD_FINISH_NONE && !canceled) continue;
        td_request_finish(slot->request, slot->finish != TD_FINISH_NONE ? slot->finish : TD_FINISH_CANCELED, NULL);
        td_request_drop(slot->request);
        slot->request = NULL;
        release(engine, i, n_free);
    }
}

static int free_slot(const td_engine *engine, uint32_t taken)
{
    for (int i = 0; i < engine->options.n_slots; i++) {
        bool is_free = engine->slots[i].state == TD_SLOT_FREE || released(&engine->step, i);
        if (is_free && !(taken >> i & 1)) return i;
    }
    return -1;
}

/* Back to the head of its queue; its slot and blocks are free for this step's admissions. */
static void preempt(td_engine *engine, int index, int *n_free)
{
    td_slot *slot = &engine->slots[index];
    queue_push_front(queue_of(engine, slot->request), slot->request);
    slot->request = NULL;
    engine->n_waiting++;
    pthread_mutex_lock(&engine->stats_mutex);
    engine->stats.preemptions_total++;
    pthread_mutex_unlock(&engine->stats_mutex);
    release(engine, index, n_free);
}

/* A waiting foreground request takes the place of the youngest background one when there is no other. */
static void yield_background(td_engine *engine, int *n_free)
{
    int youngest = -1;
    if (!engine->foreground.head || free_slot(engine, 0) >= 0) return;
    for (int i = 0; i < engine->options.n_slots; i++)
        if (engine->slots[i].request->options.background &&
            (youngest < 0 || engine->slots[i].order > engine->slots[youngest].order))
            youngest = i;
    if (youngest >= 0) preempt(engine, youngest, n_free);
}

static void fill_admit(td_step_admit *admit, int slot, const td_request *request)
{
    const td_request_options *o = &request->options;
    *admit = (td_step_admit){ .slot = slot,
                              .n_ids = o->n_ids,
                              .ids = o->ids,
                              .max_tokens = o->max_tokens,
                              .min_tokens = o->min_tokens,
                              .n_logprobs = o->n_logprobs,
                              .n_end_ids = o->n_end_ids,
                              .sample = o->sample };
    for (int i = 0; i < o->n_end_ids; i++) admit->end_ids[i] = o->end_ids[i];
}

static void plan_admissions(td_engine *engine, int *n_free)
{
    uint32_t taken = 0;
    int n_live = 0;
    size_t n_ids = 0; /* prompt ids in this step's message */
    for (int i = 0; i < engine->options.n_slots; i++)
        n_live += engine->slots[i].state != TD_SLOT_FREE && !released(&engine->step, i);
    for (;;) {
        td_queue *queue = engine->foreground.head ? &engine->foreground : &engine->background;
        td_request *request = queue->head;
        int slot = free_slot(engine, taken);
        if (!request || slot < 0) return;
        int need = td_engine_admit_blocks(engine, request->options.n_ids);
        if (n_live && *n_free < need + n_live) return; /* a block of growth for everyone who runs */
        if (*n_free < need) return;
        if (n_ids && td_step_bytes_max(n_ids + (size_t)request->options.n_ids) > engine->message_bytes) return;
        n_ids += (size_t)request->options.n_ids;
        queue_pop(queue);
        engine->n_waiting--;
        *n_free -= need;
        taken |= 1u << slot;
        n_live++;
        fill_admit(&engine->step.admits[engine->step.n_admits++], slot, request);
        engine->slots[slot].request = request;
        engine->slots[slot].order = engine->n_admitted++;
        td_request_admitted(request);
        engine->n_new += request->n_admissions == 1;
    }
}

/* The slot after this step's releases and admissions. */
static td_slot_state state_after(const td_engine *engine, int slot)
{
    for (int i = 0; i < engine->step.n_admits; i++)
        if (engine->step.admits[i].slot == slot) return TD_SLOT_FILLING;
    return released(&engine->step, slot) ? TD_SLOT_FREE : engine->slots[slot].state;
}

/* Prompt rows that the slot still has to run, after this step's admissions. */
static int32_t rows_left(const td_engine *engine, int slot)
{
    for (int i = 0; i < engine->step.n_admits; i++)
        if (engine->step.admits[i].slot == slot) return engine->step.admits[i].n_ids;
    return engine->slots[slot].n_prompt - engine->slots[slot].pos;
}

static bool fills_before(const td_engine *engine, int a, int b)
{
    const td_slot *x = &engine->slots[a], *y = &engine->slots[b];
    bool x_waits = x->request->options.background, y_waits = y->request->options.background;
    if (x_waits != y_waits) return y_waits;
    int32_t x_left = rows_left(engine, a), y_left = rows_left(engine, b);
    if (!engine->fill_oldest && x_left != y_left) return x_left < y_left;
    return x->order < y->order;
}

static bool plan_fill(td_engine *engine)
{
    int best = -1;
    for (int i = 0; i < engine->options.n_slots; i++)
        if (state_after(engine, i) == TD_SLOT_FILLING && (best < 0 || fills_before(engine, i, best))) best = i;
    if (best < 0) return false;
    int32_t left = rows_left(engine, best);
    int32_t rows = left < engine->options.chunk_rows ? left : engine->options.chunk_rows;
    engine->step.rows[engine->step.n_rows++] = (td_step_rows){ .slot = best, .n_rows = rows, .prompt = 1 };
    engine->fill_oldest = !engine->fill_oldest;
    return true;
}

static bool plan_round(td_engine *engine, int n_free, bool *all_paused)
{
    int n_decoding = 0;
    for (int i = 0; i < engine->options.n_slots; i++) {
        td_slot *slot = &engine->slots[i];
        if (state_after(engine, i) != TD_SLOT_DECODING) continue;
        n_decoding++;
        bool grows = td_kv_pool_blocks((int64_t)slot->pos + 1) > slot->n_blocks;
        slot->paused = grows && n_free == 0;
        if (slot->paused) continue;
        n_free -= grows;
        engine->step.rows[engine->step.n_rows++] = (td_step_rows){ .slot = i, .n_rows = 1 };
    }
    *all_paused = n_decoding > 0 && engine->step.n_rows == 0;
    return engine->step.n_rows > 0;
}

/* Background before foreground, then the youngest: the oldest reply always gets on. */
static bool yields_before(const td_slot *x, const td_slot *y)
{
    bool x_waits = x->request->options.background, y_waits = y->request->options.background;
    return x_waits != y_waits ? x_waits : x->order > y->order;
}

static void preempt_reply(td_engine *engine, int *n_free)
{
    int first = -1;
    for (int i = 0; i < engine->options.n_slots; i++)
        if (state_after(engine, i) == TD_SLOT_DECODING &&
            (first < 0 || yields_before(&engine->slots[i], &engine->slots[first])))
            first = i;
    preempt(engine, first, n_free);
}

bool td_engine_plan(td_engine *engine)
{
    td_step *step = &engine->step;
    step->stop = step->n_releases = step->n_admits = step->n_rows = 0;
    engine->n_new = engine->n_delivered = 0;
    step->digest = td_engine_digest(engine);

    pthread_mutex_lock(&engine->mutex);
    int n_free = engine->pool.n_free;
    bool all_paused = false;
    drop_canceled(engine, &engine->foreground);
    drop_canceled(engine, &engine->background);
    plan_releases(engine, &n_free);
    yield_background(engine, &n_free);
    plan_admissions(engine, &n_free);
    bool works = engine->fill_next ? plan_fill(engine) || plan_round(engine, n_free, &all_paused)
                                   : plan_round(engine, n_free, &all_paused) || plan_fill(engine);
    engine->fill_next = works && !step->rows[0].prompt;
    if (!works && all_paused) {
        preempt_reply(engine, &n_free);
        works = plan_round(engine, n_free, &all_paused);
    }
    pthread_mutex_unlock(&engine->mutex);
    return works || step->n_releases > 0;
}
