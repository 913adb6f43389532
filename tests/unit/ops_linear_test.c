/* y = W x in all formats: against double precision, and that a row's bits depend on nothing but the row. */
#include "ops_support.h"

static const td_dev_limits limits = { .rows = 256, .dim = 256 };
static const td_format formats[] = { TD_W_BF16, TD_W_FP8, TD_W_Q4 };

typedef struct matrix {
    int out, in;
    float *w; /* [out][in], exact in bf16 */
    td_bf16 *src;
    td_weight packed;
} matrix;

static matrix make(td_dev *dev, td_format format, int out, int in, uint64_t seed)
{
    matrix m = { .out = out, .in = in, .w = op_random(&seed, (size_t)out * (size_t)in, 0.1f) };
    m.src = op_bf16(m.w, (size_t)out * (size_t)in);
    m.packed = (td_weight){ format, out, in, op_alloc(td_cpu_weight_bytes(format, out, in)) };
    assert_int_equal(td_cpu_weight_fill(dev, &m.packed, 0, out, m.src, (size_t)in, 0), TD_OK);
    return m;
}

static void release(matrix *m)
{
    free(m->w);
    free(m->src);
    free(m->packed.data);
}

static float *multiply(td_dev *dev, const matrix *m, const td_act *x, int rows, size_t x_stride)
{
    float *y = op_alloc((size_t)rows * (size_t)m->out * sizeof *y);
    td_linear_args a = {
        .n_rows = rows, .w = &m->packed, .x = x, .x_stride = x_stride, .y_f32 = y, .y_stride = (size_t)m->out
    };
    assert_int_equal(td_cpu_linear(dev, &a), TD_OK);
    return y;
}

/* bf16: sums of 400 products, error about sqrt(400) * 2^-25. fp8: 3 bits of mantissa, 2^-4 / sqrt(3) at worst. q4:
 * uniform weights over 16 levels, (1 / 15) / sqrt(12) of the range's half = 0.033 / 0.577, a little less after the
 * search. */
static double allowed(td_format format)
{
    return format == TD_W_BF16 ? 2e-6 : format == TD_W_FP8 ? 0.035 : 0.06;
}

static void products_are_right(void **state)
{
    (void)state;
    static const int shapes[][3] = { { 1, 16, 16 },  { 1, 70, 400 },  { 2, 128, 64 },  { 3, 33, 272 },
                                     { 5, 48, 528 }, { 12, 40, 256 }, { 13, 40, 256 }, { 101, 300, 400 } };
    for (size_t f = 0; f < 3; f++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            int rows = shapes[i][0], out = shapes[i][1], in = shapes[i][2];
            uint64_t seed = 100 + i;
            td_dev *dev = op_device(&limits, 1, true);
            matrix m = make(dev, formats[f], out, in, seed);
            float *x = op_random(&seed, (size_t)rows * (size_t)in, 1.0f);
            td_act *xa = op_act_of(dev, x, (size_t)rows * (size_t)in);
            float *y = multiply(dev, &m, xa, rows, (size_t)in);
            double *want = op_alloc((size_t)rows * (size_t)out * sizeof *want);
            for (int r = 0; r < rows; r++)
                for (int o = 0; o < out; o++)
                    for (int k = 0; k < in; k++) want[r * out + o] += (double)m.w[o * in + k] * x[r * in + k];
            char what[64];
            snprintf(what, sizeof what, "format %d, %d rows, %d x %d", (int)formats[f], rows, out, in);
            op_expect_near(what, y, want, (size_t)rows * (size_t)out, allowed(formats[f]));
            free(want);
            free(y);
            free(xa);
            free(x);
            release(&m);
            td_dev_destroy(dev);
        }
}

