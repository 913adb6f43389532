/* y = W x on packed weights (weight.h has layout and order of sums). Two kernels with the same bits, chosen by the
 * number of rows:
 *   few   (up to 64 rows) a warp takes one slice of one panel for 8, 16, 32 or 64 rows, weights straight from memory
 *         into the tensor core; a block's slices are added in order through shared memory
 *   many  128 outputs x 128 rows a block, inputs walk through shared memory in groups; at the end of a slice its sums
 *         are added to the total
 * Decoding of q4 and fp8 gives exact bf16 numbers; scales are applied to fp32 sums. */
#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"
#include "ops/cuda/weight.h"

enum {
    FEW_ROWS = 64,
    WARPS = 8,
    MANY_OUT = 128,
    MANY_ROWS = 128,
    IN_MAX = 32768,
    ALIGNED_ROWS = 512 /* rows of a misaligned x that are copied at a time */
};

typedef struct product {
    const uint8_t *w;
    size_t w_batch, panel_bytes;
    int out, in, n_rows, n_panels, groups, slices;
    const td_bf16 *x;
    size_t x_stride, x_batch;
    td_bf16 *y_act;
    float *y_f32;
    size_t y_stride, y_batch;
    const float *sums; /* q4, many rows: [groups][sums_stride] of x */
    size_t sums_stride;
} product;

static TD_DEVICE void store(const product &p, int batch, int row, int out, float value)
{
    size_t at = (size_t)batch * p.y_batch + (size_t)row * p.y_stride + out;
    if (p.y_act)
        p.y_act[at] = td_to_bf16(value);
    else
        p.y_f32[at] = value;
}

/* One step's A operand of q4 from a lane's word, exact. */
static TD_DEVICE void decode_q4(uint32_t word, uint32_t a[4])
{
    const uint32_t magic = 0x43004300u; /* bf16 128: its last mantissa bit counts 1 */
    __nv_bfloat162 base = *(const __nv_bfloat162 *)&magic;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        uint32_t v = td_and_or(word >> 4 * r, 0x000f000fu, magic);
        __nv_bfloat162 q = __hsub2(*(__nv_bfloat162 *)&v, base);
        a[r] = *(uint32_t *)&q;
    }
}

/* One step's A operand of fp8 from two of a lane's words, exact. */
static TD_DEVICE void decode_fp8(uint32_t w0, uint32_t w1, uint32_t a[4])
{
    a[0] = td_e4m3_pair(w0);
    a[1] = td_e4m3_pair(w0 << 8);
    a[2] = td_e4m3_pair(w1);
    a[3] = td_e4m3_pair(w1 << 8);
}

/* 16-byte loads a lane makes for a group. */
template <int FORMAT> struct pieces {
    static const int N = FORMAT == TD_W_BF16 ? 4 : FORMAT == TD_W_FP8 ? 2 : 1;
};

template <int FORMAT> static TD_DEVICE void decode(const uint4 *raw, int step, uint32_t a[4])
{
    if (FORMAT == TD_W_BF16) {
        a[0] = raw[step].x;
        a[1] = raw[step].y;
        a[2] = raw[step].z;
        a[3] = raw[step].w;
    } else if (FORMAT == TD_W_FP8) {
        uint4 v = raw[step / 2];
        decode_fp8(step % 2 ? v.z : v.x, step % 2 ? v.w : v.y, a);
    } else {
        uint4 v = raw[0];
        decode_q4(step == 0 ? v.x : step == 1 ? v.y : step == 2 ? v.z : v.w, a);
    }
}

/* y = fma(s, dot, y); y = fma(b, sum, y) for outputs g (pair.x) and g + 8 (pair.y). */
static TD_DEVICE void fold_q4(float acc[4], const float dot[4], uint2 pair, float sum0, float sum1)
{
    float s0 = td_low_bf16(pair.x), b0 = td_high_bf16(pair.x), s1 = td_low_bf16(pair.y), b1 = td_high_bf16(pair.y);
    acc[0] = fmaf(b0, sum0, fmaf(s0, dot[0], acc[0]));
    acc[1] = fmaf(b0, sum1, fmaf(s0, dot[1], acc[1]));
    acc[2] = fmaf(b1, sum0, fmaf(s1, dot[2], acc[2]));
    acc[3] = fmaf(b1, sum1, fmaf(s1, dot[3], acc[3]));
}

