/* Routed experts: picks sorted by expert on the device, inputs rotated, two grouped products (experts_product.cu), the
 * sums.
 *   group    counting sort of the picks; items of one expert each (place: of more picks than a block has threads)
 *   inputs   EXL3: f16(H(x * suh)) for gate and up; plain: the row as it is
 *   product  gate and up
 *   middle   act(H(z) * svh) of both, SwiGLU, EXL3: f16(H(y * suh)) for down
 *   product  down
 *   combine  a row's picks in its own order, H(z) * svh times their weights, then the shared expert
 * Windows of up to 8 rows with 4-bit mcg experts take another way to the same bits (experts_few.cu). */
#include "ops/cuda/experts_rotate.h"
#include "ops/host_copy.h"

#include <stdlib.h>
#include <string.h>

enum { THREADS = 256, WARPS = THREADS / 32, GROUP_THREADS = 1024, INPUTS_AT_ONCE = 4 };

/* The thread's pick and its expert; -1 for none and for one that does not exist. */
static TD_DEVICE int load_id(const td_experts_call &a, int pick)
{
    int id = pick < a.picks ? a.ids[pick] : -1;
    return id < a.n_experts ? id : -1;
}

static TD_DEVICE void place_pick(const td_experts_call &a, int pick, int to)
{
    if (pick >= a.picks) return;
    if (to >= 0) a.order[to] = pick;
    a.place[pick] = to;
}

/* Items of all experts, and where each expert's picks start. n: picks of expert threadIdx.x. An expert's picks are cut
 * into items of about the same size, whole eights. Items are listed by size, those of the largest experts first, so that
 * what the products end with is short; an expert's own stay together. */
static TD_DEVICE int list_items(const td_experts_call &a, int item_picks, int n)
{
    enum { SIZES = TD_ITEM_MANY / 8 };
    __shared__ int of_size[SIZES], listed[SIZES];
    __shared__ uint32_t warp_sum[GROUP_THREADS / 32];
    uint32_t sorted;
    int e = threadIdx.x, items = (n + item_picks - 1) / item_picks;
    int size = items ? ((n + items - 1) / items + 7) / 8 * 8 : 0, from_largest = (item_picks - size) / 8;
    if (e < SIZES) of_size[e] = listed[e] = 0;
    int first = (int)td_block_before((uint32_t)n, warp_sum, &sorted);
    if (items) atomicAdd(&of_size[from_largest], items);
    __syncthreads();
    if (items) {
        int item = atomicAdd(&listed[from_largest], items);
        for (int i = 0; i < from_largest; i++) item += of_size[i];
        for (int i = 0; i < items; i++) a.items[item + i] = { e, first + i * size, min(size, n - i * size) };
    }
    if (e == a.n_experts - 1) {
        int all = 0;
        for (int i = 0; i < SIZES; i++) all += of_size[i];
        *a.n_items = all;
        *a.n_sorted = (int)sorted;
    }
    return first;
}

/* Counts the picks of every expert, a thread a pick; blocks add theirs up in the counters, and the last to arrive lists
 * the items. A pick's rank among its expert's, and the order of experts of one size, are left to chance: they decide no
 * bit. One block places its picks too; for more, k_experts_place does. */
static __global__ void __launch_bounds__(GROUP_THREADS) k_experts_group(td_experts_call a, int item_picks)
{
    td_begin();
    __shared__ int count[TD_EXPERTS_MAX]; /* the block's; then what blocks before it had; then where picks start */
    __shared__ bool last;
    int e = threadIdx.x, pick = blockIdx.x * GROUP_THREADS + e, id = load_id(a, pick), rank = 0, n = 0;
    if (e < TD_EXPERTS_MAX) count[e] = 0;
    __syncthreads();
    if (id >= 0) rank = atomicAdd(&count[id], 1);
    __syncthreads();
    if (e < a.n_experts) n = count[e];
    if (gridDim.x > 1) {
        if (n) count[e] = (int)atomicAdd(a.counters + e, (uint32_t)n);
        __syncthreads();
        if (pick < a.picks) a.place[pick] = id >= 0 ? count[id] + rank : -1;
        __syncthreads();
        if (e == 0) last = td_arrives_last(a.counters + TD_EXPERTS_MAX, 1, gridDim.x);
        __syncthreads();
        if (!last) return;
        if (e < a.n_experts) n = (int)atomicExch(a.counters + e, 0);
    }
    int first = list_items(a, item_picks, n);
    if (gridDim.x > 1) {
        if (e < a.n_experts) a.start[e] = first;
        return;
    }
    __syncthreads();
    if (e < a.n_experts) count[e] = first;
    __syncthreads();
    place_pick(a, pick, id >= 0 ? count[id] + rank : -1);
}

