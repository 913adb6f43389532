/* SwiGLU, router and experts against double precision; ties, biases far from zero, NaN; and bit for bit alone, in other
 * windows and with other thread counts. */
#include "ops_support.h"

enum { DIM = 256, WIDTH = 128, EXPERTS = 6, TOP = 3, ROWS = 300 };
static const td_dev_limits limits = { .rows = ROWS, .dim = DIM, .n_experts = 288, .top_k = 8, .expert_width = WIDTH };

static double silu(double x)
{
    return x * op_sigmoid(x);
}

static double swiglu(double gate, double up, double limit)
{
    return silu(fmin(gate, limit)) * fmax(fmin(up, limit), -limit);
}

static void swiglu_clamps(void **state)
{
    (void)state;
    enum { W = 600 };
    uint64_t seed = 71;
    float *x = op_random(&seed, 2 * 2 * W, 20.0f);
    double want[2 * W];
    for (int r = 0; r < 2; r++)
        for (int i = 0; i < W; i++) want[r * W + i] = swiglu(x[r * 2 * W + i], x[r * 2 * W + W + i], 10.0);
    for (int exact = 0; exact < 2; exact++) {
        td_dev *dev = op_device(&limits, 1, exact);
        td_act *in = op_act_of(dev, x, 2 * 2 * W), *out = op_act(dev, 2 * W);
        td_swiglu_args a = { .n_rows = 2, .width = W, .limit = 10.0f, .gate_up = in, .y = out };
        assert_int_equal(td_cpu_swiglu(dev, &a), TD_OK);
        float *y = op_floats(dev, out, 2 * W);
        op_expect_near("swiglu", y, want, 2 * W, exact ? 3e-7 : 4e-3);
        free(y);
        free(in);
        free(out);
        td_dev_destroy(dev);
    }
    free(x);
}

typedef struct routing {
    int32_t *ids;
    float *weights;
} routing;

static routing route(td_dev *dev, const td_act *x, int rows, const td_weight *w, const float *bias, int top_k,
                     bool norm)
{
    routing r = { op_alloc((size_t)(rows * top_k) * 4), op_alloc((size_t)(rows * top_k) * 4) };
    td_router_args a = { .n_rows = rows,
                         .dim = w->in,
                         .n_experts = w->out,
                         .top_k = top_k,
                         .norm = norm,
                         .scale = 2.5f,
                         .x = x,
                         .w = w,
                         .bias = bias,
                         .ids = r.ids,
                         .weights = r.weights };
    assert_int_equal(td_cpu_router(dev, &a), TD_OK);
    return r;
}

static void release_routing(routing *r)
{
    free(r->ids);
    free(r->weights);
}

/* 288 experts, biases near 7 with steps of 1e-3, as the checkpoint's: the picks are those of double precision wherever
 * two keys differ by more than fp32 can tell at 7 (2^-22). */
