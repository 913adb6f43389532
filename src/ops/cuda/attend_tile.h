/* 64 gathered latents in shared memory, and how they become operands of the tensor core.
 *
 * Rows stay as they are stored, codes or bf16; whoever needs a value decodes it in registers. For the scores a latent
 * is a column of B (inputs along it), for the weighted sum it is a row of B (a column of it: one value of four tokens).
 * Which of a step's 16 inputs a lane holds is free, if both operands agree, so lanes take what lies together:
 *   scores        inputs 4 j .. 4 j + 3 of a lane's 16, step j: 0 and 1, 2 and 3
 *   weighted sum  tokens t, t + 4 and t + 8, t + 12 of 16; a lane has 8 values in a row, one for each of eight products
 * Tokens of a partial also have a position: that order makes a lane's four tokens neighbours among scores. */
#ifndef TD_OPS_CUDA_ATTEND_TILE_H
#define TD_OPS_CUDA_ATTEND_TILE_H

#include "ops/cuda/kv.h"

enum {
    ATTEND_WARPS = 8,
    ATTEND_TOKENS = 64, /* of a partial */
    ATTEND_TILE_FP8 = ATTEND_TOKENS * TD_KV_WIDTH,
    ATTEND_SHARE = ATTEND_TOKENS / ATTEND_WARPS /* rows that a warp gathers */
};

/* Bytes of a row of a tile. */
template <bool FP8> static TD_DEVICE constexpr int attend_row()
{
    return FP8 ? TD_KV_WIDTH : 2 * TD_KV_WIDTH;
}

/* Rows are multiples of 128 bytes; pieces of 16 bytes are exchanged so that no load below meets another in a bank:
 * scores read rows r and r + 4, sums read rows 4 i .. 4 i + 3. In bytes, to be exclusive-ored into an address. */
static TD_DEVICE constexpr int attend_swap(int row)
{
    return (((row ^ row >> 2) & 1) << 2 | (row & 2) | (row >> 2 & 1)) * 16;
}

/* Token 16 i + t + 4 u of a partial has position 16 i + 4 t + u. */
static TD_DEVICE int attend_position(int token)
{
    return (token & ~15) | (token & 3) << 2 | (token >> 2 & 3);
}

/* A list of tokens in the latent plane. */
typedef struct attend_tokens {
    const int32_t *list, *blocks; /* listed pools; the slot's block table */
    int n_listed, tail;           /* tokens in listed pools; first token behind them */
    int total;
} attend_tokens;

/* Looking for the row of token lane % 8 of a warp's share: its pool in the list, then its block in the table. Each read
 * is asked for a partial before its answer is needed. Behind the end of the list: the last token, whose p will be 0. */
typedef struct attend_search {
    int32_t pool, block; /* of the partial after the next; of the next */
    uint32_t token;      /* of the next */
} attend_search;

static TD_DEVICE int attend_index(const attend_tokens &u, int first)
{
    return min(first + (int)(threadIdx.x / 32 * ATTEND_SHARE + threadIdx.x % ATTEND_SHARE), u.total - 1);
}

static TD_DEVICE void attend_ask_pool(const attend_tokens &u, int first, attend_search *s)
{
    int i = attend_index(u, first);
    if (i < u.n_listed) s->pool = u.list[i / TD_POOL];
}

/* The partial at `first`, whose pools are there, becomes the next. */
static TD_DEVICE void attend_ask_block(const attend_tokens &u, int first, attend_search *s)
{
    int i = attend_index(u, first);
    s->token = i < u.n_listed ? (uint32_t)s->pool * TD_POOL + i % TD_POOL : i - u.n_listed + u.tail;
    s->block = u.blocks[s->token / TD_BLOCK];
}

/* Starts copies of this warp's eight rows into a tile; scales go to their positions. Pieces behind kv_lora repeat the
 * last one: queries are zeros there, and nobody reads those sums. */
template <bool FP8>
static TD_DEVICE void attend_gather(const td_dsa_cache &c, const attend_search &found, uint32_t tile, uint32_t scale)
{
    constexpr int ROW = attend_row<FP8>();
    int lane = threadIdx.x % 32, first = threadIdx.x / 32 * ATTEND_SHARE, used = (FP8 ? 1 : 2) * c.kv_lora;
    const unsigned char *latents = (const unsigned char *)c.latents;
    uint32_t row = (uint32_t)found.block * TD_BLOCK + found.token % TD_BLOCK, /* then in pieces of 16 bytes */
        place = row * (uint32_t)(td_kv_bytes(FP8 ? TD_KV_FP8 : TD_KV_ACT, c.kv_lora) / 16);
    tile += first * ROW + lane * 16;
#pragma unroll
    for (int j = 0; j < ROW; j += 512) {
        const unsigned char *column = latents + min(lane * 16 + j, used - 16);
#pragma unroll
        for (int i = 0; i < ATTEND_SHARE; i++) {
            uint32_t from = __shfl_sync(0xffffffffu, place, i);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((tile ^ attend_swap(i)) + i * ROW + j),
                         "l"(column + (size_t)from * 16)
                         : "memory");
        }
    }
    if (FP8 && lane < ATTEND_SHARE)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(scale + attend_position(first + lane) * 4),
                     "l"(latents + (size_t)place * 16 + c.kv_lora)
                     : "memory");
    td_copy_commit();
}