static __global__ void __launch_bounds__(GROUP_THREADS) k_experts_place(td_experts_call a)
{
    td_begin();
    int pick = blockIdx.x * GROUP_THREADS + threadIdx.x, id = load_id(a, pick);
    place_pick(a, pick, id >= 0 ? a.start[id] + a.place[pick] : -1);
}

/* Plain experts: the rows as they are. */
static TD_DEVICE void plain_inputs(const td_experts_call &a, int first, int n)
{
    for (int p = first; p < first + n; p++) {
        const td_bf16 *x = a.x + (size_t)(a.order[p] / a.top_k) * a.dim;
        td_bf16 *to = a.in + (size_t)p * a.in_stride;
        for (int k = threadIdx.x; k < (int)a.in_stride; k += THREADS) to[k] = k < a.dim ? x[k] : (td_bf16)0;
    }
}

/* Rows of the picks, EXL3: rotated for gate and up. A block has `at_once` sorted picks, which of prompts mostly have one
 * expert and so one set of scales a matrix; a warp 512 values of each, the next pick's on their way. */
static __global__ void __launch_bounds__(THREADS, 4) k_experts_inputs(td_experts_call a, int at_once)
{
    td_begin();
    __shared__ __align__(16) float turns[WARPS][TD_TURN];
    int first = blockIdx.x * at_once, n = min(*a.n_sorted - first, at_once), lane = threadIdx.x % 32;
    if (n <= 0) return;
    if (!a.exl3) {
        plain_inputs(a, first, n);
        return;
    }
    int pick = a.order[first + min(lane, n - 1)], expert = a.ids[pick], row = pick / a.top_k;
    for (int part = threadIdx.x / 32 * TD_PART_WARP; part < a.dim; part += WARPS * TD_PART_WARP) {
        bool live = part + td_part_at() < a.dim;
        int k = live ? part + td_part_at() : 0;
        const td_bf16 *x = a.x + k;
        td_part16 next = td_part_load16(x + (size_t)__shfl_sync(0xffffffffu, row, 0) * a.dim), signs;
#pragma unroll 1
        for (int matrix = 0; matrix < 2; matrix++) {
            const td_gpu_matrix *table = a.table + (size_t)(TD_MATRIX_GATE + matrix) * a.n_experts;
            td_bf16 *to = a.in + ((size_t)matrix * a.picks + first) * a.in_stride;
            int current = -1;
#pragma unroll 1
            for (int r = 0; r < n; r++) {
                int own = __shfl_sync(0xffffffffu, expert, r);
                int next_row = __shfl_sync(0xffffffffu, row, r + 1 < n ? r + 1 : 0);
                if (own != current) signs = td_part_load_weight(table[own].suh + k);
                current = own;
                float v[TD_PART];
                td_part_scaled(next, signs, v);
                next = td_part_load16(x + (size_t)next_row * a.dim);
                td_part_rotate_in(v, turns[threadIdx.x / 32], part + td_part_pairs_at(), live, a.by_step, to);
                to += a.in_stride;
            }
        }
    }
}

/* Plain experts: input of down, a block a sorted pick. */
static TD_DEVICE void plain_middle(const td_experts_call &a)
{
    int p = blockIdx.x;
    if (p >= *a.n_sorted) return;
    const float *z = a.z + (size_t)p * 2 * a.width;
    td_bf16 *to = a.mid + (size_t)p * a.mid_stride;
    for (int i = threadIdx.x; i < (int)a.mid_stride; i += THREADS)
        to[i] = i < a.width ? td_to_bf16(td_swiglu_value(td_round_bf16(z[i]), td_round_bf16(z[a.width + i]), a.limit))
                            : (td_bf16)0;
}

