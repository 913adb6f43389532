/* KDA over a window. Row-by-row segments: a block takes one head of one segment with the whole state in registers; rows
 * are prepared eight at a time (a thread a channel), pass through the recurrence one by one, and are finished together.
 * Gates of low rank are two small products of the block's own (kda_gates.h). What is not from the kernel before is asked
 * for or read before the wait for it. Chunked segments: kda_chunk.cu. */
#include "ops/cuda/kda_gates.h"

enum { ROWS = TD_KDA_GATE_ROWS, WARPS = TD_KDA_THREADS / 32 };

typedef struct row_block {
    float part[4][ROWS][TD_HEAD]; /* q, k, v, decay */
    float gate[ROWS][TD_HEAD];    /* sigmoids */
    float norm[TD_HEAD];
    float beta[ROWS];
    float red[2][TD_KDA_THREADS];
    float o[ROWS][TD_KDA_THREADS]; /* four shares of each; before: what kda_gates.h adds up */
} row_block;

/* What a thread knows before the rows come: of channel threadIdx.x % 128 of q, k or v (part threadIdx.x / 128; 3: none)
 * the taps and the raw values of the last three rows; of the same channel of the decays what they need beside f. */
typedef struct channel_state {
    float taps[TD_CONV], raw[TD_CONV - 1];
    float neg_a, dt_bias;
} channel_state;

static TD_DEVICE int part_of()
{
    return threadIdx.x / TD_HEAD;
}

/* Of the thread in rows of q | k | v of all heads. */
static TD_DEVICE size_t column_of(const td_kda_call &a, int head)
{
    return ((size_t)part_of() * a.n_heads + head) * TD_HEAD + threadIdx.x % TD_HEAD;
}

static TD_DEVICE void load_channel(const td_kda_call &a, const td_segment *segment, int head, channel_state *c)
{
    c->neg_a = a.w.neg_a[head];
    c->dt_bias = a.w.dt_bias[head * TD_HEAD + threadIdx.x % TD_HEAD];
    if (part_of() == 3) return;
    td_kda_load4(a.w.conv + column_of(a, head) * TD_CONV, c->taps);
#pragma unroll
    for (int j = 0; j < TD_CONV - 1; j++)
        c->raw[j] = td_load_bf16(td_kda_conv_at(a, segment, segment->parity, j) + column_of(a, head));
}

/* What convolve() reads first, to be asked for ahead of it: the thread's channel of row t0, or a row's beta. */
static TD_DEVICE td_bf16 first_raw(const td_kda_call &a, const td_segment *segment, int head, int t0, int n)
{
    size_t row = (size_t)(segment->first_row + t0);
    if (part_of() < 3) return a.proj[row * a.proj_stride + column_of(a, head)];
    int t = threadIdx.x % TD_HEAD;
    return t < n ? a.beta_raw[(row + t) * a.beta_stride + head] : 0;
}

/* The thread's channel of q, k or v of n rows from t0, without the norms; beta. saved: of the segment's first row. */
static TD_DEVICE void convolve(const td_kda_call &a, const td_segment *segment, int head, int t0, int n, int saved,
                               td_bf16 first, channel_state *c, row_block *b)
{
    int part = part_of(), channel = threadIdx.x % TD_HEAD;
    size_t width = (size_t)a.n_heads * TD_HEAD, column = column_of(a, head);
    if (part == 3) {
        if (channel >= n) return;
        float beta = td_kda_beta(first);
        b->beta[channel] = beta;
        if (a.saved.k) a.saved.beta[(size_t)(saved + t0 + channel) * a.n_heads + head] = beta;
        return;
    }
    const td_bf16 *from = a.proj + (size_t)(segment->first_row + t0) * a.proj_stride + column;
    float next = td_load_bf16(&first);
#pragma unroll 1
    for (int t = 0; t < n; t++) {
        float raw[TD_CONV] = { c->raw[0], c->raw[1], c->raw[2], next };
        from += a.proj_stride;
        if (t + 1 < n) next = td_load_bf16(from);
        float x = td_kda_convolve(c->taps, raw);
        b->part[part][t][channel] = x;
#pragma unroll
        for (int j = 0; j < TD_CONV - 1; j++) c->raw[j] = raw[j + 1];
        if (!a.saved.k) continue;
        size_t row = (size_t)(saved + t0 + t);
        ((td_bf16 *)a.saved.raw)[row * 3 * width + column] = td_to_bf16(raw[TD_CONV - 1]);
        if (part == 2) a.saved.v[row * width + head * TD_HEAD + channel] = x;
    }
}

