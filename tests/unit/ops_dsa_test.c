/* DSA: what lies in the caches, which pools are selected, what attention gives; against double precision, around the
 * limit where selection begins, across window boundaries, and bit for bit for other windows and thread counts. */
#include "ops_support.h"

enum {
    KVL = 64,
    QL = 48,
    IH = 4,
    H = 3,
    KD = 32,
    VD = 48,
    TOP = 6,
    SLOTS = 2,
    BLOCKS = 6,
    CAP = 3,
    RING = 260,
    STRIDE = QL + KVL + 256 + 8,
    T_MAX = 700
};
static const td_dev_limits limits = {
    .rows = 256, .dim = 256, .n_heads = H, .index_heads = IH, .context_tokens = 1536
};
static const int32_t blocks[SLOTS * CAP] = { 4, 1, 3, 0, 5, 2 };

typedef struct world {
    float *proj, *q, *iq, *iw; /* per token: projections, queries, index queries, index head weights */
    float *q_norm, *kv_norm, *k_norm_w, *k_norm_b, *ape, *kv_b;
    td_bf16 *kv_b_src;
} world;

static world make_world(uint64_t seed)
{
    world w = { .proj = op_random(&seed, T_MAX * STRIDE, 2.0f),
                .q = op_random(&seed, T_MAX * H * KD, 2.0f),
                .iq = op_random(&seed, T_MAX * IH * 128, 1.0f),
                .iw = op_random(&seed, T_MAX * IH, 1.0f),
                .q_norm = op_random(&seed, QL, 2.0f),
                .kv_norm = op_random(&seed, KVL, 2.0f),
                .k_norm_w = op_random(&seed, 128, 2.0f),
                .k_norm_b = op_random(&seed, 128, 0.5f),
                .ape = op_random(&seed, 4 * 128, 1.0f),
                .kv_b = op_random(&seed, H * (KD + VD) * KVL, 0.3f) };
    w.kv_b_src = op_bf16(w.kv_b, H * (KD + VD) * KVL);
    return w;
}

static void release(world *w)
{
    float *all[] = { w->proj, w->q, w->iq, w->iw, w->q_norm, w->kv_norm, w->k_norm_w, w->k_norm_b, w->ape, w->kv_b };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(w->kv_b_src);
}

typedef struct layer {
    td_dev *dev;
    td_dsa_cache cache;
    td_kv_b kv_b;
} layer;

static layer make_layer(const world *w, td_kv_format format, int threads, bool exact)
{
    layer l = { .dev = op_device(&limits, threads, exact) };
    l.cache = (td_dsa_cache){ .format = format,
                              .ring = op_act(l.dev, SLOTS * RING * 256),
                              .ring_rows = RING,
                              .blocks = blocks,
                              .blocks_cap = CAP,
                              .kv_lora = KVL };
    l.cache.latents = op_alloc(BLOCKS * 512 * td_kv_row_bytes(l.dev, format, KVL));
    l.cache.pools = op_alloc(BLOCKS * 128 * td_kv_row_bytes(l.dev, format, 128));
    l.kv_b = (td_kv_b){ H, KD, VD, KVL, op_alloc(td_cpu_kv_b_bytes(l.dev, H, KD, VD, KVL)) };
    assert_int_equal(td_cpu_kv_b_fill(l.dev, &l.kv_b, w->kv_b_src), TD_OK);
    return l;
}

static void release_layer(layer *l)
{
    free(l->cache.latents);
    free(l->cache.pools);
    free(l->cache.ring);
    free(l->kv_b.data);
    td_dev_destroy(l->dev);
}

typedef struct piece {
    int slot, pos, n_rows;
} piece;

typedef struct result {
    float *c_q, *o;
    int32_t *count, *list;
} result;

static void release_result(result *r)
{
    free(r->c_q);
    free(r->o);
    free(r->count);
    free(r->list);
}

static td_act *gather(td_dev *dev, const float *src, size_t width, const piece *pieces, int n)
{
    size_t rows = 0, at = 0;
    for (int i = 0; i < n; i++) rows += (size_t)pieces[i].n_rows;
    td_act *x = op_act(dev, rows * width);
    for (int i = 0; i < n; at += (size_t)pieces[i].n_rows, i++)
        td_act_from_f32(dev, td_act_at(dev, x, at * width), src + (size_t)pieces[i].pos * width,
                        (size_t)pieces[i].n_rows * width);
    return x;
}

