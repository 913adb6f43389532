/* See sampling.h. Two gathers a window in the common case, whatever the mix of requests: the shards' highest logits of
 * all rows, then the summaries of the rows that need more than that. Rows whose candidates did not reach their cut go
 * round again with more of them, a few at a time when they are long. Sizes follow from parameters alone, so the ranks
 * agree on them without asking.
 *
 * The device answers into memory that it shares with the host; from there this rank's part, a few KiB, is copied to
 * where the link sends from. */
#include "engine/sampling.h"

#include <string.h>

enum { ROWS_MAX = TD_WINDOW_MAX };

struct td_sample_scratch {
    int rows_max, vocab_shard, n_ids, n_words;
    size_t cap_bytes; /* of one shard's part of `summaries` */

    /* crosses the link */
    td_sample_max *maxima;    /* [TD_SHARDS][rows] */
    unsigned char *summaries; /* [TD_SHARDS][bytes of this gather] */

    /* shared with the device; answers by shard as above, own shards only */
    td_sample_job *jobs;       /* [rows_max] */
    uint32_t *allowed;         /* [rows_max][n_words], rows with banned ids only */
    td_sample_max *own_maxima; /* [TD_SHARDS][rows_max] */
    unsigned char *own_summaries;

    td_sample_max *top; /* [rows_max] merged */
};

static size_t pages(size_t n_bytes)
{
    return (n_bytes + 4095) / 4096 * 4096; /* the link hands out whole pages */
}

size_t td_sample_region_bytes(int rows_max, int vocab_shard)
{
    return pages(TD_SHARDS * (size_t)rows_max * sizeof(td_sample_max)) +
           pages(TD_SHARDS * td_sample_summary_bytes(vocab_shard));
}

size_t td_sample_gather_bytes(int vocab_shard)
{
    return TD_SHARDS * td_sample_summary_bytes(vocab_shard);
}

/* Memory that crosses ranks comes from the link; a rank of world 1 takes it there too. */
td_sample_scratch *td_sample_scratch_take(td_arena *arena, td_arena *shared, td_link *link, int rows_max,
                                          int vocab_shard, int n_ids)
{
    td_sample_scratch *s = td_arena_take(arena, sizeof *s, 64);
    size_t rows = (size_t)rows_max, n_words = (TD_SHARDS * (size_t)vocab_shard + 31) / 32;
    td_sample_scratch t = { .rows_max = rows_max,
                            .vocab_shard = vocab_shard,
                            .n_ids = n_ids,
                            .n_words = (int)n_words,
                            .cap_bytes = td_sample_summary_bytes(vocab_shard) };
    t.top = td_arena_take(arena, rows * sizeof *t.top, 64);
    t.jobs = td_arena_take(shared, rows * sizeof *t.jobs, 64);
    t.allowed = td_arena_take(shared, rows * n_words * sizeof *t.allowed, 64);
    t.own_maxima = td_arena_take(shared, TD_SHARDS * rows * sizeof *t.own_maxima, 64);
    t.own_summaries = td_arena_take(shared, TD_SHARDS * t.cap_bytes, 64);
    if (!s || !t.top || !t.jobs || !t.allowed || !t.own_maxima || !t.own_summaries) return NULL;
    t.maxima = td_link_buffer(link, TD_SHARDS * rows * sizeof *t.maxima);
    t.summaries = td_link_buffer(link, TD_SHARDS * t.cap_bytes);
    if (!t.maxima || !t.summaries) return NULL;
    *s = t;
    return s;
}

static void mark_allowed(td_sample_scratch *s, const td_sample_row *rows, int n_rows)
{
    for (int r = 0; r < n_rows; r++) {
        uint32_t *words = s->allowed + (size_t)r * (size_t)s->n_words;
        if (!rows[r].n_banned) continue;
        memset(words, 0xff, (size_t)s->n_words * sizeof *words);
        for (int i = 0; i < rows[r].n_banned; i++) {
            int32_t id = rows[r].banned[i];
            if (id >= 0 && id < s->n_ids) words[id / 32] &= ~(1u << id % 32);
        }
    }
}

