/* kda in both forms, and its replay. GPU against GPU: a window of n rows == n windows of a row; a replay == the serial
 * state; a prompt in one window == the same prompt cut on the grid, and its rows == those of a shorter prompt. */
#include "opcheck.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 5, ROWS_CAP = 420 };

typedef struct layer {
    int heads;
    size_t width, proj_stride;
    oc_buf *conv_w, *neg_a, *dt_bias, *o_norm;
    oc_buf *state, *conv, *state0, *conv0; /* and as before */
    oc_buf *proj, *f, *gate, *y;
    oc_buf *saved[5];
    /* with low: f and gate are products of these */
    bool low;
    oc_weight f_b, g_b;
    oc_buf *low_in;
    size_t low_stride;
} layer;

static layer make(oc_ctx *oc, int heads)
{
    layer l = { .heads = heads, .width = (size_t)heads * TD_HEAD };
    size_t h = (size_t)heads, w = l.width, state = SLOTS * 2 * w * TD_HEAD, conv = SLOTS * 2 * 3 * 3 * w;
    l.proj_stride = 3 * w + h + 1;
    l.conv_w = oc_floats(oc, "conv", 3 * w * TD_CONV, 0.0f, 0.7f);
    l.neg_a = oc_floats(oc, "neg_a", h, 1.5f, 1.0f);
    l.dt_bias = oc_floats(oc, "dt_bias", w, -2.0f, 3.0f);
    l.o_norm = oc_floats(oc, "o_norm", TD_HEAD, 1.0f, 0.3f);
    l.state = oc_floats(oc, "state", state, 0.0f, 0.1f);
    l.conv = oc_acts(oc, "conv rows", conv, 1.0f);
    l.state0 = oc_new(oc, "state0", state * sizeof(float));
    l.conv0 = oc_new(oc, "conv0", conv * sizeof(td_bf16));
    memcpy(l.state0->cpu, l.state->cpu, l.state0->n_bytes);
    memcpy(l.conv0->cpu, l.conv->cpu, l.conv0->n_bytes);
    l.proj = oc_acts(oc, "proj", ROWS_CAP * l.proj_stride, 1.0f);
    l.f = oc_acts(oc, "f", ROWS_CAP * w, 2.0f);
    l.gate = oc_acts(oc, "gate", ROWS_CAP * w, 2.0f);
    l.y = oc_new(oc, "y", ROWS_CAP * w * sizeof(td_bf16));
    for (int i = 0; i < 5; i++)
        l.saved[i] = oc_new(oc, "saved", TD_WINDOW_MAX * (i < 3 ? w * 4 : i == 3 ? h * 4 : 3 * w * 2));
    return l;
}

static void restore(oc_ctx *oc, const layer *l)
{
    memcpy(l->state->cpu, l->state0->cpu, l->state->n_bytes);
    memcpy(l->conv->cpu, l->conv0->cpu, l->conv->n_bytes);
    oc_push(oc, l->state);
    oc_push(oc, l->conv);
    oc_poison(oc, l->y);
    for (int i = 0; i < 5; i++) oc_poison(oc, l->saved[i]);
}

static td_kda_saved saved_of(const layer *l, int side)
{
    return (td_kda_saved){ (float *)oc_at(l->saved[0], side), (float *)oc_at(l->saved[1], side),
                           (float *)oc_at(l->saved[2], side), (float *)oc_at(l->saved[3], side),
                           (td_act *)oc_at(l->saved[4], side) };
}

static td_kda_state state_of(const layer *l, int side)
{
    return (td_kda_state){ (float *)oc_at(l->state, side), (td_act *)oc_at(l->conv, side) };
}

