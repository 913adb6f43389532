/* The engine's thread, queue and interface; see engine.h. The thread of rank 0 plans, sends and applies one step after
 * the other and sleeps when there is nothing to do; other ranks apply what they receive. After any failure the engine
 * is broken: every running, waiting and later request ends with that error, and the process is expected to end. */
#include "engine/internal.h"

#include "base/clock.h"
#include "base/hash.h"
#include "base/log.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { IDLE_CHECK_MS = 100 /* an idle rank 0 looks at the link's health this often */ };

static int vocab_shard_of(const td_config *config)
{
    return (config->vocab_size + TD_SHARDS - 1) / TD_SHARDS;
}

/* Everything the engine holds, from its two arenas: run once counting, once taking. */
static void lay_out(td_engine *engine, int vocab_shard)
{
    td_arena *arena = &engine->arena;
    const td_engine_options *o = &engine->options;
    engine->slots = td_arena_take(arena, (size_t)o->n_slots * sizeof *engine->slots, 64);
    td_kv_pool_init(&engine->pool, o->n_blocks, arena);
    for (int i = 0; i < o->n_slots; i++) {
        int32_t *prompt = td_arena_take(arena, (size_t)o->context_tokens * sizeof *prompt, 64);
        int32_t *blocks = td_arena_take(arena, (size_t)engine->blocks_cap * sizeof *blocks, 64);
        if (!engine->slots) continue;
        engine->slots[i] = (td_slot){ .prompt = prompt, .blocks = blocks };
    }
    engine->message_bytes = td_step_bytes_max((size_t)o->n_slots * (size_t)o->context_tokens);
    if (engine->message_bytes > TD_LINK_STEP_MAX) engine->message_bytes = TD_LINK_STEP_MAX;
    engine->message = td_arena_take(arena, engine->message_bytes, 64);
    engine->sample_scratch =
        td_sample_scratch_take(arena, &engine->shared, engine->link, TD_STEP_SLOTS_MAX, vocab_shard, o->n_ids);
}

static void lay_out_counting(td_engine *engine, int vocab_shard)
{
    td_arena_init_fixed(&engine->arena, NULL, SIZE_MAX);
    td_arena_init_fixed(&engine->shared, NULL, SIZE_MAX);
    lay_out(engine, vocab_shard);
}

size_t td_engine_bytes(const td_config *config, const td_engine_options *options)
{
    td_engine engine = { .options = *options, .blocks_cap = td_kv_pool_blocks(options->context_tokens) };
    lay_out_counting(&engine, vocab_shard_of(config));
    return engine.arena.used_bytes + engine.shared.used_bytes;
}

static td_status take_memory(td_engine *engine, td_error *err)
{
    int vocab_shard = td_model_vocab_shard(engine->model);
    lay_out_counting(engine, vocab_shard);
    size_t n_bytes = (engine->arena.used_bytes + 63) / 64 * 64, shared_bytes = engine->shared.used_bytes;
    engine->arena_memory = aligned_alloc(64, n_bytes);
    if (!engine->arena_memory) return td_fail(err, TD_ENOMEM, "engine: %zu bytes for slots and queues", n_bytes);
    td_status status = td_dev_host_alloc(td_model_dev(engine->model), shared_bytes, &engine->shared_memory, err);
    if (status) return status;
    td_arena_init_fixed(&engine->arena, engine->arena_memory, n_bytes);
    td_arena_init_fixed(&engine->shared, engine->shared_memory, shared_bytes);
    lay_out(engine, vocab_shard);
    if (!engine->sample_scratch) return td_fail(err, TD_ENOMEM, "engine: the link's region is too small for sampling");
    return TD_OK;
}

static void give_memory_back(td_engine *engine)
{
    free(engine->arena_memory);
    if (engine->shared_memory)
        td_dev_host_free(td_model_dev(engine->model), engine->shared_memory, engine->shared.cap_bytes);
}

static void queue_push(td_queue *queue, td_request *request)
{
    if (queue->tail)
        queue->tail->next = request;
    else
        queue->head = request;
    queue->tail = request;
}

static void fail_queue(td_queue *queue, td_finish finish, const td_error *why)
{
    for (td_request *request = queue->head, *next; request; request = next) {
        next = request->next;
        td_request_finish(request, finish, why);
        td_request_drop(request);
    }
    *queue = (td_queue){ 0 };
}

