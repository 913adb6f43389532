/* sample: what two shards say of a row is the same byte for byte, whatever the row and the request look like, with
 * tables and answers on the device or in memory of the host; and what is drawn from it is the rule's token
 * (td_sample_reference over the whole row). */
#include "opcheck.h"

#include "engine/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SHARDS = 2, ROWS = 24, MASKS = 4, JOBS_MAX = TD_WINDOW_MAX };

/* Memory of both sides; the GPU's may be the host's. */
typedef struct table {
    oc_buf *buf;
    void *mapped; /* NULL: on the device */
} table;

typedef struct rig {
    oc_ctx *oc;
    int columns, n_ids; /* of shard 0; of both */
    int mask_words;
    bool mapped;
    int list;       /* length of the first lists; 0: all kinds */
    oc_buf *logits; /* [ROWS][SHARDS * columns] */
    table allowed, jobs;
    int n_jobs;
    td_sample_job *job; /* the CPU's side of jobs */
} rig;

static table new_table(rig *r, const char *name, size_t n_bytes)
{
    td_error err;
    table t = { oc_new(r->oc, name, n_bytes), NULL };
    if (r->mapped && td_dev_host_alloc(r->oc->dev[OC_GPU], n_bytes, &t.mapped, &err) != TD_OK)
        oc_give_up(r->oc, name, &err);
    if (t.mapped) memset(t.mapped, 0xff, n_bytes);
    return t;
}

static void push(rig *r, table *t)
{
    oc_push(r->oc, t->buf);
    if (t->mapped) memcpy(t->mapped, t->buf->cpu, t->buf->n_bytes);
}

static void *at(const table *t, int side)
{
    return side == OC_GPU && t->mapped ? t->mapped : oc_at(t->buf, side);
}

/* The GPU's content, malloced. */
static unsigned char *content(rig *r, const table *t)
{
    unsigned char *copy = (unsigned char *)oc_pull(r->oc, t->buf);
    if (t->mapped) memcpy(copy, t->mapped, t->buf->n_bytes);
    return copy;
}

static void drop_table(rig *r, table *t)
{
    td_dev_host_free(r->oc->dev[OC_GPU], t->mapped, t->buf->n_bytes);
    t->mapped = NULL;
}

/* ---- rows and requests ---- */

static float hill(oc_ctx *oc)
{
    return oc_uniform(oc) + oc_uniform(oc) + oc_uniform(oc);
}

static void fill_row(oc_ctx *oc, float *z, int n, int kind)
{
    for (int i = 0; i < n; i++) {
        float x = hill(oc);
        switch (kind) {
        case 0: z[i] = 5.0f * x; break;                                         /* like a model's */
        case 1: z[i] = floorf(8.0f * x) / 4.0f; break;                          /* many equal */
        case 2: z[i] = i % 7 ? 1.5f : 2.0f; break;                              /* two values */
        case 3: z[i] = 1e-3f * x; break;                                        /* flat: everything is in the nucleus */
        case 4: z[i] = oc_below(oc, 5) ? -INFINITY : x; break;                  /* few that can be drawn */
        case 5: z[i] = i % 2 ? 0.0f : -0.0f; break;                             /* equal, though their bits differ */
        case 6: z[i] = oc_below(oc, n) < 2 ? NAN : x; break;                    /* not numbers */
        default: z[i] = 2.0f * x + (oc_below(oc, n) < 6 ? 20.0f : 0.0f); break; /* peaked */
        }
    }
}

/* 0: random, 1: nothing, 2: one id, 3: all but one. */
static void fill_masks(rig *r)
{
    uint32_t *words = (uint32_t *)(void *)r->allowed.buf->cpu;
    int n = r->mask_words, only = oc_below(r->oc, r->n_ids);
    for (int w = 0; w < n; w++) {
        words[w] = (uint32_t)oc_rand(r->oc);
        words[n + w] = words[2 * n + w] = 0;
        words[3 * n + w] = ~0u;
    }
    words[2 * n + only / 32] |= 1u << only % 32;
    words[3 * n + only / 32] &= ~(1u << only % 32);
    push(r, &r->allowed);
}

