/* The steps of a partial (dsa_attend.cu says what they compute), for windows and prompts alike, so that both have the
 * same bits. A block is eight warps:
 *   scores        a warp a slice of 128 inputs and half of the tokens; its queries stay in registers
 *   softmax       a warp four heads, eight lanes each
 *   weighted sum  a warp 64 of the latent's values, all heads
 * so a latent is read and decoded once for each product. Names without prefix: for dsa_attend.cu alone. */
#ifndef TD_OPS_CUDA_ATTEND_STEPS_H
#define TD_OPS_CUDA_ATTEND_STEPS_H

#include "ops/cuda/attend_tile.h"

#include <stddef.h>

enum {
    WARPS = ATTEND_WARPS,
    THREADS = 32 * WARPS,
    TOKENS = ATTEND_TOKENS,
    HEADS = 32, /* of a block */
    WIDTH = TD_KV_WIDTH,
    SLICES = 4, /* of the scores' inputs */
    SLICE = WIDTH / SLICES,
    VALUES = WIDTH / WARPS, /* of the latent, a warp's in weigh() */
    NT = VALUES / 8,
};

#define LOG2_E 1.44269504088896341f

/* Of a partial and head: maximum (base 2), sum, and what undoes the range of p and v. */
typedef struct partial {
    float max, sum, down;
} partial;

typedef struct attend_block {
    uint4 score[SLICES][HEADS][TOKENS / 4]; /* floats by position, exchanged: score_at(). Then p in slice 0: p_at() */
    float scale[2][TOKENS];                 /* of fp8 rows, by position */
    float2 factor[HEADS];                   /* prompts: of all partials so far, and of this one */
    float sum[HEADS];
    unsigned char tile[2][ATTEND_TILE_FP8]; /* two of codes, or one of bf16 */
} attend_block;

static_assert(offsetof(attend_block, tile) % 128 == 0, "attend_swap() changes bits of addresses below 128");

static TD_DEVICE int score_at(int head, int four)
{
    return four ^ (head & 3) << 1;
}

/* P is stored as A operands: the high parts of heads g and g + 8 where the scores of g were, the rest where those of g
 * + 8 were. A lane's operand is token 4 u + t of 16, u = 0 .. 3. */
static TD_DEVICE int p_at(int head, int lane)
{
    return lane ^ (head & 1) << 2;
}

/* A warp's slice of the queries as A operands: group of 64 inputs, step, heads 16 m + g (+ 8). Heads beyond the last
 * take the last one's; nobody reads their results. */
typedef struct queries {
    uint32_t a[SLICE / 64][4][2][4];
} queries;

/* of_row: [n_heads][kv_lora] from the block's first head on. */
static TD_DEVICE void load_queries(const td_bf16 *of_row, int n_heads, int kv_lora, queries *q)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, column = threadIdx.x / 32 % SLICES * SLICE + 16 * t;
#pragma unroll
    for (int i = 0; i < SLICE / 64; i++)
#pragma unroll
        for (int h = 0; h < 4; h++) {
            int head = min(8 * h + g, n_heads - 1), at = column + 64 * i;
            const uint4 *p = (const uint4 *)(of_row + (size_t)head * kv_lora + at);
            bool inside = at < kv_lora;
            uint4 x = inside ? p[0] : make_uint4(0, 0, 0, 0), y = inside ? p[1] : make_uint4(0, 0, 0, 0);
            uint32_t w[8] = { x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w };
#pragma unroll
            for (int j = 0; j < 8; j++) q->a[i][j / 2][h / 2][h % 2 + j % 2 * 2] = w[j];
        }
}

/* The head of a lane: eight lanes have one, a warp g, g + 8, g + 1, g + 9 of 16. */
static TD_DEVICE int softmax_head()
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return warp / 4 * 16 + warp % 4 * 2 + lane / 8 % 2 * 8 + lane / 16;
}

