/* Absorbed attention. Rows are taken up to 64 at a time through three passes: queries into latent space (a head's key
 * matrix, transposed), attention over latents, outputs back (its value matrix).
 *
 * The middle pass works on units: rows of one segment that see their whole prefix share the loads of latents, a row
 * with a selection is a unit of its own; heads are split in groups. A unit walks its token list in partials of 512
 * (list index, ascending), which are merged in order: s_t = scale * (q . l_t)             dot: td_dot, 16 lanes and a
 * tree m = max s_t;  p_t = exp(s_t - m) in fp32;  z = td_sum of p (padded with zeros);  v = sum_t p_t l_t, fma chain
 * over t (m, z, v) + (m', z', v'):  M = max;  z exp(m - M) + z' exp(m' - M);  v alike A row sums over its own tokens
 * only: what other rows of the unit see, and what lies behind its position, never enters. */
#include "ops/cpu/kv.h"
#include "ops/cpu/panel.h"
#include "ops/math.h"

enum {
    GROUP = 64,    /* rows in shared scratch */
    HEADS = 8,     /* heads of a unit */
    LINES = 64,    /* rows x heads of a unit at most */
    PARTIAL = 512, /* tokens */
    TILE = 32,     /* latents in fp32 at a time: 64 KiB */
    DIRECT = 2,    /* lines up to which latents are converted where they are used: a tile would not pay */
    WIDTH = TD_KV_WIDTH_MAX,
    HEAD_DIM_MAX = 512
};

typedef struct attend_job {
    td_cpu_dev *dev;
    const td_dsa_attend_args *a;
    int row0, rows; /* the group */
    int n_units, head_groups;
    int32_t *unit; /* [n_units + 1] first row of each, in the group */
    float *q;      /* [rows][n_heads][width] absorbed queries, later the attended latents */
} attend_job;

static void carve_shared(td_arena *arena, int n_heads, attend_job *job)
{
    job->q = td_take_f32(arena, (size_t)GROUP * (size_t)n_heads * WIDTH);
    job->unit = td_take_i32(arena, GROUP + 1);
}

size_t td_cpu_attend_shared_bytes(const td_dev_limits *limits)
{
    td_arena arena;
    attend_job job;
    td_arena_init_fixed(&arena, NULL, SIZE_MAX);
    carve_shared(&arena, limits->n_heads, &job);
    return arena.used_bytes;
}

typedef struct own_scratch {
    float *tile;   /* [TILE][width] latents */
    float *score;  /* [LINES][PARTIAL] scores, then p */
    float *part;   /* [LINES][width] the partial's v */
    float *vector; /* [LINES][width] merged v */
    float *x;      /* [GROUP][HEAD_DIM_MAX] one head's rows */
    float *unpacked;
    const uint8_t **row; /* [PARTIAL] stored rows of the partial's tokens */
    float *row_scale;    /* [PARTIAL] and their scales (fp8) */
} own_scratch;

static void carve_own(td_arena *arena, own_scratch *s)
{
    s->tile = td_take_f32(arena, TILE * WIDTH);
    s->score = td_take_f32(arena, LINES * PARTIAL);
    s->part = td_take_f32(arena, LINES * WIDTH);
    s->vector = td_take_f32(arena, LINES * WIDTH);
    s->x = td_take_f32(arena, GROUP * HEAD_DIM_MAX);
    s->unpacked = td_take_f32(arena, TD_K_BLOCK * TD_PANEL);
    s->row = (const uint8_t **)td_arena_take(arena, PARTIAL * sizeof *s->row, 64);
    s->row_scale = td_take_f32(arena, PARTIAL);
}

size_t td_cpu_attend_own_bytes(void)
{
    td_arena arena;
    own_scratch s;
    td_arena_init_fixed(&arena, NULL, SIZE_MAX);
    carve_own(&arena, &s);
    return arena.used_bytes;
}

/* Packed kv_b of a head: Wk^T as panels over the latent ([kv_lora / 16][k_dim][16]), then Wv ([v_dim /
 * 16][kv_lora][16]). */