/* store, select, attend for a window of pieces of the one sequence. top_pools as given. */
static result run_window(layer *l, const world *w, const piece *pieces, int n_pieces, int top_pools)
{
    td_segment segments[4] = { 0 };
    int32_t pos[256], seg[256];
    int rows = 0;
    td_window window = {
        .n_segments = n_pieces, .pos = pos, .seg = seg, .segments = segments, .host_segments = segments
    };
    for (int i = 0; i < n_pieces; i++) {
        segments[i] =
            (td_segment){ .first_row = rows, .n_rows = pieces[i].n_rows, .pos = pieces[i].pos, .slot = pieces[i].slot };
        for (int t = 0; t < pieces[i].n_rows; t++, rows++) {
            pos[rows] = pieces[i].pos + t;
            seg[rows] = i;
            if (pos[rows] > window.host_pos_max) window.host_pos_max = pos[rows];
        }
    }
    window.n_rows = rows;
    size_t n = (size_t)rows;
    td_act *proj = gather(l->dev, w->proj, STRIDE, pieces, n_pieces),
           *q = gather(l->dev, w->q, H * KD, pieces, n_pieces);
    td_act *iq = gather(l->dev, w->iq, IH * 128, pieces, n_pieces), *iw = gather(l->dev, w->iw, IH, pieces, n_pieces);
    td_act *c_q = op_act(l->dev, n * QL), *o = op_act(l->dev, n * H * VD);
    result r = { .count = op_alloc(n * sizeof(int32_t)), .list = op_alloc(n * (size_t)top_pools * sizeof(int32_t)) };
    memset(r.list, 0xff, n * (size_t)top_pools * sizeof(int32_t));
    td_dsa_store_args store = { .window = &window,
                                .cache = l->cache,
                                .q_lora = QL,
                                .rms_eps = 1e-5f,
                                .proj = proj,
                                .proj_stride = STRIDE,
                                .q_norm = w->q_norm,
                                .kv_norm = w->kv_norm,
                                .k_norm_w = w->k_norm_w,
                                .k_norm_b = w->k_norm_b,
                                .ape = w->ape,
                                .c_q = c_q };
    assert_int_equal(td_cpu_dsa_store(l->dev, &store), TD_OK);
    float *weights = op_floats(l->dev, iw, n * IH);
    td_dsa_select_args select = { .window = &window,
                                  .cache = l->cache,
                                  .n_heads = IH,
                                  .top_pools = top_pools,
                                  .q = iq,
                                  .weights = weights,
                                  .count = r.count,
                                  .list = r.list };
    assert_int_equal(td_cpu_dsa_select(l->dev, &select), TD_OK);
    td_dsa_attend_args attend = { .window = &window,
                                  .cache = l->cache,
                                  .kv_b = l->kv_b,
                                  .scale = 0.25f,
                                  .top_pools = top_pools,
                                  .count = r.count,
                                  .list = r.list,
                                  .q = q,
                                  .q_stride = H * KD,
                                  .o = o };
    assert_int_equal(td_cpu_dsa_attend(l->dev, &attend), TD_OK);
    r.c_q = op_floats(l->dev, c_q, n * QL);
    r.o = op_floats(l->dev, o, n * H * VD);
    free(weights);
    free(proj);
    free(q);
    free(iq);
    free(iw);
    free(c_q);
    free(o);
    return r;
}

/* Positions 0..rows-1 in windows of at most `width`, on slot; the rows' results joined. */
static result run(layer *l, const world *w, int slot, int rows, int width, int top_pools)
{
    result all = { op_alloc((size_t)rows * QL * 4), op_alloc((size_t)rows * H * VD * 4), op_alloc((size_t)rows * 4),
                   op_alloc((size_t)(rows * top_pools) * 4) };
    for (int t = 0; t < rows; t += width) {
        piece p = { slot, t, rows - t < width ? rows - t : width };
        result r = run_window(l, w, &p, 1, top_pools);
        memcpy(all.c_q + t * QL, r.c_q, (size_t)p.n_rows * QL * 4);
        memcpy(all.o + t * H * VD, r.o, (size_t)(p.n_rows * H * VD) * 4);
        memcpy(all.count + t, r.count, (size_t)p.n_rows * 4);
        memcpy(all.list + t * top_pools, r.list, (size_t)(p.n_rows * top_pools) * 4);
        release_result(&r);
    }
    return all;
}

