/* Devices: what all backends share, and the CPU's: its threads, its scratch, conversion of activations. */
#include "ops/cpu/cpu.h"
#include "ops/simd.h"

#include <omp.h>
#include <stdlib.h>
#include <sys/mman.h>

enum {
    THREADS_MAX = 256,
    WORK_MIN = 1 << 16 /* fused steps below which waking threads (some 5 us) costs more than it saves */
};

void td_dev_destroy(td_dev *dev)
{
    if (dev) dev->calls->destroy(dev);
}

td_backend td_dev_backend(const td_dev *dev)
{
    return dev->backend;
}

bool td_dev_exact_fp32(const td_dev *dev)
{
    return dev->exact_fp32;
}

size_t td_act_bytes(const td_dev *dev, size_t n)
{
    return n * (dev->exact_fp32 ? sizeof(float) : sizeof(td_bf16));
}

td_act *td_act_at(const td_dev *dev, const td_act *base, size_t i)
{
    return (td_act *)((unsigned char *)base + td_act_bytes(dev, i));
}

void td_act_from_f32(const td_dev *dev, td_act *dst, const float *src, size_t n)
{
    dev->calls->act_from_f32(dev, dst, src, n);
}

void td_act_to_f32(const td_dev *dev, float *dst, const td_act *src, size_t n)
{
    dev->calls->act_to_f32(dev, dst, src, n);
}

void td_load_act(const td_cpu_dev *dev, const td_act *src, size_t i, float *dst, size_t n)
{
    if (dev->base.exact_fp32) {
        memcpy(dst, (const float *)(const void *)src + i, n * sizeof *dst);
        return;
    }
    const td_bf16 *from = (const td_bf16 *)(const void *)src + i;
    size_t j = 0;
    for (; j + TD_LANES <= n; j += TD_LANES) td_v16_store(dst + j, td_v16_load_bf16(from + j));
    for (; j < n; j++) dst[j] = td_bf16_f32(from[j]);
}

void td_store_act(const td_cpu_dev *dev, td_act *dst, size_t i, const float *src, size_t n)
{
    if (dev->base.exact_fp32) {
        memcpy((float *)(void *)dst + i, src, n * sizeof *src);
        return;
    }
    td_bf16 *to = (td_bf16 *)(void *)dst + i;
    size_t j = 0;
    for (; j + TD_LANES <= n; j += TD_LANES) td_v16_store_bf16(to + j, td_v16_load(src + j));
    for (; j < n; j++) to[j] = td_f32_bf16(src[j]);
}

void td_round_act(const td_cpu_dev *dev, float *x, size_t n)
{
    if (dev->base.exact_fp32) return;
    size_t j = 0;
    for (; j + TD_LANES <= n; j += TD_LANES) td_v16_store(x + j, td_v16_round_bf16(td_v16_load(x + j)));
    for (; j < n; j++) x[j] = td_bf16_f32(td_f32_bf16(x[j]));
}

static void cpu_from_f32(const td_dev *dev, td_act *dst, const float *src, size_t n)
{
    td_store_act((const td_cpu_dev *)dev, dst, 0, src, n);
}

static void cpu_to_f32(const td_dev *dev, float *dst, const td_act *src, size_t n)
{
    td_load_act((const td_cpu_dev *)dev, src, 0, dst, n);
}

static void cpu_destroy(td_dev *dev)
{
    free(td_cpu(dev)->own);
    free(dev);
}