/* The definition of bf16 products, to the bit. */
static void bf16_is_one_chain(void **state)
{
    (void)state;
    enum { ROWS = 14, OUT = 21, IN = 528 };
    uint64_t seed = 5;
    td_dev *dev = op_device(&limits, 1, true);
    matrix m = make(dev, TD_W_BF16, OUT, IN, 9);
    float *x = op_random(&seed, ROWS * IN, 1.0f), want[ROWS * OUT];
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < OUT; o++) {
            float sum = 0.0f;
            for (int k = 0; k < IN; k++) sum = fmaf(m.w[o * IN + k], x[r * IN + k], sum);
            want[r * OUT + o] = sum;
        }
    for (int rows = 1; rows <= ROWS; rows++) {
        float *y = multiply(dev, &m, (const td_act *)(const void *)x, rows, IN);
        op_expect_bits("chain", y, want, (size_t)rows * OUT * sizeof *y);
        free(y);
    }
    free(x);
    release(&m);
    td_dev_destroy(dev);
}

static void rows_threads_and_stacking_change_nothing(void **state)
{
    (void)state;
    enum { ROWS = 130, OUT = 350, IN = 512 };
    for (size_t f = 0; f < 3; f++) {
        uint64_t seed = 77;
        td_dev *dev = op_device(&limits, 1, false);
        matrix m = make(dev, formats[f], OUT, IN, 3);
        float *x = op_random(&seed, ROWS * IN, 1.0f);
        td_act *xa = op_act_of(dev, x, ROWS * IN);
        float *y = multiply(dev, &m, xa, ROWS, IN);
        static const int some[] = { 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 64, 97 };
        for (size_t i = 0; i < sizeof some / sizeof *some; i++) { /* windows of other widths */
            int first = ROWS - some[i];
            float *part = multiply(dev, &m, td_act_at(dev, xa, (size_t)first * IN), some[i], IN);
            op_expect_bits("rows alone", part, y + first * OUT, (size_t)some[i] * OUT * sizeof *y);
            free(part);
        }
        for (int threads = 2; threads <= 16; threads *= 8) {
            td_dev *other = op_device(&limits, threads, false);
            float *again = multiply(other, &m, xa, ROWS, IN);
            op_expect_bits("threads", again, y, ROWS * OUT * sizeof *y);
            free(again);
            td_dev_destroy(other);
        }
        matrix part = { .out = 96, .in = IN }; /* rows 48.. of m behind rows 0..47: a stack of two */
        part.packed = (td_weight){ formats[f], 96, IN, op_alloc(td_cpu_weight_bytes(formats[f], 96, IN)) };
        assert_int_equal(td_cpu_weight_fill(dev, &part.packed, 0, 48, m.src, IN, 0), TD_OK);
        assert_int_equal(td_cpu_weight_fill(dev, &part.packed, 48, 48, m.src + 160 * IN, IN, 0), TD_OK);
        float *stacked = multiply(dev, &part, xa, 3, IN);
        for (int r = 0; r < 3; r++) {
            op_expect_bits("stack, first", stacked + r * 96, y + r * OUT, 48 * sizeof *y);
            op_expect_bits("stack, second", stacked + r * 96 + 48, y + r * OUT + 160, 48 * sizeof *y);
        }
        free(stacked);
        free(part.packed.data);
        free(y);
        free(xa);
        free(x);
        release(&m);
        td_dev_destroy(dev);
    }
}

static void act_output_is_the_rounded_sum(void **state)
{
    (void)state;
    enum { ROWS = 3, OUT = 40, IN = 64 };
    uint64_t seed = 4;
    td_dev *dev = op_device(&limits, 1, false);
    matrix m = make(dev, TD_W_BF16, OUT, IN, 8);
    float *x = op_random(&seed, ROWS * IN, 1.0f);
    td_act *xa = op_act_of(dev, x, ROWS * IN), *ya = op_act(dev, ROWS * 50);
    float *y = multiply(dev, &m, xa, ROWS, IN);
    td_linear_args a = { .n_rows = ROWS, .w = &m.packed, .x = xa, .x_stride = IN, .y_act = ya, .y_stride = 50 };
    assert_int_equal(td_cpu_linear(dev, &a), TD_OK);
    const td_bf16 *bits = (const td_bf16 *)(const void *)ya;
    for (int r = 0; r < ROWS; r++) {
        for (int o = 0; o < OUT; o++) assert_int_equal(bits[r * 50 + o], td_f32_bf16(y[r * OUT + o]));
        for (int o = OUT; o < 50; o++) assert_int_equal(bits[r * 50 + o], 0); /* between rows: untouched */
    }
    a.n_rows = 0;
    assert_int_equal(td_cpu_linear(dev, &a), TD_OK);
    a.y_f32 = y;
    assert_int_equal(td_cpu_linear(dev, &a), TD_EINVAL);
    free(y);
    free(ya);
    free(xa);
    free(x);
    release(&m);
    td_dev_destroy(dev);
}

