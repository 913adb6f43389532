/* Operations that work row by row: embed, rmsnorm, stream_mean, residual, swiglu, and the hyper-connections. What only
 * copies or works element by element has the CPU's bits. */
#include "opcheck.h"

#include <stdlib.h>
#include <string.h>

static const int row_counts[] = { 0, 1, 2, 3, 7, 8, 9, 33, 65, 257 };
enum { N_COUNTS = sizeof row_counts / sizeof *row_counts };

static void check_embed(oc_ctx *oc, int rows, int dim, int streams)
{
    if (!oc_case(oc, "embed %d rows of %d, %d streams", rows, dim, streams)) return;
    enum { VOCAB = 900, MEDIA = 5 }; /* ids up to 999: some are outside */
    oc_window w;
    td_segment s = { .n_rows = rows };
    oc_make_window(oc, &w, &s, 1);
    oc_buf *table = oc_acts(oc, "table", VOCAB * (size_t)dim, 1.0f),
           *media = oc_acts(oc, "media", MEDIA * (size_t)dim, 1.0f);
    int32_t *pick = (int32_t *)calloc((size_t)rows + 1, sizeof *pick);
    for (int r = 0; r < rows; r++) pick[r] = oc_below(oc, 3) ? -1 : oc_below(oc, MEDIA);
    oc_buf *media_row = oc_ints(oc, "media_row", pick, (size_t)rows);
    oc_buf *x = oc_new(oc, "x", (size_t)rows * (size_t)streams * (size_t)dim * sizeof(td_bf16));
    td_status status[OC_SIDES];
    for (int side = 0; side < OC_SIDES; side++) {
        td_embed_args a = { &w.w[side],
                            dim,
                            VOCAB,
                            (const td_bf16 *)oc_at(table, side),
                            (const int32_t *)oc_at(media_row, side),
                            (const td_bf16 *)oc_at(media, side),
                            streams,
                            (td_act *)oc_at(x, side) };
        status[side] = oc->ops[side].embed(oc->dev[side], &a);
    }
    oc_ran(oc, status[0], status[1]);
    oc_same(oc, x);
    free(pick);
    oc_done(oc);
}

static void check_norm(oc_ctx *oc, int rows, int dim)
{
    if (!oc_case(oc, "rmsnorm %d rows of %d", rows, dim)) return;
    size_t xs = (size_t)dim + 8, ys = (size_t)dim + 2;
    int32_t *pick = (int32_t *)calloc((size_t)rows + 1, sizeof *pick);
    for (int r = 0; r < rows; r++) pick[r] = oc_below(oc, rows);
    oc_buf *x = oc_acts(oc, "x", (size_t)rows * xs, 3.0f), *w = oc_floats(oc, "w", (size_t)dim, 1.0f, 0.5f);
    oc_buf *row = oc_ints(oc, "row", pick, (size_t)rows), *y = oc_new(oc, "y", (size_t)rows * ys * sizeof(td_bf16));
    td_status status[OC_SIDES];
    for (int side = 0; side < OC_SIDES; side++) {
        td_rmsnorm_args a = { rows,
                              dim,
                              1e-5f,
                              (const int32_t *)oc_at(row, side),
                              (const td_act *)oc_at(x, side),
                              xs,
                              (const float *)oc_at(w, side),
                              (td_act *)oc_at(y, side),
                              ys };
        status[side] = oc->ops[side].rmsnorm(oc->dev[side], &a);
    }
    oc_ran(oc, status[0], status[1]);
    oc_near_act(oc, y, (size_t)rows * ys, 5e-4);
    free(pick);
    oc_done(oc);
}

