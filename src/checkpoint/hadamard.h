/* The 128-point Hadamard transform in natural order: y[i] = scale * sum_j (-1)^popcount(i & j) x[j]. */
#ifndef TD_CHECKPOINT_HADAMARD_H
#define TD_CHECKPOINT_HADAMARD_H

#include "base/status.h"

TD_BEGIN_C

#define TD_HADAMARD_N     128
#define TD_HADAMARD_SCALE 0.08838834764831845f /* 1 / sqrt(128): the transform is then its own inverse */

/* In place. Seven stages of butterflies (a, b) -> (a + b, a - b) with strides 1, 2, 4, .. 64 in this order, then one
 * multiply by scale. The order is part of the arithmetic: only additions and one product, so every machine gives the
 * same bits. */
void td_hadamard128(float x[TD_HADAMARD_N], float scale);

/* n (a multiple of 128) values, block by block. */
void td_hadamard128_blocks(float *x, size_t n, float scale);

/* The same transform down the columns of x[128][stride], the first count columns; stages in the same order. */
void td_hadamard128_down(float *x, size_t stride, size_t count, float scale);
void td_hadamard128_down_f64(double *x, size_t stride, size_t count, double scale);

TD_END_C
#endif
