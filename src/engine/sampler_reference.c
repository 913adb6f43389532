/* The sampling rule as docs/sampling.md states it, step by step over the whole row, with no thought of shards, lists or
 * speed. What the engine and every device do is compared with this. */
#include <stdlib.h>

#include "engine/sampler.h"

typedef struct token {
    float z;
    int32_t id;
    double d;
    uint64_t mass;
} token;

static int compare(const void *a, const void *b)
{
    const token *x = (const token *)a, *y = (const token *)b;
    if (x->z != y->z) return x->z > y->z ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

/* Step 1: allowed tokens by (z descending, id ascending). TD_EINVAL: none, NaN, or no finite highest logit. */
static td_status order_tokens(const td_sample_logits *row, token *tokens, int *n)
{
    *n = 0;
    for (int i = 0; i < row->n; i++) {
        uint32_t id = (uint32_t)(row->first_id + i);
        if (row->allowed && !(row->allowed[id / 32] >> id % 32 & 1)) continue;
        if (isnan(row->z[i])) return TD_EINVAL;
        tokens[(*n)++] = (token){ .z = row->z[i], .id = (int32_t)id };
    }
    qsort(tokens, (size_t)*n, sizeof *tokens, compare);
    return *n == 0 || isinf(tokens[0].z) ? TD_EINVAL : TD_OK;
}

/* Steps 2 to 7: how many of the first tokens are kept. */
static int kept(token *tokens, int n, const td_sample_params *params)
{
    int n_k = params->top_k >= 1 && params->top_k < n ? params->top_k : n;
    uint64_t mass = 0;
    for (int i = 0; i < n_k; i++) {
        tokens[i].d = td_sample_distance(tokens[i].z, tokens[0].z, params->temperature);
        tokens[i].mass = td_sample_mass(tokens[i].d);
        mass += tokens[i].mass;
    }
    int n_p = n_k;
    if (params->top_p < 1) {
        uint64_t need = td_sample_share(params->top_p, mass), sum = 0;
        for (n_p = 0; sum < need; n_p++) sum += tokens[n_p].mass;
    }
    int n_m = n_k;
    if (params->min_p > 0) {
        double least = params->min_p >= 1 ? 0.0 : td_sample_ln(params->min_p);
        for (n_m = 0; n_m < n_k && tokens[n_m].d >= least; n_m++)
            ;
    }
    int least = n_p < n_m ? n_p : n_m;
    return least > 1 ? least : 1;
}

/* Steps 7 and 8. */
static int32_t draw(const token *tokens, int n, const td_sample_params *params, uint64_t pos)
{
    uint64_t key = td_sample_key(params->seed, pos);
    int best = 0;
    double best_score = 0;
    for (int i = 0; i < n; i++) {
        double score = tokens[i].d + td_sample_gumbel(key, tokens[i].id);
        if (i > 0 && score <= best_score) continue;
        best = i;
        best_score = score;
    }
    return tokens[best].id;
}

static void add_logprobs(const token *tokens, int n, int n_logprobs, td_sample_result *out)
{
    uint64_t mass = 0;
    for (int i = 0; i < n; i++) mass += td_sample_mass(td_sample_distance(tokens[i].z, tokens[0].z, 1.0));
    double log_sum = td_sample_ln((double)mass * 0x1p-40);
    for (int i = 0; i < n; i++) {
        double logprob = td_sample_distance(tokens[i].z, tokens[0].z, 1.0) - log_sum;
        if (tokens[i].id == out->id) out->logprob = logprob;
        if (i < n_logprobs && i < TD_SAMPLE_LOGPROBS_MAX)
            out->top[out->n_top++] = (td_token_logprob){ .id = tokens[i].id, .logprob = logprob };
    }
}

td_status td_sample_reference(const td_sample_logits *row, const td_sample_params *params, uint64_t pos, int n_logprobs,
                              td_sample_result *out)
{
    int n;
    token *tokens = (token *)malloc((size_t)row->n * sizeof *tokens);
    if (!tokens) return TD_ENOMEM;
    td_status status = order_tokens(row, tokens, &n);
    if (!status) {
        *out = (td_sample_result){ .id = tokens[0].id };
        if (params->temperature > 0) out->id = draw(tokens, kept(tokens, n, params), params, pos);
        if (n_logprobs >= 0) add_logprobs(tokens, n, n_logprobs, out);
    }
    free(tokens);
    return status;
}