static td_sample_job random_job(oc_ctx *oc)
{
    static const double temperatures[] = { 0, 1e-6, 0.3, 1, 1, 2 }, top_ps[] = { 1, 0.95, 0.95, 0.5, 0.01, 1e-300 };
    static const double min_ps[] = { 0, 0, 0, 0.05, 0.7, 1 };
    static const int top_ks[] = { 0, 0, 0, 1, 40, 1000, 5000 };
    return (td_sample_job){ .params = { .temperature = temperatures[oc_below(oc, 6)],
                                        .top_p = top_ps[oc_below(oc, 6)],
                                        .min_p = min_ps[oc_below(oc, 6)],
                                        .top_k = top_ks[oc_below(oc, 7)],
                                        .seed = oc_rand(oc) },
                            .pos = oc_rand(oc) % 1000000,
                            .row = oc_below(oc, ROWS),
                            .mask = oc_below(oc, 2) ? -1 : oc_below(oc, MASKS),
                            .n_logprobs = oc_below(oc, 2) ? -1 : oc_below(oc, 21) };
}

/* ---- the operations ---- */

static td_sample_args args_of(const rig *r, int side, int shard)
{
    int first = shard * r->columns, n = r->n_ids - first;
    return (td_sample_args){ .n_jobs = r->n_jobs,
                             .n_columns = n < r->columns ? n : r->columns,
                             .first_id = first,
                             .logits = (const float *)oc_at(r->logits, side) + first,
                             .stride = SHARDS * (size_t)r->columns,
                             .allowed = (const uint32_t *)at(&r->allowed, side),
                             .mask_words = (size_t)r->mask_words,
                             .jobs = (const td_sample_job *)at(&r->jobs, side) };
}

static void compare(rig *r, const char *what, const table *t)
{
    unsigned char *gpu = content(r, t);
    oc_bits(r->oc, what, gpu, t->buf->cpu, t->buf->n_bytes);
    free(gpu);
}

static void run_maxima(rig *r, table *out)
{
    td_status status[OC_SIDES] = { TD_OK, TD_OK };
    push(r, &r->jobs);
    for (int side = 0; side < OC_SIDES; side++)
        for (int shard = 0; shard < SHARDS; shard++) {
            td_sample_args a = args_of(r, side, shard);
            a.maxima = (td_sample_max *)at(out, side) + shard * r->n_jobs;
            if (!status[side]) status[side] = r->oc->ops[side].sample_max(r->oc->dev[side], &a);
        }
    oc_ran(r->oc, status[OC_CPU], status[OC_GPU]);
    compare(r, "maxima", out);
}

static void run_summaries(rig *r, size_t shard_bytes, table *out)
{
    td_status status[OC_SIDES] = { TD_OK, TD_OK };
    int n_max = 0;
    for (int i = 0; i < r->n_jobs; i++) n_max = r->job[i].n > n_max ? r->job[i].n : n_max;
    push(r, &r->jobs);
    for (int side = 0; side < OC_SIDES; side++)
        for (int shard = 0; shard < SHARDS; shard++) {
            td_sample_args a = args_of(r, side, shard);
            a.n_max = n_max;
            a.summaries = (unsigned char *)at(out, side) + (size_t)shard * shard_bytes;
            if (!status[side]) status[side] = r->oc->ops[side].sample_summary(r->oc->dev[side], &a);
        }
    oc_ran(r->oc, status[OC_CPU], status[OC_GPU]);
    compare(r, "summaries", out);
}

/* ---- draws ---- */

/* Rows that no token can be drawn from leave; the others learn their top. */
static void settle_maxima(rig *r)
{
    table maxima = new_table(r, "maxima", SHARDS * (size_t)r->n_jobs * sizeof(td_sample_max));
    run_maxima(r, &maxima);
    td_sample_max *gpu = (td_sample_max *)(void *)content(r, &maxima);
    int kept = 0;
    for (int i = 0; i < r->n_jobs; i++) {
        td_sample_max shards[SHARDS] = { gpu[i], gpu[r->n_jobs + i] };
        td_sample_job job = r->job[i];
        if (td_sample_merge_max(shards, SHARDS, &job.top) == TD_OK) r->job[kept++] = job;
    }
    free(gpu);
    drop_table(r, &maxima);
    r->n_jobs = kept;
}

static void against_reference(rig *r, const td_sample_job *job, const td_sample_result *got)
{
    td_sample_result want;
    const float *z = (const float *)(const void *)r->logits->cpu + (size_t)job->row * SHARDS * (size_t)r->columns;
    const uint32_t *allowed = (const uint32_t *)(const void *)r->allowed.buf->cpu;
    td_sample_logits row = { z, r->n_ids, 0, job->mask < 0 ? NULL : allowed + job->mask * r->mask_words };
    oc_begin(r->oc, "token");
    if (td_sample_reference(&row, &job->params, job->pos, job->n_logprobs, &want) != TD_OK)
        oc_fail(r->oc, "row %d: the rule draws no token", job->row);
    else if (got->id != want.id || got->logprob != want.logprob || got->n_top != want.n_top)
        oc_fail(r->oc, "row %d: token %d, logprob %.17g of %d; the rule says %d, %.17g of %d", job->row, got->id,
                got->logprob, got->n_top, want.id, want.logprob, want.n_top);
}