/* Ends every request; the mutex keeps submit from adding one that nobody would see. */
static void fail_all(td_engine *engine, td_finish finish, const td_error *why)
{
    pthread_mutex_lock(&engine->mutex);
    if (why && engine->status == TD_OK) {
        engine->status = why->status;
        engine->error = *why;
    }
    engine->stop = true;
    fail_queue(&engine->foreground, finish, why);
    fail_queue(&engine->background, finish, why);
    engine->n_waiting = 0;
    for (int i = 0; i < engine->options.n_slots; i++) {
        td_request *request = engine->slots[i].request;
        if (!request) continue;
        td_finish own = engine->slots[i].finish;
        td_request_finish(request, own != TD_FINISH_NONE ? own : finish, why);
        td_request_drop(request);
        engine->slots[i].request = NULL;
    }
    pthread_mutex_unlock(&engine->mutex);
}

/* Counts what the step did; the only writer of the totals. A replay after a preemption counts in time and rounds, but
 * gives no request, prompt or token twice. */
static void count(td_engine *engine, const td_step *step, double seconds)
{
    td_engine_stats now = { .slots = engine->options.n_slots };
    for (int i = 0; i < engine->options.n_slots; i++) {
        const td_slot *slot = &engine->slots[i];
        now.running += slot->state != TD_SLOT_FREE;
        now.decoding += slot->state == TD_SLOT_DECODING;
        now.prefilling += slot->state == TD_SLOT_FILLING;
        now.paused += slot->paused;
    }
    pthread_mutex_lock(&engine->stats_mutex);
    td_engine_stats *s = &engine->stats;
    s->running = now.running;
    s->decoding = now.decoding;
    s->prefilling = now.prefilling;
    s->paused = now.paused;
    s->pool_free_tokens = (int64_t)engine->pool.n_free * TD_BLOCK;
    s->requests_total += engine->n_new;
    s->completion_tokens_total += engine->n_delivered;
    for (int i = 0; i < step->n_rows; i++) {
        const td_request *request = engine->slots[step->rows[i].slot].request;
        if (step->rows[i].prompt && request && request->n_admissions == 1)
            s->prompt_tokens_total += step->rows[i].n_rows;
    }
    if (step->n_rows && step->rows[0].prompt) s->prefill_s_total += seconds;
    if (step->n_rows && !step->rows[0].prompt) {
        s->decode_s_total += seconds;
        s->decode_forward_s_total += engine->forward_s;
        s->rounds_total++;
    }
    pthread_mutex_unlock(&engine->stats_mutex);
}

static td_status send(td_engine *engine, td_error *err)
{
    if (engine->options.world == 1) return TD_OK;
    size_t n = td_step_encode(&engine->step, engine->message, engine->message_bytes);
    return td_link_send_step(engine->link, engine->message, n, err);
}

/* Sleeps until a request, a stop or a lost link. True: stop. */
static bool wait_for_work(td_engine *engine, td_error *err)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += (long)IDLE_CHECK_MS * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    atomic_store(&engine->iteration_start_ns, 0);
    pthread_mutex_lock(&engine->mutex);
    if (!engine->stop && !engine->foreground.head && !engine->background.head)
        pthread_cond_timedwait(&engine->wake, &engine->mutex, &until);
    bool stop = engine->stop;
    pthread_mutex_unlock(&engine->mutex);
    return stop || td_link_lost_reason(engine->link, err) != TD_OK;
}

static bool stopping(td_engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    bool stop = engine->stop;
    pthread_mutex_unlock(&engine->mutex);
    return stop;
}

static void *run(void *arg)
{
    td_engine *engine = arg;
    td_error err = { .status = TD_OK };
    td_status status = td_dev_sync(td_model_dev(engine->model), &err); /* a GPU is also this thread's from here on */
    while (!status && !stopping(engine)) {
        if (!td_engine_plan(engine)) {
            if (wait_for_work(engine, &err)) break;
            continue;
        }
        int64_t start = td_now_ns();
        atomic_store(&engine->iteration_start_ns, start);
        if (send(engine, &err) || td_engine_apply(engine, &engine->step, &err)) break;
        count(engine, &engine->step, (double)(td_now_ns() - start) * 1e-9);
    }
    atomic_store(&engine->iteration_start_ns, 0);
    if (err.status == TD_ECANCELED) { /* the other rank was asked to stop: no failure of anyone */
        td_log(TD_LOG_INFO, "engine", "stopped: %s", err.text);
        fail_all(engine, TD_FINISH_CANCELED, &err);
    } else if (err.status) {
        td_log(TD_LOG_ERROR, "engine", "stopped: %s", err.text);
        td_link_announce_failure(engine->link, err.text);
        fail_all(engine, TD_FINISH_ERROR, &err);
    } else {
        engine->step = (td_step){ .stop = 1 };
        if (send(engine, &err)) td_log(TD_LOG_WARN, "engine", "the other rank did not hear of the stop: %s", err.text);
        fail_all(engine, TD_FINISH_CANCELED, NULL);
    }
    return NULL;
}