static void expect_same(const char *what, const result *a, const result *b, int row_a, int row_b, int rows,
                        int top_pools)
{
    op_expect_bits(what, a->c_q + row_a * QL, b->c_q + row_b * QL, (size_t)rows * QL * 4);
    op_expect_bits(what, a->count + row_a, b->count + row_b, (size_t)rows * 4);
    op_expect_bits(what, a->list + row_a * top_pools, b->list + row_b * top_pools, (size_t)(rows * top_pools) * 4);
    op_expect_bits(what, a->o + row_a * H * VD, b->o + row_b * H * VD, (size_t)(rows * H * VD) * 4);
}

/* Everything a row needs, in double, from the formulas. */
typedef struct truth {
    double *latent, *pool; /* [T][KVL], [T / 4][128] */
} truth;

static truth make_truth(const world *w, int rows)
{
    truth t = { op_alloc((size_t)rows * KVL * 8), op_alloc((size_t)rows * 128 * 8) };
    double *key = op_alloc((size_t)rows * 128 * 8);
    for (int r = 0; r < rows; r++) {
        const float *kv = w->proj + r * STRIDE + QL, *wk = kv + KVL;
        double ss = 0.0, mean = 0.0, var = 0.0;
        for (int c = 0; c < KVL; c++) ss += (double)kv[c] * kv[c] / KVL;
        for (int c = 0; c < KVL; c++) t.latent[r * KVL + c] = w->kv_norm[c] * kv[c] / sqrt(ss + 1e-5);
        for (int c = 0; c < 128; c++) mean += wk[c] / 128.0;
        for (int c = 0; c < 128; c++) var += (wk[c] - mean) * (wk[c] - mean) / 128.0;
        for (int c = 0; c < 128; c++)
            key[r * 128 + c] = (wk[c] - mean) / sqrt(var + 1e-6) * w->k_norm_w[c] + w->k_norm_b[c];
    }
    for (int p = 0; p < rows / 4; p++)
        for (int c = 0; c < 128; c++) {
            double sum = 0.0, e[4];
            for (int j = 0; j < 4; j++)
                sum += e[j] = exp((double)w->proj[(4 * p + j) * STRIDE + QL + KVL + 128 + c] + w->ape[j * 128 + c]);
            for (int j = 0; j < 4; j++) t.pool[p * 128 + c] += e[j] / sum * key[(4 * p + j) * 128 + c];
        }
    free(key);
    return t;
}

static double pool_score(const world *w, const truth *t, int row, int pool)
{
    double s = 0.0;
    for (int h = 0; h < IH; h++) {
        double dot = 0.0;
        for (int c = 0; c < 128; c++) dot += w->iq[(row * IH + h) * 128 + c] * t->pool[pool * 128 + c];
        s += w->iw[row * IH + h] / sqrt((double)IH) * fmax(0.0, dot / sqrt(128.0));
    }
    return s;
}

/* o of a row over the tokens that see[] marks */
static void attend(const world *w, const truth *t, int row, const bool *see, double *o)
{
    for (int h = 0; h < H; h++) {
        const float *wk = w->kv_b + h * (KD + VD) * KVL, *wv = wk + KD * KVL, *q = w->q + (row * H + h) * KD;
        double ol[KVL] = { 0 }, sum = 0.0;
        for (int i = 0; i <= row; i++) {
            if (!see[i]) continue;
            double dot = 0.0;
            for (int d = 0; d < KD; d++)
                for (int c = 0; c < KVL; c++) dot += (double)q[d] * wk[d * KVL + c] * t->latent[i * KVL + c];
            double p = exp(0.25 * dot);
            sum += p;
            for (int c = 0; c < KVL; c++) ol[c] += p * t->latent[i * KVL + c];
        }
        for (int d = 0; d < VD; d++) {
            o[h * VD + d] = 0.0;
            for (int c = 0; c < KVL; c++) o[h * VD + d] += wv[d * KVL + c] * ol[c] / sum;
        }
    }
}

