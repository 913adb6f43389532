/* Grouped products of routed experts. EXL3 tiles are decoded in registers straight into the A operand of the
 * tensor-core step (docs/cuda.md "Experts"); a decoded tile serves all rows of an item.
 *   few   a block takes an item of up to 16 picks and 64 outputs a column group; its warps take slices of the inputs,
 *         which are added in order through shared memory
 *   many  a block takes an item of up to 64 picks and 256 outputs; x and words pass through shared memory, a warp's 32
 *         outputs stay in registers, and at the end of a slice its sums are added to the total
 * A slice is one chain of steps over ascending inputs; the cut depends on k alone, so both give the same bits. */
#include "ops/cuda/experts_tile.h"

enum {
    WARPS = 8,
    STRIP = 64, /* outputs of a column group: four tiles */
    MANY_OUT = WARPS * 32,
    MANY_TILES = 2,               /* of a warp of k_experts_many, ... */
    MANY_NT = TD_ITEM_MANY / 8,   /* ... and its tiles of eight rows */
    X_BYTES = TD_ITEM_MANY * 128, /* a stage of it: 64 rows x 64 inputs, */
    W_BYTES = MANY_OUT * 64 / 2,  /* and 4-bit words of 256 outputs x 64 inputs */
    STAGE_BYTES = X_BYTES + W_BYTES,
    STAGES = 2,
    COPY_ROWS = 32 * WARPS / 8,              /* of x that the block's threads copy at a time */
    TOTAL_FLOATS = MANY_TILES * MANY_NT * 4, /* of a thread, in shared memory */
    MANY_BYTES = STAGES * STAGE_BYTES + TOTAL_FLOATS * 32 * WARPS * (int)sizeof(float)
};

typedef struct product {
    td_grouped_args a;
    int slices,
        groups; /* groups: of 64 inputs, four steps each (EXL3: k is a multiple of 128; plain: padded with zeros) */
    size_t x_rows, words_strips; /* bytes of COPY_ROWS rows of x, of two strips */
} product;

static TD_DEVICE uint32_t state_product(int codebook, uint32_t state)
{
    return codebook == TD_EXL3_MCG ? state * TD_EXL3_MCG_MARK : state * 89226354u + 64248484u;
}

static TD_DEVICE uint32_t any_pair(int codebook, uint32_t s0, uint32_t s1)
{
    if (codebook != TD_EXL3_MUL1) return td_halves_pair(state_product(codebook, s0), state_product(codebook, s1));
    float v[2];
    for (int i = 0; i < 2; i++) {
        uint32_t p = (i ? s1 : s0) * TD_EXL3_MUL1_MARK, sum = __dp4a(p, 0x01010101u, 0u);
        v[i] = ((float)sum + 1024.0f) * (887.0f / 131072.0f) - 1329.0f / 128.0f;
    }
    __half2 h = __floats2half2_rn(v[0], v[1]);
    return *(uint32_t *)&h;
}

/* td_exl3_end_bit() for the device. */
static TD_DEVICE int end_bit(int p, int bits2)
{
    return bits2 % 2 ? ((p + 1) * bits2 - (p + 1) % 2) / 2 : (p + 1) * (bits2 / 2);
}

/* Any width and codebook, from the tile as it is in the file; value by value. */
static TD_DEVICE void decode_any(const uint32_t *tile, int bits2, int codebook, uint32_t a[4])
{
    int lane = threadIdx.x % 32, n_words = 4 * bits2;
    uint32_t state[8];
    for (int j = 0; j < 8; j++) {
        int last = end_bit(8 * lane + j, bits2) - 1, i = last >> 5;
        uint64_t pair = (uint64_t)__ldg(tile + (i ? i - 1 : n_words - 1)) << 32 | __ldg(tile + i);
        state[j] = (uint32_t)(pair >> (31 - (last & 31))) & 0xffffu;
    }
    a[0] = any_pair(codebook, state[0], state[1]);
    a[1] = any_pair(codebook, state[4], state[5]);
    a[2] = any_pair(codebook, state[2], state[3]);
    a[3] = any_pair(codebook, state[6], state[7]);
}

