/* Quantising dense weights, the same bits on the CPU and on a GPU: docs/model.md "Quantised dense weights". */
#ifndef TD_OPS_QUANTISE_H
#define TD_OPS_QUANTISE_H

#include "base/num.h"

#include <math.h>

typedef struct td_affine {
    td_bf16 scale, offset;
    float error; /* sum of squares over the group */
} td_affine;

TD_HD static inline int td_affine_level(float w, float scale, float offset)
{
    float q = rintf((w - offset) / scale);
    return q > 0.0f ? q < 15.0f ? (int)q : 15 : 0; /* NaN: 0 */
}

TD_HD static inline td_affine td_affine_of(const float *w, int n, float s, float lo)
{
    td_affine a = { td_f32_bf16(s > 1e-8f ? s : 1e-8f), td_f32_bf16(lo), 0.0f };
    float scale = td_bf16_f32(a.scale), offset = td_bf16_f32(a.offset);
    for (int i = 0; i < n; i++) {
        float d = fmaf(scale, (float)td_affine_level(w[i], scale, offset), offset) - w[i];
        a.error = fmaf(d, d, a.error);
    }
    return a;
}

/* The line s q + b of least squared error through the values as a quantises them now. */
TD_HD static inline td_affine td_affine_refit(const float *w, int n, td_affine a)
{
    double q1 = 0.0, q2 = 0.0, w1 = 0.0, qw = 0.0;
    for (int i = 0; i < n; i++) {
        double q = td_affine_level(w[i], td_bf16_f32(a.scale), td_bf16_f32(a.offset));
        q1 += q;
        q2 += q * q;
        w1 += w[i];
        qw += q * w[i];
    }
    double spread = q2 * n - q1 * q1; /* 0 when all values have the same level */
    if (!(spread > 0.0)) return a;
    double s = (qw * n - q1 * w1) / spread;
    return td_affine_of(w, n, (float)s, (float)((w1 - s * q1) / n));
}

/* Scale and offset of least squared error, found by starting from 36 ranges (either end of the group's range moved
 * inwards in steps of 4 %) and fitting the line through the levels a few times from the best. Outliers are clamped when
 * the others gain more. The full range is tried first: the result is never worse. */
TD_HD static inline td_affine td_affine_search(const float *w, int n)
{
    enum { STEPS = 6, FITS = 4 };
    float lo = w[0], hi = w[0];
    for (int i = 1; i < n; i++) {
        lo = w[i] < lo ? w[i] : lo;
        hi = w[i] > hi ? w[i] : hi;
    }
    td_affine best = td_affine_of(w, n, (hi - lo) / 15.0f, lo);
    for (int t = 1; t < STEPS * STEPS; t++) {
        float step = (hi - lo) * 0.04f, from = lo + step * (float)(t / STEPS), to = hi - step * (float)(t % STEPS);
        td_affine a = td_affine_of(w, n, (to - from) / 15.0f, from);
        if (a.error < best.error) best = a;
    }
    for (int t = 0; t < FITS; t++) {
        td_affine a = td_affine_refit(w, n, best);
        if (!(a.error < best.error)) break;
        best = a;
    }
    return best;
}

/* Scale of an fp8 row whose largest magnitude is max: the largest value becomes 448. */
TD_HD static inline float td_fp8_row_scale(float max)
{
    float scale = max > 0.0f ? max / 448.0f : 1.0f;
    return scale < 7.52316385e-37f ? 7.52316385e-37f : scale; /* 2^-120: a row of subnormals keeps 1 / scale finite */
}

#endif
