/* Stop strings on a stream of text that arrives in pieces of any size.
 *
 * Text is looked at byte by byte, so the result never depends on how it was cut: the first byte at which any stop
 * string is complete ends the reply; if several end there, the longest counts (the one that began first). Text that
 * could be the beginning of a stop string must be held back by the caller: td_stop_held() says how many of the last
 * bytes. Stop strings are valid UTF-8, so a match or a held piece always begins at a character's first byte. */
#ifndef TD_TEXT_STOP_H
#define TD_TEXT_STOP_H

#include "base/json.h"

TD_BEGIN_C

#define TD_STOP_MAX       16
#define TD_STOP_MAX_BYTES 1024

typedef struct td_stop_string {
    const char *text;
    const uint16_t *fail; /* fail[i]: longest proper border of text[0..i], for i < n_bytes */
    uint16_t n_bytes;
    uint16_t n_matched; /* how much of text the last bytes seen are */
} td_stop_string;

typedef struct td_stop {
    td_stop_string strings[TD_STOP_MAX];
    int n_strings;
} td_stop;

/* From a request's `stop`: absent or null (none), a string, or an array of at most TD_STOP_MAX strings, each of 1 to
 * TD_STOP_MAX_BYTES bytes. Copies into the arena. TD_EINVAL with the reason otherwise; TD_ENOMEM. */
td_status td_stop_init(td_stop *stop, td_arena *arena, const td_json *value, td_error *err);

/* One more byte. Returns the index of the stop string that ends here, or -1. */
int td_stop_step(td_stop *stop, unsigned char byte);

/* How many of the last bytes may be the beginning of a stop string. */
size_t td_stop_held(const td_stop *stop);

TD_END_C
#endif
