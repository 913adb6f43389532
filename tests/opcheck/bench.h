/* What the benchmarks of `opcheck --op bench` stand on (bench.c): memory on the device that lasts for one of them, the
 * time of a recording, a line of the listing. What fails ends the program: a benchmark has nothing to go on with. */
#ifndef TD_OPCHECK_BENCH_H
#define TD_OPCHECK_BENCH_H

#include "opcheck.h"

enum { OC_BENCH_NOISE = 64 << 20 };

typedef struct oc_bench_run {
    oc_ctx *oc;
    td_dev *dev;
    const td_ops *ops;
    void *noise; /* OC_BENCH_NOISE random bytes on the device */
    double copy_gb_s;
    void *memory[64]; /* of the current benchmark, until give_back */
    int n_memory;
} oc_bench_run;

void oc_bench_must(oc_bench_run *b, td_status status, const char *what);

/* Memory of the device: as it comes, zeros, random bits (packed words), what src holds. */
void *oc_bench_take(oc_bench_run *b, size_t n_bytes);
void *oc_bench_zeros(oc_bench_run *b, size_t n_bytes);
void *oc_bench_noise(oc_bench_run *b, size_t n_bytes);
void *oc_bench_host_copy(oc_bench_run *b, const void *src, size_t n_bytes);

/* n values in -scale .. scale, repeated after 4 Mi; n values mean - scale .. mean + scale. */
td_act *oc_bench_acts(oc_bench_run *b, size_t n, float scale);
float *oc_bench_floats(oc_bench_run *b, size_t n, float mean, float scale);
void oc_bench_give_back(oc_bench_run *b);

/* Median of five replays of `calls` calls, in microseconds a call; turn: the number of the call, for rotating buffers. */
typedef td_status oc_bench_call(oc_bench_run *b, void *job, int turn);
double oc_bench_measure(oc_bench_run *b, oc_bench_call *call, void *job, int calls);
void oc_bench_report(oc_bench_run *b, const char *name, int rows, double us, double bytes, double flops);

#endif
