/* Embedding, hyper-connections, norms, mean and residual against double precision, and the self-checks of the mixing.
 */
#include "ops_support.h"

enum { DIM = 64, ROWS = 7, N = 4 * DIM, MIX = 24 };
static const td_dev_limits limits = { .rows = ROWS, .dim = DIM };
static const double eps = 1e-5, hc_eps = 1e-6;

typedef struct site {
    float *partials, *fn, *norm, *x, *post, *comb;
    float base[MIX], scale[3];
} site;

static site make_site(uint64_t seed)
{
    site s = { .partials = op_random(&seed, TD_SHARDS * ROWS * DIM, 1.0f),
               .fn = op_random(&seed, MIX * N, 0.1f),
               .norm = op_random(&seed, DIM, 2.0f),
               .x = op_random(&seed, ROWS * N, 1.0f),
               .post = op_random(&seed, ROWS * 4, 1.0f),
               .comb = op_random(&seed, ROWS * 16, 0.5f) };
    op_fill(&seed, s.base, MIX, 1.0f);
    op_fill(&seed, s.scale, 3, 1.0f);
    return s;
}

static void release(site *s)
{
    free(s->partials);
    free(s->fn);
    free(s->norm);
    free(s->x);
    free(s->post);
    free(s->comb);
}

typedef struct result {
    float *x, *n, *post, *comb;
} result;

static void release_result(result *r)
{
    free(r->x);
    free(r->n);
    free(r->post);
    free(r->comb);
}

/* Rows first .. of the site, alone in a call. */
static result run(td_dev *dev, const site *s, int first, int rows)
{
    float *partials = op_alloc((size_t)rows * TD_SHARDS * DIM * sizeof *partials);
    for (int h = 0; h < TD_SHARDS; h++)
        memcpy(partials + h * rows * DIM, s->partials + (h * ROWS + first) * DIM,
               (size_t)rows * DIM * sizeof *partials);
    result r = { .post = op_alloc((size_t)rows * 4 * sizeof(float)),
                 .comb = op_alloc((size_t)rows * 16 * sizeof(float)) };
    memcpy(r.post, s->post + first * 4, (size_t)rows * 4 * sizeof(float));
    memcpy(r.comb, s->comb + first * 16, (size_t)rows * 16 * sizeof(float));
    td_act *x = op_act_of(dev, s->x + first * N, (size_t)rows * N), *n = op_act(dev, (size_t)rows * DIM);
    td_hyper_args a = { .n_rows = rows,
                        .dim = DIM,
                        .rms_eps = (float)eps,
                        .hc_eps = (float)hc_eps,
                        .iters = 20,
                        .partials = partials,
                        .fn = s->fn,
                        .base = s->base,
                        .scale = s->scale,
                        .norm = s->norm,
                        .x = x,
                        .post = r.post,
                        .comb = r.comb,
                        .n = n };
    assert_int_equal(td_cpu_hyper(dev, &a), TD_OK);
    r.x = op_floats(dev, x, (size_t)rows * N);
    r.n = op_floats(dev, n, (size_t)rows * DIM);
    free(x);
    free(n);
    free(partials);
    return r;
}

static void divide(double c[4][4], bool columns)
{
    for (int i = 0; i < 4; i++) {
        double sum = hc_eps;
        for (int j = 0; j < 4; j++) sum += columns ? c[j][i] : c[i][j];
        for (int j = 0; j < 4; j++) *(columns ? &c[j][i] : &c[i][j]) /= sum;
    }
}

/* docs/model.md "Hyper-connections", one row */
static void reference(const site *s, int row, double *x, double *n, double *post, double *comb)
{
    double m[MIX], ss = 0.0, collapsed[DIM], mean = 0.0;
    for (int d = 0; d < DIM; d++) {
        double b = (double)s->partials[row * DIM + d] + s->partials[(ROWS + row) * DIM + d];
        for (int t = 0; t < 4; t++) {
            x[t * DIM + d] = s->post[row * 4 + t] * b;
            for (int i = 0; i < 4; i++)
                x[t * DIM + d] += (double)s->comb[row * 16 + i * 4 + t] * s->x[row * N + i * DIM + d];
        }
    }
    for (int c = 0; c < N; c++) ss += x[c] * x[c];
    for (int k = 0; k < MIX; k++) {
        m[k] = 0.0;
        for (int c = 0; c < N; c++) m[k] += s->fn[k * N + c] * x[c];
        m[k] = m[k] / sqrt(ss / N + eps) * s->scale[k < 4 ? 0 : k < 8 ? 1 : 2] + s->base[k];
    }
    double c[4][4];
    for (int i = 0; i < 4; i++) {
        double sum = 0.0;
        for (int j = 0; j < 4; j++) sum += exp(m[8 + 4 * i + j]);
        for (int j = 0; j < 4; j++) c[i][j] = exp(m[8 + 4 * i + j]) / sum + hc_eps;
    }
    divide(c, true);
    for (int t = 1; t < 20; t++) {
        divide(c, false);
        divide(c, true);
    }
    memcpy(comb, c, sizeof c);
    for (int i = 0; i < 4; i++) post[i] = 2.0 * op_sigmoid(m[4 + i]);
    for (int d = 0; d < DIM; d++) {
        collapsed[d] = 0.0;
        for (int i = 0; i < 4; i++) collapsed[d] += (op_sigmoid(m[i]) + hc_eps) * x[i * DIM + d];
        mean += collapsed[d] * collapsed[d] / DIM;
    }
    for (int d = 0; d < DIM; d++) n[d] = s->norm[d] * collapsed[d] / sqrt(mean + eps);
}

