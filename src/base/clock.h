/* Clocks. Monotonic for measuring and timeouts; wall time only for what people and clients read. */
#ifndef TD_BASE_CLOCK_H
#define TD_BASE_CLOCK_H

#include "base/status.h"

TD_BEGIN_C

int64_t td_now_ns(void);      /* CLOCK_MONOTONIC */
int64_t td_wall_s(void);      /* seconds since 1970, UTC */
void td_sleep_ns(int64_t ns); /* at least ns; signals do not end it */

TD_END_C
#endif
