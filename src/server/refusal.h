/* Why a request is refused, in HTTP's words. Filled by the function that decides, written by error_reply.c. Internal.
 */
#ifndef TD_SERVER_REFUSAL_H
#define TD_SERVER_REFUSAL_H

#include "base/json_write.h"

TD_BEGIN_C

#define TD_PARAM_CAP 96

typedef struct td_refusal {
    int status;               /* of HTTP: 400, 429, ... */
    const char *code;         /* static; NULL writes null */
    char param[TD_PARAM_CAP]; /* "messages[2].content"; "" writes null */
    int retry_after_s;        /* 0: no Retry-After header */
    char text[TD_ERROR_TEXT_CAP];
} td_refusal;

/* Fills why and returns TD_EINVAL. param and code may be NULL. */
td_status td_refuse(td_refusal *why, int status, const char *code, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));

/* A field with a wrong type or value: 400. */
td_status td_refuse_field(td_refusal *why, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* A field that is not implemented: 400 unsupported_parameter, "<param>: <what> is not available yet in this version".
 */
td_status td_refuse_unsupported(td_refusal *why, const char *param, const char *what);

/* What an engine's or module's status means to a client: TD_EFULL is 429, TD_EINVAL 400, ENOMEM 503, ... */
td_status td_refuse_status(td_refusal *why, td_status status, const td_error *err);

/* {"error":{"message","type","param","code"}} */
void td_refusal_write(const td_refusal *why, td_buf *out);

TD_END_C
#endif