template <int KIND> static TD_DEVICE void step(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    if (KIND == TD_GPU_PLAIN)
        td_mma_bf16(c, a, b0, b1);
    else
        td_mma_f16(c, a, b0, b1);
}

/* The A operands of tile columns column .. column + TILES - 1 at input tile kt. mcg4: `raw` are the lane's words. */
template <int KIND, int TILES>
static TD_DEVICE void operands(const product &p, const td_gpu_matrix &m, const uint32_t *raw, int kt, int column,
                               uint32_t a[TILES][4])
{
    int lane = threadIdx.x % 32, columns = p.a.n / TD_EXL3_TILE;
#pragma unroll
    for (int c = 0; c < TILES; c++) {
        if (KIND == TD_GPU_MCG4) {
            td_decode_mcg4(raw[c], __shfl_sync(0xffffffffu, raw[c], (lane + 31) & 31), a[c]);
        } else if (column + c >= columns) {
            a[c][0] = a[c][1] = a[c][2] = a[c][3] = 0;
        } else if (KIND == TD_GPU_EXL3 && m.bits2 == 8 &&
                   m.codebook == TD_EXL3_MCG) { /* strips in a layer of several widths */
            const uint32_t *words = (const uint32_t *)m.data +
                                    ((size_t)((column + c) / 4) * (p.a.k / TD_EXL3_TILE) + kt) * 128 + (column + c) % 4;
            td_decode_mcg4(__ldg(words + 4 * lane), __ldg(words + 4 * ((lane + 31) & 31)), a[c]);
        } else if (KIND == TD_GPU_EXL3) {
            decode_any((const uint32_t *)m.data + ((size_t)kt * columns + column + c) * 4 * m.bits2, m.bits2,
                       m.codebook, a[c]);
        } else {
            uint4 v = td_load_stream(m.data + ((size_t)(column + c) * p.groups + kt / 4) * TD_BF16_GROUP +
                                     kt % 4 * 512 + lane * 16);
            a[c][0] = v.x;
            a[c][1] = v.y;
            a[c][2] = v.z;
            a[c][3] = v.w;
        }
    }
}

/* The lane's mcg4 words of a strip at input tile kt; nothing for the other kinds. */
template <int KIND>
static TD_DEVICE void load_words(const product &p, const td_gpu_matrix &m, int kt, int column,
                                 uint32_t raw[STRIP / TD_EXL3_TILE])
{
    if (KIND != TD_GPU_MCG4) return;
    const uint8_t *at = m.data + ((size_t)(column / 4) * (p.a.k / TD_EXL3_TILE) + kt) * 512 + threadIdx.x % 32 * 16;
    uint4 v = td_load_stream(at);
    raw[0] = v.x;
    raw[1] = v.y;
    raw[2] = v.z;
    raw[3] = v.w;
}

/* NT: tiles of eight picks. Input tiles come in pairs, which share 16-byte loads of x. */
template <int KIND, int NT>
static __global__ void __launch_bounds__(32 * WARPS, KIND == TD_GPU_MCG4 && NT == 1 ? 3 : 2) k_experts_few(product p)
{
    td_begin();
    enum { TILES = STRIP / TD_EXL3_TILE };
    __shared__ float red[WARPS][8 * NT][STRIP];
    if ((int)blockIdx.z >= *p.a.n_items) return;
    const td_item item = p.a.items[blockIdx.z];
    const td_gpu_matrix m = p.a.table[(size_t)(p.a.first_matrix + blockIdx.y) * p.a.n_experts + item.expert];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int per_block = WARPS / p.slices, slice = warp % p.slices, strip = blockIdx.x * per_block + warp / p.slices;
    int first = 2 * (p.groups * slice / p.slices), end = 2 * (p.groups * (slice + 1) / p.slices);
    const td_bf16 *x = p.a.x + blockIdx.y * p.a.x_matrix + (size_t)(item.first + g) * p.a.x_stride + 8 * t;
    bool row0 = g < item.n, row1 = g + 8 < item.n, live = strip * STRIP < p.a.n;
    float acc[TILES][NT][4];
#pragma unroll
    for (int i = 0; i < TILES * NT * 4; i++) acc[i / (NT * 4)][i / 4 % NT][i % 4] = 0.0f;
    uint32_t next[2][TILES];
    for (int i = 0; i < 2 && live; i++) load_words<KIND>(p, m, 2 * first + i, strip * TILES, next[i]);
#pragma unroll 2
    for (int pair = first; pair < end && live; pair++) {
        uint32_t raw[2][TILES];
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) raw[i / TILES][i % TILES] = next[i / TILES][i % TILES];
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (pair + 1 < end) load_words<KIND>(p, m, 2 * pair + 2 + i, strip * TILES, next[i]);
        uint4 b[2] = { make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0) };
        if (row0) b[0] = *(const uint4 *)(x + 32 * pair);
        if (NT > 1 && row1) b[1] = *(const uint4 *)(x + 8 * p.a.x_stride + 32 * pair);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t a[TILES][4];
            operands<KIND, TILES>(p, m, raw[i], 2 * pair + i, strip * TILES, a);
