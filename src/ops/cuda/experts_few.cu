/* Windows of up to 8 rows through 4-bit mcg experts, in two launches:
 *   in   a block takes the picks of one expert (up to 8, an item) and outputs of gate or up. It finds them by itself in
 *        the window's ids, rotates x as it goes along, and the block that arrives last at 128 outputs of an item, four
 *        strips of gate and up, makes the input of down of them
 *   out  a block takes an item and at least 128 outputs of down, which it rotates; the block that arrives last at 128
 *        outputs of a row adds the row's picks in their own order, then the shared expert
 * Every number comes from the operations that experts.cu and experts_product.cu do, in their order; who arrives last
 * decides where it is computed, not what. z, mid and out are stored by pick.
 * One row: blocks of 16 warps and more than 64 registers, of which a multiprocessor holds one, so they spread
 * even when they are set up early; down's first words are then on their way before gate and up have ended. More rows:
 * blocks of 8 warps, three a multiprocessor, which start on an idle chip (td_launch_spread(): few, long blocks). */
#include "ops/cuda/experts_rotate.h"
#include "ops/cuda/experts_tile.h"

enum {
    WARPS = 8,
    WARPS_ALONE = 16, /* of a block that has a multiprocessor to itself */
    ROWS_ALONE = 1,   /* of a window whose blocks are of that kind */
    STRIP = 64,       /* outputs a warp works on: four tiles */
    TILES = STRIP / TD_EXL3_TILE,
    ITEM = 8,
    PICKS = 64, /* of a window: two a lane */
    BLOCK = TD_EXL3_BLOCK,
    GROUP_BYTES = 2048,                   /* packed words of a strip for 64 inputs */
    COUNTERS_IN = TD_COUNTERS_EXPERTS / 2 /* [PICKS][width / 128]; behind: [ITEM][dim / 128] */
};

typedef struct few_item {
    int expert, n;  /* n 0: nothing to do */
    int pick;       /* of index lane % ITEM; 0 behind the last */
    uint64_t valid; /* picks of the window whose expert exists */
} few_item;

/* What a warp does: groups of 64 inputs of a strip. */
typedef struct few_part {
    int strip, per_block, first, end;
    bool live;
} few_part;

static TD_DEVICE uint64_t ballot_both(bool low, bool high)
{
    uint64_t upper = __ballot_sync(0xffffffffu, high);
    return upper << 32 | __ballot_sync(0xffffffffu, low);
}

/* The item that pick z leads: z and the next picks of its expert, if as many as fill whole items come before it. */
static TD_DEVICE few_item find_item(const td_experts_call &a, int z)
{
    int lane = threadIdx.x % 32;
    int id0 = lane < a.picks ? a.ids[lane] : -1, id1 = lane + 32 < a.picks ? a.ids[lane + 32] : -1;
    int of_low = __shfl_sync(0xffffffffu, id0, z % 32), of_high = __shfl_sync(0xffffffffu, id1, z % 32);
    few_item item = { z < 32 ? of_low : of_high, 0, 0, 0 };
    item.valid = ballot_both(id0 >= 0 && id0 < a.n_experts, id1 >= 0 && id1 < a.n_experts);
    uint64_t same = ballot_both(id0 == item.expert, id1 == item.expert) & item.valid;
    bool leads = (item.valid >> z & 1) && __popcll(same & ((1ull << z) - 1)) % ITEM == 0;
    same = same >> z << z;
    if (leads) item.n = min(__popcll(same), (int)ITEM);
#pragma unroll
    for (int i = 0; i < ITEM; i++) {
        if (lane % ITEM == i && same) item.pick = __ffsll((long long)same) - 1;
        same &= same - 1;
    }
    return item;
}

static TD_DEVICE few_part part_of(int warps, int slices, int k, int n)
{
    int warp = threadIdx.x / 32, slice = warp % slices, groups = k / TD_TILE_IN, per_block = warps / slices;
    int strip = blockIdx.x * per_block + warp / slices;
    return { strip, per_block, groups * slice / slices, groups * (slice + 1) / slices, strip * STRIP < n };
}