/* Sums of a group of x for rows 2t, 2t + 1 of a B operand: the tensor core with ones for A. */
static TD_DEVICE void group_sums(const uint32_t b[8], float *sum0, float *sum1)
{
    const uint32_t ones[4] = { 0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u };
    float c[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
#pragma unroll
    for (int step = 0; step < 4; step++) td_mma_bf16(c, ones, b[2 * step], b[2 * step + 1]);
    *sum0 = c[0];
    *sum1 = c[1];
}

/* B operand of a group: two pieces of row x; b[2 step], b[2 step + 1]. Zeros beyond `in`, unless it fills all groups.
 */
template <bool FULL> static TD_DEVICE void load_x(const td_bf16 *x, int k, int in, uint32_t b[8])
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (FULL || k + 32 * half < in) v = *(const uint4 *)(x + k + 32 * half);
        b[4 * half] = v.x;
        b[4 * half + 1] = v.y;
        b[4 * half + 2] = v.z;
        b[4 * half + 3] = v.w;
    }
}

template <int FORMAT, int NT>
static TD_DEVICE void few_group(const uint4 *raw, uint2 pair, const uint32_t b[NT][8], float acc[NT][4])
{
    if constexpr (FORMAT != TD_W_Q4) {
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint32_t a[4];
            decode<FORMAT>(raw, step, a);
#pragma unroll
            for (int nt = 0; nt < NT; nt++) td_mma_bf16(acc[nt], a, b[nt][2 * step], b[nt][2 * step + 1]);
        }
    } else {
        float dot[NT][4];
#pragma unroll
        for (int nt = 0; nt < NT; nt++) dot[nt][0] = dot[nt][1] = dot[nt][2] = dot[nt][3] = 0.0f;
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint32_t a[4];
            decode<FORMAT>(raw, step, a);
#pragma unroll
            for (int nt = 0; nt < NT; nt++) td_mma_bf16(dot[nt], a, b[nt][2 * step], b[nt][2 * step + 1]);
        }
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            float sum0, sum1;
            group_sums(b[nt], &sum0, &sum1);
            fold_q4(acc[nt], dot[nt], pair, sum0, sum1);
        }
    }
}

template <int FORMAT> struct stage {
    static const int W = MANY_OUT / TD_TILE_OUT *
                         (FORMAT == TD_W_BF16  ? TD_BF16_GROUP
                          : FORMAT == TD_W_FP8 ? TD_FP8_GROUP
                                               : TD_Q4_GROUP_ALL);
    static const int X = MANY_ROWS * TD_TILE_IN * 2;
    static const int SUMS = FORMAT == TD_W_Q4 ? MANY_ROWS * (int)sizeof(float) : 0;
    static const int BYTES = W + X + SUMS;
    static const int COUNT = FORMAT == TD_W_BF16 ? 3 : 4; /* what fits into a GB10 block's 99 KiB */
};

/* Weights of UNROLL groups are in flight together. Rows beyond the last are computed from the last and not stored.
 * FULL_GROUPS: no group has inputs beyond `in`. WHOLE_SLICES: also, every slice is a multiple of UNROLL groups, and
 * exactly UNROLL with q4 (nothing walks, which saves registers). So no branch keeps the loads of x from going ahead of
 * the products before them; behind a branch each they were most of a block's time. */
enum { ANY_SHAPE, FULL_GROUPS, WHOLE_SLICES };

