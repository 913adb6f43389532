/* Prompts through the chunked form of KDA (kda_chunk.h). Three kernels:
 *   k_kda_chunk_prepare  a block a chunk and head, all in parallel: kda_prepare.cu
 *   k_kda_chunk_scan     chunks in order: two warps take 16 value channels of a head, each holds half their state
 *   k_kda_chunk_finish   a warp a row and head: gated norm
 * In the scan everything is transposed, value channels are the rows of the products: a result then lies in a lane's
 * registers as the next product wants its A operand. The two warps add their sums over 64 key channels through shared
 * memory, once a chunk; the B operands, which all share, stream through it. One warp for both halves waits for the
 * tensor core's latency; four for quarters have twice the instructions; wider blocks leave multiprocessors idle.
 * State and u are scaled by a power of two a value channel before they are cut into fp16 parts. The state itself stays
 * fp32 and outside the tensor core, whose sums are cut off, not rounded: over thousands of chunks that would be a drift.
 * Row i of o depends on rows <= i and on the state before the chunk; u's scale is that of the whole chunk, but only the
 * state after the chunk sees it. Rows beyond the end of a chunk have zeros and decay 1. So bits depend neither on rows
 * that follow nor on how a prompt was cut into windows. */
#include "ops/cuda/kda_chunk.h"

enum { D = TD_KDA_D, C = TD_CHUNK, THREADS = 256, WARPS = THREADS / 32 };
enum {
    PAIRS = 2, /* of warps a block: 32 value channels */
    SCAN_THREADS = 64 * PAIRS,
    HALF = D / 2,
    READS = HALF / 16,            /* stages of W and Q: 16 key channels of either half */
    STAGES = TD_CHUNK_STAGES / 2, /* then of the keys that are written: 32 channels of either half */
    RING = 4,
    STAGE16 = sizeof(td_kda_stage) / 16
};

typedef struct scan_block {
    uint4 ring[RING][2][STAGE16]; /* stages of the two halves */
    float4 sums[2 * PAIRS][C / 8 + C / 16][32];
} scan_block;

static TD_DEVICE void ask_stage(scan_block *b, int place, const td_kda_chunk *h, int stage)
{
    enum { TILES16 = TD_CHUNK_TILES * 32 };
    int first = stage < READS ? stage : READS + stage, step = stage < READS ? READS : STAGES - READS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint4 *to = &b->ring[place][half][threadIdx.x];
        const uint4 *from = (const uint4 *)&h->stage[first + half * step] + threadIdx.x;
#pragma unroll
        for (int i = 0; i < TILES16; i += SCAN_THREADS) td_copy_async(to + i, from + i, true);
        if (stage < READS && threadIdx.x < STAGE16 - TILES16) td_copy_async(to + TILES16, from + TILES16, true);
    }
}

/* The half's next stage. It is in shared memory now, and the place of the one before it is free for the one RING - 1
 * ahead, which may be the next chunk's. turn: places of the ring, counted up. */
static TD_DEVICE const td_kda_stage *next_stage(scan_block *b, const td_kda_chunk *h, const td_kda_chunk *after,
                                                int stage, int *turn)
{
    td_copy_wait<RING - 2>();
    __syncthreads();
    int ahead = stage + RING - 1, here = *turn, free = here == 0 ? RING - 1 : here - 1;
    if (ahead < STAGES)
        ask_stage(b, free, h, ahead);
    else if (after)
        ask_stage(b, free, after, ahead - STAGES);
    td_copy_commit();
    *turn = here == RING - 1 ? 0 : here + 1;
    return (const td_kda_stage *)b->ring[here][threadIdx.x / 32 % 2];
}

/* Scales of the lane's two value channels, of which it has the maxima over its own part of the row: the channel's
 * largest value comes to lie in 2^14 .. 2^15. inverse also takes 2^bits out. */
static TD_DEVICE void scales(float most[2], float scale[2], float inverse[2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        most[i] = fmaxf(most[i], __shfl_xor_sync(0xffffffffu, most[i], 1));
        most[i] = fmaxf(most[i], __shfl_xor_sync(0xffffffffu, most[i], 2));
        int exponent = max((int)(__float_as_uint(most[i]) >> 23), 48);
        scale[i] = __uint_as_float((uint32_t)(127 + 14 + 127 - exponent) << 23);
        inverse[i] = __uint_as_float((uint32_t)(exponent - 14 - TD_CHUNK_KEY_BITS) << 23);
    }
}

