/* Chunked KDA: everything of a chunk and head that does not need the state (kda_chunk.h). A block is 8 warps, which
 * have their rows in registers (kda_rows.h): decays are running products there.
 *   A_ij, B_ij = sums over channels of k_i e(i,j) k_j and q_i e(i,j) k_j. A decay is a product of alpha, at most 1, never
 *   a quotient: between rows i and j of different blocks of rows it is split where the later block begins, e(i,b) e(b,j),
 *   which makes it a product of matrices. Blocks are 8 rows (level 0), 16 (1) and 32 (2); inside 8 rows fp32 sums.
 *   T by forward substitution in fp32 in blocks of 16 rows, which fp32 products join; a 16-bit inverse would end in
 *   NaN on nearly equal keys.
 * Then W, Q, u0, o0. v is bf16 already, so those products cut T into three bf16 parts, whatever v's range.
 * Loops are kept rolled where registers allow it: most of this is executed once a warp, so the time goes into fetching
 * code. */
#include "ops/cuda/kda_rows.h"

enum { THREADS = 256, PITCH = D + 8, WIDTH = C + 4 };

typedef struct work {
    union {
        struct { /* operands of A and B: [hi, lo]; k and q of later rows, k of earlier ones */
            uint16_t late[2][C][PITCH], early[2][C / 2][PITCH];
        };
        struct { /* operands of the last products, by 16 rows */
            uint4 keys[C / 16][D / 8][32], values[C / 16][D / 16][32];
        };
    };
    float t[C][WIDTH]; /* T on and below the diagonal; above it A, transposed */
    float b[C][WIDTH]; /* B, then B T; valid on and below the diagonal */
    float scale[2 * C / SUB][32], norms[C / SUB][2][32], inside[2][C / 8][64], total[C / SUB][D], beta[C];
} work;

static TD_DEVICE float square(uint32_t pair)
{
    float x = td_low_bf16(pair), y = td_high_bf16(pair);
    return fmaf(y, y, x * x);
}

static TD_DEVICE void norms(work *s, const place &p, const rows &x)
{
    float v[32];
#pragma unroll
    for (int r = 0; r < SUB; r++) {
        v[r] = square(x.q[r]);
        v[SUB + r] = square(x.k[r]);
    }
    td_warp_sums<32>(v);
    s->norms[p.sub][p.half][p.lane] = v[0];
}

/* What rows of q and k are multiplied by: 1 / length, q's 128^-1/2 and the powers of two of kda_chunk.h. */
static TD_DEVICE void row_scales(work *s, const place &p)
{
    float sum = s->norms[p.sub][0][p.lane] + s->norms[p.sub][1][p.lane];
    float to = p.lane < SUB ? 0.08838834764831845f * (1 << TD_CHUNK_QUERY_BITS) : (float)(1 << TD_CHUNK_KEY_BITS);
    s->scale[2 * p.sub + p.half][p.lane] = 1.0f / sqrtf(sum + 1e-6f) * to;
    __syncwarp();
}

static TD_DEVICE float2 product(float2 x, float2 y)
{
    return make_float2(x.x * y.x, x.y * y.y);
}

static TD_DEVICE float2 scaled(uint32_t pair, float scale)
{
    return make_float2(td_low_bf16(pair) * scale, td_high_bf16(pair) * scale);
}

/* Scales of rows r .. r + 3. */
static TD_DEVICE void four_scales(const work *s, const place &p, bool of_q, int r, float scale[4])
{
    td_kda_load4(&s->scale[2 * p.sub + p.half][(of_q ? 0 : SUB) + r], scale);
}

/* Powers of two that A's and B's sums carry. */
static TD_DEVICE float sum_scale(bool of_q)
{
    return of_q ? 1.0f / (1 << (TD_CHUNK_QUERY_BITS + TD_CHUNK_KEY_BITS)) : 1.0f / (1 << (2 * TD_CHUNK_KEY_BITS));
}

