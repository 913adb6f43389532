/* What a few repeated measurements say: the median, because one disturbed run must not move it, and the range. */
#ifndef TD_CLI_STATS_H
#define TD_CLI_STATS_H

#include "base/status.h"

TD_BEGIN_C

typedef struct td_stat {
    int n;
    double median, low, high;
} td_stat;

/* Sorts x. n 0: all zero. */
td_stat td_stat_of(double *x, int n);

/* (high - low) / 2 as a share of the median, the "+- 3 %" behind a number; 0 for a median of 0. */
double td_stat_spread(const td_stat *stat);

TD_END_C
#endif