static void router_picks_as_in_double(void **state)
{
    (void)state;
    enum { E = 288, K = 8, R = 40 };
    uint64_t seed = 72;
    td_dev *dev = op_device(&limits, 1, false), *many = op_device(&limits, 16, false);
    float *w = op_random(&seed, E * DIM, 0.1f), *x = op_random(&seed, R * DIM, 1.0f), bias[E];
    td_bf16 *src = op_bf16(w, E * DIM);
    for (int e = 0; e < E; e++) bias[e] = 7.0f + 1e-3f * (float)(op_next(&seed) % 64);
    td_weight packed = { TD_W_BF16, E, DIM, op_alloc(td_cpu_weight_bytes(TD_W_BF16, E, DIM)) };
    assert_int_equal(td_cpu_weight_fill(dev, &packed, 0, E, src, DIM, 0), TD_OK);
    td_act *xa = op_act_of(dev, x, R * DIM);
    routing got = route(dev, xa, R, &packed, bias, K, true), again = route(many, xa, R, &packed, bias, K, true);
    op_expect_bits("threads", again.ids, got.ids, R * K * 4);
    op_expect_bits("threads", again.weights, got.weights, R * K * 4);
    int compared = 0;
    for (int r = 0; r < R; r++) {
        double prob[E], key[E], sum = 0.0, want[K];
        float weights[K];
        int ids[K];
        bool close = false;
        for (int e = 0; e < E; e++) {
            double z = 0.0;
            for (int d = 0; d < DIM; d++) z += (double)w[e * DIM + d] * x[r * DIM + d];
            key[e] = (prob[e] = op_sigmoid(z)) + bias[e];
        }
        for (int k = 0; k < K; k++) {
            ids[k] = 0;
            for (int e = 1; e < E; e++)
                if (key[e] > key[ids[k]]) ids[k] = e;
            for (int e = 0; e < E; e++) close |= e != ids[k] && fabs(key[e] - key[ids[k]]) < 1e-6;
            sum += prob[ids[k]];
            key[ids[k]] = -1.0;
        }
        if (close) continue;
        compared++;
        for (int k = 0; k < K; k++) {
            assert_int_equal(got.ids[r * K + k], ids[k]);
            weights[k] = got.weights[r * K + k];
            want[k] = prob[ids[k]] / (sum + 1e-20) * 2.5;
        }
        op_expect_near("weights", weights, want, K, 1e-6);
        routing one = route(dev, td_act_at(dev, xa, (size_t)r * DIM), 1, &packed, bias, K, true);
        op_expect_bits("alone", one.ids, got.ids + r * K, K * 4);
        op_expect_bits("alone", one.weights, got.weights + r * K, K * 4);
        release_routing(&one);
    }
    assert_true(compared > R / 2);
    release_routing(&got);
    release_routing(&again);
    free(xa);
    free(packed.data);
    free(src);
    free(w);
    free(x);
    td_dev_destroy(dev);
    td_dev_destroy(many);
}

static void router_ties_and_nan(void **state)
{
    (void)state;
    td_dev *dev = op_device(&limits, 1, true);
    float w[EXPERTS * 16] = { 0 }, bias[EXPERTS] = { 1.0f, 2.0f, 2.0f, 2.0f, 2.0f, 1.0f }, x[3 * 16] = { 0 };
    x[16] = NAN;
    w[3 * 16] = 1.0f; /* expert 3 sees x[0] */
    x[32] = 1.0f;
    td_bf16 *src = op_bf16(w, EXPERTS * 16);
    td_weight packed = { TD_W_BF16, EXPERTS, 16, op_alloc(td_cpu_weight_bytes(TD_W_BF16, EXPERTS, 16)) };
    assert_int_equal(td_cpu_weight_fill(dev, &packed, 0, EXPERTS, src, 16, 0), TD_OK);
    routing r = route(dev, (const td_act *)(const void *)x, 3, &packed, bias, TOP, false);
    const int32_t tie[TOP] = { 1, 2, 3 }, led[TOP] = { 3, 1, 2 };
    op_expect_bits("tie", r.ids, tie, sizeof tie);
    op_expect_bits("led", r.ids + 2 * TOP, led, sizeof led);
    assert_true(r.weights[0] == 0.5f * 2.5f); /* norm false: sigmoid times scale */
    for (int k = 0; k < TOP; k++) {
        assert_in_range(r.ids[TOP + k], 0, EXPERTS - 1);
        assert_true(isnan(r.weights[TOP + k]));
        for (int j = 0; j < k; j++) assert_int_not_equal(r.ids[TOP + k], r.ids[TOP + j]);
    }
    td_router_args a = { .n_rows = 1, .dim = 16, .n_experts = EXPERTS, .top_k = EXPERTS + 1, .w = &packed };
    assert_int_equal(td_cpu_router(dev, &a), TD_EINVAL);
    release_routing(&r);
    free(packed.data);
    free(src);
    td_dev_destroy(dev);
}

typedef struct bank { /* experts in both forms, and the plain weights [in][out] as float */
    td_experts experts;
    float *w[3][EXPERTS];
    td_exl3 exl3[3][EXPERTS];
    td_weight plain[3][EXPERTS];
} bank;

