/* y = W x. Threads share the panels; within a thread, blocks of rows are turned to fp32 once for many panels and a
 * panel is unpacked once for many rows. Few rows take the packed weights straight into the fma. Which
 * path runs is decided by shapes and changes no bit: every output is one chain over ascending inputs (q4: over groups).
 */
#include "ops/cpu/cpu.h"
#include "ops/cpu/weight.h"

enum {
    ROWS_BLOCK = 96,   /* rows in a thread's fp32 block: 96 x 256 floats, 96 KiB, in L2 */
    PANELS_BLOCK = 16, /* panels that share it */
    X_FLOATS = ROWS_BLOCK * TD_K_BLOCK,
    LDA = PANELS_BLOCK * TD_PANEL,
    ACC_FLOATS = ROWS_BLOCK * LDA,
    FEW_ROWS_Q4 = 3 /* more rows: unpacking a group once is cheaper */
};

typedef struct own_scratch {
    float *x, *acc, *unpacked, *sums;
} own_scratch;

static void carve(td_arena *arena, own_scratch *s)
{
    s->x = td_take_f32(arena, X_FLOATS);
    s->acc = td_take_f32(arena, ACC_FLOATS);
    s->unpacked = td_take_f32(arena, TD_K_BLOCK * TD_PANEL);
    s->sums = td_take_f32(arena, X_FLOATS / 16); /* q4: of x, a group each; groups hold at least 16 inputs */
}

size_t td_cpu_linear_own_bytes(void)
{
    td_arena arena;
    own_scratch s;
    td_arena_init_fixed(&arena, NULL, SIZE_MAX);
    carve(&arena, &s);
    return arena.used_bytes;
}

typedef struct linear_job {
    td_cpu_dev *dev;
    const td_linear_args *a;
} linear_job;

static void store(const linear_job *job, int r0, int rows, int p0, int panels, const float *acc, size_t lda)
{
    const td_linear_args *a = job->a;
    int o0 = p0 * TD_PANEL, n = panels * TD_PANEL < a->w->out - o0 ? panels * TD_PANEL : a->w->out - o0;
    for (int r = 0; r < rows; r++) {
        size_t at = (size_t)(r0 + r) * a->y_stride + (size_t)o0;
        if (a->y_f32)
            memcpy(a->y_f32 + at, acc + (size_t)r * lda, (size_t)n * sizeof(float));
        else
            td_store_act(job->dev, a->y_act, at, acc + (size_t)r * lda, (size_t)n);
    }
}

/* Inputs k .. k+n-1 of a bf16 or fp8 panel as fp32 [n][16]; for fp8 without the scale. */
static void unpack(const td_weight *w, const uint8_t *panel, int k, int n, float *out)
{
    for (int i = 0; i < n; i++)
        td_v16_store(out + i * TD_PANEL,
                     w->format == TD_W_FP8 ? td_panel_load(TD_PANEL_E4M3, panel + TD_FP8_SCALES_BYTES, (size_t)(k + i))
                                           : td_panel_load(TD_PANEL_BF16, panel, (size_t)(k + i)));
}

static void scale_fp8(const uint8_t *panel, int rows, float *acc, size_t lda)
{
    float scale[TD_PANEL];
    memcpy(scale, panel, sizeof scale);
    for (int r = 0; r < rows; r++)
        td_v16_store(acc + (size_t)r * lda, td_v16_mul(td_v16_load(scale), td_v16_load(acc + (size_t)r * lda)));
}

/* One group of 64 inputs of q4: acc = s * (sum q x) + (acc), then b * (sum x) + (acc). */
static void q4_group(const uint8_t *group, int rows, const float *x, size_t ldx, int n, const float *sums, size_t lds,
                     float *unpacked, float *acc, size_t lda)
{
    const td_bf16 *scales = (const td_bf16 *)(const void *)group;
    td_v16 s = td_v16_load_panel_bf16(scales), b = td_v16_load_panel_bf16(scales + TD_PANEL);
    for (int i = 0; i < n; i += 8) {
        td_w16 words = td_w16_load(group + TD_Q4_SCALES_BYTES + (size_t)(i / 8) * TD_PANEL * sizeof(uint32_t));
        TD_UNROLL
        for (int j = 0; j < 8; j++) td_v16_store(unpacked + (i + j) * TD_PANEL, td_w16_nibble(words, j));
    }
    float dot[ROWS_BLOCK * TD_PANEL];
    memset(dot, 0, (size_t)rows * TD_PANEL * sizeof(float));
    td_tile_rows(rows, x, ldx, unpacked, TD_PANEL, n, dot, TD_PANEL);
    for (int r = 0; r < rows; r++) {
        td_v16 y = td_v16_fma(s, td_v16_load(dot + r * TD_PANEL), td_v16_load(acc + (size_t)r * lda));
        td_v16_store(acc + (size_t)r * lda, td_v16_fma(b, td_v16_splat(sums[(size_t)r * lds]), y));
    }
}

