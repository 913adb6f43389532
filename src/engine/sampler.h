/* Sampling rule v1: which token follows from a row of logits. docs/sampling.md defines it; every rank, every device and
 * every number of shards draws the same token, bit for bit, because the rule sees only the set of (id, logit) pairs and
 * its functions (ops/sample_math.h) are fixed sequences of exact operations.
 *
 * The vocabulary is divided into shards. How a row is sampled:
 *
 *   1. every shard: sample_max (ops/sample.h)                    gathered; td_sample_merge_max -> the highest logit
 *      Greedy without logprobs is done: result.id.
 *   2. every shard: sample_summary, n = td_sample_first_n()      gathered; td_sample_merge -> the token
 *   3. TD_EAGAIN: the candidates did not reach the cut; 2 again with n = td_sample_next_n(). Rare: flat distributions.
 *
 * How many candidates a shard sends never changes the draw, only whether step 3 is needed. Nothing here allocates;
 * messages are plain bytes, the same on every machine we run on (little-endian). Any thread. */
#ifndef TD_ENGINE_SAMPLER_H
#define TD_ENGINE_SAMPLER_H

#include "ops/sample.h"

TD_BEGIN_C

#define TD_SAMPLE_SHARDS_MAX   8
#define TD_SAMPLE_LOGPROBS_MAX 20

/* TD_EINVAL with the parameter's name: not finite, top_p <= 0, min_p < 0. */
td_status td_sample_check(const td_sample_params *params, td_error *err);

/* ---- step 1 ---- */

/* Over all shards, in any order. TD_EINVAL: an allowed logit is NaN, the highest is infinite, or nothing is allowed:
 * the request ends with a numerical error and *top is not to be used. */
td_status td_sample_merge_max(const td_sample_max *shards, int n_shards, td_sample_max *top);

/* ---- step 2 ---- */

/* How many candidates (at least one) a shard of n_shard columns sends at first, and after it sent n. n_logprobs: how
 * many log-probabilities beside the token's own are wanted, -1: none at all. */
int td_sample_first_n(const td_sample_params *params, int n_logprobs, int n_shard);
int td_sample_next_n(int n, int n_shard);

/* Is step 1 all that is needed? */
bool td_sample_settled_by_max(const td_sample_params *params, int n_logprobs);

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

/* pos: absolute index of the token that is sampled; top: as merged.
 * shards[0..n_shards): summaries made with the same params, pos, top and n_logprobs. TD_EAGAIN: more candidates are
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
