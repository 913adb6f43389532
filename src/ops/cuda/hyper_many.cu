/* Hyper-connections of more than eight rows: the new streams of a slice and its share of the mixes. A block has one
 * slice of some rows, its weights as operands in shared memory; a warp has sixteen rows at a time and nothing to do
 * with the others. A lane makes the streams of eight channels of two rows, which then are its part of the operands as
 * they are. Nothing is asked for ahead: what hides memory are the other warps. */
#include "ops/cuda/hyper.h"

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    BLOCKS = 3, /* of a multiprocessor */
    ROWS = 16,
    GATES = S + S * S,
    WAVES = 2, /* of blocks: fewer would fill a small chip unevenly, more would load weights more often */
    STEPS = CHUNKS * S
};

/* In the order of a lane's 18 words of a step: four pieces of 16 bytes, one of eight. */
typedef struct shared {
    uint4 most[STEPS][4][32];
    uint2 rest[STEPS][32];
    float gates[WARPS][ROWS][GATES];
} shared;

/* What a lane has loaded: of rows g and g + 8 eight channels. */
typedef struct raw_rows {
    uint4 x[2][S];
    float4 part[2][TD_SHARDS][2];
} raw_rows;

static TD_DEVICE void store_weights(const td_hyper_call &a, int channel0, shared *to)
{
    int lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < STEPS; i += WARPS) {
        float4 raw[MIX_TILES];
        td_mix_step w;
        td_mix_load(a, channel0 + td_mix_channel(i / S, lane % 4), i % S, raw);
        td_mix_split(raw, &w);
        const uint32_t *words = w.b[0][0];
#pragma unroll
        for (int j = 0; j < 4; j++)
            to->most[i][j][lane] = make_uint4(words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]);
        to->rest[i][lane] = make_uint2(words[16], words[17]);
    }
}

static TD_DEVICE void load_weights(const shared &from, int step, td_mix_step *w)
{
    int lane = threadIdx.x % 32;
    uint32_t *words = w->b[0][0];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint4 v = from.most[step][j][lane];
        words[4 * j] = v.x;
        words[4 * j + 1] = v.y;
        words[4 * j + 2] = v.z;
        words[4 * j + 3] = v.w;
    }
    uint2 v = from.rest[step][lane];
    words[16] = v.x;
    words[17] = v.y;
}

/* Rows beyond the last are the last: nothing of theirs is stored. Channels beyond the last (!there) are zeros. */
static TD_DEVICE void load_rows(const td_hyper_call &a, int row, int end, int channel, bool there, raw_rows *raw)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        size_t of = (size_t)min(row + 8 * i, end - 1) * a.dim;
        const td_bf16 *x = a.x + of * S + channel;
#pragma unroll
        for (int s = 0; s < S; s++) raw->x[i][s] = there ? *(const uint4 *)(x + s * a.dim) : make_uint4(0, 0, 0, 0);
        if (!a.partials) continue;
#pragma unroll
        for (int j = 0; j < 2 * TD_SHARDS; j++) {
            const float *part = a.partials + (size_t)(j / 2) * a.n_rows * a.dim + of + channel + j % 2 * 4;
            raw->part[i][j / 2][j % 2] = there ? __ldcs((const float4 *)part) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
}

/* A warp: its rows' post and C. */
static TD_DEVICE void copy_gates(const td_hyper_call &a, int row0, int end, float (*gates)[GATES])
{
    __syncwarp();
#pragma unroll
    for (int i = threadIdx.x % 32; i < ROWS * GATES / 4; i += 32) {
        int piece = i % (GATES / 4), row = row0 + i / (GATES / 4);
        td_copy_async(gates[i / (GATES / 4)] + 4 * piece,
                      piece ? a.comb + (size_t)row * S * S + 4 * (piece - 1) : a.post + (size_t)row * S, row < end);
    }
    td_copy_commit();
}

/* X_k = act( post_k b + (((C_0k X_0 + C_1k X_1) + C_2k X_2) + C_3k X_3) ) of two channels, in place. */
static TD_DEVICE void leave(const float gates[GATES], float p0, float p1, uint32_t *x0, uint32_t *x1, uint32_t *x2,
                            uint32_t *x3)
{
    uint32_t b = td_pack_bf16(p0, p1), *x[S] = { x0, x1, x2, x3 };
    float v[S][2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float in[S];
#pragma unroll
        for (int s = 0; s < S; s++) in[s] = i ? td_high_bf16(*x[s]) : td_low_bf16(*x[s]);
#pragma unroll
        for (int k = 0; k < S; k++)
            v[k][i] = gates[k] * (i ? td_high_bf16(b) : td_low_bf16(b)) +
                      (((gates[S + k] * in[0] + gates[2 * S + k] * in[1]) + gates[3 * S + k] * in[2]) +
                       gates[4 * S + k] * in[3]);
    }
#pragma unroll
    for (int k = 0; k < S; k++) *x[k] = td_pack_bf16(v[k][0], v[k][1]);
}

