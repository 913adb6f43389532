/* y = W x for up to 64 rows: a warp takes one slice of one panel for 8, 16, 32 or 64 rows, weights straight from memory
 * into the tensor core; a block's slices are added in order through shared memory. */
#include "ops/cuda/product.h"

enum { WARPS = 8 };

/* Weights of UNROLL groups are in flight together. Rows beyond the last are computed from the last and not stored.
 * FULL_GROUPS: no group has inputs beyond `in`. WHOLE_SLICES: also, every slice is a multiple of UNROLL groups, and
 * exactly UNROLL with q4 (nothing walks, which saves registers). So no branch keeps the loads of x from going ahead of
 * the products before them; behind a branch each they were most of a block's time. WHOLE_ROUNDS: q4, several times
 * UNROLL; a group's registers take what comes a round later. */
enum { ANY_SHAPE, FULL_GROUPS, WHOLE_SLICES, WHOLE_ROUNDS };

template <int NT, int SHAPE>
static TD_DEVICE void load_rows(const td_product &p, const td_bf16 *const x[NT], int group, uint32_t b[NT][8])
{
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
        td_load_x<SHAPE != ANY_SHAPE>(x[nt], group * TD_TILE_IN, p.in - 8 * (int)(threadIdx.x % 4), b[nt]);
}

/* q4, group j of its block. pair: of groups t and t + 4 of the block. SUMS: those of x too, into own. */
template <int NT, bool SUMS>
static TD_DEVICE void group_q4(const uint4 *raw, int j, const uint2 pair[2], const uint32_t b[NT][8], float own[NT][2],
                               float acc[NT][4])
{
    float dot[NT][4];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) dot[nt][0] = dot[nt][1] = dot[nt][2] = dot[nt][3] = 0.0f;
    td_few_steps<TD_W_Q4, NT>(raw, b, dot);
    uint32_t scales = td_scales_of(j < 4 ? pair[0] : pair[1]);
    scales = __shfl_sync(0xffffffffu, scales, threadIdx.x % 32 / 4 * 4 + j % 4);
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        if (SUMS) td_group_sums(b[nt], j, own[nt]);
        td_fold_q4(acc[nt], dot[nt], scales);
    }
}

/* q4: what a lane loads of a block's UNROLL groups. pair: of groups t and t + 4, zeros where there are none. */
template <int UNROLL> struct few_weights {
    uint4 raw[UNROLL];
    uint2 pair[2];
};

static TD_DEVICE void load_pairs(const uint8_t *w, int n_groups, uint2 pair[2])
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        pair[i] = make_uint2(0, 0);
        if (t + 4 * i < n_groups) pair[i] = td_load_early8(w + (t + 4 * i) * TD_Q4_GROUP_ALL + g * 8);
    }
}

static TD_DEVICE uint4 load_words(const uint8_t *w, int group)
{
    return td_load_early16(w + threadIdx.x % 32 * 16 + group * TD_Q4_GROUP_ALL + TD_Q4_SCALES);
}

/* q4: a block (product.h "Offsets") that one round of UNROLL groups makes, whose weights are there. Where there are
 * eight, x and its sums come first: what turns sums into operands takes long and is then beside the products. more:
 * another block follows, whose weights are asked for as registers come free. */
template <int NT, int UNROLL>
static TD_DEVICE void whole_block_q4(const td_product &p, const uint8_t *w, const td_bf16 *const x[NT], int start,
                                     bool more, few_weights<UNROLL> *own_w, float acc[NT][4])
{
    const bool AHEAD = UNROLL == TD_BLOCK_GROUPS;
    float own[NT][2];
    uint32_t offsets[2], sums[NT][3], b[AHEAD ? UNROLL : 1][NT][8];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) own[nt][0] = own[nt][1] = 0.0f;
#pragma unroll
    for (int u = 0; AHEAD && u < UNROLL; u++) {
        load_rows<NT, WHOLE_SLICES>(p, x, start + u, b[u]);
#pragma unroll
        for (int nt = 0; nt < NT; nt++) td_group_sums(b[u][nt], u, own[nt]);
    }
#pragma unroll
    for (int nt = 0; AHEAD && nt < NT; nt++) td_sums_operand(own[nt], sums[nt]);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        if (!AHEAD) load_rows<NT, WHOLE_SLICES>(p, x, start + u, b[0]);
        group_q4<NT, !AHEAD>(&own_w->raw[u], u, own_w->pair, b[AHEAD ? u : 0], own, acc);
        if (more) own_w->raw[u] = load_words(w, UNROLL + u);
    }
    td_offsets_operand(own_w->pair[0], own_w->pair[1], offsets);
    if (more) load_pairs(w + UNROLL * TD_Q4_GROUP_ALL, UNROLL, own_w->pair);
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        if (!AHEAD) td_sums_operand(own[nt], sums[nt]);
        td_fold_offsets(acc[nt], offsets, sums[nt]);
    }
}