static TD_DEVICE const uint8_t *words_at(const td_gpu_matrix &m, const few_part &part, int k)
{
    return m.data + ((size_t)part.strip * (k / TD_TILE_IN) + part.first) * GROUP_BYTES + threadIdx.x % 32 * 16;
}

/* The lane's words of a group: four of each column of tiles. */
TD_DEVICE void load_group(const uint8_t *w, uint4 words[TILES])
{
#pragma unroll
    for (int c = 0; c < TILES; c++) words[c] = td_load_early16(w + c * (GROUP_BYTES / TILES));
}

/* 64 inputs of a strip. words: the group's, and then, if there is one, the next group's. b: the lane's 16 values of x. */
static TD_DEVICE void group_product(const td_pair_sums &ones, uint4 words[TILES], const uint8_t *next, bool more,
                                    const uint4 b[2], float acc[TILES][4])
{
#pragma unroll
    for (int c = 0; c < TILES; c++) {
        uint32_t before = td_mcg4_before(words[c]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t tile[4];
            td_decode_mcg4(ones, td_word(words[c], i), i ? td_word(words[c], i - 1) : before, tile);
            td_mma_f16(acc[c], tile, i % 2 ? b[i / 2].z : b[i / 2].x, i % 2 ? b[i / 2].w : b[i / 2].y);
        }
        if (more) words[c] = td_load_stream(next + c * (GROUP_BYTES / TILES)); /* into the same registers */
    }
}

/* A warp's sums, to be added over the slices. red: [ITEM][STRIP] */
static TD_DEVICE void store_sums(const float acc[TILES][4], float (*red)[STRIP])
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < TILES; c++)
#pragma unroll
        for (int i = 0; i < 4; i++) red[2 * t + i % 2][16 * c + g + i / 2 * 8] = acc[c][i];
}

/* Where piece p (8 values) of row r of a rotated block of 128 inputs lies: odd rows have neighbours exchanged, so that
 * a load of eight lanes (two rows, every second piece) meets all banks once. */
static TD_DEVICE int piece_at(int r, int p)
{
    return r * (BLOCK / 8) + (p ^ (r & 1));
}

/* The lane's quad of a row, f16(H(x * suh)), into the warp's block of rotated inputs. */
static TD_DEVICE void rotate_row(uint2 values, uint2 signs, int r, uint4 *xs)
{
    float v[4] = { td_low_bf16(values.x), td_high_bf16(values.x), td_low_bf16(values.y), td_high_bf16(values.y) };
    td_quad_scale(v, signs.x, signs.y);
    td_hadamard(v);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        int at = td_rotated_by_lane(td_quad_at() + 8 * i);
        *((__half2 *)(xs + piece_at(r, at / 8)) + at % 8 / 2) = __floats2half2_rn(v[i], v[i + 1]);
    }
}

/* 16-bit values of a quad. */
static TD_DEVICE uint2 load_quad(const void *p)
{
    const uint32_t *from = (const uint32_t *)p;
    return make_uint2(from[0], from[8]);
}

/* A warp's part of gate or up. xs: [ITEM][BLOCK] f16, the warp's own. Values of the next row and block are on their way
 * while one is rotated, words of the next group while one is decoded. */
