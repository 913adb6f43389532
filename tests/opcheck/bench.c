/* Time of the hot operations at the real model's shapes (one rank of two), as recordings of many calls over rotating
 * buffers, so that neither launch gaps nor the caches enter. Bytes are those that must move; the ratio is to the
 * measured copy. */
#include "bench.h"

#include "base/clock.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIM = 4096, HEADS = 32, EXPERTS = 288, TOP_K = 8, WIDTH = 1024, INDEX_HEADS = 32, TOP = 512 };

/* ---- copy ---- */

typedef struct copy_job {
    void *to, *from;
    size_t n_bytes;
} copy_job;

static td_status call_copy(oc_bench_run *b, void *job, int turn)
{
    const copy_job *j = (const copy_job *)job;
    (void)turn;
    return td_dev_copy(b->dev, j->to, j->from, j->n_bytes);
}

static void bench_copy(oc_bench_run *b)
{
    copy_job j = { .n_bytes = (size_t)2 << 30 };
    j.from = oc_bench_noise(b, j.n_bytes);
    j.to = oc_bench_noise(b, j.n_bytes);
    double us = 0.0;
    for (int i = 0; i < 4; i++) { /* the last three count; a recording would use the copy engine, which is slower */
        int64_t start = td_now_ns();
        for (int k = 0; k < 4; k++) call_copy(b, &j, k);
        oc_bench_must(b, TD_OK, "copy");
        if (i) us += 1e-3 * (double)(td_now_ns() - start) / 12;
    }
    b->copy_gb_s = 2.0 * (double)j.n_bytes / us * 1e-3;
    oc_bench_report(b, "copy, read + written", 0, us, 2.0 * (double)j.n_bytes, 0.0);
    oc_bench_give_back(b);
}

/* ---- linear ---- */

typedef struct linear_job {
    td_weight w[16];
    int n_w, rows;
    td_act *x, *y;
} linear_job;

static td_status call_linear(oc_bench_run *b, void *job, int turn)
{
    linear_job *j = (linear_job *)job;
    const td_weight *w = &j->w[turn % j->n_w];
    td_linear_args a = {
        .n_rows = j->rows, .w = w, .x = j->x, .x_stride = (size_t)w->in, .y_act = j->y, .y_stride = (size_t)w->out
    };
    return b->ops->linear(b->dev, &a);
}

static void bench_linear(oc_bench_run *b, const char *name, td_format format, int out, int in, const int *rows,
                         int n_rows)
{
    linear_job j = { .n_w = 0 };
    size_t n_bytes = b->ops->weight_bytes(format, out, in);
    td_bf16 *host = oc_host_bf16(b->oc, 256 * (size_t)in, 0.03f);
    td_weight first = { format, 256, in, oc_bench_take(b, b->ops->weight_bytes(format, 256, in)) };
    oc_bench_must(b, b->ops->weight_fill(b->dev, &first, 0, 256, host, (size_t)in, 0), "weight_fill");
    size_t part = b->ops->weight_bytes(format, 256, in);
    for (size_t all = 0; (all < (size_t)300 << 20 && j.n_w < 16) || !j.n_w; all += n_bytes) {
        unsigned char *data = (unsigned char *)oc_bench_take(b, n_bytes);
        for (size_t at = 0; at < n_bytes; at += part)
            td_dev_copy(b->dev, data + at, first.data, n_bytes - at < part ? n_bytes - at : part);
        j.w[j.n_w++] = (td_weight){ format, out, in, data };
    }
    j.x = oc_bench_acts(b, 2048 * (size_t)in, 1.0f);
    j.y = (td_act *)oc_bench_take(b, 2048 * (size_t)out * 2);
    for (int i = 0; i < n_rows; i++) {
        j.rows = rows[i];
        double us = oc_bench_measure(b, call_linear, &j, rows[i] > 256 ? 8 : 64);
        oc_bench_report(b, name, rows[i], us, (double)n_bytes + 2.0 * rows[i] * (in + out),
                        2.0 * rows[i] * (double)in * out);
    }
    free(host);
    oc_bench_give_back(b);
}

/* ---- experts ---- */

typedef struct experts_job {
    td_experts e;
    td_exl3 views[3][EXPERTS];
    int rows;
    td_act *x;
    int32_t *ids;
    float *weights, *y;
} experts_job;

