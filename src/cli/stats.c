/* See stats.h. */
#include "cli/stats.h"

#include <stdlib.h>

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

td_stat td_stat_of(double *x, int n)
{
    if (n <= 0) return (td_stat){ 0 };
    qsort(x, (size_t)n, sizeof *x, by_value);
    double median = n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
    return (td_stat){ .n = n, .median = median, .low = x[0], .high = x[n - 1] };
}

double td_stat_spread(const td_stat *stat)
{
    return stat->median > 0 ? (stat->high - stat->low) / 2 / stat->median : 0;
}
