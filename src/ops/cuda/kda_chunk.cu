/* The chunked (WY) form of KDA, formulas in ops/cpu/kda_chunk.c and docs/model.md "KDA". Three kernels:
 *   k_kda_chunk_prepare  a block a chunk and head, all in parallel: rows, decays, the matrices A and B
 *   k_kda_chunk_scan     a block a head and 32 value channels, chunks in order: products with the state, forward
 *                        substitution, the next state
 *   k_kda_chunk_finish   a warp a row and head: gated norm
 * All sums are fp32 fma chains. Decays are products of alpha, at most 1 each: inside a sub-block of 16 rows one running
 * product, between sub-blocks split at the end of the earlier ones. Row i sums over rows <= i only, and rows beyond the
 * end of a chunk are zeros with decay 1: bits depend neither on rows that follow nor on how a prompt was cut into
 * windows. */
#include "ops/cuda/kda.h"

enum { D = TD_KDA_D, C = TD_GRID, SUB = 16, THREADS = 256, WARPS = THREADS / 32, PITCH = D + 4, STRIP = 32 };

/* What a chunk and head hand from kernel to kernel. */
typedef struct chunk {
    float x[2 * C][D]; /* rows 0..63 k_i e(i, -1), 64..127 q_i e(i, -1) */
    float v[C][D];
    float kd[C][D]; /* k_j e(n - 1, j) */
    float at[C][C]; /* A transposed: [j][i], 0 unless j < i */
    float bt[C][C]; /* B transposed: 0 unless j <= i */
    float o[C][D];
    float before[D]; /* e(n - 1, -1) */
    float beta[C];
    float pad[C];
} chunk;

/* The index-th chunk of the window's chunked segments; its first row in the segment, or no segment. */
static TD_DEVICE const td_segment *find_chunk(const td_kda_call &a, int index, int *t0)
{
    for (int s = 0; s < a.n_segments; s++) {
        const td_segment *segment = a.segments + s;
        int n = segment->chunked ? (segment->n_rows + C - 1) / C : 0;
        if (index < n) {
            *t0 = index * C;
            return segment;
        }
        index -= n;
    }
    return NULL;
}

typedef struct sub_block {
    float k[C][PITCH]; /* k, of finished sub-blocks times the decay to their end */
    float q[SUB][PITCH], alpha[SUB][PITCH], ks[SUB][PITCH], qs[SUB][PITCH];
    float total[D], before[D], beta[C];
} sub_block;