template <int FORMAT, int NT, int UNROLL, int SHAPE>
static __global__ void __launch_bounds__(32 * WARPS, FORMAT == TD_W_FP8 && NT == 1 ? 3 : 2) k_linear_few(product p)
{
    const int N = pieces<FORMAT>::N;
    const bool WHOLE = SHAPE == WHOLE_SLICES;
    const bool SHARED_PAIRS =
        FORMAT == TD_W_Q4 && WHOLE && UNROLL % 4 == 0; /* four lanes need the same: a group each */
    __shared__ float red[WARPS][8 * NT][TD_TILE_OUT + 1];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int per_block = WARPS / p.slices, slice = warp % p.slices, panel = blockIdx.x * per_block + warp / p.slices;
    int row0 = blockIdx.y * 8 * NT, batch = blockIdx.z;
    int first = p.groups * slice / p.slices, end = p.groups * (slice + 1) / p.slices;
    const int GB = stage<FORMAT>::W / (MANY_OUT / TD_TILE_OUT); /* bytes of a group */
    const uint8_t *w = p.w + batch * p.w_batch + (size_t)panel * p.panel_bytes + (size_t)first * GB +
                       (FORMAT == TD_W_FP8 ? TD_FP8_HEAD : 0);
    const td_bf16 *x[NT];
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
        x[nt] = p.x + batch * p.x_batch + (size_t)min(row0 + 8 * nt + g, p.n_rows - 1) * p.x_stride + 8 * t;
    float acc[NT][4];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) acc[nt][0] = acc[nt][1] = acc[nt][2] = acc[nt][3] = 0.0f;
    for (int group = first; panel < p.n_panels && group < end; group += UNROLL, w += UNROLL * GB) {
        uint4 raw[UNROLL][N];
        uint2 pair[SHARED_PAIRS ? UNROLL / 4 : UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            if (!WHOLE && group + u >= end) continue;
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
                load_x<SHAPE != ANY_SHAPE>(x[nt], (group + u) * TD_TILE_IN, p.in - 8 * t, b[nt]);
            uint2 own = pair[SHARED_PAIRS ? u / 4 : u];
            if (SHARED_PAIRS) {
                own.x = __shfl_sync(0xffffffffu, own.x, g * 4 + u % 4);
                own.y = __shfl_sync(0xffffffffu, own.y, g * 4 + u % 4);
            }
            few_group<FORMAT, NT>(raw[u], own, b, acc);
        }
        if (WHOLE && FORMAT == TD_W_Q4) break;
    }
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
        store(p, batch, row0 + row, out, sum);
    }
}

