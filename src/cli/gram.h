/* Sums of x x^T over many rows x: the Hessian of a linear layer's inputs. */
#ifndef TD_CLI_GRAM_H
#define TD_CLI_GRAM_H

#include "base/status.h"

TD_BEGIN_C

enum { TD_GRAM_ROWS = 512 }; /* most rows of one call */

typedef struct td_gram td_gram;

/* For rows of up to k_max values, k_max a multiple of 8: 8 k_max^2 bytes and a little. n_threads 1 .. TD_PARALLEL_MAX
 * decides nothing but time. */
td_status td_gram_create(int k_max, int n_threads, td_gram **out, td_error *err);
void td_gram_destroy(td_gram *gram);

/* An empty sum over rows of k values; k a multiple of 8. */
void td_gram_reset(td_gram *gram, int k);

/* sum += x x^T for every row of x [n_rows][k], n_rows <= TD_GRAM_ROWS. In double, every element one chain over the rows
 * in the order they come: how they are divided into calls changes no bit. */
void td_gram_add(td_gram *gram, const float *x, int n_rows);

/* h [k][k], symmetric: the sum divided by the number of rows; zeros without any. */
void td_gram_mean(const td_gram *gram, float *h);

TD_END_C
#endif
