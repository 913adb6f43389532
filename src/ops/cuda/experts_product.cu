/* Grouped products of routed experts. EXL3 tiles are decoded in registers straight into the A operand of the
 * tensor-core step (docs/cuda.md "Experts"); a decoded tile serves all rows of an item.
 *   few   a block takes an item of up to 16 picks and 64 outputs a column group; its warps take slices of the inputs,
 *         which are added in order through shared memory
 *   many  a block takes an item of up to 64 picks and 256 outputs; x and words pass through shared memory, a warp's 32
 *         outputs stay in registers, and at the end of a slice its sums are added to the total. The operands of a step
 *         are decoded while the step before it is in the tensor core, and warps are not all at the same step
 * A slice is one chain of steps over ascending inputs; the cut depends on k alone, so both give the same bits. */
#include "ops/cuda/experts_tile.h"

enum {
    WARPS = 8,
    STRIP = 64, /* outputs of a column group: four tiles */
    COLUMNS = STRIP / TD_EXL3_TILE,
    STEPS = TD_TILE_IN / 16, /* of a group */
    WORDS_BYTES = 512,       /* 4-bit words of a column of tiles x a group */
    MANY_OUT = WARPS * 32,
    MANY_TILES = 2,                                  /* of a warp of k_experts_many, ... */
    MANY_NT = TD_ITEM_MANY / 8,                      /* ... and its tiles of eight rows */
    X_BYTES = TD_ITEM_MANY * 128,                    /* a stage of x: 64 rows x 64 inputs */
    W_BYTES = MANY_OUT / TD_EXL3_TILE * WORDS_BYTES, /* 4-bit words of 256 outputs x 64 inputs */
    STAGES = 3,                 /* of x; the words have one, as they are read from it long before they are needed */
    WORDS_AHEAD = 6,            /* groups that words are asked for ahead, into L2 */
    COPY_ROWS = 32 * WARPS / 8, /* of x that the block's threads copy at a time */
    TOTAL_FLOATS = MANY_TILES * MANY_NT * 4, /* of a thread, in shared memory */
    MANY_BYTES = STAGES * X_BYTES + W_BYTES + TOTAL_FLOATS * 32 * WARPS * (int)sizeof(float)
};

typedef struct product {
    td_grouped_args a;
    int slices;
    int groups;    /* of 64 inputs, four steps each (EXL3: k is a multiple of 128; plain: padded with zeros) */
    size_t x_rows; /* bytes of COPY_ROWS rows of x */
} product;

static TD_DEVICE uint32_t state_product(int codebook, uint32_t state)
{
    return codebook == TD_EXL3_MCG ? state * TD_EXL3_MCG_MARK : state * 89226354u + 64248484u;
}

static TD_DEVICE __half any_value(int codebook, uint32_t state)
{
    if (codebook == TD_EXL3_MUL1) {
        uint32_t sum = __dp4a(state * TD_EXL3_MUL1_MARK, 0x01010101u, 0u);
        return __float2half_rn(((float)sum + 1024.0f) * (887.0f / 131072.0f) - 1329.0f / 128.0f);
    }
    uint32_t halves = td_and_xor(state_product(codebook, state), 0x8fff8fffu, 0x3b603b60u);
    return __hadd(__low2half(*(__half2 *)&halves), __high2half(*(__half2 *)&halves));
}

/* td_exl3_end_bit() for the device. */
static TD_DEVICE int end_bit(int p, int bits2)
{
    return bits2 % 2 ? ((p + 1) * bits2 - (p + 1) % 2) / 2 : (p + 1) * (bits2 / 2);
}

static TD_DEVICE __half decode_value(const uint32_t *tile, int bits2, int codebook, int p)
{
    int last = end_bit(p, bits2) - 1, i = last >> 5;
    uint64_t pair = (uint64_t)__ldg(tile + (i ? i - 1 : 4 * bits2 - 1)) << 32 | __ldg(tile + i);
    return any_value(codebook, (uint32_t)(pair >> (31 - (last & 31))) & 0xffffu);
}

