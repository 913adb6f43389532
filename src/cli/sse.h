/* Server-sent events, read piece by piece as the network delivers them: "data: ..." lines, a blank line ends an event.
 * Lines end with LF, CR or CRLF; several data lines of one event are joined with LF; comments, ids, retry hints and
 * event names are skipped, because nothing this program talks to needs them. */
#ifndef TD_CLI_SSE_H
#define TD_CLI_SSE_H

#include "base/buf.h"

TD_BEGIN_C

/* One event's data, zero-terminated and the callback's to change. Return false to read no further. */
typedef bool td_event_fn(void *user, char *data, size_t n_bytes);

typedef struct td_event_reader {
    td_event_fn *event;
    void *user;
    td_buf line, data;
    bool has_data; /* an event with an empty data line is still an event */
    bool after_cr; /* a LF that follows belongs to the same line end */
    bool begun;    /* past a byte order mark */
    bool stopped;  /* the callback said so */
} td_event_reader;

/* limit_bytes: of one event, line ends included. */
void td_event_reader_init(td_event_reader *reader, size_t limit_bytes, td_event_fn *event, void *user);
void td_event_reader_deinit(td_event_reader *reader);

/* TD_ECANCELED: the callback asked to stop, now or before; TD_EFORMAT: an event is larger than the limit (or memory is
 * out). An event that the stream's end cuts off is never delivered. */
td_status td_event_reader_feed(td_event_reader *reader, const char *bytes, size_t n_bytes);

TD_END_C
#endif