static void make_exl3(td_exl3 *w, float **restored, int k, int n, uint64_t *seed)
{
    size_t bytes = td_exl3_trellis_bytes(k, n, 8);
    uint64_t *trellis = op_alloc(bytes);
    for (size_t i = 0; i < bytes / 8; i++) trellis[i] = op_next(seed);
    td_f16 *suh = op_alloc((size_t)k * 2), *svh = op_alloc((size_t)n * 2);
    for (int i = 0; i < k; i++) suh[i] = td_f32_f16(op_uniform(seed) > 0.0f ? 1.0f : -1.0f);
    for (int i = 0; i < n; i++) svh[i] = td_f32_f16(0.1f * op_uniform(seed));
    *w = (td_exl3){ k, n, 8, TD_EXL3_MCG, (const uint16_t *)(const void *)trellis, suh, svh };
    *restored = op_alloc((size_t)k * (size_t)n * 4);
    assert_int_equal(td_exl3_restore(w, *restored, NULL), TD_OK);
}

static void make_plain(td_dev *dev, td_weight *w, float **weights, int k, int n, uint64_t *seed)
{
    float *rows = op_random(seed, (size_t)k * (size_t)n, 0.1f);
    td_bf16 *src = op_bf16(rows, (size_t)k * (size_t)n);
    *w = (td_weight){ TD_W_BF16, n, k, op_alloc(td_cpu_weight_bytes(TD_W_BF16, n, k)) };
    assert_int_equal(td_cpu_weight_fill(dev, w, 0, n, src, (size_t)k, 0), TD_OK);
    *weights = op_alloc((size_t)k * (size_t)n * 4);
    for (int i = 0; i < k; i++)
        for (int o = 0; o < n; o++) (*weights)[i * n + o] = rows[o * k + i];
    free(src);
    free(rows);
}

static bank *make_bank(td_dev *dev, bool exl3, uint64_t seed)
{
    bank *b = op_alloc(sizeof *b);
    for (int m = 0; m < 3; m++)
        for (int e = 0; e < EXPERTS; e++) {
            int k = m == 2 ? WIDTH : DIM, n = m == 2 ? DIM : WIDTH;
            if (exl3)
                make_exl3(&b->exl3[m][e], &b->w[m][e], k, n, &seed);
            else
                make_plain(dev, &b->plain[m][e], &b->w[m][e], k, n, &seed);
        }
    b->experts = (td_experts){ .n_experts = EXPERTS,
                               .dim = DIM,
                               .width = WIDTH,
                               .exl3 = exl3,
                               .gate_x = b->exl3[0],
                               .up_x = b->exl3[1],
                               .down_x = b->exl3[2],
                               .gate = b->plain[0],
                               .up = b->plain[1],
                               .down = b->plain[2] };
    return b;
}

static void release_bank(bank *b)
{
    for (int m = 0; m < 3; m++)
        for (int e = 0; e < EXPERTS; e++) {
            free(b->w[m][e]);
            free((void *)(uintptr_t)b->exl3[m][e].trellis);
            free((void *)(uintptr_t)b->exl3[m][e].suh);
            free((void *)(uintptr_t)b->exl3[m][e].svh);
            free(b->plain[m][e].data);
        }
    free(b);
}

static float *run(td_dev *dev, const bank *b, const float *x, const int32_t *ids, const float *weights,
                  const float *shared, int rows)
{
    td_act *xa = op_act_of(dev, x, (size_t)rows * DIM);
    float *y = op_alloc((size_t)rows * DIM * 4);
    td_experts_args a = { .n_rows = rows,
                          .top_k = TOP,
                          .limit = 10.0f,
                          .experts = &b->experts,
                          .x = xa,
                          .ids = ids,
                          .weights = weights,
                          .shared = shared,
                          .y = y };
    assert_int_equal(td_cpu_experts(dev, &a), TD_OK);
    free(xa);
    return y;
}

