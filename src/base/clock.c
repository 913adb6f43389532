/* See clock.h. */
#include "base/clock.h"

#include <errno.h>
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
