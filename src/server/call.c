/* The reply of a call that does not stream, its body as JSON, and random ids. */
#include "server/core.h"

#include <fcntl.h>
#include <string.h>
#include <sys/random.h>

void td_call_done(td_call *x, int status, const char *content_type)
{
    if (x->reply.failed) {
        td_refusal why;
        td_refuse(&why, 503, "unavailable", NULL, "out of memory");
        td_call_refuse(x, &why);
        return;
    }
    x->status = status;
    x->content_type = content_type;
}

void td_call_json(td_call *x)
{
    td_call_done(x, 200, "application/json");
}

void td_call_refuse(td_call *x, const td_refusal *why)
{
    td_buf_clear(&x->reply);
    td_refusal_write(why, &x->reply);
    x->status = why->status;
    x->content_type = "application/json";
    x->retry_after_s = why->retry_after_s;
}

const td_json *td_call_body(td_call *x)
{
    td_refusal why;
    td_error err = { 0 };
    const td_json *value = NULL;
    char *text = td_buf_reserve(&x->body, 1); /* the reader sets a zero behind the text, also behind an empty one */
    td_status st = text ? td_json_parse(&x->arena, x->body.data, x->body.n_bytes, &value, &err) : TD_ENOMEM;
    if (st == TD_OK && td_json_kind_of(value) == TD_JSON_OBJECT) return value;
    if (st == TD_OK)
        td_refuse(&why, 400, "invalid_json", NULL, "the request body must be a JSON object, not %s",
                  td_json_kind_name(value));
    else if (st == TD_ENOMEM)
        td_refuse_status(&why, st, &err);
    else
        td_refuse(&why, 400, "invalid_json", NULL, "the request body is %s", err.text);
    td_call_refuse(x, &why);
    return NULL;
}

void td_call_drop_body(td_call *x)
{
    td_arena_deinit(&x->arena);
    td_buf_deinit(&x->body);
    atomic_fetch_sub(&x->server->bodies_bytes, x->body_counted_bytes);
    x->body_counted_bytes = 0;
}

void td_random_hex(char *out, int n_digits)
{
    static const char digits[] = "0123456789abcdef";
    unsigned char bytes[64];
    int n_bytes = n_digits < (int)sizeof bytes ? n_digits : (int)sizeof bytes;
    td_check(getrandom(bytes, (size_t)n_bytes, 0) == n_bytes);
    for (int i = 0; i < n_bytes; i++) out[i] = digits[bytes[i] & 15];
    out[n_bytes] = 0;
}
