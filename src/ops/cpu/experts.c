/* Routed experts. A pick is one (row, expert) pair. Picks are sorted by expert (a stable counting sort: rows stay in
 * order) and taken in batches; within a batch every panel of an expert is decoded once for all of its picks: rotate xh
 * = f16(H(x * suh)) for gate and up          (plain weights: x itself) gate, up    z = xh Wq, fp32 chains over
 * ascending inputs middle      act(H(z) * svh) for both, SwiGLU, rotate for down down        as gate and up; H(z) * svh
 * is the pick's output and at the end a row's picks are added in its own order. Which picks share a batch changes no
 * bit. */
#include "checkpoint/hadamard.h"
#include "ops/cpu/moe_impl.h"
#include "ops/cpu/panel.h"
#include "ops/cpu/weight.h"

enum { BATCH = 256 }; /* picks; bounds the scratch, large enough that a panel's decoding is spread over many rows */

typedef struct group {    /* picks of one expert in a batch */
    int expert, first, n; /* first: in the batch */
} group;

typedef struct experts_job {
    td_cpu_dev *dev;
    const td_experts_args *a;
    int32_t *start;      /* [n_experts + 1] of order */
    int32_t *order;      /* [picks] row * top_k + k, sorted by expert */
    float *output;       /* [rows * top_k][dim] */
    const int32_t *pick; /* the batch's part of order */
    int n_groups;
    group *groups; /* [BATCH] */
    float *x;      /* [2][BATCH][dim] inputs of gate and of up */
    float *z;      /* [BATCH][2 * width] */
    float *mid;    /* [BATCH][width] input of down */
} experts_job;

static void carve(td_arena *arena, int rows, int top_k, int dim, int width, int n_experts, experts_job *job)
{
    job->start = td_take_i32(arena, (size_t)n_experts + 1);
    job->order = td_take_i32(arena, (size_t)rows * (size_t)top_k);
    job->output = td_take_f32(arena, (size_t)rows * (size_t)top_k * (size_t)dim);
    job->groups = (group *)td_arena_take(arena, BATCH * sizeof(group), 64);
    job->x = td_take_f32(arena, (size_t)2 * BATCH * (size_t)dim);
    job->z = td_take_f32(arena, (size_t)BATCH * 2 * (size_t)width);
    job->mid = td_take_f32(arena, (size_t)BATCH * (size_t)width);
}

size_t td_cpu_experts_shared_bytes(const td_dev_limits *limits)
{
    td_arena arena;
    experts_job job;
    td_arena_init_fixed(&arena, NULL, SIZE_MAX);
    carve(&arena, limits->rows, limits->top_k, limits->dim, limits->expert_width, limits->n_experts, &job);
    return arena.used_bytes;
}

static float *input_of(const experts_job *job, int up, int pick)
{
    return job->x + ((size_t)up * BATCH + (size_t)pick) * (size_t)job->a->experts->dim;
}

static void scale_f16(float *x, const td_f16 *scale, int n)
{
    for (int i = 0; i < n; i += TD_LANES)
        td_v16_store(x + i, td_v16_mul(td_v16_load(x + i), td_v16_load_f16(scale + i)));
}

/* f16(H(x * suh)) in place, as fp32 */
static void rotate_in(const td_exl3 *w, float *x)
{
    scale_f16(x, w->suh, w->k);
    td_hadamard128_blocks(x, (size_t)w->k, TD_HADAMARD_SCALE);
    for (int i = 0; i < w->k; i += TD_LANES) td_v16_store(x + i, td_v16_round_f16(td_v16_load(x + i)));
}

/* H(z) * svh in place */
static void rotate_out(const td_exl3 *w, float *z)
{
    td_hadamard128_blocks(z, (size_t)w->n, TD_HADAMARD_SCALE);
    scale_f16(z, w->svh, w->n);
}

static const group *group_of(const experts_job *job, int pick)
{
    const group *g = job->groups;
    while (pick >= g->first + g->n) g++;
    return g;
}

static void load_inputs(void *ctx, int thread, int begin, int end)
{
    const experts_job *job = (const experts_job *)ctx;
    const td_experts *e = job->a->experts;
    size_t dim = (size_t)e->dim;
    (void)thread;
    for (int p = begin; p < end; p++) {
        float *x = input_of(job, 0, p);
        td_load_act(job->dev, job->a->x, (size_t)(job->pick[p] / job->a->top_k) * dim, x, dim);
        if (!e->exl3) continue; /* gate and up read the same row */
        const group *g = group_of(job, p);
        memcpy(input_of(job, 1, p), x, dim * sizeof *x);
        rotate_in(e->gate_x + g->expert, x);
        rotate_in(e->up_x + g->expert, input_of(job, 1, p));
    }
}

