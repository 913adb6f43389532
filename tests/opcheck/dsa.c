/* dsa_store, dsa_select, dsa_attend, in both cache formats, through a shuffled block table. Selections may differ from
 * the CPU's only in pools whose scores are closer than fp32 sums can tell. */
#include "opcheck.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 3, KV_LORA = 512 };

typedef struct pool {
    td_kv_format format;
    int blocks_cap, n_blocks, ring_rows, kv_lora;
    oc_buf *latents, *pools, *ring, *blocks;
} pool;

static size_t row_bytes(td_kv_format format, int width)
{
    return format == TD_KV_FP8 ? (size_t)width + 16 : (size_t)width * 2;
}

/* Random rows in their stored form. */
static oc_buf *plane(oc_ctx *oc, const char *name, td_kv_format format, size_t rows, int width)
{
    oc_buf *b = oc_new(oc, name, rows * row_bytes(format, width));
    for (size_t r = 0; r < rows; r++) {
        uint8_t *row = b->cpu + r * row_bytes(format, width);
        float scale = ldexpf(1.0f, -8 + oc_below(oc, 3));
        for (int i = 0; i < width; i++) {
            if (format == TD_KV_FP8)
                row[i] = td_f32_e4m3(200.0f * oc_uniform(oc));
            else
                ((td_bf16 *)(void *)row)[i] = td_f32_bf16(oc_uniform(oc));
        }
        if (format != TD_KV_FP8) continue;
        memcpy(row + width, &scale, 4);
        memset(row + width + 4, 0, 12);
    }
    oc_push(oc, b);
    return b;
}

/* kv_lora 0: without latents. */
static pool make_pool(oc_ctx *oc, td_kv_format format, int64_t tokens, int kv_lora, bool want_pools)
{
    pool p = { .format = format,
               .blocks_cap = (int)(tokens / TD_BLOCK) + 1,
               .ring_rows = 300,
               .kv_lora = kv_lora ? kv_lora : KV_LORA };
    p.n_blocks = p.blocks_cap * SLOTS;
    int32_t *table = (int32_t *)calloc((size_t)p.n_blocks, sizeof *table);
    for (int i = 0; i < p.n_blocks; i++) table[i] = i;
    for (int i = p.n_blocks - 1; i > 0; i--) {
        int j = oc_below(oc, i + 1), t = table[i];
        table[i] = table[j];
        table[j] = t;
    }
    p.blocks = oc_ints(oc, "blocks", table, (size_t)p.n_blocks);
    free(table);
    p.latents = plane(oc, "latents", format, kv_lora ? (size_t)p.n_blocks * TD_BLOCK : 1, p.kv_lora);
    p.pools = plane(oc, "pools", format, want_pools ? (size_t)p.n_blocks * (TD_BLOCK / TD_POOL) : 1, TD_HEAD);
    p.ring = oc_acts(oc, "ring", (size_t)SLOTS * (size_t)p.ring_rows * 2 * TD_HEAD, 1.0f);
    return p;
}

static td_dsa_cache cache_of(const pool *p, int side)
{
    return (td_dsa_cache){ .format = p->format,
                           .latents = oc_at(p->latents, side),
                           .pools = oc_at(p->pools, side),
                           .ring = (td_act *)oc_at(p->ring, side),
                           .ring_rows = p->ring_rows,
                           .blocks = (const int32_t *)oc_at(p->blocks, side),
                           .blocks_cap = p->blocks_cap,
                           .kv_lora = p->kv_lora };
}

/* Stored rows as values. */
static float *values_of(const uint8_t *rows, td_kv_format format, size_t n_rows, int width)
{
    float *x = (float *)malloc((n_rows * (size_t)width + 1) * sizeof *x);
    for (size_t r = 0; r < n_rows; r++) {
        const uint8_t *row = rows + r * row_bytes(format, width);
        float scale = 1.0f;
        if (format == TD_KV_FP8) memcpy(&scale, row + width, 4);
        for (int i = 0; i < width; i++)
            x[r * (size_t)width + (size_t)i] = format == TD_KV_FP8
                                                   ? td_e4m3_f32(row[i]) * scale
                                                   : td_bf16_f32(((const td_bf16 *)(const void *)row)[i]);
    }
    return x;
}

