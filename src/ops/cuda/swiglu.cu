/* Clamped SwiGLU of dense MLPs and shared experts. */
#include "ops/cuda/cuda.h"
#include "ops/cuda/moe.h"

enum { THREADS = 256 };

static __global__ void k_swiglu(int width, float limit, const td_bf16 *gate_up, td_bf16 *y)
{
    td_begin();
    size_t row = blockIdx.y;
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= width) return;
    const td_bf16 *gate = gate_up + row * 2 * width + i;
    y[row * width + i] = td_to_bf16(td_swiglu_value(td_load_bf16(gate), td_load_bf16(gate + width), limit));
}

td_status td_cuda_swiglu(td_dev *base, const td_swiglu_args *a)
{
    enum { ROWS_MAX = 32768 }; /* a grid's second dimension holds 65,535 */
    td_cuda_dev *dev = td_cuda(base);
    if (a->n_rows < 0 || a->width < 0) return TD_EINVAL;
    for (int r = 0; r < a->n_rows && a->width; r += ROWS_MAX) {
        int rows = a->n_rows - r < ROWS_MAX ? a->n_rows - r : ROWS_MAX;
        td_launch(dev, k_swiglu, dim3(td_ceil_div((size_t)a->width, THREADS), (unsigned)rows), THREADS, 0, a->width,
                  a->limit, (const td_bf16 *)a->gate_up + (size_t)r * 2 * (size_t)a->width,
                  (td_bf16 *)a->y + (size_t)r * (size_t)a->width);
    }
    return td_cuda_launched(dev, "swiglu");
}