/* Rows r0 .. r0 + 15 of the chunk: q, k, alpha to shared memory, v to the chunk. */
static TD_DEVICE void load_rows(const td_kda_call &a, const td_segment *segment, int head, int t0, int n, int r0,
                                sub_block *s, chunk *out)
{
    int lane = threadIdx.x % 32;
    for (int task = threadIdx.x / 32; task < 4 * SUB; task += WARPS) {
        int part = task / SUB, r = task % SUB;
        float x[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
        if (r0 + r < n)
            td_kda_row(a, segment, head, part, t0 + r0 + r, lane, x);
        else if (part == 3)
            x[0] = x[1] = x[2] = x[3] = 1.0f;
        float *to = part == 0 ? s->q[r] : part == 1 ? s->k[r0 + r] : part == 2 ? out->v[r0 + r] : s->alpha[r];
        for (int i = 0; i < 4; i++) to[lane + 32 * i] = x[i];
    }
    if (threadIdx.x < SUB) {
        int r = r0 + threadIdx.x;
        out->beta[r] = s->beta[r] = r < n ? td_kda_beta(a, segment, head, t0 + r) : 0.0f;
    }
}

/* ks, qs of the sub-block and x of its rows; a thread a channel. */
static TD_DEVICE void decays(sub_block *s, int r0, chunk *out)
{
    int c = threadIdx.x;
    if (c >= D) return;
    float total = 1.0f, before = s->before[c];
    for (int r = 0; r < SUB; r++) {
        total *= s->alpha[r][c];
        float ks = s->k[r0 + r][c] * total, qs = s->q[r][c] * total;
        s->ks[r][c] = ks;
        s->qs[r][c] = qs;
        out->x[r0 + r][c] = ks * before;
        out->x[C + r0 + r][c] = qs * before;
    }
    s->total[c] = total;
}

/* A and B inside the sub-block: a warp takes a column j, its running product in registers. */
static TD_DEVICE void diagonal(const sub_block *s, int r0, chunk *out)
{
    int lane = threadIdx.x % 32;
    for (int j = threadIdx.x / 32; j < SUB; j += WARPS) {
        float w[4];
        for (int i = 0; i < 4; i++) w[i] = s->k[r0 + j][lane + 32 * i];
        for (int r = j; r < SUB; r++) {
            float sum_a = 0.0f, sum_b = 0.0f;
            for (int i = 0; i < 4; i++) {
                int c = lane + 32 * i;
                if (r > j) w[i] *= s->alpha[r][c];
                sum_a = fmaf(s->k[r0 + r][c], w[i], sum_a);
                sum_b = fmaf(s->q[r][c], w[i], sum_b);
            }
            sum_a = td_warp_sum(sum_a);
            sum_b = td_warp_sum(sum_b);
            if (lane == 0) {
                out->at[r0 + j][r0 + r] = r > j ? s->beta[r0 + r] * sum_a : 0.0f;
                out->bt[r0 + j][r0 + r] = sum_b;
            }
        }
        if (lane < j) out->at[r0 + j][r0 + lane] = out->bt[r0 + j][r0 + lane] = 0.0f;
    }
}

static TD_DEVICE float4 load4(const float *p)
{
    return *(const float4 *)p;
}

/* Between the sub-block's rows and all columns before it; above the diagonal zeros. A thread a row and every 16th
 * column. */
static TD_DEVICE void off_diagonal(const sub_block *s, int r0, chunk *out)
{
    int r = threadIdx.x / SUB;
    for (int j = threadIdx.x % SUB; j < r0; j += SUB) {
        float sum_a = 0.0f, sum_b = 0.0f;
        for (int c = 0; c < D; c += 4) {
            float4 kd = load4(&s->k[j][c]), ks = load4(&s->ks[r][c]), qs = load4(&s->qs[r][c]);
            sum_a = fmaf(ks.w, kd.w, fmaf(ks.z, kd.z, fmaf(ks.y, kd.y, fmaf(ks.x, kd.x, sum_a))));
            sum_b = fmaf(qs.w, kd.w, fmaf(qs.z, kd.z, fmaf(qs.y, kd.y, fmaf(qs.x, kd.x, sum_b))));
        }
        out->at[j][r0 + r] = s->beta[r0 + r] * sum_a;
        out->bt[j][r0 + r] = sum_b;
        out->at[r0 + r][j] = out->bt[r0 + r][j] = 0.0f;
    }
}

/* k of finished sub-blocks and `before` reach to the end of this one. */
static TD_DEVICE void advance(sub_block *s, int r0)
{
    for (int i = threadIdx.x; i < r0 * D; i += THREADS) s->k[i / D][i % D] *= s->total[i % D];
    int c = threadIdx.x;
    if (c >= D) return;
    float suffix = 1.0f;
    for (int r = SUB - 1; r >= 0; r--) {
        s->k[r0 + r][c] *= suffix;
        suffix *= s->alpha[r][c];
    }
    s->before[c] *= s->total[c];
}

static __global__ void __launch_bounds__(THREADS) k_kda_chunk_prepare(td_kda_call a, chunk *chunks)
{
    td_begin();
    extern __shared__ __align__(16) unsigned char smem[];
    sub_block *s = (sub_block *)smem;
    int head = blockIdx.x, t0;
    const td_segment *segment = find_chunk(a, blockIdx.y, &t0);
    if (!segment) return;
    chunk *out = chunks + (size_t)blockIdx.y * a.n_heads + head;
    int n = min(segment->n_rows - t0, (int)C);
    if (threadIdx.x < D) s->before[threadIdx.x] = 1.0f;
    for (int r0 = 0; r0 < C; r0 += SUB) {
        load_rows(a, segment, head, t0, n, r0, s, out);
        __syncthreads();
        decays(s, r0, out);
        diagonal(s, r0, out);
        __syncthreads();
        off_diagonal(s, r0, out);
        __syncthreads();
        advance(s, r0);
        __syncthreads();
    }
    for (int i = threadIdx.x; i < C * D; i += THREADS) out->kd[i / D][i % D] = s->k[i / D][i % D];
    if (threadIdx.x < D) out->before[threadIdx.x] = s->before[threadIdx.x];
}

typedef struct scan_block {
    float m[D][STRIP];
    float x[C][PITCH]; /* half of chunk.x; then A and B; then kd */
    float y[2 * C][STRIP];
    float u[C][STRIP];
} scan_block;

/* A matrix of C x D floats on its way to shared memory: asked for while the one before it is worked on. */
enum { PIECES = C * D / 4 / THREADS };

static TD_DEVICE void ask(float4 piece[PIECES], const float *from)
{
#pragma unroll
    for (int i = 0; i < PIECES; i++) piece[i] = load4(from + 4 * (threadIdx.x + i * THREADS));
}

/* Rows of `width` floats, pitch floats apart; nobody reads `to` any more, and everybody may afterwards. */
static TD_DEVICE void put(float *to, int pitch, int width, const float4 piece[PIECES])
{
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        int at = threadIdx.x + i * THREADS;
        *(float4 *)(to + at / (width / 4) * pitch + at % (width / 4) * 4) = piece[i];
    }
    __syncthreads();
}

