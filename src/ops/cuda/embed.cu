/* Embedding rows into the residual streams: plain copies. */
#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"

enum { THREADS = 256 };

static __global__ void k_embed(const int32_t *ids, const int32_t *media_row, const td_bf16 *media, const td_bf16 *table,
                               int dim, int vocab, int n_streams, td_bf16 *x)
{
    td_begin();
    size_t row = blockIdx.x;
    int32_t id = ids[row];
    const td_bf16 *src = id >= 0 && id < vocab ? table + (size_t)id * dim : NULL;
    if (media_row && media && media_row[row] >= 0) src = media + (size_t)media_row[row] * dim;
    int d = blockIdx.y * THREADS + threadIdx.x;
    if (d >= dim) return;
    td_bf16 value = src ? src[d] : 0;
    for (int s = 0; s < n_streams; s++) x[(row * n_streams + s) * dim + d] = value;
}

td_status td_cuda_embed(td_dev *base, const td_embed_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    if (a->dim < 1 || a->vocab < 0 || a->n_streams < 1) return TD_EINVAL;
    if (!a->window->n_rows) return TD_OK;
    td_launch(dev, k_embed, dim3((unsigned)a->window->n_rows, td_ceil_div((size_t)a->dim, THREADS)), THREADS, 0,
              a->window->ids, a->media_row, a->media, a->table, a->dim, a->vocab, a->n_streams, (td_bf16 *)a->x);
    return td_cuda_launched(dev, "embed");
}