#pragma unroll
            for (int c = 0; c < TILES; c++) {
                step<KIND>(acc[c][0], a[c], i ? b[0].z : b[0].x, i ? b[0].w : b[0].y);
                if constexpr (NT > 1) step<KIND>(acc[c][1], a[c], i ? b[1].z : b[1].x, i ? b[1].w : b[1].y);
            }
        }
    }
#pragma unroll
    for (int c = 0; c < TILES; c++)
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4; i++) red[warp][8 * nt + 2 * t + i % 2][16 * c + g + i / 2 * 8] = acc[c][nt][i];
    __syncthreads();
    for (int i = threadIdx.x; i < per_block * item.n * STRIP; i += 32 * WARPS) {
        int o = i % STRIP, r = i / STRIP % item.n, q = i / STRIP / item.n,
            out = (blockIdx.x * per_block + q) * STRIP + o;
        if (out >= p.a.n) continue;
        float sum = 0.0f;
        for (int s = 0; s < p.slices; s++) sum += red[q * p.slices + s][r][o];
        p.a.z[(size_t)(item.first + r) * p.a.z_stride + (size_t)blockIdx.y * p.a.n + out] = sum;
    }
}

/* Rows of x lie 128 bytes apart in a stage; odd rows have their halves exchanged (linear.cu). */
static TD_DEVICE int piece_at(int row, int piece)
{
    return row * 128 + ((piece ^ (row & 1) * 4) * 16);
}

/* What a thread copies of every stage: two pieces of x, COPY_ROWS rows apart, and, 4-bit mcg, two pieces of words, two
 * strips apart (2 KiB a strip: four input tiles). Planned once a block. */
typedef struct stage_plan {
    const uint8_t *x, *words;
    bool x_valid[2], words_valid[2];
} stage_plan;

template <int KIND>
static TD_DEVICE stage_plan plan_stages(const product &p, const td_gpu_matrix &m, const td_item &item)
{
    int row = threadIdx.x / 8, strip = blockIdx.x * (MANY_OUT / STRIP) + threadIdx.x / 128;
    stage_plan plan;
    plan.x = (const uint8_t *)(p.a.x + blockIdx.y * p.a.x_matrix + (size_t)(item.first + row) * p.a.x_stride) +
             threadIdx.x % 8 * 16;
    plan.words = m.data + (size_t)strip * (p.a.k / TD_EXL3_TILE) * 512 + threadIdx.x % 128 * 16;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        plan.x_valid[i] = row + i * COPY_ROWS < item.n;
        plan.words_valid[i] = strip + 2 * i < p.a.n / STRIP;
    }
    return plan;
}

/* Copies the next stage, of x for 8 * NT rows or a few more. Two pointers, which move on, and not four. */
template <int KIND, int NT> static TD_DEVICE void copy_stage(const product &p, stage_plan &plan, unsigned char *to)
{
#pragma unroll
    for (int i = 0; i * COPY_ROWS < 8 * NT; i++)
        td_copy_async(to + piece_at(threadIdx.x / 8, threadIdx.x % 8) + i * COPY_ROWS * 128, plan.x + i * p.x_rows,
                      plan.x_valid[i]);
    plan.x += 128;
#pragma unroll
    for (int i = 0; i < 2 && KIND == TD_GPU_MCG4; i++)
        td_copy_async(to + X_BYTES + threadIdx.x * 16 + i * 4096, plan.words + i * p.words_strips, plan.words_valid[i]);
    plan.words += 2048;
    td_copy_commit();
}