/* Norms of q and k: a warp a row and part, from the last one on, as the first ones have the decays. */
static TD_DEVICE void normalise(const td_kda_call &a, int head, int t0, int n, int saved, row_block *b)
{
    int lane = threadIdx.x % 32;
    for (int task = WARPS - 1 - threadIdx.x / 32; task < 2 * n; task += WARPS) {
        int part = task % 2, t = task / 2;
        float x[4], *row = b->part[part][t] + lane;
        for (int i = 0; i < 4; i++) x[i] = row[32 * i];
        td_kda_normalise(x, part == 0 ? 0.08838834764831845f : 1.0f); /* q carries 128^-1/2 */
        for (int i = 0; i < 4; i++) row[32 * i] = x[i];
        if (!a.saved.k || part == 0) continue;
        float *to = a.saved.k + ((size_t)(saved + t0 + t) * a.n_heads + head) * TD_HEAD + lane;
        for (int i = 0; i < 4; i++) to[32 * i] = x[i];
    }
}

/* Decays and sigmoids of gates of n rows from t0: a thread a channel. */
template <int GATES>
static TD_DEVICE void gates(const td_kda_call &a, const td_segment *segment, int head, int t0, int n, int saved,
                            const channel_state &c, row_block *b)
{
    int channel = threadIdx.x % TD_HEAD, which = part_of() % 2;
    for (int t = part_of() / 2; t < n; t += TD_KDA_THREADS / (2 * TD_HEAD)) {
        float v = td_kda_gate_value<GATES>(a, segment, head, which, t0, t, channel, b->o[0]);
        if (which) {
            b->gate[t][channel] = td_sigmoidf(v);
            continue;
        }
        float alpha = td_kda_decay(a, c.neg_a, c.dt_bias, v);
        b->part[3][t][channel] = alpha;
        if (a.saved.k) a.saved.alpha[((size_t)(saved + t0 + t) * a.n_heads + head) * TD_HEAD + channel] = alpha;
    }
}

/* The last three raw rows go to the other parity. */
static TD_DEVICE void store_channel(const td_kda_call &a, const td_segment *segment, int head, const channel_state &c)
{
    if (part_of() == 3) return;
#pragma unroll
    for (int j = 0; j < TD_CONV - 1; j++)
        td_kda_conv_at(a, segment, !segment->parity, j)[column_of(a, head)] = td_to_bf16(c.raw[j]);
}

/* BLOCKS a multiprocessor. 1: the state is read at once. 2, for windows of up to ROWS rows: it is only asked for, and read
 * when the rows are prepared, which takes the registers before; one block's memory then hides the other's arithmetic.
 * Registers are short: the head is read as blockIdx.x where it is needed. GATES: kda_gates.h. */
template <int BLOCKS, int GATES>
static __global__ void __launch_bounds__(TD_KDA_THREADS, BLOCKS) k_kda_recurrent(td_kda_call a)
{
    extern __shared__ __align__(16) unsigned char smem[];
    row_block *b = (row_block *)smem;
    const td_segment own = a.segments[blockIdx.y], *segment = &own; /* in registers */
    td_kda_gate_weights<GATES> gate_weights;
    channel_state channel;
    float m[TD_KDA_QUARTER];
    bool live = !segment->chunked && segment->n_rows > 0;
    int saved = live && a.saved.k ? td_kda_first_saved(a.segments, blockIdx.y) : 0;
    if (live) {
        load_channel(a, segment, blockIdx.x, &channel);
        td_kda_load_gates<GATES>(a, blockIdx.x, &gate_weights);
        if (threadIdx.x < TD_HEAD) b->norm[threadIdx.x] = a.w.o_norm[threadIdx.x];
        if (BLOCKS == 1)
            td_kda_state_load(m, td_kda_state_at(a, segment, segment->parity, blockIdx.x));
        else
            td_prefetch(td_kda_state_at(a, segment, segment->parity, blockIdx.x) +
                        threadIdx.x * (TD_KDA_STATE / TD_KDA_THREADS));
    }
    td_begin(); /* by every block: a kernel is over when all are, and the next one counts on that */
    if (!live) return;
    for (int t0 = 0; t0 < segment->n_rows; t0 += ROWS) {
        int n = min(segment->n_rows - t0, (int)ROWS);
        td_bf16 first = first_raw(a, segment, blockIdx.x, t0, n);
        td_kda_multiply_gates<GATES>(a, segment, t0, n, gate_weights, b->o[0]);
        convolve(a, segment, blockIdx.x, t0, n, saved, first, &channel, b);
        if (t0 + ROWS >= segment->n_rows) store_channel(a, segment, blockIdx.x, channel);
        __syncthreads();
        normalise(a, blockIdx.x, t0, n, saved, b);
        gates<GATES>(a, segment, blockIdx.x, t0, n, saved, channel, b);
        if (BLOCKS == 2) td_kda_state_load(m, td_kda_state_at(a, segment, segment->parity, blockIdx.x));
        __syncthreads();
        for (int t = 0; t < n; t++)
            td_kda_step<true>(m, b->part[1][t], b->part[2][t], b->part[3][t], b->beta[t], b->part[0][t], b->red[0],
                              t % 2, b->o[t]);
        __syncthreads();
        for (int t = threadIdx.x / 32; t < n; t += WARPS) {
            float o[4];
            for (int i = 0; i < 4; i++) {
                const float *share = b->o[t] + threadIdx.x % 32 + 32 * i;
                o[i] = ((share[0] + share[TD_HEAD]) + share[2 * TD_HEAD]) + share[3 * TD_HEAD];
            }
            td_kda_finish(a, segment, blockIdx.x, t0 + t, threadIdx.x % 32, o, b->norm, b->gate[t]);
        }
        if (BLOCKS == 2) break;
        __syncthreads(); /* the next rows' gates are added up where o was */
    }
    td_kda_state_store(m, td_kda_state_at(a, segment, !segment->parity, blockIdx.x));
}