static void selection_and_attention_follow_the_formulas(void **state)
{
    (void)state;
    enum { ROWS = 60 };
    world w = make_world(61);
    truth t = make_truth(&w, ROWS);
    layer l = make_layer(&w, TD_KV_ACT, 1, true);
    result r = run(&l, &w, 1, ROWS, 17, TOP);
    double *o = op_alloc(ROWS * H * VD * 8), *c_q = op_alloc(ROWS * QL * 8);
    for (int row = 0; row < ROWS; row++) {
        int npool = (row + 1) / 4;
        bool see[ROWS] = { false };
        for (int i = 0; i <= row; i++) see[i] = npool <= TOP || i >= 4 * npool;
        if (npool <= TOP) {
            assert_int_equal(r.count[row], -1);
        } else {
            assert_int_equal(r.count[row], TOP);
            for (int p = 0, n = 0; p < npool; p++) {
                double own = pool_score(&w, &t, row, p);
                int better = 0;
                for (int other = 0; other < npool; other++) {
                    double score = pool_score(&w, &t, row, other);
                    better += score > own || (score == own && other < p);
                }
                if (better >= TOP) continue;
                assert_int_equal(r.list[row * TOP + n++], p);
                for (int j = 0; j < 4; j++) see[4 * p + j] = true;
            }
        }
        attend(&w, &t, row, see, o + row * H * VD);
        double ss = 0.0;
        for (int c = 0; c < QL; c++) ss += (double)w.proj[row * STRIDE + c] * w.proj[row * STRIDE + c] / QL;
        for (int c = 0; c < QL; c++) c_q[row * QL + c] = w.q_norm[c] * w.proj[row * STRIDE + c] / sqrt(ss + 1e-5);
    }
    op_expect_near("o", r.o, o, ROWS * H * VD, 1e-5); /* softmax of scores up to some tens: e^x magnifies 1e-6 */
    op_expect_near("c_q", r.c_q, c_q, ROWS * QL, 1e-6);
    for (int row = 0; row < ROWS; row++) /* the pool holds what was stored, where the block table says */
        for (int c = 0; c < KVL; c++) {
            float got = ((const float *)l.cache.latents)[(blocks[CAP] * 512 + row) * KVL + c];
            assert_true(fabs(got - t.latent[row * KVL + c]) < 1e-5);
        }
    free(o);
    free(c_q);
    free(t.latent);
    free(t.pool);
    release_result(&r);
    release_layer(&l);
    release(&w);
}

/* Several partials, a block boundary, engine arithmetic and fp8 rows: near the truth. bf16 rows, q~, ol: 2^-9 each; the
 * softmax weighs by e^score and scores move by a few 2^-9 of their size. fp8: 2^-4 a value at most, 2^-4 / sqrt(3) * ..
 */
static void long_prefixes_in_all_formats(void **state)
{
    (void)state;
    world w = make_world(62);
    for (int i = 0; i < T_MAX * H * KD; i++) w.q[i] *= 0.25f;
    truth t = make_truth(&w, T_MAX);
    bool see[T_MAX];
    memset(see, true, sizeof see);
    static const struct {
        td_kv_format format;
        bool exact;
        double bound;
    } cases[] = { { TD_KV_ACT, true, 1e-5 }, { TD_KV_ACT, false, 2e-2 }, { TD_KV_FP8, false, 8e-2 } };
    for (int i = 0; i < 3; i++) {
        layer l = make_layer(&w, cases[i].format, 1, cases[i].exact);
        result r = run(&l, &w, 0, T_MAX, 250, T_MAX); /* every row sees its whole prefix */
        double o[3 * H * VD];
        float got[3 * H * VD];
        for (int k = 0; k < 3; k++) {
            int row = k == 0 ? 511 : k == 1 ? 512 : T_MAX - 1;
            attend(&w, &t, row, see, o + k * H * VD);
            memcpy(got + k * H * VD, r.o + row * H * VD, H * VD * 4);
        }
        op_expect_near("o", got, o, 3 * H * VD, cases[i].bound);
        release_result(&r);
        release_layer(&l);
    }
    free(t.latent);
    free(t.pool);
    release(&w);
}