static TD_DEVICE void product_of_x(const td_experts_call &a, const td_gpu_matrix &m, const few_item &item,
                                   const few_part &part, uint4 *xs, float acc[TILES][4])
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = item.pick / a.top_k, block = part.first / 2;
    const uint8_t *w = words_at(m, part, a.dim);
    const td_bf16 *x = a.x + td_quad_at();
    const td_f16 *suh = m.suh + td_quad_at();
    const td_pair_sums ones = td_pair_sums_init();
    uint4 words[TILES];
    load_group(w, words);
    uint2 signs_next = load_quad(suh + BLOCK * block);
    uint2 values_next = load_quad(x + (size_t)__shfl_sync(0xffffffffu, row, 0) * a.dim + BLOCK * block);
    for (; 2 * block < part.end; block++) {
        uint2 signs = signs_next;
        bool more = 2 * (block + 1) < part.end;
        if (more) signs_next = load_quad(suh + BLOCK * (block + 1));
        __syncwarp();
        for (int r = 0; r < item.n; r++) {
            uint2 values = values_next;
            bool same = r + 1 < item.n;
            int next_row = __shfl_sync(0xffffffffu, row, same ? r + 1 : 0);
            if (same || more)
                values_next = load_quad(x + (size_t)next_row * a.dim + BLOCK * (same ? block : block + 1));
            rotate_row(values, signs, r, xs);
        }
        __syncwarp();
        int end = min(part.end, 2 * block + 2);
#pragma unroll 1
        for (int group = max(part.first, 2 * block); group < end; group++) {
            uint4 b[2] = { make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0) };
            if (g < item.n)
                for (int i = 0; i < 2; i++) b[i] = xs[piece_at(g, group % 2 * 8 + 2 * t + i)];
            w += GROUP_BYTES;
            group_product(ones, words, w, group + 1 < part.end, b, acc);
        }
    }
    __syncwarp(); /* xs becomes the warp's sums */
}

/* A warp's part of down: its rows of x are in memory as they are needed. words: of its first group. */
static TD_DEVICE void product_of_mid(const td_experts_call &a, const uint8_t *w, const few_item &item,
                                     const few_part &part, uint4 words[TILES], float acc[TILES][4])
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const td_bf16 *x = a.mid + (size_t)__shfl_sync(0xffffffffu, item.pick, g) * a.mid_stride + 16 * t;
    const td_pair_sums ones = td_pair_sums_init();
    bool there = g < item.n;
    uint4 b_next[2] = { make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0) };
    for (int i = 0; i < 2 && there; i++) b_next[i] = *(const uint4 *)(x + TD_TILE_IN * part.first + 8 * i);
#pragma unroll 1
    for (int group = part.first; group < part.end; group++) {
        uint4 b[2] = { b_next[0], b_next[1] };
        bool more = group + 1 < part.end;
        w += GROUP_BYTES;
        for (int i = 0; i < 2 && there && more; i++) b_next[i] = *(const uint4 *)(x + TD_TILE_IN * (group + 1) + 8 * i);
        group_product(ones, words, w, more, b, acc);
    }
}

static TD_DEVICE void load_quad_l2(const float *p, float v[4])
{
    float2 low = __ldcg((const float2 *)p), high = __ldcg((const float2 *)(p + 16));
    v[0] = low.x;
    v[1] = low.y;
    v[2] = high.x;
    v[3] = high.y;
}

template <int W>
static __global__ void __launch_bounds__(32 * W, W == WARPS ? 3 : 1) k_experts_few_in(td_experts_call a, int slices)
{
    td_begin();
    __shared__ __align__(16) float red[W][ITEM][STRIP]; /* before: rotated inputs */
    __shared__ int pick_of[ITEM], last[W / 2];
    few_item item = find_item(a, blockIdx.z);
    if (!item.n) return;
    int warp = threadIdx.x / 32, tid = threadIdx.x, matrix = blockIdx.y;
    const td_gpu_matrix *table = a.table + item.expert;
    const td_gpu_matrix m = table[(size_t)(TD_MATRIX_GATE + matrix) * a.n_experts];
    few_part part = part_of(W, slices, a.dim, a.width);
    int chunk0 = blockIdx.x * part.per_block / 2, chunks = a.width / BLOCK, n_chunks = max(part.per_block / 2, 1);
    if (tid < 2 * n_chunks && chunk0 + tid / 2 < chunks) td_prefetch(m.svh + chunk0 * BLOCK + tid * 64);
    float acc[TILES][4];
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) acc[i / 4][i % 4] = 0.0f;
    if (part.live) product_of_x(a, m, item, part, (uint4 *)red[warp], acc);
    store_sums(acc, red[warp]);
    if (tid < ITEM) pick_of[tid] = item.pick;
    __syncthreads();
    for (int i = tid; i < part.per_block * item.n * STRIP; i += 32 * W) {
        int o = i % STRIP, r = i / STRIP % item.n, q = i / STRIP / item.n;
        int out = (blockIdx.x * part.per_block + q) * STRIP + o;
        if (out >= a.width) continue;
        float sum = 0.0f;
        for (int s = 0; s < slices; s++) sum += red[q * slices + s][r][o];
        a.z[((size_t)pick_of[r] * 2 + matrix) * a.width + out] = sum;
    }
    __syncthreads();
    if (tid < n_chunks)
        last[tid] = chunk0 + tid < chunks &&
                    td_arrives_last(a.counters + (size_t)blockIdx.z * chunks + chunk0 + tid, min(part.per_block, 2), 4);
    __syncthreads();
    for (int task = warp; task < n_chunks * item.n; task += W) {
        if (!last[task / item.n]) continue;
        int pick = pick_of[task % item.n], i = (chunk0 + task / item.n) * BLOCK + td_quad_at();
        const float *z = a.z + (size_t)pick * 2 * a.width + i;
        float gate[4], up[4];
        load_quad_l2(z, gate);
        load_quad_l2(z + a.width, up);
        td_expert_middle(gate, up, table, a.n_experts, a.limit, i, a.mid + (size_t)pick * a.mid_stride);
    }
}

