/* What the ranks must agree on before they work together: a text of "key=value" lines, first our own (keys with '@'),
 * then the caller's settings. Both ranks compare both texts, so both know the same first difference. */
#ifndef TD_LINK_HANDSHAKE_H
#define TD_LINK_HANDSHAKE_H

#include "link/link.h"

TD_BEGIN_C

#define TD_IDENTITY_MAX       ((size_t)32 << 10) /* bytes of the text */
#define TD_IDENTITY_LINES_MAX 512

/* The text for these options into a malloc'd string; TD_EINVAL when the settings are no such lines. */
td_status td_identity_create(const td_link_options *options, char **text, size_t *n_bytes, td_error *err);

/* Is this a well-formed identity? Lines of key=value, each ended by '\n'; keys of letters, digits and "@_.-", none
 * twice; values without control bytes. TD_EFORMAT otherwise. */
td_status td_identity_check(const char *text, size_t n_bytes, td_error *err);

/* TD_OK when everything but "@rank" is equal and the other is rank `other_rank`; TD_EINVAL naming the first differing
 * key with both values, worded alike on both ranks. Both texts have passed td_identity_check. */
td_status td_identity_compare(const char *mine, size_t mine_bytes, int my_rank, const char *theirs, size_t theirs_bytes,
                              int other_rank, td_error *err);

TD_END_C
#endif
