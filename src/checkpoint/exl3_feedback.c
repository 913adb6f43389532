/* The Hessian of the regularised weight. A weight W = diag(suh) Hn q Hn diag(svh) changes by D = diag(suh) Hn E (..)
 * when q changes by E, so tr(D^T H D) = tr(E^T R E) with R = Hn diag(suh) H diag(suh) Hn: the row scales belong into
 * it. (The format's authors leave the magnitudes of suh out and keep its signs; with them the proxy error is the real
 * one.) */
#include "checkpoint/exl3_feedback.h"

#include "checkpoint/hadamard.h"

#include <math.h>
#include <stdlib.h>

#define BLOCK   16
#define DAMPING 0.025 /* of the mean diagonal, added to it; and twice as much for each failed factorisation */
#define TRIES   10

typedef double d4 __attribute__((vector_size(32)));

/* sum a[i] b[i] over four lanes of four, in one fixed order. */
static double dot(const double *a, const double *b, size_t n)
{
    d4 sum[4] = { { 0 }, { 0 }, { 0 }, { 0 } };
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        for (size_t v = 0; v < 4; v++) {
            const double *p = a + i + 4 * v, *q = b + i + 4 * v;
            sum[v] += (d4){ p[0], p[1], p[2], p[3] } * (d4){ q[0], q[1], q[2], q[3] };
        }
    }
    d4 s = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    double total = (s[0] + s[1]) + (s[2] + s[3]);
    for (; i < n; i++) total += a[i] * b[i];
    return total;
}

/* r = diag(suh) (h / mean + DAMPING I) diag(suh), both halves; false when h says nothing. */
static bool scaled_hessian(size_t k, const float *h, const float *suh, double *r)
{
    double mean = 0;
    for (size_t i = 0; i < k; i++) mean += (double)h[i * k + i];
    mean /= (double)k;
    if (!isfinite(mean) || mean < 1e-20) return false;
    for (size_t i = 0; i < k; i++) {
        for (size_t j = 0; j <= i; j++) {
            double x = (double)h[i * k + j] / mean + (i == j ? DAMPING : 0.0);
            if (!isfinite(x)) return false;
            r[i * k + j] = r[j * k + i] = x * (double)suh[i] * (double)suh[j];
        }
    }
    return true;
}

/* r <- Hn r Hn for a symmetric r: twice down the columns, turned in between. */
static void rotate_both(size_t k, double *r)
{
    const double scale = 0.08838834764831845;
    for (int side = 0; side < 2; side++) {
        for (size_t b = 0; b < k; b += TD_HADAMARD_N) td_hadamard128_down_f64(r + b * k, k, k, scale);
        for (size_t i = 0; i < k; i++) {
            for (size_t j = 0; j < i; j++) {
                double x = r[i * k + j];
                r[i * k + j] = r[j * k + i];
                r[j * k + i] = x;
            }
        }
    }
}

/* C of r + extra I = C C^T into the lower half of r (with the diagonal); the upper half keeps r, diagonal holds r's. */
static bool factor(size_t k, double *r, const double *diagonal, double extra)
{
    for (size_t i = 0; i < k; i++) {
        double *row = r + i * k;
        for (size_t j = 0; j < i; j++) row[j] = (r[j * k + i] - dot(row, r + j * k, j)) / r[j * k + j];
        double pivot = diagonal[i] + extra - dot(row, row, i);
        if (!(pivot > 0.0) || !isfinite(pivot)) return false;
        row[i] = sqrt(pivot);
    }
    return true;
}

/* Rows of C times the inverses of its diagonal blocks, from the right: x C_ii = c, from the last column to the first.
 */
static void divide_blocks(size_t k, const double *c, float *feedback)
{
    for (size_t j = 0; j < k; j++) {
        for (size_t i = 0; i < k; i += BLOCK) {
            double x[BLOCK];
            for (size_t a = BLOCK; a-- > 0;) {
                x[a] = j >= i + BLOCK ? c[j * k + i + a] : 0.0;
                for (size_t b = a + 1; b < BLOCK; b++) x[a] -= x[b] * c[(i + b) * k + i + a];
                x[a] /= c[(i + a) * k + i + a];
            }
            for (size_t a = 0; a < BLOCK; a++) feedback[j * k + i + a] = (float)x[a];
        }
    }
}

td_status td_exl3_feedback(int k_inputs, const float *hessian, const float *suh, float *feedback, bool *used,
                           td_error *err)
{
    size_t k = (size_t)k_inputs;
    double *r = malloc(k * k * sizeof *r), *diagonal = malloc(k * sizeof *diagonal);
    if (!r || !diagonal) {
        free(r);
        free(diagonal);
        return td_fail(err, TD_ENOMEM, "exl3: no memory for a Hessian of %d x %d", k_inputs, k_inputs);
    }
    bool factored = false;
    if (scaled_hessian(k, hessian, suh, r)) {
        rotate_both(k, r);
        double mean = 0;
        for (size_t i = 0; i < k; i++) mean += diagonal[i] = r[i * k + i];
        mean /= (double)k;
        for (int i = 0; i < TRIES && !factored; i++) factored = factor(k, r, diagonal, 2 * DAMPING * mean * i);
    }
    if (factored) divide_blocks(k, r, feedback);
    *used = factored;
    free(r);
    free(diagonal);
    return TD_OK;
}
