/* See status.h. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *td_status_text(td_status status)
{
    switch (status) {
    case TD_OK: return "ok";
    case TD_EINVAL: return "invalid value";
    case TD_EFORMAT: return "wrong format";
    case TD_ENOTFOUND: return "not found";
    case TD_EUNSUPPORTED: return "not supported";
    case TD_ENOMEM: return "out of memory";
    case TD_EIO: return "input/output error";
    case TD_ETIMEOUT: return "timed out";
    case TD_EPEER: return "peer lost";
    case TD_EFULL: return "full";
    case TD_ECANCELED: return "canceled";
    case TD_ECUDA: return "CUDA error";
    case TD_EAGAIN: return "not ready";
    }
    return "unknown status";
}

td_status td_fail(td_error *err, td_status status, const char *fmt, ...)
{
    if (err) {
        va_list args;
        va_start(args, fmt);
        vsnprintf(err->text, sizeof err->text, fmt, args);
        va_end(args);
        err->status = status;
    }
    return status;
}

td_status td_error_prefix(td_error *err, const char *fmt, ...)
{
    if (!err) return TD_EINVAL;
    char prefix[TD_ERROR_TEXT_CAP], text[2 * TD_ERROR_TEXT_CAP + 3];
    va_list args;
    va_start(args, fmt);
    vsnprintf(prefix, sizeof prefix, fmt, args);
    va_end(args);
    snprintf(text, sizeof text, "%s: %s", prefix, err->text);
    text[TD_ERROR_TEXT_CAP - 1] = '\0';
    memcpy(err->text, text, TD_ERROR_TEXT_CAP);
    return err->status;
}

void td_check_failed(const char *file, int line, const char *cond)
{
    fprintf(stderr, "tandem: internal error at %s:%d: %s\n", file, line, cond);
    abort();
}

td_status td_mul_size(size_t a, size_t b, size_t *out)
{
    size_t product;
    if (__builtin_mul_overflow(a, b, &product)) return TD_EINVAL;
    *out = product;
    return TD_OK;
}

td_status td_add_size(size_t a, size_t b, size_t *out)
{
    size_t sum;
    if (__builtin_add_overflow(a, b, &sum)) return TD_EINVAL;
    *out = sum;
    return TD_OK;
}