static void near_rows(oc_ctx *oc, const oc_buf *b, td_kv_format format, int width, double bound)
{
    size_t n = b->n_bytes / row_bytes(format, width);
    uint8_t *gpu = (uint8_t *)oc_pull(oc, b);
    float *got = values_of(gpu, format, n, width), *want = values_of(b->cpu, format, n, width);
    oc_near_values(oc, b->name, got, want, n * (size_t)width, bound);
    free(got);
    free(want);
    free(gpu);
}

/* ---- store ---- */

typedef struct store {
    int q_lora;
    size_t stride;
    oc_buf *proj, *q_norm, *kv_norm, *k_w, *k_b, *ape, *c_q;
} store;

static td_status run_store(oc_ctx *oc, int side, const store *s, const pool *p, const oc_window *w, int row0)
{
    td_dsa_store_args a = {
        .window = &w->w[side],
        .cache = cache_of(p, side),
        .q_lora = s->q_lora,
        .rms_eps = 1e-5f,
        .proj = td_act_at(oc->dev[side], (const td_act *)oc_at(s->proj, side), (size_t)row0 * s->stride),
        .proj_stride = s->stride,
        .q_norm = (const float *)oc_at(s->q_norm, side),
        .kv_norm = (const float *)oc_at(s->kv_norm, side),
        .k_norm_w = (const float *)oc_at(s->k_w, side),
        .k_norm_b = (const float *)oc_at(s->k_b, side),
        .ape = (const float *)oc_at(s->ape, side),
        .c_q = td_act_at(oc->dev[side], (const td_act *)oc_at(s->c_q, side), (size_t)row0 * (size_t)s->q_lora)
    };
    return oc->ops[side].dsa_store(oc->dev[side], &a);
}

static void check_store(oc_ctx *oc, td_kv_format format, int q_lora, int rows)
{
    if (!oc_case(oc, "%s, q_lora %d, %d rows", format == TD_KV_FP8 ? "fp8" : "act", q_lora, rows)) return;
    pool p = make_pool(oc, format, 4096, KV_LORA, true);
    store s = { .q_lora = q_lora, .stride = (size_t)q_lora + KV_LORA + 2 * TD_HEAD + 3 };
    size_t all = (size_t)rows + 3;
    s.proj = oc_acts(oc, "proj", all * s.stride, 1.0f);
    s.q_norm = oc_floats(oc, "q_norm", (size_t)q_lora, 1.0f, 0.3f);
    s.kv_norm = oc_floats(oc, "kv_norm", KV_LORA, 1.0f, 0.3f);
    s.k_w = oc_floats(oc, "k_norm_w", TD_HEAD, 1.0f, 0.3f);
    s.k_b = oc_floats(oc, "k_norm_b", TD_HEAD, 0.0f, 0.3f);
    s.ape = oc_floats(oc, "ape", TD_POOL * TD_HEAD, 0.0f, 1.0f);
    s.c_q = oc_new(oc, "c_q", all * (size_t)q_lora * sizeof(td_bf16));
    oc_window w;
    td_segment segments[2] = { { .n_rows = rows, .pos = 510, .slot = 2 }, { .n_rows = 3, .pos = 1021, .slot = 0 } };
    oc_make_window(oc, &w, segments, 2);
    oc_ran(oc, run_store(oc, OC_CPU, &s, &p, &w, 0), run_store(oc, OC_GPU, &s, &p, &w, 0));
    oc_near_act(oc, s.c_q, all * (size_t)q_lora, 1e-3);
    near_rows(oc, p.latents, format, KV_LORA, 2e-3);
    near_rows(oc, p.pools, format, TD_HEAD, 2e-3);
    oc_near_act(oc, p.ring, p.ring->n_bytes / 2, 1e-3);
    unsigned char *latents = (unsigned char *)oc_pull(oc, p.latents), *pools = (unsigned char *)oc_pull(oc, p.pools),
                  *c_q = (unsigned char *)oc_pull(oc, s.c_q);
    for (int r = 0; r < rows; r++) { /* row by row over what is there: the same bits */
        oc_window one;
        td_segment segment = { .n_rows = 1, .pos = 510 + r, .slot = 2 };
        if (rows > 20 && r > 9) segment.n_rows = rows - r;
        oc_make_window(oc, &one, &segment, 1);
        oc_ran(oc, TD_OK, run_store(oc, OC_GPU, &s, &p, &one, r));
        if (segment.n_rows > 1) break;
    }
    unsigned char *latents1 = (unsigned char *)oc_pull(oc, p.latents), *pools1 = (unsigned char *)oc_pull(oc, p.pools),
                  *c_q1 = (unsigned char *)oc_pull(oc, s.c_q);
    oc_bits(oc, "latents row by row", latents1, latents, p.latents->n_bytes);
    oc_bits(oc, "pools row by row", pools1, pools, p.pools->n_bytes);
    oc_bits(oc, "c_q row by row", c_q1, c_q, s.c_q->n_bytes);
    void *const mine[] = { latents, pools, c_q, latents1, pools1, c_q1 };
    for (size_t i = 0; i < 6; i++) free(mine[i]);
    oc_done(oc);
}

