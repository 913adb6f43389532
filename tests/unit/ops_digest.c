/* Equal bits on every machine: each operation on fixed pseudo-random inputs, its outputs hashed (FNV-1a-64), the hashes
 * compared with those below. The same program is cross-built for arm64 and run there (tests/arm64), so it needs neither
 * cmocka nor any other library. A change of the arithmetic changes a hash: put the printed one here and say why in the
 * commit. `ops_digest print` prints all. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/math.h"
#include "ops/ops.h"
#include "ops_random.h"

enum {
    DIM = 256,
    HEADS = 2,
    W = HEADS * 128,
    ROWS = 80,
    KVL = 512,
    QL = 128,
    IH = 4,
    TOP = 8,
    WIDTH = 128,
    EXPERTS = 4
};

typedef struct hash {
    const char *name;
    uint64_t engine, exact;
} hash;

static const hash expected[] = {
    { "exp", 0x7a2a0b92b6c7fbac, 0x7a2a0b92b6c7fbac },
    { "linear bf16", 0x39a7a2ed8874ecd4, 0x8b7eec2a048084f8 },
    { "linear q4", 0xb81d59bb5f005cbb, 0x161d4d88077b71fa },
    { "linear fp8", 0x95e625259549de4e, 0x8711076cd9bb5c43 },
    { "embed", 0x7a73caa711e92aa5, 0xe8cdbf6775cece25 },
    { "hyper", 0xcfc42cedd0986ec4, 0x60a338cff865b54e },
    { "mean, norm, residual", 0xc7e944e05c6863e5, 0x9d2b6ddd5c87aebe },
    { "kda rows", 0xd0894eda6b9358f5, 0xd8485d661dacd874 },
    { "kda replay", 0x1f3a4b422c9ffdda, 0xdabe5f9a6adfda44 },
    { "kda chunks", 0x5c53ca65be7405d9, 0x454d00d4eae0b757 },
    { "dsa", 0xdffc7a97d755f7ea, 0x4a70ef256920fc21 },
    { "dsa fp8", 0x8068fc78e0ba7188, 0x47411456fe90f63c },
    { "swiglu", 0xf81dd1ce36d4522b, 0xf918077187b27e1a },
    { "router", 0xb6a832cd34ed2031, 0x8279e593e4564784 },
    { "experts bf16", 0xbe3c4434354257b9, 0xc148110f19fb6c0f },
    { "experts exl3", 0x9cfa372feb450810, 0x3569fc5df546863c },
};
enum { N_HASHES = sizeof expected / sizeof *expected };

typedef struct bench {
    td_dev *dev;
    uint64_t seed;
    uint64_t sum; /* running hash of the operation */
    void *owned[256];
    int n_owned;
    td_window window;
    int32_t ids[ROWS], pos[ROWS], seg[ROWS];
    td_segment segments[2];
} bench;

static void *take(bench *b, size_t n_bytes)
{
    void *p = aligned_alloc(64, (n_bytes + 127) / 64 * 64);
    if (!p || b->n_owned == 256) abort();
    memset(p, 0, (n_bytes + 127) / 64 * 64);
    return b->owned[b->n_owned++] = p;
}

static void put(bench *b, const void *data, size_t n_bytes)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < n_bytes; i++) b->sum = (b->sum ^ p[i]) * 0x100000001b3u;
}

static void put_act(bench *b, const td_act *x, size_t n)
{
    put(b, x, td_act_bytes(b->dev, n));
}

