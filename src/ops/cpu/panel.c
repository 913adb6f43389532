/* Products with panels, for any number of rows: which register tile is used is decided here and changes no bit. */
#include "ops/cpu/panel.h"

void td_tile_rows(int rows, const float *x, size_t ldx, const float *w, size_t ldw, int k, float *acc, size_t lda)
{
    int r = 0;
    for (; r + 6 <= rows; r += 6)
        td_tile_fixed(6, 1, x + (size_t)r * ldx, ldx, w, ldw, 0, k, acc + (size_t)r * lda, lda, 0);
    x += (size_t)r * ldx;
    acc += (size_t)r * lda;
    switch (rows - r) {
    case 5: td_tile_fixed(5, 1, x, ldx, w, ldw, 0, k, acc, lda, 0); break;
    case 4: td_tile_fixed(4, 1, x, ldx, w, ldw, 0, k, acc, lda, 0); break;
    case 3: td_tile_fixed(3, 1, x, ldx, w, ldw, 0, k, acc, lda, 0); break;
    case 2: td_tile_fixed(2, 1, x, ldx, w, ldw, 0, k, acc, lda, 0); break;
    case 1: td_tile_fixed(1, 1, x, ldx, w, ldw, 0, k, acc, lda, 0); break;
    default: break;
    }
}

/* One to three rows leave chains idle when only one panel is in flight: several are taken at once. */
static int few_row_columns(int rows, const float *x, size_t ldx, const float *w, size_t ldw, int k, int n, float *acc,
                           size_t lda)
{
    int c = 0;
    if (rows == 1)
        for (; c + 64 <= n; c += 64) td_tile_fixed(1, 4, x, ldx, w + c, ldw, 16, k, acc + c, lda, 16);
    if (rows == 2)
        for (; c + 48 <= n; c += 48) td_tile_fixed(2, 3, x, ldx, w + c, ldw, 16, k, acc + c, lda, 16);
    if (rows == 3)
        for (; c + 32 <= n; c += 32) td_tile_fixed(3, 2, x, ldx, w + c, ldw, 16, k, acc + c, lda, 16);
    return c;
}

void td_tile_matrix(int rows, const float *x, size_t ldx, const float *w, size_t ldw, int k, int n, float *acc,
                    size_t lda)
{
    int c = few_row_columns(rows, x, ldx, w, ldw, k, n, acc, lda);
    for (; c < n; c += TD_PANEL) td_tile_rows(rows, x, ldx, w + c, ldw, k, acc + c, lda);
}

/* Few rows: weights go from their packed form straight into the fma; several panels at once hide its latency. */
TD_INLINE void few_bf16(int rows, int panels, const float *x, size_t ldx, const td_bf16 *w, int in, float *y,
                        size_t ldy)
{
    td_v16 sum[TD_TILE_ROWS];
    TD_UNROLL
    for (int t = 0; t < rows * panels; t++) sum[t] = td_v16_splat(0.0f);
    for (int i = 0; i < in; i++) {
        td_v16 wi[TD_TILE_ROWS];
        TD_UNROLL
        for (int p = 0; p < panels; p++)
            wi[p] = td_v16_load_panel_bf16(w + ((size_t)p * (size_t)in + (size_t)i) * TD_PANEL);
        TD_UNROLL
        for (int r = 0; r < rows; r++) {
            td_v16 xi = td_v16_splat(x[(size_t)r * ldx + (size_t)i]);
            TD_UNROLL
            for (int p = 0; p < panels; p++) sum[r * panels + p] = td_v16_fma(xi, wi[p], sum[r * panels + p]);
        }
    }
    TD_UNROLL
    for (int t = 0; t < rows * panels; t++)
        td_v16_store(y + (size_t)(t / panels) * ldy + (size_t)(t % panels) * TD_PANEL, sum[t]);
}

static int few_rows_at_once(int rows, const float *x, size_t ldx, const td_bf16 *w, int in, int panels, float *y,
                            size_t ldy)
{
    if (rows == 1 && panels >= 4) return few_bf16(1, 4, x, ldx, w, in, y, ldy), 4;
    if (rows == 1 && panels >= 2) return few_bf16(1, 2, x, ldx, w, in, y, ldy), 2;
    if (rows == 2 && panels >= 3) return few_bf16(2, 3, x, ldx, w, in, y, ldy), 3;
    if (rows == 3 && panels >= 2) return few_bf16(3, 2, x, ldx, w, in, y, ldy), 2;
    switch (rows) {
    case 1: few_bf16(1, 1, x, ldx, w, in, y, ldy); break;
    case 2: few_bf16(2, 1, x, ldx, w, in, y, ldy); break;
    case 3: few_bf16(3, 1, x, ldx, w, in, y, ldy); break;
    case 4: few_bf16(4, 1, x, ldx, w, in, y, ldy); break;
    case 5: few_bf16(5, 1, x, ldx, w, in, y, ldy); break;
    default: few_bf16(6, 1, x, ldx, w, in, y, ldy); break;
    }
    return 1;
}

static void few_rows(int rows, const float *x, size_t ldx, const td_bf16 *w, int in, int n_panels, float *y, size_t ldy)
{
    for (int p = 0; p < n_panels;) {
        const td_bf16 *wp = w + (size_t)p * (size_t)in * TD_PANEL;
        int done = 1;
        for (int r = 0; r < rows; r += TD_TILE_ROWS) {
            int n = rows - r < TD_TILE_ROWS ? rows - r : TD_TILE_ROWS;
            int whole = rows <= TD_TILE_ROWS ? n_panels - p : 1; /* two tiles of rows walk the panels together */
            done =
                few_rows_at_once(n, x + (size_t)r * ldx, ldx, wp, in, whole, y + (size_t)r * ldy + p * TD_PANEL, ldy);
        }
        p += done;
    }
}

void td_panels_bf16(int rows, const float *x, size_t ldx, const td_bf16 *w, int in, int n_panels, float *y, size_t ldy,
                    float *unpacked)
{
    if (rows <= TD_FEW_ROWS) {
        few_rows(rows, x, ldx, w, in, n_panels, y, ldy);
        return;
    }
    for (int p = 0; p < n_panels; p++) {
        const td_bf16 *wp = w + (size_t)p * (size_t)in * TD_PANEL;
        for (int r = 0; r < rows; r++) td_v16_store(y + (size_t)r * ldy + p * TD_PANEL, td_v16_splat(0.0f));
        for (int k = 0; k < in; k += TD_K_BLOCK) {
            int n = in - k < TD_K_BLOCK ? in - k : TD_K_BLOCK;
            for (int i = 0; i < n; i++)
                td_v16_store(unpacked + i * TD_PANEL, td_v16_load_panel_bf16(wp + (size_t)(k + i) * TD_PANEL));
            td_tile_rows(rows, x + k, ldx, unpacked, TD_PANEL, n, y + p * TD_PANEL, ldy);
        }
    }
}