static TD_DEVICE void put_sum(work *s, bool of_q, int i, int j, float sum)
{
    if (of_q)
        s->b[i][j] = sum_scale(true) * sum;
    else
        s->t[j][i] = s->beta[i] * (sum_scale(false) * sum);
}

/* Inside 8 rows. Column j has B_jj, A and B of j + 1, A and B of j + 2, ..: 15 - 2 j sums; columns j and 7 - j make 16. */
static TD_DEVICE void column(float *v, int j, const float2 q[8], const float2 k[8], const float (*alpha)[2])
{
    float2 w = k[j];
    v[0] = fmaf(q[j].y, w.y, q[j].x * w.x);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i <= j) continue;
        w.x *= alpha[i][0];
        w.y *= alpha[i][1];
        v[2 * (i - j) - 1] = fmaf(k[i].y, w.y, k[i].x * w.x);
        v[2 * (i - j)] = fmaf(q[i].y, w.y, q[i].x * w.x);
    }
}

static TD_DEVICE void inside(work *s, const place &p, const rows &x)
{
#pragma unroll 1
    for (int block = 0; block < 2; block++) {
        float2 q[8], k[8];
        float alpha[8][2], scale_q[4], scale_k[4];
#pragma unroll
        for (int r = 0; r < 8; r++) {
            if (r % 4 == 0) {
                four_scales(s, p, true, 8 * block + r, scale_q);
                four_scales(s, p, false, 8 * block + r, scale_k);
            }
            q[r] = scaled(block ? x.q[8 + r] : x.q[r], scale_q[r % 4]);
            k[r] = scaled(block ? x.k[8 + r] : x.k[r], scale_k[r % 4]);
            alpha[r][0] = block ? x.alpha[8 + r][0] : x.alpha[r][0];
            alpha[r][1] = block ? x.alpha[8 + r][1] : x.alpha[r][1];
        }
#pragma unroll
        for (int group = 0; group < 2; group++) {
            float v[32];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int j = 2 * group + i;
                column(v + 16 * i, j, q, k, alpha);
                column(v + 16 * i + 15 - 2 * j, 7 - j, q, k, alpha);
            }
            td_warp_sums<32>(v);
            s->inside[p.half][2 * p.sub + block][32 * group + p.lane] = v[0];
        }
    }
}

/* The sums of inside() to their places; entry of 8 x 64. */
static TD_DEVICE void place_inside(work *s, int entry)
{
    int block = entry / 64, j = entry % 64 / 16, at = entry % 16;
    if (at >= 15 - 2 * j) {
        at -= 15 - 2 * j;
        j = 7 - j;
    }
    put_sum(s, at % 2 == 0, 8 * block + j + (at + 1) / 2, 8 * block + j,
            s->inside[0][block][entry % 64] + s->inside[1][block][entry % 64]);
}

static TD_DEVICE void put_pair(uint16_t *hi, uint16_t *lo, float x, float y)
{
    td_split_f16(x, y, (uint32_t *)hi, (uint32_t *)lo);
}

/* Rows R0 .. 15 of q and k times the decay since R0 (R0 included) and `before`, as operands of later rows. */
template <int R0>
static TD_DEVICE void put_late(work *s, const place &p, const rows &x, int to_k, int to_q, float2 before)
{
    float scale_q[4], scale_k[4];
#pragma unroll
    for (int r = R0; r < SUB; r++) {
        if (r % 4 == 0) {
            four_scales(s, p, true, r, scale_q);
            four_scales(s, p, false, r, scale_k);
        }
        before.x *= x.alpha[r][0];
        before.y *= x.alpha[r][1];
        float2 q = product(scaled(x.q[r], scale_q[r % 4]), before), k = product(scaled(x.k[r], scale_k[r % 4]), before);
        put_pair(&s->late[0][to_k + r - R0][p.channel], &s->late[1][to_k + r - R0][p.channel], k.x, k.y);
        put_pair(&s->late[0][to_q + r - R0][p.channel], &s->late[1][to_q + r - R0][p.channel], q.x, q.y);
    }
}