/* Codes are exact as fp16, one instruction for two, so rows of fp8 make fp16 products, those of bf16 bf16 products. */
template <bool FP8> static TD_DEVICE void attend_mma(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    if (FP8)
        td_mma_f16(c, a, b[0], b[1]);
    else
        td_mma_bf16(c, a, b[0], b[1]);
}

/* The same from zero. */
template <bool FP8> static TD_DEVICE void attend_mma_first(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    if (FP8)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%10,%10,%10,%10};"
                     : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                     "{%10,%10,%10,%10};"
                     : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}

template <bool FP8> static TD_DEVICE uint32_t attend_pack(float low, float high)
{
    if (FP8) {
        __half2 h = __floats2half2_rn(low, high);
        return *(uint32_t *)&h;
    }
    __nv_bfloat162 b = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&b;
}

template <bool FP8> static TD_DEVICE float2 attend_unpack(uint32_t pair)
{
    return FP8 ? __half22float2(*(__half2 *)&pair) : make_float2(td_low_bf16(pair), td_high_bf16(pair));
}

/* Codes 0 and 1, and 2 and 3, of a word as fp16. */
static TD_DEVICE void attend_decode(uint32_t w, uint32_t *low, uint32_t *high)
{
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(*low), "=r"(*high)
        : "r"(w));
}

/* Powers of two that take a largest value of `max` to 2^14 .. 2^15, inside fp16, and back. What is 2^39 smaller is
 * lost; a largest value below 2^-113 counts as zero. */
static TD_DEVICE void attend_range(float max, float *up, float *down)
{
    int exponent = (int)(__float_as_uint(max) >> 23), back = exponent > 14 ? exponent - 14 : 0;
    *down = __uint_as_float((uint32_t)back << 23);
    *up = __uint_as_float((uint32_t)(254 - back) << 23);
}

/* B of the scores: lane g, t has the latent at position 8 n + g. Where the first of a warp's four n begins, and B of n
 * for the four steps of a group of 64 inputs. */
template <bool FP8> static TD_DEVICE uint32_t attend_keys_at(uint32_t tile, int first_n, int column)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = g / 4 + g % 4 * 4;
    return (tile + (first_n * 8 + row) * attend_row<FP8>() + (FP8 ? column + 16 * t : 2 * column + 32 * t)) ^
           attend_swap(row);
}

template <bool FP8> static TD_DEVICE void attend_keys(uint32_t at, int n, int group, uint32_t b[4][2])
{
    at = (at ^ n % 2 * attend_swap(2)) + (n / 2 * 16 + n % 2 * 2) * attend_row<FP8>();
    if (FP8) {
        uint4 x = td_load_shared16(at ^ group * 64);
        uint32_t w[4] = { x.x, x.y, x.z, x.w };
#pragma unroll
        for (int j = 0; j < 4; j++) attend_decode(w[j], &b[j][0], &b[j][1]);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint4 x = td_load_shared16((at ^ i * 16) + group * 128);
            b[2 * i][0] = x.x;
            b[2 * i][1] = x.y;
            b[2 * i + 1][0] = x.z;
            b[2 * i + 1][1] = x.w;
        }
    }
}

/* B of the weighted sum for 16 tokens: lane g, t has values column + 8 g + n of its four tokens, n = 0..7. */
template <bool FP8> static TD_DEVICE uint32_t attend_values_at(uint32_t tile, int column)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    return (tile + t * attend_row<FP8>() + (FP8 ? 1 : 2) * (column + 8 * g)) ^ attend_swap(t);
}

template <bool FP8> static TD_DEVICE void attend_values(uint32_t at, int token, uint32_t b[8][2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) { /* tokens t and t + 4, then t + 8 and t + 12 */
        uint32_t even = at + (token + 8 * i) * attend_row<FP8>(),
                 odd = (at ^ attend_swap(4)) + (token + 8 * i + 4) * attend_row<FP8>();
        if (FP8) {
            uint2 x = td_load_shared8(even), y = td_load_shared8(odd);
            attend_decode(__byte_perm(x.x, y.x, 0x5140), &b[0][i], &b[1][i]);
            attend_decode(__byte_perm(x.x, y.x, 0x7362), &b[2][i], &b[3][i]);
            attend_decode(__byte_perm(x.y, y.y, 0x5140), &b[4][i], &b[5][i]);
            attend_decode(__byte_perm(x.y, y.y, 0x7362), &b[6][i], &b[7][i]);
        } else {
            uint4 x = td_load_shared16(even), y = td_load_shared16(odd);
            uint32_t u[4] = { x.x, x.y, x.z, x.w }, v[4] = { y.x, y.y, y.z, y.w };
#pragma unroll
            for (int j = 0; j < 4; j++) {
                b[2 * j][i] = __byte_perm(u[j], v[j], 0x5410);
                b[2 * j + 1][i] = __byte_perm(u[j], v[j], 0x7632);
            }
        }
    }
}

#endif
