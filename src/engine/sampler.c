/* See sampler.h. Shards look at columns (ops/cpu/sample.c), the merge looks at candidates; both in the one order of the
 * rule: logit descending, id ascending. */
#include "engine/sampler.h"

#include <string.h>

#include "base/hash.h"

enum { FIRST_N = 64, SECOND_N = 1024, THIRD_N = 16384 };

td_status td_sample_check(const td_sample_params *params, td_error *err)
{
    if (!isfinite(params->temperature)) return td_fail(err, TD_EINVAL, "temperature: must be a finite number");
    if (!isfinite(params->top_p) || params->top_p <= 0) return td_fail(err, TD_EINVAL, "top_p: must be above 0");
    if (!isfinite(params->min_p) || params->min_p < 0) return td_fail(err, TD_EINVAL, "min_p: must be 0 or above");
    return TD_OK;
}

/* ---- step 1 ---- */

td_status td_sample_merge_max(const td_sample_max *shards, int n_shards, td_sample_max *top)
{
    td_sample_max all = { .id = -1 };
    for (int s = 0; s < n_shards; s++) {
        const td_candidate mine = { shards[s].z, shards[s].id }, best = { all.z, all.id };
        all.n_allowed += shards[s].n_allowed;
        all.n_nan += shards[s].n_nan;
        if (mine.id >= 0 && (best.id < 0 || td_sample_before(mine, best))) {
            all.z = mine.z;
            all.id = mine.id;
        }
    }
    if (all.n_nan || all.id < 0 || isinf(all.z)) return TD_EINVAL;
    *top = all;
    return TD_OK;
}

/* ---- step 2 ---- */

bool td_sample_settled_by_max(const td_sample_params *params, int n_logprobs)
{
    return params->temperature <= 0 && n_logprobs < 0;
}

static int least_of(int a, int b)
{
    return a < b ? a : b;
}

int td_sample_first_n(const td_sample_params *params, int n_logprobs, int n_shard)
{
    int n = 1;
    if (params->temperature > 0 && params->top_k >= 1)
        n = params->top_k;
    else if (params->temperature > 0 && params->top_p < 1)
        n = FIRST_N;
    if (n < n_logprobs) n = n_logprobs;
    return least_of(n, n_shard);
}

int td_sample_next_n(int n, int n_shard)
{
    int next = n < FIRST_N ? FIRST_N : n < SECOND_N ? SECOND_N : n < THIRD_N ? THIRD_N : n_shard;
    return least_of(next, n_shard);
}

/* Goes through the candidates of all shards in order, as far as what was sent settles it: behind the last candidate of
 * a shard that sent only part of itself may come others of its own. */
typedef struct walk {
    const td_sample_summary *const *shards;
    int n_shards;
    int taken[TD_SAMPLE_SHARDS_MAX];
} walk;

static walk walk_start(const td_sample_summary *const *shards, int n_shards)
{
    td_check(n_shards >= 1 && n_shards <= TD_SAMPLE_SHARDS_MAX);
    return (walk){ .shards = shards, .n_shards = n_shards };
}

/* TD_OK: *next is the next token. TD_ENOTFOUND: there are no more. TD_EAGAIN: nobody knows. */
static td_status walk_next(walk *w, td_candidate *next)
{
    int from = -1;
    for (int s = 0; s < w->n_shards; s++) {
        const td_sample_summary *shard = w->shards[s];
        if (w->taken[s] == shard->n_sent) {
            if (shard->n_sent < shard->n_allowed) return TD_EAGAIN;
            continue;
        }
        const td_candidate head = shard->candidates[w->taken[s]];
        if (from >= 0 && !td_sample_before(head, *next)) continue;
        from = s;
        *next = head;
    }
    if (from < 0) return TD_ENOTFOUND;
    w->taken[from]++;
    return TD_OK;
}

/* Sum of the masses among which top_p chooses. */
static td_status total_mass(const td_sample_summary *const *shards, int n_shards, const td_sample_cuts *c, float z_top,
                            double temperature, uint64_t *mass)
{
    *mass = 0;
    if (!c->top_k) {
        for (int s = 0; s < n_shards; s++) *mass += shards[s]->mass;
        return TD_OK;
    }
    walk w = walk_start(shards, n_shards);
    for (int i = 0; i < c->top_k; i++) {
        td_candidate token;
        if (walk_next(&w, &token)) return TD_EAGAIN; /* it never ends early: top_k is less than what is allowed */
        *mass += td_sample_mass(td_sample_distance(token.z, z_top, temperature));
    }
    return TD_OK;
}

