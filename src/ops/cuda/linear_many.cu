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
    STAGE_BYTES = X_BYTES + ROWS * 4, /* a group of x and its sums */
    SHARED_BYTES = 2 * STAGE_BYTES + ROWS * OUTS * 4,
    OUT_STRIDE = OUTS + 4 /* floats; the finished tile, over stages and totals */
};
static_assert(ROWS * OUT_STRIDE * 4 <= SHARED_BYTES, "the finished tile");

/* q4: sums of every group of x, for all rows; a warp a group and eight rows. */
static __global__ void k_linear_sums(td_product p, float *sums, size_t sums_stride)
{
    td_begin();
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, group = blockIdx.y;
    int row0 = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * 8;
    if (row0 >= (int)sums_stride) return;
    uint32_t b[8];
    float sum0, sum1;
    td_load_x<false>(p.x + (size_t)min(row0 + g, p.n_rows - 1) * p.x_stride + 8 * t, group * TD_TILE_IN, p.in - 8 * t,
                     b);
    td_group_sums(b, &sum0, &sum1);
    if (g == 0) {
        sums[group * sums_stride + row0 + 2 * t] = sum0;
        sums[group * sums_stride + row0 + 2 * t + 1] = sum1;
    }
}

/* Rows of x lie 128 bytes apart; odd rows have their two halves of 64 bytes exchanged, which spreads a load of eight
 * lanes (two rows, four pieces) over all banks. */
static TD_DEVICE int piece_at(int row, int piece)
{
    return row * 128 + ((piece ^ (row & 1) * 4) * 16);
}

/* What a thread copies of every group: its piece of every sixteenth row, and, some threads, four sums. Both pointers
 * walk from group to group. Rows and inputs beyond the last are zeros. */
typedef struct copies {
    const td_bf16 *x;
    const float *sums;
    size_t rows_on;   /* values to the thread's next row */
    int n_rows, n_in; /* the thread's rows there are; inputs left from its piece on */
    int to;           /* bytes into the stage */
} copies;

static TD_DEVICE copies plan_copies(const td_product &p, int batch, int row0)
{
    int row = threadIdx.x / 8, piece = threadIdx.x % 8;
    copies c = { p.x + batch * p.x_batch + (size_t)(row0 + row) * p.x_stride + piece * 8,
                 p.sums + row0 + threadIdx.x * 4,
                 ROWS_A_COPY * p.x_stride,
                 (p.n_rows - row0 - row + ROWS_A_COPY - 1) / ROWS_A_COPY,
                 p.in - piece * 8,
                 piece_at(row, piece) };
    return c;
}

template <int FORMAT> static TD_DEVICE void copy_stage(copies *c, size_t sums_stride, unsigned char *to)
{
    int n = c->n_in > 0 ? c->n_rows : 0;
    const td_bf16 *from = c->x;
#pragma unroll
    for (int j = 0; j < ROWS / ROWS_A_COPY; j++, from += c->rows_on)
        td_copy_async(to + c->to + j * ROWS_A_COPY * 128, from, j < n);
    if (FORMAT == TD_W_Q4 && threadIdx.x < ROWS / 4) td_copy_async(to + X_BYTES + threadIdx.x * 16, c->sums, true);
    td_copy_commit();
    c->x += TD_TILE_IN;
    c->sums += sums_stride;
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

/* A group's steps for all rows. piece: where the lane's first piece of x lies; t: its place among four lanes. */
template <int FORMAT>
static TD_DEVICE void multiply(const uint32_t a[M][4][4], const uint2 pair[M], const unsigned char *x, int piece, int t,
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
        for (int n = 0; FORMAT == TD_W_Q4 && n < AHEAD; n++) {
            float2 sum = ((const float2 *)(x + X_BYTES))[(nt + n) * 4 + t];
#pragma unroll
            for (int m = 0; m < M; m++) td_fold_q4(acc[m][nt + n], dot[m][n], pair[m], sum.x, sum.y);
        }
    }
}

/* Ends a slice: its chains onto the totals, which start from +0. The last slice leaves them in acc, others zeros. */
static TD_DEVICE void end_slice(float4 *totals, bool first, bool last, float acc[M][NT][4])
{
#pragma unroll
    for (int i = 0; i < M * NT; i++) {
        float *c = acc[i / NT][i % NT];
        float4 total = first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : totals[i * THREADS + threadIdx.x];
        total = make_float4(total.x + c[0], total.y + c[1], total.z + c[2], total.w + c[3]);
        if (!last) totals[i * THREADS + threadIdx.x] = total;
        c[0] = last ? total.x : 0.0f;
        c[1] = last ? total.y : 0.0f;
        c[2] = last ? total.z : 0.0f;
        c[3] = last ? total.w : 0.0f;
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
    copy_stage<FORMAT>(&c, p.sums_stride, smem);
    float acc[M][NT][4];
#pragma unroll
    for (int i = 0; i < M * NT * 4; i++) acc[i / (4 * NT)][i / 4 % NT][i % 4] = 0.0f;
    int t = threadIdx.x % 4, piece = piece_at(threadIdx.x % 32 / 4, t);
    asm volatile("" : "+r"(t), "+r"(piece)); /* stays in registers: worked out again in every group otherwise */
    int slice_end = p.groups * (slice + 1) / p.slices;
    for (int group = first; group < end; group++) {
        td_copy_wait<0>();
        __syncthreads();
        if (group + 1 < end) copy_stage<FORMAT>(&c, p.sums_stride, smem + (group - first + 1) % 2 * STAGE_BYTES);
        uint32_t a[M][4][4];
        uint2 pair[M];
#pragma unroll
        for (int m = 0; m < M; m++) {
            pair[m] = w.pair[m];
#pragma unroll
            for (int step = 0; step < 4; step++) td_decode<FORMAT>(w.raw[m], step, a[m][step]);
        }
        if (group + 1 < end) load_weights<FORMAT>(&w);
        multiply<FORMAT>(a, pair, smem + (group - first) % 2 * STAGE_BYTES, piece, t, acc);
        if (APART || group + 1 < slice_end) continue;
        end_slice((float4 *)(smem + 2 * STAGE_BYTES), slice == 0, slice + 1 == p.slices, acc);
        slice++;
        slice_end = p.groups * (slice + 1) / p.slices;
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

void td_product_sums(const td_cuda_dev *dev, const td_product *p, float *sums)
{
    dim3 grid(td_ceil_div(p->sums_stride, 64), (unsigned)p->groups);
    td_launch(dev, k_linear_sums, grid, 256, 0, *p, sums, p->sums_stride);
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
