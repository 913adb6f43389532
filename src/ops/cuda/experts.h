/* Routed experts on the GPU: what experts.cu (grouping, rotations, sums) and experts_product.cu (the grouped products)
 * share.
 *
 * A pick is one (row, expert) pair. Picks are sorted by expert; an item is up to 8, 16 (few rows) or 64 (many) picks
 * of one expert, which share the decoding of its matrices. Which picks share an item, and in what order items are
 * listed, changes no bit. */
#ifndef TD_OPS_CUDA_EXPERTS_H
#define TD_OPS_CUDA_EXPERTS_H

#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"
#include "ops/cuda/weight.h"

/* How a matrix is stored. 4-bit mcg, the released format, is re-laid into strips of 64 outputs: [n / 64][k / 64][4
 * columns of tiles][32 lanes][4 words]. Lane (g, t) has words 4 g .. 4 g + 3 of the tile of inputs 16 t .. 16 t + 15: 128
 * bits in a row, of which word i is decoded for step i, so that only the first one's states reach into another lane's
 * words. Other widths and codebooks stay as in the file (TD_GPU_EXL3: a layer where at least one matrix is of those).
 * Plain matrices are packed as weight.h says. */
typedef enum td_gpu_kind { TD_GPU_MCG4, TD_GPU_EXL3, TD_GPU_PLAIN } td_gpu_kind;

typedef struct td_gpu_matrix {
    const uint8_t *data;
    const td_f16 *suh, *svh;
    int32_t bits2, codebook;
} td_gpu_matrix;

enum { TD_MATRIX_GATE, TD_MATRIX_UP, TD_MATRIX_DOWN, TD_MATRICES };

typedef struct td_item {
    int32_t expert, first, n; /* first: sorted pick */
} td_item;

enum { TD_ITEM_FEW = 16, TD_ITEM_MANY = 64 };

static inline bool td_is_mcg4(const td_exl3 *w)
{
    return w->bits2 == 8 && w->codebook == TD_EXL3_MCG;
}

/* z[p][o] for the sorted picks: matrix `first + y` of each item's expert for y < n_matrices, inputs x + y * x_matrix,
 * outputs z + y * n. x rows are x_stride apart (a multiple of 64 values; zeros beyond k). EXL3: f16, stored by step
 * when item_picks is TD_ITEM_MANY, else by lane (below). */
typedef struct td_grouped_args {
    const td_gpu_matrix *table; /* [TD_MATRICES][n_experts] */
    int n_experts, first_matrix, n_matrices;
    td_gpu_kind kind;
    int item_picks; /* the most an item has: 8, 16 or TD_ITEM_MANY */
    int k, n;
    const td_item *items;
    const int32_t *n_items;
    int items_cap;
    const td_bf16 *x; /* or f16 */
    size_t x_stride, x_matrix;
    float *z;
    size_t z_stride;
} td_grouped_args;
td_status td_cuda_grouped(td_cuda_dev *dev, const td_grouped_args *a);

/* The operation's arguments with the types of the device, and its scratch. Windows of up to 8 rows (experts_few.cu) keep
 * z, mid and out by pick instead of by sorted pick. */
typedef struct td_experts_call {
    int n_rows, top_k, n_experts, dim, width, picks;
    bool exl3;
    bool by_step; /* rotated rows are stored so: below */
    float limit;
    const td_gpu_matrix *table;
    const td_bf16 *x;
    const int32_t *ids;
    const float *weights, *shared;
    float *y;
    int32_t *order, *place; /* sorted pick -> pick; pick -> sorted pick or -1 */
    int32_t *start;         /* of an expert's sorted picks: of several blocks' picks only */
    td_item *items;
    int32_t *n_items, *n_sorted;
    td_bf16 *in, *mid; /* [2][picks][in_stride], [picks][mid_stride] */
    size_t in_stride, mid_stride;
    float *z, *out;     /* [picks][2 * width], [picks][dim] */
    uint32_t *counters; /* [TD_COUNTERS_EXPERTS], zero between calls */
} td_experts_call;

/* experts_few.cu: whole calls of up to 8 rows with 4-bit mcg experts; false: not for this call. */
bool td_cuda_experts_few_fits(const td_experts_call *a);
td_status td_cuda_experts_few(td_cuda_dev *dev, const td_experts_call *a, bool join);

/* Step i of a group of 64 inputs multiplies, in lane (g, t), inputs k, k + 1, k + 8, k + 9 with k = 16 t + 2 i, whose
 * weights the lane's own words hold (experts_tile.h). Where input k of a rotated row is stored:
 *   by lane  windows: a lane's four values of every step in a row
 *   by step  prompts: inputs of all lanes for a half of a step in a row (16 bytes), which is how ldmatrix reads them */
TD_HD static inline int td_rotated_by_lane(int k)
{
    return k / 16 * 16 + k % 8 / 2 * 4 + k % 16 / 8 * 2 + k % 2;
}

TD_HD static inline int td_rotated_by_step(int k)
{
    return k / 64 * 64 + k % 8 / 2 * 16 + k % 16 / 8 * 8 + k % 64 / 16 * 2 + k % 2;
}

#endif
