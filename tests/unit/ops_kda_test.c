/* KDA: rows, chunks and replay against the recurrence in double precision, and against each other bit for bit. */
#include "ops_support.h"

enum {
    HEADS = 2,
    W = HEADS * 128,
    SLOTS = 3,
    STRIDE = 3 * W + 16,
    T_MAX = 200,
    STATE = 2 * HEADS * 128 * 128,
    CONV = 2 * 3 * 3 * W
};
static const td_dev_limits limits = { .rows = 256, .dim = 256, .n_heads = HEADS };

typedef struct world { /* one sequence's inputs and a layer's weights */
    float *proj, *beta, *f, *gate;
    float *conv, *dt_bias, *o_norm, neg_a[HEADS];
} world;

static world make_world(uint64_t seed)
{
    world w = { .proj = op_random(&seed, T_MAX * STRIDE, 2.0f),
                .beta = op_random(&seed, T_MAX * HEADS, 3.0f),
                .f = op_random(&seed, T_MAX * W, 3.0f),
                .gate = op_random(&seed, T_MAX * W, 3.0f),
                .conv = op_random(&seed, 3 * W * 4, 0.8f),
                .dt_bias = op_random(&seed, W, 1.0f),
                .o_norm = op_random(&seed, 128, 2.0f),
                .neg_a = { 0.5f, 1.5f } };
    return w;
}

static void release(world *w)
{
    free(w->proj);
    free(w->beta);
    free(w->f);
    free(w->gate);
    free(w->conv);
    free(w->dt_bias);
    free(w->o_norm);
}

typedef struct layer { /* state of all slots, saved rows, on one device */
    td_dev *dev;
    td_kda_state state;
    td_kda_saved saved;
    int parity[SLOTS], pos[SLOTS];
} layer;

static layer make_layer(int threads, bool exact)
{
    layer l = { .dev = op_device(&limits, threads, exact) };
    l.state = (td_kda_state){ op_alloc(SLOTS * STATE * sizeof(float)), op_act(l.dev, SLOTS * CONV) };
    l.saved = (td_kda_saved){ op_alloc(64 * W * 4), op_alloc(64 * W * 4), op_alloc(64 * W * 4),
                              op_alloc(64 * HEADS * 4), op_act(l.dev, 64 * 3 * W) };
    return l;
}

static void release_layer(layer *l)
{
    free(l->state.state);
    free(l->state.conv);
    free(l->saved.k);
    free(l->saved.v);
    free(l->saved.alpha);
    free(l->saved.beta);
    free(l->saved.raw);
    td_dev_destroy(l->dev);
}

typedef struct piece { /* rows of a sequence that one window takes */
    int slot, n_rows;
    bool chunked;
} piece;

/* Runs a window of pieces, all reading the same sequence at their slot's position; y: [rows][W]. keep < n_rows of the
 * only piece: replay. Then every slot is flipped and moved on. */
static float *run_window(layer *l, const world *w, const piece *pieces, int n_pieces, int keep)
{
    td_segment segments[SLOTS] = { 0 };
    int rows = 0, keeps[SLOTS];
    for (int i = 0; i < n_pieces; i++) {
        const piece *p = pieces + i;
        segments[i] = (td_segment){ .first_row = rows,
                                    .n_rows = p->n_rows,
                                    .pos = l->pos[p->slot],
                                    .slot = p->slot,
                                    .parity = l->parity[p->slot],
                                    .chunked = p->chunked };
        rows += p->n_rows;
        keeps[i] = keep < p->n_rows ? keep : p->n_rows;
    }
    size_t n = (size_t)rows;
    td_act *a_proj = op_act(l->dev, n * STRIDE), *a_beta = op_act(l->dev, n * HEADS), *a_f = op_act(l->dev, n * W),
           *a_gate = op_act(l->dev, n * W), *a_y = op_act(l->dev, n * W);
    for (int i = 0; i < n_pieces; i++) {
        size_t row = (size_t)segments[i].first_row, t = (size_t)segments[i].pos, m = (size_t)pieces[i].n_rows;
        td_act_from_f32(l->dev, td_act_at(l->dev, a_proj, row * STRIDE), w->proj + t * STRIDE, m * STRIDE);
        td_act_from_f32(l->dev, td_act_at(l->dev, a_beta, row * HEADS), w->beta + t * HEADS, m * HEADS);
        td_act_from_f32(l->dev, td_act_at(l->dev, a_f, row * W), w->f + t * W, m * W);
        td_act_from_f32(l->dev, td_act_at(l->dev, a_gate, row * W), w->gate + t * W, m * W);
    }
    td_window window = { .n_rows = rows, .n_segments = n_pieces, .segments = segments, .host_segments = segments };
    td_kda_args a = { .window = &window,
                      .n_heads = HEADS,
                      .rms_eps = 1e-5f,
                      .lower_bound = -5.0f,
                      .w = { w->conv, w->neg_a, w->dt_bias, w->o_norm },
                      .state = l->state,
                      .saved = l->saved,
                      .proj = a_proj,
                      .proj_stride = STRIDE,
                      .beta_raw = a_beta,
                      .beta_stride = HEADS,
                      .f = a_f,
                      .gate = a_gate,
                      .y = a_y };
    assert_int_equal(td_cpu_kda(l->dev, &a), TD_OK);
    td_kda_replay_args replay = {
        .window = &window, .keep = keeps, .n_heads = HEADS, .state = l->state, .saved = l->saved
    };
    assert_int_equal(td_cpu_kda_replay(l->dev, &replay), TD_OK);
    float *y = op_floats(l->dev, a_y, n * W);
    for (int i = 0; i < n_pieces; i++) {
        l->parity[pieces[i].slot] ^= 1;
        l->pos[pieces[i].slot] += keeps[i];
    }
    free(a_proj);
    free(a_beta);
    free(a_f);
    free(a_gate);
    free(a_y);
    return y;
}

