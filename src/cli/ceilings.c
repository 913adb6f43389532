/* See ceilings.h. Threads are OpenMP's, as those of the operations are. */
#include "cli/ceilings.h"

#include "base/clock.h"
#include "ops/simd.h"

#include <omp.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

enum { ROUNDS = 7, CHAINS = 6, FMA_STEPS = 1000000 };
#define BUFFER_BYTES ((size_t)128 << 20) /* far beyond any cache */

typedef double round_fn(char *to, char *from, size_t n_bytes, int n_threads);

static double seconds_since(int64_t start_ns)
{
    return (double)(td_now_ns() - start_ns) * 1e-9;
}

/* A thread's part of the buffer, in whole cache lines. */
static size_t part_of(size_t n_bytes, int n_threads, int thread, size_t *n_part)
{
    size_t part = n_bytes / (size_t)n_threads / 64 * 64;
    *n_part = part;
    return part * (size_t)thread;
}

static double copy_round(char *to, char *from, size_t n_bytes, int n_threads)
{
    int64_t start = td_now_ns();
#pragma omp parallel num_threads(n_threads)
    {
        size_t n, at = part_of(n_bytes, n_threads, omp_get_thread_num(), &n);
        memcpy(to + at, from + at, n);
    }
    return 2.0 * (double)n_bytes / seconds_since(start);
}

static double read_round(char *to, char *from, size_t n_bytes, int n_threads)
{
    int64_t start = td_now_ns();
#pragma omp parallel num_threads(n_threads)
    {
        size_t n, at = part_of(n_bytes, n_threads, omp_get_thread_num(), &n);
        const float *x = (const float *)(from + at);
        td_v16 sum[4];
        for (int i = 0; i < 4; i++) sum[i] = td_v16_splat(0);
        for (size_t k = 0; k + 4 * TD_LANES <= n / sizeof *x; k += 4 * TD_LANES)
            TD_UNROLL for (int i = 0; i < 4; i++) sum[i] =
                td_v16_add(sum[i], td_v16_load(x + k + (size_t)i * TD_LANES));
        float *out = (float *)(to + at); /* so that the sums are needed */
        td_v16_store(out, td_v16_add(td_v16_add(sum[0], sum[1]), td_v16_add(sum[2], sum[3])));
    }
    return (double)n_bytes / seconds_since(start);
}

/* Enough independent chains to fill the pipelines of two multiply-add units, few enough for the registers. Factors keep
 * the values near 1 for ever. */
static double fma_round(char *to, char *from, size_t n_bytes, int n_threads)
{
    int64_t start = td_now_ns();
    (void)from;
#pragma omp parallel num_threads(n_threads)
    {
        size_t n, at = part_of(n_bytes, n_threads, omp_get_thread_num(), &n);
        td_v16 chain[CHAINS], keep = td_v16_splat(0.999f), add = td_v16_splat(0.001f);
        TD_UNROLL for (int i = 0; i < CHAINS; i++) chain[i] = td_v16_splat(1.0f + (float)i);
        for (int step = 0; step < FMA_STEPS; step++)
            TD_UNROLL for (int i = 0; i < CHAINS; i++) chain[i] = td_v16_fma(chain[i], keep, add);
        for (int i = 1; i < CHAINS; i++) chain[0] = td_v16_add(chain[0], chain[i]);
        td_v16_store((float *)(to + at), chain[0]);
    }
    return 2.0 * CHAINS * TD_LANES * FMA_STEPS * n_threads / seconds_since(start);
}

static double best_of(round_fn *round, char *to, char *from, int n_threads)
{
    double best = 0;
    for (int i = 0; i < ROUNDS; i++) {
        double rate = round(to, from, BUFFER_BYTES, n_threads);
        if (rate > best) best = rate;
    }
    return best;
}

td_status td_ceilings_measure(int n_threads, td_ceilings *out, td_error *err)
{
    if (n_threads <= 0) n_threads = omp_get_num_procs();
    char *to = aligned_alloc(64, BUFFER_BYTES), *from = aligned_alloc(64, BUFFER_BYTES);
    if (!to || !from) {
        free(to);
        free(from);
        return td_fail(err, TD_ENOMEM, "no memory to measure this machine's copy rate (%zu MiB)", BUFFER_BYTES >> 19);
    }
    memset(to, 0, BUFFER_BYTES); /* so that no page is made while the clock runs */
    memset(from, 0, BUFFER_BYTES);
    *out = (td_ceilings){ .n_threads = n_threads,
                          .copy_bytes_per_s = best_of(copy_round, to, from, n_threads),
                          .read_bytes_per_s = best_of(read_round, to, from, n_threads),
                          .fma_flops_per_s = best_of(fma_round, to, from, n_threads) };
    free(to);
    free(from);
    return TD_OK;
}

static void raise_to(double *x, double other)
{
    if (other > *x) *x = other;
}

void td_ceilings_raise(td_ceilings *ceilings, const td_ceilings *other)
{
    raise_to(&ceilings->copy_bytes_per_s, other->copy_bytes_per_s);
    raise_to(&ceilings->read_bytes_per_s, other->read_bytes_per_s);
    raise_to(&ceilings->fma_flops_per_s, other->fma_flops_per_s);
}

/* The value of a line "model name : AMD EPYC"; x86 only, other machines name none. */
static void processor_name(char *out, size_t cap_bytes)
{
    char line[512], name[256] = "";
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file && !name[0] && fgets(line, sizeof line, file))
        if (strncmp(line, "model name", 10) == 0) (void)sscanf(line, "model name%*[ \t:]%255[^\n]", name);
    if (file) fclose(file);
    snprintf(out, cap_bytes, "%s", name[0] ? name : "processor without a name");
}

void td_machine_line(char *out, size_t cap_bytes)
{
    char name[256];
    struct utsname system;
    processor_name(name, sizeof name);
    if (uname(&system)) memset(&system, 0, sizeof system);
    snprintf(out, cap_bytes, "%s, %d cores, %s %s %s", name, omp_get_num_procs(), system.sysname, system.release,
             system.machine);
}
