/* All-gather of partials between two ranks from inside a device's stream: the kernel puts this rank's part where the
 * host sees it and rings a bell; whoever moves bytes (model/exchange.c over the link) answers when the other rank's
 * part has arrived; the kernel goes on. So a whole forward is one recording, and the host never launches anything in
 * the middle of it. docs/link.md "Exchanges from a device".
 *
 * Numbers. Every gather of a device has the next number, counted by the device (state) and by the host alike; it wraps.
 * A gather starts only when the one before it is over, so one pair of slots is enough while the answer means that the
 * bytes have also been sent. */
#ifndef TD_OPS_GATHER_H
#define TD_OPS_GATHER_H

#include <stdalign.h>

#include "ops/dev.h"

TD_BEGIN_C

enum { TD_BELL_LINE = 128 }; /* words of different writers do not share what caches move */

/* In memory that host and device see at one address, zeroed before the first gather. */
typedef struct td_bell {
    alignas(TD_BELL_LINE) uint32_t rung;    /* device: this rank's part of gather `rung` is in its slot */
    alignas(TD_BELL_LINE) uint32_t arrived; /* host: the other rank's part of gather `arrived` is in its slot */
    alignas(TD_BELL_LINE) uint32_t stop;    /* host, not 0: nothing more will arrive; gathers end at once */
    alignas(TD_BELL_LINE) uint32_t gave_up; /* device: the gather that waited beyond its limit; 0: none */
} td_bell;

/* Memory that is read soon. */
typedef struct td_span {
    const void *data; /* 16-byte aligned */
    size_t n_bytes;
} td_span;
enum { TD_GATHER_NEXT = 8 };

typedef struct td_gather_args {
    int rank;        /* 0 or 1 */
    size_t n_bytes;  /* of one rank's part; a multiple of 16 */
    float *partials; /* [2][n_bytes]: part `rank` is read, the other one written */
    uint32_t *state; /* [4] of the device, zeroed before the first gather */
    td_bell *bell;   /* NULL: nobody answers; the part itself comes back after loopback_ns (measurements) */
    void *slots;     /* [2][n_bytes], host and device see it; unused without a bell */
    int64_t loopback_ns;
    int64_t limit_ns;             /* of waiting for `arrived` */
    td_span next[TD_GATHER_NEXT]; /* weights that come next, in the order of their use; n_bytes 0: no more. A device
                                     whose memory idles while it waits may fetch them into its caches */
} td_gather_args;

typedef td_status td_gather_fn(td_dev *dev, const td_gather_args *args);

td_gather_fn td_cpu_gather; /* loopback only: on the CPU the link itself gathers */

TD_END_C
#endif
