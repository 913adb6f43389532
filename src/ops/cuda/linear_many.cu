/* y = W x for more rows than linear_few.cu takes. A block of four warps has 128 outputs x 64 rows, a warp 32 x 64:
 * every weight goes from memory to the registers of the one warp that needs it, a group ahead, is decoded once and
 * meets eight tiles of eight rows, which all warps read from shared memory.
 *
 * An element's sum is that of the few-row kernel: a chain a slice, slices added in order. The totals of the slices
 * before lie in shared memory, where every lane has its own places. In registers they would cost the blocks of a
 * multiprocessor (three on an H200, two on a GB10) that work while one waits. */
#include "ops/cuda/product.h"

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    M = 2,                 /* panels of a warp */
    NT = TD_MANY_ROWS / 8, /* tiles of eight rows of a warp */
    AHEAD = 4, /* of them at a time: a chain's next step waits for the one before, so several go side by side */
    OUTS = WARPS * M * TD_TILE_OUT,
    ROWS = TD_MANY_ROWS,
    ROWS_A_COPY = THREADS / 8, /* rows of x that the block's threads copy at once */
    X_BYTES = ROWS * TD_TILE_IN * 2,
    SHARED_BYTES = 2 * X_BYTES + ROWS * OUTS * 4,
    OUT_STRIDE = OUTS + 4 /* floats; the finished tile, over stages and totals */
};
static_assert(ROWS * OUT_STRIDE * 4 <= SHARED_BYTES, "the finished tile");

/* q4: operands of the sums of every block of groups (product.h "Offsets"), for all rows; a warp a block and eight
 * rows. */
static __global__ void k_linear_sums(td_product p, uint4 *sums)
{
    td_begin();
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, slice = 0;
    int first = 0, end = p.groups / p.slices, tile = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    for (int block = blockIdx.y; block; block--) { /* its groups */
        first = min(first + TD_BLOCK_GROUPS, end);
        if (first == end) end = p.groups * (++slice + 1) / p.slices;
    }
    if (tile >= (int)p.sums_tiles) return;
    const td_bf16 *x = p.x + (size_t)min(8 * tile + g, p.n_rows - 1) * p.x_stride + 8 * t;
    float own[2] = { 0.0f, 0.0f };
#pragma unroll
    for (int j = 0; j < TD_BLOCK_GROUPS; j++) {
        uint32_t b[8];
        if (first + j >= end) break;
        td_load_x<false>(x, (first + j) * TD_TILE_IN, p.in - 8 * t, b);
        td_group_sums(b, j, own);
    }
    uint32_t parts[3];
    td_sums_operand(own, parts);
    sums[(blockIdx.y * p.sums_tiles + tile) * 32 + lane] = make_uint4(parts[0], parts[1], parts[2], 0);
}

/* Rows of x lie 128 bytes apart; odd rows have their two halves of 64 bytes exchanged, which spreads a load of eight
 * lanes (two rows, four pieces) over all banks. */
static TD_DEVICE int piece_at(int row, int piece)
{
    return row * 128 + ((piece ^ (row & 1) * 4) * 16);
}

/* What a thread copies of every group: its piece of every sixteenth row. The pointer walks from group to group. Rows
 * and inputs beyond the last are zeros. */
typedef struct copies {
    const td_bf16 *x;
    size_t rows_on;   /* values to the thread's next row */
    int n_rows, n_in; /* the thread's rows there are; inputs left from its piece on */
    int to;           /* bytes into the stage */
} copies;

static TD_DEVICE copies plan_copies(const td_product &p, int batch, int row0)
{
    int row = threadIdx.x / 8, piece = threadIdx.x % 8;
    copies c = { p.x + batch * p.x_batch + (size_t)(row0 + row) * p.x_stride + piece * 8, ROWS_A_COPY * p.x_stride,
                 (p.n_rows - row0 - row + ROWS_A_COPY - 1) / ROWS_A_COPY, p.in - piece * 8, piece_at(row, piece) };
    return c;
}

static TD_DEVICE void copy_stage(copies *c, unsigned char *to)
{
    int n = c->n_in > 0 ? c->n_rows : 0;
    const td_bf16 *from = c->x;
#pragma unroll
    for (int j = 0; j < ROWS / ROWS_A_COPY; j++, from += c->rows_on)
        td_copy_async(to + c->to + j * ROWS_A_COPY * 128, from, j < n);
    td_copy_commit();
    c->x += TD_TILE_IN;
    c->n_in -= TD_TILE_IN;
}