static void check_elements(oc_ctx *oc, int rows, int dim)
{
    size_t n = (size_t)rows * (size_t)dim;
    td_status status[OC_SIDES];
    if (!oc_case(oc, "stream_mean, residual, swiglu: %d rows of %d", rows, dim)) return;
    oc_buf *streams = oc_acts(oc, "streams", 4 * n, 2.0f), *mean = oc_new(oc, "mean", n * sizeof(td_bf16));
    oc_buf *partials = oc_floats(oc, "partials", TD_SHARDS * n, 0.0f, 1.0f), *x = oc_acts(oc, "x", n, 1.0f);
    oc_buf *gate_up = oc_acts(oc, "gate_up", 2 * n, 14.0f), *y = oc_new(oc, "y", n * sizeof(td_bf16));
    for (int side = 0; side < OC_SIDES; side++) {
        td_stream_mean_args m = {
            rows, dim, NULL, (const td_act *)oc_at(streams, side), (td_act *)oc_at(mean, side), (size_t)dim
        };
        status[side] = oc->ops[side].stream_mean(oc->dev[side], &m);
        td_residual_args r = { rows, dim, (const float *)oc_at(partials, side), (td_act *)oc_at(x, side) };
        if (status[side] == TD_OK) status[side] = oc->ops[side].residual(oc->dev[side], &r);
        td_swiglu_args s = { rows, dim, 10.0f, (const td_act *)oc_at(gate_up, side), (td_act *)oc_at(y, side) };
        if (status[side] == TD_OK) status[side] = oc->ops[side].swiglu(oc->dev[side], &s);
    }
    oc_ran(oc, status[0], status[1]);
    oc_same(oc, mean);
    oc_same(oc, x);
    oc_same(oc, y);
    oc_done(oc);
}

void oc_rows(oc_ctx *oc)
{
    for (int i = 0; i < N_COUNTS; i++) {
        if (oc->demo) {
            check_embed(oc, row_counts[i], 256, 4);
            check_embed(oc, row_counts[i], 48, 1);
            check_norm(oc, row_counts[i], 256);
            check_norm(oc, row_counts[i], 1536);
            check_elements(oc, row_counts[i], 272);
        }
        if (oc->real) {
            check_embed(oc, row_counts[i], 4096, 4);
            check_norm(oc, row_counts[i], 4096);
            check_elements(oc, row_counts[i], 4096);
        }
    }
}

/* ---- hyper-connections ---- */

typedef struct site {
    oc_buf *partials, *fn, *base, *scale, *norm, *x, *post, *comb, *n;
    oc_buf *x0, *post0, *comb0; /* as before the operation */
} site;

/* Rows first .. of a window of all rows. The partials' second shard lies after all rows, so a part of the rows has its
 * own. */
static td_status run_site(oc_ctx *oc, int side, const site *s, int rows, int dim, bool pending, bool enter)
{
    td_hyper_args a = { .n_rows = rows, .dim = dim, .rms_eps = 1e-5f, .hc_eps = 1e-6f, .iters = 20 };
    if (pending) a.partials = (const float *)oc_at(s->partials, side);
    if (enter) a.fn = (const float *)oc_at(s->fn, side);
    a.base = (const float *)oc_at(s->base, side);
    a.scale = (const float *)oc_at(s->scale, side);
    a.norm = (const float *)oc_at(s->norm, side);
    a.x = (td_act *)oc_at(s->x, side);
    a.post = (float *)oc_at(s->post, side);
    a.comb = (float *)oc_at(s->comb, side);
    a.n = (td_act *)oc_at(s->n, side);
    return oc->ops[side].hyper(oc->dev[side], &a);
}

static void restore(oc_ctx *oc, const site *s)
{
    oc_buf *const pairs[][2] = { { s->x, s->x0 }, { s->post, s->post0 }, { s->comb, s->comb0 } };
    for (int i = 0; i < 3; i++) {
        memcpy(pairs[i][0]->cpu, pairs[i][1]->cpu, pairs[i][0]->n_bytes);
        oc_push(oc, pairs[i][0]);
    }
    oc_poison(oc, s->n);
}

