/* Common to the tests of the block operations: reproducible random data, devices, buffers, comparisons. The references
 * in the tests are the formulas of docs/model.md in double precision, written as plainly as possible. */
#ifndef TD_TESTS_OPS_SUPPORT_H
#define TD_TESTS_OPS_SUPPORT_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "ops/ops.h"
#include "ops_random.h"

/* malloced and 64-byte aligned; the test stops when there is no memory. zeroed. */
void *op_alloc(size_t n_bytes);

/* uniform in (-scale, scale), each value exact in bf16 so that both modes of the device read the same numbers */
void op_fill(uint64_t *seed, float *x, size_t n, float scale);
float *op_random(uint64_t *seed, size_t n, float scale);
td_bf16 *op_bf16(const float *x, size_t n);

td_dev *op_device(const td_dev_limits *limits, int n_threads, bool exact);
td_act *op_act(const td_dev *dev, size_t n);                    /* zeros */
td_act *op_act_of(const td_dev *dev, const float *x, size_t n); /* x as act */
float *op_floats(const td_dev *dev, const td_act *x, size_t n); /* malloced */

/* |got - want| / |want| over n values; fails above bound, printing what. NaN fails. */
void op_expect_near(const char *what, const float *got, const double *want, size_t n, double bound);
void op_expect_bits(const char *what, const void *got, const void *want, size_t n_bytes);

static inline double op_sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

#endif