/* row0: of proj, f, gate, y. */
static td_status run(oc_ctx *oc, int side, const layer *l, const oc_window *w, int row0, bool keep)
{
    size_t r = (size_t)row0;
    td_dev *dev = oc->dev[side];
    const td_act *proj = td_act_at(dev, (const td_act *)oc_at(l->proj, side), r * l->proj_stride);
    td_kda_args a = { .window = &w->w[side],
                      .n_heads = l->heads,
                      .rms_eps = 1e-5f,
                      .lower_bound = -5.0f,
                      .w = { (const float *)oc_at(l->conv_w, side), (const float *)oc_at(l->neg_a, side),
                             (const float *)oc_at(l->dt_bias, side), (const float *)oc_at(l->o_norm, side) },
                      .state = state_of(l, side),
                      .proj = proj,
                      .proj_stride = l->proj_stride,
                      .beta_raw = td_act_at(dev, proj, 3 * l->width),
                      .beta_stride = l->proj_stride,
                      .f = td_act_at(dev, (td_act *)oc_at(l->f, side), r * l->width),
                      .gate = td_act_at(dev, (td_act *)oc_at(l->gate, side), r * l->width),
                      .y = td_act_at(dev, (const td_act *)oc_at(l->y, side), r * l->width) };
    if (keep) a.saved = saved_of(l, side);
    if (l->low) {
        const td_act *in = td_act_at(dev, (const td_act *)oc_at(l->low_in, side), r * l->low_stride);
        a.low = (td_kda_low_rank){ &l->f_b.w[side], &l->g_b.w[side], in, td_act_at(dev, in, TD_HEAD), l->low_stride };
    }
    return oc->ops[side].kda(dev, &a);
}

static void compare(oc_ctx *oc, const layer *l, int rows)
{
    oc_near_act(oc, l->y, (size_t)rows * l->width, 2e-3);
    oc_near_f32(oc, l->state, l->state->n_bytes / sizeof(float), 1e-5);
    oc_same(oc, l->conv);
}

/* State and convolution rows of a slot's parity, GPU. */
static unsigned char *slot_bytes(oc_ctx *oc, const layer *l, int slot, int parity, size_t *n_bytes)
{
    size_t state = l->width * TD_HEAD * 4, conv = 9 * l->width * 2, at = 2 * (size_t)slot + (size_t)parity;
    unsigned char *out = (unsigned char *)malloc(state + conv), *s = (unsigned char *)oc_pull(oc, l->state),
                  *c = (unsigned char *)oc_pull(oc, l->conv);
    memcpy(out, s + at * state, state);
    memcpy(out + state, c + at * conv, conv);
    free(s);
    free(c);
    *n_bytes = state + conv;
    return out;
}

/* One segment's rows from row0 of the buffers, in windows of `cuts` rows; returns the final parity. */
static int feed(oc_ctx *oc, const layer *l, int slot, int pos, int parity, bool chunked, int row0, const int *cuts,
                int n_cuts)
{
    for (int i = 0; i < n_cuts; i++) {
        oc_window w;
        td_segment s = { .n_rows = cuts[i], .pos = pos, .slot = slot, .parity = parity, .chunked = chunked };
        oc_make_window(oc, &w, &s, 1);
        oc_ran(oc, TD_OK, run(oc, OC_GPU, l, &w, row0, false));
        pos += cuts[i];
        row0 += cuts[i];
        parity ^= 1;
    }
    return parity;
}

static void check_serial(oc_ctx *oc, int heads, int rows)
{
    if (!oc_case(oc, "%d heads, a window of %d rows", heads, rows)) return;
    layer l = make(oc, heads);
    oc_window w;
    int other = rows > 3 ? 3 : 1;
    td_segment segments[3] = { { .n_rows = rows, .pos = 77, .slot = 3, .parity = 1 },
                               { .n_rows = 0, .slot = 1 },
                               { .n_rows = rows + other <= TD_WINDOW_MAX ? other : 0, .pos = 5, .slot = 0 } };
    oc_make_window(oc, &w, segments, 3);
    oc_ran(oc, run(oc, OC_CPU, &l, &w, 0, true), run(oc, OC_GPU, &l, &w, 0, true));
    compare(oc, &l, w.w[0].n_rows);
    for (int i = 0; i < 4; i++) oc_near_f32(oc, l.saved[i], l.saved[i]->n_bytes / 4, 1e-5);
    oc_same(oc, l.saved[4]);

    size_t n_bytes;
    unsigned char *state = slot_bytes(oc, &l, 3, 0, &n_bytes), *y = (unsigned char *)oc_pull(oc, l.y);
    /* commit of some rows: a replay from what the window saved */
    int keep = rows > 1 ? 1 + oc_below(oc, rows - 1) : 0;
    int32_t keeps[3] = { keep, 0, segments[2].n_rows };
    unsigned char *replayed = NULL;
    if (keep) {
        oc_buf *k = oc_ints(oc, "keep", keeps, 3);
        td_status status[OC_SIDES];
        for (int side = 0; side < OC_SIDES; side++) {
            td_kda_replay_args a = { &w.w[side], (const int32_t *)oc_at(k, side), heads, state_of(&l, side),
                                     saved_of(&l, side) };
            status[side] = oc->ops[side].kda_replay(oc->dev[side], &a);
        }
        oc_ran(oc, status[0], status[1]);
        oc_near_f32(oc, l.state, l.state->n_bytes / sizeof(float), 1e-5);
        oc_same(oc, l.conv);
        replayed = slot_bytes(oc, &l, 3, 0, &n_bytes);
    }
    oc_done(oc);

    /* the same content again, row by row */
    (void)n_bytes;
    free(state);
    free(y);
    free(replayed);
}

