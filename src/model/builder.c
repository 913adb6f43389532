#include "model/builder.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Pages that were read are given back this often: small against the memory that a rank may hold beside its weights. */
#define RELEASE_BYTES ((uint64_t)16 << 20)

/* Elements of a part that is converted at a time. */
#define STAGING_ELEMENTS ((int64_t)1 << 20)

void td_builder_deinit(td_builder *b)
{
    free(b->staging);
    b->staging = NULL;
}

static size_t padded(size_t n_bytes)
{
    return (n_bytes + 63) & ~(size_t)63;
}

static bool working(const td_builder *b)
{
    return b->status == TD_OK;
}

static void stop(td_builder *b, td_status status)
{
    if (working(b)) b->status = status;
}

void *td_builder_take(td_builder *b, size_t n_bytes)
{
    if (!working(b)) return NULL;
    void *p = td_arena_take(b->mem, padded(n_bytes), 64);
    if (!p && b->mem->base) {
        stop(b, td_fail(b->err, TD_ENOMEM, "model: the layout took more than the plan"));
        return NULL;
    }
    *b->account += padded(n_bytes);
    return p;
}

/* n_bytes of what the layout took are filled. */
static void filled(td_builder *b, size_t n_bytes)
{
    if (!working(b)) return;
    b->done_bytes += padded(n_bytes);
    b->unreleased_bytes += padded(n_bytes);
    if (b->unreleased_bytes >= RELEASE_BYTES) {
        td_checkpoint_release_pages(b->ck);
        b->unreleased_bytes = 0;
    }
    if (b->progress && !b->progress(b->user, b->done_bytes, b->total_bytes))
        stop(b, td_fail(b->err, TD_ECANCELED, "%s: loading was given up", td_checkpoint_dir(b->ck)));
}

void td_builder_layer(td_builder *b, int layer)
{
    b->layer = layer;
    snprintf(b->prefix, sizeof b->prefix, "model.language_model.layers.%d.", layer);
}

void td_builder_prefix(td_builder *b, const char *prefix)
{
    b->layer = -1;
    snprintf(b->prefix, sizeof b->prefix, "%s", prefix);
}

/* The tensor of this name with rows x cols values; NULL after a failure. */
static const td_tensor *find(td_builder *b, const char *name, int64_t rows, int64_t cols)
{
    if (!working(b)) return NULL;
    char full[192];
    snprintf(full, sizeof full, "%s%s", b->prefix, name);
    const td_tensor *tensor = NULL;
    td_status status = cols == 1 ? td_checkpoint_require(b->ck, full, TD_FLOATS, TD_SHAPE(rows), &tensor, b->err)
                                 : td_checkpoint_require(b->ck, full, TD_FLOATS, TD_SHAPE(rows, cols), &tensor, b->err);
    stop(b, status);
    return status ? NULL : tensor;
}

/* n_bytes to convert into; NULL after a failure. What was there is lost. */
static void *staging(td_builder *b, size_t n_bytes)
{
    if (n_bytes <= b->staging_bytes) return b->staging;
    void *grown = realloc(b->staging, n_bytes);
    if (!grown) {
        stop(b, td_fail(b->err, TD_ENOMEM, "model: no memory to convert a tensor (%zu bytes)", n_bytes));
        return NULL;
    }
    b->staging = grown;
    b->staging_bytes = n_bytes;
    return grown;
}

/* copy: td_dev_upload, or td_dev_copy for what is on the device already. */
static void store(td_builder *b, td_status (*copy)(td_dev *, void *, const void *, size_t), void *dst, const void *src,
                  size_t n_bytes)
{
    if (!working(b)) return;
    td_status status = copy(b->dev, dst, src, n_bytes);
    if (status) stop(b, td_fail(b->err, status, "model: weights cannot be copied to the device"));
}

static void too_few_values(td_builder *b, const td_tensor *tensor)
{
    stop(b, td_fail(b->err, TD_EINVAL, "%s: the pool of values is too small", tensor->name));
}

/* Rows first .. first + n - 1 of a tensor as bf16: in place when it is that already, else converted into staging; of a
 * checkpoint of shapes, on the device. */