/* z of gate and up to the input of down: act(H(z) * svh) of both, SwiGLU, f16(H(y * suh)). EXL3: a warp 512 values of a
 * sorted pick. */
static __global__ void __launch_bounds__(THREADS, 3) k_experts_middle(td_experts_call a)
{
    td_begin();
    __shared__ __align__(16) float turns[WARPS][TD_TURN];
    if (!a.exl3) {
        plain_middle(a);
        return;
    }
    int per_pick = (a.width + TD_PART_WARP - 1) / TD_PART_WARP, unit = blockIdx.x * WARPS + threadIdx.x / 32;
    int p = unit / per_pick, part = unit % per_pick * TD_PART_WARP, k = part + td_part_pairs_at();
    if (p >= *a.n_sorted) return;
    bool live = k < a.width;
    float *turn = turns[threadIdx.x / 32];
    const td_gpu_matrix *m = a.table + a.ids[a.order[p]];
    const float *z = a.z + (size_t)p * 2 * a.width + (live ? part + td_part_at() : 0);
    float gate[TD_PART], up[TD_PART];
    uint32_t scales[TD_MATRICES][TD_PART_PAIRS];
    td_part_load32(z, gate);
    td_part_load32(z + a.width, up);
#pragma unroll
    for (int i = 0; i < TD_MATRICES; i++) {
        const td_gpu_matrix *matrix = m + (size_t)i * a.n_experts;
        td_part_load_scale_pairs((i == TD_MATRIX_DOWN ? matrix->suh : matrix->svh) + (live ? k : 0), scales[i]);
    }
    td_part_hadamard(gate, turn);
    td_part_scale_pairs(gate, scales[TD_MATRIX_GATE]);
    td_part_hadamard(up, turn);
    td_part_scale_pairs(up, scales[TD_MATRIX_UP]);
#pragma unroll
    for (int i = 0; i < TD_PART; i++)
        gate[i] = td_round_bf16(td_swiglu_value(td_round_bf16(gate[i]), td_round_bf16(up[i]), a.limit));
    td_part_scale_pairs(gate, scales[TD_MATRIX_DOWN]);
    td_part_from_pairs(gate, turn);
    td_part_rotate_in(gate, turn, k, live, a.by_step, a.mid + (size_t)p * a.mid_stride);
}

/* The lane's values of a pick's output: of EXL3 in a row, to be rotated; plain: as pairs. */
static TD_DEVICE void load_output(const td_experts_call &a, int place, int first, float v[TD_PART])
{
    const float *out = a.out + (size_t)place * a.dim;
    int d = first + (a.exl3 ? td_part_at() : td_part_pairs_at());
    if (a.exl3)
        td_part_load32(out + (d < a.dim ? d : 0), v);
    else
        td_part_load32_pairs(out + d, a.dim - d, v);
}

/* y = sum over picks in order of weight * output, then the shared expert. A warp 512 values of a row; the next pick's
 * are on their way while one is rotated, addresses are found for 32 picks at once. */