/* GPU only: the equalities, on fresh content. */
static void check_serial_bits(oc_ctx *oc, int heads, int rows)
{
    int ones[TD_WINDOW_MAX], keep = 1 + oc_below(oc, rows - 1);
    size_t n_bytes;
    if (!oc_case(oc, "%d heads: %d rows at once == one by one; replay of %d", heads, rows, keep)) return;
    layer l = make(oc, heads);
    oc_window w;
    td_segment s = { .n_rows = rows, .pos = 30, .slot = 2, .parity = 0 };
    oc_make_window(oc, &w, &s, 1);
    restore(oc, &l);
    oc_ran(oc, TD_OK, run(oc, OC_GPU, &l, &w, 0, true));
    unsigned char *state = slot_bytes(oc, &l, 2, 1, &n_bytes), *y = (unsigned char *)oc_pull(oc, l.y);
    oc_buf *k = oc_ints(oc, "keep", (int32_t[]){ keep }, 1);
    td_kda_replay_args a = { &w.w[OC_GPU], (const int32_t *)oc_at(k, OC_GPU), heads, state_of(&l, OC_GPU),
                             saved_of(&l, OC_GPU) };
    oc_ran(oc, TD_OK, oc->ops[OC_GPU].kda_replay(oc->dev[OC_GPU], &a));
    unsigned char *replayed = slot_bytes(oc, &l, 2, 1, &n_bytes);
    for (int i = 0; i < TD_WINDOW_MAX; i++) ones[i] = 1;
    restore(oc, &l);
    int parity = 0;
    for (int i = 0; i < rows; i++) {
        parity = feed(oc, &l, 2, 30 + i, parity, false, i, ones, 1);
        if (i + 1 != keep) continue;
        unsigned char *serial = slot_bytes(oc, &l, 2, parity, &n_bytes);
        oc_bits(oc, "replayed state", replayed, serial, n_bytes);
        free(serial);
    }
    unsigned char *serial = slot_bytes(oc, &l, 2, parity, &n_bytes), *y1 = (unsigned char *)oc_pull(oc, l.y);
    oc_bits(oc, "state", state, serial, n_bytes);
    oc_bits(oc, "y", y, y1, (size_t)rows * l.width * 2);
    void *const all[] = { state, y, replayed, serial, y1 };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    oc_done(oc);
}

