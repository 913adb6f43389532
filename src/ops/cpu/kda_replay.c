/* Commit of a window of which only the first rows stay: the recurrence is run again from the committed state over the
 * kept rows, with the step that the window used (td_kda_step), so the state is the one that serial steps give. */
#include "ops/cpu/kda_impl.h"

typedef struct replay_job {
    td_cpu_dev *dev;
    const td_kda_replay_args *a;
} replay_job;

static void replay(const replay_job *job, int index, int head, int keep)
{
    const td_kda_replay_args *a = job->a;
    const td_segment *segment = a->window->segments + index;
    size_t first = (size_t)td_kda_saved_row(a->window->segments, index);
    size_t width = (size_t)a->n_heads * TD_HEAD, channel = (size_t)head * TD_HEAD;
    const float *from = td_kda_state_at(&a->state, segment, segment->parity, a->n_heads, head);
    float *to = td_kda_state_at(&a->state, segment, !segment->parity, a->n_heads, head);
    for (int d = 0; d < TD_KDA_D; d += TD_KDA_STRIP)
        for (int t = 0; t < keep; t++) {
            size_t row = first + (size_t)t, at = row * width + channel;
            td_kda_step(false, (t ? to : from) + d, to + d, a->saved.k + at, a->saved.v + at + d, a->saved.alpha + at,
                        a->saved.beta[row * (size_t)a->n_heads + (size_t)head], NULL, NULL);
        }
    td_kda_conv_write(job->dev, &a->state, segment, a->n_heads, head, keep, a->saved.raw, first * 3 * width, 3 * width);
}

static void replay_tasks(void *ctx, int thread, int begin, int end)
{
    const replay_job *job = (const replay_job *)ctx;
    (void)thread;
    for (int i = begin; i < end; i++) {
        int s = i / job->a->n_heads, keep = job->a->keep[s];
        const td_segment *segment = job->a->window->segments + s;
        if (!segment->chunked && keep > 0 && keep < segment->n_rows) replay(job, s, i % job->a->n_heads, keep);
    }
}

td_status td_cpu_kda_replay(td_dev *dev, const td_kda_replay_args *a)
{
    if (a->n_heads < 0 || !a->saved.k) return TD_EINVAL;
    replay_job job = { td_cpu(dev), a };
    td_cpu_for(job.dev, a->window->n_segments * a->n_heads, 3.0 * TD_KDA_STATE, replay_tasks, &job);
    return TD_OK;
}