static __global__ void __launch_bounds__(THREADS, 3) k_experts_combine(td_experts_call a)
{
    td_begin();
    __shared__ __align__(16) float turns[WARPS][TD_TURN];
    size_t row = blockIdx.y;
    int first = (blockIdx.x * WARPS + threadIdx.x / 32) * TD_PART_WARP, d = first + td_part_pairs_at(),
        lane = threadIdx.x % 32;
    if (first >= a.dim) return;
    bool live = d < a.dim;
    float y[TD_PART];
#pragma unroll
    for (int i = 0; i < TD_PART; i++) y[i] = 0.0f;
    for (int k0 = 0; k0 < a.top_k; k0 += 32) {
        size_t pick = row * a.top_k + k0 + lane;
        int own = k0 + lane < a.top_k ? a.place[pick] : -1;
        float own_weight = own >= 0 ? a.weights[pick] : 0.0f;
        const td_f16 *own_svh = NULL;
        if (own >= 0 && a.exl3) own_svh = a.table[(size_t)TD_MATRIX_DOWN * a.n_experts + a.ids[pick]].svh;
        uint32_t left = __ballot_sync(0xffffffffu, own >= 0);
        float next[TD_PART];
        if (left) load_output(a, __shfl_sync(0xffffffffu, own, __ffs(left) - 1), first, next);
        while (left) {
            int k = __ffs(left) - 1;
            float v[TD_PART], weight = __shfl_sync(0xffffffffu, own_weight, k);
            uint32_t svh[TD_PART_PAIRS];
            const td_f16 *scales = (const td_f16 *)__shfl_sync(0xffffffffu, (unsigned long long)own_svh, k);
            if (a.exl3) td_part_load_scale_pairs(scales + (live ? d : 0), svh);
#pragma unroll
            for (int i = 0; i < TD_PART; i++) v[i] = next[i];
            left &= left - 1;
            if (left) load_output(a, __shfl_sync(0xffffffffu, own, __ffs(left) - 1), first, next);
            if (a.exl3) {
                td_part_hadamard(v, turns[threadIdx.x / 32]);
                td_part_scale_pairs(v, svh);
            }
#pragma unroll
            for (int i = 0; i < TD_PART; i++) y[i] = fmaf(weight, v[i], y[i]);
        }
    }
    float shared[TD_PART];
    if (a.shared) td_part_load32_pairs(a.shared + row * a.dim + d, a.dim - d, shared);
#pragma unroll
    for (int i = 0; i < TD_PART && d + 8 * i < a.dim; i += 2)
        *(float2 *)(a.y + row * a.dim + d + 8 * i) =
            a.shared ? make_float2(y[i] + shared[i], y[i + 1] + shared[i + 1]) : make_float2(y[i], y[i + 1]);
}

/* ---- matrices ---- */

/* 4-bit mcg tiles [k / 16][row_tiles][32 words], n_tiles of a row, into strips (experts.h); a thread a word. */
static __global__ void k_exl3_strips(const uint32_t *from, int k_tiles, int n_tiles, int row_tiles, uint32_t *to)
{
    size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (size_t)k_tiles * n_tiles * 32) return;
    int word = (int)(i % 4), lane = (int)(i / 4 % 32), column = (int)(i / 128 % 4);
    int group = (int)(i / 512 % (k_tiles / 4)), strip = (int)(i / 512 / (k_tiles / 4));
    size_t tile = (size_t)(4 * group + lane % 4) * row_tiles + strip * 4 + column;
    to[i] = from[tile * 32 + lane / 4 * 4 + word];
}

static void make_strips(const td_cuda_dev *dev, const td_exl3 *cut, const void *from, int row_tiles, void *to)
{
    size_t words = td_exl3_trellis_bytes(cut->k, cut->n, cut->bits2) / 4;
    k_exl3_strips<<<td_ceil_div(words, THREADS), THREADS, 0, dev->stream>>>((const uint32_t *)from, cut->k / 16,
                                                                            cut->n / 16, row_tiles, (uint32_t *)to);
}

/* A view of the cut's bytes once they are at `to`: trellis, suh, svh. */
static td_exl3 view_at(const td_exl3 *cut, const uint8_t *to)
{
    td_exl3 view = *cut;
    view.trellis = (const uint16_t *)to;
    view.suh = (const td_f16 *)(to + td_exl3_trellis_bytes(cut->k, cut->n, cut->bits2));
    view.svh = view.suh + cut->k;
    return view;
}