/* 32 inputs of a stage, for a warp's outputs. x, words: the lane's place in the stage for these inputs. */
template <int KIND, int NT>
static TD_DEVICE void many_pair(const product &p, const td_gpu_matrix &m, const unsigned char *x,
                                const unsigned char *words, int kt, int column, float acc[MANY_TILES][NT][4])
{
    enum { CHUNK = 4 };
    uint32_t a[2][MANY_TILES][4];
    uint4 b[NT];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t raw[MANY_TILES] = { 0, 0 };
        if (KIND == TD_GPU_MCG4) {
            uint2 v = *(const uint2 *)(words + i * 512);
            raw[0] = v.x;
            raw[1] = v.y;
        }
        operands<KIND, MANY_TILES>(p, m, raw, kt + i, column, a[i]);
    }
#pragma unroll
    for (int first = 0; first < NT; first += CHUNK) {
        if (first) __syncwarp(); /* keeps the compiler from loading all of x at once: it has no registers for that */
#pragma unroll
        for (int j = first; j < NT && j < first + CHUNK; j++) b[j] = *(const uint4 *)(x + j * 1024);
#pragma unroll
        for (int i = 0; i < 2; i++) /* steps that add to the same sums are eight apart */
#pragma unroll
            for (int j = first; j < NT && j < first + CHUNK; j++)
#pragma unroll
                for (int c = 0; c < MANY_TILES; c++)
                    step<KIND>(acc[c][j], a[i][c], i ? b[j].z : b[j].x, i ? b[j].w : b[j].y);
    }
}

/* After a slice: total += acc, acc = 0; the last one leaves the sums in acc. total: the thread's. */
template <int FLOATS> static TD_DEVICE void add_slice(float acc[FLOATS], float4 *total, bool first, bool last)
{
#pragma unroll
    for (int i = 0; i < FLOATS / 4; i++) {
        float4 before = first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : total[i * 32 * WARPS];
        float sum[4] = { before.x + acc[4 * i], before.y + acc[4 * i + 1], before.z + acc[4 * i + 2],
                         before.w + acc[4 * i + 3] };
        if (!last) total[i * 32 * WARPS] = make_float4(sum[0], sum[1], sum[2], sum[3]);
#pragma unroll
        for (int j = 0; j < 4; j++) acc[4 * i + j] = last ? sum[j] : 0.0f;
    }
}

/* A block's part with tiles for exactly 8 * NT rows, so that nothing in the loop depends on the item. */
template <int KIND, int NT>
static TD_DEVICE void many_item(const product &p, const td_gpu_matrix &m, const td_item &item, unsigned char *smem)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int column = (blockIdx.x * WARPS + warp) * MANY_TILES, group = 0;
    int x_at = piece_at(g, t), words_at = X_BYTES + warp / 2 * 2048 + lane * 16 + warp % 2 * 8;
    float4 *total = (float4 *)(smem + STAGES * STAGE_BYTES) + threadIdx.x;
    stage_plan plan = plan_stages<KIND>(p, m, item);
    float acc[MANY_TILES][NT][4];
#pragma unroll
    for (int i = 0; i < MANY_TILES * NT * 4; i++) acc[i / (NT * 4)][i / 4 % NT][i % 4] = 0.0f;
    copy_stage<KIND, NT>(p, plan, smem);
    for (int slice = 0; slice < p.slices; slice++) {
        for (int end = p.groups * (slice + 1) / p.slices; group < end; group++) {
            td_copy_wait<0>();
            __syncthreads();
            const unsigned char *stage = smem + (unsigned)group % STAGES * STAGE_BYTES;
            if (group + 1 < p.groups)
                copy_stage<KIND, NT>(p, plan, smem + (unsigned)(group + 1) % STAGES * STAGE_BYTES);
#pragma unroll
            for (int half = 0; half < 2; half++)
                many_pair<KIND, NT>(p, m, stage + (x_at ^ half * 64), stage + words_at + half * 1024,
                                    4 * group + 2 * half, column, acc);
        }
        add_slice<MANY_TILES * NT * 4>(&acc[0][0][0], total, slice == 0, slice + 1 == p.slices);
    }
    const td_item stored = p.a.items[blockIdx.z]; /* again: registers are short in the loop */
