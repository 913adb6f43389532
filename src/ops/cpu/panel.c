/* Products with panels, for any number of rows: which register tile is used is decided here and changes no bit. */
#include "ops/cpu/panel.h"

/* How far ahead weights are fetched, over all panels in flight: one stream alone does not keep enough cache misses
 * open. 4 rows x 256 inputs out of memory on a loaded two-core EPYC: 350 us without, 235 us with (4,096 x 256, bf16).
 */
enum { AHEAD_BYTES = 4096 };

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
TD_INLINE void few(td_panel_kind kind, int rows, int panels, const float *x, size_t ldx, const uint8_t *w,
                   size_t panel_bytes, int in, float *y, size_t ldy)
{
    td_v16 sum[TD_TILE_ROWS];
    TD_UNROLL
    for (int t = 0; t < rows * panels; t++) sum[t] = td_v16_splat(0.0f);
    for (int i = 0; i < in; i++) {
        TD_UNROLL
        for (int p = 0; p < panels; p++) {
            const uint8_t *panel = w + (size_t)p * panel_bytes;
            td_v16 wi = td_panel_load(kind, panel, (size_t)i);
            __builtin_prefetch(panel + (size_t)i * (kind == TD_PANEL_E4M3 ? 16 : 32) + AHEAD_BYTES / panels);
            TD_UNROLL
            for (int r = 0; r < rows; r++)
                sum[r * panels + p] = td_v16_fma(td_v16_splat(x[(size_t)r * ldx + (size_t)i]), wi, sum[r * panels + p]);
        }
    }
    TD_UNROLL
    for (int t = 0; t < rows * panels; t++)
        td_v16_store(y + (size_t)(t / panels) * ldy + (size_t)(t % panels) * TD_PANEL, sum[t]);
}

/* Returns how many of the panels are done. */
TD_INLINE int few_at_once(td_panel_kind kind, int rows, const float *x, size_t ldx, const uint8_t *w, size_t bytes,
                          int in, int panels, float *y, size_t ldy)
{
    if (rows == 1 && panels >= 4) return few(kind, 1, 4, x, ldx, w, bytes, in, y, ldy), 4;
    if (rows == 1 && panels >= 2) return few(kind, 1, 2, x, ldx, w, bytes, in, y, ldy), 2;
    if (rows == 2 && panels >= 3) return few(kind, 2, 3, x, ldx, w, bytes, in, y, ldy), 3;
    if (rows == 3 && panels >= 2) return few(kind, 3, 2, x, ldx, w, bytes, in, y, ldy), 2;
    switch (rows) {
    case 1: few(kind, 1, 1, x, ldx, w, bytes, in, y, ldy); break;
    case 2: few(kind, 2, 1, x, ldx, w, bytes, in, y, ldy); break;
    case 3: few(kind, 3, 1, x, ldx, w, bytes, in, y, ldy); break;
    case 4: few(kind, 4, 1, x, ldx, w, bytes, in, y, ldy); break;
    case 5: few(kind, 5, 1, x, ldx, w, bytes, in, y, ldy); break;
    default: few(kind, 6, 1, x, ldx, w, bytes, in, y, ldy); break;
    }
    return 1;
}

TD_INLINE void few_rows(td_panel_kind kind, int rows, const float *x, size_t ldx, const uint8_t *w, size_t bytes,
                        int in, int n_panels, float *y, size_t ldy)
{
    for (int p = 0, done = 1; p < n_panels; p += done)
        for (int r = 0; r < rows; r += TD_TILE_ROWS) {
            int n = rows - r < TD_TILE_ROWS ? rows - r : TD_TILE_ROWS;
            int left = rows <= TD_TILE_ROWS ? n_panels - p : 1; /* two tiles of rows walk the panels together */
            done = few_at_once(kind, n, x + (size_t)r * ldx, ldx, w + (size_t)p * bytes, bytes, in, left,
                               y + (size_t)r * ldy + p * TD_PANEL, ldy);
        }
}

/* Many rows: a panel is unpacked once, a block of inputs at a time. */
TD_INLINE void many_rows(td_panel_kind kind, int rows, const float *x, size_t ldx, const uint8_t *w, size_t bytes,
                         int in, int n_panels, float *y, size_t ldy, float *unpacked)
{
    for (int p = 0; p < n_panels; p++, w += bytes, y += TD_PANEL) {
        for (int r = 0; r < rows; r++) td_v16_store(y + (size_t)r * ldy, td_v16_splat(0.0f));
        for (int k = 0; k < in; k += TD_K_BLOCK) {
            int n = in - k < TD_K_BLOCK ? in - k : TD_K_BLOCK;
            for (int i = 0; i < n; i++) td_v16_store(unpacked + i * TD_PANEL, td_panel_load(kind, w, (size_t)(k + i)));
            td_tile_rows(rows, x + k, ldx, unpacked, TD_PANEL, n, y, ldy);
        }
    }
}

void td_panels(td_panel_kind kind, int rows, const float *x, size_t ldx, const uint8_t *w, size_t panel_bytes, int in,
               int n_panels, float *y, size_t ldy, float *unpacked)
{
    if (rows <= TD_FEW_ROWS && kind == TD_PANEL_E4M3)
        few_rows(TD_PANEL_E4M3, rows, x, ldx, w, panel_bytes, in, n_panels, y, ldy);
    else if (rows <= TD_FEW_ROWS)
        few_rows(TD_PANEL_BF16, rows, x, ldx, w, panel_bytes, in, n_panels, y, ldy);
    else
        many_rows(kind, rows, x, ldx, w, panel_bytes, in, n_panels, y, ldy, unpacked);
}
