/* Packing and quantising dense weights on the GPU: raw bf16 rows go over in pieces (staging.cu), one kernel writes the
 * packed form (weight.h). The quantiser is the CPU's, function by function (ops/quantise.h): the same codes and scales.
 */
#include "ops/cuda/cuda.h"
#include "ops/cuda/weight.h"
#include "ops/quantise.h"

enum { THREADS = 128 };

/* Rows out0 .. of a panel matrix; src: [n_out][in] raw bf16 in staging. */
typedef struct fill_args {
    uint8_t *data;
    size_t panel_bytes;
    int out0, n_out, in;
    const td_bf16 *src;
    size_t row_stride, column_stride; /* of src; bf16 only, the others are dense */
} fill_args;

static __global__ void k_fill_bf16(fill_args a)
{
    size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    int padded = td_groups(a.in) * TD_TILE_IN, row = (int)(i / padded), k = (int)(i % padded);
    if (row >= a.n_out) return;
    int out = a.out0 + row;
    td_place p = td_place_of(out % TD_TILE_OUT, k % TD_TILE_IN);
    uint8_t *group = a.data + (size_t)(out / TD_TILE_OUT) * a.panel_bytes + (size_t)(k / TD_TILE_IN) * TD_BF16_GROUP;
    *(td_bf16 *)(group + p.step * 512 + p.lane * 16 + p.reg * 4 + p.half * 2) =
        k < a.in ? a.src[row * a.row_stride + k * a.column_stride] : (td_bf16)0;
}

/* A block a row: the scale, then the codes. A row with NaN or infinity gets a NaN scale and stays visible. */
static __global__ void k_fill_fp8(fill_args a)
{
    __shared__ float largest[THREADS];
    __shared__ int bad;
    int row = blockIdx.x, out = a.out0 + row;
    const td_bf16 *src = a.src + (size_t)row * a.in;
    float max = 0.0f;
    if (threadIdx.x == 0) bad = 0;
    __syncthreads();
    for (int k = threadIdx.x; k < a.in; k += THREADS) {
        float x = fabsf(td_bf16_f32(src[k]));
        if (!(x <= 3.4028234e38f)) bad = 1;
        if (x > max) max = x;
    }
    largest[threadIdx.x] = max;
    __syncthreads();
    for (int j = 0; j < THREADS; j++) max = largest[j] > max ? largest[j] : max;
    float scale = td_fp8_row_scale(max);
    uint8_t *panel = a.data + (size_t)(out / TD_TILE_OUT) * a.panel_bytes;
    if (threadIdx.x == 0) ((float *)panel)[out % TD_TILE_OUT] = bad ? td_bits_f32(0x7fc00000u) : scale;
    for (int k = threadIdx.x; k < td_groups(a.in) * TD_TILE_IN; k += THREADS) {
        td_place p = td_place_of(out % TD_TILE_OUT, k % TD_TILE_IN);
        int byte = (p.step % 2 * 2 + p.reg / 2) * 4 + (p.reg % 2 ? 0 : 1) + 2 * p.half;
        panel[TD_FP8_HEAD + (size_t)(k / TD_TILE_IN) * TD_FP8_GROUP + p.step / 2 * 512 + p.lane * 16 + byte] =
            k < a.in && !bad ? td_f32_e4m3(td_bf16_f32(src[k]) / scale) : 0;
    }
}

/* A thread a row and group. Nibbles of four outputs' lanes share no word: a lane's word holds outputs g and g + 8, so
 * the two rows of a pair meet in one word; each adds its own bits with an integer atomic on cleared memory. */
static __global__ void k_fill_q4(fill_args a)
{
    int groups = td_groups(a.in);
    size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    int row = (int)(i / groups), g = (int)(i % groups);
    if (row >= a.n_out) return;
    int out = a.out0 + row, o = out % TD_TILE_OUT, first = g * TD_TILE_IN;
    int n = a.in - first < TD_TILE_IN ? a.in - first : TD_TILE_IN;
    float w[TD_TILE_IN];
    for (int k = 0; k < n; k++) w[k] = td_bf16_f32(a.src[(size_t)row * a.in + first + k]);
    td_affine best = td_affine_search(w, n);
    uint8_t *group = a.data + (size_t)(out / TD_TILE_OUT) * a.panel_bytes + (size_t)g * TD_Q4_GROUP_ALL;
    ((uint32_t *)group)[2 * (o % 8) + o / 8] = (uint32_t)best.scale | (uint32_t)best.offset << 16;
    uint32_t *words = (uint32_t *)(group + TD_Q4_SCALES);
    for (int k = 0; k < n; k += 4) { /* four inputs in a row: one word of one lane */
        uint32_t bits = 0, mask = 0;
        td_place p = td_place_of(o, k);
        for (int j = 0; j < 4; j++) {
            int shift = 4 * td_place_of(o, k + j).reg + 16 * td_place_of(o, k + j).half;
            bits |= (uint32_t)td_affine_level(w[k + j], td_bf16_f32(best.scale), td_bf16_f32(best.offset)) << shift;
            mask |= 15u << shift;
        }
        atomicAnd(words + p.lane * 4 + p.step, ~mask);
        atomicOr(words + p.lane * 4 + p.step, bits);
    }
    for (int k = n; k < TD_TILE_IN; k++) {
        td_place p = td_place_of(o, k);
        atomicAnd(words + p.lane * 4 + p.step, ~(15u << (4 * p.reg + 16 * p.half)));
    }
}

