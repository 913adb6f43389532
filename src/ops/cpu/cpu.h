/* Inside of the CPU backend: its device, the one place where threads start, access to activations, and scratch. */
#ifndef TD_OPS_CPU_CPU_H
#define TD_OPS_CPU_CPU_H

#include "base/arena.h"
#include "ops/dev_impl.h"
#include "ops/hyper.h"

typedef struct td_cpu_dev {
    td_dev base;
    td_dev_limits limits;
    int n_threads;
    unsigned char *shared; /* scratch that the threads of one operation share */
    size_t shared_bytes;
    unsigned char *own; /* [n_threads] scratch of one thread */
    size_t own_bytes;
} td_cpu_dev;

static inline td_cpu_dev *td_cpu(td_dev *dev)
{
    return (td_cpu_dev *)dev;
}

/* Scratch is laid out by one function an operation, run over a counting arena at creation and over the real memory in
 * the operation: the sizes cannot differ. thread: thread's own part; -1: the shared one. */
static inline void td_cpu_scratch(td_cpu_dev *dev, int thread, td_arena *arena)
{
    if (thread < 0)
        td_arena_init_fixed(arena, dev->shared, dev->shared_bytes);
    else
        td_arena_init_fixed(arena, dev->own + (size_t)thread * dev->own_bytes, dev->own_bytes);
}

static inline float *td_take_f32(td_arena *arena, size_t n)
{
    return (float *)td_arena_take(arena, n * sizeof(float), 64);
}

static inline int32_t *td_take_i32(td_arena *arena, size_t n)
{
    return (int32_t *)td_arena_take(arena, n * sizeof(int32_t), 64);
}

/* Needs of the operations at the limits. */
size_t td_cpu_linear_own_bytes(void);
size_t td_cpu_hyper_own_bytes(const td_dev_limits *limits);
size_t td_cpu_kda_own_bytes(void);
size_t td_cpu_select_shared_bytes(const td_dev_limits *limits);
size_t td_cpu_attend_shared_bytes(const td_dev_limits *limits);
size_t td_cpu_attend_own_bytes(void);
size_t td_cpu_router_shared_bytes(const td_dev_limits *limits);
size_t td_cpu_experts_shared_bytes(const td_dev_limits *limits);

/* Calls body for parts [begin, end) of 0 .. n-1, each once, from up to n_threads threads; thread < n_threads says whose
 * scratch is free. work: about how many fused steps one item takes; small jobs stay on the calling thread, and with one
 * thread OpenMP is never entered. Results must not depend on how the range is cut. */
typedef void td_body_fn(void *ctx, int thread, int begin, int end);
void td_cpu_for(td_cpu_dev *dev, int n, double work, td_body_fn *body, void *ctx);

/* Elements i .. i+n-1 of an activation buffer as floats, and back with one rounding (none in exact mode). */
void td_load_act(const td_cpu_dev *dev, const td_act *src, size_t i, float *dst, size_t n);
void td_store_act(const td_cpu_dev *dev, td_act *dst, size_t i, const float *src, size_t n);

/* What a store and a load make of x[0..n). */
void td_round_act(const td_cpu_dev *dev, float *x, size_t n);

static inline float td_act_f32(const td_cpu_dev *dev, float x)
{
    return dev->base.exact_fp32 ? x : td_bf16_f32(td_f32_bf16(x));
}

/* RMSNorm of elements xi .. of x into floats (already rounded), and of row r of a call. */
void td_rmsnorm_row(const td_cpu_dev *dev, const td_act *x, size_t xi, const float *w, size_t n, float eps, float *y);
void td_rmsnorm_one(const td_cpu_dev *dev, const td_rmsnorm_args *a, int r);

#endif
