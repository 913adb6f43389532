/* What this machine can do at best, measured now: bytes copied and fp32 multiply-adds a second. Times divided by these
 * say how much is left to gain, on any machine. */
#ifndef TD_CLI_CEILINGS_H
#define TD_CLI_CEILINGS_H

#include "base/status.h"

TD_BEGIN_C

typedef struct td_ceilings {
    int n_threads;
    double copy_bytes_per_s; /* a large memcpy; read and written bytes both count */
    double read_bytes_per_s; /* a large buffer summed */
    double fma_flops_per_s;  /* multiply-adds on registers, two operations each */
} td_ceilings;

/* About half a second; 256 MiB for that time. n_threads 0: all cores. The best of several rounds, since a ceiling that
 * something disturbed is none. TD_ENOMEM. */
td_status td_ceilings_measure(int n_threads, td_ceilings *out, td_error *err);

/* The better of both, for a measurement before and one after what is compared with them: other work on the machine only
 * ever lowers them. */
void td_ceilings_raise(td_ceilings *ceilings, const td_ceilings *other);

/* "AMD EPYC, 2 cores, Linux 6.1.0 x86_64" */
void td_machine_line(char *out, size_t cap_bytes);

TD_END_C
#endif