/* From host memory: cut on its way into a piece. The tail is suh and svh, which keep their order. */
static td_status fill_from_host(td_cuda_dev *dev, td_exl3 *w, const td_exl3 *whole, const td_exl3 *part, int k0, int n0)
{
    size_t trellis = td_exl3_trellis_bytes(part->k, part->n, part->bits2);
    size_t tail = td_exl3_bytes(part->k, part->n, part->bits2) - trellis;
    size_t tile = 16 * (size_t)part->bits2, row = (size_t)(whole->n / 16) * tile, width = (size_t)(part->n / 16) * tile;
    uint8_t *to = (uint8_t *)(void *)w->trellis;
    td_cuda_piece *piece;
    td_status status = td_cuda_piece_next(dev, &piece);
    if (status != TD_OK) return status;
    td_exl3 cut = view_at(part, piece->host);
    td_host_copy_rows(piece->host, (const uint8_t *)whole->trellis + (size_t)(k0 / 16) * row + (size_t)(n0 / 16) * tile,
                      row, width, (size_t)(part->k / 16));
    memcpy((void *)cut.suh, whole->suh + k0, (size_t)part->k * sizeof(td_f16));
    memcpy((void *)cut.svh, whole->svh + n0, (size_t)part->n * sizeof(td_f16));
    status = td_cuda_piece_send(dev, piece, trellis + tail);
    if (status != TD_OK) return status;
    size_t done = td_is_mcg4(part) ? trellis : 0;
    if (done) make_strips(dev, part, piece->device, part->n / 16, to);
    cudaError_t error =
        cudaMemcpyAsync(to + done, piece->device + done, trellis + tail - done, cudaMemcpyDeviceToDevice, dev->stream);
    status = td_cuda_done(dev, error, "exl3_fill");
    return status == TD_OK ? td_cuda_piece_done(dev, piece, "exl3_fill") : status;
}

/* From device memory (a checkpoint of shapes): nothing waits. */
static td_status fill_from_device(td_cuda_dev *dev, td_exl3 *w, const td_exl3 *whole, const td_exl3 *part, int k0,
                                  int n0)
{
    td_exl3 view = view_at(part, (const uint8_t *)w->trellis);
    size_t tile = 16 * (size_t)part->bits2, row = (size_t)(whole->n / 16) * tile, width = (size_t)(part->n / 16) * tile;
    const uint8_t *from = (const uint8_t *)whole->trellis + (size_t)(k0 / 16) * row + (size_t)(n0 / 16) * tile;
    cudaError_t error = cudaSuccess;
    if (td_is_mcg4(part))
        make_strips(dev, part, from, whole->n / 16, (void *)view.trellis);
    else
        error = cudaMemcpy2DAsync((void *)view.trellis, width, from, row, width, (size_t)(part->k / 16),
                                  cudaMemcpyDeviceToDevice, dev->stream);
    if (error == cudaSuccess)
        error = cudaMemcpyAsync((void *)view.suh, whole->suh + k0, (size_t)part->k * sizeof(td_f16),
                                cudaMemcpyDeviceToDevice, dev->stream);
    if (error == cudaSuccess)
        error = cudaMemcpyAsync((void *)view.svh, whole->svh + n0, (size_t)part->n * sizeof(td_f16),
                                cudaMemcpyDeviceToDevice, dev->stream);
    td_status status = td_cuda_done(dev, error, "exl3_fill");
    return status == TD_OK ? td_cuda_launched(dev, "exl3_fill") : status;
}

static bool in_blocks(int from, int to, int most)
{
    return from >= 0 && from < to && to <= most && from % TD_EXL3_BLOCK == 0 && to % TD_EXL3_BLOCK == 0;
}

td_status td_cuda_exl3_fill(td_dev *base, td_exl3 *w, const td_exl3 *whole, int k0, int k1, int n0, int n1,
                            td_error *err)
{
    td_cuda_dev *dev = td_cuda(base);
    if (!in_blocks(k0, k1, whole->k) || !in_blocks(n0, n1, whole->n))
        return td_fail(err, TD_EINVAL, "exl3 slice: inputs %d to %d of %d, outputs %d to %d of %d", k0, k1, whole->k,
                       n0, n1, whole->n);
    td_exl3 part = { k1 - k0, n1 - n0, whole->bits2, whole->codebook, NULL, NULL, NULL };
    size_t n_bytes = td_exl3_bytes(part.k, part.n, part.bits2);
    if (n_bytes > TD_PIECE_BYTES)
        return td_fail(err, TD_EUNSUPPORTED, "an expert matrix [%d][%d] has %zu bytes, at most %zu", part.k, part.n,
                       n_bytes, (size_t)TD_PIECE_BYTES);
    td_status status = td_cuda_on_device(whole->trellis) ? fill_from_device(dev, w, whole, &part, k0, n0)
                                                         : fill_from_host(dev, w, whole, &part, k0, n0);
    if (status == TD_OK) *w = view_at(&part, (const uint8_t *)w->trellis);
    return status == TD_ECUDA ? td_fail(err, status, "an expert matrix could not be copied to the GPU") : status;
}

