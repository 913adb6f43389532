/* Hyper-connections: leave one site, enter the next, a row at a time. Orders of summation: docs/arithmetic.md. */
#include "ops/hyper.h"
#include "ops/cpu/cpu.h"
#include "ops/math.h"
#include "ops/simd.h"

enum {
    S = TD_STREAMS,
    MIXES = 2 * S + S * S, /* pre 0..3, post 4..7, comb 8..23 */
    ROWS = 3               /* rows that share the loads of fn, which does not fit the first cache */
};

typedef struct own_scratch {
    float *x; /* [ROWS][4][dim] streams */
    float *b; /* [dim] the collapsed row */
} own_scratch;

static void carve(td_arena *arena, int dim, own_scratch *s)
{
    s->x = td_take_f32(arena, (size_t)ROWS * S * (size_t)dim);
    s->b = td_take_f32(arena, (size_t)dim);
}

size_t td_cpu_hyper_own_bytes(const td_dev_limits *limits)
{
    td_arena arena;
    own_scratch s;
    td_arena_init_fixed(&arena, NULL, SIZE_MAX);
    carve(&arena, limits->dim, &s);
    return arena.used_bytes;
}

typedef struct hyper_job {
    td_cpu_dev *dev;
    const td_hyper_args *a;
} hyper_job;

/* X_s = act( post_s b + (((C_0s X_0 + C_1s X_1) + C_2s X_2) + C_3s X_3) ) */
static void leave(const hyper_job *job, int row, float *streams)
{
    const td_hyper_args *a = job->a;
    size_t dim = (size_t)a->dim;
    const float *p0 = a->partials + (size_t)row * dim, *p1 = p0 + (size_t)a->n_rows * dim;
    td_v16 post[S], c[S * S];
    for (int k = 0; k < S; k++) post[k] = td_v16_splat(a->post[(size_t)row * S + (size_t)k]);
    for (int k = 0; k < S * S; k++) c[k] = td_v16_splat(a->comb[(size_t)row * S * S + (size_t)k]);
    for (size_t d = 0; d < dim; d += TD_LANES) {
        td_v16 b = td_v16_add(td_v16_load(p0 + d), td_v16_load(p1 + d)), x[S];
        if (!job->dev->base.exact_fp32) b = td_v16_round_bf16(b);
        for (int k = 0; k < S; k++) x[k] = td_v16_load(streams + (size_t)k * dim + d);
        for (int k = 0; k < S; k++) {
            td_v16 y = td_v16_mul(c[k], x[0]);
            for (int i = 1; i < S; i++) y = td_v16_add(y, td_v16_mul(c[S * i + k], x[i]));
            y = td_v16_add(td_v16_mul(post[k], b), y);
            if (!job->dev->base.exact_fp32) y = td_v16_round_bf16(y);
            td_v16_store(streams + (size_t)k * dim + d, y);
        }
    }
    td_store_act(job->dev, a->x, (size_t)row * S * dim, streams, S * dim);
}

/* m_k = rms * sum_c fn[k][c] x[c]: 16 lanes and a tree each; rows x columns sums at once, whatever that is. */
TD_INLINE void mix_tile(int rows, int columns, const float *fn, const float *x, size_t n, float (*m)[MIXES])
{
    td_v16 acc[6];
    TD_UNROLL
    for (int t = 0; t < rows * columns; t++) acc[t] = td_v16_splat(0.0f);
    for (size_t c = 0; c < n; c += TD_LANES) {
        td_v16 fc[4];
        TD_UNROLL
        for (int k = 0; k < columns; k++) fc[k] = td_v16_load(fn + (size_t)k * n + c);
        TD_UNROLL
        for (int r = 0; r < rows; r++) {
            td_v16 xc = td_v16_load(x + (size_t)r * n + c);
            TD_UNROLL
            for (int k = 0; k < columns; k++) acc[r * columns + k] = td_v16_fma(fc[k], xc, acc[r * columns + k]);
        }
    }
    TD_UNROLL
    for (int t = 0; t < rows * columns; t++) m[t / columns][t % columns] = td_v16_sum(acc[t]);
}

static void mixes(const td_hyper_args *a, int rows, const float *x, float (*m)[MIXES])
{
    size_t n = (size_t)S * (size_t)a->dim;
    float sums[ROWS][MIXES];
    for (int k = 0, columns; k < MIXES; k += columns) {
        const float *fn = a->fn + (size_t)k * n;
        columns = rows == 3 ? 2 : rows == 2 ? 3 : 4;
        if (rows == 3)
            mix_tile(3, 2, fn, x, n, sums);
        else if (rows == 2)
            mix_tile(2, 3, fn, x, n, sums);
        else
            mix_tile(1, 4, fn, x, n, sums);
        for (int r = 0; r < rows; r++) memcpy(m[r] + k, sums[r], (size_t)columns * sizeof(float));
    }
    for (int r = 0; r < rows; r++) {
        float rms = 1.0f / sqrtf(td_dot(x + (size_t)r * n, x + (size_t)r * n, n) / (float)n + a->rms_eps);
        for (int k = 0; k < MIXES; k++) m[r][k] *= rms;
    }
}

