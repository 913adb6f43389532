/* Memory, times and lines of the benchmarks; bench.h. */
#include "bench.h"

#include "base/clock.h"

#include <stdio.h>
#include <stdlib.h>

void oc_bench_must(oc_bench_run *b, td_status status, const char *what)
{
    td_error err = { 0 };
    if (status == TD_OK && td_dev_sync(b->dev, &err) == TD_OK) return;
    if (!err.text[0]) td_fail(&err, status, "%s", td_status_text(status));
    oc_give_up(b->oc, what, &err);
}

void *oc_bench_take(oc_bench_run *b, size_t n_bytes)
{
    td_error err = { 0 };
    void *memory = NULL;
    td_check(b->n_memory < 64);
    if (td_dev_alloc(b->dev, n_bytes, &memory, &err) != TD_OK) oc_give_up(b->oc, "memory", &err);
    b->memory[b->n_memory++] = memory;
    return memory;
}

void *oc_bench_zeros(oc_bench_run *b, size_t n_bytes)
{
    void *memory = oc_bench_take(b, n_bytes);
    oc_bench_must(b, td_dev_fill(b->dev, memory, 0, n_bytes), "fill");
    return memory;
}

void *oc_bench_noise(oc_bench_run *b, size_t n_bytes)
{
    unsigned char *memory = (unsigned char *)oc_bench_take(b, n_bytes);
    for (size_t at = 0; at < n_bytes; at += OC_BENCH_NOISE)
        td_dev_copy(b->dev, memory + at, b->noise, n_bytes - at < OC_BENCH_NOISE ? n_bytes - at : OC_BENCH_NOISE);
    oc_bench_must(b, TD_OK, "noise");
    return memory;
}

void *oc_bench_host_copy(oc_bench_run *b, const void *src, size_t n_bytes)
{
    void *memory = oc_bench_take(b, n_bytes);
    oc_bench_must(b, td_dev_upload(b->dev, memory, src, n_bytes), "upload");
    return memory;
}

td_act *oc_bench_acts(oc_bench_run *b, size_t n, float scale)
{
    td_bf16 *host = oc_host_bf16(b->oc, n < 1 << 22 ? n : 1 << 22, scale);
    unsigned char *memory = (unsigned char *)oc_bench_take(b, n * 2);
    for (size_t at = 0; at < n; at += 1 << 22)
        td_dev_upload(b->dev, memory + 2 * at, host, 2 * (n - at < 1 << 22 ? n - at : 1 << 22));
    free(host);
    return (td_act *)(void *)memory;
}

float *oc_bench_floats(oc_bench_run *b, size_t n, float mean, float scale)
{
    float *host = (float *)malloc(n * sizeof *host);
    for (size_t i = 0; i < n; i++) host[i] = mean + scale * oc_uniform(b->oc);
    float *memory = (float *)oc_bench_host_copy(b, host, n * sizeof *host);
    free(host);
    return memory;
}

void oc_bench_give_back(oc_bench_run *b)
{
    for (int i = 0; i < b->n_memory; i++) td_dev_free(b->dev, b->memory[i], 0);
    b->n_memory = 0;
}

double oc_bench_measure(oc_bench_run *b, oc_bench_call *call, void *job, int calls)
{
    td_graph *graph = NULL;
    td_error err = { 0 };
    double us[5];
    oc_bench_must(b, call(b, job, 0), "the operation");
    if (b->oc->once) return 1.0;
    td_status status = td_dev_capture_begin(b->dev);
    for (int i = 0; i < calls && status == TD_OK; i++) status = call(b, job, i);
    if (td_dev_capture_end(b->dev, &graph, &err) != TD_OK || status != TD_OK) oc_give_up(b->oc, "recording", &err);
    td_dev_graph_launch(b->dev, graph);
    oc_bench_must(b, TD_OK, "replay");
    for (int i = 0; i < 5; i++) {
        int64_t start = td_now_ns();
        td_dev_graph_launch(b->dev, graph);
        oc_bench_must(b, TD_OK, "replay");
        us[i] = 1e-3 * (double)(td_now_ns() - start) / calls;
    }
    td_dev_graph_destroy(b->dev, graph);
    for (int i = 1; i < 5; i++)
        for (int j = i; j > 0 && us[j] < us[j - 1]; j--) {
            double t = us[j];
            us[j] = us[j - 1];
            us[j - 1] = t;
        }
    return us[2];
}

void oc_bench_report(oc_bench_run *b, const char *name, int rows, double us, double bytes, double flops)
{
    double gb_s = bytes / us * 1e-3;
    if (b->oc->json)
        oc_report_time(b->oc, name, rows, us, gb_s, gb_s / b->copy_gb_s, flops / us * 1e-6);
    else
        printf("%-34s %5d rows %10.2f us %8.0f GB/s %6.1f %% of copy %8.1f TFLOP/s\n", name, rows, us, gb_s,
               100.0 * gb_s / b->copy_gb_s, flops / us * 1e-6);
    fflush(stdout);
}