/* A warp's weights of a group as they are stored, and where the lane's parts of the next are. */
template <int FORMAT> struct weights {
    uint4 raw[M][td_pieces<FORMAT>::N];
    uint2 pair[M];     /* q4: scales and offsets of outputs g, g + 8 */
    const uint8_t *at; /* of the first panel */
    uint32_t panel_on; /* bytes to the next; 0 where there is none */
    int pair_on;       /* q4: bytes from `at` to the pair */
};

template <int FORMAT> static TD_DEVICE void load_weights(weights<FORMAT> *w)
{
#pragma unroll
    for (int m = 0; m < M; m++) {
        const uint8_t *at = w->at + m * w->panel_on;
        if (FORMAT == TD_W_Q4) w->pair[m] = td_load_early8(at + w->pair_on);
#pragma unroll
        for (int i = 0; i < td_pieces<FORMAT>::N; i++) w->raw[m][i] = td_load_early16(at + i * 512);
    }
    w->at += td_group_bytes((td_format)FORMAT);
}

template <int FORMAT> static TD_DEVICE void plan_weights(const td_product &p, int batch, int panel0, weights<FORMAT> *w)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, panel = min(panel0 + warp * M, p.n_panels - 1);
    const int HEAD = FORMAT == TD_W_FP8 ? TD_FP8_HEAD : FORMAT == TD_W_Q4 ? TD_Q4_SCALES : 0;
    w->at = p.w + batch * p.w_batch + panel * p.panel_bytes + HEAD + lane * 16;
    w->panel_on = panel + 1 < p.n_panels ? (uint32_t)p.panel_bytes : 0;
    w->pair_on = lane / 4 * 8 - lane * 16 - TD_Q4_SCALES;
}

/* A group's steps for all rows. piece: where the lane's first piece of x lies. */
template <int FORMAT>
static TD_DEVICE void multiply(const uint32_t a[M][4][4], const uint32_t scales[M], const unsigned char *x, int piece,
                               float acc[M][NT][4])
{
#pragma unroll
    for (int nt = 0; nt < NT; nt += AHEAD) {
        float dot[M][AHEAD][4];
#pragma unroll
        for (int i = 0; i < AHEAD * M * 4; i++) dot[i / 4 % M][i / 4 / M][i % 4] = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 b[AHEAD];
#pragma unroll
            for (int n = 0; n < AHEAD; n++) b[n] = *(const uint4 *)(x + (piece ^ half * 64) + (nt + n) * 1024);
#pragma unroll
            for (int i = 0; i < AHEAD * M; i++)
                td_mma_bf16(FORMAT == TD_W_Q4 ? dot[i % M][i / M] : acc[i % M][nt + i / M], a[i % M][2 * half],
                            b[i / M].x, b[i / M].y);
#pragma unroll
            for (int i = 0; i < AHEAD * M; i++)
                td_mma_bf16(FORMAT == TD_W_Q4 ? dot[i % M][i / M] : acc[i % M][nt + i / M], a[i % M][2 * half + 1],
                            b[i / M].z, b[i / M].w);
        }
#pragma unroll
        for (int i = 0; FORMAT == TD_W_Q4 && i < AHEAD * M; i++)
            td_fold_q4(acc[i % M][nt + i / M], dot[i % M][i / M], scales[i % M]);
    }
}

/* q4: ends a block of groups. at: the lane's pairs of the first panel in the block's first group; sums: its operands. */
static TD_DEVICE void add_offsets(const uint8_t *at, uint32_t panel_on, int n_groups, const uint4 *sums,
                                  float acc[M][NT][4])
{
    int t = threadIdx.x % 4;
    uint32_t offsets[M][2];
    uint4 v[NT];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) v[nt] = sums[nt * 32];
#pragma unroll
    for (int m = 0; m < M; m++) {
        uint2 pair[2] = { make_uint2(0, 0), make_uint2(0, 0) };
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (t + 4 * i < n_groups) pair[i] = td_load_early8(at + m * panel_on + (t + 4 * i) * TD_Q4_GROUP_ALL);
        td_offsets_operand(pair[0], pair[1], offsets[m]);
    }
#pragma unroll
    for (int i = 0; i < NT * M; i++) {
        uint32_t parts[3] = { v[i / M].x, v[i / M].y, v[i / M].z };
        td_fold_offsets(acc[i % M][i / M], offsets[i % M], parts);
    }
}

