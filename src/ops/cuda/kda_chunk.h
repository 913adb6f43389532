/* The chunked (WY) form of KDA on the GPU, formulas in ops/cpu/kda_chunk.c and docs/model.md "KDA". With T = (I + A)^-1
 * diag(beta) the chunk's u and o are linear in the state M before it, so everything else is done ahead, for all chunks
 * in parallel:
 *   u = u0 - W M,  u0 = T v,    W = T K,          K_i = k_i e(i,-1)
 *   o = o0 + Q M,  o0 = B T v,  Q = Qd - B T K,   Qd_i = q_i e(i,-1)
 *   M = diag(e(n-1,-1)) M + sum_j (k_j e(n-1,j)) u_j^T
 * k has length 1, decays and beta are at most 1, and each step of the recurrence only shortens what it is given: rows of
 * W and columns of T cannot be longer than 1, those of Q and B T not longer than q. That is why they may be held as two
 * fp16 parts under fixed scales (22 bits of what is near 1, at worst 2^-36 off). Products are three tensor-core steps:
 * lo hi, hi lo, hi hi. Emulated over 1,500 chunks of next to no decay, the state is then 1.9e-7 off fp64, less than with
 * fp32 chains; with two bf16 parts it would be 6.6e-6. */
#ifndef TD_OPS_CUDA_KDA_CHUNK_H
#define TD_OPS_CUDA_KDA_CHUNK_H

#include "ops/cuda/kda.h"

enum {
    TD_CHUNK = TD_GRID,
    TD_CHUNK_TILES = 16,                              /* B operands a stage, 16 x 8 values each */
    TD_CHUNK_READS = TD_HEAD / 16,                    /* stages of W and Q: 16 key channels, 8 tiles of rows each */
    TD_CHUNK_STAGES = TD_CHUNK_READS + TD_CHUNK / 16, /* and of the keys that are written: 4 tiles of channels */
    TD_CHUNK_KEY_BITS = 12,                           /* K, W, T are held times 2^12 */
    TD_CHUNK_QUERY_BITS = 15                          /* Q, B T, at most 128^-1/2: times 2^15 */
};

/* What the scan copies at once. A lane's 16 bytes of a tile: both parts of its B operand, hi first. */
typedef struct td_kda_stage {
    uint4 tile[TD_CHUNK_TILES][32];
    float decay[16]; /* of W and Q: e(n-1,-1) of the key channels */
} td_kda_stage;

/* What a chunk and head hand from kernel to kernel. [8][8]: 16 value channels, 8 rows; a lane has channels g, g + 8 and
 * rows 2t, 2t + 1 of them (C of a transposed product). */
typedef struct td_kda_chunk {
    td_kda_stage stage[TD_CHUNK_STAGES];
    float4 u0[TD_HEAD / 16][TD_CHUNK / 8][32], o0[TD_HEAD / 16][TD_CHUNK / 8][32];
    uint2 o[TD_HEAD / 16][TD_CHUNK / 8][32]; /* act(o): two rows a word */
} td_kda_chunk;

/* The index-th chunk of the window's chunked segments; its first row in the segment, or no segment. */
static TD_DEVICE const td_segment *td_kda_find_chunk(const td_kda_call &a, int index, int *t0)
{
    for (int s = 0; s < a.n_segments; s++) {
        const td_segment *segment = a.segments + s;
        int n = segment->chunked ? (segment->n_rows + TD_CHUNK - 1) / TD_CHUNK : 0;
        if (index < n) {
            *t0 = index * TD_CHUNK;
            return segment;
        }
        index -= n;
    }
    return NULL;
}

/* e^x as td_expf() has it, for x in -87 .. 87. */
TD_DEVICE float td_exp_near(float x)
{
    float shifted = fmaf(x, 1.44269504088896341f, 12582912.0f), n = shifted - 12582912.0f;
    float r = fmaf(n, 1.904654299957767878e-9f, fmaf(n, -0.693147182464599609375f, x));
    float p = fmaf(1.0f / 5040.0f, r, 1.0f / 720.0f);
    p = fmaf(p, r, 1.0f / 120.0f);
    p = fmaf(p, r, 1.0f / 24.0f);
    p = fmaf(p, r, 1.0f / 6.0f);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

/* x sigmoid(y) = x / (1 + e^-y). The divisor is between 1 and 2^126: a division without special cases, of which the
 * last step's remainder is exact. */
TD_DEVICE float td_times_sigmoid(float x, float y)
{
    float d = 1.0f + td_exp_near(fminf(fmaxf(-y, -87.0f), 87.0f)), r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    float q = x * r;
    return fmaf(fmaf(-d, q, x), r, q);
}

/* Where lane (g, t)'s operand of a tile is when a thread that owns row or channel g writes it for every t: writes of
 * neighbouring g and tiles, and reads of a tile, fall into different banks. */
TD_DEVICE int td_kda_place(int g, int t, int tile)
{
    return t * 8 + ((g + 2 * t + tile) & 7);
}

/* x, y = hi + lo, two fp16 values a word. */
TD_DEVICE void td_split_f16(float x, float y, uint32_t *hi, uint32_t *lo)
{
    __half2 h = __floats2half2_rn(x, y);
    float2 back = __half22float2(h);
    __half2 l = __floats2half2_rn(x - back.x, y - back.y);
    *hi = *(uint32_t *)&h;
    *lo = *(uint32_t *)&l;
}

/* acc[i] += a b[i * pitch] for N tiles, small products first. */
template <int N>
TD_DEVICE void td_mma_split(float (*acc)[4], const uint32_t hi[4], const uint32_t lo[4], const uint4 *b, int pitch)
{
    uint4 v[N];
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = b[i * pitch];
#pragma unroll
    for (int i = 0; i < N; i++) td_mma_f16(acc[i], lo, v[i].x, v[i].y);
#pragma unroll
    for (int i = 0; i < N; i++) td_mma_f16(acc[i], hi, v[i].z, v[i].w);
#pragma unroll
    for (int i = 0; i < N; i++) td_mma_f16(acc[i], hi, v[i].x, v[i].y);
}

/* kda_prepare.cu */
cudaError_t td_cuda_kda_prepare_init(void);
void td_cuda_kda_prepare(td_cuda_dev *dev, const td_kda_call *a, td_kda_chunk *chunks, int n_chunks);

#endif