static const td_bf16 *rows_bf16(td_builder *b, const td_tensor *tensor, int64_t first, int64_t n, int64_t cols)
{
    if (b->stand_in.values) {
        const td_bf16 *part = td_stand_in_weights(&b->stand_in, (size_t)(n * cols));
        if (!part) too_few_values(b, tensor);
        return part;
    }
    if (tensor->dtype == TD_DTYPE_BF16) return (const td_bf16 *)tensor->data + first * cols;
    td_bf16 *out = (td_bf16 *)staging(b, (size_t)(n * cols) * sizeof *out);
    if (!out) return NULL;
    stop(b, td_tensor_to_bf16(tensor, first * cols, n * cols, out, b->err));
    return working(b) ? out : NULL;
}

td_part td_part_all(const char *name, int64_t rows)
{
    return (td_part){ name, rows, { 0, rows } };
}

/* Rows of `cols` values that are handled at once: whole stacks of them, at least one. */
static int64_t rows_at_once(const td_builder *b, int64_t cols)
{
    int64_t n = b->stand_in.values ? (int64_t)td_stand_in_most(&b->stand_in) : STAGING_ELEMENTS;
    n = n / cols / TD_STACK * TD_STACK;
    return n < TD_STACK ? TD_STACK : n;
}

/* Packs one part of a matrix, a group of rows at a time. */
static void fill_part(td_builder *b, const td_weight *w, int out0, int64_t in, td_range cols, const td_part *part)
{
    const td_tensor *tensor = find(b, part->name, part->rows, in);
    int64_t n = td_range_n(part->take), group = rows_at_once(b, in);
    for (int64_t done = 0; done < n && working(b); done += group) {
        int64_t rows = n - done < group ? n - done : group;
        const td_bf16 *src = rows_bf16(b, tensor, part->take.begin + done, rows, in);
        if (!src) return;
        td_status status =
            b->ops->weight_fill(b->dev, w, out0 + (int)done, (int)rows, src, (size_t)in, (int)cols.begin);
        if (status) stop(b, td_fail(b->err, status, "%s%s: cannot be packed", b->prefix, part->name));
    }
}

void td_build_matrix(td_builder *b, td_weight *w, td_format format, int64_t in, td_range cols, const td_part *parts,
                     int n_parts)
{
    if (!working(b)) return;
    int64_t out = 0;
    for (int i = 0; i < n_parts; i++) {
        int64_t n = td_range_n(parts[i].take);
        if (n < 1 || (out % TD_STACK) != 0 || td_range_n(cols) % 16 != 0 || td_range_n(cols) < 16) {
            stop(b, td_fail(b->err, TD_EUNSUPPORTED,
                            "%s%s: a shard has %lld rows of %lld values; both must be multiples of 16", b->prefix,
                            parts[i].name, (long long)n, (long long)td_range_n(cols)));
            return;
        }
        out += n;
    }
    size_t n_bytes = b->ops->weight_bytes(format, (int)out, (int)td_range_n(cols));
    if (b->mem) {
        *w = (td_weight){ format, (int)out, (int)td_range_n(cols), td_builder_take(b, n_bytes) };
        return;
    }
    int out0 = 0;
    for (int i = 0; i < n_parts; i++) {
        fill_part(b, w, out0, in, cols, &parts[i]);
        out0 += (int)td_range_n(parts[i].take);
    }
    filled(b, n_bytes);
}

void td_build_whole(td_builder *b, td_weight *w, td_format format, const char *name, int64_t out, int64_t in)
{
    td_part part = td_part_all(name, out);
    td_build_matrix(b, w, format, in, (td_range){ 0, in }, &part, 1);
}

void td_build_floats(td_builder *b, const float **dst, int64_t cols, const td_part *parts, int n_parts)
{
    td_build_mapped(b, dst, cols, parts, n_parts, NULL);
}

void td_build_mapped(td_builder *b, const float **dst, int64_t cols, const td_part *parts, int n_parts,
                     float (*map)(float))
{
    size_t n = 0;
    for (int i = 0; i < n_parts; i++) n += (size_t)(td_range_n(parts[i].take) * cols);
    if (b->mem) {
        *dst = (const float *)td_builder_take(b, n * sizeof(float));
        return;
    }
    float *values = (float *)staging(b, n * sizeof *values), *end = values;
    if (!values) return;
    for (int i = 0; i < n_parts; i++) {
        const td_tensor *tensor = find(b, parts[i].name, parts[i].rows, cols);
        if (!tensor) return;
        int64_t count = td_range_n(parts[i].take) * cols;
        if (b->stand_in.values)
            td_stand_in_floats(&b->stand_in, parts[i].name, (size_t)count, end);
        else
            stop(b, td_tensor_to_f32(tensor, parts[i].take.begin * cols, count, end, b->err));
        end += count;
    }
    for (size_t i = 0; map && working(b) && i < n; i++) values[i] = map(values[i]);
    store(b, td_dev_upload, (void *)*dst, values, n * sizeof *values);
    filled(b, n * sizeof(float));
}

