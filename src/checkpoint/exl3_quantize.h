/* Making EXL3: from a weight matrix to trellis, suh and svh. Steps, formulas and expected errors: docs/exl3.md
 * "Making". */
#ifndef TD_CHECKPOINT_EXL3_QUANTIZE_H
#define TD_CHECKPOINT_EXL3_QUANTIZE_H

#include "checkpoint/exl3.h"

TD_BEGIN_C

/* Tables and scratch of one codebook and width, for n_threads threads (1 .. TD_PARALLEL_MAX). One call at a time. */
typedef struct td_exl3_quantizer td_exl3_quantizer;

td_status td_exl3_quantizer_create(td_exl3_codebook codebook, int bits2, int n_threads, td_exl3_quantizer **out,
                                   td_error *err);
void td_exl3_quantizer_destroy(td_exl3_quantizer *q); /* NULL is allowed */

typedef struct td_exl3_source {
    int k, n;             /* multiples of 128 */
    const float *w;       /* [k][n]: inputs x outputs, the transpose of a checkpoint's "weight"; finite */
    const float *hessian; /* [k][k] sum of x x^T over inputs, any scale; NULL: every input counts the same */
    uint64_t input_seed;  /* of the random signs of suh: equal for matrices that share an input */
    uint64_t output_seed; /* of svh's */
} td_exl3_source;

/* What happened, in the regularised basis (rotations keep sums of squares, so nmse is also the weight's but for
 * scales). */
typedef struct td_exl3_report {
    double scale;  /* g: the trellis holds g times a matrix of unit RMS */
    double nmse;   /* sum (q - w)^2 / sum w^2, without the Hessian's weights */
    bool feedback; /* a Hessian was given and used */
} td_exl3_report;

/* Quantizes into trellis (td_exl3_trellis_bytes), suh [k], svh [n]. Same source, same bytes: on every machine and for
 * any number of threads. TD_EINVAL: sizes, or a weight that is not finite (named by row and column); TD_ENOMEM. */
td_status td_exl3_quantize(td_exl3_quantizer *q, const td_exl3_source *source, uint16_t *trellis, td_f16 *suh,
                           td_f16 *svh, td_exl3_report *report, td_error *err);

/* For measuring: n_tiles tiles of targets [n_tiles][256] in row-major order at scale g; returns sum (q / g - w)^2. */
double td_exl3_trial(td_exl3_quantizer *q, const float *tiles, int n_tiles, double g);

/* Where the search for g starts: the best one for normally distributed weights of unit RMS. */
double td_exl3_start_scale(td_exl3_codebook codebook, int bits2);

TD_END_C
#endif