/* Rows 0 .. R1 - 1 of k times the decay to the end of R1 - 1 and `after`. */
template <int R1> static TD_DEVICE void put_early(work *s, const place &p, const rows &x, int to, float2 after)
{
    float scale[4];
#pragma unroll
    for (int r = R1 - 1; r >= 0; r--) {
        if (r % 4 == 3) four_scales(s, p, false, r - 3, scale);
        float2 k = product(scaled(x.k[r], scale[r % 4]), after);
        put_pair(&s->early[0][to + r][p.channel], &s->early[1][to + r][p.channel], k.x, k.y);
        after.x *= x.alpha[r][0];
        after.y *= x.alpha[r][1];
    }
}

/* 16 late rows x 8 early ones. */
static TD_DEVICE void multiply_rows(const work *s, int late, int early, float c[4])
{
    int lane = threadIdx.x % 32, row = late + lane % 16, column = lane / 16 * 8;
    float sum[3][4] = {};
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        uint32_t hi[4], lo[4], b[4];
        td_ldmatrix(hi, &s->late[0][row][k + column]);
        td_ldmatrix(lo, &s->late[1][row][k + column]);
        td_ldmatrix(b, &s->early[lane / 16][early + lane % 8][k + lane / 8 % 2 * 8]);
        td_mma_f16(sum[0], lo, b[0], b[1]);
        td_mma_f16(sum[1], hi, b[2], b[3]);
        td_mma_f16(sum[2], hi, b[0], b[1]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) c[i] = sum[2][i] + (sum[1][i] + sum[0][i]);
}

/* The 8 x 8 blocks left in the diagonal blocks of 16: k and q together are one tile. */
static TD_DEVICE void level0(work *s, int sub)
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, i = SUB * sub + 8 + g, j = SUB * sub + 2 * t;
    float c[4];
    multiply_rows(s, SUB * sub, 8 * sub, c);
    put_sum(s, false, i, j, c[0]);
    put_sum(s, false, i, j + 1, c[1]);
    put_sum(s, true, i, j, c[2]);
    put_sum(s, true, i, j + 1, c[3]);
}

/* 16 rows from i of k or q against columns j .. j + 7. */
static TD_DEVICE void level(work *s, int late, int early, bool of_q, int i, int j)
{
    float c[4];
    multiply_rows(s, late, early, c);
    i += threadIdx.x % 32 / 4;
    j += 2 * (threadIdx.x % 4);
#pragma unroll
    for (int e = 0; e < 4; e++) put_sum(s, of_q, i + e / 2 * 8, j + e % 2, c[e]);
}

/* A and B. */
static TD_DEVICE void sums(work *s, const place &p, const rows &x)
{
    const float2 one = { 1.0f, 1.0f };
    int w = threadIdx.x / 32;
    inside(s, p, x);
    put_late<8>(s, p, x, SUB * p.sub, SUB * p.sub + 8, one);
    put_early<8>(s, p, x, 8 * p.sub, one);
    __syncthreads();
    if (w < 4)
        level0(s, w);
    else
        for (int i = threadIdx.x - 128; i < C * 8; i += 128) place_inside(s, i);
    __syncthreads();
#pragma unroll 1
    for (int wide = 0; wide < 2; wide++) { /* blocks of 16, of 32 rows: which of them, in which half */
        int block = wide ? p.sub % 2 : p.sub / 2;
        float2 far =
            wide && (p.sub == 0 || p.sub == 3) ? *(const float2 *)&s->total[p.sub == 0 ? 1 : 2][p.channel] : one;
        if (wide ? p.sub >= 2 : p.sub % 2)
            put_late<0>(s, p, x, block * 32, block * 32 + SUB, far);
        else
            put_early<SUB>(s, p, x, block * SUB, far);
        __syncthreads();
        int late = wide ? w % 4 * SUB : w / 2 * SUB, i = wide ? 32 + w % 4 / 2 * SUB : w / 4 * 32 + SUB;
#pragma unroll 1
        for (int n = 0; n <= wide; n++) {
            int early = wide ? 8 * (w / 4 + 2 * n) : w / 4 * SUB + w % 2 * 8;
            level(s, late, early, wide ? w % 2 : w / 2 % 2, i, wide ? early : w / 4 * 32 + w % 2 * 8);
        }
        __syncthreads();
    }
}