/* 128 outputs of a row: its picks in their own order, then the shared expert. */
static TD_DEVICE void combine(const td_experts_call &a, uint64_t valid, int row, int chunk)
{
    enum { AT_ONCE = 8 };
    int lane = threadIdx.x % 32, d = chunk * BLOCK + 4 * lane;
    float own_weight = lane < a.top_k ? a.weights[row * a.top_k + lane] : 0.0f;
    float y[4] = { 0.0f, 0.0f, 0.0f, 0.0f }, shared[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
    size_t at = (size_t)row * a.dim + d;
    for (int i = 0; i < 4 && a.shared; i++) shared[i] = a.shared[at + i];
    for (int k0 = 0; k0 < a.top_k; k0 += AT_ONCE) {
        float v[AT_ONCE][4];
        uint32_t there = (uint32_t)(valid >> (row * a.top_k + k0));
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            if (k0 + j >= a.top_k || !(there >> j & 1)) continue;
            float4 f = __ldcg((const float4 *)(a.out + (size_t)(row * a.top_k + k0 + j) * a.dim + d));
            v[j][0] = f.x;
            v[j][1] = f.y;
            v[j][2] = f.z;
            v[j][3] = f.w;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            if (k0 + j >= a.top_k || !(there >> j & 1)) continue;
            float weight = __shfl_sync(0xffffffffu, own_weight, k0 + j);
#pragma unroll
            for (int i = 0; i < 4; i++) y[i] = fmaf(weight, v[j][i], y[i]);
        }
    }
    for (int i = 0; i < 4; i++) a.y[at + i] = a.shared ? y[i] + shared[i] : y[i];
}

static TD_DEVICE uint64_t valid_of_row(const td_experts_call &a, uint64_t valid, int row)
{
    return valid >> (row * a.top_k) & ((1ull << a.top_k) - 1);
}

/* A row that no expert works on is written by the blocks of its first pick. */
static TD_DEVICE void combine_idle_row(const td_experts_call &a, uint64_t valid, int z, int chunk0, int n_chunks)
{
    if (z % a.top_k || valid_of_row(a, valid, z / a.top_k)) return;
    for (int c = threadIdx.x / 32; c < n_chunks && chunk0 + c < a.dim / BLOCK; c += (int)blockDim.x / 32)
        combine(a, valid, z / a.top_k, chunk0 + c);
}

