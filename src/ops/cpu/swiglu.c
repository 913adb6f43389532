/* Clamped SwiGLU of dense MLPs and shared experts; routed experts use the same row function. */
#include "ops/cpu/moe_impl.h"
#include "ops/math.h"

void td_swiglu_row(const td_cpu_dev *dev, const float *gate, const float *up, size_t n, float limit, float *y)
{
    for (size_t i = 0; i < n; i++) y[i] = td_siluf(td_min_f(gate[i], limit));
    td_round_act(dev, y, n);
    for (size_t i = 0; i < n; i++) y[i] *= td_clamp_f(up[i], limit);
    td_round_act(dev, y, n);
}

typedef struct swiglu_job {
    td_cpu_dev *dev;
    const td_swiglu_args *a;
} swiglu_job;

static void swiglu_rows(void *ctx, int thread, int begin, int end)
{
    enum { PIECE = 512 };
    const swiglu_job *job = (const swiglu_job *)ctx;
    size_t width = (size_t)job->a->width;
    (void)thread;
    for (size_t r = (size_t)begin; r < (size_t)end; r++)
        for (size_t i = 0; i < width; i += PIECE) {
            float gate[PIECE], up[PIECE], y[PIECE];
            size_t n = width - i < PIECE ? width - i : PIECE;
            td_load_act(job->dev, job->a->gate_up, r * 2 * width + i, gate, n);
            td_load_act(job->dev, job->a->gate_up, r * 2 * width + width + i, up, n);
            td_swiglu_row(job->dev, gate, up, n, job->a->limit, y);
            td_store_act(job->dev, job->a->y, r * width + i, y, n);
        }
}

td_status td_cpu_swiglu(td_dev *dev, const td_swiglu_args *a)
{
    if (a->n_rows < 0 || a->width < 0) return TD_EINVAL;
    swiglu_job job = { td_cpu(dev), a };
    td_cpu_for(job.dev, a->n_rows, 8.0 * a->width, swiglu_rows, &job);
    return TD_OK;
}
