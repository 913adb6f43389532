/* Which pools a row attends to. Rows of one segment are taken several at a time: the threads score ranges of pools
 * for all of them (pooled keys are loaded and transposed once), then pick each row's best. The pick is a radix
 * selection, so its cost is linear in the number of pools and ties are decided by number, never by how an algorithm
 * happens to move. */
#include "ops/cpu/kv.h"
#include "ops/cpu/panel.h"

enum {
    ROWS_MIN = 8, /* scored together, when the longest context bounds the scratch */
    ROWS_MAX = 32,
    SCORES = 1 << 20, /* scores in scratch: 4 MiB, more only for ROWS_MIN rows */
    POOLS = 16,       /* in a panel */
    HEADS_MAX = 64
};

typedef struct select_job {
    td_cpu_dev *dev;
    const td_dsa_select_args *a;
    int row0, rows, slot; /* the group: rows row0 .. of one segment, all with more pools than top_pools */
    int npool_max;
    int rows_most; /* of a group */
    size_t score_stride;
    float *q;      /* [rows][n_heads][128] */
    float *weight; /* [rows][n_heads] */
    float *score;  /* [rows][score_stride] */
} select_job;

static void carve(td_arena *arena, int heads, int64_t pools, select_job *job)
{
    size_t stride = ((size_t)pools + POOLS - 1) / POOLS * POOLS, rows = stride ? SCORES / stride : ROWS_MAX;
    rows = rows < ROWS_MIN ? ROWS_MIN : rows > ROWS_MAX ? ROWS_MAX : rows;
    job->score_stride = stride;
    job->rows_most = (int)rows;
    job->q = td_take_f32(arena, rows * (size_t)heads * TD_HEAD);
    job->weight = td_take_f32(arena, rows * (size_t)heads);
    job->score = td_take_f32(arena, rows * stride);
}

size_t td_cpu_select_shared_bytes(const td_dev_limits *limits)
{
    td_arena arena;
    select_job job;
    td_arena_init_fixed(&arena, NULL, SIZE_MAX);
    carve(&arena, limits->index_heads, limits->context_tokens / TD_POOL, &job);
    return arena.used_bytes;
}

/* s = sum_h w_h * max(0, 128^-1/2 q_h . K): the dot one fma chain over 128, heads ascending, one fma each. */
static void score_pools(void *ctx, int thread, int begin, int end)
{
    const select_job *job = (const select_job *)ctx;
    const td_dsa_select_args *a = job->a;
    int heads = a->n_heads;
    (void)thread;
    for (int p0 = begin * POOLS; p0 < end * POOLS; p0 += POOLS) {
        float key[POOLS * TD_HEAD] = { 0 }, panel[TD_HEAD * POOLS], dot[HEADS_MAX * POOLS];
        int n = job->npool_max - p0 < POOLS ? job->npool_max - p0 : POOLS;
        for (int p = 0; p < n; p++)
            td_kv_load(job->dev, a->cache.format, a->cache.pools, td_kv_pool_row(&a->cache, job->slot, p0 + p), TD_HEAD,
                       key + p * TD_HEAD);
        td_transpose16(key, TD_HEAD, TD_HEAD, panel, POOLS);
        for (int r = 0; r < job->rows; r++) {
            memset(dot, 0, (size_t)heads * POOLS * sizeof(float));
            td_tile_rows(heads, job->q + (size_t)r * (size_t)heads * TD_HEAD, TD_HEAD, panel, POOLS, TD_HEAD, dot,
                         POOLS);
            float s[POOLS] = { 0 };
            for (int h = 0; h < heads; h++) {
                float w = job->weight[(size_t)r * (size_t)heads + (size_t)h];
                for (int p = 0; p < POOLS; p++) {
                    float d = 0.08838834764831845f * dot[h * POOLS + p];
                    s[p] = fmaf(w, d > 0.0f ? d : 0.0f, s[p]);
                }
            }
            memcpy(job->score + (size_t)r * job->score_stride + (size_t)p0, s, sizeof s);
        }
    }
}

