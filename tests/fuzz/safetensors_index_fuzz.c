/* model.safetensors.index.json of any bytes: the names handed out lie inside the text and are printable ASCII. */
#include "checkpoint/safetensors.h"

#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

typedef struct span {
    const char *begin, *end;
} span;

static void check_name(const span *all, const char *name, size_t n_bytes)
{
    td_check(name >= all->begin && name <= all->end && n_bytes <= (size_t)(all->end - name));
    for (size_t i = 0; i < n_bytes; i++) td_check(name[i] >= 0x20 && name[i] < 0x7f);
}

static td_status visit(void *user, const char *tensor, size_t tensor_bytes, const char *file, size_t file_bytes,
                       td_error *err)
{
    (void)err;
    check_name(user, tensor, tensor_bytes);
    check_name(user, file, file_bytes);
    return TD_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    span all = { (const char *)data, (const char *)data + n_bytes };
    uint64_t total;
    td_error err;
    td_safetensors_index_parse("fuzz", data, n_bytes, visit, &all, &total, &err);
    return 0;
}