/* T of the 16 rows from r0; a lane a column. Chains over ascending rows. */
static TD_DEVICE void substitute(work *s, int r0)
{
    int lane = threadIdx.x % 32;
    float t[SUB];
#pragma unroll
    for (int i = 0; i < SUB; i++) t[i] = i == lane ? 1.0f : 0.0f;
#pragma unroll
    for (int m = 0; m < SUB - 1; m++)
#pragma unroll
        for (int i = (m + 1) / 4 * 4; i < SUB; i += 4) {
            float4 a4 = *(const float4 *)&s->t[r0 + m][r0 + i];
            const float a[4] = { a4.x, a4.y, a4.z, a4.w };
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (i + e > m) t[i + e] = fmaf(-a[e], t[m], t[i + e]);
        }
    __syncwarp(); /* four values at a time, reads of A reach over the diagonal */
#pragma unroll
    for (int i = 0; i < SUB; i++)
        if (lane <= i) s->t[r0 + i][r0 + lane] = t[i];
}

/* T between two blocks of 16, then of 32 rows, that are done: -T22 (A21 T11). A warp four rows, a lane a column. */
static TD_DEVICE void join(work *s)
{
    int row = threadIdx.x / 32 * 4, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int n = SUB; n < C; n *= 2) {
        int j0 = row / n * 2 * n, i0 = j0 + n + row % n, j = j0 + lane;
        float x[4] = { 0.0f, 0.0f, 0.0f, 0.0f }, y[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
#pragma unroll 8
        for (int m = 0; m < n; m++) {
            float t = m >= lane ? s->t[j0 + m][j] : 0.0f;
            float4 a = *(const float4 *)&s->t[j0 + m][i0];
            x[0] = fmaf(a.x, t, x[0]);
            x[1] = fmaf(a.y, t, x[1]);
            x[2] = fmaf(a.z, t, x[2]);
            x[3] = fmaf(a.w, t, x[3]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (lane < n) s->t[i0 + e][j] = x[e];
        __syncthreads();
        if (lane < n)
            for (int m = j0 + n; m < i0 + 4; m++) {
                float t = s->t[m][j];
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (m <= i0 + e) y[e] = fmaf(s->t[i0 + e][m], t, y[e]);
            }
        __syncthreads();
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (lane < n) s->t[i0 + e][j] = -y[e];
        __syncthreads();
    }
}

/* x[16 rows from i0][16 columns from j0], lower triangular, times scale as the A operand in two fp16 parts. beta may be
 * NULL. */
static TD_DEVICE void lower_operand(const float (*x)[WIDTH], int i0, int j0, const float *beta, float scale,
                                    uint32_t hi[4], uint32_t lo[4])
{
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        int i = i0 + g + e % 2 * 8, j = j0 + 2 * t + e / 2 * 8;
        float2 v = *(const float2 *)&x[i][j];
        if (beta) v.x *= beta[j], v.y *= beta[j + 1];
        td_split_f16(j <= i ? v.x * scale : 0.0f, j + 1 <= i ? v.y * scale : 0.0f, &hi[e], &lo[e]);
    }
}

/* b = b t. A warp has 16 rows and every other tile of 8 columns. */
static TD_DEVICE void multiply_inverse(work *s)
{
    int w = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, i = w % 4, odd = w / 4;
    float acc[4][4] = {};
#pragma unroll 1
    for (int k = 0; k <= i; k++) {
        uint32_t hi[4], lo[4];
        lower_operand(s->b, 16 * i, 16 * k, NULL, 1 << TD_CHUNK_QUERY_BITS, hi, lo);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (n > k) continue;
            int j = 16 * n + 8 * odd + g, m = 16 * k + 2 * t;
            float v[4];
            uint32_t b[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int row = m + e % 2 + e / 2 * 8;
                v[e] = row >= j ? s->t[row][j] * (1 << TD_CHUNK_KEY_BITS) : 0.0f;
            }
            td_split_f16(v[0], v[1], &b[0], &b[2]);
            td_split_f16(v[2], v[3], &b[1], &b[3]);
            td_mma_f16(acc[n], lo, b[0], b[1]);
            td_mma_f16(acc[n], hi, b[2], b[3]);
            td_mma_f16(acc[n], hi, b[0], b[1]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (n <= i) s->b[16 * i + g + e / 2 * 8][16 * n + 8 * odd + 2 * t + e % 2] = sum_scale(true) * acc[n][e];
    __syncthreads();
}

/* The 16 rows of two channels, rows in pairs, as parts of the B operand. */
static TD_DEVICE void put_columns(uint4 (*tile)[32], int tile_index, int channel, const float x[SUB][2])
{
#pragma unroll
    for (int e = 0; e < 2; e++)
#pragma unroll
        for (int t = 0; t < 4; t++) {
            uint4 v;
            td_split_f16(x[2 * t][e], x[2 * t + 1][e], &v.x, &v.z);
            td_split_f16(x[2 * t + 8][e], x[2 * t + 9][e], &v.y, &v.w);
            (*tile)[td_kda_place(channel % 8 + e, t, tile_index)] = v;
        }
}

/* K to shared memory; Qd to where Q will be, as fp32: a lane's four values there are the ones it replaces. */
static TD_DEVICE void put_reads(work *s, const place &p, const rows &x, td_kda_chunk *out)
{
    float2 before = { 1.0f, 1.0f };
#pragma unroll 1
    for (int i = 0; i < p.sub; i++) before = product(before, *(const float2 *)&s->total[i][p.channel]);
    float keys[SUB][2], scale_q[4], scale_k[4];
    int stage = p.channel / 16, t = p.channel % 8 / 2;
#pragma unroll
    for (int r = 0; r < SUB; r++) {
        if (r % 4 == 0) {
            four_scales(s, p, true, r, scale_q);
            four_scales(s, p, false, r, scale_k);
        }
        before.x *= x.alpha[r][0];
        before.y *= x.alpha[r][1];
        float2 k = product(scaled(x.k[r], scale_k[r % 4]), before);
        keys[r][0] = k.x;
        keys[r][1] = k.y;
        uint4 *to = &out->stage[stage].tile[C / 8 + 2 * p.sub + r / 8][r % 8 * 4 + t];
        ((float2 *)to)[p.channel / 8 % 2] = product(scaled(x.q[r], scale_q[r % 4]), before);
    }
    put_columns(&s->keys[p.sub][p.channel / 8], p.channel / 8, p.channel, keys);
}

/* The keys that are written, and the decay of the whole chunk. */
static TD_DEVICE void put_writes(work *s, const place &p, const rows &x, td_kda_chunk *out)
{
    float2 after = { 1.0f, 1.0f };
#pragma unroll 1
    for (int i = C / SUB - 1; i > p.sub; i--) after = product(after, *(const float2 *)&s->total[i][p.channel]);
    float keys[SUB][2], scale[4];
    int tile = p.channel / 8;
#pragma unroll
    for (int r = SUB - 1; r >= 0; r--) {
        if (r % 4 == 3) four_scales(s, p, false, r - 3, scale);
        float2 k = product(scaled(x.k[r], scale[r % 4]), after);
        keys[r][0] = k.x;
        keys[r][1] = k.y;
        after.x *= x.alpha[r][0];
        after.y *= x.alpha[r][1];
    }
    put_columns(&out->stage[TD_CHUNK_READS + tile / 4].tile[tile % 4 * 4 + p.sub], tile, p.channel, keys);
    if (p.sub == 0) *(float2 *)&out->stage[p.channel / 16].decay[p.channel % 16] = after;
}

static TD_DEVICE void ask_values(work *s, const td_kda_chunk *out)
{
    const uint4 *from = (const uint4 *)out->o;
#pragma unroll
    for (int i = threadIdx.x; i < C * D / 8; i += THREADS) td_copy_async(&s->values[0][0][0] + i, from + i, true);
    td_copy_commit();
}

/* W or Q of 16 rows. */
static TD_DEVICE void finish_reads(const work *s, bool of_q, int i, td_kda_chunk *out)
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float acc[D / 8][4] = {};
    for (int j = 0; j <= i; j++) {
        uint32_t hi[4], lo[4];
        lower_operand(of_q ? s->b : s->t, 16 * i, 16 * j, s->beta,
                      of_q ? (float)(1 << TD_CHUNK_QUERY_BITS) : (float)(1 << TD_CHUNK_KEY_BITS), hi, lo);
#pragma unroll
        for (int n = 0; n < D / 8; n += 8) /* tile n's place is turned by n, eight tiles are a full turn */
#pragma unroll
            for (int half = 0; half < 8; half += 4) {
                uint4 v[4];
#pragma unroll
                for (int q = 0; q < 4; q++) v[q] = s->keys[j][n + half + q][td_kda_place(g, t, half + q)];
#pragma unroll
                for (int q = 0; q < 4; q++) td_mma_f16(acc[n + half + q], lo, v[q].x, v[q].y);
#pragma unroll
                for (int q = 0; q < 4; q++) td_mma_f16(acc[n + half + q], hi, v[q].z, v[q].w);
#pragma unroll
                for (int q = 0; q < 4; q++) td_mma_f16(acc[n + half + q], hi, v[q].x, v[q].y);
            }
    }
    const float scale = (of_q ? -1.0f : 1.0f) / (1 << TD_CHUNK_KEY_BITS);
#pragma unroll
    for (int n = 0; n < D / 8; n += 4) { /* Qd of four results is asked for at once */
        float4 x[4] = {};
        if (of_q)
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[e] = *(const float4 *)&out->stage[n / 2 + e / 2].tile[C / 8 + 2 * i + e % 2][lane];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float *c0 = acc[n + e / 2 * 2] + e % 2 * 2, *c1 = acc[n + e / 2 * 2 + 1] + e % 2 * 2;
            uint4 v;
            td_split_f16(fmaf(c0[0], scale, x[e].x), fmaf(c0[1], scale, x[e].y), &v.x, &v.z);
            td_split_f16(fmaf(c1[0], scale, x[e].z), fmaf(c1[1], scale, x[e].w), &v.y, &v.w);
            out->stage[n / 2 + e / 2].tile[of_q * C / 8 + 2 * i + e % 2][lane] = v;
        }
    }
}

/* Three bf16 parts of two values. */
static TD_DEVICE void split_bf16(float x, float y, uint32_t part[3])
{
#pragma unroll
    for (int i = 0; i < 3; i++) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
        part[i] = *(uint32_t *)&pair;
        x -= td_low_bf16(part[i]);
        y -= td_high_bf16(part[i]);
    }
}

