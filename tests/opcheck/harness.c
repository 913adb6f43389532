/* Buffers, random numbers and comparisons of opcheck. */
#include "opcheck.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD = 256, GUARD_BYTE = 0xb7, POISON = 0xff };

uint64_t oc_rand(oc_ctx *oc)
{
    oc->seed ^= oc->seed >> 12;
    oc->seed ^= oc->seed << 25;
    oc->seed ^= oc->seed >> 27;
    return oc->seed * 0x2545f4914f6cdd1du;
}

float oc_uniform(oc_ctx *oc)
{
    return (float)((int64_t)(oc_rand(oc) >> 40) - (1 << 23)) * 0x1p-23f;
}

int oc_below(oc_ctx *oc, int n)
{
    return (int)((oc_rand(oc) >> 33) % (uint64_t)n);
}

static void *need(void *memory)
{
    td_check(memory);
    return memory;
}

static void gpu_ok(oc_ctx *oc, td_status status, const char *what)
{
    td_error err = { 0 };
    if (status == TD_OK) return;
    td_dev_sync(oc->dev[OC_GPU], &err);
    oc_give_up(oc, what, &err);
}

oc_buf *oc_new(oc_ctx *oc, const char *name, size_t n_bytes)
{
    td_error err;
    oc_buf *b = (oc_buf *)need(calloc(1, sizeof *b));
    size_t padded = (n_bytes + 255) / 256 * 256, all = padded + 2 * GUARD;
    td_check(oc->n_bufs < OC_BUFFERS_MAX);
    b->cpu = (unsigned char *)need(aligned_alloc(256, all)) + GUARD;
    void *gpu = NULL;
    td_status status = td_dev_alloc(oc->dev[OC_GPU], all, &gpu, &err);
    if (status != TD_OK) oc_give_up(oc, name, &err);
    b->gpu = (unsigned char *)gpu + GUARD;
    b->n_bytes = n_bytes;
    b->name = name;
    memset(b->cpu - GUARD, GUARD_BYTE, all);
    gpu_ok(oc, td_dev_upload(oc->dev[OC_GPU], gpu, b->cpu - GUARD, all), "guards");
    oc_poison(oc, b);
    oc->bufs[oc->n_bufs++] = b;
    return b;
}

void oc_poison(oc_ctx *oc, oc_buf *b)
{
    memset(b->cpu, POISON, b->n_bytes);
    gpu_ok(oc, td_dev_fill(oc->dev[OC_GPU], b->gpu, POISON, b->n_bytes), "poison");
}

void oc_push(oc_ctx *oc, oc_buf *b)
{
    gpu_ok(oc, td_dev_upload(oc->dev[OC_GPU], b->gpu, b->cpu, b->n_bytes), "upload");
}

void *oc_pull(oc_ctx *oc, const oc_buf *b)
{
    void *copy = need(malloc(b->n_bytes + 1));
    gpu_ok(oc, td_dev_download(oc->dev[OC_GPU], copy, b->gpu, b->n_bytes), "download");
    return copy;
}

static void check_guards(oc_ctx *oc, const oc_buf *b)
{
    size_t padded = (b->n_bytes + 255) / 256 * 256, after = padded - b->n_bytes + GUARD;
    unsigned char got[GUARD + 256 + GUARD];
    gpu_ok(oc, td_dev_download(oc->dev[OC_GPU], got, b->gpu - GUARD, GUARD), "guards");
    gpu_ok(oc, td_dev_download(oc->dev[OC_GPU], got + GUARD, b->gpu + b->n_bytes, after), "guards");
    for (size_t i = 0; i < GUARD + after; i++)
        if (got[i] != GUARD_BYTE) {
            oc_fail(oc, "%s: written %s the buffer", b->name, i < GUARD ? "before" : "behind");
            break;
        }
    for (size_t i = 0; i < GUARD + after; i++)
        if ((i < GUARD ? b->cpu[(ptrdiff_t)i - GUARD] : b->cpu[b->n_bytes + i - GUARD]) != GUARD_BYTE) {
            oc_fail(oc, "%s: the CPU wrote outside the buffer", b->name);
            break;
        }
}