/* Tiles x0, x1 (8 columns each of C) as the A operand of 16 columns. */
static TD_DEVICE void to_operand(const float x0[4], const float x1[4], const float scale[2], uint32_t hi[4],
                                 uint32_t lo[4])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        td_split_f16(x0[2 * i] * scale[i], x0[2 * i + 1] * scale[i], &hi[i], &lo[i]);
        td_split_f16(x1[2 * i] * scale[i], x1[2 * i + 1] * scale[i], &hi[2 + i], &lo[2 + i]);
    }
}

/* Value i of tile n of a lane's part of a head's state: [16 value channels][64 key channels], tile n has 8 of these. */
static TD_DEVICE float *state_value(float *state, int n, int i)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    return state + (8 * n + 2 * t + i % 2) * D + g + i / 2 * 8;
}

static TD_DEVICE void largest(const float x[4], float most[2])
{
#pragma unroll
    for (int i = 0; i < 4; i++) most[i / 2] = fmaxf(most[i / 2], fabsf(x[i]));
}

/* acc = 2^scales (W M, then Q M) over the half's key channels; m takes the decay. */
static TD_DEVICE void read_state(float m[HALF / 8][4], const float scale[2], const td_kda_stage *stage, int s,
                                 float acc[2 * C / 8][4])
{
    int lane = threadIdx.x % 32;
    uint32_t hi[4], lo[4];
    to_operand(m[2 * s], m[2 * s + 1], scale, hi, lo);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float2 decay = *(const float2 *)&stage->decay[8 * i + 2 * (lane % 4)];
        float *x = m[2 * s + i];
        x[0] *= decay.x, x[1] *= decay.y, x[2] *= decay.x, x[3] *= decay.y;
    }
    td_mma_split<8>(acc, hi, lo, &stage->tile[0][lane], 32);
    td_mma_split<8>(acc + 8, hi, lo, &stage->tile[8][lane], 32);
}

/* Sums of the two halves: W M of all rows to both warps, Q M of a warp's own half of them. */
static TD_DEVICE void add_halves(scan_block *b, float acc[2 * C / 8][4], const float inverse[2], int half)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float4(*mine)[32] = b->sums[warp], (*other)[32] = b->sums[warp ^ 1];
#pragma unroll
    for (int n = 0; n < 2 * C / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][i] *= inverse[i / 2];
#pragma unroll
    for (int n = 0; n < C / 8; n++) mine[n][lane] = make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
#pragma unroll
    for (int n = 0; n < C / 16; n++) {
        const float *first = acc[C / 8 + n], *second = acc[C / 8 + C / 16 + n]; /* one is the other warp's */
        mine[C / 8 + n][lane] = half ? make_float4(first[0], first[1], first[2], first[3])
                                     : make_float4(second[0], second[1], second[2], second[3]);
#pragma unroll
        for (int i = 0; i < 4; i++) acc[C / 8 + n][i] = half ? second[i] : first[i];
    }
    asm volatile("bar.sync %0, 64;" ::"r"(1 + warp / 2) : "memory");
#pragma unroll
    for (int n = 0; n < C / 8 + C / 16; n++) {
        float4 x = other[n][lane];
        acc[n][0] += x.x;
        acc[n][1] += x.y;
        acc[n][2] += x.z;
        acc[n][3] += x.w;
    }
}

/* 32 key channels of the half: m += keys u. */
static TD_DEVICE void write_state(float m[4][4], const uint32_t hi[C / 16][4], const uint32_t lo[C / 16][4],
                                  const float inverse[2], const td_kda_stage *stage, int n0, float most[2])
{
    int lane = threadIdx.x % 32;
    float sum[4][4] = {};
#pragma unroll
    for (int j = 0; j < C / 16; j++) {
        uint4 v[4];
#pragma unroll
        for (int n = 0; n < 4; n++) v[n] = stage->tile[n * 4 + j][td_kda_place(lane / 4, lane % 4, n0 + n)];
#pragma unroll
        for (int n = 0; n < 4; n++) td_mma_f16(sum[n], lo[j], v[n].x, v[n].y);
#pragma unroll
        for (int n = 0; n < 4; n++) td_mma_f16(sum[n], hi[j], v[n].z, v[n].w);
#pragma unroll
        for (int n = 0; n < 4; n++) td_mma_f16(sum[n], hi[j], v[n].x, v[n].y);
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) m[n][i] = fmaf(sum[n][i], inverse[i / 2], m[n][i]);
        largest(m[n], most);
    }
}

