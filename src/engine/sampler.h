/* Sampling rule v1: which token follows from a row of logits. docs/sampling.md defines it; every rank, every device and
 * every number of shards draws the same token, bit for bit, because the rule sees only the set of (id, logit) pairs and
 * its functions (sample_math.h) are fixed sequences of exact operations.
 *
 * The vocabulary is divided into shards. How a row is sampled:
 *
 *   1. every shard: td_sample_shard_max                   gathered; td_sample_merge_max -> the highest logit
 *      Greedy without logprobs is done: result.id.
 *   2. every shard: td_sample_shard_summary with n = td_sample_first_n()            gathered; td_sample_merge -> the
 * token
 *   3. TD_EAGAIN: the candidates did not reach the cut; 2 again with n = td_sample_next_n(). Rare: flat distributions.
 *
 * How many candidates a shard sends never changes the draw, only whether step 3 is needed. Nothing here allocates;
 * messages are plain bytes, the same on every machine we run on (little-endian). Any thread. */
#ifndef TD_ENGINE_SAMPLER_H
#define TD_ENGINE_SAMPLER_H

#include "base/status.h"

TD_BEGIN_C

#define TD_SAMPLE_SHARDS_MAX   8
#define TD_SAMPLE_LOGPROBS_MAX 20

typedef struct td_sample_params {
    double temperature; /* <= 0: greedy */
    double top_p;       /* 0 < top_p; >= 1: off */
    double min_p;       /* 0: off */
    int top_k;          /* < 1: off */
    uint64_t seed;
} td_sample_params;

/* TD_EINVAL with the parameter's name: not finite, top_p <= 0, min_p < 0. */
td_status td_sample_check(const td_sample_params *params, td_error *err);

/* One shard's part of a row. */
typedef struct td_sample_logits {
    const float *z; /* [n] fp32 logits of ids first_id .. first_id + n - 1 */
    int n;          /* > 0; rows of padding are left out */
    int32_t first_id;
    const uint32_t *allowed; /* bit id % 32 of word id / 32: may be sampled; indexed by id, not by column; NULL: all */
} td_sample_logits;

/* ---- step 1 ---- */

typedef struct td_sample_max {
    float z;    /* highest allowed logit of the shard, of equal ones the lowest id */
    int32_t id; /* -1: nothing is allowed here */
    int32_t n_allowed;
    int32_t n_nan; /* allowed logits that are not numbers */
} td_sample_max;

void td_sample_shard_max(const td_sample_logits *logits, td_sample_max *out);

/* Over all shards, in any order. TD_EINVAL: an allowed logit is NaN, the highest is infinite, or nothing is allowed:
 * the request ends with a numerical error and *top is not to be used. */
td_status td_sample_merge_max(const td_sample_max *shards, int n_shards, td_sample_max *top);

/* ---- step 2 ---- */

typedef struct td_candidate {
    float z;
    int32_t id;
} td_candidate;

/* What a shard tells about a row; candidates follow it in memory, best first (z descending, id ascending). */
typedef struct td_sample_summary {
    uint64_t mass;     /* sum of floor(E((z - z_top) / T) 2^40): without top_k, with top_p; else 0 */
    uint64_t mass_raw; /* the same at T = 1: with logprobs; else 0 */
    double score;      /* highest score among its tokens, when neither top_k nor top_p cut; else -inf */
    td_candidate best; /* the token that has it; id -1: none */
    int32_t n_allowed;
    int32_t n_sent; /* candidates that follow */
    td_candidate candidates[];
} td_sample_summary;

/* Bytes of a summary with up to n candidates: what the caller provides and gathers; a multiple of 8. */
size_t td_sample_summary_bytes(int n);

/* How many candidates (at least one) a shard of n_shard columns sends at first, and after it sent n. n_logprobs: how
 * many log-probabilities beside the token's own are wanted, -1: none at all. */
int td_sample_first_n(const td_sample_params *params, int n_logprobs, int n_shard);
int td_sample_next_n(int n, int n_shard);

/* Is step 1 all that is needed? */
bool td_sample_settled_by_max(const td_sample_params *params, int n_logprobs);

/* pos: absolute index of the token that is sampled (the first reply token of an n-token prompt: n). top: as merged.
 * out: td_sample_summary_bytes(n) bytes, 8-byte aligned; all of them are written. */
void td_sample_shard_summary(const td_sample_logits *logits, const td_sample_params *params, uint64_t pos,
                             const td_sample_max *top, int n_logprobs, int n, td_sample_summary *out);

typedef struct td_token_logprob {
    int32_t id;
    double logprob; /* ln of its probability at T = 1 among all allowed tokens, before any cut */
} td_token_logprob;

typedef struct td_sample_result {
    int32_t id;
    double logprob; /* with n_logprobs >= 0; else 0 */
    int n_top;
    td_token_logprob top[TD_SAMPLE_LOGPROBS_MAX]; /* the most probable, best first */
} td_sample_result;

/* shards[0..n_shards): summaries made with the same params, pos, top and n_logprobs. TD_EAGAIN: more candidates are
 * needed (*out untouched). With whole shards sent it never says that. */
td_status td_sample_merge(const td_sample_summary *const *shards, int n_shards, const td_sample_params *params,
                          uint64_t pos, const td_sample_max *top, int n_logprobs, td_sample_result *out);

/* ---- the definition ---- */

/* The rule written down as it is defined, over the whole row, sorting everything: what all else is compared with.
 * Allocates. TD_EINVAL as in merge_max; TD_ENOMEM. */
td_status td_sample_reference(const td_sample_logits *row, const td_sample_params *params, uint64_t pos, int n_logprobs,
                              td_sample_result *out);

/* ---- seeds ---- */

typedef struct td_seed_media {
    uint8_t digest[32]; /* SHA-256 of the picture's or clip's content */
    uint32_t first_row; /* position of its first slot in the prompt */
} td_seed_media;

/* Seed of a request that names none: the same prompt gives the same reply, another salt changes all of them.
 * First 8 bytes, little-endian, of SHA-256 over "tandem-seed-v1", salt as u64, count as u32, ids as u32, then every
 * medium's digest and first_row as u32. */
uint64_t td_sample_seed(uint64_t salt, const int32_t *ids, size_t n_ids, const td_seed_media *media, size_t n_media);

/* Without media. */
uint64_t td_sample_seed_from_prompt(uint64_t salt, const int32_t *ids, size_t n_ids);

TD_END_C
#endif