/* y[r][16 o ..] = x W for one panel: decoded (or unpacked) a block of inputs at a time, used for all rows. */
static void panel_exl3(const td_exl3 *w, int panel, int rows, const float *x, size_t ldx, float *y, size_t ldy)
{
    float block[TD_K_BLOCK * TD_PANEL];
    for (int r = 0; r < rows; r++) td_v16_store(y + (size_t)r * ldy, td_v16_splat(0.0f));
    for (int k = 0; k < w->k; k += TD_K_BLOCK) {
        int n = w->k - k < TD_K_BLOCK ? w->k - k : TD_K_BLOCK;
        td_exl3_panel_f32(w, panel, k, k + n, block);
        td_tile_rows(rows, x + k, ldx, block, TD_PANEL, n, y, ldy);
    }
}

static void panel_of(const td_exl3 *packed, const td_weight *plain, int panel, int rows, const float *x, size_t ldx,
                     float *y, size_t ldy)
{
    float unpacked[TD_K_BLOCK * TD_PANEL];
    if (packed)
        panel_exl3(packed, panel, rows, x, ldx, y + panel * TD_PANEL, ldy);
    else
        td_panels(TD_PANEL_BF16, rows, x, ldx, td_panel_at(plain, panel), td_panel_bytes(TD_W_BF16, plain->in),
                  plain->in, 1, y + panel * TD_PANEL, ldy, unpacked);
}

/* Items: groups x panels of gate, then of up. */
static void gate_up_panels(void *ctx, int thread, int begin, int end)
{
    const experts_job *job = (const experts_job *)ctx;
    const td_experts *e = job->a->experts;
    int panels = e->width / TD_PANEL;
    size_t dim = (size_t)e->dim, width = (size_t)e->width;
    (void)thread;
    for (int i = begin; i < end; i++) {
        const group *g = job->groups + i / (2 * panels);
        int up = i / panels % 2, expert = g->expert;
        const td_exl3 *packed = e->exl3 ? (up ? e->up_x : e->gate_x) + expert : NULL;
        const td_weight *plain = e->exl3 ? NULL : (up ? e->up : e->gate) + expert;
        panel_of(packed, plain, i % panels, g->n, input_of(job, e->exl3 ? up : 0, g->first), dim,
                 job->z + (size_t)g->first * 2 * width + (size_t)up * width, 2 * width);
    }
}

static void middles(void *ctx, int thread, int begin, int end)
{
    const experts_job *job = (const experts_job *)ctx;
    const td_experts *e = job->a->experts;
    size_t width = (size_t)e->width;
    (void)thread;
    for (int p = begin; p < end; p++) {
        float *gate = job->z + (size_t)p * 2 * width, *up = gate + width, *mid = job->mid + (size_t)p * width;
        int expert = group_of(job, p)->expert;
        if (e->exl3) {
            rotate_out(e->gate_x + expert, gate);
            rotate_out(e->up_x + expert, up);
        }
        td_round_act(job->dev, gate, 2 * width);
        td_swiglu_row(job->dev, gate, up, width, job->a->limit, mid);
        if (e->exl3) rotate_in(e->down_x + expert, mid);
    }
}

/* The x of gate is no longer needed: it takes the outputs of down, so that a panel writes rows beside each other. */
static void down_panels(void *ctx, int thread, int begin, int end)
{
    const experts_job *job = (const experts_job *)ctx;
    const td_experts *e = job->a->experts;
    int panels = e->dim / TD_PANEL;
    (void)thread;
    for (int i = begin; i < end; i++) {
        const group *g = job->groups + i / panels;
        panel_of(e->exl3 ? e->down_x + g->expert : NULL, e->exl3 ? NULL : e->down + g->expert, i % panels, g->n,
                 job->mid + (size_t)g->first * (size_t)e->width, (size_t)e->width, input_of(job, 0, g->first),
                 (size_t)e->dim);
    }
}

static void finish_picks(void *ctx, int thread, int begin, int end)
{
    const experts_job *job = (const experts_job *)ctx;
    const td_experts *e = job->a->experts;
    (void)thread;
    for (int p = begin; p < end; p++) {
        float *y = input_of(job, 0, p);
        if (e->exl3) rotate_out(e->down_x + group_of(job, p)->expert, y);
        memcpy(job->output + (size_t)job->pick[p] * (size_t)e->dim, y, (size_t)e->dim * sizeof *y);
    }
}