static TD_DEVICE void step_chunk(scan_block *b, float m[HALF / 8][4], float most[2], td_kda_chunk *h,
                                 const td_kda_chunk *after, int strip, int *turn)
{
    int lane = threadIdx.x % 32, half = threadIdx.x / 32 % 2;
    float acc[2 * C / 8][4], scale[2], inverse[2];
    float4 ahead[C / 8];
#pragma unroll
    for (int i = 0; i < 8 * C / 8; i++) acc[i / 4][i % 4] = 0.0f;
    scales(most, scale, inverse);
#pragma unroll
    for (int s = 0; s < READS; s++) {
        const td_kda_stage *stage = next_stage(b, h, after, s, turn);
        if (s == READS - 2)
#pragma unroll
            for (int n = 0; n < C / 8; n++) ahead[n] = h->u0[strip][n][lane];
        read_state(m, scale, stage, s, acc);
    }
    add_halves(b, acc, inverse, half);
    most[0] = most[1] = 0.0f;
#pragma unroll
    for (int n = 0; n < C / 8; n++) {
        const float u0[4] = { ahead[n].x, ahead[n].y, ahead[n].z, ahead[n].w };
#pragma unroll
        for (int i = 0; i < 4; i++) acc[n][i] = u0[i] - acc[n][i];
        largest(acc[n], most);
    }
#pragma unroll
    for (int n = 0; n < C / 16; n++) ahead[n] = h->o0[strip][half * C / 16 + n][lane];
    scales(most, scale, inverse);
    uint32_t hi[C / 16][4], lo[C / 16][4];
#pragma unroll
    for (int j = 0; j < C / 16; j++) to_operand(acc[2 * j], acc[2 * j + 1], scale, hi[j], lo[j]);
    most[0] = most[1] = 0.0f;
#pragma unroll
    for (int s = 0; s < STAGES - READS; s++)
        write_state(m + 4 * s, hi, lo, inverse, next_stage(b, h, after, READS + s, turn), 4 * s, most);
    const float query = 1.0f / (1 << (TD_CHUNK_QUERY_BITS - TD_CHUNK_KEY_BITS));
#pragma unroll
    for (int n = 0; n < C / 16; n++) {
        const float *y = acc[C / 8 + n];
        float4 x = ahead[n];
        h->o[strip][half * C / 16 + n][lane] = make_uint2(td_pack_bf16(fmaf(y[0], query, x.x), fmaf(y[1], query, x.y)),
                                                          td_pack_bf16(fmaf(y[2], query, x.z), fmaf(y[3], query, x.w)));
    }
}

static __global__ void __launch_bounds__(SCAN_THREADS) k_kda_chunk_scan(td_kda_call a, td_kda_chunk *chunks)
{
    td_begin();
    extern __shared__ __align__(16) unsigned char smem[];
    scan_block *b = (scan_block *)smem;
    int head = blockIdx.x, half = threadIdx.x / 32 % 2, first = 0, turn = 0;
    int strip = blockIdx.z * PAIRS + threadIdx.x / 64;
    const td_segment *segment = a.segments + blockIdx.y;
    if (!segment->chunked || segment->n_rows < 1) return;
    for (int i = 0; i < (int)blockIdx.y; i++) first += a.segments[i].chunked ? (a.segments[i].n_rows + C - 1) / C : 0;
    int n_chunks = (segment->n_rows + C - 1) / C;
    td_kda_chunk *h = chunks + (size_t)first * a.n_heads + head;
#pragma unroll
    for (int i = 0; i < RING - 1; i++) {
        ask_stage(b, i, h, i);
        td_copy_commit();
    }
    float m[HALF / 8][4], most[2] = { 0.0f, 0.0f };
    size_t part = (size_t)half * HALF * D + 16 * strip;
    float *from = td_kda_state_at(a, segment, segment->parity, head) + part;
#pragma unroll
    for (int n = 0; n < HALF / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) m[n][i] = *state_value(from, n, i);
        largest(m[n], most);
    }
    for (; n_chunks > 0; n_chunks--, h += a.n_heads)
        step_chunk(b, m, most, h, n_chunks > 1 ? h + a.n_heads : NULL, strip, &turn);
    float *to = td_kda_state_at(a, segment, !segment->parity, head) + part;
#pragma unroll
    for (int n = 0; n < HALF / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) *state_value(to, n, i) = m[n][i];
}

/* Word of the chunk's o that holds value channel d of rows 2 pair and 2 pair + 1. */
static TD_DEVICE int output_word(int pair, int d)
{
    return ((d / 16 * (C / 8) + pair / 4) * 32 + d % 8 * 4 + pair % 4) * 2 + d / 8 % 2;
}

