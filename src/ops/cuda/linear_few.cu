/* y = W x for up to 64 rows: a warp takes one slice of one panel for 8, 16, 32 or 64 rows, weights straight from memory
 * into the tensor core; a block's slices are added in order through shared memory. */
#include "ops/cuda/product.h"

enum { WARPS = 8 };

/* A group's steps for all tiles of rows, onto c. */
template <int FORMAT, int NT> static TD_DEVICE void few_steps(const uint4 *raw, const uint32_t b[NT][8], float c[NT][4])
{
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t a[4];
        td_decode<FORMAT>(raw, step, a);
#pragma unroll
        for (int nt = 0; nt < NT; nt++) td_mma_bf16(c[nt], a, b[nt][2 * step], b[nt][2 * step + 1]);
    }
}

/* Weights of UNROLL groups are in flight together. Rows beyond the last are computed from the last and not stored.
 * FULL_GROUPS: no group has inputs beyond `in`. WHOLE_SLICES: also, every slice is a multiple of UNROLL groups, and
 * exactly UNROLL with q4 (nothing walks, which saves registers). So no branch keeps the loads of x from going ahead of
 * the products before them; behind a branch each they were most of a block's time. */
enum { ANY_SHAPE, FULL_GROUPS, WHOLE_SLICES };

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
    few_steps<TD_W_Q4, NT>(raw, b, dot);
    uint32_t scales = td_scales_of(j < 4 ? pair[0] : pair[1]);
    scales = __shfl_sync(0xffffffffu, scales, threadIdx.x % 32 / 4 * 4 + j % 4);
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        if (SUMS) td_group_sums(b[nt], j, own[nt]);
        td_fold_q4(acc[nt], dot[nt], scales);
    }
}

/* q4: a block of up to eight groups (product.h "Offsets"). Where one round has all of them, x and its sums come first:
 * what turns sums into operands takes long and is then beside the products. */
template <int NT, int UNROLL, int SHAPE>
static TD_DEVICE void block_q4(const td_product &p, const uint8_t *w, const td_bf16 *const x[NT], int start, int end,
                               bool begin, float acc[NT][4])
{
    const bool WHOLE = SHAPE == WHOLE_SLICES, AHEAD = WHOLE && UNROLL == TD_BLOCK_GROUPS;
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float own[NT][2];
    uint32_t offsets[2], sums[NT][3];
    uint2 pair[2];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) own[nt][0] = own[nt][1] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        pair[i] = make_uint2(0, 0);
        if (t + 4 * i < (WHOLE ? UNROLL : end - start))
            pair[i] = td_load_early8(w + (t + 4 * i) * TD_Q4_GROUP_ALL + g * 8);
    }
    for (int group = start; group < end; group += UNROLL, w += UNROLL * TD_Q4_GROUP_ALL) {
        uint4 raw[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (WHOLE || group + u < end) raw[u] = td_load_early16(w + lane * 16 + u * TD_Q4_GROUP_ALL + TD_Q4_SCALES);
        if (begin && group == start) td_begin(); /* for x; the first weights are on their way */
        uint32_t b[AHEAD ? UNROLL : 1][NT][8];
#pragma unroll
        for (int u = 0; AHEAD && u < UNROLL; u++) {
            load_rows<NT, SHAPE>(p, x, group + u, b[u]);
#pragma unroll
            for (int nt = 0; nt < NT; nt++) td_group_sums(b[u][nt], u, own[nt]);
        }
#pragma unroll
        for (int nt = 0; AHEAD && nt < NT; nt++) td_sums_operand(own[nt], sums[nt]);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (!WHOLE && group + u >= end) continue;
            if (!AHEAD) load_rows<NT, SHAPE>(p, x, group + u, b[0]);
            group_q4<NT, !AHEAD>(&raw[u], WHOLE ? u : group - start + u, pair, b[AHEAD ? u : 0], own, acc);
        }
        if (WHOLE) break;
    }
    td_offsets_operand(pair[0], pair[1], offsets);
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        if (!AHEAD) td_sums_operand(own[nt], sums[nt]);
        td_fold_offsets(acc[nt], offsets, sums[nt]);
    }
}

template <int NT, int UNROLL, int SHAPE>
static TD_DEVICE void slice_q4(const td_product &p, const uint8_t *w, const td_bf16 *const x[NT], int first, int end,
                               float acc[NT][4])
{
    for (int start = first; start < end; start += TD_BLOCK_GROUPS, w += TD_BLOCK_GROUPS * TD_Q4_GROUP_ALL) {
        block_q4<NT, UNROLL, SHAPE>(p, w, x, start, min(start + TD_BLOCK_GROUPS, end), start == first, acc);
        if (SHAPE == WHOLE_SLICES) break;
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
                few_steps<FORMAT, NT>(raw[u], b, acc);
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
