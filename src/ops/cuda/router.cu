/* Routing rows to experts: logits through the shared product (fp32), then a warp a row picks. A pick is a maximum over
 * (key, lower id first), found by comparing pairs, so no order of work decides a tie. */
#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"

enum { ROWS = 4, PER_LANE = TD_EXPERTS_MAX / 32 };

/* Is (key, id) better than (best, best_id)? NaN loses to every number; id < 0 is nothing. */
static TD_DEVICE bool better(float key, int id, float best, int best_id)
{
    if (id < 0) return false;
    if (best_id < 0) return true;
    if (key > best) return true;
    if (key != key || best != best) return key == key || (best != best && id < best_id);
    return key == best && id < best_id;
}

static __global__ void k_router_pick(int n_rows, int n_experts, int top_k, bool norm, float scale, const float *logits,
                                     const float *bias, int32_t *ids, float *weights)
{
    int row = blockIdx.x * ROWS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= n_rows) return;
    float prob[PER_LANE], key[PER_LANE], sum = 0.0f, picked = 0.0f;
    uint32_t taken = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        int e = lane + 32 * i;
        prob[i] = e < n_experts ? td_sigmoidf(logits[(size_t)row * n_experts + e]) : 0.0f;
        key[i] = e < n_experts ? prob[i] + bias[e] : 0.0f;
    }
    for (int k = 0; k < top_k; k++) {
        float best = 0.0f, best_prob = 0.0f;
        int best_id = -1;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int e = lane + 32 * i;
            if (e < n_experts && !(taken >> i & 1u) && better(key[i], e, best, best_id)) {
                best = key[i];
                best_id = e;
                best_prob = prob[i];
            }
        }
        for (int step = 16; step; step >>= 1) {
            float other = __shfl_xor_sync(0xffffffffu, best, step),
                  other_prob = __shfl_xor_sync(0xffffffffu, best_prob, step);
            int other_id = __shfl_xor_sync(0xffffffffu, best_id, step);
            if (better(other, other_id, best, best_id)) {
                best = other;
                best_id = other_id;
                best_prob = other_prob;
            }
        }
        if (best_id % 32 == lane) taken |= 1u << best_id / 32;
        if (lane == k) {
            picked = best_prob;
            ids[(size_t)row * top_k + k] = best_id;
        }
        sum += best_prob;
    }
    if (lane < top_k) weights[(size_t)row * top_k + lane] = (norm ? picked / (sum + 1e-20f) : picked) * scale;
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
    k_router_pick<<<td_ceil_div((size_t)a->n_rows, ROWS), 32 * ROWS, 0, dev->stream>>>(
        a->n_rows, a->n_experts, a->top_k, a->norm, a->scale, logits, a->bias, a->ids, a->weights);
    return td_cuda_launched(dev, "router");
}
