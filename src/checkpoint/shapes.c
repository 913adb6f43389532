/* See shapes.h. The tensors are those of the layout's table (layout.c), so what loading asks for is what is there. */
#include "checkpoint/shapes.h"

#include "checkpoint/exl3.h"
#include "checkpoint/slices.h"

#include <stdio.h>
#include <string.h>

#define NAME "a checkpoint of shapes"

static const uint32_t MARK = TD_EXL3_MCG_MARK;

typedef struct listing {
    td_arena arena;
    td_tensor_list list; /* items NULL: only counted */
    td_error *err;
} listing;

static td_status add(listing *l, const char *name, td_dtype dtype, int rank, const int64_t *shape, const void *data)
{
    if (!l->list.items) {
        l->list.n++;
        return TD_OK;
    }
    td_tensor *t = &l->list.items[l->list.n++];
    *t = (td_tensor){ .name = td_arena_strdup(&l->arena, name), .dtype = dtype, .rank = rank, .data = data };
    if (!t->name) return td_fail(l->err, TD_ENOMEM, NAME ": out of memory");
    t->n_bytes = (uint64_t)td_dtype_bytes(dtype);
    for (int i = 0; i < rank; i++) {
        t->shape[i] = shape[i];
        t->n_bytes *= (uint64_t)shape[i];
    }
    return TD_OK;
}

static td_status add_role(void *user, const td_role *role)
{
    td_dtype dtype = role->dtypes & TD_DTYPE_BIT(TD_DTYPE_BF16) ? TD_DTYPE_BF16 : TD_DTYPE_F32;
    return add((listing *)user, role->name, dtype, role->rank, role->shape, NULL);
}

/* The parts of one matrix [in][out] after its name's stem. */
static td_status add_matrix(listing *l, const char *stem, int64_t in, int64_t out, int bits)
{
    char name[192];
    td_status status;
    if (!bits) {
        snprintf(name, sizeof name, "%sweight", stem);
        return add(l, name, TD_DTYPE_BF16, TD_SHAPE(out, in), NULL);
    }
    snprintf(name, sizeof name, "%strellis", stem);
    status = add(l, name, TD_DTYPE_I16, TD_SHAPE(in / TD_EXL3_TILE, out / TD_EXL3_TILE, 16 * (int64_t)bits), NULL);
    snprintf(name, sizeof name, "%ssuh", stem);
    if (!status) status = add(l, name, TD_DTYPE_F16, TD_SHAPE(in), NULL);
    snprintf(name, sizeof name, "%ssvh", stem);
    if (!status) status = add(l, name, TD_DTYPE_F16, TD_SHAPE(out), NULL);
    snprintf(name, sizeof name, "%smcg", stem);
    if (!status) status = add(l, name, TD_DTYPE_I32, TD_SHAPE(1), &MARK);
    return status;
}

static td_status add_experts(listing *l, const td_config *c, int layer, int bits)
{
    static const char *const PROJECTIONS[] = { "gate_proj", "up_proj", "down_proj" };
    char stem[128];
    td_status status = TD_OK;
    for (int e = 0; e < c->n_experts; e++) {
        for (int p = 0; p < 3 && !status; p++) {
            bool down = p == 2;
            snprintf(stem, sizeof stem, "model.language_model.layers.%d.mlp.experts.%d.%s.", layer, e, PROJECTIONS[p]);
            status = add_matrix(l, stem, down ? c->moe_intermediate : c->hidden, down ? c->hidden : c->moe_intermediate,
                                bits);
        }
    }
    return status;
}

static td_status add_all(listing *l, const td_config *c, int bits)
{
    l->list.n = 0;
    td_status status = td_roles_each(c, add_role, l);
    if (!status) status = td_vision_roles_each(c, add_role, l);
    for (int layer = 0; layer < c->n_layers + c->n_mtp && !status; layer++)
        if (c->is_moe[layer]) status = add_experts(l, c, layer, bits);
    return status;
}

td_status td_checkpoint_create_shapes(const td_config *config, int bits, const td_values *values, td_checkpoint **out,
                                      td_error *err)
{
    listing l = { .err = err };
    td_config known = *config;
    if (bits < 0 || bits > 8) return td_fail(err, TD_EINVAL, NAME ": experts of %d bits; 1 to 8, or 0 for bf16", bits);
    known.quant_method = bits ? TD_QUANT_EXL3 : TD_QUANT_NONE;
    known.quant_bits = (float)bits;
    snprintf(known.quant_codebook, sizeof known.quant_codebook, "%s", bits ? "mcg" : "");
    td_arena_init(&l.arena, 0);
    td_status status = add_all(&l, &known, bits);
    if (!status) {
        l.list.items = (td_tensor *)td_arena_take(&l.arena, l.list.n * sizeof *l.list.items, _Alignof(td_tensor));
        if (!l.list.items) status = td_fail(err, TD_ENOMEM, NAME ": out of memory");
    }
    if (!status) status = add_all(&l, &known, bits);
    if (status) {
        td_arena_deinit(&l.arena);
        return status;
    }
    return td_checkpoint_of_list(NAME, &known, &l.arena, &l.list, values, out, err);
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* What loading takes at once: kv_b whole, a group of 16 rows of any other matrix, a whole expert's trellis. */
void td_values_least(const td_config *c, int bits, td_values *least)
{
    size_t kv_b = (size_t)c->n_heads * (size_t)(c->qk_dim + c->v_dim) * (size_t)c->kv_lora;
    size_t widest = larger((size_t)c->n_heads * (size_t)c->v_dim, (size_t)c->kda_heads * (size_t)c->kda_dim);
    widest = larger(widest, larger((size_t)c->intermediate, 2 * (size_t)c->hidden));
    widest = larger(widest, (size_t)c->shared_intermediate);
    size_t expert = (size_t)c->hidden * (size_t)c->moe_intermediate;
    *least = (td_values){ .n_weights = larger(kv_b, 16 * widest),
                          .n_words = bits ? expert / 16 * (size_t)bits : 0,
                          .n_scales = larger((size_t)c->hidden, (size_t)c->moe_intermediate) };
    if (!bits) least->n_weights = larger(least->n_weights, expert);
}
