/* One rank: the whole model is here, a gather of [1][n] is complete as it stands. */
#include "link/transport.h"

static td_status loop_gather(td_link *link, void *buf, size_t n_bytes, td_error *err)
{
    (void)link, (void)buf, (void)n_bytes, (void)err;
    return TD_OK;
}

static td_status loop_exchange_start(td_link *link, td_exchange *x, const void *mine, size_t send_bytes,
                                     size_t send_piece_bytes, void *theirs, td_error *err)
{
    (void)link, (void)mine, (void)send_bytes, (void)send_piece_bytes, (void)theirs, (void)err;
    x->n_send = x->n_recv = 0; /* no peer: nothing comes */
    return TD_OK;
}

static td_status loop_exchange_piece(td_link *link, td_exchange *x, int piece, td_error *err)
{
    (void)link, (void)x, (void)piece, (void)err;
    return TD_OK;
}

static td_status loop_exchange_sent(td_link *link, td_exchange *x, td_error *err)
{
    (void)link, (void)x, (void)err;
    return TD_OK;
}

static void loop_nothing(td_link *link)
{
    (void)link;
}

const td_transport td_transport_loop = {
    .gather = loop_gather,
    .exchange_start = loop_exchange_start,
    .exchange_piece = loop_exchange_piece,
    .exchange_sent = loop_exchange_sent,
    .progress = loop_nothing,
    .close = loop_nothing,
};
