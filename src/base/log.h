/* Log lines: "2026-01-02T03:04:05.678Z rank0 info  link: text" on stderr, one write a line, safe from every thread.
 * Never a key, a prompt or a reply in a line. */
#ifndef TD_BASE_LOG_H
#define TD_BASE_LOG_H

#include "base/status.h"

TD_BEGIN_C

typedef enum td_log_level { TD_LOG_DEBUG, TD_LOG_INFO, TD_LOG_WARN, TD_LOG_ERROR } td_log_level;

void td_log_init(td_log_level least, int rank); /* rank < 0: no rank in the line (tools) */
void td_log(td_log_level level, const char *area, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

TD_END_C
#endif