void td_build_vector(td_builder *b, const float **dst, const char *name, int64_t n)
{
    td_part part = td_part_all(name, n);
    td_build_floats(b, dst, 1, &part, 1);
}

void td_build_table(td_builder *b, const td_bf16 **dst, const char *name, int64_t rows, int64_t cols)
{
    size_t row_bytes = (size_t)cols * sizeof(td_bf16);
    if (b->mem) {
        *dst = (const td_bf16 *)td_builder_take(b, (size_t)rows * row_bytes);
        return;
    }
    const td_tensor *tensor = find(b, name, rows, cols);
    int64_t group = rows_at_once(b, cols);
    for (int64_t done = 0; done < rows && working(b); done += group) {
        int64_t n = rows - done < group ? rows - done : group;
        const td_bf16 *src = rows_bf16(b, tensor, done, n, cols);
        store(b, b->stand_in.values ? td_dev_copy : td_dev_upload, (void *)(*dst + done * cols), src,
              (size_t)n * row_bytes);
    }
    filled(b, (size_t)rows * row_bytes);
}

void td_build_kv_b(td_builder *b, td_kv_b *w, const td_config *config, td_range heads)
{
    int n_heads = (int)td_range_n(heads), head_rows = config->qk_dim + config->v_dim;
    size_t n_bytes = b->ops->kv_b_bytes(b->dev, n_heads, config->qk_dim, config->v_dim, config->kv_lora);
    if (b->mem) {
        *w = (td_kv_b){ n_heads, config->qk_dim, config->v_dim, config->kv_lora, td_builder_take(b, n_bytes) };
        return;
    }
    const char *name = "self_attn.kv_b_proj.weight";
    const td_tensor *tensor = find(b, name, (int64_t)config->n_heads * head_rows, config->kv_lora);
    if (!tensor) return;
    const td_bf16 *src = rows_bf16(b, tensor, heads.begin * head_rows, (int64_t)n_heads * head_rows, config->kv_lora);
    if (!src) return;
    td_status status = b->ops->kv_b_fill(b->dev, w, src);
    if (status) stop(b, td_fail(b->err, status, "%s%s: cannot be packed", b->prefix, name));
    filled(b, n_bytes);
}

/* ---- routed experts ---- */

static const char *const projection_names[] = { "gate_proj", "up_proj", "down_proj" };

/* The part of an expert's matrix that a shard owns: outputs of gate and up, inputs of down. */
typedef struct expert_cut {
    td_projection projection;
    td_range in, out;
} expert_cut;

static expert_cut cut_of(td_projection projection, const td_config *config, td_range width)
{
    td_range all = { 0, config->hidden };
    return projection == TD_PROJ_DOWN ? (expert_cut){ projection, width, all } : (expert_cut){ projection, all, width };
}

static td_exl3 exl3_of(const td_expert_matrix *matrix)
{
    return (td_exl3){ .k = matrix->in_dim,
                      .n = matrix->out_dim,
                      .bits2 = 2 * matrix->bits,
                      .codebook = TD_EXL3_MCG,
                      .trellis = (const uint16_t *)matrix->trellis->data,
                      .suh = (const td_f16 *)matrix->suh->data,
                      .svh = (const td_f16 *)matrix->svh->data };
}

static void build_exl3(td_builder *b, td_exl3 *view, const td_expert_matrix *matrix, int expert, const expert_cut *cut)
{
    size_t n_bytes = td_exl3_bytes((int)td_range_n(cut->in), (int)td_range_n(cut->out), 2 * matrix->bits);
    if (b->mem) {
        if (td_range_n(cut->in) % TD_EXL3_BLOCK || td_range_n(cut->out) % TD_EXL3_BLOCK)
            stop(b, td_fail(b->err, TD_EUNSUPPORTED,
                            "%smlp.experts.%d.%s: a shard's part, [%lld][%lld], is not a multiple of %d", b->prefix,
                            expert, projection_names[cut->projection], (long long)td_range_n(cut->in),
                            (long long)td_range_n(cut->out), TD_EXL3_BLOCK));
        *view = (td_exl3){ .trellis = (const uint16_t *)td_builder_take(b, n_bytes) };
        return;
    }
    td_exl3 whole = exl3_of(matrix);
    stop(b, td_expert_matrix_check_marker(matrix, b->err));
    if (b->stand_in.values && td_stand_in_exl3(&b->stand_in, &whole)) too_few_values(b, matrix->trellis);
    if (working(b))
        stop(b, b->ops->exl3_fill(b->dev, view, &whole, (int)cut->in.begin, (int)cut->in.end, (int)cut->out.begin,
                                  (int)cut->out.end, b->err));
    filled(b, n_bytes);
}

