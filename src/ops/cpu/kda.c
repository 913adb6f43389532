/* KDA over a window: a task is one head of one segment, which it takes from raw projections to gated outputs.
 * Row-by-row segments run the recurrence on strips of the state; chunked ones call kda_chunk.c every 64 rows of the
 * absolute grid. */
#include "ops/cpu/kda_impl.h"

void td_kda_carve(td_arena *arena, td_kda_rows *rows)
{
    size_t block = (size_t)TD_KDA_ROWS * TD_KDA_D;
    rows->raw = td_take_f32(arena, block + (TD_CONV - 1) * TD_KDA_D);
    rows->q = td_take_f32(arena, block);
    rows->k = td_take_f32(arena, block);
    rows->v = td_take_f32(arena, block);
    rows->alpha = td_take_f32(arena, block);
    rows->beta = td_take_f32(arena, TD_KDA_ROWS);
    rows->o = td_take_f32(arena, block);
    rows->qs = td_take_f32(arena, block);
    rows->ks = td_take_f32(arena, block);
    rows->kd = td_take_f32(arena, block);
    rows->x = td_take_f32(arena, 2 * block);
    rows->y = td_take_f32(arena, 2 * block);
    rows->u = td_take_f32(arena, block);
    rows->a = td_take_f32(arena, (size_t)TD_KDA_ROWS * TD_KDA_ROWS);
    rows->b = td_take_f32(arena, (size_t)TD_KDA_ROWS * TD_KDA_ROWS);
}

size_t td_cpu_kda_own_bytes(void)
{
    td_arena arena;
    td_kda_rows rows;
    td_arena_init_fixed(&arena, NULL, SIZE_MAX);
    td_kda_carve(&arena, &rows);
    return arena.used_bytes;
}

/* part: 0 q, 1 k, 2 v. Row -3 .. n-1 around t0: from the conv window where it is before the segment. */
static void load_raw(const td_kda_task *task, int part, int t0, int n, float *raw)
{
    const td_kda_args *a = task->a;
    size_t channel = ((size_t)part * (size_t)a->n_heads + (size_t)task->head) * TD_HEAD;
    for (int t = t0 - (TD_CONV - 1); t < t0 + n; t++, raw += TD_HEAD) {
        if (t < 0)
            td_load_act(task->dev, a->state.conv,
                        td_kda_conv_at(task->segment, task->segment->parity, a->n_heads, TD_CONV - 1 + t) + channel,
                        raw, TD_HEAD);
        else
            td_load_act(task->dev, a->proj, (size_t)(task->segment->first_row + t) * a->proj_stride + channel, raw,
                        TD_HEAD);
    }
}

/* act(silu(convolution)): taps oldest first, one product and three fused steps. */
static void convolve(const td_kda_task *task, int part, int n, const float *raw, float *out)
{
    const float *taps =
        task->a->w.conv + ((size_t)part * (size_t)task->a->n_heads + (size_t)task->head) * TD_HEAD * TD_CONV;
    float w[TD_CONV][TD_HEAD];
    for (int c = 0; c < TD_HEAD; c++)
        for (int j = 0; j < TD_CONV; j++) w[j][c] = taps[c * TD_CONV + j];
    for (int t = 0; t < n; t++, raw += TD_HEAD, out += TD_HEAD) {
        for (int c = 0; c < TD_HEAD; c++) {
            float z = w[0][c] * raw[c];
            z = fmaf(w[1][c], raw[TD_HEAD + c], z);
            z = fmaf(w[2][c], raw[2 * TD_HEAD + c], z);
            out[c] = fmaf(w[3][c], raw[3 * TD_HEAD + c], z);
        }
        for (int c = 0; c < TD_HEAD; c++) out[c] = td_siluf(out[c]);
    }
    td_round_act(task->dev, out - (size_t)n * TD_HEAD, (size_t)n * TD_HEAD);
}

/* x / sqrt(sum x^2 + 1e-6) * scale, a row of 128 at a time */
static void normalise(int n, float *x, float scale)
{
    for (int t = 0; t < n; t++, x += TD_HEAD) {
        float inverse = 1.0f / sqrtf(td_dot(x, x, TD_HEAD) + 1e-6f);
        for (int c = 0; c < TD_HEAD; c++) x[c] = x[c] * inverse * scale;
    }
}

