/* One mapping of an unlinked file: the kernel writes out what memory cannot hold, and nothing is left behind however
 * the program ends. The space is reserved first, because a mapped page without room on the disk is a signal, not an
 * error. */
#include "cli/expert_inputs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PATH_CAP = 4096 };

static td_status reserve(const char *path, size_t n_bytes, int *out, td_error *err)
{
    char name[PATH_CAP];
    int n = (int)strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    if (snprintf(name, sizeof name, "%.*s.inputs-XXXXXX", n, path) >= (int)sizeof name)
        return td_fail(err, TD_EINVAL, "%s: path too long", path);
    int fd = mkostemp(name, O_CLOEXEC);
    if (fd < 0) return td_fail(err, TD_EIO, "%s: cannot be made: %s", name, strerror(errno));
    unlink(name);
    int error = posix_fallocate(fd, 0, (off_t)n_bytes);
    if (error) {
        close(fd);
        return td_fail(err, TD_EIO,
                       "%s: %.1f GB for the inputs of the experts cannot be reserved: %s; fewer "
                       "--calibration-tokens need less",
                       name, (double)n_bytes / 1e9, strerror(error));
    }
    *out = fd;
    return TD_OK;
}

td_status td_expert_inputs_open(const char *path, int n_layers, int64_t n_tokens, int dim, int top_k,
                                td_expert_inputs *out, td_error *err)
{
    int fd = -1;
    size_t n = (size_t)n_layers * (size_t)n_tokens;
    size_t rows_bytes = n * (size_t)dim * sizeof(td_bf16), n_bytes = rows_bytes + n * (size_t)top_k * sizeof(uint16_t);
    td_status status = reserve(path, n_bytes, &fd, err);
    if (status) return status;
    void *map = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    int error = errno;
    close(fd);
    if (map == MAP_FAILED) return td_fail(err, TD_EIO, "%s: cannot be mapped: %s", path, strerror(error));
    *out = (td_expert_inputs){ .n_layers = n_layers,
                               .dim = dim,
                               .top_k = top_k,
                               .n_tokens = n_tokens,
                               .rows = map,
                               .picks = (uint16_t *)(void *)((char *)map + rows_bytes),
                               .map = map,
                               .map_bytes = n_bytes };
    return TD_OK;
}

void td_expert_inputs_close(td_expert_inputs *in)
{
    if (in->map) munmap(in->map, in->map_bytes);
    *in = (td_expert_inputs){ 0 };
}

static size_t index_of(const td_expert_inputs *in, int layer, int64_t token)
{
    td_check(layer >= 0 && layer < in->n_layers && token >= 0 && token <= in->n_tokens);
    return (size_t)layer * (size_t)in->n_tokens + (size_t)token;
}

void td_expert_inputs_put_rows(td_expert_inputs *in, int layer, int64_t first, int n_rows, const float *x)
{
    size_t dim = (size_t)in->dim, n = (size_t)n_rows * dim;
    td_check(first + n_rows <= in->n_tokens);
    td_bf16 *to = in->rows + index_of(in, layer, first) * dim;
    for (size_t i = 0; i < n; i++) to[i] = td_f32_bf16(x[i]);
}

void td_expert_inputs_put_picks(td_expert_inputs *in, int layer, int64_t first, int n_rows, const int32_t *ids)
{
    size_t n = (size_t)n_rows * (size_t)in->top_k;
    td_check(first + n_rows <= in->n_tokens);
    uint16_t *to = in->picks + index_of(in, layer, first) * (size_t)in->top_k;
    for (size_t i = 0; i < n; i++) to[i] = (uint16_t)(ids[i] + 1);
}

static bool went_to(const td_expert_inputs *in, size_t row, int expert)
{
    const uint16_t *picks = in->picks + row * (size_t)in->top_k;
    for (int k = 0; k < in->top_k; k++)
        if (picks[k] == expert + 1) return true;
    return false;
}

int64_t td_expert_inputs_count(const td_expert_inputs *in, int layer, int expert)
{
    int64_t n = 0;
    size_t first = index_of(in, layer, 0);
    for (int64_t t = 0; t < in->n_tokens; t++) n += went_to(in, first + (size_t)t, expert);
    return n;
}

int td_expert_inputs_take(const td_expert_inputs *in, int layer, int expert, int64_t *next, int cap, float *x)
{
    int n = 0;
    size_t dim = (size_t)in->dim, first = index_of(in, layer, 0);
    for (; *next < in->n_tokens && n < cap; (*next)++) {
        size_t row = first + (size_t)*next;
        if (!went_to(in, row, expert)) continue;
        for (size_t i = 0; i < dim; i++) x[(size_t)n * dim + i] = td_bf16_f32(in->rows[row * dim + i]);
        n++;
    }
    return n;
}