void oc_store(oc_ctx *oc)
{
    static const int rows[] = { 1, 2, 3, 7, 8, 16, 65, 257 };
    for (int format = TD_KV_ACT; format <= TD_KV_FP8; format++)
        for (int i = 0; i < 8; i++) check_store(oc, (td_kv_format)format, i % 2 ? 1536 : 256, rows[i]);
}

/* ---- select ---- */

typedef struct chooser {
    int heads, top;
    oc_buf *q, *weights, *count, *list;
} chooser;

static td_status run_select(oc_ctx *oc, int side, const chooser *c, const pool *p, const oc_window *w, int row0)
{
    size_t r = (size_t)row0, heads = (size_t)c->heads, top = (size_t)c->top;
    td_dsa_select_args a = { .window = &w->w[side],
                             .cache = cache_of(p, side),
                             .n_heads = c->heads,
                             .top_pools = c->top,
                             .q = td_act_at(oc->dev[side], (const td_act *)oc_at(c->q, side), r * heads * TD_HEAD),
                             .weights = (const float *)oc_at(c->weights, side) + r * heads,
                             .count = (int32_t *)oc_at(c->count, side) + r,
                             .list = (int32_t *)oc_at(c->list, side) + r * top };
    return oc->ops[side].dsa_select(oc->dev[side], &a);
}

static double score_of(const chooser *c, const pool *p, int slot, int row, int32_t index)
{
    const int32_t *table = (const int32_t *)(const void *)p->blocks->cpu + slot * p->blocks_cap;
    size_t at = (size_t)table[index / 128] * 128 + (size_t)(index % 128);
    float *key = values_of(p->pools->cpu + at * row_bytes(p->format, TD_HEAD), p->format, 1, TD_HEAD);
    const td_bf16 *q = (const td_bf16 *)(const void *)c->q->cpu + (size_t)row * (size_t)c->heads * TD_HEAD;
    const float *w = (const float *)(const void *)c->weights->cpu + (size_t)row * (size_t)c->heads;
    double s = 0.0;
    for (int h = 0; h < c->heads; h++) {
        double d = 0.0;
        for (int i = 0; i < TD_HEAD; i++) d += (double)td_bf16_f32(q[h * TD_HEAD + i]) * key[i];
        if (d > 0.0) s += w[h] / sqrt((double)c->heads) * d / sqrt(128.0);
    }
    free(key);
    return s;
}

/* Two ascending lists: their differences must be near ties, of which both sides have as many. */
static void compare_row(oc_ctx *oc, const chooser *c, const pool *p, int slot, int row, const int32_t *got,
                        const int32_t *want)
{
    double low = INFINITY, high = -INFINITY;
    int i = 0, j = 0, n = 0;
    oc_begin(oc, "pools");
    for (int k = 1; k < c->top; k++)
        if (got[k] <= got[k - 1]) {
            oc_fail(oc, "row %d: list is not ascending at %d", row, k);
            return;
        }
    while (i < c->top || j < c->top) {
        if (i < c->top && j < c->top && got[i] == want[j]) {
            i++;
            j++;
            continue;
        }
        bool mine = j == c->top || (i < c->top && got[i] < want[j]);
        double s = score_of(c, p, slot, row, mine ? got[i++] : want[j++]);
        low = s < low ? s : low;
        high = s > high ? s : high;
        n++;
    }
    if (n && !(high - low < 1e-5)) oc_fail(oc, "row %d: %d pools differ, scores up to %.3g apart", row, n, high - low);
    if (n > 4) oc_fail(oc, "row %d: %d pools differ", row, n);
}

typedef enum scene {
    PLAIN,
    EQUAL_KEYS, /* three different pools in all */
    ODD_WEIGHTS /* of three rows, one has a weight that is NaN and one an infinite one */
} scene;

static bool is_odd(scene what, int row)
{
    return what == ODD_WEIGHTS && row % 3;
}

