#include "ops_support.h"

void *op_alloc(size_t n_bytes)
{
    size_t padded = (n_bytes + 127) / 64 * 64;
    void *p = aligned_alloc(64, padded);
    assert_non_null(p);
    memset(p, 0, padded);
    return p;
}

void op_fill(uint64_t *seed, float *x, size_t n, float scale)
{
    for (size_t i = 0; i < n; i++) x[i] = td_bf16_f32(td_f32_bf16(scale * op_uniform(seed)));
}

float *op_random(uint64_t *seed, size_t n, float scale)
{
    float *x = op_alloc(n * sizeof *x);
    op_fill(seed, x, n, scale);
    return x;
}

td_bf16 *op_bf16(const float *x, size_t n)
{
    td_bf16 *y = op_alloc(n * sizeof *y);
    for (size_t i = 0; i < n; i++) y[i] = td_f32_bf16(x[i]);
    return y;
}

td_dev *op_device(const td_dev_limits *limits, int n_threads, bool exact)
{
    td_dev *dev = NULL;
    td_error err;
    if (td_dev_create_cpu(limits, n_threads, exact, &dev, &err) != TD_OK) fail_msg("%s", err.text);
    return dev;
}

td_act *op_act(const td_dev *dev, size_t n)
{
    return op_alloc(td_act_bytes(dev, n));
}

td_act *op_act_of(const td_dev *dev, const float *x, size_t n)
{
    td_act *y = op_act(dev, n);
    td_act_from_f32(dev, y, x, n);
    return y;
}

float *op_floats(const td_dev *dev, const td_act *x, size_t n)
{
    float *y = op_alloc(n * sizeof *y);
    td_act_to_f32(dev, y, x, n);
    return y;
}

void op_expect_near(const char *what, const float *got, const double *want, size_t n, double bound)
{
    double error = 0.0, size = 0.0;
    for (size_t i = 0; i < n; i++) {
        error += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
    }
    double relative = sqrt(error / size);
    if (!(relative <= bound)) fail_msg("%s: relative error %.3g, allowed %.3g", what, relative, bound);
}

void op_expect_bits(const char *what, const void *got, const void *want, size_t n_bytes)
{
    const unsigned char *a = got, *b = want;
    for (size_t i = 0; i < n_bytes; i++)
        if (a[i] != b[i]) fail_msg("%s: byte %zu of %zu differs: %02x, expected %02x", what, i, n_bytes, a[i], b[i]);
}