/* Group sums of all rows of x for k_linear_many with q4; a warp a group and 8 rows. */
static __global__ void k_linear_sums(product p, float *sums, size_t sums_stride)
{
    td_begin();
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, group = blockIdx.y;
    int row0 = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * 8;
    if (row0 >= (int)sums_stride) return;
    uint32_t b[8];
    float sum0, sum1;
    load_x<false>(p.x + (size_t)min(row0 + g, p.n_rows - 1) * p.x_stride + 8 * t, group * TD_TILE_IN, p.in - 8 * t, b);
    group_sums(b, &sum0, &sum1);
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

/* What a thread copies into every stage: fixed places, sources that advance by a group. */
template <int FORMAT> struct copies {
    static const int W = (stage<FORMAT>::W / 16 + 32 * WARPS - 1) / (32 * WARPS),
                     X = stage<FORMAT>::X / 16 / (32 * WARPS);
    const uint8_t *w[W];
    const td_bf16 *x[X];
    uint32_t valid; /* bits: w, then x; a w that is not there at all has no bit in `some` */
    uint32_t some;
};

template <int FORMAT>
static TD_DEVICE void plan_copies(const product &p, int batch, int panel0, int row0, copies<FORMAT> *c)
{
    const int GB = stage<FORMAT>::W / (MANY_OUT / TD_TILE_OUT);
    const uint8_t *w = p.w + batch * p.w_batch + (FORMAT == TD_W_FP8 ? TD_FP8_HEAD : 0);
    const td_bf16 *x = p.x + batch * p.x_batch;
    c->valid = c->some = 0;
#pragma unroll
    for (int j = 0; j < copies<FORMAT>::W; j++) {
        int i = threadIdx.x + j * 32 * WARPS, panel = panel0 + i / (GB / 16);
        bool some = i < stage<FORMAT>::W / 16, valid = some && panel < p.n_panels;
        c->w[j] = w + (valid ? (size_t)panel * p.panel_bytes + i % (GB / 16) * 16 : 0);
        c->valid |= (valid ? 1u : 0u) << j;
        c->some |= (some ? 1u : 0u) << j;
    }
#pragma unroll
    for (int j = 0; j < copies<FORMAT>::X; j++) {
        int row = row0 + threadIdx.x / 8 + j * 4 * WARPS;
        bool valid = row < p.n_rows;
        c->x[j] = x + (valid ? (size_t)row * p.x_stride : 0) + threadIdx.x % 8 * 8;
        c->valid |= (valid ? 1u : 0u) << (copies<FORMAT>::W + j);
    }
}

template <int FORMAT>
static TD_DEVICE void load_stage(const product &p, const copies<FORMAT> &c, int group, int row0, unsigned char *to)
{
    const int GB = stage<FORMAT>::W / (MANY_OUT / TD_TILE_OUT);
    bool inside = group * TD_TILE_IN + (int)threadIdx.x % 8 * 8 < p.in;
#pragma unroll
    for (int j = 0; j < copies<FORMAT>::W; j++)
        if (c.some >> j & 1u)
            td_copy_async(to + (threadIdx.x + j * 32 * WARPS) * 16,
                          c.w[j] + (c.valid >> j & 1u ? (size_t)group * GB : 0), c.valid >> j & 1u);
    unsigned char *x = to + stage<FORMAT>::W + piece_at(threadIdx.x / 8, threadIdx.x % 8);
#pragma unroll
    for (int j = 0; j < copies<FORMAT>::X; j++) { /* 32 rows on: the same place in a row, as 32 is even */
        bool valid = inside && (c.valid >> (copies<FORMAT>::W + j) & 1u);
        td_copy_async(x + j * 4 * WARPS * 128, c.x[j] + (valid ? group * TD_TILE_IN : 0), valid);
    }
    if ((int)threadIdx.x < stage<FORMAT>::SUMS / 16) /* there are sums of rows up to a multiple of MANY_ROWS */
        td_copy_async(to + stage<FORMAT>::W + stage<FORMAT>::X + threadIdx.x * 16,
                      p.sums + group * p.sums_stride + row0 + threadIdx.x * 4, true);
}

/* A warp: 2 panels x 64 rows. */
template <int FORMAT> static TD_DEVICE void many_group(const unsigned char *smem, float acc[2][8][4])
{
    const int GB = stage<FORMAT>::W / (MANY_OUT / TD_TILE_OUT), N = pieces<FORMAT>::N;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const unsigned char *w = smem + (warp % 4) * 2 * GB, *x = smem + stage<FORMAT>::W;
    uint32_t a[2][4][4];
    uint2 pair[2];
#pragma unroll
    for (int m = 0; m < 2; m++) {
        uint4 raw[N];
        if (FORMAT == TD_W_Q4) pair[m] = ((const uint2 *)(w + m * GB))[g];
#pragma unroll
        for (int i = 0; i < N; i++)
            raw[i] = *(const uint4 *)(w + m * GB + (FORMAT == TD_W_Q4 ? TD_Q4_SCALES : 0) + i * 512 + lane * 16);
#pragma unroll
        for (int step = 0; step < 4; step++) decode<FORMAT>(raw, step, a[m][step]);
    }
#pragma unroll
    for (int nt = 0; nt < 8; nt++) {
        int row = warp / 4 * 64 + nt * 8;
        float dot[2][4] = { { 0.0f, 0.0f, 0.0f, 0.0f }, { 0.0f, 0.0f, 0.0f, 0.0f } };
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 b = *(const uint4 *)(x + piece_at(row + g, 4 * half + t));
#pragma unroll
            for (int m = 0; m < 2; m++) {
                float *c = FORMAT == TD_W_Q4 ? dot[m] : acc[m][nt];
                td_mma_bf16(c, a[m][2 * half], b.x, b.y);
                td_mma_bf16(c, a[m][2 * half + 1], b.z, b.w);
            }
        }
        if (FORMAT == TD_W_Q4) {
            float2 sum = ((const float2 *)(x + stage<FORMAT>::X))[row / 2 + t];
#pragma unroll
            for (int m = 0; m < 2; m++) fold_q4(acc[m][nt], dot[m], pair[m], sum.x, sum.y);
        }
    }
}

