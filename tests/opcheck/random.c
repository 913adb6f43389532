/* What stands in for a checkpoint: random values have the CPU's bits, and weights that are filled from the GPU's own
 * memory are those that are filled from the host's. And what measures: marks and pauses. */
#include "ops/random.h"
#include "opcheck.h"
#include "ops/measure.h"

#include <stdlib.h>

static void check_values(oc_ctx *oc, td_random_kind kind, int width, size_t n, size_t n_bytes)
{
    if (!oc_case(oc, "kind %d, %zu of width %d", (int)kind, n, width)) return;
    oc_buf *b = oc_new(oc, "values", n_bytes);
    td_status status[OC_SIDES];
    td_random_args args = { .kind = kind, .seed = oc_rand(oc), .scale = 0.25f, .width = width, .n = n };
    for (int side = 0; side < OC_SIDES; side++) {
        args.out = oc_at(b, side);
        status[side] = td_random_fill(oc->dev[side], &args);
    }
    oc_ran(oc, status[OC_CPU], status[OC_GPU]);
    oc_same(oc, b);
    oc_done(oc);
}

/* Two packed forms on the GPU, from host and from device memory, are equal. */
static void same_on_gpu(oc_ctx *oc, const oc_buf *from_host, const oc_buf *from_device)
{
    void *want = oc_pull(oc, from_host), *got = oc_pull(oc, from_device);
    oc_bits(oc, "filled from the GPU's memory", got, want, from_host->n_bytes);
    free(want);
    free(got);
}

static void check_weight(oc_ctx *oc, td_format format, int out, int in, int in_all, int in0)
{
    if (!oc_case(oc, "format %d [%d][%d of %d]", (int)format, out, in, in_all)) return;
    const td_ops *ops = &oc->ops[OC_GPU];
    size_t n_bytes = ops->weight_bytes(format, out, in);
    oc_buf *rows = oc_acts(oc, "rows", (size_t)out * (size_t)in_all, 1.0f), *packed[OC_SIDES];
    for (int side = 0; side < OC_SIDES; side++) { /* always on the GPU, from either side's rows */
        packed[side] = oc_new(oc, "packed", n_bytes);
        td_weight w = { format, out, in, oc_at(packed[side], OC_GPU) };
        td_status status = td_dev_fill(oc->dev[OC_GPU], w.data, 0, n_bytes);
        if (status == TD_OK)
            status =
                ops->weight_fill(oc->dev[OC_GPU], &w, 0, out, (const td_bf16 *)oc_at(rows, side), (size_t)in_all, in0);
        oc_ran(oc, TD_OK, status);
    }
    same_on_gpu(oc, packed[OC_CPU], packed[OC_GPU]);
    oc_done(oc);
}

static void check_kv_b(oc_ctx *oc, int n_heads, int dim, int lora)
{
    if (!oc_case(oc, "kv_b of %d heads", n_heads)) return;
    const td_ops *ops = &oc->ops[OC_GPU];
    size_t n_bytes = ops->kv_b_bytes(oc->dev[OC_GPU], n_heads, dim, dim, lora);
    oc_buf *rows = oc_acts(oc, "rows", 2 * (size_t)n_heads * (size_t)dim * (size_t)lora, 1.0f), *packed[OC_SIDES];
    for (int side = 0; side < OC_SIDES; side++) {
        packed[side] = oc_new(oc, "packed", n_bytes);
        td_kv_b w = { n_heads, dim, dim, lora, oc_at(packed[side], OC_GPU) };
        td_status status = td_dev_fill(oc->dev[OC_GPU], w.data, 0, n_bytes);
        if (status == TD_OK) status = ops->kv_b_fill(oc->dev[OC_GPU], &w, (const td_bf16 *)oc_at(rows, side));
        oc_ran(oc, TD_OK, status);
    }
    same_on_gpu(oc, packed[OC_CPU], packed[OC_GPU]);
    oc_done(oc);
}