static void leave_and_enter_follow_the_formulas(void **state)
{
    (void)state;
    site s = make_site(21);
    double x[ROWS * N], n[ROWS * DIM], post[ROWS * 4], comb[ROWS * 16];
    for (int r = 0; r < ROWS; r++) reference(&s, r, x + r * N, n + r * DIM, post + r * 4, comb + r * 16);
    for (int exact = 0; exact < 2;
         exact++) { /* engine: bf16 keeps 8 bits, 2^-9 of each value at most, several stages */
        double bound = exact ? 3e-6 : 5e-3;
        td_dev *dev = op_device(&limits, 1, exact);
        result got = run(dev, &s, 0, ROWS);
        op_expect_near("x", got.x, x, ROWS * N, bound);
        op_expect_near("post", got.post, post, ROWS * 4, bound);
        op_expect_near("comb", got.comb, comb, ROWS * 16, bound);
        op_expect_near("n", got.n, n, ROWS * DIM, bound);
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < 4; i++) {
                float column = 0.0f, row = 0.0f;
                for (int j = 0; j < 4; j++) column += got.comb[r * 16 + j * 4 + i], row += got.comb[r * 16 + i * 4 + j];
                assert_true(fabsf(column - 1.0f) < 1e-5f && fabsf(row - 1.0f) < 1e-3f);
            }
        release_result(&got);
        td_dev_destroy(dev);
    }
    release(&s);
}

static void rows_and_threads_change_nothing(void **state)
{
    (void)state;
    site s = make_site(22);
    td_dev *dev = op_device(&limits, 1, false), *many = op_device(&limits, 16, false);
    result all = run(dev, &s, 0, ROWS), again = run(many, &s, 0, ROWS);
    op_expect_bits("threads, x", again.x, all.x, ROWS * N * sizeof(float));
    op_expect_bits("threads, n", again.n, all.n, ROWS * DIM * sizeof(float));
    for (int r = 0; r < ROWS; r++) {
        result one = run(dev, &s, r, 1);
        op_expect_bits("row, x", one.x, all.x + r * N, N * sizeof(float));
        op_expect_bits("row, n", one.n, all.n + r * DIM, DIM * sizeof(float));
        op_expect_bits("row, comb", one.comb, all.comb + r * 16, 16 * sizeof(float));
        release_result(&one);
    }
    release_result(&all);
    release_result(&again);
    td_dev_destroy(dev);
    td_dev_destroy(many);
    release(&s);
}

static void identity_leaves_x_alone(void **state)
{
    (void)state;
    site s = make_site(23);
    td_dev *dev = op_device(&limits, 1, false);
    td_act *x = op_act_of(dev, s.x, ROWS * N);
    memset(s.post, 0, ROWS * 4 * sizeof(float));
    for (int i = 0; i < ROWS * 16; i++) s.comb[i] = i % 16 % 5 == 0 ? 1.0f : 0.0f;
    td_hyper_args a = { .n_rows = ROWS, .dim = DIM, .partials = s.partials, .x = x, .post = s.post, .comb = s.comb };
    assert_int_equal(td_cpu_hyper(dev, &a), TD_OK); /* fn NULL: only leave */
    float *after = op_floats(dev, x, ROWS * N);
    op_expect_bits("x", after, s.x, ROWS * N * sizeof(float));
    free(after);
    free(x);
    td_dev_destroy(dev);
    release(&s);
}