/* A selection that happens to hold every pool is the dense prefix, bit for bit, on both sides of the limit. */
static void sparse_equals_dense_when_all_pools_are_taken(void **state)
{
    (void)state;
    world w = make_world(63);
    layer l = make_layer(&w, TD_KV_ACT, 1, false);
    result dense = run(&l, &w, 0, 620, 100, 200);
    for (int row = 4 * 130 - 4; row < 4 * 130 + 4; row++) {
        int npool = (row + 1) / 4;
        int32_t pos = row, seg = 0, count = npool, list[200];
        for (int p = 0; p < npool; p++) list[p] = p;
        td_segment s = { .n_rows = 1, .pos = row };
        td_window window = { .n_rows = 1,
                             .n_segments = 1,
                             .pos = &pos,
                             .seg = &seg,
                             .segments = &s,
                             .host_segments = &s,
                             .host_pos_max = row };
        td_act *q = op_act_of(l.dev, w.q + row * H * KD, H * KD), *o = op_act(l.dev, H * VD);
        td_dsa_attend_args a = { .window = &window,
                                 .cache = l.cache,
                                 .kv_b = l.kv_b,
                                 .scale = 0.25f,
                                 .top_pools = 200,
                                 .count = &count,
                                 .list = list,
                                 .q = q,
                                 .q_stride = H * KD,
                                 .o = o };
        assert_int_equal(td_cpu_dsa_attend(l.dev, &a), TD_OK);
        float *got = op_floats(l.dev, o, H * VD);
        op_expect_bits("o", got, dense.o + row * H * VD, H * VD * 4);
        free(got);
        free(q);
        free(o);
    }
    release_result(&dense);
    release_layer(&l);
    release(&w);
}

static void windows_and_threads_change_nothing(void **state)
{
    (void)state;
    enum { ROWS = 150 };
    world w = make_world(64);
    for (int format = 0; format < 2; format++) {
        layer l = make_layer(&w, (td_kv_format)format, 1, false);
        result serial = run(&l, &w, 0, ROWS, 1, TOP);
        static const int widths[] = { 2, 3, 64, 150 };
        for (int i = 0; i < 4; i++) {
            layer other = make_layer(&w, (td_kv_format)format, i % 2 ? 16 : 2, false);
            result r = run(&other, &w, 1, ROWS, widths[i], TOP);
            expect_same("windows", &r, &serial, 0, 0, ROWS, TOP);
            for (int p = 0; p < ROWS / 4; p++) {
                size_t bytes = td_kv_row_bytes(l.dev, (td_kv_format)format, 128);
                op_expect_bits("pool", (char *)other.cache.pools + (size_t)(blocks[CAP] * 128 + p) * bytes,
                               (char *)l.cache.pools + (size_t)(blocks[0] * 128 + p) * bytes, bytes);
            }
            piece both[2] = { { 1, ROWS, 3 }, { 0, 40, 9 } }; /* two sequences at different places in one window */
            result again = run(&other, &w, 0, 40, 40, TOP), joint = run_window(&other, &w, both, 2, TOP);
            piece alone = { 0, ROWS, 3 };
            result next = run_window(&l, &w, &alone, 1, TOP);
            expect_same("joint, first", &joint, &next, 0, 0, 3, TOP);
            expect_same("joint, second", &joint, &serial, 3, 40, 9, TOP);
            release_result(&next);
            release_result(&joint);
            release_result(&again);
            release_result(&r);
            release_layer(&other);
        }
        release_result(&serial);
        release_layer(&l);
    }
    release(&w);
}

/* One head of the layer alone, in windows of one row and of many: few lines read latents as they are stored, many as
 * fp32 tiles. */
