/* y = W x on packed weights (weight.h has layout and order of sums): which kernel for how many rows. product.h has what
 * they share. */
#include "ops/cuda/product.h"

enum {
    IN_MAX = 32768,
    ALIGNED_ROWS = 512 /* rows of a misaligned x that are copied at a time */
};

/* Rows that are not 16-byte aligned, made so. */
static __global__ void k_linear_align(int in, const td_bf16 *x, size_t x_stride, td_bf16 *to)
{
    td_begin();
    for (int i = threadIdx.x; i < in; i += blockDim.x) to[(size_t)blockIdx.x * in + i] = x[blockIdx.x * x_stride + i];
}

cudaError_t td_cuda_linear_init(void)
{
    cudaError_t error = td_product_turns_init();
    return error == cudaSuccess ? td_product_many_init() : error;
}

static size_t padded_rows(size_t rows)
{
    return (rows + TD_MANY_ROWS - 1) / TD_MANY_ROWS * TD_MANY_ROWS;
}

static size_t sums_bytes(const td_dev_limits *limits)
{
    return padded_rows((size_t)limits->rows) / 8 * (IN_MAX / TD_TILE_IN / TD_BLOCK_GROUPS) * 32 * sizeof(uint4);
}

static size_t copy_bytes(void)
{
    return (size_t)ALIGNED_ROWS * IN_MAX * sizeof(td_bf16);
}

size_t td_cuda_product_bytes(const td_dev_limits *limits)
{
    return sums_bytes(limits) + copy_bytes() + TD_COUNTERS_ALL * sizeof(uint32_t);
}

/* shares: memory for td_product_apart(), or NULL. */
static td_status run(td_cuda_dev *dev, td_format format, td_product *p, int n_batch, float *shares)
{
    if (p->n_rows <= TD_FEW_ROWS) {
        td_product_few(dev, format, p, n_batch);
        return td_cuda_launched(dev, "linear");
    }
    if (format == TD_W_Q4) {
        p->sums_tiles = padded_rows((size_t)p->n_rows) / 8;
        p->sums = (const uint4 *)(const void *)dev->scratch;
        if (n_batch != 1 ||
            p->sums_tiles * 32 * sizeof(uint4) * (size_t)td_blocks(p->groups) > sums_bytes(&dev->limits))
            return TD_EINVAL;
        td_product_sums(dev, p, (uint4 *)(void *)dev->scratch);
    }
    if (!shares || n_batch != 1 || !td_product_apart(dev, format, p, shares, copy_bytes()))
        td_product_many(dev, format, p, n_batch);
    return td_cuda_launched(dev, "linear");
}

/* x whose rows do not start at multiples of 16 bytes goes through an aligned copy, a part of the rows at a time. */
static td_status run_copied(td_cuda_dev *dev, td_format format, td_product *p)
{
    td_bf16 *copy = (td_bf16 *)(dev->scratch + sums_bytes(&dev->limits));
    td_product part = *p;
    td_status status = TD_OK;
    for (int r = 0; r < p->n_rows && status == TD_OK; r += ALIGNED_ROWS) {
        part.n_rows = p->n_rows - r < ALIGNED_ROWS ? p->n_rows - r : ALIGNED_ROWS;
        part.x = copy;
        part.x_stride = (size_t)p->in;
        part.y_act = p->y_act ? p->y_act + (size_t)r * p->y_stride : NULL;
        part.y_f32 = p->y_f32 ? p->y_f32 + (size_t)r * p->y_stride : NULL;
        td_launch(dev, k_linear_align, (unsigned)part.n_rows, 128, 0, p->in, p->x + (size_t)r * p->x_stride,
                  p->x_stride, copy);
        status = run(dev, format, &part, 1, NULL);
    }
    return status;
}

td_status td_cuda_product(td_cuda_dev *dev, const td_cuda_product_args *a)
{
    td_product p = {
        (const uint8_t *)a->w, a->w_batch_bytes, td_gpu_panel_bytes(a->format, a->in), a->out, a->in, a->n_rows
    };
    p.n_panels = (int)td_ceil_div((size_t)a->out, TD_TILE_OUT);
    p.groups = td_groups(a->in);
    p.slices = td_slices(p.groups);
    p.x = a->x;
    p.x_stride = a->x_stride;
    p.x_batch = a->x_batch;
    p.y_act = a->y_act;
    p.y_f32 = a->y_f32;
    p.y_stride = a->y_stride;
    p.y_batch = a->y_batch;
    if (a->in > IN_MAX || a->n_rows > dev->limits.rows) return TD_EINVAL;
    bool aligned = (((uintptr_t)a->x | a->x_stride * sizeof(td_bf16) | a->x_batch * sizeof(td_bf16)) & 15) == 0;
    if (!aligned && a->n_batch != 1) return TD_EINVAL;
    bool takes_scratch = !aligned || (a->format == TD_W_Q4 && a->n_rows > TD_FEW_ROWS);
    if (takes_scratch && !dev->scratch) return TD_EINVAL;                                           /* on a branch */
    float *room = dev->scratch ? (float *)(void *)(dev->scratch + sums_bytes(&dev->limits)) : NULL; /* the copy's */
    return aligned ? run(dev, a->format, &p, a->n_batch, room) : run_copied(dev, a->format, &p);
}

td_status td_cuda_linear(td_dev *base, const td_linear_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    if (a->n_rows < 0 || !a->w || a->w->in < 16 || a->w->in % 16 || a->w->out < 1 || !a->y_act == !a->y_f32 ||
        a->x_stride < (size_t)a->w->in || a->y_stride < (size_t)a->w->out)
        return TD_EINVAL;
    if (!a->n_rows) return TD_OK;
    td_cuda_product_args p = { a->w->format,          a->w->data,  0, a->w->out,           a->w->in, a->n_rows,   1,
                               (const td_bf16 *)a->x, a->x_stride, 0, (td_bf16 *)a->y_act, a->y_f32, a->y_stride, 0 };
    return td_cuda_product(dev, &p);
}