static td_sample_job job_of(const td_sample_row *rows, int row)
{
    return (td_sample_job){ .params = rows[row].params,
                            .pos = rows[row].pos,
                            .row = row,
                            .mask = rows[row].n_banned ? row : -1,
                            .n_logprobs = rows[row].n_logprobs };
}

/* The shards this rank computes: [*first, *end). */
static void own_shards(td_link *link, int *first, int *end)
{
    int per_rank = TD_SHARDS / td_link_world(link);
    *first = td_link_rank(link) * per_rank;
    *end = *first + per_rank;
}

/* The first n_jobs jobs on a shard's logits. */
static td_sample_args args_of(const td_sample_scratch *s, const td_model *model, int shard, int n_jobs)
{
    int first = shard * s->vocab_shard, n = s->n_ids - first;
    const float *logits = td_model_logits_device(model, shard);
    td_check(logits != NULL);
    return (td_sample_args){ .n_jobs = n_jobs,
                             .n_columns = n < 0                ? 0
                                          : n < s->vocab_shard ? n
                                                               : s->vocab_shard,
                             .first_id = first,
                             .logits = logits,
                             .stride = (size_t)s->vocab_shard,
                             .allowed = s->allowed,
                             .mask_words = (size_t)s->n_words,
                             .jobs = s->jobs };
}

static td_status answered(const td_model *model, td_status status, const char *op, td_error *err)
{
    return status ? td_fail(err, status, "%s: %s", op, td_status_text(status)) : td_dev_sync(td_model_dev(model), err);
}

/* Own shards' answers to where the link gathers; shard_bytes each. */
static td_status gather(td_link *link, void *all, const void *own, size_t shard_bytes, td_error *err)
{
    int first, end;
    own_shards(link, &first, &end);
    size_t at = (size_t)first * shard_bytes, n_bytes = (size_t)(end - first) * shard_bytes;
    memcpy((char *)all + at, (const char *)own + at, n_bytes);
    return td_link_gather(link, all, n_bytes, err);
}

static td_status exchange_maxima(td_sample_scratch *s, const td_model *model, td_link *link, const td_sample_row *rows,
                                 int n_rows, td_status *row_status, td_error *err)
{
    int first, end;
    td_status status = TD_OK;
    own_shards(link, &first, &end);
    for (int r = 0; r < n_rows; r++) s->jobs[r] = job_of(rows, r);
    for (int shard = first; shard < end && !status; shard++) {
        td_sample_args args = args_of(s, model, shard, n_rows);
        args.maxima = s->own_maxima + shard * n_rows;
        status = td_model_ops(model)->sample_max(td_model_dev(model), &args);
    }
    status = answered(model, status, "sample_max", err);
    if (!status) status = gather(link, s->maxima, s->own_maxima, (size_t)n_rows * sizeof *s->maxima, err);
    if (status) return status;
    for (int r = 0; r < n_rows; r++) {
        td_sample_max shards[TD_SHARDS];
        for (int shard = 0; shard < TD_SHARDS; shard++) shards[shard] = s->maxima[shard * n_rows + r];
        row_status[r] = td_sample_merge_max(shards, TD_SHARDS, &s->top[r]);
    }
    return TD_OK;
}

static void to_token(const td_sample_result *result, td_token *token)
{
    *token = (td_token){ .id = result->id, .logprob = (float)result->logprob, .n_top = result->n_top };
    for (int i = 0; i < result->n_top; i++) {
        token->top_ids[i] = result->top[i].id;
        token->top_logprobs[i] = (float)result->top[i].logprob;
    }
}

/* Which rows go round together, and how many candidates each asks a shard for; 0: the row is done. */
typedef struct group {
    int n_sent[ROWS_MAX];
    int row[ROWS_MAX], n;
    size_t shard_bytes;
} group;