/* rows in windows of the given widths (0 ends) on one slot, y in one array */
static float *run_widths(layer *l, const world *w, int slot, bool chunked, const int *widths)
{
    float *y = op_alloc(T_MAX * W * sizeof *y);
    for (int at = 0; *widths; at += *widths++) {
        piece p = { slot, *widths, chunked };
        float *part = run_window(l, w, &p, 1, *widths);
        memcpy(y + at * W, part, (size_t)*widths * W * sizeof *y);
        free(part);
    }
    return y;
}

static const float *state_of(const layer *l, int slot)
{
    return l->state.state + slot * STATE + l->parity[slot] * STATE / 2;
}

static void expect_same_state(const char *what, const layer *a, int slot_a, const layer *b, int slot_b)
{
    op_expect_bits(what, state_of(a, slot_a), state_of(b, slot_b), STATE / 2 * sizeof(float));
    op_expect_bits(what, td_act_at(a->dev, a->state.conv, (size_t)(slot_a * CONV + a->parity[slot_a] * CONV / 2)),
                   td_act_at(b->dev, b->state.conv, (size_t)(slot_b * CONV + b->parity[slot_b] * CONV / 2)),
                   td_act_bytes(a->dev, CONV / 2));
}

/* docs/model.md "KDA" in double: y [rows][W] and the final state. */
static void reference(const world *w, int rows, double *y, double *m)
{
    memset(m, 0, STATE / 2 * sizeof *m);
    for (int t = 0; t < rows; t++)
        for (int h = 0; h < HEADS; h++) {
            double z[3][128], norm[2] = { 1e-6, 1e-6 }, o[128] = { 0 }, mean = 0.0, *mh = m + h * 128 * 128;
            for (int part = 0; part < 3; part++)
                for (int c = 0; c < 128; c++) {
                    int channel = part * W + h * 128 + c;
                    z[part][c] = 0.0;
                    for (int j = 0; j < 4; j++)
                        if (t - 3 + j >= 0)
                            z[part][c] += (double)w->conv[channel * 4 + j] * w->proj[(t - 3 + j) * STRIDE + channel];
                    z[part][c] *= op_sigmoid(z[part][c]);
                    if (part < 2) norm[part] += z[part][c] * z[part][c];
                }
            for (int c = 0; c < 128; c++) z[0][c] /= sqrt(norm[0]) * sqrt(128.0), z[1][c] /= sqrt(norm[1]);
            double beta = op_sigmoid(w->beta[t * HEADS + h]);
            for (int c = 0; c < 128; c++) {
                double x = (double)w->f[t * W + h * 128 + c] + w->dt_bias[h * 128 + c];
                double alpha = exp(-5.0 * op_sigmoid(w->neg_a[h] * x));
                for (int d = 0; d < 128; d++) mh[c * 128 + d] *= alpha;
            }
            for (int d = 0; d < 128; d++) {
                double r = 0.0;
                for (int c = 0; c < 128; c++) r += z[1][c] * mh[c * 128 + d];
                for (int c = 0; c < 128; c++) {
                    mh[c * 128 + d] += z[1][c] * beta * (z[2][d] - r);
                    o[d] += z[0][c] * mh[c * 128 + d];
                }
                mean += o[d] * o[d] / 128.0;
            }
            for (int d = 0; d < 128; d++)
                y[t * W + h * 128 + d] =
                    w->o_norm[d] * o[d] / sqrt(mean + 1e-5) * op_sigmoid(w->gate[t * W + h * 128 + d]);
        }
}