static td_status call_experts(oc_bench_run *b, void *job, int turn)
{
    experts_job *j = (experts_job *)job;
    size_t shift = j->rows > 64 ? 0 : (size_t)(turn % 32) * 64; /* other rows, so other experts */
    td_experts_args a = { .n_rows = j->rows,
                          .top_k = TOP_K,
                          .limit = 10.0f,
                          .experts = &j->e,
                          .x = j->x,
                          .ids = j->ids + shift * TOP_K,
                          .weights = j->weights,
                          .y = j->y };
    return b->ops->experts(b->dev, &a);
}

static void bench_experts(oc_bench_run *b)
{
    static const int rows[] = { 1, 2, 4, 8, 16, 32, 64, 512, 2048 };
    experts_job *j = (experts_job *)calloc(1, sizeof *j);
    for (int m = 0; m < 3; m++) {
        int k = m == 2 ? WIDTH : DIM, n = m == 2 ? DIM : WIDTH;
        size_t one = td_exl3_bytes(k, n, 8), trellis = td_exl3_trellis_bytes(k, n, 8);
        unsigned char *data = (unsigned char *)oc_bench_noise(b, EXPERTS * one);
        td_f16 *scales = (td_f16 *)malloc(one - trellis);
        for (size_t i = 0; i < (one - trellis) / 2; i++) scales[i] = td_f32_f16((oc_below(b->oc, 2) ? 0.1f : -0.1f));
        for (int e = 0; e < EXPERTS; e++) {
            unsigned char *at = data + (size_t)e * one;
            td_dev_upload(b->dev, at + trellis, scales, one - trellis);
            j->views[m][e] = (td_exl3){ k,
                                        n,
                                        8,
                                        TD_EXL3_MCG,
                                        (const uint16_t *)(void *)at,
                                        (const td_f16 *)(void *)(at + trellis),
                                        (const td_f16 *)(void *)(at + trellis) + k };
        }
        free(scales);
    }
    j->e = (td_experts){ EXPERTS, DIM, WIDTH, true, j->views[0], j->views[1], j->views[2], NULL, NULL, NULL, NULL };
    j->e.table = oc_bench_take(b, b->ops->experts_table_bytes(&j->e));
    oc_bench_must(b, b->ops->experts_table_fill(b->dev, &j->e), "table");
    j->x = oc_bench_acts(b, 2048 * (size_t)DIM, 1.0f);
    int32_t *ids = (int32_t *)malloc(2112 * TOP_K * 4);
    for (int r = 0; r < 2112; r++) /* distinct experts of a row */
        for (int i = 0; i < TOP_K; i++) ids[r * TOP_K + i] = (oc_below(b->oc, EXPERTS / TOP_K)) * TOP_K + i;
    j->ids = (int32_t *)oc_bench_host_copy(b, ids, 2112 * TOP_K * 4);
    j->weights = oc_bench_floats(b, 2048 * TOP_K, 0.3f, 0.1f);
    j->y = (float *)oc_bench_take(b, 2048 * (size_t)DIM * 4);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        double distinct = 0.0;
        int sets = rows[i] > 64 ? 1 : 32;
        for (int s = 0; s < sets; s++) {
            bool seen[EXPERTS] = { false };
            for (int p = 0; p < rows[i] * TOP_K; p++) {
                int id = ids[(s * 64) * TOP_K + p];
                distinct += !seen[id];
                seen[id] = true;
            }
        }
        distinct /= sets;
        j->rows = rows[i];
        double us = oc_bench_measure(b, call_experts, j, rows[i] > 64 ? 4 : 32), matrix = (double)DIM * WIDTH;
        oc_bench_report(b, "experts mcg 4 bit", rows[i], us, distinct * 1.5 * matrix,
                        2.0 * rows[i] * TOP_K * 3.0 * matrix);
    }
    free(ids);
    free(j);
    oc_bench_give_back(b);
}

/* ---- windows ---- */

static td_window make_window(oc_bench_run *b, const td_segment *segment, td_segment *host)
{
    int rows = segment->n_rows;
    int32_t *t = (int32_t *)calloc(3 * (size_t)rows, 4);
    for (int r = 0; r < rows; r++) t[rows + r] = segment->pos + r;
    *host = *segment;
    const int32_t *d = (const int32_t *)oc_bench_host_copy(b, t, 3 * (size_t)rows * 4);
    free(t);
    return (td_window){ .n_rows = rows,
                        .n_segments = 1,
                        .ids = d,
                        .pos = d + rows,
                        .seg = d + 2 * rows,
                        .segments = (const td_segment *)oc_bench_host_copy(b, host, sizeof *host),
                        .host_segments = host,
                        .host_pos_max = (int64_t)segment->pos + rows - 1 };
}