static size_t head_values(const td_kv_b *w)
{
    return (size_t)(w->k_dim + w->v_dim) * (size_t)w->kv_lora;
}

static const uint8_t *key_panels(const td_kv_b *w, int head)
{
    return (const uint8_t *)w->data + (size_t)head * head_values(w) * sizeof(td_bf16);
}

static const uint8_t *value_panels(const td_kv_b *w, int head)
{
    return key_panels(w, head) + (size_t)w->k_dim * (size_t)w->kv_lora * sizeof(td_bf16);
}

static bool kv_b_fits(const td_kv_b *w)
{
    return w->n_heads >= 0 && w->k_dim >= 16 && w->k_dim <= HEAD_DIM_MAX && w->k_dim % 16 == 0 && w->v_dim >= 16 &&
           w->v_dim <= HEAD_DIM_MAX && w->v_dim % 16 == 0 && w->kv_lora >= 16 && w->kv_lora <= WIDTH &&
           w->kv_lora % 16 == 0;
}

size_t td_cpu_kv_b_bytes(const td_dev *dev, int n_heads, int k_dim, int v_dim, int kv_lora)
{
    (void)dev;
    return (size_t)n_heads * (size_t)(k_dim + v_dim) * (size_t)kv_lora * sizeof(td_bf16);
}

td_status td_cpu_kv_b_fill(td_dev *dev, const td_kv_b *w, const td_bf16 *src)
{
    (void)dev;
    if (!kv_b_fits(w)) return TD_EINVAL;
    size_t width = (size_t)w->kv_lora;
    for (int h = 0; h < w->n_heads; h++) {
        const td_bf16 *rows = src + (size_t)h * head_values(w);
        td_bf16 *keys = (td_bf16 *)w->data + (size_t)h * head_values(w), *values = keys + (size_t)w->k_dim * width;
        for (int d = 0; d < w->k_dim; d++, rows += width)
            for (int c = 0; c < w->kv_lora; c++)
                keys[(size_t)(c / 16) * (size_t)w->k_dim * 16 + td_panel_index(d, c % 16)] = rows[c];
        for (int d = 0; d < w->v_dim; d++, rows += width)
            for (int c = 0; c < w->kv_lora; c++)
                values[(size_t)(d / 16) * width * 16 + td_panel_index(c, d % 16)] = rows[c];
    }
    return TD_OK;
}

/* First pass, a head an item: q = act(Wk^T q). */
static void absorb(void *ctx, int thread, int begin, int end)
{
    const attend_job *job = (const attend_job *)ctx;
    const td_dsa_attend_args *a = job->a;
    size_t k_dim = (size_t)a->kv_b.k_dim, width = (size_t)a->kv_b.kv_lora, ld = (size_t)a->kv_b.n_heads * width;
    td_arena arena;
    own_scratch s;
    td_cpu_scratch(job->dev, thread, &arena);
    carve_own(&arena, &s);
    for (int h = begin; h < end; h++) {
        for (int r = 0; r < job->rows; r++)
            td_load_act(job->dev, a->q, (size_t)(job->row0 + r) * a->q_stride + (size_t)h * k_dim,
                        s.x + (size_t)r * k_dim, k_dim);
        float *q = job->q + (size_t)h * width;
        td_panels(TD_PANEL_BF16, job->rows, s.x, k_dim, key_panels(&a->kv_b, h), k_dim * 32, (int)k_dim,
                  (int)width / 16, q, ld, s.unpacked);
        for (int r = 0; r < job->rows; r++) td_round_act(job->dev, q + (size_t)r * ld, width);
    }
}