/* Lists of the lengths that the engine asks for, or of others around the limits of the kernels. */
static int first_list(rig *r, const td_sample_job *job)
{
    static const int lengths[] = { 1, 2, 65, 1024, 3001, 4096, 4097, 1 << 20 };
    int n = r->list ? r->list : lengths[oc_below(r->oc, 8)];
    if (!r->list && oc_below(r->oc, 2)) n = td_sample_first_n(&job->params, job->n_logprobs, r->columns);
    return n < r->columns ? n : r->columns;
}

static void draw_rows(rig *r, int n_references)
{
    for (int i = 0; i < r->n_jobs; i++) r->job[i].n = first_list(r, &r->job[i]);
    while (r->n_jobs) {
        size_t shard_bytes = 0;
        for (int i = 0; i < r->n_jobs; i++) {
            r->job[i].out_bytes = shard_bytes;
            shard_bytes += td_sample_summary_bytes(r->job[i].n);
        }
        table out = new_table(r, "summaries", SHARDS * shard_bytes);
        run_summaries(r, shard_bytes, &out);
        unsigned char *gpu = content(r, &out);
        int kept = 0;
        for (int i = 0; i < r->n_jobs; i++) {
            td_sample_job job = r->job[i];
            const td_sample_summary *shards[SHARDS];
            td_sample_result result;
            for (int s = 0; s < SHARDS; s++)
                shards[s] = (const td_sample_summary *)(void *)(gpu + (size_t)s * shard_bytes + job.out_bytes);
            td_status status = td_sample_merge(shards, SHARDS, &job.params, job.pos, &job.top, job.n_logprobs, &result);
            if (status == TD_OK && n_references-- > 0) against_reference(r, &job, &result);
            if (status != TD_EAGAIN || job.n >= r->columns) continue;
            job.n = td_sample_next_n(job.n, r->columns);
            r->job[kept++] = job;
        }
        r->n_jobs = kept;
        free(gpu);
        drop_table(r, &out);
    }
}

static void check(oc_ctx *oc, int columns, int n_ids, int n_jobs, int n_references, bool mapped, int list)
{
    if (!oc_case(oc, "%d rows, %d ids in shards of %d%s", n_jobs, n_ids, columns, mapped ? ", memory of the host" : ""))
        return;
    rig r = { .oc = oc,
              .columns = columns,
              .n_ids = n_ids,
              .mask_words = (SHARDS * columns + 31) / 32,
              .mapped = mapped,
              .list = list,
              .n_jobs = n_jobs };
    size_t row = SHARDS * (size_t)columns;
    r.logits = oc_new(oc, "logits", ROWS * row * sizeof(float));
    for (int i = 0; i < ROWS; i++) fill_row(oc, (float *)(void *)r.logits->cpu + i * row, n_ids, i % 8);
    oc_push(oc, r.logits); /* columns of padding hold the poison, NaN */
    r.allowed = new_table(&r, "allowed", MASKS * (size_t)r.mask_words * sizeof(uint32_t));
    fill_masks(&r);
    r.jobs = new_table(&r, "jobs", JOBS_MAX * sizeof(td_sample_job));
    r.job = (td_sample_job *)(void *)r.jobs.buf->cpu;
    memset(r.job, 0, JOBS_MAX * sizeof *r.job);
    for (int i = 0; i < n_jobs; i++) r.job[i] = random_job(oc);
    settle_maxima(&r);
    draw_rows(&r, n_references);
    drop_table(&r, &r.jobs);
    drop_table(&r, &r.allowed);
    oc_done(oc);
}

void oc_sample(oc_ctx *oc)
{
    static const int columns[] = { 1, 31, 33, 500, 4096, 4097, 9000 };
    static const int jobs[] = { 1, 3, 17, JOBS_MAX };
    for (size_t c = 0; oc->demo && c < sizeof columns / sizeof *columns; c++)
        for (size_t j = 0; j < sizeof jobs / sizeof *jobs; j++)
            check(oc, columns[c], 2 * columns[c] - columns[c] / 3, jobs[j], jobs[j], (c + j) % 2, 0);
    if (oc->demo) check(oc, 9000, 17990, JOBS_MAX, 8, false, 4096); /* the longest that a block sorts */
    for (int i = 0; oc->real && i < 8; i++)
        check(oc, 77440, i % 2 ? 154856 : 154880, i < 4 ? 1 + i : 8 * (i - 3), 4, i % 4 == 3, 0);
}