void oc_done(oc_ctx *oc)
{
    td_error err = { 0 };
    if (td_dev_sync(oc->dev[OC_GPU], &err) != TD_OK) oc_give_up(oc, "waiting", &err);
    if (oc->n_bufs) oc_begin(oc, "guard bytes");
    for (int i = 0; i < oc->n_bufs; i++) {
        oc_buf *b = oc->bufs[i];
        check_guards(oc, b);
        td_dev_free(oc->dev[OC_GPU], b->gpu - GUARD, 0);
        free(b->cpu - GUARD);
        free(b);
    }
    oc_end(oc);
    oc->n_bufs = 0;
}

static float tilted(oc_ctx *oc, float scale)
{
    float x = scale * oc_uniform(oc);
    int kind = oc_below(oc, 64); /* some values near zero, some near the maximum */
    return kind == 0 ? x * 0x1p-10f : kind == 1 ? (x < 0 ? -scale : scale) : x;
}

oc_buf *oc_floats(oc_ctx *oc, const char *name, size_t n, float mean, float scale)
{
    oc_buf *b = oc_new(oc, name, n * sizeof(float));
    for (size_t i = 0; i < n; i++) ((float *)(void *)b->cpu)[i] = mean + tilted(oc, scale);
    oc_push(oc, b);
    return b;
}

oc_buf *oc_acts(oc_ctx *oc, const char *name, size_t n, float scale)
{
    oc_buf *b = oc_new(oc, name, n * sizeof(td_bf16));
    for (size_t i = 0; i < n; i++) ((td_bf16 *)(void *)b->cpu)[i] = td_f32_bf16(tilted(oc, scale));
    oc_push(oc, b);
    return b;
}

oc_buf *oc_ints(oc_ctx *oc, const char *name, const int32_t *values, size_t n)
{
    oc_buf *b = oc_new(oc, name, n * sizeof *values);
    memcpy(b->cpu, values, n * sizeof *values);
    oc_push(oc, b);
    return b;
}

td_bf16 *oc_host_bf16(oc_ctx *oc, size_t n, float scale)
{
    td_bf16 *x = (td_bf16 *)need(malloc((n + 1) * sizeof *x));
    for (size_t i = 0; i < n; i++) x[i] = td_f32_bf16(tilted(oc, scale));
    return x;
}

oc_weight oc_pack(oc_ctx *oc, td_format format, int out, int in, const td_bf16 *rows)
{
    oc_weight w;
    for (int side = 0; side < OC_SIDES; side++) {
        size_t n_bytes = oc->ops[side].weight_bytes(format, out, in);
        oc_buf *b = oc_new(oc, "weight", n_bytes);
        w.w[side] = (td_weight){ format, out, in, oc_at(b, side) };
        if (side == OC_CPU)
            memset(b->cpu, 0, n_bytes);
        else
            gpu_ok(oc, td_dev_fill(oc->dev[OC_GPU], b->gpu, 0, n_bytes), "weight");
        td_status status = oc->ops[side].weight_fill(oc->dev[side], &w.w[side], 0, out, rows, (size_t)in, 0);
        oc_expect(oc, status == TD_OK, "weight_fill");
    }
    return w;
}

oc_weight oc_random_weight(oc_ctx *oc, td_format format, int out, int in)
{
    td_bf16 *rows = oc_host_bf16(oc, (size_t)out * (size_t)in, 2.0f / sqrtf((float)in));
    oc_weight w = oc_pack(oc, format, out, in, rows);
    free(rows);
    return w;
}

void oc_ran(oc_ctx *oc, td_status cpu, td_status gpu)
{
    td_error err = { 0 };
    oc_begin(oc, "runs");
    if (cpu != TD_OK) oc_fail(oc, "the CPU answers %s", td_status_text(cpu));
    if (gpu != TD_OK) oc_fail(oc, "the GPU answers %s", td_status_text(gpu));
    if (td_dev_sync(oc->dev[OC_GPU], &err) != TD_OK) oc_give_up(oc, "running", &err);
    oc_end(oc);
}