/* fp8 rows: queries as fp16, a power of two a head. Returns what undoes it for the lane's head of the softmax. */
static TD_DEVICE float narrow_queries(queries *q, attend_block *s)
{
    int g = threadIdx.x % 32 / 4, slice = threadIdx.x / 32 % SLICES;
    float *most = (float *)s->score, up, down; /* [HEADS][SLICES] */
#pragma unroll
    for (int h = 0; h < 4; h++) {
        float max = 0.0f;
#pragma unroll
        for (int j = 0; j < SLICE / 8; j++) {
            uint32_t pair = q->a[j / 8][j / 2 % 4][h / 2][h % 2 + j % 2 * 2];
            max = fmaxf(max, fmaxf(fabsf(td_low_bf16(pair)), fabsf(td_high_bf16(pair))));
        }
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 1));
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, 2));
        if (threadIdx.x % 4 == 0) most[(8 * h + g) * SLICES + slice] = max;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 4; h++) {
        float4 m = ((const float4 *)most)[8 * h + g];
        attend_range(fmaxf(fmaxf(m.x, m.y), fmaxf(m.z, m.w)), &up, &down);
#pragma unroll
        for (int j = 0; j < SLICE / 8; j++) {
            uint32_t *pair = &q->a[j / 8][j / 2 % 4][h / 2][h % 2 + j % 2 * 2];
            *pair = attend_pack<true>(td_low_bf16(*pair) * up, td_high_bf16(*pair) * up);
        }
    }
    float4 m = ((const float4 *)most)[softmax_head()];
    attend_range(fmaxf(fmaxf(m.x, m.y), fmaxf(m.z, m.w)), &up, &down);
    __syncthreads(); /* scores take the place of the maxima */
    return down;
}

/* A warp: 32 heads x 32 tokens, its slice of the inputs. */
template <bool FP8> static TD_DEVICE void scores(const queries &q, uint32_t tile, attend_block *s)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int slice = warp % SLICES, first = warp / SLICES * 4;
    uint32_t keys = attend_keys_at<FP8>(tile, first, slice * SLICE);
    float c[4][2][4];
#pragma unroll
    for (int i = 0; i < SLICE / 64; i++) {
        uint32_t b[4][4][2];
#pragma unroll
        for (int n = 0; n < 4; n++) attend_keys<FP8>(keys, n, i, b[n]);
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int m = 0; m < 2; m++)
                    if (i == 0 && j == 0)
                        attend_mma_first<FP8>(c[n][m], q.a[i][j][m], b[n][j]);
                    else
                        attend_mma<FP8>(c[n][m], q.a[i][j][m], b[n][j]);
    }
    uint32_t to = td_shared_at(&s->score[slice][g][score_at(g, 2 * first + t / 2)]) + t % 2 * 8;
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int h = 0; h < 4; h++)
            asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"((to ^ n * 32) + h * 8 * TOKENS * 4),
                         "f"(c[n][h / 2][h % 2 * 2]), "f"(c[n][h / 2][h % 2 * 2 + 1])
                         : "memory");
}

/* 2^x to 2 ulp; results below 2^-126 are 0. */
static TD_DEVICE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Factors of what is there, with the largest maximum so far `max`, and of what comes: x old, y fresh, z fresh for v. */
static TD_DEVICE float3 merge_factors(float max, partial p)
{
    float most = fmaxf(p.max, max), fresh = exp2_fast(p.max - most);
    return make_float3(exp2_fast(max - most), fresh, fresh * p.down);
}

/* What the lane's eight tokens (positions 4 j .. of lane j % 8, and 32 further) are multiplied by. fp16: largest scale of
 * the partial to 2^14, `down` undoes that. */
typedef struct scales {
    float score[8], p[8], down;
} scales;

template <bool FP8> static TD_DEVICE scales scales_of(const float *scale, float factor)
{
    scales r;
    float up = 1.0f, max = 0.0f;
    r.down = 1.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        r.p[i] = FP8 ? scale[threadIdx.x % 8 * 4 + i / 4 * 32 + i % 4] : 1.0f;
        max = fmaxf(max, r.p[i]);
    }
    if (FP8) {
#pragma unroll
        for (int step = 4; step; step >>= 1) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, step));
        attend_range(max, &up, &r.down);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        r.score[i] = factor * r.p[i];
        r.p[i] *= up;
    }
    return r;
}