/* Any width and codebook, from tiles as they are in the file, value by value: what td_decode_mcg4() gives a lane of step
 * i. tile: of inputs 16 t .. + 15 of the group. */
static TD_DEVICE void decode_any(const uint32_t *tile, int bits2, int codebook, int i, uint32_t a[4])
{
    int lane = threadIdx.x % 32, p = 8 * (lane / 4 * 4 + i);
    for (int j = 0; j < 4; j++) {
        int at = p + j % 2 * 4 + j / 2 * 2;
        __half2 v =
            __halves2half2(decode_value(tile, bits2, codebook, at), decode_value(tile, bits2, codebook, at + 1));
        a[j] = *(uint32_t *)&v;
    }
}

template <int KIND> static TD_DEVICE void step(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    if (KIND == TD_GPU_PLAIN)
        td_mma_bf16(c, a, b0, b1);
    else
        td_mma_f16(c, a, b0, b1);
}

/* Where a lane's words of a column of tiles are (4-bit mcg), of the first group. A group further on: COLUMNS *
 * WORDS_BYTES. */
static TD_DEVICE const uint8_t *words_at(const product &p, const td_gpu_matrix &m, int column, int lane)
{
    return m.data + ((size_t)(column / COLUMNS) * p.groups * COLUMNS + column % COLUMNS) * WORDS_BYTES + lane * 16;
}

/* The A operand of a column of tiles at step i of a group, where that is not 4-bit mcg only. */
template <int KIND>
static TD_DEVICE void operand(const product &p, const td_gpu_matrix &m, int group, int i, int column, uint32_t a[4])
{
    int lane = threadIdx.x % 32, columns = p.a.n / TD_EXL3_TILE;
    if (column >= columns) {
        a[0] = a[1] = a[2] = a[3] = 0;
    } else if (KIND == TD_GPU_PLAIN) {
        uint4 v = td_load_stream(m.data + ((size_t)column * p.groups + group) * TD_BF16_GROUP + i * 512 + lane * 16);
        a[0] = v.x;
        a[1] = v.y;
        a[2] = v.z;
        a[3] = v.w;
    } else if (m.bits2 == 8 && m.codebook == TD_EXL3_MCG) { /* strips in a layer of several widths */
        size_t at = (size_t)group * COLUMNS * WORDS_BYTES;
        const uint32_t *own = (const uint32_t *)(words_at(p, m, column, lane) + at);
        const uint32_t *other = (const uint32_t *)(words_at(p, m, column, (lane + 28) & 31) + at);
        td_decode_mcg4(td_pair_sums_init(), __ldg(own + i), i ? __ldg(own + i - 1) : __ldg(other + 3), a);
    } else {
        size_t tile = (size_t)(group * STEPS + lane % 4) * columns + column;
        decode_any((const uint32_t *)m.data + tile * 4 * m.bits2, m.bits2, m.codebook, i, a);
    }
}

/* A lane's 16 values of a row's group: by lane (EXL3) or as weight.h says (plain), two steps a piece. x: the row. */
template <int KIND> static TD_DEVICE void load_x(const td_bf16 *x, int group, bool live, uint4 b[2])
{
    int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int at = group * TD_TILE_IN + (KIND == TD_GPU_PLAIN ? 32 * i + 8 * t : 16 * t + 8 * i);
        b[i] = live ? *(const uint4 *)(x + at) : make_uint4(0, 0, 0, 0);
    }
}

/* The warps' slices added in order, through shared memory, into z. */
template <int NT>
static TD_DEVICE void add_slices(const product &p, const td_item &item, int per_block, const float acc[COLUMNS][NT][4],
                                 float (*red)[8 * NT][STRIP])
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
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