static void gates(const td_kda_task *task, int t0, int n, td_kda_rows *rows)
{
    const td_kda_args *a = task->a;
    size_t channel = (size_t)task->head * TD_HEAD;
    const float *bias = a->w.dt_bias + channel;
    float slope = a->w.neg_a[task->head], bound = a->lower_bound;
    for (int t = 0; t < n; t++) {
        size_t row = (size_t)(task->segment->first_row + t0 + t);
        float *alpha = rows->alpha + t * TD_HEAD;
        td_load_act(task->dev, a->f, row * (size_t)a->n_heads * TD_HEAD + channel, alpha, TD_HEAD);
        for (int c = 0; c < TD_HEAD; c++) alpha[c] = bound * td_sigmoidf(slope * (alpha[c] + bias[c]));
        for (int c = 0; c < TD_HEAD; c++) alpha[c] = td_expf(alpha[c]);
        td_load_act(task->dev, a->beta_raw, row * a->beta_stride + (size_t)task->head, rows->beta + t, 1);
        rows->beta[t] = td_act_f32(task->dev, td_sigmoidf(rows->beta[t]));
    }
}

void td_kda_prepare(const td_kda_task *task, int t0, int n, td_kda_rows *rows)
{
    float *parts[3] = { rows->q, rows->k, rows->v };
    for (int part = 0; part < 3; part++) {
        load_raw(task, part, t0, n, rows->raw);
        convolve(task, part, n, rows->raw, parts[part]);
    }
    normalise(n, rows->q, 0.08838834764831845f); /* 128^-1/2 */
    normalise(n, rows->k, 1.0f);
    gates(task, t0, n, rows);
}

void td_kda_finish(const td_kda_task *task, int t0, int n, td_kda_rows *rows)
{
    const td_kda_args *a = task->a;
    size_t channel = (size_t)task->head * TD_HEAD;
    td_round_act(task->dev, rows->o, (size_t)n * TD_HEAD);
    for (int t = 0; t < n; t++) {
        size_t row = (size_t)(task->segment->first_row + t0 + t);
        float *o = rows->o + t * TD_HEAD, gate[TD_HEAD];
        float inverse = 1.0f / sqrtf(td_dot(o, o, TD_HEAD) / TD_HEAD + a->rms_eps);
        td_load_act(task->dev, a->gate, row * (size_t)a->n_heads * TD_HEAD + channel, gate, TD_HEAD);
        for (int c = 0; c < TD_HEAD; c++) o[c] = (a->w.o_norm[c] * (o[c] * inverse)) * td_sigmoidf(gate[c]);
        td_store_act(task->dev, a->y, row * (size_t)a->n_heads * TD_HEAD + channel, o, TD_HEAD);
    }
}

void td_kda_conv_write(const td_cpu_dev *dev, const td_kda_state *state, const td_segment *segment, int n_heads,
                       int head, int n_rows, const td_act *raw, size_t first, size_t stride)
{
    for (int part = 0; part < 3; part++) {
        size_t channel = ((size_t)part * (size_t)n_heads + (size_t)head) * TD_HEAD;
        for (int j = 0; j < TD_CONV - 1; j++) {
            int t = n_rows - (TD_CONV - 1) + j; /* row of the segment; below 0: of the old window */
            const td_act *src =
                t < 0 ? td_act_at(&dev->base, state->conv,
                                  td_kda_conv_at(segment, segment->parity, n_heads, TD_CONV - 1 + t) + channel)
                      : td_act_at(&dev->base, raw, first + (size_t)t * stride + channel);
            td_act *dst =
                td_act_at(&dev->base, state->conv, td_kda_conv_at(segment, !segment->parity, n_heads, j) + channel);
            memcpy(dst, src, td_act_bytes(&dev->base, TD_HEAD));
        }
    }
}

