/* Packing and quantising dense weights. Runs once at load; what matters is that the same input gives the same bytes and
 * that the 4-bit ranges are good: docs/model.md "Quantised dense weights". */
#include "ops/cpu/weight.h"
#include "ops/cpu/cpu.h"
#include "ops/quantise.h"

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
    float scale = td_fp8_row_scale(max);
    float stored = finite ? scale * 256.0f : td_bits_f32(0x7fc00000u);
    memcpy(panel + (size_t)out * sizeof stored, &stored, sizeof stored);
    uint8_t *codes = panel + TD_FP8_SCALES_BYTES;
    for (int i = 0; i < job->w->in; i++)
        codes[(size_t)i * TD_PANEL + (size_t)out] = finite ? td_f32_e4m3(td_bf16_f32(row[i]) / scale) : 0;
}

static void fill_q4(const fill_job *job, uint8_t *panel, int out, const td_bf16 *row)
{
    for (int i0 = 0, g = 0; i0 < job->w->in; i0 += TD_Q4_GROUP, g++) {
        int n = job->w->in - i0 < TD_Q4_GROUP ? job->w->in - i0 : TD_Q4_GROUP;
        float w[TD_Q4_GROUP];
        for (int i = 0; i < n; i++) w[i] = td_bf16_f32(row[i0 + i]);
        td_affine a = td_affine_search(w, n);
        uint8_t *group = panel + (size_t)g * TD_Q4_GROUP_BYTES;
        td_bf16 *scales = (td_bf16 *)(void *)group;
        scales[td_panel_index(0, out)] = a.scale;
        scales[td_panel_index(1, out)] = a.offset;
        uint32_t word = 0;
        for (int i = 0; i < n; i++) {
            word |= (uint32_t)td_affine_level(w[i], td_bf16_f32(a.scale), td_bf16_f32(a.offset)) << 4 * (i % 8);
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