template <int W>
static __global__ void __launch_bounds__(32 * W, W == WARPS ? 3 : 1) k_experts_few_out(td_experts_call a, int slices)
{
    __shared__ __align__(16) float red[W][ITEM][STRIP];
    __shared__ int pick_of[ITEM], last[W / 2 * ITEM];
    few_item item = find_item(a, blockIdx.z); /* ids were there before `in` began */
    few_part part = part_of(W, slices, a.width, a.dim);
    int chunk0 = blockIdx.x * part.per_block / 2, chunks = a.dim / BLOCK, n_chunks = part.per_block / 2;
    if (!item.n) {
        td_begin();
        combine_idle_row(a, item.valid, blockIdx.z, chunk0, n_chunks);
        return;
    }
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tid = threadIdx.x;
    const td_gpu_matrix m = a.table[(size_t)TD_MATRIX_DOWN * a.n_experts + item.expert];
    if (tid < 2 * n_chunks && chunk0 + tid / 2 < chunks) td_prefetch(m.svh + chunk0 * BLOCK + tid * 64);
    float acc[TILES][4];
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) acc[i / 4][i % 4] = 0.0f;
    const uint8_t *w = words_at(m, part, a.width);
    uint4 words[TILES];
    if (part.live) load_group(w, words);
    td_begin(); /* for mid */
    if (part.live) product_of_mid(a, w, item, part, words, acc);
    store_sums(acc, red[warp]);
    if (tid < ITEM) pick_of[tid] = item.pick;
    __syncthreads();
    int tasks = min(n_chunks, chunks - chunk0) * item.n;
    for (int task = warp; task < tasks; task += W) {
        int c = task / item.n, r = task % item.n, d = (chunk0 + c) * BLOCK + td_quad_at();
        float v[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
        for (int s = 0; s < slices; s++) {
            const float *share = &red[(2 * c + lane / 16) * slices + s][r][td_quad_at() % STRIP];
            for (int i = 0; i < 4; i++) v[i] += share[i % 2 + i / 2 * 16];
        }
        td_rotate_out(v, m.svh, d);
        float2 *to = (float2 *)(a.out + (size_t)pick_of[r] * a.dim + d);
        to[0] = make_float2(v[0], v[1]);
        to[8] = make_float2(v[2], v[3]);
    }
    __syncthreads();
    if (tid < tasks) {
        int row = pick_of[tid % item.n] / a.top_k;
        last[tid] = td_arrives_last(a.counters + COUNTERS_IN + row * chunks + chunk0 + tid / item.n, 1,
                                    __popcll(valid_of_row(a, item.valid, row)));
    }
    __syncthreads();
    for (int task = warp; task < tasks; task += W) {
        if (!last[task]) continue;
        combine(a, item.valid, pick_of[task % item.n] / a.top_k, chunk0 + task / item.n);
    }
}

/* `out` needs whole blocks of 128 outputs, so at most four slices. */
bool td_cuda_experts_few_fits(const td_experts_call *a)
{
    return a->n_rows <= ITEM && a->picks <= PICKS && a->top_k <= TD_TOP_K_MAX &&
           td_expert_slices(a->width) <= WARPS / 2 && PICKS * (a->width / BLOCK) <= COUNTERS_IN &&
           ITEM * (a->dim / BLOCK) <= TD_COUNTERS_EXPERTS - COUNTERS_IN;
}

template <int W> static td_status launch(td_cuda_dev *dev, const td_experts_call *a, bool join)
{
    int slices_in = td_expert_slices(a->dim), slices_out = td_expert_slices(a->width);
    unsigned picks = (unsigned)a->picks, outputs_in = W / slices_in * STRIP, outputs_out = W / slices_out * STRIP;
    dim3 in(td_ceil_div((size_t)a->width, outputs_in), 2, picks),
        out(td_ceil_div((size_t)a->dim, outputs_out), 1, picks);
    td_launch_as(W == WARPS_ALONE, dev, k_experts_few_in<W>, in, 32 * W, 0, *a, slices_in);
    td_status status = join ? td_cuda_join(&dev->base) : TD_OK;
    if (status != TD_OK) return status;
    td_launch_as(W == WARPS_ALONE, dev, k_experts_few_out<W>, out, 32 * W, 0, *a, slices_out);
    return td_cuda_launched(dev, "experts");
}

td_status td_cuda_experts_few(td_cuda_dev *dev, const td_experts_call *a, bool join)
{
    return a->n_rows <= ROWS_ALONE ? launch<WARPS_ALONE>(dev, a, join) : launch<WARPS>(dev, a, join);
}