static float *floats(bench *b, size_t n, float scale)
{
    float *x = take(b, n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = scale * op_uniform(&b->seed);
    return x;
}

static td_bf16 *halves(bench *b, size_t n, float scale)
{
    td_bf16 *x = take(b, n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = td_f32_bf16(scale * op_uniform(&b->seed));
    return x;
}

static td_act *acts(bench *b, size_t n, float scale)
{
    td_act *x = take(b, td_act_bytes(b->dev, n));
    if (scale > 0.0f) td_act_from_f32(b->dev, x, floats(b, n, scale), n);
    return x;
}

static void must(td_status status)
{
    if (status == TD_OK) return;
    printf("an operation failed: %s\n", td_status_text(status));
    exit(1);
}

static td_weight *weight(bench *b, td_format format, int out, int in, float scale)
{
    td_weight *w = take(b, sizeof *w);
    *w = (td_weight){ format, out, in, take(b, td_cpu_weight_bytes(format, out, in)) };
    must(td_cpu_weight_fill(b->dev, w, 0, out, halves(b, (size_t)out * (size_t)in, scale), (size_t)in, 0));
    return w;
}

static void run_exp(bench *b)
{
    for (int i = 0; i < 20000; i++) {
        float x = 100.0f * op_uniform(&b->seed), y[3] = { td_expf(x), td_sigmoidf(x), td_siluf(x) };
        put(b, y, sizeof y);
    }
}

static void run_linear(bench *b, td_format format)
{
    static const int rows[] = { 1, 2, 3, 5, 12, 40 };
    td_weight *w = weight(b, format, 150, 528, 0.1f);
    td_act *x = acts(b, 40 * 528, 1.0f);
    for (int i = 0; i < 6; i++) {
        float *y = floats(b, 40 * 150, 0.0f);
        td_linear_args a = { .n_rows = rows[i], .w = w, .x = x, .x_stride = 528, .y_f32 = y, .y_stride = 150 };
        must(td_cpu_linear(b->dev, &a));
        put(b, y, (size_t)rows[i] * 150 * sizeof *y);
    }
}

static void run_bf16(bench *b)
{
    run_linear(b, TD_W_BF16);
}

static void run_q4(bench *b)
{
    run_linear(b, TD_W_Q4);
}

static void run_fp8(bench *b)
{
    run_linear(b, TD_W_FP8);
}

static void run_embed(bench *b)
{
    td_act *x = acts(b, ROWS * 4 * DIM, 0.0f);
    td_embed_args a = {
        .window = &b->window, .dim = DIM, .vocab = 50, .table = halves(b, 50 * DIM, 1.0f), .n_streams = 4, .x = x
    };
    must(td_cpu_embed(b->dev, &a));
    put_act(b, x, ROWS * 4 * DIM);
}

static void run_hyper(bench *b)
{
    td_act *x = acts(b, ROWS * 4 * DIM, 1.0f), *n = acts(b, ROWS * DIM, 0.0f);
    float *post = floats(b, ROWS * 4, 1.0f), *comb = floats(b, ROWS * 16, 1.0f);
    td_hyper_args a = { .n_rows = ROWS,
                        .dim = DIM,
                        .rms_eps = 1e-5f,
                        .hc_eps = 1e-6f,
                        .iters = 20,
                        .partials = floats(b, 2 * ROWS * DIM, 1.0f),
                        .fn = floats(b, 24 * 4 * DIM, 0.1f),
                        .base = floats(b, 24, 1.0f),
                        .scale = floats(b, 3, 1.0f),
                        .norm = floats(b, DIM, 1.0f),
                        .x = x,
                        .post = post,
                        .comb = comb,
                        .n = n };
    must(td_cpu_hyper(b->dev, &a));
    put_act(b, x, ROWS * 4 * DIM);
    put_act(b, n, ROWS * DIM);
    put(b, post, ROWS * 4 * sizeof *post);
    put(b, comb, ROWS * 16 * sizeof *comb);
}

static void run_norms(bench *b)
{
    td_act *x = acts(b, ROWS * 4 * DIM, 1.0f), *h = acts(b, ROWS * DIM, 0.0f), *y = acts(b, ROWS * DIM, 0.0f);
    td_stream_mean_args mean = { .n_rows = ROWS, .dim = DIM, .x = x, .h = h, .h_stride = DIM };
    must(td_cpu_stream_mean(b->dev, &mean));
    td_rmsnorm_args norm = { .n_rows = ROWS,
                             .dim = DIM,
                             .eps = 1e-5f,
                             .x = h,
                             .x_stride = DIM,
                             .w = floats(b, DIM, 1.0f),
                             .y = y,
                             .y_stride = DIM };
    must(td_cpu_rmsnorm(b->dev, &norm));
    td_residual_args residual = { .n_rows = ROWS, .dim = DIM, .partials = floats(b, 2 * ROWS * DIM, 1.0f), .x = h };
    must(td_cpu_residual(b->dev, &residual));
    put_act(b, h, ROWS * DIM);
    put_act(b, y, ROWS * DIM);
}

static void run_kda(bench *b, bool chunked, bool replay)
{
    const size_t state = 2 * HEADS * 128 * 128, conv = 2 * 3 * 3 * W;
    td_act *y = acts(b, ROWS * W, 0.0f);
    td_kda_args a = { .window = &b->window,
                      .n_heads = HEADS,
                      .rms_eps = 1e-5f,
                      .lower_bound = -5.0f,
                      .w = { floats(b, 3 * W * 4, 0.8f), floats(b, HEADS, 1.0f), floats(b, W, 1.0f),
                             floats(b, 128, 1.0f) },
                      .state = { floats(b, state, 0.1f), acts(b, conv, 1.0f) },
                      .proj = acts(b, ROWS * 3 * W, 2.0f),
                      .proj_stride = 3 * W,
                      .beta_raw = acts(b, ROWS * HEADS, 3.0f),
                      .beta_stride = HEADS,
                      .f = acts(b, ROWS * W, 3.0f),
                      .gate = acts(b, ROWS * W, 3.0f),
                      .y = y };
    a.saved = (td_kda_saved){ floats(b, 64 * W, 0.0f), floats(b, 64 * W, 0.0f), floats(b, 64 * W, 0.0f),
                              floats(b, 64 * HEADS, 0.0f), acts(b, 64 * 3 * W, 0.0f) };
    b->segments[0].n_rows = chunked ? ROWS : 20;
    b->segments[0].chunked = chunked;
    must(td_cpu_kda(b->dev, &a));
    const int32_t keep = 7;
    td_kda_replay_args again = {
        .window = &b->window, .keep = &keep, .n_heads = HEADS, .state = a.state, .saved = a.saved
    };
    if (replay) must(td_cpu_kda_replay(b->dev, &again));
    put_act(b, y, (size_t)b->segments[0].n_rows * W);
    put(b, a.state.state, state * sizeof(float));
    put_act(b, a.state.conv, conv);
}

static void run_kda_rows(bench *b)
{
    run_kda(b, false, false);
}

static void run_kda_replay(bench *b)
{
    run_kda(b, false, true);
}

static void run_kda_chunks(bench *b)
{
    run_kda(b, true, false);
}

static void run_dsa_format(bench *b, td_kv_format format)
{
    const int32_t blocks[1] = { 0 };
    const size_t stride = QL + KVL + 256;
    int32_t count[ROWS], list[ROWS * TOP] = { 0 };
    td_dsa_cache cache = { .format = format,
                           .ring = acts(b, 96 * 256, 0.0f),
                           .ring_rows = 96,
                           .blocks = blocks,
                           .blocks_cap = 1,
                           .kv_lora = KVL };
    size_t latents = 512 * td_kv_row_bytes(b->dev, format, KVL), pools = 128 * td_kv_row_bytes(b->dev, format, 128);
    cache.latents = take(b, latents);
    cache.pools = take(b, pools);
    td_act *c_q = acts(b, ROWS * QL, 0.0f), *o = acts(b, ROWS * HEADS * 256, 0.0f);
    td_dsa_store_args store = { .window = &b->window,
                                .cache = cache,
                                .q_lora = QL,
                                .rms_eps = 1e-5f,
                                .proj = acts(b, ROWS * stride, 2.0f),
                                .proj_stride = stride,
                                .q_norm = floats(b, QL, 1.0f),
                                .kv_norm = floats(b, KVL, 1.0f),
                                .k_norm_w = floats(b, 128, 1.0f),
                                .k_norm_b = floats(b, 128, 1.0f),
                                .ape = floats(b, 4 * 128, 1.0f),
                                .c_q = c_q };
    must(td_cpu_dsa_store(b->dev, &store));
    td_dsa_select_args select = { .window = &b->window,
                                  .cache = cache,
                                  .n_heads = IH,
                                  .top_pools = TOP,
                                  .q = acts(b, ROWS * IH * 128, 1.0f),
                                  .weights = floats(b, ROWS * IH, 1.0f),
                                  .count = count,
                                  .list = list };
    must(td_cpu_dsa_select(b->dev, &select));
    td_kv_b kv_b = { HEADS, 256, 256, KVL, take(b, td_cpu_kv_b_bytes(b->dev, HEADS, 256, 256, KVL)) };
    must(td_cpu_kv_b_fill(b->dev, &kv_b, halves(b, HEADS * 512 * KVL, 0.05f)));
    td_dsa_attend_args attend = { .window = &b->window,
                                  .cache = cache,
                                  .kv_b = kv_b,
                                  .scale = 0.0625f,
                                  .top_pools = TOP,
                                  .count = count,
                                  .list = list,
                                  .q = acts(b, ROWS * HEADS * 256, 1.0f),
                                  .q_stride = HEADS * 256,
                                  .o = o };
    must(td_cpu_dsa_attend(b->dev, &attend));
    put_act(b, c_q, ROWS * QL);
    put(b, cache.latents, latents);
    put(b, cache.pools, pools);
    put_act(b, cache.ring, 96 * 256);
    put(b, count, sizeof count);
    put(b, list, sizeof list);
    put_act(b, o, ROWS * HEADS * 256);
}

static void run_dsa(bench *b)
{
    run_dsa_format(b, TD_KV_ACT);
}

static void run_dsa_fp8(bench *b)
{
    run_dsa_format(b, TD_KV_FP8);
}

static void run_swiglu(bench *b)
{
    td_act *y = acts(b, ROWS * 300, 0.0f);
    td_swiglu_args a = { .n_rows = ROWS, .width = 300, .limit = 10.0f, .gate_up = acts(b, ROWS * 600, 15.0f), .y = y };
    must(td_cpu_swiglu(b->dev, &a));
    put_act(b, y, ROWS * 300);
}

static void run_router(bench *b)
{
    int32_t ids[ROWS * 4];
    float weights[ROWS * 4];
    td_router_args a = { .n_rows = ROWS,
                         .dim = DIM,
                         .n_experts = 40,
                         .top_k = 4,
                         .norm = true,
                         .scale = 2.5f,
                         .x = acts(b, ROWS * DIM, 1.0f),
                         .w = weight(b, TD_W_BF16, 40, DIM, 0.1f),
                         .bias = floats(b, 40, 1.0f),
                         .ids = ids,
                         .weights = weights };
    must(td_cpu_router(b->dev, &a));
    put(b, ids, sizeof ids);
    put(b, weights, sizeof weights);
}

static td_exl3 random_exl3(bench *b, int k, int n)
{
    uint64_t *trellis = take(b, td_exl3_trellis_bytes(k, n, 8));
    td_f16 *scales = take(b, (size_t)(k + n) * sizeof *scales);
    for (size_t i = 0; i < td_exl3_trellis_bytes(k, n, 8) / 8; i++) trellis[i] = op_next(&b->seed);
    for (int i = 0; i < k + n; i++) scales[i] = td_f32_f16((i < k ? 1.0f : 0.1f) * op_uniform(&b->seed));
    return (td_exl3){ k, n, 8, TD_EXL3_MCG, (const uint16_t *)(const void *)trellis, scales, scales + k };
}

static void run_experts(bench *b, bool exl3)
{
    td_exl3 packed[3][EXPERTS];
    td_weight plain[3][EXPERTS];
    int32_t ids[ROWS * 2];
    for (int m = 0; m < 3; m++)
        for (int e = 0; e < EXPERTS; e++) {
            int k = m == 2 ? WIDTH : DIM, n = m == 2 ? DIM : WIDTH;
            if (exl3)
                packed[m][e] = random_exl3(b, k, n);
            else
                plain[m][e] = *weight(b, TD_W_BF16, n, k, 0.1f);
        }
    for (int i = 0; i < ROWS * 2; i++) ids[i] = (int32_t)(op_next(&b->seed) % EXPERTS);
    td_experts experts = { .n_experts = EXPERTS,
                           .dim = DIM,
                           .width = WIDTH,
                           .exl3 = exl3,
                           .gate_x = packed[0],
                           .up_x = packed[1],
                           .down_x = packed[2],
                           .gate = plain[0],
                           .up = plain[1],
                           .down = plain[2] };
    float *y = floats(b, ROWS * DIM, 1.0f);
    td_experts_args a = { .n_rows = ROWS,
                          .top_k = 2,
                          .limit = 10.0f,
                          .experts = &experts,
                          .x = acts(b, ROWS * DIM, 0.5f),
                          .ids = ids,
                          .weights = floats(b, ROWS * 2, 1.0f),
                          .shared = y,
                          .y = y };
    must(td_cpu_experts(b->dev, &a));
    put(b, y, ROWS * DIM * sizeof *y);
}

static void run_experts_bf16(bench *b)
{
    run_experts(b, false);
}

static void run_experts_exl3(bench *b)
{
    run_experts(b, true);
}

/* One sequence of ROWS rows from position 0. */
static uint64_t run_one(void (*run)(bench *), bool exact)
{
    static const td_dev_limits limits = { .rows = ROWS,
                                          .dim = DIM,
                                          .n_heads = HEADS,
                                          .n_experts = 40,
                                          .top_k = 4,
                                          .expert_width = WIDTH,
                                          .index_heads = IH,
                                          .index_topk = 4 * TOP,
                                          .context_tokens = 512 };
    bench *b = calloc(1, sizeof *b);
    td_error err;
    if (!b || td_dev_create_cpu(&limits, 2, exact, &b->dev, &err) != TD_OK) abort();
    b->seed = 0x9e3779b97f4a7c15u;
    b->sum = 0xcbf29ce484222325u;
    b->segments[0].n_rows = ROWS;
    for (int i = 0; i < ROWS; i++) {
        b->ids[i] = 7 * i % 50;
        b->pos[i] = i;
    }
    b->window = (td_window){ ROWS, 1, b->ids, b->pos, b->seg, b->segments, b->segments, ROWS - 1 };
    run(b);
    uint64_t sum = b->sum;
    for (int i = 0; i < b->n_owned; i++) free(b->owned[i]);
    td_dev_destroy(b->dev);
    free(b);
    return sum;
}

int main(int argc, char **argv)
{
    static void (*const runs[N_HASHES])(bench *) = {
        run_exp,        run_bf16,       run_q4,  run_fp8,     run_embed,  run_hyper,  run_norms,        run_kda_rows,
        run_kda_replay, run_kda_chunks, run_dsa, run_dsa_fp8, run_swiglu, run_router, run_experts_bf16, run_experts_exl3
    };
    bool print = argc > 1 && strcmp(argv[1], "print") == 0;
    int wrong = 0;
    for (int i = 0; i < N_HASHES; i++) {
        uint64_t engine = run_one(runs[i], false), exact = run_one(runs[i], true);
        bool same = engine == expected[i].engine && exact == expected[i].exact;
        if (print || !same)
            printf("    { \"%s\", 0x%016llx, 0x%016llx },\n", expected[i].name, (unsigned long long)engine,
                   (unsigned long long)exact);
        wrong += !same;
    }
    printf("%d of %d operations have the expected bits\n", N_HASHES - wrong, N_HASHES);
    return wrong && !print;
}