size_t td_cuda_experts_table_bytes(const td_experts *experts)
{
    return (size_t)experts->n_experts * TD_MATRICES * sizeof(td_gpu_matrix);
}

static td_gpu_matrix describe(const td_experts *e, int matrix, int i)
{
    if (!e->exl3) {
        const td_weight *w = (matrix == TD_MATRIX_GATE ? e->gate : matrix == TD_MATRIX_UP ? e->up : e->down) + i;
        return { (const uint8_t *)w->data, NULL, NULL, 0, 0 };
    }
    const td_exl3 *w = (matrix == TD_MATRIX_GATE ? e->gate_x : matrix == TD_MATRIX_UP ? e->up_x : e->down_x) + i;
    return { (const uint8_t *)w->trellis, w->suh, w->svh, w->bits2, w->codebook };
}

td_status td_cuda_experts_table_fill(td_dev *base, const td_experts *e)
{
    size_t n = (size_t)e->n_experts;
    td_gpu_matrix *table = (td_gpu_matrix *)calloc(n * TD_MATRICES, sizeof *table);
    if (!table) return TD_ENOMEM;
    for (int m = 0; m < TD_MATRICES; m++)
        for (int i = 0; i < e->n_experts; i++) table[(size_t)m * n + (size_t)i] = describe(e, m, i);
    td_status status = td_dev_upload(base, e->table, table, n * TD_MATRICES * sizeof *table);
    free(table);
    return status;
}

/* One kind serves a call: strips when every matrix is 4-bit mcg. */
static td_gpu_kind kind_of(const td_experts *e)
{
    if (!e->exl3) return TD_GPU_PLAIN;
    for (int i = 0; i < e->n_experts; i++)
        if (!td_is_mcg4(e->gate_x + i) || !td_is_mcg4(e->up_x + i) || !td_is_mcg4(e->down_x + i)) return TD_GPU_EXL3;
    return TD_GPU_MCG4;
}

/* ---- the operation ---- */

static size_t padded(int n)
{
    return ((size_t)n + TD_TILE_IN - 1) / TD_TILE_IN * TD_TILE_IN;
}

static void carve(td_arena *arena, size_t picks, int dim, int width, int n_experts, td_experts_call *a)
{
    a->in_stride = padded(dim);
    a->mid_stride = padded(width);
    a->order = (int32_t *)td_cuda_take(arena, picks * sizeof(int32_t));
    a->place = (int32_t *)td_cuda_take(arena, picks * sizeof(int32_t));
    a->start = (int32_t *)td_cuda_take(arena, (size_t)n_experts * sizeof(int32_t));
    a->items = (td_item *)td_cuda_take(arena, (picks + (size_t)n_experts) * sizeof(td_item));
    a->n_items = (int32_t *)td_cuda_take(arena, 2 * sizeof(int32_t));
    a->n_sorted = a->n_items + 1;
    a->mid = (td_bf16 *)td_cuda_take(arena, picks * a->mid_stride * sizeof(td_bf16));
    a->z = (float *)td_cuda_take(arena, picks * 2 * (size_t)width * sizeof(float));
    a->out =
        (float *)td_cuda_take(arena, picks * padded(dim) * sizeof(float)); /* and before: the inputs, as many bytes */
    a->in = (td_bf16 *)a->out;
}

size_t td_cuda_experts_bytes(const td_dev_limits *limits)
{
    td_arena arena;
    td_experts_call a;
    td_arena_init_fixed(&arena, NULL, SIZE_MAX);
    carve(&arena, (size_t)limits->rows * (size_t)limits->top_k, limits->dim, limits->expert_width, limits->n_experts,
          &a);
    return arena.used_bytes;
}

