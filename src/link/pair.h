/* Forming a pair: rank 1 finds rank 0, both agree (handshake.h), and two connections stand: one for control, one for
 * step messages. Runs in the opening thread, with no other thread yet. */
#ifndef TD_LINK_PAIR_H
#define TD_LINK_PAIR_H

#include "link/door.h"
#include "link/link.h"

TD_BEGIN_C

typedef struct td_pair {
    int control_fd, step_fd;
    uint64_t generation;
    td_door door;   /* rank 0: stays open, to tell latecomers */
    char *identity; /* malloc'd */
    size_t identity_bytes;
} td_pair;

/* TD_ETIMEOUT: the peer did not come within wait_ms. TD_EINVAL: the ranks differ. TD_EPEER: rank 0 refused us because
 * it has a pair. On failure nothing stays open. */
td_status td_pair_form(const td_link_options *options, td_pair *pair, td_error *err);
void td_pair_close(td_pair *pair);

/* Answers a guest with a refusal and closes its connection. */
void td_pair_refuse(const td_visit *visit, td_refusal kind, const char *text);

TD_END_C
#endif
