/* Bytes in pieces to valid UTF-8 in pieces. A token may end inside a character: what cannot be shown yet waits for the
 * next piece. Bytes that can never become a character are replaced by U+FFFD, one per maximal ill-formed subpart (the
 * rule of WHATWG's decoder and of Python's errors="replace"), so the pieces add up to the same text for every split. */
#ifndef TD_TEXT_UTF8_STREAM_H
#define TD_TEXT_UTF8_STREAM_H

#include "base/status.h"

TD_BEGIN_C

typedef struct td_utf8_stream {
    uint8_t pending[4]; /* a proper prefix of a valid character */
    uint8_t n_pending;  /* 0 .. 3 */
} td_utf8_stream;

/* Bytes of room that td_utf8_stream_push() may need for n_bytes of input: every byte may become a U+FFFD. */
#define TD_UTF8_STREAM_ROOM(n_bytes) (3 * ((size_t)(n_bytes) + 3))

void td_utf8_stream_init(td_utf8_stream *stream);

/* Writes the text that is certain now to out (room as above; not zero-terminated) and returns its bytes. */
size_t td_utf8_stream_push(td_utf8_stream *stream, const void *bytes, size_t n_bytes, char *out);

/* End of the text: an unfinished character becomes one U+FFFD. Writes at most 3 bytes and returns how many; the stream
 * is as after init. */
size_t td_utf8_stream_finish(td_utf8_stream *stream, char *out);

TD_END_C
#endif