static void run_batch(experts_job *job, int n_picks)
{
    const td_experts *e = job->a->experts;
    double rotate = e->exl3 ? 16.0 : 2.0, rows = (double)n_picks / job->n_groups;
    td_cpu_for(job->dev, n_picks, rotate * e->dim, load_inputs, job);
    td_cpu_for(job->dev, job->n_groups * 2 * (e->width / TD_PANEL), (rows + 2.0) * e->dim * TD_PANEL, gate_up_panels,
               job);
    td_cpu_for(job->dev, n_picks, 2.0 * rotate * e->width, middles, job);
    td_cpu_for(job->dev, job->n_groups * (e->dim / TD_PANEL), (rows + 2.0) * e->width * TD_PANEL, down_panels, job);
    td_cpu_for(job->dev, n_picks, rotate * e->dim, finish_picks, job);
}

/* y = sum over picks in order of weight * output, then the shared expert. */
static void add_rows(void *ctx, int thread, int begin, int end)
{
    const experts_job *job = (const experts_job *)ctx;
    const td_experts_args *a = job->a;
    size_t dim = (size_t)a->experts->dim;
    (void)thread;
    for (size_t r = (size_t)begin; r < (size_t)end; r++) {
        float *y = a->y + r * dim;
        const float *shared = a->shared ? a->shared + r * dim : NULL;
        for (size_t d = 0; d < dim; d += TD_LANES) {
            td_v16 sum = td_v16_splat(0.0f);
            for (size_t k = r * (size_t)a->top_k; k < (r + 1) * (size_t)a->top_k; k++) {
                if (a->ids[k] < 0 || a->ids[k] >= a->experts->n_experts) continue;
                sum = td_v16_fma(td_v16_splat(a->weights[k]), td_v16_load(job->output + k * dim + d), sum);
            }
            td_v16_store(y + d, shared ? td_v16_add(sum, td_v16_load(shared + d)) : sum);
        }
    }
}

static int sort_picks(experts_job *job)
{
    const td_experts_args *a = job->a;
    int n_experts = a->experts->n_experts, picks = a->n_rows * a->top_k;
    memset(job->start, 0, ((size_t)n_experts + 1) * sizeof *job->start);
    for (int i = 0; i < picks; i++)
        if (a->ids[i] >= 0 && a->ids[i] < n_experts) job->start[a->ids[i] + 1]++;
    for (int e = 0; e < n_experts; e++) job->start[e + 1] += job->start[e];
    int n = job->start[n_experts];
    for (int i = picks - 1; i >= 0; i--) /* from the back, so that start[e + 1] ends as the first of e */
        if (a->ids[i] >= 0 && a->ids[i] < n_experts) job->order[--job->start[a->ids[i] + 1]] = i;
    return n;
}

static void run_batches(experts_job *job, int n)
{
    for (int at = 0; at < n;) {
        int filled = 0;
        job->n_groups = 0;
        job->pick = job->order + at;
        while (at + filled < n && filled < BATCH) {
            int expert = job->a->ids[job->order[at + filled]];
            int end = expert + 2 <= job->a->experts->n_experts ? job->start[expert + 2] : n;
            int take = end - at - filled < BATCH - filled ? end - at - filled : BATCH - filled;
            job->groups[job->n_groups++] = (group){ expert, filled, take };
            filled += take;
        }
        run_batch(job, filled);
        at += filled;
    }
}

static bool shapes_fit(const td_cpu_dev *dev, const td_experts_args *a)
{
    const td_experts *e = a->experts;
    int unit = e->exl3 ? TD_EXL3_BLOCK : TD_PANEL;
    return a->n_rows >= 0 && a->n_rows <= dev->limits.rows && a->top_k >= 1 && a->top_k <= dev->limits.top_k &&
           e->n_experts >= 1 && e->n_experts <= dev->limits.n_experts && e->dim >= unit && e->dim <= dev->limits.dim &&
           e->dim % unit == 0 && e->width >= unit && e->width <= dev->limits.expert_width && e->width % unit == 0;
}

td_status td_cpu_experts(td_dev *dev, const td_experts_args *a)
{
    td_cpu_dev *cpu = td_cpu(dev);
    if (!shapes_fit(cpu, a)) return TD_EINVAL;
    experts_job job = { .dev = cpu, .a = a };
    td_arena arena;
    td_cpu_scratch(cpu, -1, &arena);
    carve(&arena, cpu->limits.rows, cpu->limits.top_k, cpu->limits.dim, cpu->limits.expert_width, cpu->limits.n_experts,
          &job);
    run_batches(&job, sort_picks(&job));
    td_cpu_for(cpu, a->n_rows, (double)a->experts->dim * (a->top_k + 1), add_rows, &job);
    return TD_OK;
}
