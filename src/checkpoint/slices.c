/* See slices.h: cutting ranges, and copying a shard's rows or columns out of the mapping. A copy reads the file in
 * order, row after row, so that page-in runs forward. */
#include "checkpoint/slices.h"

#include <string.h>

td_range td_shard_range(int64_t total, int64_t unit, int shard, int n_shards)
{
    td_check(total > 0 && unit > 0 && total % unit == 0 && n_shards > 0 && shard >= 0 && shard < n_shards);
    int64_t units = total / unit, each = units / n_shards, more = units % n_shards;
    int64_t begin = shard * each + (shard < more ? shard : more);
    return (td_range){ begin * unit, (begin + each + (shard < more)) * unit };
}

int64_t td_shard_unit(int64_t width)
{
    int64_t unit = 128;
    while (unit > 1 && (width % unit != 0 || width / unit < TD_SHARDS)) unit /= 2;
    return unit;
}

td_range td_rank_shards(int rank, int world)
{
    return td_shard_range(TD_SHARDS, 1, rank, world);
}

void td_shard_of(const td_config *config, int shard, int n_shards, td_shard *out)
{
    const td_config *c = config;
    *out = (td_shard){
        .heads = td_shard_range(c->n_heads, 1, shard, n_shards),
        .kda_heads = td_shard_range(c->kda_heads, 1, shard, n_shards),
        .intermediate = td_shard_range(c->intermediate, td_shard_unit(c->intermediate), shard, n_shards),
        .moe = td_shard_range(c->moe_intermediate, td_shard_unit(c->moe_intermediate), shard, n_shards),
        .vocab = td_shard_range(c->vocab_size, td_shard_unit(c->vocab_size), shard, n_shards),
    };
    if (c->shared_intermediate > 0)
        out->shared = td_shard_range(c->shared_intermediate, td_shard_unit(c->shared_intermediate), shard, n_shards);
}

td_range td_role_range(const td_role *role, int shard, int n_shards)
{
    int64_t total = role->shape[role->split == TD_SPLIT_COLS ? role->rank - 1 : 0];
    if (role->split == TD_SPLIT_REPLICATED) return (td_range){ 0, total };
    return td_shard_range(total, role->unit, shard, n_shards);
}

/* A tensor as rows of equal length: first dimension x all the others. */
typedef struct row_view {
    int64_t n_rows, n_cols;
} row_view;

static row_view rows_of(const td_tensor *tensor)
{
    int64_t n_rows = tensor->rank > 0 ? tensor->shape[0] : 1;
    return (row_view){ n_rows, n_rows > 0 ? td_tensor_n_elements(tensor) / n_rows : 0 };
}

static td_status bad_range(const td_tensor *tensor, const char *what, td_range range, int64_t total, td_error *err)
{
    return td_fail(err, TD_EINVAL, "tensor %s: %s %lld..%lld of %lld", tensor->name, what, (long long)range.begin,
                   (long long)range.end, (long long)total);
}

static bool inside(td_range range, int64_t total)
{
    return range.begin >= 0 && range.begin <= range.end && range.end <= total;
}

/* n_rows * n_cols <= out_cap, both >= 0. */
static td_status check_room(const td_tensor *tensor, int64_t n_rows, int64_t n_cols, size_t out_cap, td_error *err)
{
    size_t needed;
    if (td_mul_size((size_t)n_rows, (size_t)n_cols, &needed) || needed > out_cap)
        return td_fail(err, TD_EINVAL, "tensor %s: a slice of %lld x %lld does not fit into %zu elements", tensor->name,
                       (long long)n_rows, (long long)n_cols, out_cap);
    return TD_OK;
}

static td_status check_rows(const td_tensor *tensor, td_range rows, size_t out_cap, td_error *err)
{
    row_view view = rows_of(tensor);
    if (!inside(rows, view.n_rows)) return bad_range(tensor, "rows", rows, view.n_rows, err);
    return check_room(tensor, td_range_n(rows), view.n_cols, out_cap, err);
}

static td_status check_cols(const td_tensor *tensor, td_range cols, size_t out_cap, td_error *err)
{
    row_view view = rows_of(tensor);
    if (!inside(cols, view.n_cols)) return bad_range(tensor, "columns", cols, view.n_cols, err);
    return check_room(tensor, view.n_rows, td_range_n(cols), out_cap, err);
}

td_status td_slice_rows_bf16(const td_tensor *tensor, td_range rows, td_bf16 *out, size_t out_cap, td_error *err)
{
    int64_t n_cols = rows_of(tensor).n_cols;
    td_status status = check_rows(tensor, rows, out_cap, err);
    if (status) return status;
    return td_tensor_to_bf16(tensor, rows.begin * n_cols, td_range_n(rows) * n_cols, out, err);
}

td_status td_slice_rows_f32(const td_tensor *tensor, td_range rows, float *out, size_t out_cap, td_error *err)
{
    int64_t n_cols = rows_of(tensor).n_cols;
    td_status status = check_rows(tensor, rows, out_cap, err);
    if (status) return status;
    return td_tensor_to_f32(tensor, rows.begin * n_cols, td_range_n(rows) * n_cols, out, err);
}

td_status td_slice_cols_bf16(const td_tensor *tensor, td_range cols, td_bf16 *out, size_t out_cap, td_error *err)
{
    row_view view = rows_of(tensor);
    int64_t n = td_range_n(cols);
    td_status status = check_cols(tensor, cols, out_cap, err);
    for (int64_t r = 0; r < view.n_rows && n > 0 && !status; r++)
        status = td_tensor_to_bf16(tensor, r * view.n_cols + cols.begin, n, out + r * n, err);
    return status;
}

td_status td_slice_cols_f32(const td_tensor *tensor, td_range cols, float *out, size_t out_cap, td_error *err)
{
    row_view view = rows_of(tensor);
    int64_t n = td_range_n(cols);
    td_status status = check_cols(tensor, cols, out_cap, err);
    for (int64_t r = 0; r < view.n_rows && n > 0 && !status; r++)
        status = td_tensor_to_f32(tensor, r * view.n_cols + cols.begin, n, out + r * n, err);
    return status;
}

td_status td_slice_raw(const td_tensor *tensor, int dim, td_range range, void *out, size_t out_bytes, td_error *err)
{
    if (dim < 0 || dim >= tensor->rank)
        return td_fail(err, TD_EINVAL, "tensor %s: no dimension %d, it has %d", tensor->name, dim, tensor->rank);
    if (!inside(range, tensor->shape[dim])) return bad_range(tensor, "elements", range, tensor->shape[dim], err);
    size_t outer = 1, inner = (size_t)td_dtype_bytes(tensor->dtype);
    for (int i = 0; i < dim; i++) outer *= (size_t)tensor->shape[i];
    for (int i = dim + 1; i < tensor->rank; i++) inner *= (size_t)tensor->shape[i];
    size_t run = (size_t)td_range_n(range) * inner, stride = (size_t)tensor->shape[dim] * inner;
    if (run && outer > out_bytes / run)
        return td_fail(err, TD_EINVAL, "tensor %s: a slice of %zu x %zu bytes does not fit into %zu", tensor->name,
                       outer, run, out_bytes);
    const unsigned char *from = (const unsigned char *)tensor->data + (size_t)range.begin * inner;
    for (size_t i = 0; i < outer; i++) memcpy((unsigned char *)out + i * run, from + i * stride, run);
    return TD_OK;
}
