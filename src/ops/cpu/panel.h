/* The inner product kernel of the CPU: rows of x times panels of 16 outputs, every output one chain of fmaf over
 * ascending k. Lanes run over outputs, so no sum is ever split: an output's bits do not depend on how many rows or
 * panels share the registers, nor on where k is cut into blocks (the running sums are stored and loaded exactly). */
#ifndef TD_OPS_CPU_PANEL_H
#define TD_OPS_CPU_PANEL_H

#include "ops/simd.h"

enum { TD_PANEL = 16, TD_TILE_ROWS = 6 }; /* 6 rows x 16 outputs: 12 of AVX2's 16 registers */

/* acc[r][p][16] += sum_k x[r][k] * w[p][k][16]   r < rows, p < panels, both constants after inlining.
 * Strides in floats: ldx and lda between rows, ldw between k, ldp and ldc between panels. */
TD_INLINE void td_tile_fixed(int rows, int panels, const float *x, size_t ldx, const float *w, size_t ldw, size_t ldp,
                             int k, float *acc, size_t lda, size_t ldc)
{
    td_v16 sum[TD_TILE_ROWS];
    TD_UNROLL
    for (int t = 0; t < rows * panels; t++)
        sum[t] = td_v16_load(acc + (size_t)(t / panels) * lda + (size_t)(t % panels) * ldc);
    for (int i = 0; i < k; i++) {
        td_v16 wi[TD_TILE_ROWS];
        TD_UNROLL
        for (int p = 0; p < panels; p++) wi[p] = td_v16_load(w + (size_t)i * ldw + (size_t)p * ldp);
        TD_UNROLL
        for (int r = 0; r < rows; r++) {
            td_v16 xi = td_v16_splat(x[(size_t)r * ldx + (size_t)i]);
            TD_UNROLL
            for (int p = 0; p < panels; p++) sum[r * panels + p] = td_v16_fma(xi, wi[p], sum[r * panels + p]);
        }
    }
    TD_UNROLL
    for (int t = 0; t < rows * panels; t++)
        td_v16_store(acc + (size_t)(t / panels) * lda + (size_t)(t % panels) * ldc, sum[t]);
}

/* The same for any number of rows and one panel. */
void td_tile_rows(int rows, const float *x, size_t ldx, const float *w, size_t ldw, int k, float *acc, size_t lda);

/* acc[r][n] += sum_k x[r][k] * w[k][n], n a multiple of 16: columns in panels beside each other. */
void td_tile_matrix(int rows, const float *x, size_t ldx, const float *w, size_t ldw, int k, int n, float *acc,
                    size_t lda);

/* y[r][16 p + o] = sum_i w[p][i][o] * x[r][i] for panels of packed weights, panel_bytes apart, and fp32 rows; e4m3
 * codes count as value * 2^-8 (ops/simd.h). unpacked: scratch of TD_K_BLOCK * 16 floats. */
typedef enum td_panel_kind { TD_PANEL_BF16, TD_PANEL_E4M3 } td_panel_kind;
enum { TD_K_BLOCK = 256, TD_FEW_ROWS = 12 };
void td_panels(td_panel_kind kind, int rows, const float *x, size_t ldx, const uint8_t *w, size_t panel_bytes, int in,
               int n_panels, float *y, size_t ldy, float *unpacked);

/* Weights of input i of a panel. */
TD_INLINE td_v16 td_panel_load(td_panel_kind kind, const uint8_t *panel, size_t i)
{
    return kind == TD_PANEL_E4M3 ? td_v16_load_e4m3(panel + i * TD_PANEL)
                                 : td_v16_load_panel_bf16((const td_bf16 *)(const void *)panel + i * TD_PANEL);
}

/* Element of a bf16 panel where output o (0..15) of input i sits. */
static inline size_t td_panel_index(int i, int o)
{
    return (size_t)i * TD_PANEL + (size_t)(2 * (o & 7) + (o >> 3));
}

#endif