template <int GATES> static void launch(td_cuda_dev *dev, const td_kda_args *a, const td_kda_call &call)
{
    dim3 grid((unsigned)a->n_heads, (unsigned)a->window->n_segments);
    bool alone = a->n_heads * a->window->n_segments <= dev->n_sm; /* every block has a multiprocessor to itself */
    if (alone || a->window->n_rows > ROWS)
        td_launch_as(alone, dev, k_kda_recurrent<1, GATES>, grid, TD_KDA_THREADS, sizeof(row_block), call);
    else
        td_launch_spread(dev, k_kda_recurrent<2, GATES>, grid, TD_KDA_THREADS, sizeof(row_block), call);
}

/* Up to a window's rows a block makes its own gates; rows of prompts share the products' weights. */
static bool own_gates(const td_kda_args *a, bool chunked)
{
    uintptr_t at = (uintptr_t)a->low.f_a | (uintptr_t)a->low.g_a | a->low.stride * sizeof(td_bf16);
    return a->low.f_b && !chunked && !(at & 15);
}

td_status td_cuda_kda(td_dev *base, const td_kda_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    bool serial = false, chunked = false;
    if (a->n_heads > dev->limits.n_heads || a->window->n_rows > dev->limits.rows ||
        a->window->n_segments > TD_SEGMENTS_MAX || !td_kda_fits(a))
        return TD_EINVAL;
    if (!a->n_heads || !a->window->n_rows) return TD_OK;
    for (int i = 0; i < a->window->n_segments; i++) *(a->window->host_segments[i].chunked ? &chunked : &serial) = true;
    size_t width = (size_t)a->n_heads * TD_HEAD;
    td_kda_call call = { a->window->segments,
                         a->window->n_segments,
                         a->n_heads,
                         a->rms_eps,
                         a->lower_bound,
                         a->w,
                         a->state.state,
                         (td_bf16 *)a->state.conv,
                         a->saved,
                         (const td_bf16 *)a->proj,
                         (const td_bf16 *)a->beta_raw,
                         (const td_bf16 *)a->f,
                         (const td_bf16 *)a->gate,
                         a->proj_stride,
                         a->beta_stride,
                         width,
                         width,
                         (td_bf16 *)a->y };
    bool own = own_gates(a, chunked);
    if (own)
        call.low = { (const uint8_t *)a->low.f_b->data, (const uint8_t *)a->low.g_b->data, (const td_bf16 *)a->low.f_a,
                     (const td_bf16 *)a->low.g_a, a->low.stride };
    td_status status = a->low.f_b && !own ? td_kda_make_gates(base, td_cuda_linear, a) : TD_OK;
    if (status != TD_OK) return status;
    int format = own ? (int)a->low.f_b->format : TD_KDA_GATES_THERE;
    if (serial) switch (format) {
        case TD_W_BF16: launch<TD_W_BF16>(dev, a, call); break;
        case TD_W_Q4: launch<TD_W_Q4>(dev, a, call); break;
        case TD_W_FP8: launch<TD_W_FP8>(dev, a, call); break;
        default: launch<TD_KDA_GATES_THERE>(dev, a, call); break;
        }
    if (chunked) return td_cuda_kda_chunked(dev, &call, a->window->n_rows);
    return td_cuda_launched(dev, "kda");
}