#pragma unroll
    for (int i = 0; i < MANY_TILES * NT * 4; i++) {
        int out = (column + i / (NT * 4)) * TD_EXL3_TILE + g + i / 2 % 2 * 8, r = i / 4 % NT * 8 + 2 * t + i % 2;
        if (out < p.a.n && r < stored.n)
            p.a.z[(size_t)(stored.first + r) * p.a.z_stride + (size_t)blockIdx.y * p.a.n + out] =
                acc[i / (NT * 4)][i / 4 % NT][i % 4];
    }
}

template <int KIND>
static __global__ void __launch_bounds__(32 * WARPS, KIND == TD_GPU_MCG4 ? 2 : 1) k_experts_many(product p)
{
    td_begin();
    extern __shared__ __align__(16) unsigned char smem[];
    if ((int)blockIdx.z >= *p.a.n_items) return;
    const td_item item = p.a.items[blockIdx.z];
    const td_gpu_matrix m = p.a.table[(size_t)(p.a.first_matrix + blockIdx.y) * p.a.n_experts + item.expert];
    if constexpr (KIND != TD_GPU_MCG4) {
        many_item<KIND, MANY_NT>(p, m, item, smem);
    } else {
        switch ((item.n + 7) / 8) {
        case 1: many_item<KIND, 1>(p, m, item, smem); break;
        case 2: many_item<KIND, 2>(p, m, item, smem); break;
        case 3: many_item<KIND, 3>(p, m, item, smem); break;
        case 4: many_item<KIND, 4>(p, m, item, smem); break;
        case 5: many_item<KIND, 5>(p, m, item, smem); break;
        case 6: many_item<KIND, 6>(p, m, item, smem); break;
        case 7: many_item<KIND, 7>(p, m, item, smem); break;
        default: many_item<KIND, MANY_NT>(p, m, item, smem); break;
        }
    }
}

template <int KIND> static void launch(const td_cuda_dev *dev, const product &p)
{
    const td_grouped_args &a = p.a;
    int outputs = a.item_picks > TD_ITEM_FEW ? (int)MANY_OUT : WARPS / p.slices * STRIP;
    dim3 grid(td_ceil_div((size_t)a.n, (size_t)outputs), (unsigned)a.n_matrices, (unsigned)a.items_cap);
    if (a.item_picks > TD_ITEM_FEW)
        td_launch_spread(dev, k_experts_many<KIND>, grid, 32 * WARPS, MANY_BYTES, p);
    else if (a.item_picks <= 8)
        td_launch_spread(dev, k_experts_few<KIND, 1>, grid, 32 * WARPS, 0, p);
    else
        td_launch_spread(dev, k_experts_few<KIND, 2>, grid, 32 * WARPS, 0, p);
}

cudaError_t td_cuda_experts_init(void)
{
    cudaError_t error =
        cudaFuncSetAttribute(k_experts_many<TD_GPU_MCG4>, cudaFuncAttributeMaxDynamicSharedMemorySize, MANY_BYTES);
    if (error == cudaSuccess)
        error =
            cudaFuncSetAttribute(k_experts_many<TD_GPU_EXL3>, cudaFuncAttributeMaxDynamicSharedMemorySize, MANY_BYTES);
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(k_experts_many<TD_GPU_PLAIN>, cudaFuncAttributeMaxDynamicSharedMemorySize, MANY_BYTES);
}

td_status td_cuda_grouped(td_cuda_dev *dev, const td_grouped_args *a)
{
    product p = { *a, td_expert_slices(a->k), td_groups(a->k), COPY_ROWS * a->x_stride * sizeof *a->x,
                  (size_t)(a->k / TD_EXL3_TILE) * 1024 };
    switch (a->kind) {
    case TD_GPU_MCG4: launch<TD_GPU_MCG4>(dev, p); break;
    case TD_GPU_EXL3: launch<TD_GPU_EXL3>(dev, p); break;
    default: launch<TD_GPU_PLAIN>(dev, p); break;
    }
    return td_cuda_launched(dev, "experts");
}
