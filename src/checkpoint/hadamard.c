/* The first three stages (strides 1, 2, 4) work inside vectors of eight, the others between vectors. Inside a vector
 * the lower value of a pair becomes other + own and the upper one other - own: negating own first makes both one
 * addition, and a negation is exact. */
#include "checkpoint/hadamard.h"

#include <string.h>

typedef float f8 __attribute__((vector_size(32)));

#define VECTORS (TD_HADAMARD_N / 8)

static f8 within(f8 v)
{
    const f8 sign1 = { 1, -1, 1, -1, 1, -1, 1, -1 };
    const f8 sign2 = { 1, 1, -1, -1, 1, 1, -1, -1 };
    const f8 sign4 = { 1, 1, 1, 1, -1, -1, -1, -1 };
    v = __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6) + v * sign1;
    v = __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5) + v * sign2;
    return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3) + v * sign4;
}

void td_hadamard128(float x[TD_HADAMARD_N], float scale)
{
    f8 v[VECTORS];
    memcpy(v, x, sizeof v);
    for (int i = 0; i < VECTORS; i++) v[i] = within(v[i]);
    for (int stride = 1; stride < VECTORS; stride *= 2) {
        for (int i = 0; i < VECTORS; i++) {
            if (i & stride) continue;
            f8 a = v[i], b = v[i + stride];
            v[i] = a + b;
            v[i + stride] = a - b;
        }
    }
    for (int i = 0; i < VECTORS; i++) v[i] *= scale;
    memcpy(x, v, sizeof v);
}

void td_hadamard128_blocks(float *x, size_t n, float scale)
{
    for (size_t i = 0; i + TD_HADAMARD_N <= n; i += TD_HADAMARD_N) td_hadamard128(x + i, scale);
}

void td_hadamard128_down(float *x, size_t stride, size_t count, float scale)
{
    for (int step = 1; step < TD_HADAMARD_N; step *= 2) {
        for (int i = 0; i < TD_HADAMARD_N; i++) {
            if (i & step) continue;
            float *lower = x + (size_t)i * stride, *upper = lower + (size_t)step * stride;
            for (size_t c = 0; c < count; c++) {
                float a = lower[c], b = upper[c];
                lower[c] = a + b;
                upper[c] = a - b;
            }
        }
    }
    for (int i = 0; i < TD_HADAMARD_N; i++)
        for (size_t c = 0; c < count; c++) x[(size_t)i * stride + c] *= scale;
}

void td_hadamard128_down_f64(double *x, size_t stride, size_t count, double scale)
{
    for (int step = 1; step < TD_HADAMARD_N; step *= 2) {
        for (int i = 0; i < TD_HADAMARD_N; i++) {
            if (i & step) continue;
            double *lower = x + (size_t)i * stride, *upper = lower + (size_t)step * stride;
            for (size_t c = 0; c < count; c++) {
                double a = lower[c], b = upper[c];
                lower[c] = a + b;
                upper[c] = a - b;
            }
        }
    }
    for (int i = 0; i < TD_HADAMARD_N; i++)
        for (size_t c = 0; c < count; c++) x[(size_t)i * stride + c] *= scale;
}
