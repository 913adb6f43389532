/* A step: what rank 0 decided for one iteration, as the message that the other ranks receive. Every rank, rank 0 too,
 * applies the decoded form through the same code. Layout: docs/engine.md; all numbers little endian.
 *
 * The receiver checks every length and range against its own limits: a wrong peer is an error, not a crash. */
#ifndef TD_ENGINE_STEP_H
#define TD_ENGINE_STEP_H

#include "engine/sampler.h"
#include "ops/dev.h"

TD_BEGIN_C

enum { TD_STEP_SLOTS_MAX = 16, TD_STEP_END_IDS_MAX = 64 };

/* A request takes a slot. */
typedef struct td_step_admit {
    int32_t slot;
    int32_t n_ids;
    const int32_t *ids; /* [n_ids] borrowed: the request's (rank 0) or the message's (others) */
    int32_t max_tokens, min_tokens, n_logprobs;
    int32_t n_end_ids;
    int32_t end_ids[TD_STEP_END_IDS_MAX];
    td_sample_params sample;
} td_step_admit;

/* Rows of one slot in this iteration's window. */
typedef struct td_step_rows {
    int32_t slot;
    int32_t n_rows;
    int32_t prompt; /* 1: the next n_rows prompt ids, in chunks; 0: the pending token */
} td_step_rows;

typedef struct td_step {
    uint64_t digest; /* of rank 0's slots and pool before the step: must equal the receiver's */
    int32_t stop;    /* 1: nothing else counts, the engine ends */
    int32_t n_releases, n_admits, n_rows;
    int32_t releases[TD_STEP_SLOTS_MAX];     /* applied first */
    td_step_admit admits[TD_STEP_SLOTS_MAX]; /* then these */
    td_step_rows rows[TD_STEP_SLOTS_MAX];    /* then one forward over these */
} td_step;

typedef struct td_step_limits {
    int n_slots, vocab;
    int32_t context_tokens;
    int chunk_rows;
} td_step_limits;

/* Bytes that encode needs at most for n_ids prompt ids in all. */
size_t td_step_bytes_max(size_t n_ids);

/* Writes the message to buf (cap from td_step_bytes_max); returns its bytes. */
size_t td_step_encode(const td_step *step, void *buf, size_t cap_bytes);

/* TD_EFORMAT naming what is wrong; *out then holds nothing to use. Prompt ids stay in buf: it must outlive the step and
 * be 4-byte aligned. */
td_status td_step_decode(const void *buf, size_t n_bytes, const td_step_limits *limits, td_step *out, td_error *err);

TD_END_C
#endif