static bool shapes_fit(const td_cuda_dev *dev, const td_experts_args *a)
{
    const td_experts *e = a->experts;
    int unit = e->exl3 ? TD_EXL3_BLOCK : TD_TILE_OUT;
    return a->n_rows >= 0 && a->n_rows <= dev->limits.rows && a->top_k >= 1 && a->top_k <= dev->limits.top_k &&
           e->n_experts >= 1 && e->n_experts <= dev->limits.n_experts && e->n_experts <= TD_EXPERTS_MAX &&
           e->dim >= unit && e->dim <= dev->limits.dim && e->dim % unit == 0 && e->width >= unit &&
           e->width <= dev->limits.expert_width && e->width % unit == 0 && e->table &&
           (size_t)a->n_rows * (size_t)a->top_k < 1u << 17;
}

static td_status run(td_cuda_dev *dev, const td_experts_call *e, td_gpu_kind kind)
{
    int item = e->n_rows > TD_WINDOW_MAX ? (int)TD_ITEM_MANY : e->n_rows > 8 ? (int)TD_ITEM_FEW : 8;
    int most = e->n_experts + e->picks / item, inputs = e->by_step ? INPUTS_AT_ONCE : 1;
    unsigned picks = (unsigned)e->picks;
    unsigned middle = e->exl3 ? td_ceil_div(picks * (size_t)td_ceil_div((size_t)e->width, TD_PART_WARP), WARPS) : picks;
    td_grouped_args gate_up = { e->table,
                                e->n_experts,
                                TD_MATRIX_GATE,
                                2,
                                kind,
                                item,
                                e->dim,
                                e->width,
                                e->items,
                                e->n_items,
                                most < e->picks ? most : e->picks,
                                e->in,
                                e->in_stride,
                                e->exl3 ? (size_t)e->picks * e->in_stride : 0,
                                e->z,
                                2 * (size_t)e->width };
    td_grouped_args down = gate_up;
    down.first_matrix = TD_MATRIX_DOWN;
    down.n_matrices = 1;
    down.k = e->width;
    down.n = e->dim;
    down.x = e->mid;
    down.x_stride = e->mid_stride;
    down.z = e->out;
    down.z_stride = (size_t)e->dim;
    unsigned groups = td_ceil_div(picks, GROUP_THREADS);
    td_launch(dev, k_experts_group, groups, GROUP_THREADS, 0, *e, item);
    if (groups > 1) td_launch(dev, k_experts_place, groups, GROUP_THREADS, 0, *e);
    td_launch(dev, k_experts_inputs, td_ceil_div(picks, (size_t)inputs), THREADS, 0, *e, inputs);
    td_status status = td_cuda_grouped(dev, &gate_up);
    if (status != TD_OK) return status;
    td_launch(dev, k_experts_middle, middle, THREADS, 0, *e);
    status = td_cuda_grouped(dev, &down);
    if (status != TD_OK) return status;
    td_launch(dev, k_experts_combine, dim3(td_ceil_div((size_t)e->dim, WARPS * TD_PART_WARP), (unsigned)e->n_rows),
              THREADS, 0, *e);
    return td_cuda_launched(dev, "experts");
}

td_status td_cuda_experts(td_dev *base, const td_experts_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    if (!shapes_fit(dev, a)) return TD_EINVAL;
    if (!a->n_rows) return TD_OK;
    td_arena arena;
    const td_experts *x = a->experts;
    td_experts_call e = {
        a->n_rows, a->top_k, x->n_experts, x->dim, x->width, a->n_rows * a->top_k, x->exl3, a->n_rows > TD_WINDOW_MAX,
        a->limit
    };
    e.table = (const td_gpu_matrix *)x->table;
    e.x = (const td_bf16 *)a->x;
    e.ids = a->ids;
    e.weights = a->weights;
    e.shared = a->shared;
    e.y = a->y;
    td_cuda_scratch(dev, &arena);
    carve(&arena, (size_t)e.picks, x->dim, x->width, x->n_experts, &e);
    e.counters = td_cuda_counters(dev) + TD_COUNTERS_EXPERTS_AT;
    td_gpu_kind kind = kind_of(x);
    if (kind == TD_GPU_MCG4 && td_cuda_experts_few_fits(&e)) return td_cuda_experts_few(dev, &e, a->join);
    td_status status = a->join ? td_cuda_join(base) : TD_OK;
    return status == TD_OK ? run(dev, &e, kind) : status;
}