/* NT: tiles of eight picks. */
template <int KIND, int NT>
static __global__ void __launch_bounds__(32 * WARPS, KIND == TD_GPU_MCG4 && NT == 1 ? 3 : 2) k_experts_few(product p)
{
    td_begin();
    __shared__ float red[WARPS][8 * NT][STRIP];
    if ((int)blockIdx.z >= *p.a.n_items) return;
    const td_item item = p.a.items[blockIdx.z];
    const td_gpu_matrix m = p.a.table[(size_t)(p.a.first_matrix + blockIdx.y) * p.a.n_experts + item.expert];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    int per_block = WARPS / p.slices, slice = warp % p.slices, strip = blockIdx.x * per_block + warp / p.slices;
    int group = p.groups * slice / p.slices, end = p.groups * (slice + 1) / p.slices;
    const td_bf16 *x = p.a.x + blockIdx.y * p.a.x_matrix + (size_t)(item.first + g) * p.a.x_stride;
    const uint8_t *w = words_at(p, m, strip * COLUMNS, lane) + (size_t)group * COLUMNS * WORDS_BYTES;
    if (strip * STRIP >= p.a.n) end = group;
    float acc[COLUMNS][NT][4];
#pragma unroll
    for (int i = 0; i < COLUMNS * NT * 4; i++) acc[i / (NT * 4)][i / 4 % NT][i % 4] = 0.0f;
    const td_pair_sums ones = td_pair_sums_init();
    uint4 words[COLUMNS], next[NT][2];
    for (int c = 0; c < COLUMNS && KIND == TD_GPU_MCG4 && group < end; c++)
        words[c] = td_load_stream(w + c * WORDS_BYTES);
#pragma unroll
    for (int j = 0; j < NT; j++)
        load_x<KIND>(x + 8 * j * p.a.x_stride, group, g + 8 * j < item.n && group < end, next[j]);
#pragma unroll 1
    for (; group < end; group++) {
        uint4 b[NT][2];
        bool more = group + 1 < end;
#pragma unroll
        for (int j = 0; j < NT; j++) {
            b[j][0] = next[j][0];
            b[j][1] = next[j][1];
            load_x<KIND>(x + 8 * j * p.a.x_stride, group + 1, g + 8 * j < item.n && more, next[j]);
        }
        w += COLUMNS * WORDS_BYTES;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            uint32_t before = KIND == TD_GPU_MCG4 ? td_mcg4_before(words[c]) : 0;
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                uint32_t a[4];
                if (KIND == TD_GPU_MCG4)
                    td_decode_mcg4(ones, td_word(words[c], i), i ? td_word(words[c], i - 1) : before, a);
                else
                    operand<KIND>(p, m, group, i, strip * COLUMNS + c, a);
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    uint4 v = b[j][i / 2];
                    step<KIND>(acc[c][j], a, i % 2 ? v.z : v.x, i % 2 ? v.w : v.y);
                }
            }
            if (KIND == TD_GPU_MCG4 && more) words[c] = td_load_stream(w + c * WORDS_BYTES);
        }
    }
    add_slices<NT>(p, item, per_block, acc, red);
}

/* Rows of x lie 128 bytes apart in a stage, their 16-byte pieces exchanged so that eight rows' same piece meets all
 * banks once. */
static TD_DEVICE int piece_at(int row, int piece)
{
    return row * 128 + (piece ^ (row & 7)) * 16;
}

/* What a thread copies of every group: two pieces of x, COPY_ROWS rows apart, and, 4-bit mcg, the words that it will
 * decode itself, which it therefore need not wait for others for. Planned once a block. */
typedef struct copies {
    const uint8_t *x, *words;
    bool x_valid[2], words_valid;
} copies;

static TD_DEVICE copies plan_copies(const product &p, const td_gpu_matrix &m, const td_item &item, int column)
{
    int row = threadIdx.x / 8;
    copies plan;
    plan.x = (const uint8_t *)(p.a.x + blockIdx.y * p.a.x_matrix + (size_t)(item.first + row) * p.a.x_stride) +
             threadIdx.x % 8 * 16;
    plan.words = words_at(p, m, column, threadIdx.x % 32);
    for (int i = 0; i < 2; i++) plan.x_valid[i] = row + i * COPY_ROWS < item.n;
    plan.words_valid = column * TD_EXL3_TILE < p.a.n;
    return plan;
}

