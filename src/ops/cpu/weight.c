/* Packing and quantising dense weights. Runs once at load; what matters is that the same input gives the same bytes and
 * that the 4-bit ranges are good: docs/model.md "Quantised dense weights". */
#include "ops/cpu/weight.h"
#include "ops/cpu/cpu.h"

typedef struct fill_job {
    const td_weight *w;
    int out0, n_out;
    const td_bf16 *src; /* first row's first column */
    size_t src_stride;
} fill_job;

size_t td_cpu_weight_bytes(td_format format, int out, int in)
{
    return out > 0 && in > 0 ? td_panel_bytes(format, in) * (size_t)td_panel_count(out) : 0;
}

static void fill_bf16(const fill_job *job, uint8_t *panel, int out, const td_bf16 *row)
{
    td_bf16 *p = (td_bf16 *)(void *)panel;
    for (int i = 0; i < job->w->in; i++) p[td_panel_index(i, out)] = row[i];
}

/* One scale a row: the largest value becomes 448. A row with NaN or infinity gets a NaN scale and stays visible. */
static void fill_fp8(const fill_job *job, uint8_t *panel, int out, const td_bf16 *row)
{
    float max = 0.0f;
    bool finite = true;
    for (int i = 0; i < job->w->in; i++) {
        float x = fabsf(td_bf16_f32(row[i]));
        if (!(x <= 3.4028234e38f)) finite = false;
        if (x > max) max = x;
    }
    float scale = max > 0.0f ? max / 448.0f : 1.0f;
    if (scale < 0x1p-120f) scale = 0x1p-120f; /* a row of subnormals: keep 1 / scale finite */
    float stored = finite ? scale * 256.0f : td_bits_f32(0x7fc00000u);
    memcpy(panel + (size_t)out * sizeof stored, &stored, sizeof stored);
    uint8_t *codes = panel + TD_FP8_SCALES_BYTES;
    for (int i = 0; i < job->w->in; i++)
        codes[(size_t)i * TD_PANEL + (size_t)out] = finite ? td_f32_e4m3(td_bf16_f32(row[i]) / scale) : 0;
}

typedef struct affine {
    td_bf16 scale, offset;
    float error; /* sum of squares over the group */
} affine;

static int nibble_of(float w, float scale, float offset)
{
    float q = rintf((w - offset) / scale);
    return q > 0.0f ? q < 15.0f ? (int)q : 15 : 0; /* NaN: 0 */
}

static affine affine_of(const float *w, int n, float s, float lo)
{
    affine a = { td_f32_bf16(s > 1e-8f ? s : 1e-8f), td_f32_bf16(lo), 0.0f };
    float scale = td_bf16_f32(a.scale), offset = td_bf16_f32(a.offset);
    for (int i = 0; i < n; i++) {
        float d = fmaf(scale, (float)nibble_of(w[i], scale, offset), offset) - w[i];
        a.error = fmaf(d, d, a.error);
    }
    return a;
}

/* The line s q + b of least squared error through the values as a quantises them now. */
static affine affine_refit(const float *w, int n, affine a)
{
    double q1 = 0.0, q2 = 0.0, w1 = 0.0, qw = 0.0;
    for (int i = 0; i < n; i++) {
        double q = nibble_of(w[i], td_bf16_f32(a.scale), td_bf16_f32(a.offset));
        q1 += q;
        q2 += q * q;
        w1 += w[i];
        qw += q * w[i];
    }
    double spread = q2 * n - q1 * q1; /* 0 when all values have the same level */
    if (!(spread > 0.0)) return a;
    double s = (qw * n - q1 * w1) / spread;
    return affine_of(w, n, (float)s, (float)((w1 - s * q1) / n));
}

/* Scale and offset of least squared error, found by starting from 36 ranges (either end of the group's range moved
 * inwards in steps of 4 %) and fitting the line through the levels a few times from the best. Outliers are clamped when
 * the others gain more. The full range is tried first: the result is never worse. */
static affine affine_search(const float *w, int n)
{
    enum { STEPS = 6, FITS = 4 };
    float lo = w[0], hi = w[0];
    for (int i = 1; i < n; i++) {
        lo = w[i] < lo ? w[i] : lo;
        hi = w[i] > hi ? w[i] : hi;
    }
    affine best = affine_of(w, n, (hi - lo) / 15.0f, lo);
    for (int t = 1; t < STEPS * STEPS; t++) {
        float step = (hi - lo) * 0.04f, from = lo + step * (float)(t / STEPS), to = hi - step * (float)(t % STEPS);
        affine a = affine_of(w, n, (to - from) / 15.0f, from);
        if (a.error < best.error) best = a;
    }
    for (int t = 0; t < FITS; t++) {
        affine a = affine_refit(w, n, best);
        if (!(a.error < best.error)) break;
        best = a;
    }
    return best;
}

static void fill_q4(const fill_job *job, uint8_t *panel, int out, const td_bf16 *row)
{
    for (int i0 = 0, g = 0; i0 < job->w->in; i0 += TD_Q4_GROUP, g++) {
        int n = job->w->in - i0 < TD_Q4_GROUP ? job->w->in - i0 : TD_Q4_GROUP;
        float w[TD_Q4_GROUP];
        for (int i = 0; i < n; i++) w[i] = td_bf16_f32(row[i0 + i]);
        affine a = affine_search(w, n);
        uint8_t *group = panel + (size_t)g * TD_Q4_GROUP_BYTES;
        td_bf16 *scales = (td_bf16 *)(void *)group;
        scales[td_panel_index(0, out)] = a.scale;
        scales[td_panel_index(1, out)] = a.offset;
        uint32_t word = 0;
        for (int i = 0; i < n; i++) {
            word |= (uint32_t)nibble_of(w[i], td_bf16_f32(a.scale), td_bf16_f32(a.offset)) << 4 * (i % 8);
            if (i % 8 < 7) continue;
            memcpy(group + TD_Q4_SCALES_BYTES + ((size_t)(i / 8) * TD_PANEL + (size_t)out) * sizeof word, &word,
                   sizeof word);
            word = 0;
        }
    }
}

static void fill_rows(void *ctx, int thread, int begin, int end)
{
    const fill_job *job = (const fill_job *)ctx;
    (void)thread;
    for (int r = begin; r < end; r++) {
        const td_bf16 *row = job->src + (size_t)r * job->src_stride;
        int out = job->out0 + r;
        uint8_t *panel =
            (uint8_t *)job->w->data + td_panel_bytes(job->w->format, job->w->in) * (size_t)(out / TD_PANEL);
        switch (job->w->format) {
        case TD_W_Q4: fill_q4(job, panel, out % TD_PANEL, row); break;
        case TD_W_FP8: fill_fp8(job, panel, out % TD_PANEL, row); break;
        default: fill_bf16(job, panel, out % TD_PANEL, row); break;
        }
    }
}

td_status td_cpu_weight_fill(td_dev *dev, const td_weight *w, int out0, int n_out, const td_bf16 *src,
                             size_t src_stride, int in0)
{
    if (w->in < 16 || w->in % 16 || out0 < 0 || out0 % TD_STACK || n_out < 0 || n_out > w->out - out0 || in0 < 0)
        return TD_EINVAL;
    fill_job job = { w, out0, n_out, src + in0, src_stride };
    td_cpu_for(td_cpu(dev), n_out, w->format == TD_W_Q4 ? 40.0 * w->in : w->in, fill_rows, &job);
    return TD_OK;
}