/* Last pass: o = act(Wv ol). */
static void project(void *ctx, int thread, int begin, int end)
{
    const attend_job *job = (const attend_job *)ctx;
    const td_dsa_attend_args *a = job->a;
    size_t v_dim = (size_t)a->kv_b.v_dim, width = (size_t)a->kv_b.kv_lora, heads = (size_t)a->kv_b.n_heads;
    td_arena arena;
    own_scratch s;
    td_cpu_scratch(job->dev, thread, &arena);
    carve_own(&arena, &s);
    for (int h = begin; h < end; h++) {
        td_panels(TD_PANEL_BF16, job->rows, job->q + (size_t)h * width, heads * width, value_panels(&a->kv_b, h),
                  width * 32, (int)width, (int)v_dim / 16, s.x, v_dim, s.unpacked);
        for (int r = 0; r < job->rows; r++)
            td_store_act(job->dev, a->o, ((size_t)(job->row0 + r) * heads + (size_t)h) * v_dim, s.x + (size_t)r * v_dim,
                         v_dim);
    }
}

/* A unit's tokens: count tokens of its last row; token(i) is list index i. */
typedef struct unit {
    const attend_job *job;
    int row0, rows, head0, heads; /* row0 in the window */
    int slot;
    const int32_t *list; /* NULL: the whole prefix */
    int n_listed;        /* pools in list */
    float max[LINES], sum[LINES];
} unit;

static int64_t token_count(const unit *u, int row)
{
    int64_t seen = (int64_t)u->job->a->window->pos[row] + 1;
    return u->list ? (int64_t)u->n_listed * TD_POOL + seen % TD_POOL : seen;
}

static int64_t token_at(const unit *u, int64_t i)
{
    if (!u->list) return i;
    if (i < (int64_t)u->n_listed * TD_POOL) return (int64_t)u->list[i / TD_POOL] * TD_POOL + i % TD_POOL;
    int64_t seen = (int64_t)u->job->a->window->pos[u->row0] + 1;
    return seen - seen % TD_POOL + i - (int64_t)u->n_listed * TD_POOL;
}

/* Where the partial's latents are. */
static void find_rows(const unit *u, int64_t first, int n, own_scratch *s)
{
    const td_dsa_cache *cache = &u->job->a->cache;
    size_t bytes = td_kv_row_bytes(&u->job->dev->base, cache->format, cache->kv_lora);
    for (int t = 0; t < n; t++) {
        int64_t row = td_kv_latent_row(cache, u->slot, token_at(u, first + t));
        s->row[t] = (const uint8_t *)cache->latents + (size_t)row * bytes;
        s->row_scale[t] = cache->format == TD_KV_FP8 ? td_kv_scale(s->row[t], cache->kv_lora) : 1.0f;
    }
}

static void load_tile(const unit *u, int t0, int n, own_scratch *s)
{
    const td_dsa_cache *cache = &u->job->a->cache;
    size_t width = (size_t)cache->kv_lora;
    for (int t = 0; t < n; t++)
        td_kv_load(u->job->dev, cache->format, s->row[t0 + t], 0, cache->kv_lora, s->tile + (size_t)t * width);
}

static const float *query(const unit *u, int line)
{
    const td_dsa_attend_args *a = u->job->a;
    size_t row = (size_t)(u->row0 + line / u->heads - u->job->row0), head = (size_t)(u->head0 + line % u->heads);
    return u->job->q + (row * (size_t)a->kv_b.n_heads + head) * (size_t)a->kv_b.kv_lora;
}

/* score[t] = q . l_t for four latents: four times td_dot, sharing the loads of q. */
TD_INLINE void dot_four(const float *q, const float *l, size_t width, float *score)
{
    td_v16 acc[4] = { td_v16_splat(0.0f), td_v16_splat(0.0f), td_v16_splat(0.0f), td_v16_splat(0.0f) };
    for (size_t c = 0; c < width; c += TD_LANES) {
        td_v16 qc = td_v16_load(q + c);
        TD_UNROLL
        for (int t = 0; t < 4; t++) acc[t] = td_v16_fma(qc, td_v16_load(l + (size_t)t * width + c), acc[t]);
    }
    for (int t = 0; t < 4; t++) score[t] = td_v16_sum(acc[t]);
}