/* What a replay needs of rows t0 .. t0+n-1. */
static void keep_rows(const td_kda_task *task, int t0, int n, const td_kda_rows *rows)
{
    const td_kda_args *a = task->a;
    const td_kda_saved *saved = &a->saved;
    size_t width = (size_t)a->n_heads * TD_HEAD, channel = (size_t)task->head * TD_HEAD;
    for (int t = 0; t < n; t++) {
        size_t row = (size_t)(task->segment->first_row + t0 + t), to = (size_t)(task->saved_row + t0 + t);
        size_t at = to * width + channel;
        memcpy(saved->k + at, rows->k + t * TD_HEAD, TD_HEAD * sizeof(float));
        memcpy(saved->v + at, rows->v + t * TD_HEAD, TD_HEAD * sizeof(float));
        memcpy(saved->alpha + at, rows->alpha + t * TD_HEAD, TD_HEAD * sizeof(float));
        saved->beta[to * (size_t)a->n_heads + (size_t)task->head] = rows->beta[t];
        for (size_t part = 0; part < 3; part++)
            memcpy(td_act_at(&task->dev->base, saved->raw, to * 3 * width + part * width + channel),
                   td_act_at(&task->dev->base, a->proj, row * a->proj_stride + part * width + channel),
                   td_act_bytes(&task->dev->base, TD_HEAD));
    }
}

static void recurrent(int n, const float *from, float *to, td_kda_rows *rows)
{
    for (int d = 0; d < TD_KDA_D; d += TD_KDA_STRIP)
        for (int t = 0; t < n; t++)
            td_kda_step(true, (t ? to : from) + d, to + d, rows->k + t * TD_HEAD, rows->v + t * TD_HEAD + d,
                        rows->alpha + t * TD_HEAD, rows->beta[t], rows->q + t * TD_HEAD, rows->o + t * TD_HEAD + d);
}

static void run_task(const td_kda_task *task, td_kda_rows *rows)
{
    const td_kda_args *a = task->a;
    const td_segment *segment = task->segment;
    float *from = td_kda_state_at(&a->state, segment, segment->parity, a->n_heads, task->head);
    float *to = td_kda_state_at(&a->state, segment, !segment->parity, a->n_heads, task->head);
    for (int t = 0; t < segment->n_rows; t += TD_KDA_ROWS) {
        int n = segment->n_rows - t < TD_KDA_ROWS ? segment->n_rows - t : TD_KDA_ROWS;
        td_kda_prepare(task, t, n, rows);
        if (segment->chunked)
            td_kda_chunk(n, t ? to : from, to, rows);
        else
            recurrent(n, t ? to : from, to, rows);
        if (!segment->chunked && a->saved.k) keep_rows(task, t, n, rows);
        td_kda_finish(task, t, n, rows);
    }
    td_kda_conv_write(task->dev, &a->state, segment, a->n_heads, task->head, segment->n_rows, a->proj,
                      (size_t)segment->first_row * a->proj_stride, a->proj_stride);
}

typedef struct kda_job {
    td_cpu_dev *dev;
    const td_kda_args *a;
} kda_job;

static void run_tasks(void *ctx, int thread, int begin, int end)
{
    const kda_job *job = (const kda_job *)ctx;
    td_arena arena;
    td_kda_rows rows;
    td_cpu_scratch(job->dev, thread, &arena);
    td_kda_carve(&arena, &rows);
    for (int i = begin; i < end; i++) {
        const td_segment *segments = job->a->window->segments;
        int index = i / job->a->n_heads;
        td_kda_task task = { job->dev, job->a, segments + index, i % job->a->n_heads,
                             td_kda_saved_row(segments, index) };
        if (task.segment->n_rows > 0) run_task(&task, &rows);
    }
}

td_status td_cpu_kda(td_dev *dev, const td_kda_args *a)
{
    if (!td_kda_fits(a)) return TD_EINVAL;
    td_status status = a->low.f_b ? td_kda_make_gates(dev, td_cpu_linear, a) : TD_OK;
    if (status != TD_OK) return status;
    kda_job job = { td_cpu(dev), a };
    double rows = a->window->n_segments ? (double)a->window->n_rows / a->window->n_segments : 0.0;
    td_cpu_for(job.dev, a->window->n_segments * a->n_heads, rows * 4 * TD_KDA_STATE, run_tasks, &job);
    return TD_OK;
}