template <int FORMAT> static __global__ void __launch_bounds__(32 * WARPS) k_linear_many(product p)
{
    const int STAGES = stage<FORMAT>::COUNT;
    td_begin();
    extern __shared__ __align__(16) unsigned char smem[];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int panel0 = blockIdx.x * (MANY_OUT / TD_TILE_OUT), row0 = blockIdx.y * MANY_ROWS, batch = blockIdx.z;
    float acc[2][8][4], total[2][8][4];
    copies<FORMAT> c;
    plan_copies<FORMAT>(p, batch, panel0, row0, &c);
#pragma unroll
    for (int i = 0; i < 64; i++) acc[i / 32][i / 4 % 8][i % 4] = total[i / 32][i / 4 % 8][i % 4] = 0.0f;
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < p.groups) load_stage<FORMAT>(p, c, s, row0, smem + s * stage<FORMAT>::BYTES);
        td_copy_commit();
    }
    int slice = 0;
    for (int group = 0; group < p.groups; group++) {
        td_copy_wait<STAGES - 2>();
        __syncthreads();
        int ahead = group + STAGES - 1;
        if (ahead < p.groups) load_stage<FORMAT>(p, c, ahead, row0, smem + ahead % STAGES * stage<FORMAT>::BYTES);
        td_copy_commit();
        many_group<FORMAT>(smem + group % STAGES * stage<FORMAT>::BYTES, acc);
        if (group + 1 < p.groups * (slice + 1) / p.slices) continue;
        slice++;
#pragma unroll
        for (int i = 0; i < 64; i++) {
            total[i / 32][i / 4 % 8][i % 4] += acc[i / 32][i / 4 % 8][i % 4];
            acc[i / 32][i / 4 % 8][i % 4] = 0.0f;
        }
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
        int panel = panel0 + warp % 4 * 2 + m;
        const float *scales = (const float *)(p.w + batch * p.w_batch + (size_t)panel * p.panel_bytes);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int o = g + i / 2 * 8, out = panel * TD_TILE_OUT + o;
            if (out >= p.out) continue;
            float scale = FORMAT == TD_W_FP8 ? scales[o] : 1.0f;
#pragma unroll
            for (int nt = 0; nt < 8; nt++) {
                int row = row0 + warp / 4 * 64 + nt * 8 + 2 * t + i % 2;
                if (row < p.n_rows)
                    store(p, batch, row, out, FORMAT == TD_W_FP8 ? total[m][nt][i] * scale : total[m][nt][i]);
            }
        }
    }
}

/* Rows that are not 16-byte aligned, made so. */
static __global__ void k_linear_align(int in, const td_bf16 *x, size_t x_stride, td_bf16 *to)
{
    td_begin();
    for (int i = threadIdx.x; i < in; i += blockDim.x) to[(size_t)blockIdx.x * in + i] = x[blockIdx.x * x_stride + i];
}

cudaError_t td_cuda_linear_init(void)
{
    cudaError_t error = cudaFuncSetAttribute(k_linear_many<TD_W_BF16>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             stage<TD_W_BF16>::COUNT * stage<TD_W_BF16>::BYTES);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(k_linear_many<TD_W_Q4>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     stage<TD_W_Q4>::COUNT * stage<TD_W_Q4>::BYTES);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(k_linear_many<TD_W_FP8>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     stage<TD_W_FP8>::COUNT * stage<TD_W_FP8>::BYTES);
    return error;
}

static size_t padded_rows(size_t rows)
{
    return (rows + MANY_ROWS - 1) / MANY_ROWS * MANY_ROWS;
}

static size_t sums_bytes(const td_dev_limits *limits)
{
    return padded_rows((size_t)limits->rows) * (IN_MAX / TD_TILE_IN) * sizeof(float);
}

size_t td_cuda_product_bytes(const td_dev_limits *limits)
{
    return sums_bytes(limits) + (size_t)ALIGNED_ROWS * IN_MAX * sizeof(td_bf16) + TD_COUNTERS_ALL * sizeof(uint32_t);
}

/* slice_groups: of every slice, 0 when they differ or the last group is not full. */
template <int FORMAT, int NT, int UNROLL, int MOST>
static void launch_few(const td_cuda_dev *dev, const product &p, dim3 grid, int slice_groups)
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

template <int FORMAT> static void launch(const td_cuda_dev *dev, const product &p, int n_batch)
{
    int per_block = WARPS / p.slices;
    if (p.n_rows > FEW_ROWS) {
        dim3 grid(td_ceil_div((size_t)p.n_panels, MANY_OUT / TD_TILE_OUT), td_ceil_div((size_t)p.n_rows, MANY_ROWS),
                  (unsigned)n_batch);
        td_launch_spread(dev, k_linear_many<FORMAT>, grid, 32 * WARPS, stage<FORMAT>::COUNT * stage<FORMAT>::BYTES, p);
        return;
    }
    const int U = FORMAT == TD_W_Q4 ? 8 : 4;
    int slice_groups = p.in % TD_TILE_IN == 0 && p.groups % p.slices == 0 ? p.groups / p.slices : 0;
    dim3 grid(td_ceil_div((size_t)p.n_panels, (size_t)per_block), td_ceil_div((size_t)p.n_rows, 32), (unsigned)n_batch);
    if (p.n_rows <= 8)
        launch_few<FORMAT, 1, U, U>(dev, p, grid, slice_groups);
    else if (p.n_rows <= 16)
        launch_few<FORMAT, 2, U / 2, U / 2>(dev, p, grid, slice_groups);
    else
        launch_few<FORMAT, 4, U / 4, U / 4>(dev, p, grid, slice_groups);
}

