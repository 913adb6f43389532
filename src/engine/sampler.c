/* See sampler.h. Shards look at columns, the merge looks at candidates; both in the one order of the rule: logit
 * descending, id ascending. A shard's list is a heap of the best n so far, the worst on top: one comparison a column.
 */
#include "engine/sampler.h"

#include <string.h>

#include "base/hash.h"
#include "engine/sample_math.h"

enum { FIRST_N = 64, SECOND_N = 1024, THIRD_N = 16384 };

td_status td_sample_check(const td_sample_params *params, td_error *err)
{
    if (!isfinite(params->temperature)) return td_fail(err, TD_EINVAL, "temperature: must be a finite number");
    if (!isfinite(params->top_p) || params->top_p <= 0) return td_fail(err, TD_EINVAL, "top_p: must be above 0");
    if (!isfinite(params->min_p) || params->min_p < 0) return td_fail(err, TD_EINVAL, "min_p: must be 0 or above");
    return TD_OK;
}

static bool before(td_candidate a, td_candidate b)
{
    return a.z > b.z || (a.z == b.z && a.id < b.id);
}

static bool is_allowed(const td_sample_logits *logits, int column)
{
    uint32_t id = (uint32_t)(logits->first_id + column);
    return !logits->allowed || (logits->allowed[id >> 5] >> (id & 31) & 1);
}

static td_candidate at(const td_sample_logits *logits, int column)
{
    return (td_candidate){ .z = logits->z[column], .id = logits->first_id + column };
}

/* ---- step 1 ---- */

void td_sample_shard_max(const td_sample_logits *logits, td_sample_max *out)
{
    *out = (td_sample_max){ .id = -1 };
    for (int i = 0; i < logits->n; i++) {
        if (!is_allowed(logits, i)) continue;
        float z = logits->z[i];
        out->n_allowed++;
        if (isnan(z)) {
            out->n_nan++;
        } else if (out->id < 0 || z > out->z) { /* strictly: the lower id stays */
            out->z = z;
            out->id = logits->first_id + i;
        }
    }
}

td_status td_sample_merge_max(const td_sample_max *shards, int n_shards, td_sample_max *top)
{
    td_sample_max all = { .id = -1 };
    for (int s = 0; s < n_shards; s++) {
        const td_candidate mine = { shards[s].z, shards[s].id }, best = { all.z, all.id };
        all.n_allowed += shards[s].n_allowed;
        all.n_nan += shards[s].n_nan;
        if (mine.id >= 0 && (best.id < 0 || before(mine, best))) {
            all.z = mine.z;
            all.id = mine.id;
        }
    }
    if (all.n_nan || all.id < 0 || isinf(all.z)) return TD_EINVAL;
    *top = all;
    return TD_OK;
}

/* ---- which cuts a row has ---- */

typedef struct cuts {
    bool greedy;
    int top_k;        /* 0: off, also where it would keep everything */
    bool by_mass;     /* top_p */
    bool by_distance; /* min_p */
    double least;     /* by_distance: d >= least is kept */
} cuts;

static cuts cuts_of(const td_sample_params *params, int n_allowed)
{
    cuts c = { .greedy = params->temperature <= 0 };
    if (params->top_k >= 1 && params->top_k < n_allowed) c.top_k = params->top_k;
    c.by_mass = params->top_p < 1;
    c.by_distance = params->min_p > 0;
    if (c.by_distance) c.least = params->min_p >= 1 ? 0.0 : td_sample_ln(params->min_p);
    return c;
}

/* Every token can tell by itself whether it is kept: no list is needed, each shard names its best. */
static bool is_open(const cuts *c)
{
    return !c->greedy && !c->top_k && !c->by_mass;
}

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

size_t td_sample_summary_bytes(int n)
{
    return sizeof(td_sample_summary) + (size_t)n * sizeof(td_candidate);
}

/* ---- step 2: a shard ---- */