typedef struct kda_job {
    td_window w[16];
    td_segment host[16];
    td_kda_args a;
} kda_job;

static td_status call_kda(oc_bench_run *b, void *job, int turn)
{
    kda_job *j = (kda_job *)job;
    j->a.window = &j->w[turn % 16];
    return b->ops->kda(b->dev, &j->a);
}

static void bench_kda(oc_bench_run *b, int rows, bool chunked)
{
    kda_job j = { .a = { .n_heads = HEADS, .rms_eps = 1e-5f, .lower_bound = -5.0f } };
    size_t w = HEADS * TD_HEAD, stride = 3 * w + HEADS + 2 * TD_HEAD, n = (size_t)rows;
    for (int i = 0; i < 16; i++)
        j.w[i] = make_window(b, &(td_segment){ .n_rows = rows, .slot = i, .chunked = chunked }, &j.host[i]);
    j.a.w = (td_kda_weights){ oc_bench_floats(b, 3 * w * 4, 0.0f, 0.5f), oc_bench_floats(b, HEADS, 1.0f, 0.5f),
                              oc_bench_floats(b, w, -2.0f, 2.0f), oc_bench_floats(b, TD_HEAD, 1.0f, 0.1f) };
    j.a.state =
        (td_kda_state){ (float *)oc_bench_zeros(b, 32 * w * TD_HEAD * 4), (td_act *)oc_bench_zeros(b, 32 * 9 * w * 2) };
    if (!chunked)
        j.a.saved = (td_kda_saved){ (float *)oc_bench_take(b, 64 * w * 4), (float *)oc_bench_take(b, 64 * w * 4),
                                    (float *)oc_bench_take(b, 64 * w * 4), (float *)oc_bench_take(b, 64 * HEADS * 4),
                                    (td_act *)oc_bench_take(b, 64 * 3 * w * 2) };
    td_bf16 *rows_of_gates = oc_host_bf16(b->oc, w * TD_HEAD, 0.1f);
    td_weight gates[2];
    for (int i = 0; i < 2; i++) {
        gates[i] =
            (td_weight){ TD_W_Q4, (int)w, TD_HEAD, oc_bench_take(b, b->ops->weight_bytes(TD_W_Q4, (int)w, TD_HEAD)) };
        oc_bench_must(b, b->ops->weight_fill(b->dev, &gates[i], 0, (int)w, rows_of_gates, TD_HEAD, 0), "gates");
    }
    free(rows_of_gates);
    td_act *proj = oc_bench_acts(b, n * stride, 1.0f);
    j.a.proj = proj;
    j.a.proj_stride = j.a.beta_stride = stride;
    j.a.beta_raw = td_act_at(b->dev, proj, 3 * w);
    j.a.low = (td_kda_low_rank){ &gates[0], &gates[1], td_act_at(b->dev, proj, 3 * w + HEADS),
                                 td_act_at(b->dev, proj, 3 * w + HEADS + TD_HEAD), stride };
    j.a.f = (td_act *)oc_bench_take(b, n * w * 2);
    j.a.gate = (td_act *)oc_bench_take(b, n * w * 2);
    j.a.y = (td_act *)oc_bench_take(b, n * w * 2);
    double us = oc_bench_measure(b, call_kda, &j, rows > 64 ? 4 : 64);
    oc_bench_report(b, chunked ? "kda chunked" : "kda row by row", rows, us,
                    2.0 * (double)w * TD_HEAD * 4 + (double)n * (double)w * 12,
                    chunked ? (double)n * HEADS * 147456.0 : 0.0);
    oc_bench_give_back(b);
}

typedef struct dsa_job {
    td_window w;
    td_segment host;
    td_dsa_cache cache;
    td_dsa_select_args select;
    td_dsa_attend_args attend;
} dsa_job;

static td_status call_select(oc_bench_run *b, void *job, int turn)
{
    (void)turn;
    return b->ops->dsa_select(b->dev, &((dsa_job *)job)->select);
}

static td_status call_attend(oc_bench_run *b, void *job, int turn)
{
    (void)turn;
    return b->ops->dsa_attend(b->dev, &((dsa_job *)job)->attend);
}