/* fp32 in every step: 1e-5 is 01's bound for the chunked form. Engine: bf16 conv outputs (2^-9 each) through norms, a
 * gate and a recurrence; 1e-2. */
static void expect_reference(const world *w, int rows, bool chunked)
{
    double *y = op_alloc((size_t)rows * W * sizeof *y), *m = op_alloc(STATE / 2 * sizeof *m);
    reference(w, rows, y, m);
    const int widths[] = { rows > 64 && !chunked ? 64 : rows, rows > 64 && !chunked ? rows - 64 : 0, 0 };
    for (int exact = 0; exact < 2; exact++) {
        layer l = make_layer(1, exact);
        float *got = run_widths(&l, w, 1, chunked, widths);
        op_expect_near(chunked ? "chunked y" : "y", got, y, (size_t)rows * W, exact ? 1e-5 : 1e-2);
        op_expect_near(chunked ? "chunked state" : "state", state_of(&l, 1), m, STATE / 2, exact ? 1e-5 : 1e-2);
        free(got);
        release_layer(&l);
    }
    free(y);
    free(m);
}

static void rows_and_chunks_follow_the_recurrence(void **state)
{
    (void)state;
    world w = make_world(51);
    expect_reference(&w, 1, false);
    expect_reference(&w, 90, false);
    expect_reference(&w, 2, true);
    expect_reference(&w, 64, true);
    expect_reference(&w, 147, true);
    release(&w);
}

/* g near -5 on all channels: 64 rows decay by e^-320, beyond fp32 in any quotient form. */
static void strong_decay(void **state)
{
    (void)state;
    world w = make_world(52);
    for (int i = 0; i < T_MAX * W; i++) w.f[i] = 40.0f;
    expect_reference(&w, 130, true);
    expect_reference(&w, 20, false);
    release(&w);
}

/* Equal keys, no decay, beta near 1: I + A is as far from the identity as it gets. */
static void collinear_keys(void **state)
{
    (void)state;
    world w = make_world(53);
    for (int t = 1; t < T_MAX; t++)
        memcpy(w.proj + t * STRIDE + W, w.proj + W, W * sizeof(float)); /* k part of every row */
    for (int i = 0; i < T_MAX * W; i++) w.f[i] = -40.0f;
    for (int i = 0; i < T_MAX * HEADS; i++) w.beta[i] = 8.0f;
    expect_reference(&w, 130, true);
    release(&w);
}

static void prompt_cuts_change_nothing(void **state)
{
    (void)state;
    world w = make_world(54);
    static const int cuts[][5] = { { 64, 136, 0 }, { 128, 72, 0 }, { 64, 64, 64, 8, 0 }, { 192, 8, 0 } };
    layer whole = make_layer(1, false);
    float *y = run_widths(&whole, &w, 0, true, (const int[]){ 200, 0 });
    for (int i = 0; i < 4; i++) {
        layer l = make_layer(1, false);
        float *part = run_widths(&l, &w, i % SLOTS, true, cuts[i]);
        op_expect_bits("y", part, y, 200 * W * sizeof *y);
        expect_same_state("state", &l, i % SLOTS, &whole, 0);
        free(part);
        release_layer(&l);
    }
    for (int n = 1; n < 200; n += 37) { /* a prompt that ends off the grid: its rows as when more follow */
        layer l = make_layer(1, false);
        float *part = run_widths(&l, &w, 0, true, (const int[]){ n, 0 });
        op_expect_bits("prefix", part, y, (size_t)n * W * sizeof *y);
        free(part);
        release_layer(&l);
    }
    free(y);
    release_layer(&whole);
    release(&w);
}

