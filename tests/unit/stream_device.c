/* See stream_device.h. A job is an operation with a copy of its arguments, the window's struct among them; what the
 * tables hold is read when the job runs, as on a GPU. */
#include "stream_device.h"

#include "base/clock.h"
#include "ops/dev_impl.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct job job;
typedef struct stream_dev stream_dev;
typedef td_status run_fn(stream_dev *dev, job *j);

struct job {
    run_fn *run;
    td_window window; /* of args, if it has one */
    union {
        td_embed_args embed;
        td_hyper_args hyper;
        td_rmsnorm_args rmsnorm;
        td_stream_mean_args stream_mean;
        td_residual_args residual;
        td_linear_args linear;
        td_kda_args kda;
        td_kda_replay_args kda_replay;
        td_dsa_store_args dsa_store;
        td_dsa_select_args dsa_select;
        td_dsa_attend_args dsa_attend;
        td_swiglu_args swiglu;
        td_router_args router;
        td_experts_args experts;
        td_gather_args gather;
        struct {
            void *dst;
            const void *src;
            size_t n_bytes;
        } copy;
    } a;
};

struct td_graph {
    job *jobs;
    int n, cap;
};

struct stream_dev {
    td_dev base;
    td_dev *cpu;
    td_ops ops; /* the CPU's */
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct td_graph queue; /* jobs first .. n - 1 wait */
    int first;
    bool running, end;
    td_status status;
    td_graph *recording;
    struct td_graph branch; /* jobs between fork and join, while they are kept back */
    bool branching, late;   /* operations go to a branch; this one's run after what is enqueued beside it */
    uint32_t order;         /* random */
    int n_recorded, n_launched;
};

/* ---- jobs ---- */

static void append(struct td_graph *list, const job *j)
{
    if (list->n == list->cap) {
        list->cap = list->cap ? 2 * list->cap : 64;
        list->jobs = realloc(list->jobs, (size_t)list->cap * sizeof *list->jobs);
        td_check(list->jobs != NULL);
    }
    list->jobs[list->n++] = *j;
}

static td_status enqueue(td_dev *base, const job *j)
{
    stream_dev *dev = (stream_dev *)base;
    if (dev->branching && dev->late) {
        append(&dev->branch, j);
        return TD_OK;
    }
    if (dev->recording) {
        append(dev->recording, j);
        return TD_OK;
    }
    pthread_mutex_lock(&dev->mutex);
    append(&dev->queue, j);
    pthread_cond_broadcast(&dev->changed);
    pthread_mutex_unlock(&dev->mutex);
    return TD_OK;
}

static void *work(void *arg)
{
    stream_dev *dev = arg;
    pthread_mutex_lock(&dev->mutex);
    for (;;) {
        while (!dev->end && dev->first == dev->queue.n) pthread_cond_wait(&dev->changed, &dev->mutex);
        if (dev->end) break;
        job j = dev->queue.jobs[dev->first++];
        if (dev->first == dev->queue.n) dev->first = dev->queue.n = 0;
        dev->running = true;
        pthread_mutex_unlock(&dev->mutex);
        td_status status = j.run(dev, &j);
        pthread_mutex_lock(&dev->mutex);
        if (status && !dev->status) dev->status = status;
        dev->running = false;
        pthread_cond_broadcast(&dev->changed);
    }
    pthread_mutex_unlock(&dev->mutex);
    return NULL;
}

/* An operation with a window, and one without: how it is enqueued and how it runs. A device has no other view of the
 * segments than the tables. */