static void scores_tiled(const unit *u, int n, own_scratch *s)
{
    size_t width = (size_t)u->job->a->cache.kv_lora;
    for (int t0 = 0; t0 < n; t0 += TILE) {
        int m = n - t0 < TILE ? n - t0 : TILE;
        load_tile(u, t0, m, s);
        for (int line = 0; line < u->rows * u->heads; line++) {
            const float *q = query(u, line);
            float *score = s->score + line * PARTIAL + t0;
            int t = 0;
            for (; t + 4 <= m; t += 4) dot_four(q, s->tile + (size_t)t * width, width, score + t);
            for (; t < m; t++) score[t] = td_dot(q, s->tile + (size_t)t * width, width);
        }
    }
}

/* The same sums from the stored rows: `tokens` dots share the loads of q. */
TD_INLINE void dots_direct(td_kv_kind kind, int tokens, const float *q, const uint8_t *const *row, const float *scale,
                           size_t width, float *score)
{
    td_v16 acc[4];
    TD_UNROLL
    for (int t = 0; t < tokens; t++) acc[t] = td_v16_splat(0.0f);
    for (size_t c = 0; c < width; c += TD_LANES) {
        td_v16 qc = td_v16_load(q + c);
        TD_UNROLL
        for (int t = 0; t < tokens; t++) acc[t] = td_v16_fma(qc, td_kv_values(kind, row[t], c, scale[t]), acc[t]);
    }
    TD_UNROLL
    for (int t = 0; t < tokens; t++) score[t] = td_v16_sum(acc[t]);
}

TD_INLINE void scores_direct(td_kv_kind kind, const float *q, int n, const own_scratch *s, size_t width, float *score)
{
    int t = 0;
    for (; t + 4 <= n; t += 4) dots_direct(kind, 4, q, s->row + t, s->row_scale + t, width, score + t);
    for (; t < n; t++) dots_direct(kind, 1, q, s->row + t, s->row_scale + t, width, score + t);
}

static void scores(const unit *u, int n, own_scratch *s)
{
    size_t width = (size_t)u->job->a->cache.kv_lora;
    if (u->rows * u->heads > DIRECT) {
        scores_tiled(u, n, s);
        return;
    }
    for (int line = 0; line < u->rows * u->heads; line++) {
        const float *q = query(u, line);
        float *score = s->score + line * PARTIAL;
        switch (td_kv_kind_of(u->job->dev, u->job->a->cache.format)) {
        case TD_KV_ROW_F32: scores_direct(TD_KV_ROW_F32, q, n, s, width, score); break;
        case TD_KV_ROW_BF16: scores_direct(TD_KV_ROW_BF16, q, n, s, width, score); break;
        default: scores_direct(TD_KV_ROW_FP8, q, n, s, width, score); break;
        }
    }
}

/* Scores of n tokens become p; the maximum and the sum. n >= 1. */
static void softmax(float *score, int n, float scale, float *max, float *sum)
{
    float m = -INFINITY;
    for (int t = 0; t < n; t++) {
        score[t] *= scale;
        m = score[t] > m ? score[t] : m;
    }
    if (m == -INFINITY) m = 0.0f; /* only NaN or -infinity: keep NaN, do not make it of infinities */
    for (int t = 0; t < n; t++) score[t] = td_expf(score[t] - m);
    int padded = (n + TD_LANES - 1) / TD_LANES * TD_LANES;
    for (int t = n; t < padded; t++) score[t] = 0.0f;
    *max = m;
    *sum = td_sum(score, (size_t)padded);
}

/* part = sum of p l: tokens that all rows of the unit have in one product, the last few row by row. */
static void weigh_tiled(const unit *u, int n, const int *n_row, own_scratch *s)
{
    int width = u->job->a->cache.kv_lora;
    memset(s->part, 0, (size_t)(u->rows * u->heads) * WIDTH * sizeof(float));
    for (int t0 = 0; t0 < n; t0 += TILE) {
        int m = n - t0 < TILE ? n - t0 : TILE, common = n_row[0] - t0; /* rows ascend: the first has the fewest */
        common = common < 0 ? 0 : common > m ? m : common;
        load_tile(u, t0, m, s);
        if (common)
            td_tile_matrix(u->rows * u->heads, s->score + t0, PARTIAL, s->tile, (size_t)width, common, width, s->part,
                           WIDTH);
        for (int r = 0; r < u->rows; r++) {
            int rest = n_row[r] - t0 - common, line = r * u->heads;
            rest = rest > m - common ? m - common : rest;
            if (rest > 0)
                td_tile_matrix(u->heads, s->score + line * PARTIAL + t0 + common, PARTIAL, s->tile + common * width,
                               (size_t)width, rest, width, s->part + line * WIDTH, WIDTH);
        }
    }
}

