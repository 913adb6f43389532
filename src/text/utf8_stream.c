/* The stream keeps at most three bytes: a proper prefix of a character. Everything else is decided as soon as it is
 * seen, because a maximal ill-formed subpart ends where the next byte does not fit, and never depends on later bytes.
 */
#include "text/utf8_stream.h"

#include <string.h>

#include "text/utf8.h"

#define REPLACEMENT "\xEF\xBF\xBD" /* U+FFFD */

void td_utf8_stream_init(td_utf8_stream *stream)
{
    memset(stream, 0, sizeof *stream);
}

/* Decodes [p, end) to out until its end or an unfinished character; *rest is where that starts. Returns bytes written.
 */
static size_t decode(const unsigned char *p, const unsigned char *end, char *out, const unsigned char **rest)
{
    size_t n_out = 0;
    while (p < end && !td_utf8_is_partial(p, end)) {
        size_t n;
        if (td_utf8_next(p, end, &n) != TD_UTF8_INVALID) {
            memcpy(out + n_out, p, n);
            n_out += n;
        } else {
            memcpy(out + n_out, REPLACEMENT, 3);
            n_out += 3;
        }
        p += n;
    }
    *rest = p;
    return n_out;
}

/* Puts bytes behind the pending ones, one at a time, until those are decided. Returns how many bytes that took. */
static size_t resolve_pending(td_utf8_stream *stream, const unsigned char *p, size_t n_bytes, char *out, size_t *n_out)
{
    size_t taken = 0;
    *n_out = 0;
    while (stream->n_pending && taken < n_bytes) {
        const unsigned char *rest;
        stream->pending[stream->n_pending++] = p[taken++];
        const unsigned char *end = stream->pending + stream->n_pending;
        *n_out += decode(stream->pending, end, out + *n_out, &rest);
        stream->n_pending = (uint8_t)(end - rest);
        memmove(stream->pending, rest, stream->n_pending);
    }
    return taken;
}

size_t td_utf8_stream_push(td_utf8_stream *stream, const void *bytes, size_t n_bytes, char *out)
{
    const unsigned char *p = bytes, *rest;
    size_t n_out = 0;
    if (n_bytes == 0) return 0;
    size_t taken = resolve_pending(stream, p, n_bytes, out, &n_out);
    if (stream->n_pending) return n_out;
    n_out += decode(p + taken, p + n_bytes, out + n_out, &rest);
    stream->n_pending = (uint8_t)(p + n_bytes - rest);
    memcpy(stream->pending, rest, stream->n_pending);
    return n_out;
}

size_t td_utf8_stream_finish(td_utf8_stream *stream, char *out)
{
    size_t n_out = stream->n_pending ? 3 : 0;
    memcpy(out, REPLACEMENT, n_out);
    td_utf8_stream_init(stream);
    return n_out;
}