static void few_lines_and_many_agree(void **state)
{
    (void)state;
    enum { ROWS = 70, FIRST = 560 };
    world w = make_world(70);
    static const struct {
        td_kv_format format;
        bool exact;
    } cases[] = { { TD_KV_ACT, false }, { TD_KV_ACT, true }, { TD_KV_FP8, false } };
    for (int i = 0; i < 3; i++) {
        layer l = make_layer(&w, cases[i].format, 1, cases[i].exact);
        result r = run(&l, &w, 0, FIRST + ROWS, 210, T_MAX);
        int32_t pos[ROWS], seg[ROWS] = { 0 }, count[ROWS];
        td_segment s = { .n_rows = ROWS, .pos = FIRST };
        td_window window = { .n_rows = ROWS,
                             .n_segments = 1,
                             .pos = pos,
                             .seg = seg,
                             .segments = &s,
                             .host_segments = &s,
                             .host_pos_max = FIRST + ROWS - 1 };
        for (int t = 0; t < ROWS; t++) pos[t] = FIRST + t, count[t] = -1;
        td_act *q = op_act_of(l.dev, w.q + FIRST * H * KD, ROWS * H * KD), *o = op_act(l.dev, ROWS * VD);
        td_dsa_attend_args a = { .window = &window,
                                 .cache = l.cache,
                                 .kv_b = l.kv_b,
                                 .scale = 0.25f,
                                 .count = count,
                                 .q = q,
                                 .q_stride = H * KD,
                                 .o = o };
        a.kv_b.n_heads = 1;
        assert_int_equal(td_cpu_dsa_attend(l.dev, &a), TD_OK);
        float *many = op_floats(l.dev, o, ROWS * VD);
        for (int t = 0; t < ROWS; t++) {
            op_expect_bits("with other heads", many + t * VD, r.o + (FIRST + t) * H * VD, VD * 4);
            s = (td_segment){ .n_rows = 1, .pos = FIRST + t };
            pos[0] = FIRST + t;
            window.n_rows = 1;
            a.q = td_act_at(l.dev, q, (size_t)t * H * KD);
            assert_int_equal(td_cpu_dsa_attend(l.dev, &a), TD_OK);
            float *one = op_floats(l.dev, o, VD);
            op_expect_bits("alone", one, many + t * VD, VD * 4);
            free(one);
        }
        free(many);
        free(q);
        free(o);
        release_result(&r);
        release_layer(&l);
    }
    release(&w);
}

/* Drafts that complete a pool are rejected: the real tokens rewrite the pool, and nothing remembers the drafts. */
static void rejected_rows_leave_no_trace(void **state)
{
    (void)state;
    world w = make_world(65), wrong = make_world(66);
    layer l = make_layer(&w, TD_KV_ACT, 1, false), clean = make_layer(&w, TD_KV_ACT, 1, false);
    for (int t = 0; t < 60; t += 3) {
        piece draft = { 0, t, 9 }, real = { 0, t, 3 };
        result r = run_window(&l, &wrong, &draft, 1, TOP);
        release_result(&r);
        r = run_window(&l, &w, &real, 1, TOP);
        result s = run_window(&clean, &w, &real, 1, TOP);
        expect_same("after a rejected draft", &r, &s, 0, 0, 3, TOP);
        release_result(&r);
        release_result(&s);
    }
    /* Dead rows behind a position may hold anything, also NaN. */
    memset((char *)l.cache.latents + (size_t)(blocks[0] * 512 + 63) * KVL * 2, 0xff, 100 * KVL * 2);
    piece real = { 0, 60, 3 };
    result r = run_window(&l, &w, &real, 1, TOP), s = run_window(&clean, &w, &real, 1, TOP);
    expect_same("before dead rows", &r, &s, 0, 0, 3, TOP);
    release_result(&r);
    release_result(&s);
    release_layer(&l);
    release_layer(&clean);
    release(&w);
    release(&wrong);
}

/* Equal keys give equal scores: the lowest pools win. NaN scores lose, and ids stay in range. */
static void ties_go_to_the_lower_pool(void **state)
{
    (void)state;
    world w = make_world(67);
    for (int t = 1; t < T_MAX; t++) memcpy(w.proj + t * STRIDE, w.proj, STRIDE * sizeof(float));
    for (int i = 0; i < T_MAX * IH; i++)
        w.iw[i] = i / IH % 2 ? -0.5f : 0.5f; /* and negative scores, and zeros of both signs */
    layer l = make_layer(&w, TD_KV_ACT, 1, false);
    result r = run(&l, &w, 0, 200, 50, TOP);
    for (int row = 4 * TOP + 3; row < 200; row++)
        for (int n = 0; n < TOP; n++) assert_int_equal(r.list[row * TOP + n], n);
    release_result(&r);
    for (int c = 0; c < IH * 128; c++) w.iq[200 * IH * 128 + c] = NAN;
    piece p = { 0, 200, 1 };
    r = run_window(&l, &w, &p, 1, TOP);
    for (int n = 0; n < TOP; n++) assert_in_range(r.list[n], 0, 49);
    release_result(&r);
    release_layer(&l);
    release(&w);
}