static void load_rows(const linear_job *job, int r0, int rows, int k, int n, float *x, size_t ldx)
{
    for (int r = 0; r < rows; r++)
        td_load_act(job->dev, job->a->x, (size_t)(r0 + r) * job->a->x_stride + (size_t)k, x + (size_t)r * ldx,
                    (size_t)n);
}

/* Rows r0 .. of panels p0 ..: the sums of all inputs end up in acc. */
static void block_sums(const linear_job *job, int r0, int rows, int p0, int panels, own_scratch *s)
{
    const td_weight *w = job->a->w;
    enum { GROUPS = TD_K_BLOCK / TD_Q4_GROUP };
    memset(s->acc, 0, (size_t)rows * LDA * sizeof(float));
    for (int k = 0; k < w->in; k += TD_K_BLOCK) {
        int n = w->in - k < TD_K_BLOCK ? w->in - k : TD_K_BLOCK;
        load_rows(job, r0, rows, k, n, s->x, TD_K_BLOCK);
        for (int r = 0; w->format == TD_W_Q4 && r < rows; r++)
            for (int g = 0; g * TD_Q4_GROUP < n; g++) {
                int left = n - g * TD_Q4_GROUP;
                s->sums[r * GROUPS + g] =
                    td_sum(s->x + r * TD_K_BLOCK + g * TD_Q4_GROUP, (size_t)(left < TD_Q4_GROUP ? left : TD_Q4_GROUP));
            }
        for (int p = 0; p < panels; p++) {
            const uint8_t *panel = td_panel_at(w, p0 + p);
            float *acc = s->acc + p * TD_PANEL;
            if (w->format != TD_W_Q4) {
                unpack(w, panel, k, n, s->unpacked);
                td_tile_rows(rows, s->x, TD_K_BLOCK, s->unpacked, TD_PANEL, n, acc, LDA);
                continue;
            }
            for (int g = 0; g * TD_Q4_GROUP < n; g++) {
                int left = n - g * TD_Q4_GROUP;
                q4_group(panel + (size_t)(k / TD_Q4_GROUP + g) * TD_Q4_GROUP_BYTES, rows, s->x + g * TD_Q4_GROUP,
                         TD_K_BLOCK, left < TD_Q4_GROUP ? left : TD_Q4_GROUP, s->sums + g, GROUPS, s->unpacked, acc,
                         LDA);
            }
        }
    }
    for (int p = 0; w->format == TD_W_FP8 && p < panels; p++)
        scale_fp8(td_panel_at(w, p0 + p), rows, s->acc + p * TD_PANEL, LDA);
}

static void many_rows(const linear_job *job, int p0, int p1, own_scratch *s)
{
    for (int p = p0; p < p1; p += PANELS_BLOCK) {
        int panels = p1 - p < PANELS_BLOCK ? p1 - p : PANELS_BLOCK;
        for (int r = 0; r < job->a->n_rows; r += ROWS_BLOCK) {
            int rows = job->a->n_rows - r < ROWS_BLOCK ? job->a->n_rows - r : ROWS_BLOCK;
            block_sums(job, r, rows, p, panels, s);
            store(job, r, rows, p, panels, s->acc, LDA);
        }
    }
}

/* q4, a few rows and panels: levels go from the words straight into the fma. sums: of x, [rows][groups]. */
TD_INLINE void few_q4(int rows, int panels, const float *x, size_t ldx, const uint8_t *w, size_t panel_bytes, int in,
                      const float *sums, size_t lds, float *y, size_t ldy)
{
    td_v16 acc[TD_TILE_ROWS];
    TD_UNROLL
    for (int t = 0; t < rows * panels; t++) acc[t] = td_v16_splat(0.0f);
    for (int g = 0; g * TD_Q4_GROUP < in; g++, w += TD_Q4_GROUP_BYTES) {
        int n = in - g * TD_Q4_GROUP < TD_Q4_GROUP ? in - g * TD_Q4_GROUP : TD_Q4_GROUP;
        td_v16 dot[TD_TILE_ROWS];
        TD_UNROLL
        for (int t = 0; t < rows * panels; t++) dot[t] = td_v16_splat(0.0f);
        for (int i = 0; i < n; i += 8) {
            const float *xi = x + g * TD_Q4_GROUP + i;
            td_w16 words[TD_TILE_ROWS];
            TD_UNROLL
            for (int p = 0; p < panels; p++)
                words[p] = td_w16_load(w + (size_t)p * panel_bytes + TD_Q4_SCALES_BYTES + (size_t)i * TD_PANEL / 2);
            TD_UNROLL
            for (int j = 0; j < 8; j++) {
                TD_UNROLL
                for (int t = 0; t < rows * panels; t++)
                    dot[t] = td_v16_fma(td_v16_splat(xi[(size_t)(t / panels) * ldx + (size_t)j]),
                                        td_w16_nibble(words[t % panels], j), dot[t]);
            }
        }
        TD_UNROLL
        for (int t = 0; t < rows * panels; t++) {
            const td_bf16 *scales = (const td_bf16 *)(const void *)(w + (size_t)(t % panels) * panel_bytes);
            acc[t] = td_v16_fma(td_v16_load_panel_bf16(scales), dot[t], acc[t]);
            acc[t] = td_v16_fma(td_v16_load_panel_bf16(scales + TD_PANEL),
                                td_v16_splat(sums[(size_t)(t / panels) * lds + (size_t)g]), acc[t]);
        }
    }
    TD_UNROLL
    for (int t = 0; t < rows * panels; t++)
        td_v16_store(y + (size_t)(t / panels) * ldy + (size_t)(t % panels) * TD_PANEL, acc[t]);
}