/* One line, `columns` times 16 values at a time over all tokens. */
TD_INLINE void column_direct(td_kv_kind kind, int columns, const float *p, int n, const own_scratch *s, size_t c,
                             float *part)
{
    td_v16 acc[4];
    TD_UNROLL
    for (int j = 0; j < columns; j++) acc[j] = td_v16_splat(0.0f);
    for (int t = 0; t < n; t++) {
        td_v16 pt = td_v16_splat(p[t]);
        TD_UNROLL
        for (int j = 0; j < columns; j++)
            acc[j] = td_v16_fma(pt, td_kv_values(kind, s->row[t], c + (size_t)j * TD_LANES, s->row_scale[t]), acc[j]);
    }
    TD_UNROLL
    for (int j = 0; j < columns; j++) td_v16_store(part + c + (size_t)j * TD_LANES, acc[j]);
}

TD_INLINE void weigh_direct(td_kv_kind kind, const float *p, int n, const own_scratch *s, size_t width, float *part)
{
    size_t c = 0;
    for (; c + 4 * TD_LANES <= width; c += 4 * TD_LANES) column_direct(kind, 4, p, n, s, c, part);
    for (; c < width; c += TD_LANES) column_direct(kind, 1, p, n, s, c, part);
}

static void weigh(const unit *u, int n, const int *n_row, own_scratch *s)
{
    size_t width = (size_t)u->job->a->cache.kv_lora;
    if (u->rows * u->heads > DIRECT) {
        weigh_tiled(u, n, n_row, s);
        return;
    }
    for (int line = 0; line < u->rows * u->heads; line++) {
        const float *p = s->score + line * PARTIAL;
        float *part = s->part + line * WIDTH;
        int tokens = n_row[line / u->heads];
        switch (td_kv_kind_of(u->job->dev, u->job->a->cache.format)) {
        case TD_KV_ROW_F32: weigh_direct(TD_KV_ROW_F32, p, tokens, s, width, part); break;
        case TD_KV_ROW_BF16: weigh_direct(TD_KV_ROW_BF16, p, tokens, s, width, part); break;
        default: weigh_direct(TD_KV_ROW_FP8, p, tokens, s, width, part); break;
        }
    }
}

static void merge(unit *u, int line, float max, float sum, bool first, own_scratch *s)
{
    float *v = s->vector + line * WIDTH;
    const float *part = s->part + line * WIDTH;
    int width = u->job->a->cache.kv_lora;
    if (first) {
        u->max[line] = max;
        u->sum[line] = sum;
        memcpy(v, part, (size_t)width * sizeof *v);
        return;
    }
    float m = max > u->max[line] ? max : u->max[line];
    float old = td_expf(u->max[line] - m), fresh = td_expf(max - m);
    u->max[line] = m;
    u->sum[line] = fmaf(sum, fresh, u->sum[line] * old);
    for (int c = 0; c < width; c++) v[c] = fmaf(part[c], fresh, v[c] * old);
}

static void attend_unit(unit *u, own_scratch *s)
{
    const td_dsa_attend_args *a = u->job->a;
    int64_t total = token_count(u, u->row0 + u->rows - 1);
    for (int64_t first = 0; first < total; first += PARTIAL) {
        int n = total - first < PARTIAL ? (int)(total - first) : PARTIAL, n_row[LINES];
        float max[LINES], sum[LINES];
        find_rows(u, first, n, s);
        scores(u, n, s);
        for (int r = 0; r < u->rows; r++) {
            int64_t left = token_count(u, u->row0 + r) - first;
            n_row[r] = left < 0 ? 0 : left < n ? (int)left : n;
            for (int line = r * u->heads; n_row[r] && line < (r + 1) * u->heads; line++)
                softmax(s->score + line * PARTIAL, n_row[r], a->scale, max + line, sum + line);
        }
        weigh(u, n, n_row, s);
        for (int line = 0; line < u->rows * u->heads; line++)
            if (n_row[line / u->heads]) merge(u, line, max[line], sum[line], first == 0, s);
    }
}