/* y[row0 ..][32] = x M for the 64 rows in s->x; a thread 2 rows x 4 channels. */
static TD_DEVICE void state_product(scan_block *s, int row0)
{
    int d = threadIdx.x % 8 * 4, r = threadIdx.x / 8 * 2;
    float acc[2][4] = { { 0.0f, 0.0f, 0.0f, 0.0f }, { 0.0f, 0.0f, 0.0f, 0.0f } };
    for (int c = 0; c < D; c += 4) {
        float4 x0 = load4(&s->x[r][c]), x1 = load4(&s->x[r + 1][c]);
        const float f0[4] = { x0.x, x0.y, x0.z, x0.w }, f1[4] = { x1.x, x1.y, x1.z, x1.w };
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float4 m = load4(&s->m[c + j][d]);
            const float w[4] = { m.x, m.y, m.z, m.w };
#pragma unroll
            for (int i = 0; i < 4; i++) {
                acc[0][i] = fmaf(f0[j], w[i], acc[0][i]);
                acc[1][i] = fmaf(f1[j], w[i], acc[1][i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        s->y[row0 + r][d + i] = acc[0][i];
        s->y[row0 + r + 1][d + i] = acc[1][i];
    }
}

/* u by forward substitution and o. A warp owns 4 channels, a lane 8 rows of one of them: lane = 4 * (row / 8) +
 * channel, so u_j reaches the others by a shuffle. Chains over ascending j. */
enum { MINE = 8 };

static TD_DEVICE void ask_values(float v[MINE], float beta[MINE], const chunk *in, int d0)
{
    int lane = threadIdx.x % 32, d = threadIdx.x / 32 * 4 + lane % 4, r0 = lane / 4 * MINE;
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        v[i] = in->v[r0 + i][d0 + d];
        beta[i] = in->beta[r0 + i];
    }
}

static TD_DEVICE void solve(scan_block *s, const float v[MINE], const float beta[MINE], chunk *out, int d0)
{
    int lane = threadIdx.x % 32, d = threadIdx.x / 32 * 4 + lane % 4, r0 = lane / 4 * MINE;
    const float *at = &s->x[0][0], *bt = at + C * C;
    float u[MINE], o[MINE];
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        u[i] = beta[i] * (v[i] - s->y[r0 + i][d]);
        o[i] = s->y[C + r0 + i][d];
    }
#pragma unroll 1
    for (int block = 0; block < C / MINE; block++)
#pragma unroll
        for (int k = 0; k < MINE; k++) { /* row j = 8 block + k is complete in its owner */
            int j = block * MINE + k;
            float uj = __shfl_sync(0xffffffffu, u[k], 4 * block + lane % 4);
            float4 a0 = load4(at + j * C + r0), a1 = load4(at + j * C + r0 + 4);
            float4 b0 = load4(bt + j * C + r0), b1 = load4(bt + j * C + r0 + 4);
            const float aj[MINE] = { a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w };
            const float bj[MINE] = { b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w };
#pragma unroll
            for (int i = 0; i < MINE; i++) {
                u[i] = fmaf(-aj[i], uj, u[i]);
                o[i] = fmaf(bj[i], uj, o[i]);
            }
        }
#pragma unroll
    for (int i = 0; i < MINE; i++) {
        s->u[r0 + i][d] = u[i];
        out->o[r0 + i][d0 + d] = o[i];
    }
}

/* M = diag(before) M + kd^T u; a thread 4 key x 4 value channels. */
static TD_DEVICE void update(scan_block *s, float4 before)
{
    int d = threadIdx.x % 8 * 4, c = threadIdx.x / 8 * 4;
    const float decay[4] = { before.x, before.y, before.z, before.w };
    float acc[4][4];
#pragma unroll
    for (int i = 0; i < 16; i++) acc[i / 4][i % 4] = decay[i / 4] * s->m[c + i / 4][d + i % 4];
    for (int j = 0; j < C; j++) {
        float4 k4 = load4(&s->x[j][c]), u4 = load4(&s->u[j][d]);
        const float k[4] = { k4.x, k4.y, k4.z, k4.w }, u[4] = { u4.x, u4.y, u4.z, u4.w };
#pragma unroll
        for (int i = 0; i < 16; i++) acc[i / 4][i % 4] = fmaf(k[i / 4], u[i % 4], acc[i / 4][i % 4]);
    }
#pragma unroll
    for (int i = 0; i < 16; i++) s->m[c + i / 4][d + i % 4] = acc[i / 4][i % 4];
}

static __global__ void __launch_bounds__(THREADS) k_kda_chunk_scan(td_kda_call a, chunk *chunks)
{
    td_begin();
    extern __shared__ __align__(16) unsigned char smem[];
    scan_block *s = (scan_block *)smem;
    int head = blockIdx.x, d0 = blockIdx.z * STRIP, first = 0;
    const td_segment *segment = a.segments + blockIdx.y;
    if (!segment->chunked || segment->n_rows < 1) return;
    for (int i = 0; i < (int)blockIdx.y; i++) first += a.segments[i].chunked ? (a.segments[i].n_rows + C - 1) / C : 0;
    const float *from = td_kda_state_at(a, segment, segment->parity, head) + d0;
    for (int i = threadIdx.x; i < D * STRIP; i += THREADS) s->m[i / STRIP][i % STRIP] = from[i / STRIP * D + i % STRIP];
    int n_chunks = (segment->n_rows + C - 1) / C;
    chunk *h = chunks + (size_t)first * a.n_heads + head;
    float4 ahead[PIECES];
    float v[MINE], beta[MINE];
    ask(ahead, h->x[0]);
    for (int i = 0; i < n_chunks; i++, h += a.n_heads) {
        put(s->x[0], PITCH, D, ahead);
        ask(ahead, h->x[C]);
        state_product(s, 0);
        put(s->x[0], PITCH, D, ahead);
        ask(ahead, h->at[0]); /* and bt, which follows it */
        ask_values(v, beta, h, d0);
        state_product(s, C);
        put(s->x[0], C, C, ahead);
        ask(ahead, h->kd[0]);
        float4 before = load4(h->before + threadIdx.x / 8 * 4);
        solve(s, v, beta, h, d0);
        put(s->x[0], PITCH, D, ahead);
        if (i + 1 < n_chunks) ask(ahead, (h + a.n_heads)->x[0]);
        update(s, before);
    }
    __syncthreads();
    float *to = td_kda_state_at(a, segment, !segment->parity, head) + d0;
    for (int i = threadIdx.x; i < D * STRIP; i += THREADS) to[i / STRIP * D + i % STRIP] = s->m[i / STRIP][i % STRIP];
}

static __global__ void k_kda_chunk_finish(td_kda_call a, const chunk *chunks)
{
    td_begin();
    int head = blockIdx.x, t0, lane = threadIdx.x % 32;
    const td_segment *segment = find_chunk(a, blockIdx.y, &t0);
    if (!segment) return;
    const chunk *h = chunks + (size_t)blockIdx.y * a.n_heads + head;
    if (t0 == 0) /* one block of the segment and head */
        td_kda_conv_write(a, segment, head, segment->n_rows, a.proj + (size_t)segment->first_row * a.proj_stride,
                          a.proj_stride);
    for (int t = threadIdx.x / 32; t < C && t0 + t < segment->n_rows; t += WARPS) {
        float o[4];
        for (int i = 0; i < 4; i++) o[i] = h->o[t][lane + 32 * i];
        td_kda_finish(a, segment, head, t0 + t, lane, o);
    }
}

static size_t most_chunks(int rows)
{
    return (size_t)rows / C + TD_SEGMENTS_MAX;
}

size_t td_cuda_kda_bytes(const td_dev_limits *limits)
{
    return most_chunks(limits->rows) * (size_t)limits->n_heads * sizeof(chunk);
}

cudaError_t td_cuda_kda_init(void)
{
    cudaError_t error =
        cudaFuncSetAttribute(k_kda_chunk_prepare, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(sub_block));
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(k_kda_chunk_scan, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(scan_block));
}

td_status td_cuda_kda_chunked(td_cuda_dev *dev, const td_kda_call *a, int n_rows)
{
    td_arena arena;
    td_cuda_scratch(dev, &arena);
    chunk *chunks = (chunk *)td_cuda_take(&arena, td_cuda_kda_bytes(&dev->limits));
    unsigned heads = (unsigned)a->n_heads, n = (unsigned)most_chunks(n_rows);
    td_launch_spread(dev, k_kda_chunk_prepare, dim3(heads, n), THREADS, sizeof(sub_block), *a, chunks);
    td_launch_spread(dev, k_kda_chunk_scan, dim3(heads, (unsigned)a->n_segments, D / STRIP), THREADS,
                     sizeof(scan_block), *a, chunks);
    td_launch(dev, k_kda_chunk_finish, dim3(heads, n), THREADS, 0, *a, chunks);
    return td_cuda_launched(dev, "kda");
}
