/* Refusals: status, type and code belong together, so they are put together in one place. */
#include "server/refusal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { RETRY_BUSY_S = 5 };

static void fill(td_refusal *why, int status, const char *code, const char *param, const char *fmt, va_list args)
{
    why->status = status;
    why->code = code;
    why->retry_after_s = status == 429 || status == 503 ? RETRY_BUSY_S : 0;
    snprintf(why->param, sizeof why->param, "%s", param ? param : "");
    vsnprintf(why->text, sizeof why->text, fmt, args);
}

td_status td_refuse(td_refusal *why, int status, const char *code, const char *param, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fill(why, status, code, param, fmt, args);
    va_end(args);
    return TD_EINVAL;
}

td_status td_refuse_field(td_refusal *why, const char *param, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fill(why, 400, NULL, param, fmt, args);
    va_end(args);
    return TD_EINVAL;
}

td_status td_refuse_unsupported(td_refusal *why, const char *param, const char *what)
{
    return td_refuse(why, 400, "unsupported_parameter", param, "%s: %s not available yet in this version", param, what);
}

td_status td_refuse_status(td_refusal *why, td_status status, const td_error *err)
{
    switch (status) {
    case TD_EINVAL:
    case TD_EFORMAT:
    case TD_EUNSUPPORTED: return td_refuse(why, 400, NULL, NULL, "%s", err->text);
    case TD_EFULL: return td_refuse(why, 429, "overloaded", NULL, "the server is busy: %s", err->text);
    case TD_ENOMEM: return td_refuse(why, 503, "unavailable", NULL, "out of memory: %s", err->text);
    case TD_ECANCELED: return td_refuse(why, 503, "unavailable", NULL, "the server is stopping");
    case TD_EPEER: return td_refuse(why, 503, "unavailable", NULL, "the engine has stopped: %s", err->text);
    default: return td_refuse(why, 500, "internal_error", NULL, "generation failed: %s", err->text);
    }
}

static const char *type_of(int status)
{
    if (status == 429) return "rate_limit_error";
    return status >= 500 ? "server_error" : "invalid_request_error";
}

void td_refusal_write(const td_refusal *why, td_buf *out)
{
    td_json_writer w = { .out = out };
    td_json_write_begin(&w, '{');
    td_json_write_key(&w, "error");
    td_json_write_begin(&w, '{');
    td_json_write_member_text(&w, "message", why->text);
    td_json_write_member_text(&w, "type", type_of(why->status));
    td_json_write_member_text(&w, "param", why->param[0] ? why->param : NULL);
    td_json_write_member_text(&w, "code", why->code);
    td_json_write_end(&w, '}');
    td_json_write_end(&w, '}');
}