static void check_exl3(oc_ctx *oc, int bits2, td_exl3_codebook codebook)
{
    enum { K = 512, N = 640, K0 = 128, K1 = 384, N0 = 256, N1 = 640 };
    if (!oc_case(oc, "exl3 of %d half bits, %s", bits2, td_exl3_codebook_name(codebook))) return;
    size_t n_trellis = td_exl3_trellis_bytes(K, N, bits2), n_bytes = td_exl3_bytes(K1 - K0, N1 - N0, bits2);
    oc_buf *words = oc_new(oc, "words", n_trellis), *scales = oc_new(oc, "scales", 2 * (K + N)), *packed[OC_SIDES];
    for (size_t i = 0; i < n_trellis; i++) words->cpu[i] = (unsigned char)oc_rand(oc);
    for (size_t i = 0; i < scales->n_bytes; i++) scales->cpu[i] = (unsigned char)oc_rand(oc);
    oc_push(oc, words);
    oc_push(oc, scales);
    for (int side = 0; side < OC_SIDES; side++) {
        td_error err;
        const td_f16 *suh = (const td_f16 *)oc_at(scales, side);
        td_exl3 view = { 0 }, whole = { .k = K, .n = N, .bits2 = bits2, .codebook = codebook, .suh = suh };
        whole.trellis = (const uint16_t *)oc_at(words, side);
        whole.svh = suh + K;
        packed[side] = oc_new(oc, "packed", n_bytes);
        view.trellis = (const uint16_t *)oc_at(packed[side], OC_GPU);
        oc_ran(oc, TD_OK, oc->ops[OC_GPU].exl3_fill(oc->dev[OC_GPU], &view, &whole, K0, K1, N0, N1, &err));
        size_t at = (size_t)((const unsigned char *)view.svh - packed[side]->gpu);
        oc_expect(oc, view.k == K1 - K0 && view.n == N1 - N0 && at == n_bytes - 2 * (N1 - N0), "view of the slice");
    }
    same_on_gpu(oc, packed[OC_CPU], packed[OC_GPU]);
    oc_done(oc);
}

/* A pause of a millisecond lies between its marks, and not much more; multiplying takes time. */
static void check_marks(oc_ctx *oc)
{
    td_marks *marks;
    td_error err;
    double flops = 0;
    if (!oc_case(oc, "marks")) return;
    td_status status = td_marks_create(oc->dev[OC_GPU], 3, &marks, &err);
    oc_expect(oc, status == TD_OK, "marks are made");
    if (status) return;
    int first = td_mark(marks);
    status = td_marks_hold(marks, 1000000);
    int second = td_mark(marks);
    if (status == TD_OK) status = td_dev_multiply(oc->dev[OC_GPU], &flops);
    int third = td_mark(marks), none = td_mark(marks);
    if (status == TD_OK) status = td_dev_sync(oc->dev[OC_GPU], &err);
    oc_ran(oc, TD_OK, status);
    double pause_s = td_marks_seconds(marks, first, second), multiply_s = td_marks_seconds(marks, second, third);
    oc_expect(oc, first == 0 && second == 1 && third == 2 && none == -1, "numbers of marks");
    oc_expect(oc, pause_s > 0.9e-3 && pause_s < 10e-3, "a pause of 1 ms");
    oc_expect(oc, multiply_s > 0 && flops / multiply_s > 1e12 && flops / multiply_s < 1e16, "rate of multiplications");
    td_marks_destroy(marks);
}

void oc_random(oc_ctx *oc)
{
    static const size_t lengths[] = { 1, 255, 4097, 1 << 20 };
    for (int kind = TD_RANDOM_BITS; kind < TD_RANDOM_KV_FP8; kind++)
        for (int i = 0; i < 4; i++)
            check_values(oc, (td_random_kind)kind, 0, lengths[i], lengths[i] * (kind == TD_RANDOM_F32 ? 4 : 2));
    check_values(oc, TD_RANDOM_KV_FP8, 512, 1000, 1000 * 528);
    check_values(oc, TD_RANDOM_KV_FP8, 128, 3000, 3000 * 144);
    for (int format = TD_W_BF16; format <= TD_W_FP8; format++) {
        check_weight(oc, (td_format)format, 48, 256, 256, 0);
        check_weight(oc, (td_format)format, 50, 192, 512, 128);
    }
    check_kv_b(oc, 3, 256, 512);
    check_exl3(oc, 8, TD_EXL3_MCG);
    check_exl3(oc, 6, TD_EXL3_MCG);
    check_exl3(oc, 8, TD_EXL3_3INST);
    check_marks(oc);
}
