/* The CPU's ranks gather through the link; what is left here is the loopback of measurements. */
#include "ops/gather.h"
#include "base/clock.h"

#include <string.h>

td_status td_cpu_gather(td_dev *dev, const td_gather_args *a)
{
    (void)dev;
    if (a->bell) return TD_EUNSUPPORTED;
    char *parts = (char *)a->partials;
    memcpy(parts + (size_t)(1 - a->rank) * a->n_bytes, parts + (size_t)a->rank * a->n_bytes, a->n_bytes);
    for (int64_t start = td_now_ns(); td_now_ns() - start < a->loopback_ns;) continue; /* a sleep takes 60 us more */
    return TD_OK;
}