/* Order of floats as order of integers; +0 and -0 are one value, NaN is below all. */
static uint32_t rank_of(float score)
{
    if (score != score) return 0;
    uint32_t bits = td_f32_bits(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The top-th largest of rank_of(score[0..n)); *ties = how many equal to it belong to the top. 1 <= top <= n. */
static uint32_t threshold(const float *score, int n, int top, int *ties)
{
    static const struct {
        int shift, bits;
    } digit[3] = { { 21, 11 }, { 10, 11 }, { 0, 10 } };
    uint32_t prefix = 0, mask = 0;
    for (int d = 0; d < 3; d++) {
        uint32_t count[1 << 11] = { 0 }, low = (1u << digit[d].bits) - 1;
        for (int i = 0; i < n; i++) {
            uint32_t rank = rank_of(score[i]);
            if ((rank & mask) == prefix) count[rank >> digit[d].shift & low]++;
        }
        uint32_t value = low;
        while (count[value] < (uint32_t)top) top -= (int)count[value--];
        prefix |= value << digit[d].shift;
        mask |= low << digit[d].shift;
    }
    *ties = top;
    return prefix;
}

static void pick_rows(void *ctx, int thread, int begin, int end)
{
    const select_job *job = (const select_job *)ctx;
    const td_dsa_select_args *a = job->a;
    (void)thread;
    for (int r = begin; r < end; r++) {
        const float *score = job->score + (size_t)r * job->score_stride;
        int row = job->row0 + r, npool = (a->window->pos[row] + 1) / TD_POOL, ties;
        uint32_t least = threshold(score, npool, a->top_pools, &ties);
        int32_t *list = a->list + (size_t)row * (size_t)a->top_pools;
        for (int p = 0, n = 0; p < npool && n < a->top_pools; p++) {
            uint32_t rank = rank_of(score[p]);
            if (rank > least || (rank == least && ties-- > 0)) list[n++] = p;
        }
        a->count[row] = a->top_pools;
    }
}

static void select_group(select_job *job)
{
    const td_dsa_select_args *a = job->a;
    size_t heads = (size_t)a->n_heads;
    float scale = 1.0f / sqrtf((float)a->n_heads);
    td_load_act(job->dev, a->q, (size_t)job->row0 * heads * TD_HEAD, job->q, (size_t)job->rows * heads * TD_HEAD);
    for (size_t i = 0; i < (size_t)job->rows * heads; i++)
        job->weight[i] = a->weights[(size_t)job->row0 * heads + i] * scale;
    td_cpu_for(job->dev, (job->npool_max + POOLS - 1) / POOLS, (double)job->rows * a->n_heads * TD_HEAD * POOLS,
               score_pools, job);
    td_cpu_for(job->dev, job->rows, 4.0 * job->npool_max, pick_rows, job);
}

td_status td_cpu_dsa_select(td_dev *dev, const td_dsa_select_args *a)
{
    const td_window *window = a->window;
    td_cpu_dev *cpu = td_cpu(dev);
    if (a->n_heads < 1 || a->n_heads > cpu->limits.index_heads || a->n_heads > HEADS_MAX || a->top_pools < 1 ||
        !td_kv_window_fits(window, &a->cache) || window->host_pos_max >= cpu->limits.context_tokens)
        return TD_EINVAL;
    select_job job = { .dev = cpu, .a = a };
    td_arena arena;
    td_cpu_scratch(cpu, -1, &arena);
    carve(&arena, a->n_heads, cpu->limits.context_tokens / TD_POOL, &job);
    for (int r = 0; r < window->n_rows; r += job.rows) {
        job.rows = 1;
        a->count[r] = -1;
        if ((window->pos[r] + 1) / TD_POOL <= a->top_pools) continue;
        while (job.rows < job.rows_most && r + job.rows < window->n_rows && window->seg[r + job.rows] == window->seg[r])
            job.rows++;
        job.row0 = r;
        job.slot = window->segments[window->seg[r]].slot;
        job.npool_max = (window->pos[r + job.rows - 1] + 1) / TD_POOL;
        select_group(&job);
    }
    return TD_OK;
}
