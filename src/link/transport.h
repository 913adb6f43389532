/* The seam between the link's common part (link.c, step.c) and what moves the bytes: loop.c for one rank, ucx.c for
 * two. A transport that posts RDMA writes itself would be a third table. */
#ifndef TD_LINK_TRANSPORT_H
#define TD_LINK_TRANSPORT_H

#include "link/control.h"

TD_BEGIN_C

typedef struct td_transport {
    /* Arguments are checked by link.c. Each waits with td_wait_more and returns what that says. */
    td_status (*gather)(td_link *link, void *buf, size_t n_bytes, td_error *err);
    td_status (*exchange_start)(td_link *link, td_exchange *x, const void *mine, size_t send_bytes,
                                size_t send_piece_bytes, void *theirs, td_error *err);
    td_status (*exchange_piece)(td_link *link, td_exchange *x, int piece,
                                td_error *err);                               /* until that piece of theirs is there */
    td_status (*exchange_sent)(td_link *link, td_exchange *x, td_error *err); /* until all of mine is sent */
    void (*progress)(td_link *link);
    void (*close)(td_link *link); /* state may be half made */
} td_transport;

extern const td_transport td_transport_loop;
extern const td_transport td_transport_ucx;

/* TD_EUNSUPPORTED: this program was built without UCX (no_ucx.c). Asked before a peer is waited for. */
td_status td_ucx_available(td_error *err);

/* Connects to the peer through link->control; link->state on success. Memory: registers link->region. */
td_status td_ucx_open(td_link *link, const td_link_options *options, td_error *err);

typedef struct td_step_stream td_step_stream;

struct td_link {
    int rank, world, warn_ms, late_ms;
    size_t gather_max_bytes;
    const char *name; /* of the transport, as in the options */
    const td_transport *ops;
    void *state;         /* the transport's */
    td_control *control; /* NULL for world 1 */
    uint64_t generation;
    unsigned char *region; /* page-aligned */
    size_t region_bytes, region_used_bytes;
    uint64_t *check;      /* [world][2], for td_link_check */
    uint64_t n_exchanges; /* begun so far: the number of the last */
    bool exchanging;      /* the last is not finished */
    td_step_stream *steps;
};

/* step.c */
td_status td_steps_create(td_link *link, td_error *err);
void td_steps_destroy(td_link *link);

/* Pieces of an exchange of n_bytes: how long each but the last is. The same on both sides. */
size_t td_exchange_piece_bytes(size_t n_bytes);

TD_END_C
#endif
