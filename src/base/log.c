/* See log.h. */
#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static atomic_int log_least = TD_LOG_INFO;
static atomic_int log_rank = -1;

void td_log_init(td_log_level least, int rank)
{
    atomic_store(&log_least, (int)least);
    atomic_store(&log_rank, rank);
}

void td_log(td_log_level level, const char *area, const char *fmt, ...)
{
    static const char *const names[] = { "debug", "info ", "warn ", "error" };
    if ((int)level < atomic_load(&log_least)) return;

    char line[2048];
    struct timespec now;
    struct tm utc;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    size_t n = strftime(line, sizeof line, "%Y-%m-%dT%H:%M:%S", &utc);
    n += (size_t)snprintf(line + n, sizeof line - n, ".%03dZ ", (int)(now.tv_nsec / 1000000));
    int rank = atomic_load(&log_rank);
    if (rank >= 0) n += (size_t)snprintf(line + n, sizeof line - n, "rank%d ", rank);
    n += (size_t)snprintf(line + n, sizeof line - n, "%s %s: ", names[level], area);

    va_list args;
    va_start(args, fmt);
    int text = vsnprintf(line + n, sizeof line - n, fmt, args);
    va_end(args);
    n += text < 0 ? 0 : (size_t)text;
    if (n > sizeof line - 1) n = sizeof line - 1;
    line[n++] = '\n';
    if (write(STDERR_FILENO, line, n) < 0) return; /* nowhere left to report to */
}
