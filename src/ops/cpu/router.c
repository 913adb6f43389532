/* Routing rows to experts: logits through the linear operation, then a plain selection per row. */
#include "ops/cpu/moe_impl.h"
#include "ops/math.h"

size_t td_cpu_router_shared_bytes(const td_dev_limits *limits)
{
    return (size_t)limits->rows * (size_t)limits->n_experts * sizeof(float);
}

typedef struct router_job {
    const td_router_args *a;
    const float *logits; /* [rows][n_experts] */
} router_job;

static void route_row(const td_router_args *a, const float *z, int32_t *ids, float *weights)
{
    float prob[TD_EXPERTS_MAX], key[TD_EXPERTS_MAX], sum = 0.0f;
    bool taken[TD_EXPERTS_MAX] = { false };
    for (int e = 0; e < a->n_experts; e++) prob[e] = td_sigmoidf(z[e]);
    for (int e = 0; e < a->n_experts; e++) key[e] = prob[e] + a->bias[e];
    for (int k = 0; k < a->top_k; k++) {
        int best = -1;
        for (int e = 0; e < a->n_experts; e++) {
            if (taken[e]) continue;
            if (best < 0 || key[e] > key[best] || (key[best] != key[best] && key[e] == key[e]))
                best = e; /* strictly larger: the lower id wins a tie; NaN loses to every number */
        }
        taken[best] = true;
        ids[k] = best;
        weights[k] = prob[best];
        sum += prob[best];
    }
    for (int k = 0; k < a->top_k; k++) weights[k] = (a->norm ? weights[k] / (sum + 1e-20f) : weights[k]) * a->scale;
}

static void route_rows(void *ctx, int thread, int begin, int end)
{
    const router_job *job = (const router_job *)ctx;
    const td_router_args *a = job->a;
    (void)thread;
    for (int r = begin; r < end; r++)
        route_row(a, job->logits + (size_t)r * (size_t)a->n_experts, a->ids + (size_t)r * (size_t)a->top_k,
                  a->weights + (size_t)r * (size_t)a->top_k);
}

td_status td_cpu_router(td_dev *dev, const td_router_args *a)
{
    td_cpu_dev *cpu = td_cpu(dev);
    if (a->n_rows < 0 || a->n_rows > cpu->limits.rows || a->n_experts < 1 || a->n_experts > TD_EXPERTS_MAX ||
        a->n_experts > cpu->limits.n_experts || a->top_k < 1 || a->top_k > a->n_experts || a->top_k > TD_TOP_K_MAX ||
        a->w->out != a->n_experts || a->w->in != a->dim)
        return TD_EINVAL;
    td_linear_args linear = { .n_rows = a->n_rows,
                              .w = a->w,
                              .x = a->x,
                              .x_stride = (size_t)a->dim,
                              .y_f32 = (float *)(void *)cpu->shared,
                              .y_stride = (size_t)a->n_experts };
    td_status status = td_cpu_linear(dev, &linear);
    if (status != TD_OK) return status;
    router_job job = { a, linear.y_f32 };
    td_cpu_for(cpu, a->n_rows, (double)a->n_experts * a->top_k, route_rows, &job);
    return TD_OK;
}