/* td_kda_finish() for one of the rows whose gates and o are there. */
static TD_DEVICE void finish_row(const td_kda_call &a, const float norm[4], size_t at, const td_bf16 gate[4],
                                 const float o[4])
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) sum = fmaf(o[i], o[i], sum);
    float inverse = 1.0f / sqrtf(td_warp_sum(sum) / TD_HEAD + a.rms_eps);
#pragma unroll
    for (int i = 0; i < 4; i++)
        a.y[at + 32 * i] = td_to_bf16(td_times_sigmoid(norm[i] * (o[i] * inverse), td_load_bf16(&gate[i])));
}

/* A warp has four pairs of rows, two at a time; all their gates are asked for before the first is used. */
static __global__ void __launch_bounds__(THREADS) k_kda_chunk_finish(td_kda_call a, const td_kda_chunk *chunks)
{
    enum { ASKED = 2 };
    td_begin();
    __shared__ uint4 words[C * D / 8];
    int head = blockIdx.x, t0, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const td_segment *segment = td_kda_find_chunk(a, blockIdx.y, &t0);
    if (!segment) return;
    const td_kda_chunk *h = chunks + (size_t)blockIdx.y * a.n_heads + head;
    size_t row0 = (size_t)(segment->first_row + t0), channel = (size_t)head * D + lane;
    int n = min(segment->n_rows - t0, (int)C);
#pragma unroll
    for (int i = threadIdx.x; i < C * D / 8; i += THREADS) td_copy_async(words + i, (const uint4 *)h->o + i, true);
    td_copy_commit();
    float norm[4];
#pragma unroll
    for (int i = 0; i < 4; i++) norm[i] = a.w.o_norm[lane + 32 * i];
    if (t0 == 0) /* one block of the segment and head */
        td_kda_conv_write(a, segment, head, segment->n_rows, a.proj + (size_t)segment->first_row * a.proj_stride,
                          a.proj_stride);
#pragma unroll 1
    for (int pair0 = warp; pair0 < C / 2; pair0 += ASKED * WARPS) {
        td_bf16 gate[2 * ASKED][4];
#pragma unroll
        for (int r = 0; r < 2 * ASKED; r++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int t = 2 * (pair0 + r / 2 * WARPS) + r % 2;
                gate[r][i] = t < n ? a.gate[(row0 + t) * a.gate_stride + channel + 32 * i] : 0;
            }
        if (pair0 == warp) {
            td_copy_wait<0>();
            __syncthreads();
        }
#pragma unroll
        for (int r = 0; r < ASKED; r++) {
            int pair = pair0 + r * WARPS;
            size_t at = (row0 + 2 * pair) * a.n_heads * D + channel;
            float even[4], odd[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t word = ((const uint32_t *)words)[output_word(pair, lane + 32 * i)];
                even[i] = td_low_bf16(word);
                odd[i] = td_high_bf16(word);
            }
            if (2 * pair < n) finish_row(a, norm, at, gate[2 * r], even);
            if (2 * pair + 1 < n) finish_row(a, norm, at + (size_t)a.n_heads * D, gate[2 * r + 1], odd);
        }
    }
}

static size_t most_chunks(int rows)
{
    return (size_t)rows / C + TD_SEGMENTS_MAX;
}

size_t td_cuda_kda_bytes(const td_dev_limits *limits)
{
    return most_chunks(limits->rows) * (size_t)limits->n_heads * sizeof(td_kda_chunk);
}

cudaError_t td_cuda_kda_init(void)
{
    cudaError_t error = td_cuda_kda_prepare_init();
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(k_kda_chunk_scan, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(scan_block));
}

td_status td_cuda_kda_chunked(td_cuda_dev *dev, const td_kda_call *a, int n_rows)
{
    td_arena arena;
    td_cuda_scratch(dev, &arena);
    td_kda_chunk *chunks = (td_kda_chunk *)td_cuda_take(&arena, td_cuda_kda_bytes(&dev->limits));
    unsigned heads = (unsigned)a->n_heads, n = (unsigned)most_chunks(n_rows);
    td_cuda_kda_prepare(dev, a, chunks, (int)n);
    td_launch_spread(dev, k_kda_chunk_scan, dim3(heads, (unsigned)a->n_segments, D / 16 / PAIRS), SCAN_THREADS,
                     sizeof(scan_block), *a, chunks);
    td_launch(dev, k_kda_chunk_finish, dim3(heads, n), THREADS, 0, *a, chunks);
    return td_cuda_launched(dev, "kda");
}
