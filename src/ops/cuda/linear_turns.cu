/* y = W x in q4 for up to eight rows when there are more panels than the chip has room for blocks. Blocks stay and go
 * from panel to panel: x and its sums are prepared once, and the next panel's weights are asked for part by part, as
 * soon as this panel's have been used, so that loading and decoding go on side by side. Blocks that come and go, as in
 * linear_few.cu, load together and then decode together. Weights go straight to registers: a ring in shared memory
 * takes a third more instructions. Same slices, a warp each, and same sums. */
#include "ops/cuda/product.h"

enum {
    WARPS = 8,
    MOST_PARTS = 2, /* of a slice, asked for one after the other */
    BLOCKS = 2,     /* of a multiprocessor */
    MOST_ROWS = 8
};

template <int UNROLL> struct turns {
    static const int PARTS = UNROLL < MOST_PARTS ? UNROLL : MOST_PARTS, GROUPS = UNROLL / PARTS;
    static const int ROW = UNROLL * TD_TILE_IN * 2; /* bytes of a row's slice of x */

    /* Weights of a part as they are stored; the lanes of a g need the same pairs: a group each. */
    typedef struct part {
        uint4 raw[GROUPS];
        uint2 pair;
    } part;

    /* A warp's own: shares of the panel at hand and of the one before. */
    typedef struct shared {
        float red[2][8][TD_TILE_OUT + 1];
    } shared;
    static size_t shared_bytes(int n_rows)
    {
        return WARPS * (sizeof(shared) + (size_t)n_rows * ROW);
    }
};

template <int UNROLL> static TD_DEVICE void load_part(const uint8_t *at, typename turns<UNROLL>::part *w)
{
    const int GROUPS = turns<UNROLL>::GROUPS;
    int lane = threadIdx.x % 32;
    w->pair = td_load_early8(at + lane / 4 * 8 + lane % 4 % GROUPS * TD_Q4_GROUP_ALL);
#pragma unroll
    for (int u = 0; u < GROUPS; u++) w->raw[u] = td_load_early16(at + u * TD_Q4_GROUP_ALL + TD_Q4_SCALES + lane * 16);
}

/* x: the lane's pieces of a row, halves of a group apart in x[0] and x[1]. */
template <int UNROLL>
static TD_DEVICE void multiply_part(const typename turns<UNROLL>::part &w, const unsigned char *const x[2],
                                    float acc[4])
{
    int lane = threadIdx.x % 32;
    uint32_t scales = td_scales_of(w.pair);
#pragma unroll
    for (int u = 0; u < turns<UNROLL>::GROUPS; u++) {
        uint32_t own = __shfl_sync(0xffffffffu, scales, lane / 4 * 4 + u);
        float dot[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 b = *(const uint4 *)(x[half] + u * 128);
            uint32_t a[4];
            td_decode<TD_W_Q4>(&w.raw[u], 2 * half, a);
            td_mma_bf16(dot, a, b.x, b.y);
            td_decode<TD_W_Q4>(&w.raw[u], 2 * half + 1, a);
            td_mma_bf16(dot, a, b.z, b.w);
        }
        td_fold_q4(acc, dot, own);
    }
}

/* The lane's two pairs of the panel's offsets, from those of its parts: groups t and t + 4 of the slice. */
template <int UNROLL> static TD_DEVICE void own_offsets(const uint2 pair[MOST_PARTS], uint32_t offsets[2])
{
    const int GROUPS = turns<UNROLL>::GROUPS, PARTS = turns<UNROLL>::PARTS;
    const uint2 none = make_uint2(0, 0);
    int t = threadIdx.x % 4;
    uint2 low = t < GROUPS ? pair[0] : PARTS > 1 && t < 2 * GROUPS ? pair[PARTS - 1] : none;
    td_offsets_operand(low, GROUPS == 4 ? pair[PARTS - 1] : none, offsets);
}

/* A warp's slice of all rows of x into its own memory, and the operands of its sums. Odd rows have the halves of a
 * group exchanged, so that the pieces of two rows lie in different banks. */