/* Barriers in shared memory whose arriving and waiting are two things. A phase ends with the n-th arrival. Every thread
 * arrives for itself: one lane's arrival behind __syncwarp() would do, but racecheck does not take it for its warp's. */
static TD_DEVICE void barrier_init(uint64_t *barrier, int n)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(td_shared_at(barrier)), "r"(n) : "memory");
}

static TD_DEVICE void barrier_arrive(uint64_t *barrier)
{
    asm volatile("{\n .reg .b64 state;\n mbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(td_shared_at(barrier))
                 : "memory");
}

/* Arrives once the thread's td_copy_async() so far are done. */
static TD_DEVICE void barrier_arrive_copies(uint64_t *barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(td_shared_at(barrier)) : "memory");
}

/* Until the phase of this parity has ended. */
static TD_DEVICE void barrier_wait(uint64_t *barrier, int parity)
{
    uint32_t at = td_shared_at(barrier), done;
    do
        asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     " selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(at), "r"(parity)
                     : "memory");
    while (!done);
}

/* Copies the next group of x, of 8 * NT rows or a few more. */
template <int NT> static TD_DEVICE void copy_x(const product &p, copies &plan, unsigned char *to, uint64_t *landed)
{
#pragma unroll
    for (int i = 0; i * COPY_ROWS < 8 * NT; i++)
        td_copy_async(to + piece_at(threadIdx.x / 8, threadIdx.x % 8) + i * COPY_ROWS * 128, plan.x + i * p.x_rows,
                      plan.x_valid[i]);
    barrier_arrive_copies(landed);
    plan.x += 128;
}

static TD_DEVICE unsigned char *own_words(unsigned char *words)
{
    return words + threadIdx.x / 32 * MANY_TILES * WORDS_BYTES + threadIdx.x % 32 * 16;
}

/* Copies the next group's words, 4-bit mcg, and asks for those WORDS_AHEAD groups later: a line is eight lanes', of which
 * the first asks for one column of tiles and the fifth for the other. */
template <int KIND> static TD_DEVICE void copy_words(const product &p, copies &plan, unsigned char *to, int group)
{
    if (KIND == TD_GPU_MCG4 && group < p.groups) {
#pragma unroll
        for (int c = 0; c < MANY_TILES; c++)
            td_copy_async(own_words(to) + c * WORDS_BYTES, plan.words + c * WORDS_BYTES, plan.words_valid);
        if (group + WORDS_AHEAD < p.groups && threadIdx.x % 4 == 0 && plan.words_valid)
            td_prefetch(plan.words + WORDS_AHEAD * COLUMNS * WORDS_BYTES + threadIdx.x % 8 / 4 * WORDS_BYTES);
        plan.words += COLUMNS * WORDS_BYTES;
    }
    td_copy_commit();
}

/* A warp's next operands, decoded piece by piece. words: the lane's, of a group. */
typedef struct decoder {
    td_pair_sums ones;
    uint4 words[MANY_TILES];
    uint32_t before[MANY_TILES];
} decoder;

static TD_DEVICE void load_words(decoder &d, unsigned char *words)
{
#pragma unroll
    for (int c = 0; c < MANY_TILES; c++) {
        d.words[c] = *(const uint4 *)(own_words(words) + c * WORDS_BYTES);
        d.before[c] = td_mcg4_before(d.words[c]);
    }
}

/* Halves first .. end - 1 of the operands of step i. */
static TD_DEVICE void decode_halves(const decoder &d, int i, int first, int end, uint32_t a[MANY_TILES][4])
{
#pragma unroll
    for (int h = 0; h < 2 * MANY_TILES; h++)
        if (h >= first && h < end)
            td_decode_mcg4_half(d.ones, td_word(d.words[h / 2], i),
                                i ? td_word(d.words[h / 2], i - 1) : d.before[h / 2], h % 2, a[h / 2]);
}

