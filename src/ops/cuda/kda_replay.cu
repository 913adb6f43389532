/* Commit of a window of which only the first rows stay: the recurrence runs again from the committed state over the
 * kept rows, with the step that the window used, so the state is the one that serial steps give. */
#include "ops/cuda/kda.h"

static __global__ void __launch_bounds__(TD_KDA_THREADS) k_kda_replay(td_kda_call a, const int32_t *keep)
{
    td_begin();
    __shared__ __align__(16) float part[3][TD_HEAD];
    __shared__ float red[2][TD_KDA_THREADS];
    int head = blockIdx.x, n = keep[blockIdx.y];
    const td_segment *segment = a.segments + blockIdx.y;
    if (segment->chunked || n <= 0 || n >= segment->n_rows) return;
    size_t first = (size_t)td_kda_first_saved(a.segments, blockIdx.y);
    float m[TD_KDA_QUARTER];
    td_kda_state_load(m, td_kda_state_at(a, segment, segment->parity, head));
    for (int t = 0; t < n; t++) {
        size_t row = first + t, at = (row * a.n_heads + head) * TD_HEAD + threadIdx.x % TD_HEAD;
        int p = threadIdx.x / TD_HEAD;
        __syncthreads();
        if (p < 3) part[p][threadIdx.x % TD_HEAD] = p == 0 ? a.saved.k[at] : p == 1 ? a.saved.v[at] : a.saved.alpha[at];
        __syncthreads();
        td_kda_step<false>(m, part[0], part[1], part[2], a.saved.beta[row * a.n_heads + head], NULL, red[0], t % 2,
                           NULL);
    }
    td_kda_state_store(m, td_kda_state_at(a, segment, !segment->parity, head));
    size_t width = 3 * (size_t)a.n_heads * TD_HEAD;
    td_kda_conv_write(a, segment, head, n, (const td_bf16 *)a.saved.raw + first * width, width);
}

td_status td_cuda_kda_replay(td_dev *base, const td_kda_replay_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    if (a->n_heads < 0 || !a->saved.k || a->window->n_segments > TD_SEGMENTS_MAX) return TD_EINVAL;
    if (!a->n_heads || !a->window->n_segments) return TD_OK;
    td_kda_call call = {};
    call.segments = a->window->segments;
    call.n_segments = a->window->n_segments;
    call.n_heads = a->n_heads;
    call.state = a->state.state;
    call.conv = (td_bf16 *)a->state.conv;
    call.saved = a->saved;
    dim3 grid((unsigned)a->n_heads, (unsigned)a->window->n_segments);
    td_launch_spread(dev, k_kda_replay, grid, TD_KDA_THREADS, 0, call, a->keep);
    return td_cuda_launched(dev, "kda_replay");
}
