/* See clock.h. */
#include "base/clock.h"

#include <errno.h>
#include <sched.h>
#include <time.h>

int64_t td_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

int64_t td_wall_s(void)
{
    return (int64_t)time(NULL);
}

void td_sleep_ns(int64_t ns)
{
    struct timespec left = { .tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000 };
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &left, &left) == EINTR) {
    }
}

int64_t td_clock_tick(int64_t *last_ns)
{
    int64_t now = td_now_ns(), passed = now - *last_ns;
    *last_ns = now;
    return passed < 1000000000 ? passed : 1000000000;
}

void td_pause(const td_pace *pace, int64_t waited_ns)
{
    if (waited_ns >= pace->yield_ns)
        td_sleep_ns(pace->sleep_ns);
    else if (waited_ns >= pace->spin_ns)
        sched_yield();
}