/* c[i][j] /= ((c[0][j] + c[1][j]) + c[2][j]) + c[3][j] + eps: columns. Rows: the same on the transpose. */
static void normalise_columns(td_v4 c[S], float eps)
{
    td_v4 sum = ((c[0] + c[1]) + c[2]) + c[3] + (td_v4){ eps, eps, eps, eps };
    for (int i = 0; i < S; i++) c[i] /= sum;
}

static void sinkhorn(const td_hyper_args *a, const float *logits, float *comb)
{
    td_v4 c[S];
    for (int i = 0; i < S; i++) {
        const float *l = logits + S * i;
        float max = l[0], e[S], sum = 0.0f;
        for (int j = 1; j < S; j++) max = l[j] > max ? l[j] : max;
        for (int j = 0; j < S; j++) sum += e[j] = td_expf(l[j] - max);
        for (int j = 0; j < S; j++) c[i][j] = e[j] / sum + a->hc_eps;
    }
    normalise_columns(c, a->hc_eps);
    for (int t = 1; t < a->iters; t++) {
        td_v4_transpose(c);
        normalise_columns(c, a->hc_eps);
        td_v4_transpose(c);
        normalise_columns(c, a->hc_eps);
    }
    for (int i = 0; i < S; i++)
        for (int j = 0; j < S; j++) comb[S * i + j] = c[i][j];
}

static void enter(const hyper_job *job, int row, const float *x0, float *b, float m[MIXES])
{
    const td_hyper_args *a = job->a;
    size_t dim = (size_t)a->dim;
    float pre[S];
    for (int k = 0; k < MIXES; k++) m[k] = m[k] * a->scale[k < S ? 0 : k < 2 * S ? 1 : 2] + a->base[k];
    for (int k = 0; k < S; k++) {
        pre[k] = td_sigmoidf(m[k]) + a->hc_eps;
        a->post[(size_t)row * S + (size_t)k] = 2.0f * td_sigmoidf(m[S + k]);
    }
    sinkhorn(a, m + 2 * S, a->comb + (size_t)row * S * S);
    const float *x1 = x0 + dim, *x2 = x1 + dim, *x3 = x2 + dim;
    for (size_t d = 0; d < dim; d++) b[d] = ((pre[0] * x0[d] + pre[1] * x1[d]) + pre[2] * x2[d]) + pre[3] * x3[d];
    td_round_act(job->dev, b, dim);
    float inverse = 1.0f / sqrtf(td_dot(b, b, dim) / (float)dim + a->rms_eps);
    for (size_t d = 0; d < dim; d++) b[d] *= inverse;
    td_round_act(job->dev, b, dim);
    for (size_t d = 0; d < dim; d++) b[d] *= a->norm[d];
    td_store_act(job->dev, a->n, (size_t)row * dim, b, dim);
}

static void hyper_rows(void *ctx, int thread, int begin, int end)
{
    const hyper_job *job = (const hyper_job *)ctx;
    size_t n = (size_t)S * (size_t)job->a->dim;
    td_arena arena;
    own_scratch s;
    td_cpu_scratch(job->dev, thread, &arena);
    carve(&arena, job->a->dim, &s);
    for (int r = begin, rows; r < end; r += rows) {
        float m[ROWS][MIXES];
        rows = end - r < ROWS ? end - r : ROWS;
        td_load_act(job->dev, job->a->x, (size_t)r * n, s.x, (size_t)rows * n);
        for (int i = 0; job->a->partials && i < rows; i++) leave(job, r + i, s.x + (size_t)i * n);
        if (!job->a->fn) continue;
        mixes(job->a, rows, s.x, m);
        for (int i = 0; i < rows; i++) enter(job, r + i, s.x + (size_t)i * n, s.b, m[i]);
    }
}

td_status td_cpu_hyper(td_dev *dev, const td_hyper_args *a)
{
    td_cpu_dev *cpu = td_cpu(dev);
    if (a->n_rows < 0 || a->dim < 16 || a->dim % 16 || a->dim > cpu->limits.dim || a->iters < 0) return TD_EINVAL;
    hyper_job job = { cpu, a };
    td_cpu_for(cpu, a->n_rows, (double)(MIXES + 8) * S * a->dim, hyper_rows, &job);
    return TD_OK;
}