/* One anonymous mapping an allocation: pages that nothing reaches cost nothing. */
static td_status cpu_alloc(td_dev *dev, size_t n_bytes, void **out, td_error *err)
{
    (void)dev;
    void *memory = mmap(NULL, n_bytes ? n_bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return td_fail(err, TD_ENOMEM, "CPU device: %zu bytes are not to be had", n_bytes);
    *out = memory;
    return TD_OK;
}

static void cpu_free(td_dev *dev, void *memory, size_t n_bytes)
{
    (void)dev;
    if (memory) munmap(memory, n_bytes ? n_bytes : 1);
}

static td_status cpu_copy(td_dev *dev, void *dst, const void *src, size_t n_bytes)
{
    (void)dev;
    memcpy(dst, src, n_bytes);
    return TD_OK;
}

static td_status cpu_fill(td_dev *dev, void *dst, int byte, size_t n_bytes)
{
    (void)dev;
    memset(dst, byte, n_bytes);
    return TD_OK;
}

static td_status cpu_sync(td_dev *dev, td_error *err)
{
    (void)dev;
    (void)err;
    return TD_OK;
}

static td_status cpu_idle(td_dev *dev, bool *idle, td_error *err)
{
    (void)dev;
    (void)err;
    *idle = true;
    return TD_OK;
}

static td_status cpu_host_register(td_dev *dev, void *memory, size_t n_bytes, td_error *err)
{
    (void)dev;
    (void)memory;
    (void)n_bytes;
    (void)err;
    return TD_OK;
}

static void cpu_host_unregister(td_dev *dev, void *memory)
{
    (void)dev;
    (void)memory;
}

static td_status cpu_capture_begin(td_dev *dev)
{
    (void)dev;
    return TD_EUNSUPPORTED;
}

static td_status cpu_capture_end(td_dev *dev, td_graph **out, td_error *err)
{
    (void)dev;
    (void)out;
    return td_fail(err, TD_EUNSUPPORTED, "a CPU device records no graphs");
}

static td_status cpu_graph_launch(td_dev *dev, td_graph *graph)
{
    (void)dev;
    (void)graph;
    return TD_EUNSUPPORTED;
}

static void cpu_graph_destroy(td_dev *dev, td_graph *graph)
{
    (void)dev;
    (void)graph;
}

static const td_dev_calls cpu_calls = { .destroy = cpu_destroy,
                                        .act_from_f32 = cpu_from_f32,
                                        .act_to_f32 = cpu_to_f32,
                                        .alloc = cpu_alloc,
                                        .free = cpu_free,
                                        .host_alloc = cpu_alloc,
                                        .host_free = cpu_free,
                                        .upload = cpu_copy,
                                        .download = cpu_copy,
                                        .copy = cpu_copy,
                                        .fill = cpu_fill,
                                        .sync = cpu_sync,
                                        .idle = cpu_idle,
                                        .host_register = cpu_host_register,
                                        .host_unregister = cpu_host_unregister,
                                        .capture_begin = cpu_capture_begin,
                                        .capture_end = cpu_capture_end,
                                        .graph_launch = cpu_graph_launch,
                                        .graph_destroy = cpu_graph_destroy };

static size_t largest(const size_t *bytes, int n)
{
    size_t max = 0;
    for (int i = 0; i < n; i++)
        if (bytes[i] > max) max = bytes[i];
    return (max + 63) / 64 * 64;
}

static size_t own_bytes(const td_dev_limits *limits)
{
    size_t needs[] = { td_cpu_linear_own_bytes(), td_cpu_hyper_own_bytes(limits), td_cpu_kda_own_bytes(),
                       td_cpu_attend_own_bytes() };
    return largest(needs, (int)(sizeof needs / sizeof *needs));
}

static size_t shared_bytes(const td_dev_limits *limits)
{
    size_t needs[] = { td_cpu_select_shared_bytes(limits), td_cpu_attend_shared_bytes(limits),
                       td_cpu_router_shared_bytes(limits), td_cpu_experts_shared_bytes(limits) };
    return largest(needs, (int)(sizeof needs / sizeof *needs));
}

static int thread_count(int n_threads)
{
    int n = n_threads > 0 ? n_threads : omp_get_num_procs();
    return n < 1 ? 1 : n > THREADS_MAX ? THREADS_MAX : n;
}

size_t td_dev_scratch_bytes(const td_dev_limits *limits, bool exact_fp32, int n_threads)
{
    (void)exact_fp32; /* scratch is fp32 in both modes */
    return shared_bytes(limits) + own_bytes(limits) * (size_t)thread_count(n_threads);
}

td_status td_dev_create_cpu(const td_dev_limits *limits, int n_threads, bool exact_fp32, td_dev **out, td_error *err)
{
    if (limits->rows < 1 || limits->dim < 16 || limits->dim % 16 || limits->n_heads < 0 || limits->n_experts < 0 ||
        limits->top_k < 0 || limits->expert_width < 0 || limits->index_heads < 0 || limits->context_tokens < 0)
        return td_fail(err, TD_EINVAL, "CPU device: rows %d, dim %d, heads %d: out of range", limits->rows, limits->dim,
                       limits->n_heads);
    td_cpu_dev *dev = (td_cpu_dev *)calloc(1, sizeof *dev);
    if (!dev) return td_fail(err, TD_ENOMEM, "CPU device: out of memory");
    dev->base = (td_dev){ .backend = TD_CPU, .exact_fp32 = exact_fp32, .calls = &cpu_calls };
    dev->limits = *limits;
    dev->n_threads = thread_count(n_threads);
    dev->own_bytes = own_bytes(limits);
    dev->shared_bytes = shared_bytes(limits);
    size_t total = td_dev_scratch_bytes(limits, exact_fp32, n_threads);
    dev->own = (unsigned char *)aligned_alloc(64, total);
    if (!dev->own) {
        free(dev);
        return td_fail(err, TD_ENOMEM, "CPU device: %zu bytes of scratch for %d rows: out of memory", total,
                       limits->rows);
    }
    dev->shared = dev->own + dev->own_bytes * (size_t)dev->n_threads;
    *out = &dev->base;
    return TD_OK;
}

void td_cpu_for(td_cpu_dev *dev, int n, double work, td_body_fn *body, void *ctx)
{
    int parts = dev->n_threads < n ? dev->n_threads : n;
    if (parts <= 1 || work * n < WORK_MIN) {
        if (n > 0) body(ctx, 0, 0, n);
        return;
    }
#pragma omp parallel for num_threads(parts) schedule(static, 1)
    for (int i = 0; i < parts; i++) body(ctx, i, (int)((int64_t)n * i / parts), (int)((int64_t)n * (i + 1) / parts));
}