static void reference_row(const bank *b, const float *x, const int32_t *ids, const float *weights, const float *shared,
                          double *y)
{
    for (int d = 0; d < DIM; d++) y[d] = shared[d];
    for (int k = 0; k < TOP; k++) {
        if (ids[k] < 0 || ids[k] >= EXPERTS) continue;
        for (int i = 0; i < WIDTH; i++) {
            double gate = 0.0, up = 0.0;
            for (int d = 0; d < DIM; d++) {
                gate += (double)x[d] * b->w[0][ids[k]][d * WIDTH + i];
                up += (double)x[d] * b->w[1][ids[k]][d * WIDTH + i];
            }
            double mid = swiglu(gate, up, 10.0);
            for (int d = 0; d < DIM; d++) y[d] += weights[k] * mid * b->w[2][ids[k]][i * DIM + d];
        }
    }
}

/* exact: fp32 throughout, but EXL3 keeps its fp16 inputs (2^-12 relative each, three products deep). Engine: bf16 gate,
 * up and middle. 300 rows on six experts: about 150 picks each, more than a batch in all; expert 5 gets none. */
static void experts_follow_the_formulas(void **state)
{
    (void)state;
    for (int form = 0; form < 4; form++) {
        bool exl3 = form & 1, exact = form >> 1;
        uint64_t seed = 73 + (uint64_t)form;
        td_dev *dev = op_device(&limits, 1, exact), *many = op_device(&limits, 16, exact),
               *two = op_device(&limits, 2, exact);
        bank *b = make_bank(dev, exl3, seed);
        float *x = op_random(&seed, ROWS * DIM, 0.5f), *weights = op_random(&seed, ROWS * TOP, 1.0f);
        float *shared = op_random(&seed, ROWS * DIM, 0.5f);
        int32_t *ids = op_alloc(ROWS * TOP * 4);
        for (int i = 0; i < ROWS * TOP; i++) ids[i] = i % TOP == 0 ? 2 : (int32_t)(op_next(&seed) % 5);
        ids[TOP + 1] = -1;
        ids[TOP + 2] = EXPERTS; /* both skipped */
        double *want = op_alloc(30 * DIM * 8);
        for (int r = 0; r < 30; r++)
            reference_row(b, x + r * DIM, ids + r * TOP, weights + r * TOP, shared + r * DIM, want + r * DIM);
        float *y = run(dev, b, x, ids, weights, shared, ROWS);
        op_expect_near("experts", y, want, 30 * DIM, !exact ? 1e-2 : exl3 ? 1e-3 : 1e-6);
        float *y16 = run(many, b, x, ids, weights, shared, ROWS), *y2 = run(two, b, x, ids, weights, shared, 7);
        op_expect_bits("16 threads", y16, y, ROWS * DIM * 4);
        op_expect_bits("2 threads", y2, y, 7 * DIM * 4);
        for (int r = 0; r < ROWS; r += 23) {
            float *one = run(dev, b, x + r * DIM, ids + r * TOP, weights + r * TOP, shared + r * DIM, 1);
            op_expect_bits("alone", one, y + r * DIM, DIM * 4);
            free(one);
        }
        float *copy = op_alloc(ROWS * DIM * 4); /* y may be shared */
        memcpy(copy, shared, ROWS * DIM * 4);
        td_act *xa = op_act_of(dev, x, ROWS * DIM);
        td_experts_args a = { .n_rows = ROWS,
                              .top_k = TOP,
                              .limit = 10.0f,
                              .experts = &b->experts,
                              .x = xa,
                              .ids = ids,
                              .weights = weights,
                              .shared = copy,
                              .y = copy };
        assert_int_equal(td_cpu_experts(dev, &a), TD_OK);
        op_expect_bits("in place", copy, y, ROWS * DIM * 4);
        a.n_rows = 0;
        assert_int_equal(td_cpu_experts(dev, &a), TD_OK);
        a.n_rows = ROWS + 1;
        assert_int_equal(td_cpu_experts(dev, &a), TD_EINVAL);
        void *all[] = { x, weights, shared, ids, want, y, y16, y2, copy, xa };
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
        release_bank(b);
        td_dev_destroy(dev);
        td_dev_destroy(many);
        td_dev_destroy(two);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(swiglu_clamps),
        cmocka_unit_test(router_picks_as_in_double),
        cmocka_unit_test(router_ties_and_nan),
        cmocka_unit_test(experts_follow_the_formulas),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
