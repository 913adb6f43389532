/* See sampling.h. Two gathers a window in the common case, whatever the mix of requests: the shards' highest logits of
 * all rows, then the summaries of the rows that need more than that. Rows whose candidates did not reach their cut go
 * round again with more of them, a few at a time when they are long. Sizes follow from parameters alone, so the ranks
 * agree on them without asking. */
#include "engine/sampling.h"

#include <string.h>

struct td_sample_scratch {
    int rows_max, vocab_shard, n_ids, n_words;
    size_t cap_bytes;         /* of one shard's part of `summaries` */
    td_sample_max *maxima;    /* [TD_SHARDS][rows], crosses the link */
    unsigned char *summaries; /* [TD_SHARDS][bytes of this gather], crosses the link */
    uint32_t *allowed;        /* [rows_max][n_words], rows with banned ids only */
    td_sample_max *top;       /* [rows_max] merged */
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
td_sample_scratch *td_sample_scratch_take(td_arena *arena, td_link *link, int rows_max, int vocab_shard, int n_ids)
{
    td_sample_scratch *s = td_arena_take(arena, sizeof *s, 64);
    int n_words = (TD_SHARDS * vocab_shard + 31) / 32;
    uint32_t *allowed = td_arena_take(arena, (size_t)rows_max * (size_t)n_words * sizeof *allowed, 64);
    td_sample_max *top = td_arena_take(arena, (size_t)rows_max * sizeof *top, 64);
    if (!s || !allowed || !top) return NULL;
    *s = (td_sample_scratch){ .rows_max = rows_max,
                              .vocab_shard = vocab_shard,
                              .n_ids = n_ids,
                              .n_words = n_words,
                              .cap_bytes = td_sample_summary_bytes(vocab_shard),
                              .allowed = allowed,
                              .top = top };
    s->maxima = td_link_buffer(link, TD_SHARDS * (size_t)rows_max * sizeof *s->maxima);
    s->summaries = td_link_buffer(link, TD_SHARDS * s->cap_bytes);
    return s->maxima && s->summaries ? s : NULL;
}

static td_sample_logits logits_of(const td_sample_scratch *s, const td_model *model, const td_sample_row *rows, int row,
                                  int shard)
{
    int first = shard * s->vocab_shard, n = s->n_ids - first;
    const float *z = td_model_logits(model, shard);
    td_check(z != NULL);
    return (td_sample_logits){ .z = z + (size_t)row * (size_t)s->vocab_shard,
                               .n = n < s->vocab_shard ? n : s->vocab_shard,
                               .first_id = first,
                               .allowed = rows[row].n_banned ? s->allowed + (size_t)row * (size_t)s->n_words : NULL };
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

/* The shards this rank computes: [*first, *end). */
static void own_shards(td_link *link, int *first, int *end)
{
    int per_rank = TD_SHARDS / td_link_world(link);
    *first = td_link_rank(link) * per_rank;
    *end = *first + per_rank;
}

static td_status exchange_maxima(td_sample_scratch *s, const td_model *model, td_link *link, const td_sample_row *rows,
                                 int n_rows, td_status *row_status, td_error *err)
{
    int first, end;
    own_shards(link, &first, &end);
    for (int shard = first; shard < end; shard++)
        for (int r = 0; r < n_rows; r++) {
            td_sample_logits logits = logits_of(s, model, rows, r, shard);
            td_sample_shard_max(&logits, &s->maxima[shard * n_rows + r]);
        }
    size_t n_bytes = (size_t)(end - first) * (size_t)n_rows * sizeof *s->maxima;
    td_status status = td_link_gather(link, s->maxima, n_bytes, err);
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

/* One gather of the summaries of group[0..n): rows, each with n_sent[row] candidates. Rows that are done get n_sent 0.
 */
static td_status exchange_group(td_sample_scratch *s, const td_model *model, td_link *link, const td_sample_row *rows,
                                const int *group, int n, size_t shard_bytes, int *n_sent, td_token *tokens,
                                td_status *row_status, td_error *err)
{
    int first, end;
    own_shards(link, &first, &end);
    for (int shard = first; shard < end; shard++) {
        unsigned char *at = s->summaries + (size_t)shard * shard_bytes;
        for (int i = 0; i < n; i++) {
            int r = group[i];
            td_sample_logits logits = logits_of(s, model, rows, r, shard);
            td_sample_shard_summary(&logits, &rows[r].params, rows[r].pos, &s->top[r], rows[r].n_logprobs, n_sent[r],
                                    (td_sample_summary *)(void *)at);
            at += td_sample_summary_bytes(n_sent[r]);
        }
    }
    td_status status = td_link_gather(link, s->summaries, (size_t)(end - first) * shard_bytes, err);
    if (status) return status;
    size_t offset = 0;
    for (int i = 0; i < n; i++) {
        int r = group[i];
        const td_sample_summary *shards[TD_SHARDS];
        td_sample_result result;
        for (int shard = 0; shard < TD_SHARDS; shard++)
            shards[shard] =
                (const td_sample_summary *)(const void *)(s->summaries + (size_t)shard * shard_bytes + offset);
        offset += td_sample_summary_bytes(n_sent[r]);
        td_status merged =
            td_sample_merge(shards, TD_SHARDS, &rows[r].params, rows[r].pos, &s->top[r], rows[r].n_logprobs, &result);
        if (merged == TD_EAGAIN) {
            n_sent[r] = td_sample_next_n(n_sent[r], s->vocab_shard);
            continue;
        }
        row_status[r] = merged;
        n_sent[r] = 0;
        if (merged == TD_OK) to_token(&result, &tokens[r]);
    }
    return TD_OK;
}

td_status td_sample_rows(td_sample_scratch *scratch, const td_model *model, td_link *link, const td_sample_row *rows,
                         int n_rows, td_token *tokens, td_status *row_status, td_error *err)
{
    enum { ROWS_MAX = 64 };
    int n_sent[ROWS_MAX], group[ROWS_MAX]; /* n_sent: candidates a shard sends for a row; 0: the row is done */
    td_check(n_rows >= 1 && n_rows <= scratch->rows_max && n_rows <= ROWS_MAX);
    mark_allowed(scratch, rows, n_rows);
    td_status status = exchange_maxima(scratch, model, link, rows, n_rows, row_status, err);
    if (status) return status;
    for (int r = 0; r < n_rows; r++) {
        bool settled = row_status[r] || td_sample_settled_by_max(&rows[r].params, rows[r].n_logprobs);
        n_sent[r] = settled ? 0 : td_sample_first_n(&rows[r].params, rows[r].n_logprobs, scratch->vocab_shard);
        tokens[r] = (td_token){ .id = scratch->top[r].id };
    }
    for (;;) {
        int n = 0;
        size_t shard_bytes = 0;
        for (int r = 0; r < n_rows; r++) {
            size_t row_bytes = n_sent[r] ? td_sample_summary_bytes(n_sent[r]) : 0;
            if (!row_bytes || shard_bytes + row_bytes > scratch->cap_bytes) continue;
            shard_bytes += row_bytes;
            group[n++] = r;
        }
        if (n == 0) return TD_OK;
        status = exchange_group(scratch, model, link, rows, group, n, shard_bytes, n_sent, tokens, row_status, err);
        if (status) return status;
    }
}
