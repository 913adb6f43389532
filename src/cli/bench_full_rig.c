/* The model of `tandem bench full`: memory planned before anything is taken, values in the device's memory, the weights
 * packed from them as from a checkpoint, a pool of cached rows; and the ceilings of the same device, measured while
 * there is still room for their buffers. */
#include "cli/bench_full.h"

#include "base/clock.h"
#include "checkpoint/shapes.h"
#include "model/random.h"
#include "ops/gpu.h"
#include "ops/random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    LEAST_TOKENS = 1 << 20, /* of a pool for the real shape: what the product must hold */
    VALUES_TIMES = 2,       /* pools of values hold so much more than the largest part, for places to differ */
    WORDS_TIMES = 16,
    SCALES_MORE = 1 << 16,
    MARKS = 2 * TD_OP_CALLS_MAX,
    COPY_ROUNDS = 4,
    MULTIPLY_CALLS = 8,
    SEED = 0x7a6e
};
#define WEIGHTS_DEVIATION 0.02f
#define OUT_SCALE         0.016f /* codebook values have deviation 1.24 */
#define RESERVE_BYTES     ((size_t)1 << 30)
#define COPY_BYTES        ((size_t)1 << 30)
#define HOPPER_EXPERTS    2.0e12 /* bytes a second: decoding EXL3 is limited by instructions there */
#define HOPPER            90

/* ---- the device that is meant ---- */

static size_t machine_bytes(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    return pages > 0 && page > 0 ? (size_t)pages * (size_t)page : SIZE_MAX;
}

static td_status choose_backend(const td_full_options *o, td_full_rig *rig, td_error *err)
{
    td_gpu gpu;
    td_error why;
    rig->backend = TD_CPU;
    rig->free_bytes = machine_bytes();
    td_machine_line(rig->device, sizeof rig->device);
    if (strcmp(o->backend, "cpu") == 0) return TD_OK;
    td_status status = td_gpu_query(o->gpu, &gpu, &why);
    if (status && strcmp(o->backend, "cuda") == 0) return td_fail(err, status, "--backend cuda: %s", why.text);
    if (status) {
        fprintf(stderr, "%s: measuring the CPU\n", why.text);
        return TD_OK;
    }
    rig->backend = TD_CUDA;
    rig->capability = gpu.capability;
    rig->free_bytes = gpu.free_bytes;
    snprintf(rig->device, sizeof rig->device, "%s, %d multiprocessors, sm_%d", gpu.name, gpu.n_sm, gpu.capability);
    return TD_OK;
}

/* ---- the plan ---- */

