/* y = W x for up to 64 rows: a warp takes one slice of one panel for 8, 16, 32 or 64 rows, weights straight from memory
 * into the tensor core; a block's slices are added in order through shared memory. */
#include "ops/cuda/product.h"

enum { WARPS = 8 };

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

/* Weights of UNROLL groups are in flight together. Rows beyond the last are computed from the last and not stored.
 * FULL_GROUPS: no group has inputs beyond `in`. WHOLE_SLICES: also, every slice is a multiple of UNROLL groups, and
 * exactly UNROLL with q4 (nothing walks, which saves registers). So no branch keeps the loads of x from going ahead of
 * the products before them; behind a branch each they were most of a block's time. WHOLE_ROUNDS: q4, several times
 * UNROLL; a group's registers take what comes a round later. */
enum { ANY_SHAPE, FULL_GROUPS, WHOLE_SLICES, WHOLE_ROUNDS };

template <int FORMAT, int NT, int UNROLL, int SHAPE>
static __global__ void __launch_bounds__(32 * WARPS, FORMAT == TD_W_FP8 && NT == 1 ? 3 : 2) k_linear_few(td_product p)
{
    const int N = td_pieces<FORMAT>::N;
    const bool WHOLE = SHAPE == WHOLE_SLICES || SHAPE == WHOLE_ROUNDS, AHEAD = SHAPE == WHOLE_ROUNDS;
    const bool SHARED_PAIRS =
        FORMAT == TD_W_Q4 && WHOLE && UNROLL % 4 == 0; /* four lanes need the same: a group each */
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
    uint4 raw[UNROLL][N];
    uint2 pair[SHARED_PAIRS ? UNROLL / 4 : UNROLL];
    for (int group = first; panel < p.n_panels && group < end; group += UNROLL, w += UNROLL * GB) {
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if ((!WHOLE && group + u >= end) || (AHEAD && group != first)) continue;
            if (SHARED_PAIRS && u % 4 == 0) pair[u / 4] = td_load_early8(w + g * 8 + (u + t) * GB);
            if (FORMAT == TD_W_Q4 && !SHARED_PAIRS) pair[u] = td_load_early8(w + g * 8 + u * GB);
#pragma unroll
            for (int i = 0; i < N; i++)
                raw[u][i] = td_load_early16(w + lane * 16 + u * GB + (FORMAT == TD_W_Q4 ? TD_Q4_SCALES : 0) + i * 512);
        }
        if (group == first) td_begin(); /* for x; the first weights are on their way */
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (!WHOLE && group + u >= end) continue;
            uint32_t b[NT][8];
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
                td_load_x<SHAPE != ANY_SHAPE>(x[nt], (group + u) * TD_TILE_IN, p.in - 8 * t, b[nt]);
            uint2 own = pair[SHARED_PAIRS ? u / 4 : u];
            if (SHARED_PAIRS) {
                own.x = __shfl_sync(0xffffffffu, own.x, g * 4 + u % 4);
                own.y = __shfl_sync(0xffffffffu, own.y, g * 4 + u % 4);
            }
            td_few_group<FORMAT, NT>(raw[u], own, b, acc);
            if (!AHEAD || group + UNROLL >= end) continue;
            raw[u][0] = td_load_early16(w + lane * 16 + (UNROLL + u) * GB + TD_Q4_SCALES);
            if (u % 4 == 3) pair[u / 4] = td_load_early8(w + g * 8 + (UNROLL + u - 3 + t) * GB);
        }
        if (WHOLE && FORMAT == TD_W_Q4 && !AHEAD) break;
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
