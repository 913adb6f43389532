/* KDA over a window. Row-by-row segments: a block takes one head of one segment with the whole state in registers; rows
 * are prepared eight at a time (a warp a row and part), pass through the recurrence one by one, and are finished
 * together. Chunked segments: kda_chunk.cu. */
#include "ops/cuda/kda.h"

enum { ROWS = 8, WARPS = TD_KDA_THREADS / 32 };

typedef struct row_block {
    float part[4][ROWS][TD_HEAD]; /* q, k, v, decay */
    float beta[ROWS];
    float red[2][TD_KDA_THREADS];
    float o[ROWS][TD_KDA_THREADS]; /* four shares of each */
} row_block;

static TD_DEVICE void keep_row(const td_kda_call &a, const td_segment *segment, int head, int part, int t, int saved,
                               int lane, const float x[4])
{
    size_t width = (size_t)a.n_heads * TD_HEAD, channel = (size_t)head * TD_HEAD + lane,
           at = (size_t)saved * width + channel;
    float *to = part == 1 ? a.saved.k : part == 2 ? a.saved.v : part == 3 ? a.saved.alpha : NULL;
    const td_bf16 *raw = a.proj + (size_t)(segment->first_row + t) * a.proj_stride;
    td_bf16 *kept = (td_bf16 *)a.saved.raw + (size_t)saved * 3 * width;
    for (int i = 0; i < 4; i++) {
        if (to) to[at + 32 * i] = x[i];
        if (part < 3) kept[part * width + channel + 32 * i] = raw[part * width + channel + 32 * i];
    }
}

static TD_DEVICE void prepare(const td_kda_call &a, const td_segment *segment, int head, int t0, int n, int saved,
                              row_block *b)
{
    int lane = threadIdx.x % 32;
    for (int task = threadIdx.x / 32; task < 4 * n; task += WARPS) {
        int part = task / n, t = task % n;
        float x[4];
        td_kda_row(a, segment, head, part, t0 + t, lane, x);
        for (int i = 0; i < 4; i++) b->part[part][t][lane + 32 * i] = x[i];
        if (a.saved.k) keep_row(a, segment, head, part, t0 + t, saved + t0 + t, lane, x);
    }
    if (threadIdx.x < n) {
        float beta = td_kda_beta(a, segment, head, t0 + threadIdx.x);
        b->beta[threadIdx.x] = beta;
        if (a.saved.k) a.saved.beta[(size_t)(saved + t0 + threadIdx.x) * a.n_heads + head] = beta;
    }
}

/* Asks for the head's weights: 16 bytes a channel and part of the convolution, then what is fp32 a channel. */
static TD_DEVICE void prefetch_weights(const td_kda_call &a, int head)
{
    enum { LINE = 128, PART_LINES = TD_HEAD * TD_CONV * 4 / LINE, LINES = TD_HEAD * 4 / LINE };
    int i = threadIdx.x, part = i / PART_LINES;
    if (part < 3)
        td_prefetch((const char *)(a.w.conv + ((size_t)part * a.n_heads + head) * TD_HEAD * TD_CONV) +
                    i % PART_LINES * LINE);
    i -= 3 * PART_LINES;
    if (i >= 0 && i < LINES) td_prefetch((const char *)(a.w.dt_bias + head * TD_HEAD) + i * LINE);
    if (i >= LINES && i < 2 * LINES) td_prefetch((const char *)a.w.o_norm + (i - LINES) * LINE);
    if (i == 2 * LINES) td_prefetch(a.w.neg_a + head);
}

/* BLOCKS a multiprocessor. 1: the state is read at once. 2, for windows of up to ROWS rows: it is only asked for, and read
 * when the rows are prepared, which takes the registers before; one block's memory then hides the other's arithmetic.
 * Registers are short: the head is read as blockIdx.x where it is needed. */
template <int BLOCKS> static __global__ void __launch_bounds__(TD_KDA_THREADS, BLOCKS) k_kda_recurrent(td_kda_call a)
{
    prefetch_weights(a, blockIdx.x);
    td_begin();
    extern __shared__ __align__(16) unsigned char smem[];
    row_block *b = (row_block *)smem;
    const td_segment *segment = a.segments + blockIdx.y;
    if (segment->chunked || segment->n_rows < 1) return;
    int saved = td_kda_first_saved(a.segments, blockIdx.y);
    float m[TD_KDA_QUARTER];
    if (BLOCKS == 1)
        td_kda_state_load(m, td_kda_state_at(a, segment, segment->parity, blockIdx.x));
    else
        td_prefetch(td_kda_state_at(a, segment, segment->parity, blockIdx.x) +
                    threadIdx.x * (TD_KDA_STATE / TD_KDA_THREADS));
    for (int t0 = 0; t0 < segment->n_rows; t0 += ROWS) {
        int n = min(segment->n_rows - t0, (int)ROWS);
        prepare(a, segment, blockIdx.x, t0, n, saved, b);
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
            td_kda_finish(a, segment, blockIdx.x, t0 + t, threadIdx.x % 32, o);
        }
        if (BLOCKS == 2) break;
    }
    td_kda_state_store(m, td_kda_state_at(a, segment, !segment->parity, blockIdx.x));
    td_kda_conv_write(a, segment, blockIdx.x, segment->n_rows, a.proj + (size_t)segment->first_row * a.proj_stride,
                      a.proj_stride);
}

static bool segments_fit(const td_kda_args *a, bool *serial, bool *chunked)
{
    int kept = 0;
    *serial = *chunked = false;
    for (int i = 0; i < a->window->n_segments; i++) {
        const td_segment *s = a->window->host_segments + i;
        if (s->n_rows < 0 || s->first_row < 0 || s->n_rows > a->window->n_rows - s->first_row) return false;
        if (s->chunked && s->n_rows && s->pos % TD_GRID) return false;
        *(s->chunked ? chunked : serial) = true;
        kept += s->chunked ? 0 : s->n_rows;
    }
    return !a->saved.k || kept <= TD_WINDOW_MAX;
}

td_status td_cuda_kda(td_dev *base, const td_kda_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    bool serial, chunked;
    if (a->n_heads < 0 || a->n_heads > dev->limits.n_heads || a->window->n_rows > dev->limits.rows ||
        a->window->n_segments > TD_SEGMENTS_MAX || !segments_fit(a, &serial, &chunked))
        return TD_EINVAL;
    if (!a->n_heads || !a->window->n_rows) return TD_OK;
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
                         a->f_stride,
                         a->gate_stride,
                         (td_bf16 *)a->y };
    dim3 grid((unsigned)a->n_heads, (unsigned)a->window->n_segments);
    bool alone = a->n_heads * a->window->n_segments <= dev->n_sm; /* every block has a multiprocessor to itself */
    if (serial && alone)
        td_launch(dev, k_kda_recurrent<1>, grid, TD_KDA_THREADS, sizeof(row_block), call);
    else if (serial && a->window->n_rows > ROWS)
        td_launch_spread(dev, k_kda_recurrent<1>, grid, TD_KDA_THREADS, sizeof(row_block), call);
    else if (serial)
        td_launch_spread(dev, k_kda_recurrent<2>, grid, TD_KDA_THREADS, sizeof(row_block), call);
    if (chunked) return td_cuda_kda_chunked(dev, &call, a->window->n_rows);
    return td_cuda_launched(dev, "kda");
}
