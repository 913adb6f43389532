/* Packed form of a dense weight on the CPU: panels of 16 outputs.
 *   bf16  [in][16] bf16 in panel order (ops/simd.h)
 *   fp8   16 fp32 scales (times 2^8, because codes are read as value * 2^-8), then [in][16] e4m3 codes
 *   q4    per group of 64 inputs: 16 scales and 16 offsets (bf16, panel order), then per 8 inputs 16 words of 32 bits,
 *         word o holding output o's nibbles of the 8 inputs, low to high */
#ifndef TD_OPS_CPU_WEIGHT_H
#define TD_OPS_CPU_WEIGHT_H

#include "ops/cpu/panel.h"
#include "ops/linear.h"

enum {
    TD_Q4_GROUP = 64,
    TD_Q4_SCALES_BYTES = 2 * TD_PANEL * (int)sizeof(td_bf16),
    TD_Q4_GROUP_BYTES = TD_Q4_SCALES_BYTES + TD_Q4_GROUP * TD_PANEL / 2,
    TD_FP8_SCALES_BYTES = TD_PANEL * (int)sizeof(float)
};

static inline int td_panel_count(int out)
{
    return (out + TD_PANEL - 1) / TD_PANEL;
}

static inline int td_q4_groups(int in)
{
    return (in + TD_Q4_GROUP - 1) / TD_Q4_GROUP;
}

static inline size_t td_panel_bytes(td_format format, int in)
{
    switch (format) {
    case TD_W_Q4: return (size_t)td_q4_groups(in) * TD_Q4_GROUP_BYTES;
    case TD_W_FP8: return TD_FP8_SCALES_BYTES + (size_t)in * TD_PANEL;
    default: return (size_t)in * TD_PANEL * sizeof(td_bf16);
    }
}

static inline const uint8_t *td_panel_at(const td_weight *w, int panel)
{
    return (const uint8_t *)w->data + td_panel_bytes(w->format, w->in) * (size_t)panel;
}

#endif