static void form(const td_sample_scratch *s, group *g, int n_rows)
{
    g->n = 0;
    g->shard_bytes = 0;
    for (int r = 0; r < n_rows; r++) {
        size_t row_bytes = g->n_sent[r] ? td_sample_summary_bytes(g->n_sent[r]) : 0;
        if (!row_bytes || g->shard_bytes + row_bytes > s->cap_bytes) continue;
        g->shard_bytes += row_bytes;
        g->row[g->n++] = r;
    }
}

/* Summaries of the group's rows from this rank's shards. */
static td_status summarise(td_sample_scratch *s, const td_model *model, td_link *link, const td_sample_row *rows,
                           const group *g, td_error *err)
{
    int first, end, n_max = 0;
    size_t offset = 0;
    td_status status = TD_OK;
    own_shards(link, &first, &end);
    for (int i = 0; i < g->n; i++) {
        td_sample_job *job = &s->jobs[i];
        *job = job_of(rows, g->row[i]);
        job->top = s->top[g->row[i]];
        job->n = g->n_sent[g->row[i]];
        job->out_bytes = offset;
        offset += td_sample_summary_bytes(job->n);
        if (job->n > n_max) n_max = job->n;
    }
    for (int shard = first; shard < end && !status; shard++) {
        td_sample_args args = args_of(s, model, shard, g->n);
        args.n_max = n_max;
        args.summaries = s->own_summaries + (size_t)shard * g->shard_bytes;
        status = td_model_ops(model)->sample_summary(td_model_dev(model), &args);
    }
    return answered(model, status, "sample_summary", err);
}

/* Draws the group's rows. Those that are done get n_sent 0, the others more candidates. */
static void draw(td_sample_scratch *s, const td_sample_row *rows, group *g, td_token *tokens, td_status *row_status)
{
    size_t offset = 0;
    for (int i = 0; i < g->n; i++) {
        int r = g->row[i];
        const td_sample_summary *shards[TD_SHARDS];
        td_sample_result result;
        for (int shard = 0; shard < TD_SHARDS; shard++)
            shards[shard] =
                (const td_sample_summary *)(const void *)(s->summaries + (size_t)shard * g->shard_bytes + offset);
        offset += td_sample_summary_bytes(g->n_sent[r]);
        td_status merged =
            td_sample_merge(shards, TD_SHARDS, &rows[r].params, rows[r].pos, &s->top[r], rows[r].n_logprobs, &result);
        if (merged == TD_EAGAIN) {
            g->n_sent[r] = td_sample_next_n(g->n_sent[r], s->vocab_shard);
            continue;
        }
        row_status[r] = merged;
        g->n_sent[r] = 0;
        if (merged == TD_OK) to_token(&result, &tokens[r]);
    }
}

td_status td_sample_rows(td_sample_scratch *scratch, const td_model *model, td_link *link, const td_sample_row *rows,
                         int n_rows, td_token *tokens, td_status *row_status, td_error *err)
{
    group g;
    td_check(n_rows >= 1 && n_rows <= scratch->rows_max && n_rows <= ROWS_MAX);
    mark_allowed(scratch, rows, n_rows);
    td_status status = exchange_maxima(scratch, model, link, rows, n_rows, row_status, err);
    if (status) return status;
    for (int r = 0; r < n_rows; r++) {
        bool settled = row_status[r] || td_sample_settled_by_max(&rows[r].params, rows[r].n_logprobs);
        g.n_sent[r] = settled ? 0 : td_sample_first_n(&rows[r].params, rows[r].n_logprobs, scratch->vocab_shard);
        tokens[r] = (td_token){ .id = scratch->top[r].id };
    }
    for (;;) {
        form(scratch, &g, n_rows);
        if (g.n == 0) return TD_OK;
        status = summarise(scratch, model, link, rows, &g, err);
        if (!status) status = gather(link, scratch->summaries, scratch->own_summaries, g.shard_bytes, err);
        if (status) return status;
        draw(scratch, rows, &g, tokens, row_status);
    }
}