void td_engine_link_bytes(const td_config *config, size_t *region_bytes, size_t *gather_bytes)
{
    int vocab_shard = vocab_shard_of(config);
    *region_bytes = td_sample_region_bytes(TD_STEP_SLOTS_MAX, vocab_shard);
    *gather_bytes = td_sample_gather_bytes(vocab_shard);
}

td_status td_engine_create(td_model *model, td_link *link, const td_engine_options *options, td_engine **out,
                           td_error *err)
{
    if (options->n_slots < 1 || options->n_slots > TD_STEP_SLOTS_MAX)
        return td_fail(err, TD_EINVAL, "engine: %d requests at once; 1 to %d are possible", options->n_slots,
                       TD_STEP_SLOTS_MAX);
    td_engine *engine = calloc(1, sizeof *engine);
    if (!engine) return td_fail(err, TD_ENOMEM, "engine: out of memory");
    engine->options = *options;
    engine->model = model;
    engine->link = link;
    engine->blocks_cap = td_kv_pool_blocks(options->context_tokens);
    engine->stats.slots = options->n_slots;
    engine->stats.pool_tokens = engine->stats.pool_free_tokens = (int64_t)options->n_blocks * TD_BLOCK;
    td_status status = take_memory(engine, err);
    if (!status) status = td_model_prepare(model, options->n_slots, err);
    if (status) {
        give_memory_back(engine);
        free(engine);
        return status;
    }
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&engine->wake, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&engine->mutex, NULL);
    pthread_mutex_init(&engine->stats_mutex, NULL);
    if (options->rank == 0) {
        if (pthread_create(&engine->thread, NULL, run, engine)) {
            td_engine_destroy(engine);
            return td_fail(err, TD_ENOMEM, "engine: its thread cannot be started");
        }
        engine->thread_runs = true;
    }
    *out = engine;
    return TD_OK;
}

void td_engine_stop(td_engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    engine->stop = true;
    pthread_cond_signal(&engine->wake);
    pthread_mutex_unlock(&engine->mutex);
    if (engine->thread_runs) pthread_join(engine->thread, NULL);
    engine->thread_runs = false;
}

void td_engine_destroy(td_engine *engine)
{
    if (!engine) return;
    td_engine_stop(engine);
    pthread_cond_destroy(&engine->wake);
    pthread_mutex_destroy(&engine->mutex);
    pthread_mutex_destroy(&engine->stats_mutex);
    give_memory_back(engine);
    free(engine);
}

td_status td_engine_follow(td_engine *engine, td_error *err)
{
    td_step_limits limits = { .n_slots = engine->options.n_slots,
                              .vocab = td_model_config(engine->model)->vocab_size,
                              .context_tokens = engine->options.context_tokens,
                              .chunk_rows = engine->options.chunk_rows };
    for (;;) {
        size_t n_bytes;
        td_status status = td_link_recv_step(engine->link, engine->message, engine->message_bytes, &n_bytes, -1, err);
        if (status == TD_ECANCELED) return TD_OK;
        if (status) return status;
        if ((status = td_step_decode(engine->message, n_bytes, &limits, &engine->step, err))) return status;
        if (engine->step.stop) return TD_OK;
        if (engine->step.digest != td_engine_digest(engine))
            return td_fail(err, TD_EPEER, "step: the ranks' slots or KV pools differ (rank 0 %016llx, here %016llx)",
                           (unsigned long long)engine->step.digest, (unsigned long long)td_engine_digest(engine));
        if ((status = td_engine_apply(engine, &engine->step, err))) return status;
        count(engine, &engine->step, 0.0);
    }
}

td_status td_engine_health(const td_engine *engine, td_error *err)
{
    pthread_mutex_t *mutex = (pthread_mutex_t *)&engine->mutex;
    pthread_mutex_lock(mutex);
    td_status status = engine->status;
    if (status && err) *err = engine->error;
    pthread_mutex_unlock(mutex);
    return status;
}

static td_status check_sampling(const td_sample_params *p, td_error *err)
{
    if (!isfinite(p->temperature)) return td_fail(err, TD_EINVAL, "temperature is not a number");
    if (!(p->top_p > 0 && p->top_p <= 1)) return td_fail(err, TD_EINVAL, "top_p is %g; above 0, at most 1", p->top_p);
    if (!(p->min_p >= 0 && p->min_p <= 1)) return td_fail(err, TD_EINVAL, "min_p is %g; 0 to 1 are possible", p->min_p);
    return TD_OK;
}

