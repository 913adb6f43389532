/* Routing rows to experts: logits through the shared product (fp32), then a warp a row picks. A pick is a maximum over
 * (key, lower id first), found by comparing pairs, so no order of work decides a tie. */
#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"

enum { ROWS = 4, PER_LANE = TD_EXPERTS_MAX / 32 };

/* (key, id) as a number that is larger for a larger key and, among equal keys, for the lower id; NaN is below all keys.
 * Never 0. */
static TD_DEVICE uint64_t ordered(float key, int id)
{
    uint32_t bits = __float_as_uint(key + 0.0f), rank = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (uint64_t)(key == key ? rank : 0u) << 32 | (0xffffffffu - (uint32_t)id);
}

static __global__ void k_router_pick(int n_rows, int n_experts, int top_k, bool norm, float scale, const float *logits,
                                     const float *bias, int32_t *ids, float *weights)
{
    td_begin();
    int row = blockIdx.x * ROWS + threadIdx.x / 32, lane = threadIdx.x % 32, picked_id = 0;
    if (row >= n_rows) return;
    logits += (size_t)row * n_experts;
    uint64_t key[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        int e = lane + 32 * i;
        key[i] = e < n_experts ? ordered(td_sigmoidf(logits[e]) + bias[e], e) : 0;
    }
    for (int k = 0; k < top_k; k++) {
        uint64_t best = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (32 * i < n_experts) best = key[i] > best ? key[i] : best;
        for (int step = 16; step; step >>= 1) {
            uint64_t other = __shfl_xor_sync(0xffffffffu, best, step);
            best = other > best ? other : best;
        }
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (key[i] == best) key[i] = 0;
        if (lane == k) picked_id = (int)(0xffffffffu - (uint32_t)best);
    }
    float picked = lane < top_k ? td_sigmoidf(logits[picked_id]) : 0.0f, sum = 0.0f;
    for (int k = 0; k < top_k; k++) sum += __shfl_sync(0xffffffffu, picked, k);
    if (lane >= top_k) return;
    ids[(size_t)row * top_k + lane] = picked_id;
    weights[(size_t)row * top_k + lane] = (norm ? picked / (sum + 1e-20f) : picked) * scale;
}

size_t td_cuda_router_bytes(const td_dev_limits *limits)
{
    return (size_t)limits->rows * (size_t)limits->n_experts * sizeof(float);
}

td_status td_cuda_router(td_dev *base, const td_router_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    if (a->n_rows < 0 || a->n_rows > dev->limits.rows || a->n_experts < 1 || a->n_experts > TD_EXPERTS_MAX ||
        a->n_experts > dev->limits.n_experts || a->top_k < 1 || a->top_k > a->n_experts || a->top_k > TD_TOP_K_MAX ||
        a->w->out != a->n_experts || a->w->in != a->dim)
        return TD_EINVAL;
    if (!a->n_rows) return TD_OK;
    td_arena arena;
    td_cuda_scratch(dev, &arena);
    float *logits = (float *)td_cuda_take(&arena, td_cuda_router_bytes(&dev->limits));
    td_cuda_product_args p = { a->w->format,
                               a->w->data,
                               0,
                               a->w->out,
                               a->w->in,
                               a->n_rows,
                               1,
                               (const td_bf16 *)a->x,
                               (size_t)a->dim,
                               0,
                               NULL,
                               logits,
                               (size_t)a->n_experts,
                               0 };
    td_status status = td_cuda_product(dev, &p);
    if (status != TD_OK) return status;
    td_launch(dev, k_router_pick, td_ceil_div((size_t)a->n_rows, ROWS), 32 * ROWS, 0, a->n_rows, a->n_experts, a->top_k,
              a->norm, a->scale, logits, a->bias, a->ids, a->weights);
    return td_cuda_launched(dev, "router");
}