static void check_select(oc_ctx *oc, td_kv_format format, int heads, int top, int64_t pos, int rows, scene what)
{
    static const char *const names[] = { "", ", equal keys", ", odd weights" };
    if (!oc_case(oc, "%s, %d heads, %d pools, %d rows at %lld%s", format == TD_KV_FP8 ? "fp8" : "act", heads, top, rows,
                 (long long)pos, names[what]))
        return;
    pool p = make_pool(oc, format, pos + rows, 0, true);
    if (what == EQUAL_KEYS) {
        size_t n = row_bytes(format, TD_HEAD);
        for (size_t r = 1; r < p.pools->n_bytes / n; r++) memcpy(p.pools->cpu + r * n, p.pools->cpu + r % 3 * n, n);
        oc_push(oc, p.pools);
    }
    enum { SEGMENTS = 3 }; /* the first is what the case says; one sees everything; one is a sequence of its own */
    td_segment segments[SEGMENTS] = { { .n_rows = rows, .pos = (int32_t)pos, .slot = 1 },
                                      { .n_rows = 2, .pos = 7, .slot = 0 },
                                      { .n_rows = 3, .pos = (int32_t)(pos - pos / 5), .slot = 2 } };
    size_t all = (size_t)rows + 5;
    chooser c = { .heads = heads, .top = top };
    c.q = oc_acts(oc, "q", all * (size_t)heads * TD_HEAD, 1.0f);
    c.weights = oc_floats(oc, "weights", all * (size_t)heads, 0.0f, 1.0f);
    for (int r = 0; r < (int)all; r++)
        if (is_odd(what, r))
            ((float *)(void *)c.weights->cpu)[r * heads + r % heads] = r % 3 == 1 ? (float)NAN : INFINITY;
    oc_push(oc, c.weights);
    c.count = oc_new(oc, "count", all * sizeof(int32_t));
    c.list = oc_new(oc, "list", all * (size_t)top * sizeof(int32_t));
    oc_window w;
    oc_make_window(oc, &w, segments, SEGMENTS);
    oc_ran(oc, run_select(oc, OC_CPU, &c, &p, &w, 0), run_select(oc, OC_GPU, &c, &p, &w, 0));
    oc_same(oc, c.count);
    int32_t *count = (int32_t *)oc_pull(oc, c.count), *list = (int32_t *)oc_pull(oc, c.list);
    const int32_t *want = (const int32_t *)(const void *)c.list->cpu;
    for (int r = 0; r < (int)all; r++) {
        size_t at = (size_t)r * (size_t)top;
        if (count[r] < 0) continue;
        if (what == EQUAL_KEYS || is_odd(what, r))
            oc_bits(oc, "list of ties", list + at, want + at, (size_t)top * sizeof *list);
        else
            compare_row(oc, &c, &p, r < rows ? 1 : 2, r, list + at, want + at);
    }
    oc_poison(oc, c.list);
    const int alone[] = { oc_below(oc, rows), rows + 4 };
    for (int i = 0; i < 2; i++) {
        int r = alone[i], offset = i ? 2 : r;
        oc_window one;
        td_segment segment = { .n_rows = 1, .pos = segments[2 * i].pos + offset, .slot = segments[2 * i].slot };
        oc_make_window(oc, &one, &segment, 1);
        oc_ran(oc, TD_OK, run_select(oc, OC_GPU, &c, &p, &one, r));
        int32_t *list1 = (int32_t *)oc_pull(oc, c.list);
        if (count[r] >= 0)
            oc_bits(oc, "list of a row alone", list1 + (size_t)r * (size_t)top, list + (size_t)r * (size_t)top,
                    (size_t)top * sizeof *list);
        free(list1);
    }
    free(count);
    free(list);
    oc_done(oc);
}