/* q4: a block of groups start to end, UNROLL at a time. */
template <int NT, int UNROLL, int SHAPE>
static TD_DEVICE void block_q4(const td_product &p, const uint8_t *w, const td_bf16 *const x[NT], int start, int end,
                               bool begin, float acc[NT][4])
{
    float own[NT][2];
    uint32_t offsets[2], sums[3];
    uint2 pair[2];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) own[nt][0] = own[nt][1] = 0.0f;
    load_pairs(w, end - start, pair);
    for (int group = start; group < end; group += UNROLL, w += UNROLL * TD_Q4_GROUP_ALL) {
        uint4 raw[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (group + u < end) raw[u] = load_words(w, u);
        if (begin && group == start) td_begin(); /* for x; the first weights are on their way */
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            uint32_t b[NT][8];
            if (group + u >= end) continue;
            load_rows<NT, SHAPE>(p, x, group + u, b);
            group_q4<NT, true>(&raw[u], group - start + u, pair, b, own, acc);
        }
    }
    td_offsets_operand(pair[0], pair[1], offsets);
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        td_sums_operand(own[nt], sums);
        td_fold_offsets(acc[nt], offsets, sums);
    }
}

template <int NT, int UNROLL, int SHAPE>
static TD_DEVICE void slice_q4(const td_product &p, const uint8_t *w, const td_bf16 *const x[NT], int first, int end,
                               float acc[NT][4])
{
    if constexpr (SHAPE == WHOLE_SLICES || SHAPE == WHOLE_ROUNDS) {
        few_weights<UNROLL> own;
        load_pairs(w, UNROLL, own.pair);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) own.raw[u] = load_words(w, u);
        td_begin(); /* for x; the first weights are on their way */
        if (SHAPE == WHOLE_SLICES) whole_block_q4<NT, UNROLL>(p, w, x, first, false, &own, acc);
        for (; SHAPE == WHOLE_ROUNDS && first < end; first += UNROLL, w += UNROLL * TD_Q4_GROUP_ALL)
            whole_block_q4<NT, UNROLL>(p, w, x, first, first + UNROLL < end, &own, acc);
    } else {
        for (int start = first; start < end; start += TD_BLOCK_GROUPS, w += TD_BLOCK_GROUPS * TD_Q4_GROUP_ALL)
            block_q4<NT, UNROLL, SHAPE>(p, w, x, start, min(start + TD_BLOCK_GROUPS, end), start == first, acc);
    }
}

/* The warps' slices added in order, through shared memory, into y. */
template <int FORMAT, int NT>
static TD_DEVICE void add_slices(const td_product &p, int batch, int row0, int per_block, const float acc[NT][4],
                                 float (*red)[8 * NT][TD_TILE_OUT + 1])
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int i = 0; i < 4; i++) red[warp][8 * nt + 2 * t + i % 2][g + i / 2 * 8] = acc[nt][i];
    __syncthreads();
    for (int i = threadIdx.x; i < per_block * 8 * NT * TD_TILE_OUT; i += 32 * WARPS) {
        int o = i % TD_TILE_OUT, row = i / TD_TILE_OUT % (8 * NT), q = i / TD_TILE_OUT / (8 * NT);
        int out_panel = blockIdx.x * per_block + q, out = out_panel * TD_TILE_OUT + o;
        if (out >= p.out || row0 + row >= p.n_rows) continue;
        float sum = 0.0f;
        for (int s = 0; s < p.slices; s++) sum += red[q * p.slices + s][row][o];
        if (FORMAT == TD_W_FP8)
            sum *= ((const float *)(p.w + batch * p.w_batch + (size_t)out_panel * p.panel_bytes))[o];
        td_product_store(p, batch, row0 + row, out, sum);
    }
}