/* The B operands of two tiles of eight rows at step i. x: the lane's row and piece of step 0 of the first tile. */
template <int KIND> static TD_DEVICE void load_b(const unsigned char *stage, int x, int i, int tile, uint32_t b[4])
{
    if (KIND == TD_GPU_PLAIN) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint2 v = *(const uint2 *)(stage + (x ^ i / 2 * 64) + (tile + j) * 1024 + i % 2 * 8);
            b[2 * j] = v.x;
            b[2 * j + 1] = v.y;
        }
    } else {
        td_ldmatrix(b, stage + (x ^ i * 32) + tile * 1024);
    }
}

template <int KIND> static TD_DEVICE int x_of_lane()
{
    int lane = threadIdx.x % 32;
    return KIND == TD_GPU_PLAIN ? piece_at(lane / 4, lane % 4) : piece_at(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

/* A step of a group: products of a with every row, and meanwhile, 4-bit mcg, the next step's operands. */
template <int KIND, int NT>
static TD_DEVICE void many_step(const unsigned char *stage, int x, int i, const decoder &d,
                                const uint32_t a[MANY_TILES][4], uint32_t next[MANY_TILES][4],
                                float acc[MANY_TILES][NT][4])
{
    enum { PAIRS = (NT + 1) / 2, HALVES = 2 * MANY_TILES };
    uint32_t b[2][4];
    load_b<KIND>(stage, x, i, 0, b[0]);
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        if (pair + 1 < PAIRS) load_b<KIND>(stage, x, i, 2 * pair + 2, b[(pair + 1) % 2]);
#pragma unroll
        for (int j = 2 * pair; j < NT && j < 2 * pair + 2; j++)
#pragma unroll
            for (int c = 0; c < MANY_TILES; c++)
                step<KIND>(acc[c][j], a[c], b[pair % 2][j % 2 * 2], b[pair % 2][j % 2 * 2 + 1]);
        if (KIND == TD_GPU_MCG4)
            decode_halves(d, (i + 1) % STEPS, HALVES * pair / PAIRS, HALVES * (pair + 1) / PAIRS, next);
    }
}

/* After a slice: total += acc, acc = 0; the last one leaves the sums in acc. total: the thread's. */
template <int FLOATS> static TD_DEVICE void add_slice(float acc[FLOATS], float4 *total, bool first, bool last)
{
    if (!first) {
#pragma unroll
        for (int i = 0; i < FLOATS / 4; i++) {
            float4 before = total[i * 32 * WARPS];
            acc[4 * i] += before.x;
            acc[4 * i + 1] += before.y;
            acc[4 * i + 2] += before.z;
            acc[4 * i + 3] += before.w;
        }
    }
    if (last) return;
#pragma unroll
    for (int i = 0; i < FLOATS / 4; i++) {
        total[i * 32 * WARPS] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
#pragma unroll
        for (int j = 0; j < 4; j++) acc[4 * i + j] = 0.0f;
    }
}

/* Stages of x go round: `landed` when every thread's copies have arrived, `free` when every thread has read them. Warps
 * of a block may so be most of a group apart, and decode while others multiply. */
typedef struct stages {
    uint64_t landed[STAGES], free[STAGES];
} stages;

/* A block's part with tiles for exactly 8 * NT rows, so that nothing in the loop depends on the item. */
template <int KIND, int NT>
static TD_DEVICE void many_item(const product &p, const td_gpu_matrix &m, const td_item &item, unsigned char *smem,
                                stages *s)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int column = (blockIdx.x * WARPS + warp) * MANY_TILES, x = x_of_lane<KIND>(), group = 0, slot = 0, round = 0;
    unsigned char *words = smem + STAGES * X_BYTES;
    float4 *total = (float4 *)(words + W_BYTES) + threadIdx.x;
    copies plan = plan_copies(p, m, item, column);
    float acc[MANY_TILES][NT][4];
    uint32_t a[2][MANY_TILES][4];
    decoder d = { td_pair_sums_init() };
#pragma unroll
    for (int i = 0; i < MANY_TILES * NT * 4; i++) acc[i / (NT * 4)][i / 4 % NT][i % 4] = 0.0f;
    copy_words<KIND>(p, plan, words, 0);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++)
        if (i < p.groups) copy_x<NT>(p, plan, smem + i * X_BYTES, &s->landed[i]);
    td_copy_wait<0>();
    if (KIND == TD_GPU_MCG4) {
        load_words(d, words);
        decode_halves(d, 0, 0, 2 * MANY_TILES, a[0]);
    }
    for (int slice = 0; slice < p.slices; slice++) {
        for (int end = p.groups * (slice + 1) / p.slices; group < end; group++) {
            const unsigned char *stage = smem + slot * X_BYTES;
            int before = slot ? slot - 1 : STAGES - 1;
            copy_words<KIND>(p, plan, words, group + 1);
            barrier_wait(&s->landed[slot], round & 1);
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                if (i + 1 == STEPS) {
                    td_copy_wait<0>();
                    if (KIND == TD_GPU_MCG4) load_words(d, words);
                    if (group + STAGES - 1 < p.groups) { /* into the stage of the group before */
                        if (group) barrier_wait(&s->free[before], slot ? round & 1 : ~round & 1);
                        copy_x<NT>(p, plan, smem + before * X_BYTES, &s->landed[before]);
                    }
                }
                if (KIND != TD_GPU_MCG4)
                    for (int c = 0; c < MANY_TILES; c++) operand<KIND>(p, m, group, i, column + c, a[i % 2][c]);
                many_step<KIND, NT>(stage, x, i, d, a[i % 2], a[(i + 1) % 2], acc);
            }
            barrier_arrive(&s->free[slot]);
            if (++slot == STAGES) {
                slot = 0;
                round++;
            }
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
    extern __shared__ __align__(128) unsigned char smem[];
    __shared__ stages s;
    if ((int)blockIdx.z >= *p.a.n_items) return;
    if (threadIdx.x < STAGES) {
        barrier_init(&s.landed[threadIdx.x], 32 * WARPS);
        barrier_init(&s.free[threadIdx.x], 32 * WARPS);
    }
    __syncthreads();
    const td_item item = p.a.items[blockIdx.z];
    const td_gpu_matrix m = p.a.table[(size_t)(p.a.first_matrix + blockIdx.y) * p.a.n_experts + item.expert];
    if constexpr (KIND != TD_GPU_MCG4) {
        many_item<KIND, MANY_NT>(p, m, item, smem, &s);
    } else {
        switch ((item.n + 7) / 8) {
        case 1: many_item<KIND, 1>(p, m, item, smem, &s); break;
        case 2: many_item<KIND, 2>(p, m, item, smem, &s); break;
        case 3: many_item<KIND, 3>(p, m, item, smem, &s); break;
        case 4: many_item<KIND, 4>(p, m, item, smem, &s); break;
        case 5: many_item<KIND, 5>(p, m, item, smem, &s); break;
        case 6: many_item<KIND, 6>(p, m, item, smem, &s); break;
        case 7: many_item<KIND, 7>(p, m, item, smem, &s); break;
        default: many_item<KIND, MANY_NT>(p, m, item, smem, &s); break;
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
    product p = { *a, td_expert_slices(a->k), td_groups(a->k), COPY_ROWS * a->x_stride * sizeof *a->x };
    switch (a->kind) {
    case TD_GPU_MCG4: launch<TD_GPU_MCG4>(dev, p); break;
    case TD_GPU_EXL3: launch<TD_GPU_EXL3>(dev, p); break;
    default: launch<TD_GPU_PLAIN>(dev, p); break;
    }
    return td_cuda_launched(dev, "experts");
}