static void fp8_rows_are_as_documented(void **state)
{
    (void)state;
    world w = make_world(68);
    memset(w.proj + 5 * STRIDE + QL, 0, KVL * sizeof(float)); /* a zero row */
    layer l = make_layer(&w, TD_KV_FP8, 1, false), plain = make_layer(&w, TD_KV_ACT, 1, false);
    piece p = { 0, 0, 64 };
    result r = run_window(&l, &w, &p, 1, TOP), s = run_window(&plain, &w, &p, 1, TOP);
    size_t bytes = td_kv_row_bytes(l.dev, TD_KV_FP8, KVL);
    assert_int_equal(bytes, KVL + 16);
    for (int row = 0; row < 64; row++) {
        const uint8_t *code = (const uint8_t *)l.cache.latents + (size_t)(blocks[0] * 512 + row) * bytes;
        const td_bf16 *x = (const td_bf16 *)plain.cache.latents + (size_t)(blocks[0] * 512 + row) * KVL;
        float scale, max = 0.0f;
        int exponent;
        memcpy(&scale, code + KVL, sizeof scale);
        assert_true(frexpf(scale, &exponent) == 0.5f);
        for (int c = 0; c < KVL; c++) {
            float value = td_bf16_f32(x[c]), back = td_e4m3_f32(code[c]) * scale;
            assert_true(fabsf(back - value) <= fabsf(value) / 16.0f + scale * 0x1p-10f);
            if (fabsf(td_e4m3_f32(code[c])) > max) max = fabsf(td_e4m3_f32(code[c]));
        }
        for (int i = 4; i < 16; i++) assert_int_equal(code[KVL + i], 0);
        if (row == 5)
            assert_true(max == 0.0f && scale == 1.0f);
        else
            assert_true(max >= 128.0f && max <= 256.0f);
    }
    release_result(&r);
    release_result(&s);
    release_layer(&l);
    release_layer(&plain);
    release(&w);
}

static void wrong_windows_are_refused(void **state)
{
    (void)state;
    world w = make_world(69);
    layer l = make_layer(&w, TD_KV_ACT, 1, false);
    int32_t pos[2] = { 0, 1 }, seg[2] = { 0, 0 };
    td_segment s = { .n_rows = 2 };
    td_window window = { .n_rows = 2, .n_segments = 1, .pos = pos, .seg = seg, .segments = &s, .host_segments = &s };
    td_dsa_store_args a = { .window = &window, .cache = l.cache, .q_lora = QL };
    a.cache.ring_rows = 4; /* two rows and three before them do not fit */
    assert_int_equal(td_cpu_dsa_store(l.dev, &a), TD_EINVAL);
    a.cache.ring_rows = RING;
    s.pos = CAP * 512 - 1;
    assert_int_equal(td_cpu_dsa_store(l.dev, &a), TD_EINVAL); /* beyond the block table */
    s = (td_segment){ .n_rows = 3 };
    assert_int_equal(td_cpu_dsa_store(l.dev, &a), TD_EINVAL); /* beyond the window */
    release_layer(&l);
    release(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(selection_and_attention_follow_the_formulas),
        cmocka_unit_test(long_prefixes_in_all_formats),
        cmocka_unit_test(sparse_equals_dense_when_all_pools_are_taken),
        cmocka_unit_test(windows_and_threads_change_nothing),
        cmocka_unit_test(few_lines_and_many_agree),
        cmocka_unit_test(rejected_rows_leave_no_trace),
        cmocka_unit_test(ties_go_to_the_lower_pool),
        cmocka_unit_test(fp8_rows_are_as_documented),
        cmocka_unit_test(wrong_windows_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