static void embedding_copies_rows(void **state)
{
    (void)state;
    uint64_t seed = 31;
    float *table = op_random(&seed, 5 * DIM, 1.0f), *media = op_random(&seed, 2 * DIM, 1.0f);
    td_bf16 *t16 = op_bf16(table, 5 * DIM), *m16 = op_bf16(media, 2 * DIM);
    const int32_t ids[5] = { 4, -1, 5, 2, 0 }, media_row[5] = { -1, -1, -1, 1, -1 };
    td_window window = { .n_rows = 5, .ids = ids };
    for (int exact = 0; exact < 2; exact++) {
        td_dev *dev = op_device(&limits, 1, exact);
        td_act *x = op_act(dev, 5 * N);
        td_embed_args a = { .window = &window,
                            .dim = DIM,
                            .vocab = 5,
                            .table = t16,
                            .media_row = media_row,
                            .media = m16,
                            .n_streams = 4,
                            .x = x };
        assert_int_equal(td_cpu_embed(dev, &a), TD_OK);
        float *got = op_floats(dev, x, 5 * N), zero[DIM] = { 0 };
        const float *want[5] = { table + 4 * DIM, zero, zero, media + DIM, table };
        for (int r = 0; r < 5; r++)
            for (int s = 0; s < 4; s++) op_expect_bits("row", got + (r * 4 + s) * DIM, want[r], DIM * sizeof(float));
        free(got);
        free(x);
        td_dev_destroy(dev);
    }
    free(table);
    free(media);
    free(t16);
    free(m16);
}

static void norm_mean_and_residual(void **state)
{
    (void)state;
    enum { WIDE = 1000 }; /* longer than the pieces the code works in, and not a multiple of 16 lanes */
    uint64_t seed = 41;
    float *x = op_random(&seed, 3 * N, 1.0f), *wide = op_random(&seed, 2 * WIDE, 3.0f),
          *w = op_random(&seed, WIDE, 2.0f);
    float *partials = op_random(&seed, 2 * 3 * DIM, 1.0f);
    const int32_t rows[2] = { 1, 0 };
    for (int exact = 0; exact < 2; exact++) {
        double bound = exact ? 1e-6 : 5e-3, want[2 * WIDE];
        td_dev *dev = op_device(&limits, 1, exact);
        td_act *xa = op_act_of(dev, wide, 2 * WIDE), *ya = op_act(dev, 2 * WIDE);
        td_rmsnorm_args norm = { .n_rows = 2,
                                 .dim = WIDE,
                                 .eps = 1e-5f,
                                 .row = rows,
                                 .x = xa,
                                 .x_stride = WIDE,
                                 .w = w,
                                 .y = ya,
                                 .y_stride = WIDE };
        assert_int_equal(td_cpu_rmsnorm(dev, &norm), TD_OK);
        float *got = op_floats(dev, ya, 2 * WIDE);
        for (int r = 0; r < 2; r++) {
            const float *row = wide + (1 - r) * WIDE;
            double ss = 0.0;
            for (int i = 0; i < WIDE; i++) ss += (double)row[i] * row[i];
            for (int i = 0; i < WIDE; i++) want[r * WIDE + i] = w[i] * row[i] / sqrt(ss / WIDE + 1e-5);
        }
        op_expect_near("rmsnorm", got, want, 2 * WIDE, bound);
        free(got);
        free(xa);
        free(ya);
        td_act *streams = op_act_of(dev, x, 3 * N), *h = op_act(dev, 2 * DIM);
        td_stream_mean_args mean = { .n_rows = 2, .dim = DIM, .row = rows, .x = streams, .h = h, .h_stride = DIM };
        assert_int_equal(td_cpu_stream_mean(dev, &mean), TD_OK);
        got = op_floats(dev, h, 2 * DIM);
        for (int r = 0; r < 2; r++)
            for (int d = 0; d < DIM; d++) {
                const float *row = x + rows[r] * N + d;
                want[r * DIM + d] = ((double)row[0] + row[DIM] + row[2 * DIM] + row[3 * DIM]) / 4.0;
            }
        op_expect_near("mean", got, want, 2 * DIM, bound);
        free(got);
        free(h);
        td_residual_args residual = { .n_rows = 3, .dim = DIM, .partials = partials, .x = streams };
        assert_int_equal(td_cpu_residual(dev, &residual), TD_OK);
        got = op_floats(dev, streams, 3 * DIM);
        for (int i = 0; i < 3 * DIM; i++) want[i] = (double)x[i] + partials[i] + partials[3 * DIM + i];
        op_expect_near("residual", got, want, 3 * DIM, bound);
        free(got);
        free(streams);
        td_dev_destroy(dev);
    }
    free(x);
    free(wide);
    free(w);
    free(partials);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(leave_and_enter_follow_the_formulas),
        cmocka_unit_test(rows_and_threads_change_nothing),
        cmocka_unit_test(identity_leaves_x_alone),
        cmocka_unit_test(embedding_copies_rows),
        cmocka_unit_test(norm_mean_and_residual),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