/* Short segments side by side, more blocks than multiprocessors with all heads: as on the CPU, and as each one alone. */
static void check_beside(oc_ctx *oc, int heads)
{
    static const int counts[SLOTS] = { 1, 2, 1, 1, 3 };
    if (!oc_case(oc, "%d heads, five short segments in a window == each alone", heads)) return;
    layer l = make(oc, heads);
    oc_window w;
    td_segment segments[SLOTS];
    for (int i = 0; i < SLOTS; i++)
        segments[i] = (td_segment){ .n_rows = counts[i], .pos = 11 * i, .slot = 2 * i % SLOTS, .parity = i % 2 };
    oc_make_window(oc, &w, segments, SLOTS);
    oc_ran(oc, run(oc, OC_CPU, &l, &w, 0, true), run(oc, OC_GPU, &l, &w, 0, true));
    compare(oc, &l, w.w[0].n_rows);
    unsigned char *state = (unsigned char *)oc_pull(oc, l.state), *conv = (unsigned char *)oc_pull(oc, l.conv),
                  *y = (unsigned char *)oc_pull(oc, l.y);
    restore(oc, &l);
    for (int i = 0; i < SLOTS; i++) {
        oc_window one;
        oc_make_window(oc, &one, &segments[i], 1);
        oc_ran(oc, TD_OK, run(oc, OC_GPU, &l, &one, w.segments[i].first_row, false));
    }
    unsigned char *state1 = (unsigned char *)oc_pull(oc, l.state), *conv1 = (unsigned char *)oc_pull(oc, l.conv),
                  *y1 = (unsigned char *)oc_pull(oc, l.y);
    oc_bits(oc, "state", state, state1, l.state->n_bytes);
    oc_bits(oc, "conv", conv, conv1, l.conv->n_bytes);
    oc_bits(oc, "y", y, y1, (size_t)w.w[0].n_rows * l.width * sizeof(td_bf16));
    void *const all[] = { state, conv, y, state1, conv1, y1 };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    oc_done(oc);
}

static void check_chunked(oc_ctx *oc, int heads, int rows)
{
    if (!oc_case(oc, "%d heads, a prompt of %d rows beside others", heads, rows)) return;
    layer l = make(oc, heads);
    oc_window w;
    td_segment segments[3] = { { .n_rows = 2, .pos = 9, .slot = 1, .parity = 1 },
                               { .n_rows = rows, .pos = 128, .slot = 4, .parity = 0, .chunked = 1 },
                               { .n_rows = 70, .pos = 0, .slot = 2, .parity = 1, .chunked = 1 } };
    oc_make_window(oc, &w, segments, 3);
    oc_ran(oc, run(oc, OC_CPU, &l, &w, 0, true), run(oc, OC_GPU, &l, &w, 0, true));
    compare(oc, &l, w.w[0].n_rows);
    oc_done(oc);
}

/* Gates of low rank: as on the CPU, and bits as with products of their own. pad: of the rows that f_a and g_a are in. */
static void check_low(oc_ctx *oc, int heads, int rows, td_format format, size_t pad, bool prompt)
{
    static const char *const names[] = { [TD_W_BF16] = "bf16", [TD_W_Q4] = "q4", [TD_W_FP8] = "fp8" };
    if (!oc_case(oc, "%d heads, %d rows%s, %s gates of low rank, stride %zu", heads, rows,
                 prompt ? " and a prompt" : "", names[format], 2 * TD_HEAD + pad))
        return;
    layer l = make(oc, heads);
    oc_window w;
    td_segment segments[3] = { { .n_rows = rows, .pos = 3, .slot = 2, .parity = 1 },
                               { .n_rows = rows < TD_WINDOW_MAX ? 1 : 0, .pos = 8, .slot = 0 },
                               { .n_rows = prompt ? 70 : 0, .pos = 64, .slot = 1, .chunked = prompt } };
    oc_make_window(oc, &w, segments, 3);
    int n_rows = w.w[0].n_rows;
    l.low = true;
    l.low_stride = 2 * TD_HEAD + pad;
    l.f_b = oc_random_weight(oc, format, (int)l.width, TD_HEAD);
    l.g_b = oc_random_weight(oc, format, (int)l.width, TD_HEAD);
    l.low_in = oc_acts(oc, "f_a and g_a", (size_t)n_rows * l.low_stride, 1.0f);
    oc_poison(oc, l.f);
    oc_poison(oc, l.gate);
    oc_ran(oc, run(oc, OC_CPU, &l, &w, 0, true), run(oc, OC_GPU, &l, &w, 0, true));
    compare(oc, &l, n_rows);
    oc_near_f32(oc, l.saved[2], (size_t)(n_rows - segments[2].n_rows) * l.width, 1e-3);
    unsigned char *state = (unsigned char *)oc_pull(oc, l.state), *y = (unsigned char *)oc_pull(oc, l.y),
                  *alpha = (unsigned char *)oc_pull(oc, l.saved[2]);
    restore(oc, &l);
    td_dev *dev = oc->dev[OC_GPU];
    for (int i = 0; i < 2; i++) {
        td_linear_args product = { .n_rows = n_rows,
                                   .w = i ? &l.g_b.w[OC_GPU] : &l.f_b.w[OC_GPU],
                                   .x = td_act_at(dev, (const td_act *)oc_at(l.low_in, OC_GPU), i ? TD_HEAD : 0),
                                   .x_stride = l.low_stride,
                                   .y_act = (td_act *)oc_at(i ? l.gate : l.f, OC_GPU),
                                   .y_stride = l.width };
        oc_ran(oc, TD_OK, oc->ops[OC_GPU].linear(dev, &product));
    }
    l.low = false;
    oc_ran(oc, TD_OK, run(oc, OC_GPU, &l, &w, 0, true));
    unsigned char *state1 = (unsigned char *)oc_pull(oc, l.state), *y1 = (unsigned char *)oc_pull(oc, l.y),
                  *alpha1 = (unsigned char *)oc_pull(oc, l.saved[2]);
    oc_bits(oc, "state", state, state1, l.state->n_bytes);
    oc_bits(oc, "y", y, y1, (size_t)n_rows * l.width * sizeof(td_bf16));
    oc_bits(oc, "alpha", alpha, alpha1, (size_t)(n_rows - segments[2].n_rows) * l.width * sizeof(float));
    void *const all[] = { state, y, alpha, state1, y1, alpha1 };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    oc_done(oc);
}