void oc_near_values(oc_ctx *oc, const char *name, const float *got, const float *want, size_t n, double bound)
{
    double error = 0.0, size = 0.0;
    size_t worst = 0;
    oc_begin(oc, name);
    for (size_t i = 0; i < n; i++) {
        if (isnan(got[i]) != isnan(want[i])) {
            oc_fail(oc, "value %zu of %zu is %g, expected %g", i, n, (double)got[i], (double)want[i]);
            oc_end(oc);
            return;
        }
        if (isnan(want[i]) || got[i] == want[i]) { /* equal infinities too */
            if (isfinite(want[i])) size += (double)want[i] * want[i];
            continue;
        }
        double d = (double)got[i] - want[i];
        if (fabs(d) > fabs((double)got[worst] - want[worst])) worst = i;
        error += d * d;
        size += (double)want[i] * want[i];
    }
    double relative = error > 0.0 ? sqrt(error / size) : 0.0;
    oc_measured(oc, relative, bound);
    if (!(relative <= bound))
        oc_fail(oc, "relative error %.3g, allowed %.3g; value %zu of %zu is %g, expected %g", relative, bound, worst, n,
                (double)got[worst], (double)want[worst]);
    oc_end(oc);
}

void oc_near_f32(oc_ctx *oc, const oc_buf *b, size_t n, double bound)
{
    void *gpu = oc_pull(oc, b);
    oc_near_values(oc, b->name, (const float *)gpu, (const float *)(const void *)b->cpu, n, bound);
    free(gpu);
}

void oc_near_act(oc_ctx *oc, const oc_buf *b, size_t n, double bound)
{
    td_bf16 *gpu = (td_bf16 *)oc_pull(oc, b);
    float *got = (float *)need(malloc((n + 1) * sizeof *got)), *want = (float *)need(malloc((n + 1) * sizeof *want));
    for (size_t i = 0; i < n; i++) {
        got[i] = td_bf16_f32(gpu[i]);
        want[i] = td_bf16_f32(((const td_bf16 *)(const void *)b->cpu)[i]);
    }
    oc_near_values(oc, b->name, got, want, n, bound);
    free(got);
    free(want);
    free(gpu);
}

void oc_bits(oc_ctx *oc, const char *what, const void *got, const void *want, size_t n_bytes)
{
    const unsigned char *g = (const unsigned char *)got, *w = (const unsigned char *)want;
    oc_begin(oc, what);
    size_t n = 0, first = 0;
    for (size_t i = 0; i < n_bytes; i++)
        if (g[i] != w[i] && !n++) first = i;
    if (n) oc_fail(oc, "%zu of %zu bytes differ, the first at %zu", n, n_bytes, first);
    oc_end(oc);
}

void oc_same(oc_ctx *oc, const oc_buf *b)
{
    void *gpu = oc_pull(oc, b);
    oc_bits(oc, b->name, gpu, b->cpu, b->n_bytes);
    free(gpu);
}

void oc_make_window(oc_ctx *oc, oc_window *window, const td_segment *segments, int n_segments)
{
    int rows = 0;
    memset(window, 0, sizeof *window);
    for (int i = 0; i < n_segments; i++) {
        window->segments[i] = segments[i];
        window->segments[i].first_row = rows;
        rows += segments[i].n_rows;
    }
    int32_t *table = (int32_t *)need(calloc((size_t)rows * 3 + 1, sizeof *table));
    int64_t most = 0;
    for (int i = 0; i < n_segments; i++)
        for (int r = 0; r < segments[i].n_rows; r++) {
            int at = window->segments[i].first_row + r;
            table[at] = oc_below(oc, 1000);
            table[rows + at] = segments[i].pos + r;
            table[2 * rows + at] = i;
            if (segments[i].pos + r > most) most = segments[i].pos + r;
        }
    oc_buf *tables = oc_ints(oc, "tables", table, (size_t)rows * 3);
    oc_buf *list = oc_new(oc, "segments", TD_SEGMENTS_MAX * sizeof(td_segment));
    memcpy(list->cpu, window->segments, list->n_bytes);
    oc_push(oc, list);
    for (int side = 0; side < OC_SIDES; side++) {
        const int32_t *t = (const int32_t *)oc_at(tables, side);
        window->w[side] = (td_window){ .n_rows = rows,
                                       .n_segments = n_segments,
                                       .ids = t,
                                       .pos = t + rows,
                                       .seg = t + 2 * rows,
                                       .segments = (const td_segment *)oc_at(list, side),
                                       .host_segments = window->segments,
                                       .host_pos_max = most };
    }
    free(table);
}