static td_status check_request(const td_engine *engine, const td_request_options *o, int32_t limit, td_error *err)
{
    if (o->n_ids < 1 || o->n_ids >= limit)
        return td_fail(err, TD_EINVAL, "a prompt of %d tokens; 1 to %d are possible", o->n_ids, limit - 1);
    if (o->max_tokens < 1) return td_fail(err, TD_EINVAL, "max_tokens is %d; at least 1 is possible", o->max_tokens);
    if (o->n_end_ids < 0 || o->n_end_ids > TD_STOP_IDS_MAX)
        return td_fail(err, TD_EINVAL, "%d end ids; at most %d are possible", o->n_end_ids, TD_STOP_IDS_MAX);
    if (o->n_logprobs < -1 || o->n_logprobs > TD_TOP_LOGPROBS_MAX)
        return td_fail(err, TD_EINVAL, "%d log-probabilities; at most %d are possible", o->n_logprobs,
                       TD_TOP_LOGPROBS_MAX);
    for (int i = 0; i < o->n_ids; i++)
        if (o->ids[i] < 0 || o->ids[i] >= engine->options.n_ids)
            return td_fail(err, TD_EINVAL, "token id %d at %d; 0 to %d exist", o->ids[i], i, engine->options.n_ids - 1);
    return check_sampling(&o->sample, err);
}

td_status td_engine_submit(td_engine *engine, const td_request_options *options, td_request **out, td_error *err)
{
    int64_t pool_tokens = (int64_t)engine->options.n_blocks * TD_BLOCK;
    int32_t limit =
        pool_tokens < engine->options.context_tokens ? (int32_t)pool_tokens : engine->options.context_tokens;
    td_status status = check_request(engine, options, limit, err);
    if (status) return status;
    td_request_options cut = *options;
    if (cut.max_tokens > limit - cut.n_ids) cut.max_tokens = limit - cut.n_ids;
    if (cut.seed_from_prompt)
        cut.sample.seed = td_sample_seed_from_prompt(engine->options.seed_salt, options->ids, (size_t)options->n_ids);
    td_request *request = td_request_create(engine, &cut);
    if (!request) return td_fail(err, TD_ENOMEM, "out of memory for a reply of %d tokens", cut.max_tokens);

    pthread_mutex_lock(&engine->mutex);
    int n_running = 0;
    for (int i = 0; i < engine->options.n_slots; i++) n_running += engine->slots[i].request != NULL;
    if (engine->stop)
        status = engine->status ? td_fail(err, engine->status, "%s", engine->error.text)
                                : td_fail(err, TD_ECANCELED, "the server is stopping");
    else if (engine->n_waiting + n_running >= engine->options.n_slots + engine->options.queue_cap)
        status = td_fail(err, TD_EFULL, "%d requests run and %d wait", n_running, engine->n_waiting);
    if (status == TD_OK) {
        queue_push(cut.background ? &engine->background : &engine->foreground, request);
        engine->n_waiting++;
        pthread_cond_signal(&engine->wake);
    }
    pthread_mutex_unlock(&engine->mutex);
    if (status) {
        td_request_drop(request);
        td_request_drop(request);
        return status;
    }
    *out = request;
    return TD_OK;
}

void td_request_cancel(td_request *request)
{
    atomic_store(&request->cancel, true);
    td_engine *engine = request->engine;
    pthread_mutex_lock(&request->mutex);
    bool running = request->finish == TD_FINISH_NONE;
    pthread_mutex_unlock(&request->mutex);
    if (!running) return;
    pthread_mutex_lock(&engine->mutex);
    pthread_cond_signal(&engine->wake);
    pthread_mutex_unlock(&engine->mutex);
}

void td_request_release(td_request *request)
{
    if (!request) return;
    td_request_cancel(request);
    td_request_drop(request);
}

void td_engine_stats_get(const td_engine *engine, td_engine_stats *out)
{
    pthread_mutex_t *mutex = (pthread_mutex_t *)&engine->stats_mutex;
    pthread_mutex_lock(mutex);
    *out = engine->stats;
    pthread_mutex_unlock(mutex);
    mutex = (pthread_mutex_t *)&engine->mutex;
    pthread_mutex_lock(mutex);
    out->waiting = engine->n_waiting;
    pthread_mutex_unlock(mutex);
    int64_t start = atomic_load(&((td_engine *)engine)->iteration_start_ns);
    out->iteration_s = start ? (double)(td_now_ns() - start) * 1e-9 : 0.0;
}