#define WINDOW_OP(name)                                                                                                \
    static td_status run_##name(stream_dev *dev, job *j)                                                               \
    {                                                                                                                  \
        j->window.host_segments = j->window.segments;                                                                  \
        j->a.name.window = &j->window;                                                                                 \
        return dev->ops.name(dev->cpu, &j->a.name);                                                                    \
    }                                                                                                                  \
    static td_status put_##name(td_dev *dev, const td_##name##_args *a)                                                \
    {                                                                                                                  \
        return enqueue(dev, &(job){ .run = run_##name, .window = *a->window, .a.name = *a });                          \
    }
#define PLAIN_OP(name)                                                                                                 \
    static td_status run_##name(stream_dev *dev, job *j)                                                               \
    {                                                                                                                  \
        return dev->ops.name(dev->cpu, &j->a.name);                                                                    \
    }                                                                                                                  \
    static td_status put_##name(td_dev *dev, const td_##name##_args *a)                                                \
    {                                                                                                                  \
        return enqueue(dev, &(job){ .run = run_##name, .a.name = *a });                                                \
    }

WINDOW_OP(embed)
WINDOW_OP(kda)
WINDOW_OP(kda_replay)
WINDOW_OP(dsa_store)
WINDOW_OP(dsa_select)
WINDOW_OP(dsa_attend)
PLAIN_OP(hyper)
PLAIN_OP(rmsnorm)
PLAIN_OP(stream_mean)
PLAIN_OP(residual)
PLAIN_OP(linear)
PLAIN_OP(swiglu)
PLAIN_OP(router)

static td_status run_experts(stream_dev *dev, job *j)
{
    return dev->ops.experts(dev->cpu, &j->a.experts);
}

static td_status put_experts(td_dev *dev, const td_experts_args *a)
{
    td_status status = a->join ? td_dev_join(dev) : TD_OK;
    return status ? status : enqueue(dev, &(job){ .run = run_experts, .a.experts = *a });
}

/* As src/ops/cuda/gather.cu. */
static td_status run_gather(stream_dev *dev, job *j)
{
    const td_gather_args *a = &j->a.gather;
    if (!a->bell) return dev->ops.gather(dev->cpu, a);
    char *parts = (char *)a->partials, *slots = a->slots;
    size_t own = (size_t)a->rank * a->n_bytes, other = (size_t)(1 - a->rank) * a->n_bytes;
    uint32_t number = ++a->state[2];
    memcpy(slots + own, parts + own, a->n_bytes);
    atomic_store((_Atomic uint32_t *)&a->bell->rung, number);
    int64_t start = td_now_ns();
    while ((int32_t)(atomic_load((_Atomic uint32_t *)&a->bell->arrived) - number) < 0) {
        if (atomic_load((_Atomic uint32_t *)&a->bell->stop)) return TD_OK;
        if (td_now_ns() - start < a->limit_ns) continue;
        atomic_store((_Atomic uint32_t *)&a->bell->gave_up, number);
        return TD_OK;
    }
    memcpy(parts + other, slots + other, a->n_bytes);
    return TD_OK;
}

static td_status put_gather(td_dev *dev, const td_gather_args *a)
{
    return enqueue(dev, &(job){ .run = run_gather, .a.gather = *a });
}

/* ---- filling weights: at once ---- */

static stream_dev *of(td_dev *dev)
{
    return (stream_dev *)dev;
}

static td_status weight_fill(td_dev *dev, const td_weight *w, int out0, int n_out, const td_bf16 *src,
                             size_t src_stride, int in0)
{
    return of(dev)->ops.weight_fill(of(dev)->cpu, w, out0, n_out, src, src_stride, in0);
}

static size_t kv_b_bytes(const td_dev *dev, int n_heads, int k_dim, int v_dim, int kv_lora)
{
    const stream_dev *s = (const stream_dev *)dev;
    return s->ops.kv_b_bytes(s->cpu, n_heads, k_dim, v_dim, kv_lora);
}

static td_status kv_b_fill(td_dev *dev, const td_kv_b *w, const td_bf16 *src)
{
    return of(dev)->ops.kv_b_fill(of(dev)->cpu, w, src);
}

static td_status exl3_fill(td_dev *dev, td_exl3 *w, const td_exl3 *whole, int k0, int k1, int n0, int n1, td_error *err)
{
    return of(dev)->ops.exl3_fill(of(dev)->cpu, w, whole, k0, k1, n0, n1, err);
}

static td_status experts_table_fill(td_dev *dev, const td_experts *experts)
{
    return of(dev)->ops.experts_table_fill(of(dev)->cpu, experts);
}

/* ---- the device ---- */

static bool is_idle(const stream_dev *dev)
{
    return dev->first == dev->queue.n && !dev->running;
}

static td_status sync(td_dev *base, td_error *err)
{
    stream_dev *dev = of(base);
    pthread_mutex_lock(&dev->mutex);
    while (!is_idle(dev)) pthread_cond_wait(&dev->changed, &dev->mutex);
    td_status status = dev->status;
    pthread_mutex_unlock(&dev->mutex);
    return status ? td_fail(err, status, "an operation: %s", td_status_text(status)) : TD_OK;
}

static td_status idle(td_dev *base, bool *out, td_error *err)
{
    stream_dev *dev = of(base);
    (void)err;
    pthread_mutex_lock(&dev->mutex);
    *out = is_idle(dev);
    pthread_mutex_unlock(&dev->mutex);
    return TD_OK;
}

static void destroy(td_dev *base)
{
    stream_dev *dev = of(base);
    pthread_mutex_lock(&dev->mutex);
    dev->end = true;
    pthread_cond_broadcast(&dev->changed);
    pthread_mutex_unlock(&dev->mutex);
    pthread_join(dev->thread, NULL);
    td_dev_destroy(dev->cpu);
    free(dev->queue.jobs);
    free(dev->branch.jobs);
    free(dev);
}

static void from_f32(const td_dev *base, td_act *dst, const float *src, size_t n)
{
    (void)sync((td_dev *)base, NULL);
    td_act_from_f32(((const stream_dev *)base)->cpu, dst, src, n);
}

static void to_f32(const td_dev *base, float *dst, const td_act *src, size_t n)
{
    (void)sync((td_dev *)base, NULL);
    td_act_to_f32(((const stream_dev *)base)->cpu, dst, src, n);
}

static td_status alloc(td_dev *dev, size_t n_bytes, void **out, td_error *err)
{
    td_status status = td_dev_alloc(of(dev)->cpu, n_bytes, out, err);
    if (!status) memset(*out, 0xa5, n_bytes); /* a GPU's memory is not zeroed */
    return status;
}

static void free_(td_dev *dev, void *memory, size_t n_bytes)
{
    td_dev_free(of(dev)->cpu, memory, n_bytes);
}

static td_status host_alloc(td_dev *dev, size_t n_bytes, void **out, td_error *err)
{
    return td_dev_host_alloc(of(dev)->cpu, n_bytes, out, err);
}

static void host_free(td_dev *dev, void *memory, size_t n_bytes)
{
    td_dev_host_free(of(dev)->cpu, memory, n_bytes);
}

static td_status move(td_dev *dev, void *dst, const void *src, size_t n_bytes)
{
    td_status status = sync(dev, NULL);
    memmove(dst, src, n_bytes);
    return status;
}

static td_status run_copy(stream_dev *dev, job *j)
{
    (void)dev;
    memmove(j->a.copy.dst, j->a.copy.src, j->a.copy.n_bytes);
    return TD_OK;
}

static td_status copy(td_dev *dev, void *dst, const void *src, size_t n_bytes)
{
    return enqueue(dev, &(job){ .run = run_copy, .a.copy = { dst, src, n_bytes } });
}

static td_status fill(td_dev *dev, void *dst, int byte, size_t n_bytes)
{
    td_status status = sync(dev, NULL);
    memset(dst, byte, n_bytes);
    return status;
}

static td_status host_register(td_dev *dev, void *memory, size_t n_bytes, td_error *err)
{
    return td_dev_host_register(of(dev)->cpu, memory, n_bytes, err);
}

static void host_unregister(td_dev *dev, void *memory)
{
    td_dev_host_unregister(of(dev)->cpu, memory);
}

static td_status capture_begin(td_dev *dev)
{
    td_check(!of(dev)->recording);
    of(dev)->recording = calloc(1, sizeof *of(dev)->recording);
    return of(dev)->recording ? TD_OK : TD_ENOMEM;
}

static td_status capture_end(td_dev *dev, td_graph **out, td_error *err)
{
    (void)err;
    *out = of(dev)->recording;
    of(dev)->recording = NULL;
    of(dev)->n_recorded++;
    return TD_OK;
}

static td_status graph_launch(td_dev *dev, td_graph *graph)
{
    of(dev)->n_launched++;
    for (int i = 0; i < graph->n; i++) enqueue(dev, &graph->jobs[i]);
    return TD_OK;
}

static void graph_destroy(td_dev *dev, td_graph *graph)
{
    (void)dev;
    free(graph->jobs);
    free(graph);
}

/* Branches run in one of the two orders that a GPU's might: half of them after what is enqueued beside them. */
static td_status fork_(td_dev *base)
{
    stream_dev *dev = of(base);
    td_check(!dev->branching && !dev->branch.n);
    dev->branching = true;
    dev->order = dev->order * 1664525u + 1013904223u;
    dev->late = dev->order >> 31;
    return TD_OK;
}

static td_status main_(td_dev *base)
{
    td_check(of(base)->branching);
    of(base)->branching = false;
    return TD_OK;
}

static td_status join(td_dev *base)
{
    stream_dev *dev = of(base);
    td_check(!dev->branching);
    for (int i = 0; i < dev->branch.n; i++) enqueue(base, &dev->branch.jobs[i]);
    dev->branch.n = 0;
    return TD_OK;
}

static const td_dev_calls calls = { .destroy = destroy,
                                    .act_from_f32 = from_f32,
                                    .act_to_f32 = to_f32,
                                    .alloc = alloc,
                                    .free = free_,
                                    .host_alloc = host_alloc,
                                    .host_free = host_free,
                                    .upload = move,
                                    .download = move,
                                    .copy = copy,
                                    .fill = fill,
                                    .sync = sync,
                                    .idle = idle,
                                    .host_register = host_register,
                                    .host_unregister = host_unregister,
                                    .capture_begin = capture_begin,
                                    .capture_end = capture_end,
                                    .graph_launch = graph_launch,
                                    .graph_destroy = graph_destroy,
                                    .fork = fork_,
                                    .main = main_,
                                    .join = join };

static void fill_table(stream_dev *dev, td_ops *ops)
{
    *ops = dev->ops;
    ops->weight_fill = weight_fill;
    ops->kv_b_bytes = kv_b_bytes;
    ops->kv_b_fill = kv_b_fill;
    ops->exl3_fill = exl3_fill;
    ops->experts_table_fill = experts_table_fill;
    ops->embed = put_embed;
    ops->hyper = put_hyper;
    ops->rmsnorm = put_rmsnorm;
    ops->stream_mean = put_stream_mean;
    ops->residual = put_residual;
    ops->linear = put_linear;
    ops->kda = put_kda;
    ops->kda_replay = put_kda_replay;
    ops->dsa_store = put_dsa_store;
    ops->dsa_select = put_dsa_select;
    ops->dsa_attend = put_dsa_attend;
    ops->swiglu = put_swiglu;
    ops->router = put_router;
    ops->experts = put_experts;
    ops->gather = put_gather;
}

td_status stream_dev_create(const td_dev_limits *limits, int n_threads, td_dev **out, td_ops *ops, td_error *err)
{
    stream_dev *dev = calloc(1, sizeof *dev);
    td_status status = dev ? td_dev_create_cpu(limits, n_threads, false, &dev->cpu, err) : TD_ENOMEM;
    if (status) {
        free(dev);
        return status;
    }
    dev->base = (td_dev){ .backend = TD_CUDA, .calls = &calls };
    td_ops_init(&dev->ops, dev->cpu);
    fill_table(dev, ops);
    pthread_mutex_init(&dev->mutex, NULL);
    pthread_cond_init(&dev->changed, NULL);
    td_check(pthread_create(&dev->thread, NULL, work, dev) == 0);
    *out = &dev->base;
    return TD_OK;
}

void stream_dev_counts(td_dev *dev, int *n_recorded, int *n_launched)
{
    *n_recorded = of(dev)->n_recorded;
    *n_launched = of(dev)->n_launched;
}