static td_status run(td_cuda_dev *dev, td_format format, product *p, int n_batch)
{
    if (format == TD_W_Q4 && p->n_rows > FEW_ROWS) {
        p->sums_stride = padded_rows((size_t)p->n_rows);
        p->sums = (const float *)dev->scratch;
        if (n_batch != 1 || p->sums_stride * (size_t)p->groups * sizeof(float) > sums_bytes(&dev->limits))
            return TD_EINVAL;
        dim3 grid(td_ceil_div(p->sums_stride, 8 * WARPS), (unsigned)p->groups);
        td_launch(dev, k_linear_sums, grid, 32 * WARPS, 0, *p, (float *)dev->scratch, p->sums_stride);
    }
    switch (format) {
    case TD_W_Q4: launch<TD_W_Q4>(dev, *p, n_batch); break;
    case TD_W_FP8: launch<TD_W_FP8>(dev, *p, n_batch); break;
    default: launch<TD_W_BF16>(dev, *p, n_batch); break;
    }
    return td_cuda_launched(dev, "linear");
}

/* x whose rows do not start at multiples of 16 bytes goes through an aligned copy, a part of the rows at a time. */
static td_status run_copied(td_cuda_dev *dev, td_format format, product *p)
{
    td_bf16 *copy = (td_bf16 *)(dev->scratch + sums_bytes(&dev->limits));
    product part = *p;
    td_status status = TD_OK;
    for (int r = 0; r < p->n_rows && status == TD_OK; r += ALIGNED_ROWS) {
        part.n_rows = p->n_rows - r < ALIGNED_ROWS ? p->n_rows - r : ALIGNED_ROWS;
        part.x = copy;
        part.x_stride = (size_t)p->in;
        part.y_act = p->y_act ? p->y_act + (size_t)r * p->y_stride : NULL;
        part.y_f32 = p->y_f32 ? p->y_f32 + (size_t)r * p->y_stride : NULL;
        td_launch(dev, k_linear_align, (unsigned)part.n_rows, 128, 0, p->in, p->x + (size_t)r * p->x_stride,
                  p->x_stride, copy);
        status = run(dev, format, &part, 1);
    }
    return status;
}

td_status td_cuda_product(td_cuda_dev *dev, const td_cuda_product_args *a)
{
    product p = {
        (const uint8_t *)a->w, a->w_batch_bytes, td_gpu_panel_bytes(a->format, a->in), a->out, a->in, a->n_rows
    };
    p.n_panels = (int)td_ceil_div((size_t)a->out, TD_TILE_OUT);
    p.groups = td_groups(a->in);
    p.slices = td_slices(p.groups);
    p.x = a->x;
    p.x_stride = a->x_stride;
    p.x_batch = a->x_batch;
    p.y_act = a->y_act;
    p.y_f32 = a->y_f32;
    p.y_stride = a->y_stride;
    p.y_batch = a->y_batch;
    if (a->in > IN_MAX || a->n_rows > dev->limits.rows) return TD_EINVAL;
    bool aligned = (((uintptr_t)a->x | a->x_stride * sizeof(td_bf16) | a->x_batch * sizeof(td_bf16)) & 15) == 0;
    if (!aligned && a->n_batch != 1) return TD_EINVAL;
    return aligned ? run(dev, a->format, &p, a->n_batch) : run_copied(dev, a->format, &p);
}

td_status td_cuda_linear(td_dev *base, const td_linear_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    if (a->n_rows < 0 || !a->w || a->w->in < 16 || a->w->in % 16 || a->w->out < 1 || !a->y_act == !a->y_f32 ||
        a->x_stride < (size_t)a->w->in || a->y_stride < (size_t)a->w->out)
        return TD_EINVAL;
    if (!a->n_rows) return TD_OK;
    td_cuda_product_args p = { a->w->format,          a->w->data,  0, a->w->out,           a->w->in, a->n_rows,   1,
                               (const td_bf16 *)a->x, a->x_stride, 0, (td_bf16 *)a->y_act, a->y_f32, a->y_stride, 0 };
    return td_cuda_product(dev, &p);
}
