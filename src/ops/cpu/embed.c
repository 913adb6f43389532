/* Embedding rows into the residual streams. */
#include "ops/cpu/cpu.h"
#include "ops/hyper.h"

typedef struct embed_job {
    td_cpu_dev *dev;
    const td_embed_args *a;
} embed_job;

static void embed_rows(void *ctx, int thread, int begin, int end)
{
    const embed_job *job = (const embed_job *)ctx;
    const td_embed_args *a = job->a;
    size_t dim = (size_t)a->dim;
    (void)thread;
    for (int r = begin; r < end; r++) {
        int32_t id = a->window->ids[r];
        const td_bf16 *src = id >= 0 && id < a->vocab ? a->table + (size_t)id * dim : NULL;
        if (a->media_row && a->media && a->media_row[r] >= 0) src = a->media + (size_t)a->media_row[r] * dim;
        for (int s = 0; s < a->n_streams; s++) {
            td_act *x = td_act_at(&job->dev->base, a->x, ((size_t)r * (size_t)a->n_streams + (size_t)s) * dim);
            if (!src)
                memset(x, 0, td_act_bytes(&job->dev->base, dim));
            else if (!job->dev->base.exact_fp32)
                memcpy(x, src, dim * sizeof *src);
            else
                for (size_t d = 0; d < dim; d++) ((float *)(void *)x)[d] = td_bf16_f32(src[d]);
        }
    }
}

td_status td_cpu_embed(td_dev *dev, const td_embed_args *a)
{
    if (a->dim < 1 || a->vocab < 0 || a->n_streams < 1) return TD_EINVAL;
    embed_job job = { td_cpu(dev), a };
    td_cpu_for(job.dev, a->window->n_rows, (double)a->dim * a->n_streams, embed_rows, &job);
    return TD_OK;
}
