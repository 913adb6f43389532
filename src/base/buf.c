/* See buf.h. */
#include "base/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BUF_MIN_BYTES = 256 };

void td_buf_init(td_buf *buf, size_t limit_bytes)
{
    *buf = (td_buf){ .limit_bytes = limit_bytes };
}

void td_buf_deinit(td_buf *buf)
{
    free(buf->data);
    *buf = (td_buf){ 0 };
}

void td_buf_clear(td_buf *buf)
{
    buf->n_bytes = 0;
    buf->failed = false;
    if (buf->data) buf->data[0] = '\0';
}

char *td_buf_reserve(td_buf *buf, size_t n_bytes)
{
    if (buf->failed) return NULL;
    size_t limit = buf->limit_bytes ? buf->limit_bytes : SIZE_MAX / 4;
    if (buf->n_bytes > limit || n_bytes > limit - buf->n_bytes) {
        buf->failed = true;
        return NULL;
    }
    size_t need = buf->n_bytes + n_bytes + 1;
    if (need > buf->cap_bytes) {
        size_t cap = buf->cap_bytes * 2 > BUF_MIN_BYTES ? buf->cap_bytes * 2 : BUF_MIN_BYTES;
        if (cap < need) cap = need;
        char *data = (char *)realloc(buf->data, cap);
        if (!data) {
            buf->failed = true;
            return NULL;
        }
        buf->data = data;
        buf->cap_bytes = cap;
    }
    return buf->data + buf->n_bytes;
}

void td_buf_commit(td_buf *buf, size_t n_bytes)
{
    if (buf->failed) return;
    td_check(n_bytes < buf->cap_bytes - buf->n_bytes);
    buf->n_bytes += n_bytes;
    buf->data[buf->n_bytes] = '\0';
}

void td_buf_add(td_buf *buf, const void *data, size_t n_bytes)
{
    char *to = td_buf_reserve(buf, n_bytes);
    if (!to) return;
    if (n_bytes) memcpy(to, data, n_bytes);
    td_buf_commit(buf, n_bytes);
}

void td_buf_puts(td_buf *buf, const char *text)
{
    td_buf_add(buf, text, strlen(text));
}

void td_buf_putc(td_buf *buf, char c)
{
    td_buf_add(buf, &c, 1);
}

void td_buf_printf(td_buf *buf, const char *fmt, ...)
{
    char text[256];
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    int n = vsnprintf(text, sizeof text, fmt, args);
    if (n < 0) {
        buf->failed = true;
    } else if ((size_t)n < sizeof text) {
        td_buf_add(buf, text, (size_t)n);
    } else {
        char *to = td_buf_reserve(buf, (size_t)n); /* has room for the zero, too */
        if (to) {
            vsnprintf(to, (size_t)n + 1, fmt, again);
            td_buf_commit(buf, (size_t)n);
        }
    }
    va_end(again);
    va_end(args);
}

void td_buf_drop(td_buf *buf, size_t n_bytes)
{
    if (!n_bytes) return;
    td_check(n_bytes <= buf->n_bytes);
    memmove(buf->data, buf->data + n_bytes, buf->n_bytes - n_bytes + 1);
    buf->n_bytes -= n_bytes;
}