template <int FORMAT, int NT, int UNROLL, int SHAPE>
static __global__ void __launch_bounds__(32 * WARPS, FORMAT == TD_W_FP8 && NT == 1 ? 3 : 2) k_linear_few(td_product p)
{
    const int N = td_pieces<FORMAT>::N;
    const bool WHOLE = SHAPE == WHOLE_SLICES;
    __shared__ float red[WARPS][8 * NT][TD_TILE_OUT + 1];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int per_block = WARPS / p.slices, slice = warp % p.slices, panel = blockIdx.x * per_block + warp / p.slices;
    int row0 = blockIdx.y * 8 * NT, batch = blockIdx.z;
    int first = p.groups * slice / p.slices, end = p.groups * (slice + 1) / p.slices;
    const int GB = (int)td_group_bytes((td_format)FORMAT); /* bytes of a group */
    const uint8_t *w = p.w + batch * p.w_batch + (size_t)panel * p.panel_bytes + (size_t)first * GB +
                       (FORMAT == TD_W_FP8 ? TD_FP8_HEAD : 0);
    const td_bf16 *x[NT];
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
        x[nt] = p.x + batch * p.x_batch + (size_t)min(row0 + 8 * nt + g, p.n_rows - 1) * p.x_stride + 8 * t;
    float acc[NT][4];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) acc[nt][0] = acc[nt][1] = acc[nt][2] = acc[nt][3] = 0.0f;
    if constexpr (FORMAT == TD_W_Q4) {
        if (panel < p.n_panels) slice_q4<NT, UNROLL, SHAPE>(p, w, x, first, end, acc);
    } else {
        for (int group = first; panel < p.n_panels && group < end; group += UNROLL, w += UNROLL * GB) {
            uint4 raw[UNROLL][N];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                if (!WHOLE && group + u >= end) continue;
#pragma unroll
                for (int i = 0; i < N; i++) raw[u][i] = td_load_early16(w + lane * 16 + u * GB + i * 512);
            }
            if (group == first) td_begin(); /* for x; the first weights are on their way */
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                if (!WHOLE && group + u >= end) continue;
                uint32_t b[NT][8];
                load_rows<NT, SHAPE>(p, x, group + u, b);
                td_few_steps<FORMAT, NT>(raw[u], b, acc);
            }
        }
    }
    add_slices<FORMAT, NT>(p, batch, row0, per_block, acc, red);
}

/* slice_groups: of every slice, 0 when they differ or the last group is not full. */
template <int FORMAT, int NT, int UNROLL, int MOST>
static void launch_few(const td_cuda_dev *dev, const td_product &p, dim3 grid, int slice_groups)
{
    bool rounds = FORMAT != TD_W_Q4 && UNROLL == MOST; /* several times as many groups will do too */
    bool whole = slice_groups && (slice_groups == UNROLL || (rounds && slice_groups % UNROLL == 0));
    if constexpr (FORMAT == TD_W_Q4 && NT == 1 && UNROLL == MOST) {
        if (slice_groups > UNROLL && slice_groups % UNROLL == 0) {
            td_launch(dev, k_linear_few<FORMAT, NT, UNROLL, WHOLE_ROUNDS>, grid, 32 * WARPS, 0, p);
            return;
        }
    }
    if constexpr (FORMAT != TD_W_Q4 || NT == 1) { /* q4 for more rows: 128 registers would not do */
        if (whole) {
            td_launch(dev, k_linear_few<FORMAT, NT, UNROLL, WHOLE_SLICES>, grid, 32 * WARPS, 0, p);
            return;
        }
        if constexpr (UNROLL > 1) {
            launch_few<FORMAT, NT, UNROLL / 2, MOST>(dev, p, grid, slice_groups);
            return;
        }
    }
    if (p.in % TD_TILE_IN == 0)
        td_launch(dev, k_linear_few<FORMAT, NT, MOST, FULL_GROUPS>, grid, 32 * WARPS, 0, p);
    else
        td_launch(dev, k_linear_few<FORMAT, NT, MOST, ANY_SHAPE>, grid, 32 * WARPS, 0, p);
}

template <int FORMAT> static void launch(const td_cuda_dev *dev, const td_product &p, int n_batch)
{
    const int U = FORMAT == TD_W_Q4 ? 8 : 4;
    int slice_groups = p.in % TD_TILE_IN == 0 && p.groups % p.slices == 0 ? p.groups / p.slices : 0;
    dim3 grid(td_ceil_div((size_t)p.n_panels, (size_t)(WARPS / p.slices)), td_ceil_div((size_t)p.n_rows, 32),
              (unsigned)n_batch);
    if (p.n_rows <= 8)
        launch_few<FORMAT, 1, U, U>(dev, p, grid, slice_groups);
    else if (p.n_rows <= 16)
        launch_few<FORMAT, 2, U / 2, U / 2>(dev, p, grid, slice_groups);
    else
        launch_few<FORMAT, 4, U / 4, U / 4>(dev, p, grid, slice_groups);
}

void td_product_few(const td_cuda_dev *dev, td_format format, const td_product *p, int n_batch)
{
    if (format == TD_W_Q4 && n_batch == 1 && td_product_turns(dev, p)) return;
    switch (format) {
    case TD_W_Q4: launch<TD_W_Q4>(dev, *p, n_batch); break;
    case TD_W_FP8: launch<TD_W_FP8>(dev, *p, n_batch); break;
    default: launch<TD_W_BF16>(dev, *p, n_batch); break;
    }
}