size_t td_cuda_weight_bytes(td_format format, int out, int in)
{
    return out > 0 && in > 0 ? td_gpu_panel_bytes(format, in) * td_ceil_div((size_t)out, TD_TILE_OUT) : 0;
}

static void fill_rows(const td_cuda_dev *dev, td_format format, const fill_args *a)
{
    size_t groups = (size_t)td_groups(a->in), rows = (size_t)a->n_out;
    switch (format) {
    case TD_W_Q4: k_fill_q4<<<td_ceil_div(rows * groups, THREADS), THREADS, 0, dev->stream>>>(*a); break;
    case TD_W_FP8: k_fill_fp8<<<(unsigned)rows, THREADS, 0, dev->stream>>>(*a); break;
    default: k_fill_bf16<<<td_ceil_div(rows * groups * TD_TILE_IN, THREADS), THREADS, 0, dev->stream>>>(*a); break;
    }
}

td_status td_cuda_weight_fill(td_dev *base, const td_weight *w, int out0, int n_out, const td_bf16 *src,
                              size_t src_stride, int in0)
{
    td_cuda_dev *dev = td_cuda(base);
    size_t row_bytes = (size_t)w->in * sizeof(td_bf16);
    if (w->in < 16 || w->in % 16 || out0 < 0 || out0 % TD_STACK || n_out < 0 || n_out > w->out - out0 || in0 < 0 ||
        row_bytes > TD_PIECE_BYTES)
        return TD_EINVAL;
    int step = (int)(TD_PIECE_BYTES / row_bytes);
    for (int r = 0; r < n_out; r += step) {
        int rows = n_out - r < step ? n_out - r : step;
        td_cuda_piece *piece;
        td_status status = td_cuda_piece_rows(dev, src + (size_t)r * src_stride + in0, src_stride * sizeof(td_bf16),
                                              row_bytes, (size_t)rows, &piece);
        if (status != TD_OK) return status;
        fill_args a = { (uint8_t *)w->data,
                        td_gpu_panel_bytes(w->format, w->in),
                        out0 + r,
                        rows,
                        w->in,
                        (const td_bf16 *)piece->device,
                        (size_t)w->in,
                        1 };
        fill_rows(dev, w->format, &a);
        status = td_cuda_piece_done(dev, piece, "weight_fill");
        if (status != TD_OK) return status;
    }
    return TD_OK;
}

size_t td_cuda_kv_b_bytes(const td_dev *dev, int n_heads, int k_dim, int v_dim, int kv_lora)
{
    (void)dev;
    return (size_t)n_heads *
           (td_cuda_weight_bytes(TD_W_BF16, kv_lora, k_dim) + td_cuda_weight_bytes(TD_W_BF16, v_dim, kv_lora));
}

/* Per head Wk^T as a matrix [kv_lora][k_dim], then Wv [v_dim][kv_lora]. */
td_status td_cuda_kv_b_fill(td_dev *base, const td_kv_b *w, const td_bf16 *src)
{
    td_cuda_dev *dev = td_cuda(base);
    size_t key_bytes = td_cuda_weight_bytes(TD_W_BF16, w->kv_lora, w->k_dim);
    size_t value_bytes = td_cuda_weight_bytes(TD_W_BF16, w->v_dim, w->kv_lora);
    size_t head_values = (size_t)(w->k_dim + w->v_dim) * (size_t)w->kv_lora;
    size_t head_row_bytes = (size_t)w->kv_lora * sizeof(td_bf16);
    if (w->n_heads < 0 || w->k_dim < 16 || w->k_dim % 16 || w->v_dim < 16 || w->v_dim % 16 || w->kv_lora < 16 ||
        w->kv_lora % 16 || head_values * sizeof(td_bf16) > TD_PIECE_BYTES)
        return TD_EINVAL;
    for (int h = 0; h < w->n_heads; h++) {
        uint8_t *data = (uint8_t *)w->data + (size_t)h * (key_bytes + value_bytes);
        td_cuda_piece *piece;
        td_status status = td_cuda_piece_rows(dev, src + (size_t)h * head_values, head_row_bytes, head_row_bytes,
                                              (size_t)(w->k_dim + w->v_dim), &piece);
        if (status != TD_OK) return status;
        const td_bf16 *raw = (const td_bf16 *)piece->device;
        fill_args keys = {
            data, td_gpu_panel_bytes(TD_W_BF16, w->k_dim), 0, w->kv_lora, w->k_dim, raw, 1, (size_t)w->kv_lora
        };
        fill_args values = { data + key_bytes,
                             td_gpu_panel_bytes(TD_W_BF16, w->kv_lora),
                             0,
                             w->v_dim,
                             w->kv_lora,
                             raw + (size_t)w->k_dim * (size_t)w->kv_lora,
                             (size_t)w->kv_lora,
                             1 };
        fill_rows(dev, TD_W_BF16, &keys);
        fill_rows(dev, TD_W_BF16, &values);
        status = td_cuda_piece_done(dev, piece, "kv_b_fill");
        if (status != TD_OK) return status;
    }
    return TD_OK;
}