/* Row r of the window alone, GPU: its state and partials moved to the front. */
static void row_alone(oc_ctx *oc, const site *s, int rows, int dim, int r, bool pending, bool enter)
{
    size_t d = (size_t)dim, row = (size_t)r, n = (size_t)rows;
    unsigned char *x = (unsigned char *)oc_pull(oc, s->x), *out = (unsigned char *)oc_pull(oc, s->n);
    unsigned char *comb = (unsigned char *)oc_pull(oc, s->comb);
    float *partials = (float *)(void *)s->partials->cpu, *keep = (float *)malloc(2 * d * sizeof *keep);
    restore(oc, s);
    memmove(s->x->cpu, s->x0->cpu + row * 8 * d, 8 * d);
    memmove(s->post->cpu, s->post0->cpu + row * 16, 16);
    memmove(s->comb->cpu, s->comb0->cpu + row * 64, 64);
    oc_push(oc, s->x);
    oc_push(oc, s->post);
    oc_push(oc, s->comb);
    memcpy(keep, partials, 2 * d * sizeof *keep);
    float first[2] = { 0 };
    (void)first;
    float *moved = (float *)malloc(2 * d * sizeof *moved);
    memcpy(moved, partials + row * d, d * sizeof *moved);
    memcpy(moved + d, partials + (n + row) * d, d * sizeof *moved);
    memcpy(partials, moved, 2 * d * sizeof *moved);
    oc_push(oc, s->partials);
    oc_ran(oc, TD_OK, run_site(oc, OC_GPU, s, 1, dim, pending, enter));
    unsigned char *x1 = (unsigned char *)oc_pull(oc, s->x), *out1 = (unsigned char *)oc_pull(oc, s->n);
    unsigned char *comb1 = (unsigned char *)oc_pull(oc, s->comb);
    oc_bits(oc, "x of a row alone", x1, x + row * 8 * d, 8 * d);
    if (enter) oc_bits(oc, "n of a row alone", out1, out + row * 2 * d, 2 * d);
    if (enter) oc_bits(oc, "comb of a row alone", comb1, comb + row * 64, 64);
    memcpy(partials, keep, 2 * d * sizeof *keep);
    oc_push(oc, s->partials);
    void *const all[] = { x, out, comb, keep, moved, x1, out1, comb1 };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static oc_buf *copy_of(oc_ctx *oc, const oc_buf *b)
{
    oc_buf *c = oc_new(oc, "copy", b->n_bytes);
    memcpy(c->cpu, b->cpu, b->n_bytes);
    return c;
}

static void check_hyper(oc_ctx *oc, int rows, int dim, bool pending, bool enter)
{
    size_t d = (size_t)dim, n = (size_t)rows;
    if (!oc_case(oc, "%d rows of %d%s%s", rows, dim, pending ? ", leaving" : "", enter ? ", entering" : "")) return;
    site s = { .partials = oc_floats(oc, "partials", TD_SHARDS * n * d, 0.0f, 1.0f),
               .fn = oc_floats(oc, "fn", 24 * 4 * d, 0.0f, 0.05f),
               .base = oc_floats(oc, "base", 24, 0.0f, 1.0f),
               .scale = oc_floats(oc, "scale", 3, 1.0f, 0.2f),
               .norm = oc_floats(oc, "norm", d, 1.0f, 0.3f),
               .x = oc_acts(oc, "x", 4 * n * d, 1.0f),
               .post = oc_floats(oc, "post", 4 * n, 1.0f, 0.5f),
               .comb = oc_floats(oc, "comb", 16 * n, 0.25f, 0.2f),
               .n = oc_new(oc, "n", n * d * sizeof(td_bf16)) };
    s.x0 = copy_of(oc, s.x);
    s.post0 = copy_of(oc, s.post);
    s.comb0 = copy_of(oc, s.comb);
    oc_ran(oc, run_site(oc, OC_CPU, &s, rows, dim, pending, enter),
           run_site(oc, OC_GPU, &s, rows, dim, pending, enter));
    oc_same(oc, s.x);
    if (enter) {
        oc_near_f32(oc, s.post, 4 * n, 1e-6);
        oc_near_f32(oc, s.comb, 16 * n, 2e-6);
        oc_near_act(oc, s.n, n * d, 1e-3);
    }
    if (rows) row_alone(oc, &s, rows, dim, oc_below(oc, rows), pending, enter);
    oc_done(oc);
}

void oc_hyper(oc_ctx *oc)
{
    for (int i = 0; i < N_COUNTS; i++)
        for (int kind = 0; kind < 3; kind++) {
            if (oc->demo) check_hyper(oc, row_counts[i], 256, kind != 0, kind != 2);
            if (oc->demo) check_hyper(oc, row_counts[i], 208, kind != 0, kind != 2);
            if (oc->real) check_hyper(oc, row_counts[i], 4096, kind != 0, kind != 2);
        }
}