static void window_widths_change_nothing(void **state)
{
    (void)state;
    world w = make_world(55);
    layer serial = make_layer(1, false), wide = make_layer(2, false), mixed = make_layer(16, false);
    int ones[41] = { 0 };
    for (int i = 0; i < 40; i++) ones[i] = 1;
    float *y = run_widths(&serial, &w, 0, false, ones);
    float *z = run_widths(&wide, &w, 2, false, (const int[]){ 7, 2, 1, 16, 14, 0 });
    op_expect_bits("y", z, y, 40 * W * sizeof *y);
    expect_same_state("state", &wide, 2, &serial, 0);
    /* Three sequences in one window, one of them a prompt: each gets what it gets alone. */
    piece three[3] = { { 0, 30, false }, { 1, 100, true }, { 2, 10, false } };
    float *all = run_window(&mixed, &w, three, 3, 200);
    layer prompt = make_layer(1, false);
    float *chunk = run_widths(&prompt, &w, 0, true, (const int[]){ 100, 0 });
    op_expect_bits("first", all, y, 30 * W * sizeof *y);
    op_expect_bits("prompt", all + 30 * W, chunk, 100 * W * sizeof *y);
    op_expect_bits("last", all + 130 * W, y, 10 * W * sizeof *y);
    expect_same_state("prompt state", &mixed, 1, &prompt, 0);
    free(all);
    free(chunk);
    free(y);
    free(z);
    release_layer(&serial);
    release_layer(&wide);
    release_layer(&mixed);
    release_layer(&prompt);
    release(&w);
}

static void replay_gives_the_serial_state(void **state)
{
    (void)state;
    world w = make_world(56);
    for (int keep = 1; keep <= 9; keep++) {
        layer serial = make_layer(1, false), draft = make_layer(2, false);
        piece p = { 0, 9, false };
        float *y = run_window(&draft, &w, &p, 1, keep); /* from a fresh slot: the conv window reaches before it */
        free(y);
        y = run_window(&draft, &w, &p, 1, keep); /* and from a running one */
        float *z = run_widths(&serial, &w, 0, false, (const int[]){ keep, 9, 0 });
        op_expect_bits("y", y, z + keep * W, 9 * W * sizeof *y);
        free(z);
        layer exact = make_layer(1, false);
        z = run_widths(&exact, &w, 1, false, (const int[]){ keep, keep, 0 });
        expect_same_state("state", &draft, 0, &exact, 1);
        free(y);
        free(z);
        release_layer(&serial);
        release_layer(&draft);
        release_layer(&exact);
    }
    release(&w);
}

static void wrong_windows_are_refused(void **state)
{
    (void)state;
    layer l = make_layer(1, false);
    td_segment s = { .n_rows = 3, .pos = 65, .chunked = 1 };
    td_window window = { .n_rows = 3, .n_segments = 1, .segments = &s, .host_segments = &s };
    td_kda_args a = { .window = &window, .n_heads = HEADS, .saved = l.saved };
    assert_int_equal(td_cpu_kda(l.dev, &a), TD_EINVAL); /* off the grid */
    s = (td_segment){ .n_rows = 4, .chunked = 0 };
    assert_int_equal(td_cpu_kda(l.dev, &a), TD_EINVAL); /* beyond the window */
    window.n_rows = s.n_rows = 65;
    assert_int_equal(td_cpu_kda(l.dev, &a), TD_EINVAL); /* more rows than saved holds */
    s.n_rows = 0;
    window.n_rows = 0;
    assert_int_equal(td_cpu_kda(l.dev, &a), TD_OK);
    td_weight f_b = { .format = TD_W_BF16, .out = W, .in = 128 }, g_b = f_b;
    a.f = a.gate = l.saved.raw; /* room */
    a.low = (td_kda_low_rank){ .f_b = &f_b, .stride = 128 };
    assert_int_equal(td_cpu_kda(l.dev, &a), TD_EINVAL); /* one of two */
    a.low.g_b = &g_b;
    assert_int_equal(td_cpu_kda(l.dev, &a), TD_OK);
    g_b.in = 64;
    assert_int_equal(td_cpu_kda(l.dev, &a), TD_EINVAL);
    g_b = (td_weight){ .format = TD_W_FP8, .out = W, .in = 128 };
    assert_int_equal(td_cpu_kda(l.dev, &a), TD_EINVAL); /* of two formats */
    g_b.format = TD_W_BF16;
    a.low.stride = 127;
    assert_int_equal(td_cpu_kda(l.dev, &a), TD_EINVAL);
    release_layer(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_and_chunks_follow_the_recurrence),
        cmocka_unit_test(strong_decay),
        cmocka_unit_test(collinear_keys),
        cmocka_unit_test(prompt_cuts_change_nothing),
        cmocka_unit_test(window_widths_change_nothing),
        cmocka_unit_test(replay_gives_the_serial_state),
        cmocka_unit_test(wrong_windows_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