static void bench_dsa(oc_bench_run *b, int rows, int64_t context, bool attend)
{
    dsa_job j = { .host = { 0 } };
    size_t n = (size_t)rows, blocks = (size_t)(context / TD_BLOCK) + 6, pools = blocks * 128;
    int32_t *table = (int32_t *)malloc(blocks * 4);
    for (size_t i = 0; i < blocks; i++) table[i] = (int32_t)i;
    j.w = make_window(b, &(td_segment){ .n_rows = rows, .pos = (int32_t)(context - rows) }, &j.host);
    j.cache = (td_dsa_cache){ .format = TD_KV_FP8,
                              .ring_rows = 2200,
                              .blocks = (const int32_t *)oc_bench_host_copy(b, table, blocks * 4),
                              .blocks_cap = (int)blocks,
                              .kv_lora = 512 };
    uint8_t *host = (uint8_t *)malloc(4096 * 528);
    for (size_t i = 0; i < 4096 * 528; i++) host[i] = td_f32_e4m3(100.0f * oc_uniform(b->oc));
    size_t width = attend ? 528 : 144, plane = (attend ? blocks * TD_BLOCK : pools) * width;
    float scale = 0x1p-7f;
    for (size_t r = 0; r < 4096; r++) memcpy(host + r * width + width - 16, &scale, 4);
    unsigned char *data = (unsigned char *)oc_bench_take(b, plane);
    for (size_t at = 0; at < plane; at += 4096 * width)
        td_dev_upload(b->dev, data + at, host, plane - at < 4096 * width ? plane - at : 4096 * width);
    j.cache.pools = j.cache.latents = data;
    int32_t *count = (int32_t *)oc_bench_take(b, n * 4), *list = (int32_t *)oc_bench_take(b, n * TOP * 4);
    char name[48];
    if (!attend) {
        j.select = (td_dsa_select_args){ &j.w,
                                         j.cache,
                                         INDEX_HEADS,
                                         TOP,
                                         oc_bench_acts(b, n * INDEX_HEADS * TD_HEAD, 1.0f),
                                         oc_bench_floats(b, n * INDEX_HEADS, 0.0f, 1.0f),
                                         count,
                                         list };
        snprintf(name, sizeof name, "dsa_select at %lld k", (long long)context >> 10);
        double us = oc_bench_measure(b, call_select, &j, rows > 64 ? 1 : 20);
        oc_bench_report(b, name, rows, us, (double)context / 4 * 144,
                        2.0 * rows * (double)context / 4 * INDEX_HEADS * TD_HEAD);
    } else {
        int32_t *chosen = (int32_t *)malloc(n * TOP * 4), *counts = (int32_t *)malloc(n * 4);
        for (size_t r = 0; r < n; r++) {
            counts[r] = context / 4 > TOP + 512 ? TOP : -1;
            for (int i = 0; i < TOP; i++)
                chosen[r * TOP + (size_t)i] =
                    (int32_t)(((context - rows) / 4 / TOP) * i + oc_below(b->oc, (int)((context - rows) / 4 / TOP)));
        }
        td_dev_upload(b->dev, count, counts, n * 4);
        td_dev_upload(b->dev, list, chosen, n * TOP * 4);
        free(chosen);
        free(counts);
        td_kv_b kv = { HEADS, 256, 256, 512, oc_bench_take(b, b->ops->kv_b_bytes(b->dev, HEADS, 256, 256, 512)) };
        td_bf16 *w = oc_host_bf16(b->oc, (size_t)HEADS * 512 * 512, 0.05f);
        oc_bench_must(b, b->ops->kv_b_fill(b->dev, &kv, w), "kv_b");
        free(w);
        j.attend = (td_dsa_attend_args){ &j.w,        j.cache,
                                         kv,          0.0625f,
                                         TOP,         count,
                                         list,        oc_bench_acts(b, n * HEADS * 256, 1.0f),
                                         HEADS * 256, (td_act *)oc_bench_take(b, n * HEADS * 256 * 2) };
        snprintf(name, sizeof name, "dsa_attend at %lld k", (long long)context >> 10);
        double us = oc_bench_measure(b, call_attend, &j, rows > 64 ? 2 : 20);
        oc_bench_report(b, name, rows, us, HEADS * 512.0 * 512 * 2 + (double)n * 2051 * 528,
                        2.0 * rows * (HEADS * 512.0 * 512 + HEADS * 2051.0 * 512 * 2));
    }
    free(host);
    free(table);
    oc_bench_give_back(b);
}