/* u0 or o0 of 64 value channels: v^T (T diag(beta))^T, a tile of 8 rows after the other. */
static TD_DEVICE void finish_values(const work *s, bool of_q, int half, td_kda_chunk *out)
{
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const float(*x)[WIDTH] = of_q ? s->b : s->t;
    for (int n = 0; n < C / 8; n++) {
        float acc[4][4] = {};
        for (int k = 0; k <= n / 2; k++) {
            uint32_t b[2][3];
            int i = 8 * n + g;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int j = 16 * k + 2 * t + 8 * e;
                float2 v = *(const float2 *)&x[i][j];
                split_bf16(j <= i ? v.x * s->beta[j] : 0.0f, j + 1 <= i ? v.y * s->beta[j + 1] : 0.0f, b[e]);
            }
            uint4 v[4];
#pragma unroll
            for (int m = 0; m < 4; m++) v[m] = s->values[k][4 * half + m][td_kda_place(g, t, 4 * half + m)];
#pragma unroll
            for (int part = 2; part >= 0; part--)
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    const uint32_t a[4] = { v[m].x, v[m].y, v[m].z, v[m].w };
                    td_mma_bf16(acc[m], a, b[0][part], b[1][part]);
                }
        }
#pragma unroll
        for (int m = 0; m < 4; m++)
            (of_q ? out->o0 : out->u0)[4 * half + m][n][lane] = make_float4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
    }
}