static void attend_units(void *ctx, int thread, int begin, int end)
{
    const attend_job *job = (const attend_job *)ctx;
    const td_dsa_attend_args *a = job->a;
    td_arena arena;
    own_scratch s;
    td_cpu_scratch(job->dev, thread, &arena);
    carve_own(&arena, &s);
    for (int i = begin; i < end; i++) {
        int index = i / job->head_groups, head0 = i % job->head_groups * HEADS, left = a->kv_b.n_heads - head0;
        unit u = { .job = job,
                   .row0 = job->row0 + job->unit[index],
                   .rows = job->unit[index + 1] - job->unit[index],
                   .head0 = head0,
                   .heads = left < HEADS ? left : HEADS };
        u.slot = a->window->segments[a->window->seg[u.row0]].slot;
        if (a->count[u.row0] >= 0) {
            u.list = a->list + (size_t)u.row0 * (size_t)a->top_pools;
            u.n_listed = a->count[u.row0] < a->top_pools ? a->count[u.row0] : a->top_pools;
        }
        attend_unit(&u, &s);
        for (int line = 0; line < u.rows * u.heads; line++) { /* this unit's queries are no longer read */
            float *ol = job->q + (query(&u, line) - job->q), *v = s.vector + line * WIDTH;
            for (int c = 0; c < a->cache.kv_lora; c++) ol[c] = v[c] / u.sum[line];
            td_round_act(job->dev, ol, (size_t)a->cache.kv_lora);
        }
    }
}

/* Cuts the group into units: neighbours of one segment that see everything, as many as LINES holds. */
static void cut_units(attend_job *job)
{
    const td_dsa_attend_args *a = job->a;
    int heads = a->kv_b.n_heads < HEADS ? a->kv_b.n_heads : HEADS, most = LINES / heads;
    job->n_units = 0;
    for (int r = 0, n; r < job->rows; r += n) {
        int row = job->row0 + r;
        job->unit[job->n_units++] = r;
        for (n = 1; a->count[row] < 0 && n < most && r + n < job->rows; n++)
            if (a->count[row + n] >= 0 || a->window->seg[row + n] != a->window->seg[row]) break;
    }
    job->unit[job->n_units] = job->rows;
}

td_status td_cpu_dsa_attend(td_dev *dev, const td_dsa_attend_args *a)
{
    td_cpu_dev *cpu = td_cpu(dev);
    if (!kv_b_fits(&a->kv_b) || a->kv_b.n_heads > cpu->limits.n_heads || a->kv_b.kv_lora != a->cache.kv_lora ||
        a->top_pools < 0 || !td_kv_window_fits(a->window, &a->cache))
        return TD_EINVAL;
    if (!a->kv_b.n_heads) return TD_OK;
    attend_job job = { .dev = cpu, .a = a, .head_groups = (a->kv_b.n_heads + HEADS - 1) / HEADS };
    td_arena arena;
    td_cpu_scratch(cpu, -1, &arena);
    carve_shared(&arena, cpu->limits.n_heads, &job);
    for (job.row0 = 0; job.row0 < a->window->n_rows; job.row0 += GROUP) {
        job.rows = a->window->n_rows - job.row0 < GROUP ? a->window->n_rows - job.row0 : GROUP;
        double head_work = (double)job.rows * a->kv_b.k_dim * a->kv_b.kv_lora;
        cut_units(&job);
        td_cpu_for(cpu, a->kv_b.n_heads, head_work, absorb, &job);
        td_cpu_for(cpu, job.n_units * job.head_groups, 1024.0 * PARTIAL, attend_units, &job);
        td_cpu_for(cpu, a->kv_b.n_heads, head_work, project, &job);
    }
    return TD_OK;
}