/* Ends a slice: its chains onto the totals, which start from +0. The last slice leaves them in acc, others zeros. */
static TD_DEVICE void end_slice(float4 *totals, bool first, bool last, float acc[M][NT][4])
{
#pragma unroll
    for (int i = 0; i < M * NT; i++) {
        float *c = acc[i / NT][i % NT];
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (!first) total = totals[i * THREADS + threadIdx.x];
        c[0] = total.x + c[0];
        c[1] = total.y + c[1];
        c[2] = total.z + c[2];
        c[3] = total.w + c[3];
    }
    if (last) return;
#pragma unroll
    for (int i = 0; i < M * NT; i++) {
        float *c = acc[i / NT][i % NT];
        totals[i * THREADS + threadIdx.x] = make_float4(c[0], c[1], c[2], c[3]);
        c[0] = c[1] = c[2] = c[3] = 0.0f;
    }
}

/* The finished tile, through shared memory, so that a warp writes a row's outputs side by side. */
template <int FORMAT>
static TD_DEVICE void store_tile(const td_product &p, int batch, int panel0, int row0, float acc[M][NT][4],
                                 float *shared)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < M * 4; i++) {
        int m = i / 4, o = g + i % 4 / 2 * 8, panel = min(panel0 + warp * M + m, p.n_panels - 1);
        const float *scales = (const float *)(p.w + batch * p.w_batch + (size_t)panel * p.panel_bytes);
        float scale = FORMAT == TD_W_FP8 ? scales[o] : 1.0f;
        float *to = shared + (2 * t + i % 2) * OUT_STRIDE + (warp * M + m) * TD_TILE_OUT + o;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            float y = acc[m][nt][i % 4];
            to[nt * 8 * OUT_STRIDE] = FORMAT == TD_W_FP8 ? y * scale : y;
        }
    }
    __syncthreads();
    int out = panel0 * TD_TILE_OUT + lane * 4;
    bool whole = out + 4 <= p.out && (p.y_stride | p.y_batch) % 4 == 0 &&
                 (p.y_act ? (uintptr_t)p.y_act % 8 == 0 : (uintptr_t)p.y_f32 % 16 == 0);
    for (int row = warp; row < ROWS && row0 + row < p.n_rows; row += WARPS) {
        float4 y = *(const float4 *)(shared + row * OUT_STRIDE + lane * 4);
        size_t to = batch * p.y_batch + (size_t)(row0 + row) * p.y_stride + out;
        if (whole && p.y_act) {
            *(uint2 *)(p.y_act + to) = make_uint2(td_pack_bf16(y.x, y.y), td_pack_bf16(y.z, y.w));
        } else if (whole) {
            *(float4 *)(p.y_f32 + to) = y;
        } else {
            float part[4] = { y.x, y.y, y.z, y.w };
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (out + i < p.out) td_product_store(p, batch, row0 + row, out + i, part[i]);
        }
    }
}

/* Rows fastest: the blocks of a moment share few weights, which then leave memory once. APART: a block has one slice,
 * of the one matrix there is, and leaves its chains as they are in the slice's part of y. */
template <int FORMAT, bool APART> static __global__ void __launch_bounds__(THREADS, 3) k_linear_many(td_product p)
{
    extern __shared__ __align__(16) unsigned char smem[];
    int batch = APART ? 0 : blockIdx.z, slice = APART ? blockIdx.z : 0;
    int first = p.groups * slice / p.slices, end = APART ? p.groups * (slice + 1) / p.slices : p.groups;
    int panel0 = blockIdx.y * (OUTS / TD_TILE_OUT), row0 = blockIdx.x * ROWS;
    weights<FORMAT> w;
    plan_weights<FORMAT>(p, batch, panel0, &w);
    w.at += first * td_group_bytes((td_format)FORMAT);
    load_weights<FORMAT>(&w);
    td_begin();
    copies c = plan_copies(p, batch, row0);
    c.x += first * TD_TILE_IN;
    c.n_in -= first * TD_TILE_IN;
    copy_stage(&c, smem);
    float acc[M][NT][4];
#pragma unroll
    for (int i = 0; i < M * NT * 4; i++) acc[i / (4 * NT)][i / 4 % NT][i % 4] = 0.0f;
    int piece = piece_at(threadIdx.x % 32 / 4, threadIdx.x % 4);
    asm volatile("" : "+r"(piece)); /* stays in a register: worked out again in every group otherwise */
    const uint4 *sums = p.sums + (size_t)blockIdx.x * NT * 32 + threadIdx.x % 32;
    int slice_end = p.groups * (slice + 1) / p.slices;
    int block_first = first, block_end = min(first + TD_BLOCK_GROUPS, slice_end);
    bool idle = APART && panel0 + (int)threadIdx.x / 32 * M >= p.n_panels; /* no output of the warp's is there */
    for (int group = first; group < end; group++) {
        td_copy_wait<0>();
        __syncthreads();
        if (group + 1 < end) copy_stage(&c, smem + (group - first + 1) % 2 * X_BYTES);
        if (idle) continue;
        uint32_t a[M][4][4], scales[M];
#pragma unroll
        for (int m = 0; m < M; m++) {
            scales[m] = td_scales_of(w.pair[m]);
#pragma unroll
            for (int step = 0; step < 4; step++) td_decode<FORMAT>(w.raw[m], step, a[m][step]);
        }
        if (group + 1 < end) load_weights<FORMAT>(&w);
        multiply<FORMAT>(a, scales, smem + (group - first) % 2 * X_BYTES, piece, acc);
        if (FORMAT == TD_W_Q4 && group + 1 == block_end) {
            int ahead = min(group + 2, end) - block_first; /* groups that w.at has walked since */
            add_offsets(w.at + w.pair_on - ahead * TD_Q4_GROUP_ALL, w.panel_on, block_end - block_first, sums, acc);
            sums += p.sums_tiles * 32;
            block_first = block_end;
        }
        if (!APART && group + 1 == slice_end) {
            end_slice((float4 *)(smem + 2 * X_BYTES), slice == 0, slice + 1 == p.slices, acc);
            slice++;
            slice_end = p.groups * (slice + 1) / p.slices;
        }
        if (FORMAT == TD_W_Q4) block_end = min(block_first + TD_BLOCK_GROUPS, slice_end);
    }
    if (APART) p.y_f32 += (size_t)slice * p.n_rows * p.y_stride;
    store_tile<FORMAT>(p, batch, panel0, row0, acc, (float *)smem);
}