static int64_t most_of(const int64_t *x, int n)
{
    int64_t most = 0;
    for (int i = 0; i < n; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* Tokens that one sequence of the longest measurement has at its end. */
static int64_t longest_sequence(const td_full_options *o, const td_config *c)
{
    int64_t decode = most_of(o->contexts, o->n_contexts) + TD_WINDOW_MAX;
    int64_t prompt = o->n_prompts ? most_of(o->prompts, o->n_prompts) + o->chunk_rows : 0;
    int64_t longest = decode > prompt ? decode : prompt;
    return longest < c->max_positions ? longest : c->max_positions;
}

static int blocks_of(int64_t n_tokens)
{
    return (int)((n_tokens + TD_BLOCK - 1) / TD_BLOCK);
}

static void choose_model_options(const td_full_options *o, td_full_rig *rig)
{
    int64_t longest = longest_sequence(o, &rig->config), tokens = o->pool_tokens;
    if (!tokens) tokens = TD_FULL_SLOTS * (int64_t)blocks_of(longest) * TD_BLOCK;
    rig->model_options = (td_model_options){ .world = o->world,
                                             .n_slots = TD_FULL_SLOTS,
                                             .n_blocks = blocks_of(tokens),
                                             .chunk_rows = o->chunk_rows,
                                             .context_tokens = longest,
                                             .kv = TD_KV_FP8,
                                             .dense = o->dense,
                                             .head = o->dense == TD_W_BF16 ? TD_W_BF16 : TD_W_FP8,
                                             .loopback = o->world > 1,
                                             .loopback_ns = o->exchange_ns };
}

static void values_of(const td_config *c, td_values *v)
{
    td_values_least(c, TD_FULL_EXPERT_BITS, v);
    v->n_weights *= VALUES_TIMES;
    v->n_words *= WORDS_TIMES;
    v->n_scales += SCALES_MORE;
}

static size_t values_bytes(const td_values *v)
{
    return 2 * (v->n_weights + v->n_words + 2 * v->n_scales);
}

/* Everything that the rig takes of the device, at its largest: while the weights are made. */
static td_status plan_bytes(td_full_rig *rig, const td_config *config, td_model_plan *plan, size_t *n_bytes,
                            td_error *err)
{
    td_checkpoint *shapes = NULL;
    td_ops ops;
    td_dev_limits limits;
    td_values values;
    td_dev *dev = td_dev_create_sizes(rig->backend, false);
    if (!dev) return td_fail(err, TD_ENOMEM, "no memory for a plan");
    td_ops_init(&ops, dev);
    td_status status = td_checkpoint_create_shapes(config, TD_FULL_EXPERT_BITS, NULL, &shapes, err);
    if (!status) status = td_model_plan_bytes(dev, &ops, shapes, &rig->model_options, plan, err);
    td_checkpoint_close(shapes);
    td_dev_destroy(dev);
    if (status) return status;
    td_model_dev_limits(config, &rig->model_options, &limits);
    rig->device_bytes =
        rig->backend == TD_CUDA ? td_dev_cuda_scratch_bytes(&limits) : td_dev_scratch_bytes(&limits, false, 0);
    values_of(config, &values);
    size_t here = plan->total_bytes;
    if (rig->backend == TD_CUDA) here -= plan->shared_bytes; /* that part is the host's memory */
    *n_bytes = here + rig->device_bytes + values_bytes(&values);
    return TD_OK;
}

static double gib(size_t n_bytes)
{
    return (double)n_bytes * 0x1p-30;
}

/* Blocks that fit beside everything else; 0: none. */
static int blocks_that_fit(const td_full_rig *rig, const td_model_plan *plan, size_t n_bytes, size_t available)
{
    size_t rest = n_bytes - plan->kv_bytes, block = plan->kv_bytes_per_token * TD_BLOCK;
    if (!block) return available >= rest ? rig->model_options.n_blocks : 0;
    size_t n = available > rest ? (available - rest) / block : 0;
    return n > (size_t)rig->model_options.n_blocks ? rig->model_options.n_blocks : (int)n;
}

/* The most layers whose model fits with the pool as it is; 0: not even one. */
static int layers_that_fit(td_full_rig *rig, td_full_shape shape, size_t available)
{
    int low = 0, high = rig->config.n_layers - 1;
    while (low < high) {
        td_config config;
        td_model_plan plan;
        size_t n_bytes;
        td_error ignored;
        int middle = low + (high - low + 1) / 2;
        td_status status = td_full_config(shape, middle, &config, &ignored);
        if (!status) status = plan_bytes(rig, &config, &plan, &n_bytes, &ignored);
        if (!status && n_bytes <= available)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static td_status refuse(td_full_rig *rig, const td_full_options *o, size_t n_bytes, size_t available, int n_blocks,
                        int least_blocks, td_error *err)
{
    const td_model_plan *p = &rig->plan;
    char pool[128] = "", layers[48] = "nothing smaller";
    int n_layers = layers_that_fit(rig, o->shape, available);
    if (n_blocks > 0)
        snprintf(pool, sizeof pool, "--pool-tokens %lld%s or ", (long long)n_blocks * TD_BLOCK,
                 n_blocks < least_blocks ? " (too few for the longest context)" : "");
    if (n_layers) snprintf(layers, sizeof layers, "--layers %d", n_layers);
    size_t weights = p->total_bytes - p->kv_bytes - p->state_bytes - p->scratch_bytes;
    return td_fail(err, TD_ENOMEM,
                   "%.2f GiB are needed (weights %.2f, a KV pool of %lld tokens %.2f, states and activations %.2f), "
                   "%.2f can be used on this %s; %s%s would fit",
                   gib(n_bytes), gib(weights), (long long)rig->model_options.n_blocks * TD_BLOCK, gib(p->kv_bytes),
                   gib(p->state_bytes + p->scratch_bytes + rig->device_bytes), gib(available),
                   rig->backend == TD_CUDA ? "GPU" : "machine", pool, layers);
}

/* A pool nobody asked for shrinks to what fits, as long as one sequence of the longest context (and what the product
 * must hold) stays possible: sequences then share blocks, which changes no time but that of caches. */
static td_status plan_memory(td_full_rig *rig, const td_full_options *o, td_error *err)
{
    size_t n_bytes, available = rig->free_bytes > RESERVE_BYTES ? rig->free_bytes - RESERVE_BYTES : 0;
    td_status status = plan_bytes(rig, &rig->config, &rig->plan, &n_bytes, err);
    if (status || n_bytes <= available) return status;
    int n_blocks = blocks_that_fit(rig, &rig->plan, n_bytes, available);
    int64_t least = rig->model_options.context_tokens;
    if (o->shape == TD_SHAPE_REAL && least < LEAST_TOKENS) least = LEAST_TOKENS;
    if (o->pool_tokens || n_blocks < blocks_of(least))
        return refuse(rig, o, n_bytes, available, n_blocks, blocks_of(least), err);
    rig->model_options.n_blocks = n_blocks;
    return plan_bytes(rig, &rig->config, &rig->plan, &n_bytes, err);
}

/* ---- ceilings ---- */

static td_status best_copy(td_full_rig *rig, void *to, void *from, size_t n_bytes, td_error *err)
{
    for (int round = 0; round < COPY_ROUNDS; round++) {
        td_marks_clear(rig->marks);
        td_status status = td_dev_copy(rig->dev, to, from, n_bytes); /* so that the clock is up */
        int start = td_mark(rig->marks);
        for (int i = 0; i < 4 && !status; i++) status = td_dev_copy(rig->dev, to, from, n_bytes);
        int end = td_mark(rig->marks);
        if (!status) status = td_dev_sync(rig->dev, err);
        if (status) return status;
        double rate = 4 * 2.0 * (double)n_bytes / td_marks_seconds(rig->marks, start, end);
        if (rate > rig->ceilings.copy_bytes_per_s) rig->ceilings.copy_bytes_per_s = rate;
    }
    return TD_OK;
}

static td_status best_multiply(td_full_rig *rig, td_error *err)
{
    for (int round = 0; round < COPY_ROUNDS; round++) {
        double flops = 0, sum = 0;
        td_marks_clear(rig->marks);
        td_status status = td_dev_multiply(rig->dev, &flops);
        int start = td_mark(rig->marks);
        for (int i = 0; i < MULTIPLY_CALLS && !status; i++) {
            status = td_dev_multiply(rig->dev, &flops);
            sum += flops;
        }
        int end = td_mark(rig->marks);
        if (!status) status = td_dev_sync(rig->dev, err);
        if (status) return status;
        double rate = sum / td_marks_seconds(rig->marks, start, end);
        if (rate > rig->ceilings.multiply_flops_per_s) rig->ceilings.multiply_flops_per_s = rate;
    }
    return TD_OK;
}

static td_status gpu_ceilings(td_full_rig *rig, td_error *err)
{
    void *to = NULL, *from = NULL;
    size_t n_bytes = rig->free_bytes / 16 < COPY_BYTES ? rig->free_bytes / 16 / 4096 * 4096 : COPY_BYTES;
    td_status status = td_dev_alloc(rig->dev, n_bytes, &to, err);
    if (!status) status = td_dev_alloc(rig->dev, n_bytes, &from, err);
    if (!status) status = td_dev_fill(rig->dev, from, 0x11, n_bytes);
    if (!status) status = best_copy(rig, to, from, n_bytes, err);
    if (!status) status = best_multiply(rig, err);
    td_dev_free(rig->dev, to, n_bytes);
    td_dev_free(rig->dev, from, n_bytes);
    return status;
}

static td_status measure_ceilings(td_full_rig *rig, const td_full_options *o, td_error *err)
{
    td_ceilings cpu;
    td_full_ceilings *c = &rig->ceilings;
    td_status status = rig->backend == TD_CUDA ? gpu_ceilings(rig, err) : td_ceilings_measure(o->n_threads, &cpu, err);
    if (status) return status;
    if (rig->backend == TD_CPU) {
        c->copy_bytes_per_s = cpu.copy_bytes_per_s;
        c->multiply_flops_per_s = cpu.fma_flops_per_s;
    }
    double experts = o->expert_bytes_per_s;
    if (experts < 0) experts = rig->capability == HOPPER ? HOPPER_EXPERTS : 0;
    c->expert_bytes_per_s = experts > 0 ? experts : c->copy_bytes_per_s;
    return TD_OK;
}

/* ---- values and weights ---- */

static td_status make_values(td_full_rig *rig, td_values *v, void **memory, td_error *err)
{
    unsigned char *at;
    values_of(&rig->config, v);
    td_status status = td_dev_alloc(rig->dev, values_bytes(v), memory, err);
    if (status) return td_error_prefix(err, "values for the weights");
    at = (unsigned char *)*memory;
    td_random_args fills[] = {
        { .kind = TD_RANDOM_BF16, .scale = WEIGHTS_DEVIATION, .n = v->n_weights },
        { .kind = TD_RANDOM_BITS, .n = v->n_words },
        { .kind = TD_RANDOM_SIGNS, .scale = 1, .n = v->n_scales },
        { .kind = TD_RANDOM_SIGNS, .scale = OUT_SCALE, .n = v->n_scales },
    };
    for (int i = 0; i < 4 && !status; i++) {
        fills[i].seed = SEED + (uint64_t)i;
        fills[i].out = at;
        at += 2 * fills[i].n;
        status = td_random_fill(rig->dev, &fills[i]);
    }
    v->weights = (const td_bf16 *)fills[0].out;
    v->words = (const uint16_t *)fills[1].out;
    v->in_scales = (const td_f16 *)fills[2].out;
    v->out_scales = (const td_f16 *)fills[3].out;
    return status ? td_fail(err, status, "values for the weights: %s", td_status_text(status)) : TD_OK;
}

typedef struct display {
    int64_t start_ns;
    bool tty;
    int percent; /* shown */
} display;

static bool show_progress(void *user, uint64_t done, uint64_t total)
{
    enum { WIDTH = 30 };
    display *d = (display *)user;
    int percent = (int)(100.0 * (double)done / (double)total), filled = percent * WIDTH / 100;
    if (!d->tty || percent == d->percent) return true;
    d->percent = percent;
    double spent_s = (double)(td_now_ns() - d->start_ns) * 1e-9;
    fprintf(stderr, "\r[%.*s%.*s] %3d %%  weights, %.1f of %.1f GB at %.1f GB/s   ", filled,
            "##############################", WIDTH - filled, "..............................", percent,
            (double)done * 1e-9, (double)total * 1e-9, (double)done * 1e-9 / spent_s);
    return true;
}

static td_status load(td_full_rig *rig, td_error *err)
{
    td_values values;
    void *memory = NULL;
    display d = { .start_ns = td_now_ns(), .tty = isatty(STDERR_FILENO), .percent = -1 };
    td_status status = make_values(rig, &values, &memory, err);
    if (!status)
        status = td_checkpoint_create_shapes(&rig->config, TD_FULL_EXPERT_BITS, &values, &rig->checkpoint, err);
    if (!status)
        status = td_model_create(rig->dev, &rig->ops, rig->link, rig->checkpoint, &rig->model_options, show_progress,
                                 &d, &rig->model, err);
    if (!status) status = td_dev_sync(rig->dev, err);
    if (memory) td_dev_free(rig->dev, memory, values_bytes(&values));
    if (d.tty) fputc('\n', stderr);
    if (status) return status;
    rig->load_s = (double)(td_now_ns() - d.start_ns) * 1e-9;
    rig->load_bytes =
        (uint64_t)(rig->plan.total_bytes - rig->plan.kv_bytes - rig->plan.state_bytes - rig->plan.scratch_bytes);
    status = td_model_random_pool(rig->model, SEED);
    return status ? td_fail(err, status, "the KV pool cannot be filled: %s", td_status_text(status)) : TD_OK;
}

/* ---- life ---- */

static td_status open_link(td_full_rig *rig, td_error *err)
{
    td_link_options o;
    td_link_options_init(&o);
    if (o.gather_max_bytes < rig->plan.link_gather_bytes) o.gather_max_bytes = rig->plan.link_gather_bytes;
    o.region_bytes += rig->plan.link_region_bytes;
    return td_link_open(&o, &rig->link, err);
}

static td_status open_device(td_full_rig *rig, const td_full_options *o, td_error *err)
{
    td_dev_limits limits;
    td_model_dev_limits(&rig->config, &rig->model_options, &limits);
    td_status status = rig->backend == TD_CUDA ? td_dev_create_cuda(&limits, o->gpu, &rig->dev, err)
                                               : td_dev_create_cpu(&limits, o->n_threads, false, &rig->dev, err);
    if (status) return status;
    td_ops_init(&rig->ops, rig->dev);
    td_op_timer_install(&rig->timer, &rig->ops);
    return td_marks_create(rig->dev, MARKS, &rig->marks, err);
}

td_status td_full_rig_open(const td_full_options *o, td_full_rig *rig, td_error *err)
{
    memset(rig, 0, sizeof *rig);
    td_status status = td_full_config(o->shape, o->layers, &rig->config, err);
    if (!status) status = choose_backend(o, rig, err);
    if (!status) {
        choose_model_options(o, rig);
        status = plan_memory(rig, o, err);
    }
    if (!status) status = open_device(rig, o, err);
    if (!status) status = measure_ceilings(rig, o, err);
    if (!status) status = open_link(rig, err);
    if (!status) status = load(rig, err);
    if (!status) {
        size_t rows = (size_t)o->chunk_rows + TD_WINDOW_MAX;
        rig->ids = (int32_t *)malloc(rows * sizeof *rig->ids);
        rig->blocks = (int32_t *)malloc((size_t)blocks_of(rig->model_options.context_tokens) * sizeof *rig->blocks);
        if (!rig->ids || !rig->blocks) status = td_fail(err, TD_ENOMEM, "out of memory");
    }
    if (status) td_full_rig_close(rig);
    return status;
}

void td_full_rig_close(td_full_rig *rig)
{
    td_model_destroy(rig->model);
    if (rig->link) td_link_close(rig->link);
    td_marks_destroy(rig->marks);
    td_op_timer_deinit(&rig->timer);
    td_dev_destroy(rig->dev);
    td_checkpoint_close(rig->checkpoint);
    free(rig->ids);
    free(rig->blocks);
    memset(rig, 0, sizeof *rig);
}