static void check_cuts(oc_ctx *oc, int heads)
{
    static const int whole[] = { 200 }, cuts[][4] = { { 64, 64, 64, 8 }, { 128, 72, 0, 0 }, { 64, 136, 0, 0 } };
    static const int n_cuts[] = { 4, 2, 2 };
    size_t n_bytes;
    if (!oc_case(oc, "%d heads: a prompt of 200 rows cut on the grid", heads)) return;
    layer l = make(oc, heads);
    restore(oc, &l);
    int parity = feed(oc, &l, 1, 64, 0, true, 0, whole, 1);
    unsigned char *state = slot_bytes(oc, &l, 1, parity, &n_bytes), *y = (unsigned char *)oc_pull(oc, l.y);
    for (int i = 0; i < 3; i++) {
        restore(oc, &l);
        parity = feed(oc, &l, 1, 64, 0, true, 0, cuts[i], n_cuts[i]);
        unsigned char *state1 = slot_bytes(oc, &l, 1, parity, &n_bytes), *y1 = (unsigned char *)oc_pull(oc, l.y);
        oc_bits(oc, "state", state1, state, n_bytes);
        oc_bits(oc, "y", y1, y, 200 * l.width * 2);
        free(state1);
        free(y1);
    }
    free(state);
    free(y);
    oc_done(oc);
}

/* Rows that follow in the chunk, far larger ones, leave a row's bits alone. */
static void check_following(oc_ctx *oc, int heads)
{
    enum { ROWS = 200, LAST = 150 };
    static const int whole[] = { ROWS }, part[] = { LAST };
    if (!oc_case(oc, "%d heads: %d rows of a prompt of %d", heads, LAST, ROWS)) return;
    layer l = make(oc, heads);
    td_bf16 *proj = (td_bf16 *)(void *)l.proj->cpu;
    for (size_t i = LAST * l.proj_stride; i < ROWS * l.proj_stride; i++)
        proj[i] = td_f32_bf16(0x1p20f * td_bf16_f32(proj[i]));
    oc_push(oc, l.proj);
    restore(oc, &l);
    feed(oc, &l, 1, 64, 0, true, 0, whole, 1);
    unsigned char *y = (unsigned char *)oc_pull(oc, l.y);
    restore(oc, &l);
    feed(oc, &l, 1, 64, 0, true, 0, part, 1);
    unsigned char *y1 = (unsigned char *)oc_pull(oc, l.y);
    oc_bits(oc, "y", y1, y, LAST * l.width * sizeof(td_bf16));
    free(y);
    free(y1);
    oc_done(oc);
}

/* Prompts at the edges of what the chunked form's number formats hold. */
typedef enum hard { FORGETS, SAME_KEYS, WIDE_VALUES } hard;