/* ---- hyper, router ---- */

typedef struct hyper_job {
    td_hyper_args a;
    td_router_args r;
    float *fn[8];
} hyper_job;

static td_status call_hyper(oc_bench_run *b, void *job, int turn)
{
    hyper_job *j = (hyper_job *)job;
    j->a.fn = j->fn[turn % 8];
    return b->ops->hyper(b->dev, &j->a);
}

static td_status call_router(oc_bench_run *b, void *job, int turn)
{
    (void)turn;
    return b->ops->router(b->dev, &((hyper_job *)job)->r);
}

static void bench_rows(oc_bench_run *b, int rows)
{
    size_t n = (size_t)rows;
    hyper_job j = { .a = { .n_rows = rows, .dim = DIM, .rms_eps = 1e-5f, .hc_eps = 1e-6f, .iters = 20 } };
    for (int i = 0; i < 8; i++) j.fn[i] = oc_bench_floats(b, 24 * 4 * (size_t)DIM, 0.0f, 0.02f);
    j.a.partials = oc_bench_floats(b, 2 * n * DIM, 0.0f, 1.0f);
    j.a.base = oc_bench_floats(b, 24, 0.0f, 1.0f);
    j.a.scale = oc_bench_floats(b, 3, 1.0f, 0.1f);
    j.a.norm = oc_bench_floats(b, DIM, 1.0f, 0.1f);
    j.a.x = oc_bench_acts(b, n * 4 * DIM, 1.0f);
    j.a.post = oc_bench_floats(b, n * 4, 0.5f, 0.1f);
    j.a.comb = oc_bench_floats(b, n * 16, 0.25f, 0.0f);
    j.a.n = (td_act *)oc_bench_take(b, n * DIM * 2);
    oc_bench_report(b, "hyper", rows, oc_bench_measure(b, call_hyper, &j, rows > 64 ? 8 : 64),
                    24.0 * 4 * DIM * 4 + (double)n * DIM * (16 + 8 + 2), 0.0);
    td_bf16 *host = oc_host_bf16(b->oc, EXPERTS * (size_t)DIM, 0.02f);
    td_weight w = { TD_W_BF16, EXPERTS, DIM, oc_bench_take(b, b->ops->weight_bytes(TD_W_BF16, EXPERTS, DIM)) };
    oc_bench_must(b, b->ops->weight_fill(b->dev, &w, 0, EXPERTS, host, DIM, 0), "router");
    free(host);
    j.r = (td_router_args){ rows,
                            DIM,
                            EXPERTS,
                            TOP_K,
                            true,
                            2.5f,
                            j.a.x,
                            &w,
                            oc_bench_floats(b, EXPERTS, 7.0f, 0.05f),
                            (int32_t *)oc_bench_take(b, n * TOP_K * 4),
                            (float *)oc_bench_take(b, n * TOP_K * 4) };
    oc_bench_report(b, "router (weights cached)", rows, oc_bench_measure(b, call_router, &j, rows > 64 ? 8 : 64),
                    EXPERTS * 2.0 * DIM, 0.0);
    oc_bench_give_back(b);
}

static td_status call_sample_max(oc_bench_run *b, void *job, int turn)
{
    (void)turn;
    return b->ops->sample_max(b->dev, (const td_sample_args *)job);
}

static td_status call_sample_summary(oc_bench_run *b, void *job, int turn)
{
    (void)turn;
    return b->ops->sample_summary(b->dev, (const td_sample_args *)job);
}