/* Bell-shaped weights, as real ones are: the searched range must beat the full one; and columns in0.. of a wider row
 * are taken. */
static void q4_search_beats_the_plain_range(void **state)
{
    (void)state;
    enum { OUT = 16, IN = 64, WIDE = 96, IN0 = 32 };
    uint64_t seed = 11;
    td_dev *dev = op_device(&limits, 1, true);
    float *w = op_random(&seed, OUT * WIDE, 0.1f);
    for (int i = 0; i < OUT * WIDE; i++)
        for (int t = 0; t < 7; t++) w[i] = td_bf16_f32(td_f32_bf16(w[i] + 0.1f * op_uniform(&seed)));
    td_bf16 *src = op_bf16(w, OUT * WIDE);
    td_weight packed = { TD_W_Q4, OUT, IN, op_alloc(td_cpu_weight_bytes(TD_W_Q4, OUT, IN)) };
    assert_int_equal(td_cpu_weight_fill(dev, &packed, 0, OUT, src, WIDE, IN0), TD_OK);
    float x[IN * IN] = { 0 }, back[IN * OUT];
    for (int i = 0; i < IN; i++) x[i * IN + i] = 1.0f; /* unit rows give the columns of W */
    td_linear_args a = {
        .n_rows = IN, .w = &packed, .x = (const td_act *)(const void *)x, .x_stride = IN, .y_f32 = back, .y_stride = OUT
    };
    assert_int_equal(td_cpu_linear(dev, &a), TD_OK);
    double searched = 0.0, plain = 0.0;
    for (int o = 0; o < OUT; o++) {
        float lo = 1.0f, hi = -1.0f;
        for (int i = 0; i < IN; i++) {
            float v = w[o * WIDE + IN0 + i];
            lo = v < lo ? v : lo;
            hi = v > hi ? v : hi;
        }
        for (int i = 0; i < IN; i++) {
            double v = w[o * WIDE + IN0 + i], step = (hi - lo) / 15.0, level = lo + step * floor((v - lo) / step + 0.5);
            plain += (level - v) * (level - v);
            searched += (back[i * OUT + o] - v) * (back[i * OUT + o] - v);
        }
    }
    if (!(searched < 0.9 * plain)) fail_msg("squared error %g, of the plain range %g", searched, plain);
    free(packed.data);
    free(src);
    free(w);
    td_dev_destroy(dev);
}

static void odd_sizes_are_refused(void **state)
{
    (void)state;
    td_dev *dev = op_device(&limits, 1, true);
    td_bf16 src[64] = { 0 };
    td_weight w = { TD_W_BF16, 20, 16, op_alloc(td_cpu_weight_bytes(TD_W_BF16, 20, 16)) };
    assert_int_equal(td_cpu_weight_fill(dev, &w, 8, 1, src, 16, 0), TD_EINVAL);
    assert_int_equal(td_cpu_weight_fill(dev, &w, 16, 5, src, 16, 0), TD_EINVAL);
    assert_int_equal(td_cpu_weight_fill(dev, &w, 16, 4, src, 16, 0), TD_OK);
    w.in = 20;
    assert_int_equal(td_cpu_weight_fill(dev, &w, 0, 1, src, 16, 0), TD_EINVAL);
    free(w.data);
    td_dev_destroy(dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products_are_right),
        cmocka_unit_test(bf16_is_one_chain),
        cmocka_unit_test(rows_threads_and_stacking_change_nothing),
        cmocka_unit_test(act_output_is_the_rounded_sum),
        cmocka_unit_test(q4_search_beats_the_plain_range),
        cmocka_unit_test(odd_sizes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
