/* See sse.h. */
#include "cli/sse.h"

#include <string.h>

void td_event_reader_init(td_event_reader *reader, size_t limit_bytes, td_event_fn *event, void *user)
{
    *reader = (td_event_reader){ .event = event, .user = user };
    td_buf_init(&reader->line, limit_bytes);
    td_buf_init(&reader->data, limit_bytes);
}

void td_event_reader_deinit(td_event_reader *reader)
{
    td_buf_deinit(&reader->line);
    td_buf_deinit(&reader->data);
}

static void add_data(td_event_reader *r, const char *value, size_t n_bytes)
{
    if (r->has_data) td_buf_putc(&r->data, '\n');
    td_buf_add(&r->data, value, n_bytes);
    r->has_data = true;
}

static void end_event(td_event_reader *r)
{
    if (r->has_data) {
        char none[1] = { 0 };
        r->stopped = !r->event(r->user, r->data.data ? r->data.data : none, r->data.n_bytes);
    }
    td_buf_clear(&r->data);
    r->has_data = false;
}

static void end_line(td_event_reader *r)
{
    static const char BOM[] = "\xef\xbb\xbf";
    const char *line = r->line.data ? r->line.data : "";
    size_t n = r->line.n_bytes;
    if (!r->begun && n >= 3 && memcmp(line, BOM, 3) == 0) line += 3, n -= 3;
    r->begun = true;
    if (n == 0) {
        end_event(r);
    } else if (n >= 4 && memcmp(line, "data", 4) == 0 && (n == 4 || line[4] == ':')) {
        size_t skip = n == 4 ? 4 : n > 5 && line[5] == ' ' ? 6 : 5; /* one space after the colon is not data */
        add_data(r, line + skip, n - skip);
    }
    td_buf_clear(&r->line);
}

td_status td_event_reader_feed(td_event_reader *reader, const char *bytes, size_t n_bytes)
{
    td_event_reader *r = reader;
    for (size_t i = 0; i < n_bytes && !r->stopped; i++) {
        bool second = r->after_cr && bytes[i] == '\n';
        r->after_cr = bytes[i] == '\r';
        if (second) continue;
        if (bytes[i] == '\n' || bytes[i] == '\r') {
            end_line(r);
        } else {
            size_t end = i; /* the rest of the line that is here, at once */
            while (end < n_bytes && bytes[end] != '\n' && bytes[end] != '\r') end++;
            td_buf_add(&r->line, bytes + i, end - i);
            i = end - 1;
        }
        if (r->line.failed || r->data.failed) return TD_EFORMAT;
    }
    return r->stopped ? TD_ECANCELED : TD_OK;
}