/* PAIRS: rows of proj and f start at multiples of 4 bytes. */
template <bool PAIRS>
static __global__ void __launch_bounds__(THREADS, 2) k_kda_chunk_prepare(td_kda_call a, td_kda_chunk *chunks)
{
    td_begin();
    extern __shared__ __align__(16) unsigned char smem[];
    work *s = (work *)smem;
    int w = threadIdx.x / 32, t0;
    const td_segment *segment = td_kda_find_chunk(a, blockIdx.y, &t0);
    if (!segment) return;
    td_kda_chunk *out = chunks + (size_t)blockIdx.y * a.n_heads + blockIdx.x;
    place p = { segment, (int)blockIdx.x, (int)threadIdx.x % 32, w / 2, w % 2 };
    p.channel = 64 * p.half + 2 * p.lane;
    p.t0 = t0 + SUB * p.sub;
    p.n = segment->n_rows - p.t0;
    ask_rows(a, p);
    rows x = {};
    read_rows<PAIRS>(a, p, &x, out);
    norms(s, p, x);
    float2 total = { 1.0f, 1.0f };
#pragma unroll
    for (int r = 0; r < SUB; r++) total = product(total, make_float2(x.alpha[r][0], x.alpha[r][1]));
    *(float2 *)&s->total[p.sub][p.channel] = total;
    if (threadIdx.x < C) {
        int t = t0 + threadIdx.x;
        s->beta[threadIdx.x] = t < segment->n_rows
                                   ? td_kda_beta(a.beta_raw[(size_t)(segment->first_row + t) * a.beta_stride + p.head])
                                   : 0.0f;
    }
    __syncthreads();
    row_scales(s, p);
    sums(s, p, x);
    ask_values(s, out);
    if (w < C / SUB) substitute(s, SUB * w);
    put_reads(s, p, x, out);
    put_writes(s, p, x, out);
    td_copy_wait<0>();
    __syncthreads();
    join(s);
    multiply_inverse(s);
    if (w < 4) { /* rows i and 3 - i: 5 of 8 steps for every warp */
#pragma unroll 1
        for (int pass = 0; pass < 2; pass++) finish_reads(s, w % 2, pass ? 3 - w / 2 : w / 2, out);
    } else {
        finish_values(s, w % 2, w / 2 % 2, out);
    }
}

cudaError_t td_cuda_kda_prepare_init(void)
{
    const cudaFuncAttribute most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    cudaError_t error = cudaFuncSetAttribute(k_kda_chunk_prepare<true>, most, sizeof(work));
    return error == cudaSuccess ? cudaFuncSetAttribute(k_kda_chunk_prepare<false>, most, sizeof(work)) : error;
}

void td_cuda_kda_prepare(td_cuda_dev *dev, const td_kda_call *a, td_kda_chunk *chunks, int n_chunks)
{
    dim3 grid((unsigned)a->n_heads, (unsigned)n_chunks);
    bool pairs =
        ((uintptr_t)a->proj | (uintptr_t)a->f | (uintptr_t)a->conv) % 4 == 0 && (a->proj_stride | a->f_stride) % 2 == 0;
    if (pairs)
        td_launch_spread(dev, k_kda_chunk_prepare<true>, grid, THREADS, sizeof(work), *a, chunks);
    else
        td_launch_spread(dev, k_kda_chunk_prepare<false>, grid, THREADS, sizeof(work), *a, chunks);
}