/* 16 bytes in one store: left to itself, the compiler makes several of them, which saves it moves. */
static TD_DEVICE void store16(td_bf16 *to, uint4 v)
{
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

/* The new streams of one of the lane's rows, in place and, where `store`, into memory. */
static TD_DEVICE void make_row(const td_hyper_call &a, const float *gates_of, const float4 (*part)[2], bool store,
                               td_bf16 *to, uint4 x[S])
{
    float gates[GATES];
#pragma unroll
    for (int j = 0; j < GATES / 4; j++) *(float4 *)(gates + 4 * j) = *(const float4 *)(gates_of + 4 * j);
    leave(gates, part[0][0].x + part[1][0].x, part[0][0].y + part[1][0].y, &x[0].x, &x[1].x, &x[2].x, &x[3].x);
    leave(gates, part[0][0].z + part[1][0].z, part[0][0].w + part[1][0].w, &x[0].y, &x[1].y, &x[2].y, &x[3].y);
    leave(gates, part[0][1].x + part[1][1].x, part[0][1].y + part[1][1].y, &x[0].z, &x[1].z, &x[2].z, &x[3].z);
    leave(gates, part[0][1].z + part[1][1].z, part[0][1].w + part[1][1].w, &x[0].w, &x[1].w, &x[2].w, &x[3].w);
    if (!store) return;
#pragma unroll
    for (int s = 0; s < S; s++) store16(to + s * a.dim, x[s]);
}

/* A slice's sums: of the lane's elements, the chunks so far. */
typedef struct slice_sums {
    float mixes[MIX_TILES][4], squares[2];
} slice_sums;

static TD_DEVICE void mix_chunk(const shared &from, int chunk, const uint4 x[2][S], slice_sums *sums)
{
    td_mix_sums of;
    td_mix_clear(&of);
#pragma unroll
    for (int s = 0; s < S; s++) {
        td_mix_step w;
        load_weights(from, chunk * S + s, &w);
        bool high = chunk % 2;
        uint32_t a[4] = { high ? x[0][s].z : x[0][s].x, high ? x[1][s].z : x[1][s].x, high ? x[0][s].w : x[0][s].y,
                          high ? x[1][s].w : x[1][s].y };
        td_mix_add<false>(w, a, &of);
    }
#pragma unroll
    for (int i = 0; i < MIX_TILES * 4; i++) {
        float sum = td_mix_sum(of, i / 4, i % 4);
        sums->mixes[i / 4][i % 4] = chunk ? sums->mixes[i / 4][i % 4] + sum : sum;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = td_mix_square(of, half);
        sums->squares[half] = chunk ? sums->squares[half] + sum : sum;
    }
}

static TD_DEVICE void store_sums(const td_hyper_call &a, int row, int end, int slice, const slice_sums &sums)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        size_t at = (size_t)(row + 8 * half) * gridDim.x + slice;
        if (row + 8 * half >= end) continue;
#pragma unroll
        for (int j = 0; j < MIX_TILES; j++)
            *(float2 *)(a.mixes + at * MIXES + 8 * j + 2 * t) =
                make_float2(sums.mixes[j][2 * half], sums.mixes[j][2 * half + 1]);
        if (t == g / 2) a.squares[at] = sums.squares[half];
    }
}

static __global__ void __launch_bounds__(THREADS, BLOCKS) k_hyper_slices_many(td_hyper_call a, int rows_a_block)
{
    __shared__ __align__(16) shared own;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slice = blockIdx.x, channel = slice * SLICE + lane % 4 * 8;
    int first = blockIdx.y * rows_a_block, end = min(first + rows_a_block, a.n_rows);
    store_weights(a, slice * SLICE, &own);
    td_begin();
    __syncthreads();
    for (int r0 = first + warp * ROWS; r0 < end; r0 += THREADS / 32 * ROWS) {
        int row = r0 + lane / 4;
        slice_sums sums;
        if (a.partials) copy_gates(a, r0, end, own.gates[warp]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int c = channel + 32 * half;
            raw_rows raw;
            load_rows(a, row, end, c, c < a.dim, &raw);
            if (a.partials) {
                td_copy_wait<0>();
                __syncwarp();
#pragma unroll
                for (int i = 0; i < 2; i++)
                    make_row(a, own.gates[warp][lane / 4 + 8 * i], raw.part[i], row + 8 * i < end && c < a.dim,
                             a.x + (size_t)(row + 8 * i) * S * a.dim + c, raw.x[i]);
            }
            if (!a.fn) continue;
            mix_chunk(own, 2 * half, raw.x, &sums);
            mix_chunk(own, 2 * half + 1, raw.x, &sums);
        }
        if (a.fn) store_sums(a, row, end, slice, sums);
    }
}

void td_hyper_slices_many(const td_cuda_dev *dev, const td_hyper_call *call, size_t slices)
{
    size_t n = (size_t)WAVES * BLOCKS * (size_t)dev->n_sm / slices; /* blocks of a slice */
    unsigned rows = td_ceil_div(td_ceil_div((size_t)call->n_rows, n ? n : 1), ROWS) * ROWS;
    td_launch(dev, k_hyper_slices_many, dim3((unsigned)slices, td_ceil_div((size_t)call->n_rows, rows)), THREADS, 0,
              *call, (int)rows);
}