/* The slices' chains in order, from +0 as in end_slice(). */
static __global__ void k_linear_add(td_product p, const float *shares)
{
    td_begin();
    size_t n = (size_t)p.n_rows * p.out, i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v[TD_SLICES_MAX], sum = 0.0f;
#pragma unroll
    for (int s = 0; s < TD_SLICES_MAX; s++) v[s] = s < p.slices ? shares[s * n + i] : 0.0f;
#pragma unroll
    for (int s = 0; s < TD_SLICES_MAX; s++)
        if (s < p.slices) sum += v[s];
    td_product_store(p, 0, (int)(i / p.out), (int)(i % p.out), sum);
}

static dim3 tiles(const td_product &p, int deep)
{
    return dim3(td_ceil_div((size_t)p.n_rows, ROWS), td_ceil_div((size_t)p.n_panels, OUTS / TD_TILE_OUT),
                (unsigned)deep);
}

template <int FORMAT> static void launch(const td_cuda_dev *dev, const td_product &p, int n_batch)
{
    td_launch_spread(dev, k_linear_many<FORMAT, false>, tiles(p, n_batch), THREADS, SHARED_BYTES, p);
}

void td_product_many(const td_cuda_dev *dev, td_format format, const td_product *p, int n_batch)
{
    switch (format) {
    case TD_W_Q4: launch<TD_W_Q4>(dev, *p, n_batch); break;
    case TD_W_FP8: launch<TD_W_FP8>(dev, *p, n_batch); break;
    default: launch<TD_W_BF16>(dev, *p, n_batch); break;
    }
}

bool td_product_apart(const td_cuda_dev *dev, td_format format, const td_product *p, float *shares, size_t shares_bytes)
{
    size_t n = (size_t)p->n_rows * (size_t)p->out;
    dim3 grid = tiles(*p, p->slices);
    if (format != TD_W_BF16 || p->slices == 1 || grid.x * grid.y > (unsigned)dev->n_sm ||
        n * (size_t)p->slices * sizeof(float) > shares_bytes)
        return false;
    td_product parts = *p;
    parts.y_act = NULL;
    parts.y_f32 = shares;
    parts.y_stride = (size_t)p->out;
    td_launch_spread(dev, k_linear_many<TD_W_BF16, true>, grid, THREADS, SHARED_BYTES, parts);
    td_launch(dev, k_linear_add, td_ceil_div(n, 256), 256, 0, *p, (const float *)shares);
    return true;
}

void td_product_sums(const td_cuda_dev *dev, const td_product *p, uint4 *sums)
{
    dim3 grid(td_ceil_div(p->sums_tiles, 8), (unsigned)td_blocks(p->groups));
    td_launch(dev, k_linear_sums, grid, 256, 0, *p, sums);
}

cudaError_t td_product_many_init(void)
{
    void (*const kernels[])(td_product) = { k_linear_many<TD_W_BF16, false>, k_linear_many<TD_W_BF16, true>,
                                            k_linear_many<TD_W_Q4, false>, k_linear_many<TD_W_FP8, false> };
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < 4 && error == cudaSuccess; i++)
        error = cudaFuncSetAttribute(kernels[i], cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    return error;
}
