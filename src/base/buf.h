/* A growing byte buffer for text that is put together piece by piece: prompts, JSON replies, stream pieces.
 * Failure sticks: after an append that found no memory or passed limit_bytes, every later append does nothing and
 * `failed` stays set, so a caller appends freely and looks once at the end. */
#ifndef TD_BASE_BUF_H
#define TD_BASE_BUF_H

#include "base/status.h"

TD_BEGIN_C

typedef struct td_buf {
    char *data; /* always followed by a zero byte once something was appended; NULL before */
    size_t n_bytes;
    size_t cap_bytes;   /* of the allocation, the zero included */
    size_t limit_bytes; /* n_bytes never passes it; 0 = no limit */
    bool failed;
} td_buf;

void td_buf_init(td_buf *buf, size_t limit_bytes);
void td_buf_deinit(td_buf *buf);
void td_buf_clear(td_buf *buf); /* n_bytes = 0, failed = false; the memory is kept */

void td_buf_add(td_buf *buf, const void *data, size_t n_bytes);
void td_buf_puts(td_buf *buf, const char *text);
void td_buf_putc(td_buf *buf, char c);
void td_buf_printf(td_buf *buf, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Room for n_bytes more without another allocation; NULL after a failure, else where they may be written (then raise
 * n_bytes by what was used, through td_buf_commit). */
char *td_buf_reserve(td_buf *buf, size_t n_bytes);
void td_buf_commit(td_buf *buf, size_t n_bytes);

/* Removes the first n_bytes (<= buf->n_bytes): what was sent. Moves the rest. */
void td_buf_drop(td_buf *buf, size_t n_bytes);

TD_END_C
#endif