template <int UNROLL>
static TD_DEVICE void prepare_x(const td_product &p, unsigned char *rows, const unsigned char *const x[2],
                                uint32_t sums[3])
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = lane; i < p.n_rows * UNROLL * 8; i += 32) {
        int r = i / (UNROLL * 8), piece = i % (UNROLL * 8);
        td_copy_async(rows + r * turns<UNROLL>::ROW + (piece ^ (r & 1) * 4) * 16,
                      p.x + r * p.x_stride + warp * UNROLL * TD_TILE_IN + piece * 8, true);
    }
    td_copy_commit();
    td_copy_wait<0>();
    __syncwarp();
    float own[2] = { 0.0f, 0.0f };
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        uint4 low = *(const uint4 *)(x[0] + u * 128), high = *(const uint4 *)(x[1] + u * 128);
        uint32_t b[8] = { low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w };
        td_group_sums(b, u, own);
    }
    td_sums_operand(own, sums);
}

template <int UNROLL> static __global__ void __launch_bounds__(32 * WARPS, BLOCKS) k_linear_turns(td_product p)
{
    typedef turns<UNROLL> plan;
    extern __shared__ __align__(16) unsigned char smem[];
    typename plan::shared *all = (typename plan::shared *)smem, *own = all + threadIdx.x / 32;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint8_t *at = p.w + blockIdx.x * p.panel_bytes + warp * UNROLL * TD_Q4_GROUP_ALL;
    typename plan::part w[plan::PARTS];
#pragma unroll
    for (int i = 0; i < plan::PARTS; i++) load_part<UNROLL>(at + i * plan::GROUPS * TD_Q4_GROUP_ALL, &w[i]);
    td_begin();
    unsigned char *rows = (unsigned char *)(all + WARPS) + warp * p.n_rows * plan::ROW;
    int row = min(g, p.n_rows - 1);
    const unsigned char *x[2] = { rows + row * plan::ROW + t * 16 + (row & 1) * 64,
                                  rows + row * plan::ROW + t * 16 + 64 - (row & 1) * 64 };
    uint32_t sums[3];
    prepare_x<UNROLL>(p, rows, x, sums);
    int turn = 0;
    for (int panel = blockIdx.x; panel < p.n_panels; panel += gridDim.x, turn ^= 1) {
        at += gridDim.x * p.panel_bytes;
        float acc[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
        uint2 pair[MOST_PARTS];
#pragma unroll
        for (int i = 0; i < plan::PARTS; i++) {
            const int first = i * plan::GROUPS;
            const unsigned char *part_x[2] = { x[0] + first * 128, x[1] + first * 128 };
            multiply_part<UNROLL>(w[i], part_x, acc);
            pair[i] = w[i].pair;
            if (panel + gridDim.x < p.n_panels) load_part<UNROLL>(at + first * TD_Q4_GROUP_ALL, &w[i]);
            __syncwarp(); /* keeps the loads here: the compiler would collect them at the end */
        }
        uint32_t offsets[2];
        own_offsets<UNROLL>(pair, offsets);
        td_fold_offsets(acc, offsets, sums);
#pragma unroll
        for (int i = 0; i < 4; i++) own->red[turn][2 * t + i % 2][g + i / 2 * 8] = acc[i];
        __syncthreads(); /* one a panel: the shares of two panels have a place each */
        int r = threadIdx.x / TD_TILE_OUT % 8, o = threadIdx.x % TD_TILE_OUT, out = panel * TD_TILE_OUT + o;
        if ((int)threadIdx.x / (8 * TD_TILE_OUT) != turn || r >= p.n_rows || out >= p.out) continue;
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < WARPS; s++) sum += all[s].red[turn][r][o];
        td_product_store(p, 0, r, out, sum);
    }
}

template <int UNROLL> static void launch(const td_cuda_dev *dev, const td_product &p)
{
    unsigned n_turns = td_ceil_div((size_t)p.n_panels, (size_t)dev->n_sm * BLOCKS);
    td_launch(dev, k_linear_turns<UNROLL>, dim3(td_ceil_div((size_t)p.n_panels, n_turns)), 32 * WARPS,
              turns<UNROLL>::shared_bytes(p.n_rows), p);
}

bool td_product_turns(const td_cuda_dev *dev, const td_product *p)
{
    if (p->n_rows > MOST_ROWS || p->slices != WARPS || p->n_panels <= BLOCKS * dev->n_sm || p->in % TD_TILE_IN)
        return false;
    switch (p->groups) {
    case 1 * WARPS: launch<1>(dev, *p); return true;
    case 2 * WARPS: launch<2>(dev, *p); return true;
    case 4 * WARPS: launch<4>(dev, *p); return true;
    case 8 * WARPS: launch<8>(dev, *p); return true;
    default: return false;
    }
}

cudaError_t td_product_turns_init(void)
{
    return cudaFuncSetAttribute(k_linear_turns<8>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                (int)turns<8>::shared_bytes(MOST_ROWS));
}