void oc_select(oc_ctx *oc)
{
    for (int format = TD_KV_ACT; format <= TD_KV_FP8; format++) {
        td_kv_format f = (td_kv_format)format;
        for (int what = PLAIN; oc->demo && what <= ODD_WEIGHTS; what++) {
            check_select(oc, f, 4, 64, 250, 20, (scene)what);
            check_select(oc, f, 4, 64, 3000, 9, (scene)what);
            check_select(oc, f, 12, 8, 700, 130, (scene)what);
            check_select(oc, f, 5, 16, 1500, 70, (scene)what);
            check_select(oc, f, 20, 16, 1500, 70, (scene)what);
            check_select(oc, f, 32, 16, 1500, 70, (scene)what);
            check_select(oc, f, 32, 512, 2040, 16, (scene)what);
        }
        if (!oc->real) continue;
        check_select(oc, f, 32, 512, 20000, 70, PLAIN);
        check_select(oc, f, 32, 512, 150000, 70, PLAIN); /* rows share keys */
        check_select(oc, f, 32, 512, (1 << 20) - 4, 3, PLAIN);
        check_select(oc, f, 4, 512, 300000, 290, PLAIN); /* many rows share keys */
        for (int what = PLAIN; what <= ODD_WEIGHTS; what++)
            for (int rows = 2; rows <= 70; rows += 68) {
                check_select(oc, f, 4, 512, 50000, rows, (scene)what);   /* all scores in shared memory */
                check_select(oc, f, 4, 1024, 100000, rows, (scene)what); /* fewer groups of 32 than are looked for */
                check_select(oc, f, 4, 512, 300000, rows, (scene)what);
            }
    }
}

/* ---- attend ---- */

typedef struct attention {
    int heads, top;
    size_t q_stride;
    td_kv_b b[OC_SIDES];
    oc_buf *q, *o, *count, *list;
} attention;

static td_status run_attend(oc_ctx *oc, int side, const attention *t, const pool *p, const oc_window *w, int row0)
{
    size_t r = (size_t)row0;
    td_dsa_attend_args a = { .window = &w->w[side],
                             .cache = cache_of(p, side),
                             .kv_b = t->b[side],
                             .scale = 0.0625f,
                             .top_pools = t->top,
                             .count = (const int32_t *)oc_at(t->count, side) + r,
                             .list = (const int32_t *)oc_at(t->list, side) + r * (size_t)t->top,
                             .q = td_act_at(oc->dev[side], (const td_act *)oc_at(t->q, side), r * t->q_stride),
                             .q_stride = t->q_stride,
                             .o = td_act_at(oc->dev[side], (const td_act *)oc_at(t->o, side),
                                            r * (size_t)t->heads * 256) };
    return oc->ops[side].dsa_attend(oc->dev[side], &a);
}

static void pack_kv_b(oc_ctx *oc, attention *t, int kv_lora)
{
    td_bf16 *rows = oc_host_bf16(oc, (size_t)t->heads * 512 * (size_t)kv_lora, 0.1f);
    for (int side = 0; side < OC_SIDES; side++) {
        oc_buf *b = oc_new(oc, "kv_b", oc->ops[side].kv_b_bytes(oc->dev[side], t->heads, 256, 256, kv_lora));
        t->b[side] = (td_kv_b){ t->heads, 256, 256, kv_lora, oc_at(b, side) };
        oc_expect(oc, oc->ops[side].kv_b_fill(oc->dev[side], &t->b[side], rows) == TD_OK, "kv_b_fill");
    }
    free(rows);
}

/* Rows of very different size, some of zeros, and heads whose queries are: implementations narrow both. */
static void spread_sizes(oc_ctx *oc, const pool *p, const attention *t, size_t rows)
{
    size_t n = row_bytes(p->format, p->kv_lora);
    for (size_t r = 0; r < p->latents->n_bytes / n; r++) {
        uint8_t *row = p->latents->cpu + r * n;
        float scale = ldexpf(1.0f, -8 - oc_below(oc, 20)), one = 1.0f;
        bool zeros = oc_below(oc, 16) == 0;
        if (zeros) memset(row, 0, n);
        if (p->format == TD_KV_FP8)
            memcpy(row + p->kv_lora, zeros ? &one : &scale, 4);
        else
            for (int i = 0; i < p->kv_lora; i++) {
                td_bf16 *x = (td_bf16 *)(void *)row + i;
                *x = td_f32_bf16(td_bf16_f32(*x) * scale * 256.0f);
            }
    }
    for (size_t r = 0; r < rows; r++)
        for (int i = 0; i < t->heads * 256; i++) {
            td_bf16 *x = (td_bf16 *)(void *)t->q->cpu + r * t->q_stride + (size_t)i;
            *x = td_f32_bf16(ldexpf(td_bf16_f32(*x), 4 - i / 256 * 7));
        }
    oc_push(oc, p->latents);
    oc_push(oc, t->q);
}

static void choose_pools(oc_ctx *oc, const attention *t, int32_t *count, int32_t *list, int row, int64_t pos)
{
    int npool = (int)((pos + 1) / TD_POOL), n = 0;
    count[row] = npool <= t->top ? -1 : t->top;
    for (int p = 0; count[row] > 0 && p < npool; p++) /* ascending, any subset */
        if (oc_below(oc, npool - p) < t->top - n) list[(size_t)row * (size_t)t->top + (size_t)n++] = p;
}