static void sift_down(td_candidate *heap, int n, int i)
{
    const td_candidate moved = heap[i];
    for (int child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && before(heap[child], heap[child + 1])) child++;
        if (!before(moved, heap[child])) break;
        heap[i] = heap[child];
    }
    heap[i] = moved;
}

/* The best n allowed columns, best first. Returns how many there are. */
static int select_best(const td_sample_logits *logits, int n, td_candidate *best)
{
    int count = 0;
    for (int i = 0; i < logits->n && n > 0; i++) {
        const td_candidate c = at(logits, i);
        if (!is_allowed(logits, i)) continue;
        if (count < n) {
            best[count++] = c;
            for (int k = n / 2 - 1; count == n && k >= 0; k--) sift_down(best, n, k);
        } else if (before(c, best[0])) {
            best[0] = c;
            sift_down(best, n, 0);
        }
    }
    for (int k = count / 2 - 1; count < n && k >= 0; k--) sift_down(best, count, k);
    for (int end = count - 1; end > 0; end--) { /* the worst goes to the end */
        const td_candidate worst = best[0];
        best[0] = best[end];
        best[end] = worst;
        sift_down(best, end, 0);
    }
    return count;
}

static uint64_t shard_mass(const td_sample_logits *logits, float z_top, double temperature)
{
    uint64_t mass = 0;
    for (int i = 0; i < logits->n; i++)
        if (is_allowed(logits, i)) mass += td_sample_mass(td_sample_distance(logits->z[i], z_top, temperature));
    return mass;
}

/* The better of two scored tokens; equal scores: the earlier in order. */
static bool beats(double score, td_candidate token, double best_score, td_candidate best)
{
    return best.id < 0 || score > best_score || (score == best_score && before(token, best));
}

static void shard_draw(const td_sample_logits *logits, const td_sample_params *params, const cuts *c, uint64_t pos,
                       float z_top, td_sample_summary *out)
{
    uint64_t key = td_sample_key(params->seed, pos);
    for (int i = 0; i < logits->n; i++) {
        if (!is_allowed(logits, i)) continue;
        const td_candidate token = at(logits, i);
        double d = td_sample_distance(token.z, z_top, params->temperature);
        if (c->by_distance && d < c->least) continue;
        double score = d + td_sample_gumbel(key, token.id);
        if (!beats(score, token, out->score, out->best)) continue;
        out->score = score;
        out->best = token;
    }
}

void td_sample_shard_summary(const td_sample_logits *logits, const td_sample_params *params, uint64_t pos,
                             const td_sample_max *top, int n_logprobs, int n, td_sample_summary *out)
{
    const cuts c = cuts_of(params, top->n_allowed);
    memset(out, 0, td_sample_summary_bytes(n));
    out->score = -INFINITY;
    out->best.id = -1;
    for (int i = 0; i < logits->n; i++) out->n_allowed += is_allowed(logits, i);
    out->n_sent = select_best(logits, n, out->candidates);
    if (!c.greedy && !c.top_k && c.by_mass) out->mass = shard_mass(logits, top->z, params->temperature);
    if (n_logprobs >= 0) out->mass_raw = shard_mass(logits, top->z, 1.0);
    if (is_open(&c)) shard_draw(logits, params, &c, pos, top->z, out);
}

/* ---- step 2: all shards ---- */

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
        if (from >= 0 && !before(head, *next)) continue;
        from = s;
        *next = head;
    }
    if (from < 0) return TD_ENOTFOUND;
    w->taken[from]++;
    return TD_OK;
}

/* Sum of the masses among which top_p chooses. */
static td_status total_mass(const td_sample_summary *const *shards, int n_shards, const cuts *c, float z_top,
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
                             const cuts *c, uint64_t pos, float z_top, td_candidate *best)
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
        if (beats(score, token, best_score, chosen)) {
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
        if (shard->best.id < 0 || !beats(shard->score, shard->best, score, *best)) continue;
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
    const cuts c = cuts_of(params, top->n_allowed);
    td_candidate token = { .z = top->z, .id = top->id };
    td_sample_result result = { 0 };
    td_status status = TD_OK;
    if (is_open(&c))
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