/* Draws among the leading candidates that all cuts keep. */
static td_status draw_listed(const td_sample_summary *const *shards, int n_shards, const td_sample_params *params,
                             const td_sample_cuts *c, uint64_t pos, float z_top, td_candidate *best)
{
    uint64_t mass = 0, need = 0, so_far = 0, key = td_sample_key(params->seed, pos);
    double best_score = 0;
    if (c->by_mass) {
        td_status status = total_mass(shards, n_shards, c, z_top, params->temperature, &mass);
        if (status) return status;
        need = td_sample_share(params->top_p, mass);
    }
    td_candidate chosen = { .id = -1 };
    walk w = walk_start(shards, n_shards);
    for (int i = 0; !c->top_k || i < c->top_k; i++) {
        td_candidate token;
        td_status status = walk_next(&w, &token);
        if (status == TD_ENOTFOUND) break;
        if (status) return status;
        double d = td_sample_distance(token.z, z_top, params->temperature);
        if (i > 0 && c->by_distance && d < c->least) break;
        double score = d + td_sample_gumbel(key, token.id);
        if (td_sample_beats(score, token, best_score, chosen)) {
            best_score = score;
            chosen = token;
        }
        so_far += td_sample_mass(d);
        if (c->by_mass && so_far >= need) break; /* the token that reaches it is kept */
    }
    *best = chosen;
    return TD_OK;
}

static void draw_open(const td_sample_summary *const *shards, int n_shards, td_candidate *best)
{
    double score = 0;
    best->id = -1;
    for (int s = 0; s < n_shards; s++) {
        const td_sample_summary *shard = shards[s];
        if (shard->best.id < 0 || !td_sample_beats(shard->score, shard->best, score, *best)) continue;
        score = shard->score;
        *best = shard->best;
    }
}

static td_status add_logprobs(const td_sample_summary *const *shards, int n_shards, td_candidate token, float z_top,
                              int n_logprobs, td_sample_result *out)
{
    uint64_t mass = 0;
    for (int s = 0; s < n_shards; s++) mass += shards[s]->mass_raw;
    double log_sum = td_sample_ln((double)mass * 0x1p-40);
    out->logprob = td_sample_distance(token.z, z_top, 1.0) - log_sum;
    walk w = walk_start(shards, n_shards);
    for (int i = 0; i < least_of(n_logprobs, TD_SAMPLE_LOGPROBS_MAX); i++) {
        td_candidate next;
        td_status status = walk_next(&w, &next);
        if (status == TD_ENOTFOUND) break;
        if (status) return status;
        out->top[out->n_top++] =
            (td_token_logprob){ .id = next.id, .logprob = td_sample_distance(next.z, z_top, 1.0) - log_sum };
    }
    return TD_OK;
}

td_status td_sample_merge(const td_sample_summary *const *shards, int n_shards, const td_sample_params *params,
                          uint64_t pos, const td_sample_max *top, int n_logprobs, td_sample_result *out)
{
    const td_sample_cuts c = td_sample_cuts_of(params, top->n_allowed);
    td_candidate token = { .z = top->z, .id = top->id };
    td_sample_result result = { 0 };
    td_status status = TD_OK;
    if (td_sample_is_open(&c))
        draw_open(shards, n_shards, &token);
    else if (!c.greedy)
        status = draw_listed(shards, n_shards, params, &c, pos, top->z, &token);
    if (!status && n_logprobs >= 0) status = add_logprobs(shards, n_shards, token, top->z, n_logprobs, &result);
    if (status) return status;
    result.id = token.id;
    *out = result;
    return TD_OK;
}

/* ---- seeds ---- */

static void hash_u32(td_sha256 *sha, uint32_t x)
{
    const uint8_t bytes[4] = { (uint8_t)x, (uint8_t)(x >> 8), (uint8_t)(x >> 16), (uint8_t)(x >> 24) };
    td_sha256_update(sha, bytes, sizeof bytes);
}

uint64_t td_sample_seed(uint64_t salt, const int32_t *ids, size_t n_ids, const td_seed_media *media, size_t n_media)
{
    uint8_t digest[TD_SHA256_BYTES];
    uint64_t seed = 0;
    td_sha256 *sha = td_sha256_create();
    td_check(sha);
    td_sha256_update(sha, "tandem-seed-v1", 14);
    hash_u32(sha, (uint32_t)salt);
    hash_u32(sha, (uint32_t)(salt >> 32));
    hash_u32(sha, (uint32_t)n_ids);
    for (size_t i = 0; i < n_ids; i++) hash_u32(sha, (uint32_t)ids[i]);
    for (size_t i = 0; i < n_media; i++) {
        td_sha256_update(sha, media[i].digest, sizeof media[i].digest);
        hash_u32(sha, media[i].first_row);
    }
    td_sha256_finish(sha, digest);
    for (int i = 7; i >= 0; i--) seed = seed << 8 | digest[i];
    return seed;
}

uint64_t td_sample_seed_from_prompt(uint64_t salt, const int32_t *ids, size_t n_ids)
{
    return td_sample_seed(salt, ids, n_ids, NULL, 0);
}
