/* Sampling, a shard's part: what the engine asks of a row's logits (docs/sampling.md defines the rule). A shard looks
 * at its own columns of the vocabulary and answers with a few bytes; engine/sampler.h merges the answers of all shards
 * and draws. Every device gives the same bytes: candidates are ordered by (logit descending, id ascending), masses are
 * integers, and the functions are fixed sequences of exact operations (ops/sample_math.h). */
#ifndef TD_OPS_SAMPLE_H
#define TD_OPS_SAMPLE_H

#include "ops/dev.h"
#include "ops/sample_math.h"

TD_BEGIN_C

typedef struct td_sample_params {
    double temperature; /* <= 0: greedy */
    double top_p;       /* 0 < top_p; >= 1: off */
    double min_p;       /* 0: off */
    int top_k;          /* < 1: off */
    uint64_t seed;
} td_sample_params;

/* First answer: a shard's highest logit. */
typedef struct td_sample_max {
    float z;    /* highest allowed logit of the shard, of equal ones the lowest id */
    int32_t id; /* -1: nothing is allowed here */
    int32_t n_allowed;
    int32_t n_nan; /* allowed logits that are not numbers */
} td_sample_max;

typedef struct td_candidate {
    float z;
    int32_t id;
} td_candidate;

/* Second answer; candidates follow it in memory, best first. */
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
static inline size_t td_sample_summary_bytes(int n)
{
    return sizeof(td_sample_summary) + (size_t)n * sizeof(td_candidate);
}

/* ---- operations ---- */

/* A row that is sampled. */
typedef struct td_sample_job {
    td_sample_params params;
    uint64_t pos;      /* absolute index of the token that is sampled (the first reply token of an n-token prompt: n) */
    td_sample_max top; /* as merged from all shards; for summaries */
    uint64_t out_bytes; /* where its summary starts in `summaries`, a multiple of 8 */
    int32_t row;        /* of the logits */
    int32_t mask;       /* row of `allowed`; -1: every id may be sampled */
    int32_t n_logprobs; /* -1: none are wanted */
    int32_t n;          /* candidates of its summary, 1 .. n_max */
} td_sample_job;

/* sample_max     maxima[i] of job i
 * sample_summary td_sample_summary_bytes(jobs[i].n) bytes for job i, all of them written, behind the last candidate
 *                zeros. Rows without NaN among the allowed logits and with a finite top only: others end before.
 * Pointers are device-visible, 8-byte aligned; logits are read where the jobs' rows are, columns 0 .. n_columns - 1. */
typedef struct td_sample_args {
    int n_jobs;          /* 0 .. TD_WINDOW_MAX */
    int n_columns;       /* of this shard, 0 .. the device's limit; columns of padding are left out */
    int32_t first_id;    /* id of column 0 */
    int n_max;           /* sample_summary: largest n of the jobs */
    const float *logits; /* [rows][stride] */
    size_t stride;
    const uint32_t *allowed; /* [masks][mask_words] bit id % 32 of word id / 32; by id, not by column */
    size_t mask_words;
    const td_sample_job *jobs; /* [n_jobs] */
    td_sample_max *maxima;     /* [n_jobs] out */
    unsigned char *summaries;  /* out */
} td_sample_args;
typedef td_status td_sample_fn(td_dev *dev, const td_sample_args *a);

td_sample_fn td_cpu_sample_max;
td_sample_fn td_cpu_sample_summary;

/* ---- one row, on the CPU ---- */

/* One shard's part of a row. */
typedef struct td_sample_logits {
    const float *z; /* [n] fp32 logits of ids first_id .. first_id + n - 1 */
    int n;          /* rows of padding are left out */
    int32_t first_id;
    const uint32_t *allowed; /* bit id % 32 of word id / 32: may be sampled; indexed by id, not by column; NULL: all */
} td_sample_logits;

void td_sample_shard_max(const td_sample_logits *logits, td_sample_max *out);

/* top: as merged. out: td_sample_summary_bytes(n) bytes, 8-byte aligned; all of them are written. */
void td_sample_shard_summary(const td_sample_logits *logits, const td_sample_params *params, uint64_t pos,
                             const td_sample_max *top, int n_logprobs, int n, td_sample_summary *out);

/* ---- what shards and the merge share ---- */

/* The order of the rule. */
TD_HD static inline bool td_sample_before(td_candidate a, td_candidate b)
{
    return a.z > b.z || (a.z == b.z && a.id < b.id);
}

/* The better of two scored tokens; equal scores: the earlier in order. */
TD_HD static inline bool td_sample_beats(double score, td_candidate token, double best_score, td_candidate best)
{
    return best.id < 0 || score > best_score || (score == best_score && td_sample_before(token, best));
}

/* Which cuts a row has. */
typedef struct td_sample_cuts {
    bool greedy;
    int top_k;        /* 0: off, also where it would keep everything */
    bool by_mass;     /* top_p */
    bool by_distance; /* min_p */
    double least;     /* by_distance: d >= least is kept */
} td_sample_cuts;

TD_HD static inline td_sample_cuts td_sample_cuts_of(const td_sample_params *params, int n_allowed)
{
    td_sample_cuts c;
    c.greedy = params->temperature <= 0;
    c.top_k = params->top_k >= 1 && params->top_k < n_allowed ? params->top_k : 0;
    c.by_mass = params->top_p < 1;
    c.by_distance = params->min_p > 0;
    c.least = c.by_distance && params->min_p < 1 ? td_sample_ln(params->min_p) : 0.0;
    return c;
}

/* Every token can tell by itself whether it is kept: no list is needed, each shard names its best. */
TD_HD static inline bool td_sample_is_open(const td_sample_cuts *c)
{
    return !c->greedy && !c->top_k && !c->by_mass;
}

TD_END_C
#endif
