/* Clocks. Monotonic for measuring and timeouts; wall time only for what people and clients read. */
#ifndef TD_BASE_CLOCK_H
#define TD_BASE_CLOCK_H

#include "base/status.h"

TD_BEGIN_C

int64_t td_now_ns(void);      /* CLOCK_MONOTONIC */
int64_t td_wall_s(void);      /* seconds since 1970, UTC */
void td_sleep_ns(int64_t ns); /* at least ns; signals do not end it */

/* For waits that look again and again.
 *   td_clock_tick  time since *last_ns, which moves to now; at most a second: time in which this process itself was
 *                  stopped or the machine slept says nothing about what is waited for
 *   td_pause       between two looks, by the time waited: nothing at all, from spin_ns on the core to whoever wants
 *                  it, from yield_ns on a sleep */
typedef struct td_pace {
    int64_t spin_ns, yield_ns, sleep_ns;
} td_pace;
int64_t td_clock_tick(int64_t *last_ns);
void td_pause(const td_pace *pace, int64_t waited_ns);

TD_END_C
#endif