static void build_plain(td_builder *b, td_weight *w, int expert, const expert_cut *cut, int64_t in, int64_t out)
{
    char name[96];
    snprintf(name, sizeof name, "mlp.experts.%d.%s.weight", expert, projection_names[cut->projection]);
    td_part part = { name, out, cut->out };
    td_build_matrix(b, w, TD_W_BF16, in, cut->in, &part, 1);
}

static void build_expert_matrix(td_builder *b, td_experts *e, int expert, const expert_cut *cut)
{
    td_expert_matrix matrix;
    if (!working(b)) return;
    stop(b, td_checkpoint_expert(b->ck, b->layer, expert, cut->projection, &matrix, b->err));
    if (!working(b)) return;
    if (e->exl3 != (matrix.trellis != NULL)) {
        stop(b,
             td_fail(b->err, TD_EUNSUPPORTED, "%smlp.experts: both EXL3 and plain matrices in one layer", b->prefix));
        return;
    }
    const td_exl3 *views[] = { e->gate_x, e->up_x, e->down_x };
    const td_weight *plain[] = { e->gate, e->up, e->down };
    if (e->exl3)
        build_exl3(b, (td_exl3 *)&views[cut->projection][expert], &matrix, expert, cut);
    else
        build_plain(b, (td_weight *)&plain[cut->projection][expert], expert, cut, matrix.in_dim, matrix.out_dim);
}

/* Descriptors of a layer's experts; their form is that of the first one. */
static void take_descriptors(td_builder *b, td_experts *e, const td_config *config, td_range width)
{
    td_expert_matrix first;
    if (!working(b)) return;
    stop(b, td_checkpoint_expert(b->ck, b->layer, 0, TD_PROJ_GATE, &first, b->err));
    if (!working(b)) return;
    size_t n = (size_t)config->n_experts;
    *e = (td_experts){ .n_experts = config->n_experts,
                       .dim = config->hidden,
                       .width = (int)td_range_n(width),
                       .exl3 = first.trellis != NULL };
    if (e->exl3) {
        td_exl3 *views = (td_exl3 *)td_arena_take(b->meta, 3 * n * sizeof *views, _Alignof(td_exl3));
        if (views)
            e->gate_x = views, e->up_x = views + n, e->down_x = views + 2 * n;
        else
            stop(b, td_fail(b->err, TD_ENOMEM, "model: no memory for the descriptors of experts"));
    } else {
        td_weight *plain = (td_weight *)td_arena_take(b->meta, 3 * n * sizeof *plain, _Alignof(td_weight));
        if (plain)
            e->gate = plain, e->up = plain + n, e->down = plain + 2 * n;
        else
            stop(b, td_fail(b->err, TD_ENOMEM, "model: no memory for the descriptors of experts"));
    }
}

void td_build_experts(td_builder *b, td_experts *e, const td_config *config, td_range width)
{
    if (b->mem) take_descriptors(b, e, config, width);
    for (int expert = 0; expert < config->n_experts && working(b); expert++) {
        for (int p = TD_PROJ_GATE; p <= TD_PROJ_DOWN; p++) {
            expert_cut cut = cut_of((td_projection)p, config, width);
            build_expert_matrix(b, e, expert, &cut);
        }
    }
    if (!working(b)) return;
    size_t table_bytes = b->ops->experts_table_bytes(e);
    if (b->mem) {
        if (table_bytes) e->table = td_builder_take(b, table_bytes);
        return;
    }
    td_status status = b->ops->experts_table_fill(b->dev, e);
    if (status) stop(b, td_fail(b->err, status, "%smlp.experts: their table cannot be written", b->prefix));
    if (table_bytes) filled(b, table_bytes);
}