static void check_hard(oc_ctx *oc, hard kind, const char *name)
{
    enum { HEADS = 2, ROWS = 257 };
    if (!oc_case(oc, "%d heads, a prompt of %d rows: %s", HEADS, ROWS, name)) return;
    layer l = make(oc, HEADS);
    td_bf16 *proj = (td_bf16 *)(void *)l.proj->cpu, *f = (td_bf16 *)(void *)l.f->cpu;
    if (kind != WIDE_VALUES) /* every decay e^-5; none */
        for (size_t i = 0; i < ROWS * l.width; i++) f[i] = td_f32_bf16(kind == FORGETS ? 100.0f : -100.0f);
    for (size_t r = 0; r < ROWS; r++) {
        td_bf16 *row = proj + r * l.proj_stride;
        if (kind == SAME_KEYS) { /* and beta 1 */
            memcpy(row, proj, 2 * l.width * sizeof *row);
            for (int h = 0; h < HEADS; h++) row[3 * l.width + (size_t)h] = td_f32_bf16(20.0f);
        }
        if (kind == WIDE_VALUES) {
            float scale = ldexpf(1.0f, 20 - 5 * (int)(r % 9));
            for (size_t i = 2 * l.width; i < 3 * l.width; i++) row[i] = td_f32_bf16(scale * td_bf16_f32(row[i]));
        }
    }
    oc_push(oc, l.proj);
    oc_push(oc, l.f);
    oc_window w;
    td_segment segment = { .n_rows = ROWS, .pos = 0, .slot = 1, .chunked = 1 };
    oc_make_window(oc, &w, &segment, 1);
    oc_ran(oc, run(oc, OC_CPU, &l, &w, 0, false), run(oc, OC_GPU, &l, &w, 0, false));
    compare(oc, &l, ROWS);
    oc_done(oc);
}

/* The same rows again and again, next to no decay: what a chunk rounds must not add up to a drift. */
static void check_long(oc_ctx *oc)
{
    enum { ROWS = 384, TURNS = 50 };
    if (!oc_case(oc, "a head, a prompt of %d rows", ROWS * TURNS)) return;
    layer l = make(oc, 1);
    td_bf16 *f = (td_bf16 *)(void *)l.f->cpu;
    for (size_t i = 0; i < ROWS * l.width; i++) f[i] = td_f32_bf16(-8.0f);
    oc_push(oc, l.f);
    oc_window w[2];
    for (int parity = 0; parity < 2; parity++) {
        td_segment segment = { .n_rows = ROWS, .pos = 0, .slot = 1, .parity = parity, .chunked = 1 };
        oc_make_window(oc, &w[parity], &segment, 1);
    }
    for (int i = 0; i < TURNS; i++)
        oc_ran(oc, run(oc, OC_CPU, &l, &w[i % 2], 0, false), run(oc, OC_GPU, &l, &w[i % 2], 0, false));
    compare(oc, &l, ROWS);
    oc_done(oc);
}

void oc_kda(oc_ctx *oc)
{
    static const int rows[] = { 1, 2, 3, 7, 8, 9, 16, 33, 64 }, prompts[] = { 1, 15, 16, 17, 63, 64, 65, 130, 257 };
    int heads = oc->real ? 32 : 4;
    for (int i = 0; i < 9; i++) check_serial(oc, i % 3 == 2 ? heads : 1 + i % 2, rows[i]);
    for (int i = 1; i < 9; i += 2) check_serial_bits(oc, 2, rows[i]);
    check_beside(oc, heads);
    for (int i = 0; i < 9; i++) check_chunked(oc, i % 4 == 3 ? heads : 1 + i % 2, prompts[i]);
    for (int i = 0; i < 3; i++) {
        td_format format = (td_format)i;
        check_low(oc, heads, 1, format, 8, false);
        check_low(oc, 2, 7, format, 0, false);
        check_low(oc, 3, 21, format, 16, false);
        check_low(oc, 2, 4, format, 3, false);
        check_low(oc, 2, 5, format, 8, true);
    }
    check_cuts(oc, 2);
    check_following(oc, 2);
    check_long(oc);
    check_hard(oc, FORGETS, "strong decay");
    check_hard(oc, SAME_KEYS, "equal keys, no decay");
    check_hard(oc, WIDE_VALUES, "values of any size");
}
