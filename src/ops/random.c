/* See random.h: which device, and the CPU's own loops. */
#include "ops/random.h"

static bool makes_sense(const td_random_args *a)
{
    if ((unsigned)a->kind > TD_RANDOM_KV_FP8 || (!a->out && a->n)) return false;
    return a->kind != TD_RANDOM_KV_FP8 || (a->width >= 16 && a->width % 16 == 0);
}

td_status td_random_fill(td_dev *dev, const td_random_args *a)
{
    if (!makes_sense(a)) return TD_EINVAL;
    if (!a->n) return TD_OK;
#ifdef TD_WITH_CUDA
    if (td_dev_backend(dev) == TD_CUDA) return td_cuda_random_fill(dev, a);
#endif
    return td_cpu_random_fill(dev, a);
}

static void fill_rows(const td_random_args *a)
{
    size_t row_bytes = (size_t)a->width + TD_RANDOM_KV_TAIL;
    int64_t n_rows = (int64_t)a->n;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < n_rows; row++) {
        uint8_t *out = (uint8_t *)a->out + (size_t)row * row_bytes;
        for (int at = 0; at < (int)row_bytes; at++)
            out[at] = td_random_kv_byte(a->seed, (uint64_t)row, at, a->width, a->scale);
    }
}

td_status td_cpu_random_fill(td_dev *dev, const td_random_args *a)
{
    int64_t n = (int64_t)a->n;
    float bell = td_random_bell_scale(a->scale);
    uint16_t *half = (uint16_t *)a->out;
    float *full = (float *)a->out;
    (void)dev;
    if (a->kind == TD_RANDOM_KV_FP8) {
        fill_rows(a);
        return TD_OK;
    }
#pragma omp parallel for schedule(static)
    for (int64_t k = 0; k < n; k++) {
        uint64_t i = (uint64_t)k;
        switch (a->kind) {
        case TD_RANDOM_BITS: half[k] = (uint16_t)td_random_bits(a->seed, i); break;
        case TD_RANDOM_BF16: half[k] = td_f32_bf16(td_random_bell(a->seed, i, bell)); break;
        case TD_RANDOM_SIGNS: half[k] = td_random_sign(a->seed, i, a->scale); break;
        default: full[k] = td_random_bell(a->seed, i, bell); break;
        }
    }
    return TD_OK;
}