static void few_panels_q4(int rows, const float *x, size_t ldx, const td_weight *w, int p0, int panels,
                          const float *sums, float *y, size_t ldy)
{
    size_t lds = (size_t)td_q4_groups(w->in), bytes = td_panel_bytes(TD_W_Q4, w->in);
    for (int p = 0; p < panels;) {
        const uint8_t *panel = td_panel_at(w, p0 + p);
        float *out = y + p * TD_PANEL;
        int at_once = rows == 1 && panels - p >= 2 ? 2 : 1;
        if (at_once == 2)
            few_q4(1, 2, x, ldx, panel, bytes, w->in, sums, lds, out, ldy);
        else if (rows == 1)
            few_q4(1, 1, x, ldx, panel, bytes, w->in, sums, lds, out, ldy);
        else if (rows == 2)
            few_q4(2, 1, x, ldx, panel, bytes, w->in, sums, lds, out, ldy);
        else
            few_q4(3, 1, x, ldx, panel, bytes, w->in, sums, lds, out, ldy);
        p += at_once;
    }
}

static void group_sums(const float *x, size_t ldx, int rows, int in, float *sums)
{
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < in; i += TD_Q4_GROUP)
            *sums++ = td_sum(x + (size_t)r * ldx + i, (size_t)(in - i < TD_Q4_GROUP ? in - i : TD_Q4_GROUP));
}

/* Few rows: as many whole rows as the scratch holds are turned to fp32, then all panels pass by. */
static void few_rows(const linear_job *job, int p0, int p1, own_scratch *s)
{
    const td_weight *w = job->a->w;
    int step = X_FLOATS / w->in < TD_FEW_ROWS ? X_FLOATS / w->in : TD_FEW_ROWS;
    size_t in = (size_t)w->in, bytes = td_panel_bytes(w->format, w->in);
    for (int r = 0; r < job->a->n_rows; r += step) {
        int rows = job->a->n_rows - r < step ? job->a->n_rows - r : step;
        load_rows(job, r, rows, 0, w->in, s->x, in);
        if (w->format == TD_W_Q4) group_sums(s->x, in, rows, w->in, s->sums);
        for (int p = p0; p < p1; p += PANELS_BLOCK) {
            int panels = p1 - p < PANELS_BLOCK ? p1 - p : PANELS_BLOCK;
            const uint8_t *panel = td_panel_at(w, p);
            if (w->format == TD_W_Q4)
                few_panels_q4(rows, s->x, in, w, p, panels, s->sums, s->acc, LDA);
            else if (w->format == TD_W_FP8)
                td_panels(TD_PANEL_E4M3, rows, s->x, in, panel + TD_FP8_SCALES_BYTES, bytes, w->in, panels, s->acc, LDA,
                          s->unpacked);
            else
                td_panels(TD_PANEL_BF16, rows, s->x, in, panel, bytes, w->in, panels, s->acc, LDA, s->unpacked);
            for (int i = 0; w->format == TD_W_FP8 && i < panels; i++)
                scale_fp8(td_panel_at(w, p + i), rows, s->acc + i * TD_PANEL, LDA);
            store(job, r, rows, p, panels, s->acc, LDA);
        }
    }
}

static void linear_panels(void *ctx, int thread, int begin, int end)
{
    const linear_job *job = (const linear_job *)ctx;
    td_arena arena;
    own_scratch s;
    td_cpu_scratch(job->dev, thread, &arena);
    carve(&arena, &s);
    int few = job->a->w->format == TD_W_Q4 ? FEW_ROWS_Q4 : TD_FEW_ROWS;
    if (job->a->n_rows <= few && job->a->w->in <= X_FLOATS)
        few_rows(job, begin, end, &s);
    else
        many_rows(job, begin, end, &s);
}

td_status td_cpu_linear(td_dev *dev, const td_linear_args *a)
{
    if (a->n_rows < 0 || !a->w || a->w->in < 16 || a->w->in % 16 || a->w->out < 1 || !a->y_act == !a->y_f32 ||
        a->x_stride < (size_t)a->w->in || a->y_stride < (size_t)a->w->out)
        return TD_EINVAL;
    if (!a->n_rows) return TD_OK;
    linear_job job = { td_cpu(dev), a };
    td_cpu_for(job.dev, td_panel_count(a->w->out), (double)a->n_rows * a->w->in, linear_panels, &job);
    return TD_OK;
}
