/* A safetensors file of any bytes: what the parser accepts must lie inside the file, aligned, sized as its shape says.
 */
#include "checkpoint/safetensors.h"

#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    td_arena arena;
    td_tensor_list list;
    td_error err;
    td_arena_init(&arena, (size_t)64 << 20);
    if (td_safetensors_parse("fuzz", data, n_bytes, n_bytes, &arena, &list, &err) == TD_OK) {
        volatile unsigned sum = 0; /* reads every byte */
        for (size_t i = 0; i < list.n; i++) {
            const td_tensor *t = &list.items[i];
            char text[TD_SHAPE_TEXT_CAP];
            uint64_t expected = (uint64_t)td_dtype_bytes(t->dtype);
            for (int d = 0; d < t->rank; d++) expected *= (uint64_t)t->shape[d];
            td_check(t->rank >= 0 && t->rank <= TD_RANK_MAX && t->n_bytes == expected);
            td_check(t->offset <= n_bytes && t->n_bytes <= n_bytes - t->offset);
            td_check(t->offset % (uint64_t)td_dtype_bytes(t->dtype) == 0);
            td_check(td_shape_text(t->rank, t->shape, text)[0] == '[');
            for (uint64_t b = 0; b < t->n_bytes; b++) sum = sum + data[t->offset + b];
        }
    }
    td_arena_deinit(&arena);
    return 0;
}