/* The slices added, in order. */
static TD_DEVICE void sum_slices(const attend_block *s, int head, float x[8])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float4 sum = *(const float4 *)&s->score[0][head][score_at(head, threadIdx.x % 8 + 8 * i)];
#pragma unroll
        for (int k = 1; k < SLICES; k++) {
            float4 more = *(const float4 *)&s->score[k][head][score_at(head, threadIdx.x % 8 + 8 * i)];
            sum.x += more.x;
            sum.y += more.y;
            sum.z += more.z;
            sum.w += more.w;
        }
        x[4 * i] = sum.x;
        x[4 * i + 1] = sum.y;
        x[4 * i + 2] = sum.z;
        x[4 * i + 3] = sum.w;
    }
}

/* Stores p, which has its scales and range, in two parts. */
template <bool FP8> static TD_DEVICE void put_p(attend_block *s, int head, const float p[8])
{
    int j = threadIdx.x % 8, part = head / 8 % 2, g = head - 8 * part;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t *high = (uint32_t *)&s->score[0][g][p_at(g, j + 8 * i)],
                 *rest = (uint32_t *)&s->score[0][g + 8][p_at(g, j + 8 * i)];
#pragma unroll
        for (int k = 0; k < 2; k++) { /* tokens t and t + 4, then t + 8 and t + 12 */
            float x = p[4 * i + 2 * k], y = p[4 * i + 2 * k + 1];
            uint32_t both = attend_pack<FP8>(x, y);
            float2 value = attend_unpack<FP8>(both);
            high[2 * k + part] = both;
            rest[2 * k + part] = attend_pack<FP8>(x - value.x, y - value.y);
        }
    }
}

/* Scores of n tokens become p, times the tokens' scales. */
template <bool FP8> static TD_DEVICE partial softmax(int n, const scales &f, attend_block *s)
{
    int j = threadIdx.x % 8, head = softmax_head();
    float x[8];
    sum_slices(s, head, x);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= f.score[i];
    if (n < TOKENS) {
#pragma unroll
        for (int i = 0; i < 8; i++) /* position 4 (4 a + t) + u is token 16 a + t + 4 u */
            if (i / 4 * 32 + j / 4 * 16 + j % 4 + i % 4 * 4 >= n) x[i] = -INFINITY;
    }
    float max = fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7])));
#pragma unroll
    for (int step = 4; step; step >>= 1) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, step));
    if (max == -INFINITY) max = 0.0f; /* only NaN or -infinity: keep NaN, do not make it of infinities */
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = exp2_fast(x[i] - max);
    float sum = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= f.p[i];
    __syncwarp(); /* all have read the scores that p takes the place of */
    put_p<FP8>(s, head, x);
#pragma unroll
    for (int step = 4; step; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return { max, sum, f.down };
}

/* A warp: all 32 heads x 64 of the latent's values. v[m][n]: heads 16 m + g (+ 8), values 8 (2t) + n and 8 (2t + 1) + n
 * of the warp's. */
template <bool FP8> static TD_DEVICE void weigh(const attend_block *s, uint32_t tile, float v[2][NT][4])
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint32_t values = attend_values_at<FP8>(tile, warp * VALUES), p = td_shared_at(&s->score[0][g][p_at(g, t)]);
#pragma unroll
    for (int k = 0; k < TOKENS; k += 16) {
        uint32_t b[NT][2], a[2][2][4]; /* heads 16 m + g (+ 8): high parts, rest */
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint4 x = td_load_shared16((p ^ k / 16 % 2 * 64) + k / 32 * 128 + i * 8 * TOKENS * 4);
            a[i / 2][i % 2][0] = x.x;
            a[i / 2][i % 2][1] = x.y;
            a[i / 2][i % 2][2] = x.z;
            a[i / 2][i % 2][3] = x.w;
        }
        attend_values<FP8>(values, k, b);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int m = 0; m < 2; m++)
                    if (k == 0 && i == 0)
                        attend_mma_first<FP8>(v[m][n], a[m][i], b[n]);
                    else
                        attend_mma<FP8>(v[m][n], a[m][i], b[n]);
    }
}

/* First of eight values in a row that element i of v[m] begins, i = 0 .. 3. */
static TD_DEVICE int value_of(int i)
{
    return threadIdx.x / 32 * VALUES + (threadIdx.x % 4 * 2 + i % 2) * 8;
}

static TD_DEVICE int head_of(int m, int i)
{
    return 16 * m + threadIdx.x % 32 / 4 + i / 2 * 8;
}

#endif
