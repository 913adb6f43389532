/* In place of ucx.c where UCX is not there (TD_UCX=OFF): one rank works, two are refused before anything waits. */
#include "link/transport.h"

static void nothing(td_link *link)
{
    (void)link;
}

/* Never used but for closing: no link of two ranks comes to be. */
const td_transport td_transport_ucx = { .progress = nothing, .close = nothing };

td_status td_ucx_available(td_error *err)
{
    return td_fail(err, TD_EUNSUPPORTED, "two ranks: this program was built without UCX");
}

td_status td_ucx_open(td_link *link, const td_link_options *options, td_error *err)
{
    (void)link, (void)options;
    return td_ucx_available(err);
}