/* One shard's logits, which the head has just left in the cache: top_p 0.95 with lists of n, or (n 0) every token's score. */
static void bench_sample(oc_bench_run *b, int rows, int n)
{
    enum { COLUMNS = 77440 };
    td_sample_job jobs[TD_WINDOW_MAX] = { 0 };
    size_t summary_bytes = td_sample_summary_bytes(n ? n : 1);
    for (int i = 0; i < rows; i++)
        jobs[i] = (td_sample_job){ .params = { .temperature = 1, .top_p = n ? 0.95 : 1, .seed = 7 },
                                   .pos = 1000,
                                   .top = { .z = 10.0f, .id = 0, .n_allowed = 2 * COLUMNS },
                                   .out_bytes = (size_t)i * summary_bytes,
                                   .row = i,
                                   .mask = -1,
                                   .n_logprobs = -1,
                                   .n = n ? n : 1 };
    td_sample_args a = { .n_jobs = rows,
                         .n_columns = COLUMNS,
                         .n_max = n ? n : 1,
                         .logits = oc_bench_floats(b, (size_t)rows * COLUMNS, 0.0f, 10.0f),
                         .stride = COLUMNS,
                         .jobs = (const td_sample_job *)oc_bench_host_copy(b, jobs, (size_t)rows * sizeof *jobs),
                         .maxima = (td_sample_max *)oc_bench_take(b, (size_t)rows * sizeof(td_sample_max)),
                         .summaries = (unsigned char *)oc_bench_take(b, (size_t)rows * summary_bytes) };
    double n_bytes = (double)rows * COLUMNS * sizeof(float);
    char name[48] = "sample_summary, every score";
    if (n == 64) oc_bench_report(b, "sample_max", rows, oc_bench_measure(b, call_sample_max, &a, 64), n_bytes, 0.0);
    if (n) snprintf(name, sizeof name, "sample_summary, lists of %d", n);
    oc_bench_report(b, name, rows, oc_bench_measure(b, call_sample_summary, &a, n > 4096 ? 4 : 64), n_bytes, 0.0);
    oc_bench_give_back(b);
}

static void bench_linears(oc_bench_run *b)
{
    static const int few[] = { 1, 2, 4, 8, 16, 32, 64, 2048 }, head[] = { 1, 8, 32 };
    bench_linear(b, "linear q4 [12576][4096]", TD_W_Q4, 12576, 4096, few, 8);
    bench_linear(b, "linear q4 [4096][4096]", TD_W_Q4, 4096, 4096, few, 8);
    bench_linear(b, "linear q4 [4096][1024]", TD_W_Q4, 4096, 1024, few, 4);
    bench_linear(b, "linear bf16 [4096][4096]", TD_W_BF16, 4096, 4096, few, 8);
    bench_linear(b, "linear fp8 [77440][4096]", TD_W_FP8, 77440, 4096, head, 3);
}

static void bench_kdas(oc_bench_run *b)
{
    for (int i = 0; i < 4; i++) bench_kda(b, 1 << (2 * i), false);
    bench_kda(b, 2048, true);
}

static void bench_selects(oc_bench_run *b)
{
    static const int rows[] = { 1, 8, 2048 };
    for (int i = 0; i < 3; i++)
        for (int64_t context = 8192; context <= 1 << 20; context = context == 8192 ? 131072 : 8 * context)
            bench_dsa(b, rows[i], context, false);
}

static void bench_attends(oc_bench_run *b)
{
    static const int rows[] = { 1, 8, 2048 };
    for (int i = 0; i < 3; i++) bench_dsa(b, rows[i], 131072, true);
}

static void bench_all_rows(oc_bench_run *b)
{
    bench_rows(b, 1);
    bench_rows(b, 8);
    bench_rows(b, 2048);
}

static void bench_samples(oc_bench_run *b)
{
    for (int rows = 1; rows <= 64; rows *= 8) {
        bench_sample(b, rows, 64);
        bench_sample(b, rows, 1024);
        bench_sample(b, rows, 0);
    }
    bench_sample(b, 1, 77440);
}

void oc_bench(oc_ctx *oc)
{
    static const struct {
        const char *name;
        void (*run)(oc_bench_run *b);
    } groups[] = { { "linear", bench_linears }, { "experts", bench_experts }, { "kda", bench_kdas },
                   { "select", bench_selects }, { "attend", bench_attends },  { "rows", bench_all_rows },
                   { "sample", bench_samples } };
    oc_bench_run b = { .oc = oc, .dev = oc->dev[OC_GPU], .ops = &oc->ops[OC_GPU] };
    uint64_t *bits = (uint64_t *)malloc(OC_BENCH_NOISE);
    for (size_t i = 0; i < OC_BENCH_NOISE / 8; i++) bits[i] = oc_rand(oc);
    b.noise = oc_bench_host_copy(&b, bits, OC_BENCH_NOISE);
    b.n_memory = 0; /* kept to the end */
    free(bits);
    bench_copy(&b);
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++)
        if (strcmp(oc->bench, "all") == 0 || strcmp(oc->bench, groups[i].name) == 0) groups[i].run(&b);
    td_dev_free(b.dev, b.noise, OC_BENCH_NOISE);
}