typedef enum sizes { SAME_SIZES, ALL_SIZES } sizes;

static void check_attend(oc_ctx *oc, td_kv_format format, int heads, int top, int64_t pos, int rows, int kv_lora,
                         sizes of)
{
    if (!oc_case(oc, "%s, %d heads of %d, %d pools, %d rows at %lld%s", format == TD_KV_FP8 ? "fp8" : "act", heads,
                 kv_lora, top, rows, (long long)pos, of == ALL_SIZES ? ", all sizes" : ""))
        return;
    pool p = make_pool(oc, format, pos + rows, kv_lora, false);
    size_t all = (size_t)rows + 2;
    attention t = { .heads = heads, .top = top, .q_stride = (size_t)heads * 256 + 8 };
    pack_kv_b(oc, &t, kv_lora);
    t.q = oc_acts(oc, "q", all * t.q_stride, 2.0f);
    if (of == ALL_SIZES) spread_sizes(oc, &p, &t, all);
    t.o = oc_new(oc, "o", all * (size_t)heads * 256 * sizeof(td_bf16));
    int32_t *count = (int32_t *)calloc(all, 4), *list = (int32_t *)calloc(all * (size_t)top, 4);
    oc_window w;
    td_segment segments[2] = { { .n_rows = rows, .pos = (int32_t)pos, .slot = 2 },
                               { .n_rows = 2, .pos = 0, .slot = 0 } };
    oc_make_window(oc, &w, segments, 2);
    for (int r = 0; r < (int)all; r++) choose_pools(oc, &t, count, list, r, r < rows ? pos + r : r - rows);
    t.count = oc_ints(oc, "count", count, all);
    t.list = oc_ints(oc, "list", list, all * (size_t)top);
    oc_ran(oc, run_attend(oc, OC_CPU, &t, &p, &w, 0), run_attend(oc, OC_GPU, &t, &p, &w, 0));
    oc_near_act(oc, t.o, all * (size_t)heads * 256, 5e-3);
    unsigned char *o = (unsigned char *)oc_pull(oc, t.o);
    int parts[] = { 1, 2, rows > 64 ? 64 : rows };
    for (int i = 0; i < 3; i++) {
        int n = parts[i] < rows ? parts[i] : rows, r = oc_below(oc, rows - n + 1);
        size_t row = (size_t)heads * 512;
        oc_window part;
        td_segment segment = { .n_rows = n, .pos = (int32_t)pos + r, .slot = 2 };
        oc_make_window(oc, &part, &segment, 1);
        oc_poison(oc, t.o);
        oc_ran(oc, TD_OK, run_attend(oc, OC_GPU, &t, &p, &part, r));
        unsigned char *o1 = (unsigned char *)oc_pull(oc, t.o);
        oc_bits(oc, "o of a part of the rows", o1 + (size_t)r * row, o + (size_t)r * row, (size_t)n * row);
        free(o1);
    }
    free(o);
    free(count);
    free(list);
    oc_done(oc);
}

void oc_attend(oc_ctx *oc)
{
    for (int format = TD_KV_ACT; format <= TD_KV_FP8; format++) {
        td_kv_format f = (td_kv_format)format;
        if (oc->demo) {
            check_attend(oc, f, 1, 64, 0, 1, KV_LORA, SAME_SIZES);
            check_attend(oc, f, 1, 64, 60, 9, KV_LORA, SAME_SIZES);
            check_attend(oc, f, 2, 64, 250, 70, KV_LORA, SAME_SIZES);
            check_attend(oc, f, 5, 8, 600, 33, KV_LORA, SAME_SIZES);
            check_attend(oc, f, 4, 64, 250, 70, 64, SAME_SIZES);
            check_attend(oc, f, 20, 64, 250, 66, 208, SAME_SIZES);
            check_attend(oc, f, 6, 64, 190, 70, KV_LORA, ALL_SIZES);
        }
        if (!oc->real) continue;
        check_attend(oc, f, 32, 512, 2044, 12, KV_LORA, SAME_SIZES);
        check_attend(oc, f, 32, 512, 9000, 66, KV_LORA, SAME_SIZES);
        check_attend(oc, f, 32, 512, 63, 130, KV_LORA, SAME_SIZES);
    }
}
