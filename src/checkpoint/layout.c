/* What a checkpoint must contain, as one table: name, place, shape, dtypes, group and cut of every tensor of the text
 * model, another for the vision tower, and the rules of routed experts. Verification, slices and the summary all walk
 * these tables, so a tensor cannot be checked one way and cut another. */
#include "checkpoint/slices.h"

#include <stdio.h>
#include <string.h>

#define PREFIX        "model.language_model."
#define VISION_PREFIX "model.visual."
#define MCG_MARK      0xCBAC1FEDu

/* Where a table row applies. */
enum { GLOBAL, LAYER, TRUNK_LAYER, KDA, DSA, DENSE, MOE, SHARED, MTP };

/* Sizes by name, resolved for a config by dims_of(). */
enum {
    ONE, /* also: end of a shape, since sizes of 1 say nothing there */
    VOCAB,
    HIDDEN,
    HIDDEN_2, /* [embedding | hidden row] of the MTP layer */
    HC_OUT,   /* a stream's mixes: in, out and stream to stream */
    HC_IN,    /* all streams of a row */
    HC_SCALES,
    KDA_WIDTH,
    KDA_HEADS,
    KDA_HEAD,
    KDA_TAPS,
    Q_LORA,
    KV_LORA,
    Q_WIDTH,
    KV_WIDTH,
    O_WIDTH,
    INDEX_WIDTH,
    INDEX_HEADS,
    INDEX_HEAD,
    INDEX_POOL,
    MLP_WIDTH,
    SHARED_WIDTH,
    EXPERTS,
    QK_HEAD,
    KV_HEAD,
    V_HEAD,
    N_DIMS,
    WHOLE,    /* as a unit: replicated */
    BY_WIDTH, /* as a unit: td_shard_unit of the dimension that is cut */
};

typedef struct layout_row {
    const char *suffix;
    td_group group;
    int where;
    int shape[3];   /* ONE-terminated */
    td_split split; /* which dimension is cut */
    int unit;       /* ... and what must stay together */
    unsigned dtypes;
} layout_row;

#define F32_ONLY TD_DTYPE_BIT(TD_DTYPE_F32)
#define WHOLE_F  TD_SPLIT_REPLICATED, WHOLE, TD_FLOATS

static const layout_row ROWS[] = {
    { "embed_tokens.weight", TD_GROUP_EMBEDDING, GLOBAL, { VOCAB, HIDDEN }, WHOLE_F },
    { "norm.weight", TD_GROUP_NORMS, GLOBAL, { HIDDEN }, WHOLE_F },
    { "lm_head.weight", TD_GROUP_HEAD, GLOBAL, { VOCAB, HIDDEN }, TD_SPLIT_ROWS, BY_WIDTH, TD_FLOATS },

    { "input_layernorm.weight", TD_GROUP_NORMS, LAYER, { HIDDEN }, WHOLE_F },
    { "post_attention_layernorm.weight", TD_GROUP_NORMS, LAYER, { HIDDEN }, WHOLE_F },
    { "hc_attn_fn", TD_GROUP_HYPER, TRUNK_LAYER, { HC_OUT, HC_IN }, WHOLE_F },
    { "hc_attn_base", TD_GROUP_HYPER, TRUNK_LAYER, { HC_OUT }, WHOLE_F },
    { "hc_attn_scale", TD_GROUP_HYPER, TRUNK_LAYER, { HC_SCALES }, WHOLE_F },
    { "hc_ffn_fn", TD_GROUP_HYPER, TRUNK_LAYER, { HC_OUT, HC_IN }, WHOLE_F },
    { "hc_ffn_base", TD_GROUP_HYPER, TRUNK_LAYER, { HC_OUT }, WHOLE_F },
    { "hc_ffn_scale", TD_GROUP_HYPER, TRUNK_LAYER, { HC_SCALES }, WHOLE_F },

    { "self_attn.q_proj.weight", TD_GROUP_KDA, KDA, { KDA_WIDTH, HIDDEN }, TD_SPLIT_ROWS, KDA_HEAD, TD_FLOATS },
    { "self_attn.k_proj.weight", TD_GROUP_KDA, KDA, { KDA_WIDTH, HIDDEN }, TD_SPLIT_ROWS, KDA_HEAD, TD_FLOATS },
    { "self_attn.v_proj.weight", TD_GROUP_KDA, KDA, { KDA_WIDTH, HIDDEN }, TD_SPLIT_ROWS, KDA_HEAD, TD_FLOATS },
    { "self_attn.q_conv1d.weight", TD_GROUP_KDA, KDA, { KDA_WIDTH, KDA_TAPS }, TD_SPLIT_ROWS, KDA_HEAD, TD_FLOATS },
    { "self_attn.k_conv1d.weight", TD_GROUP_KDA, KDA, { KDA_WIDTH, KDA_TAPS }, TD_SPLIT_ROWS, KDA_HEAD, TD_FLOATS },
    { "self_attn.v_conv1d.weight", TD_GROUP_KDA, KDA, { KDA_WIDTH, KDA_TAPS }, TD_SPLIT_ROWS, KDA_HEAD, TD_FLOATS },
    { "self_attn.f_a_proj.weight", TD_GROUP_KDA, KDA, { KDA_HEAD, HIDDEN }, WHOLE_F },
    { "self_attn.g_a_proj.weight", TD_GROUP_KDA, KDA, { KDA_HEAD, HIDDEN }, WHOLE_F },
    { "self_attn.f_b_proj.weight", TD_GROUP_KDA, KDA, { KDA_WIDTH, KDA_HEAD }, TD_SPLIT_ROWS, KDA_HEAD, TD_FLOATS },
    { "self_attn.g_b_proj.weight", TD_GROUP_KDA, KDA, { KDA_WIDTH, KDA_HEAD }, TD_SPLIT_ROWS, KDA_HEAD, TD_FLOATS },
    { "self_attn.b_proj.weight", TD_GROUP_KDA, KDA, { KDA_HEADS, HIDDEN }, TD_SPLIT_ROWS, ONE, TD_FLOATS },
    { "self_attn.A_log", TD_GROUP_KDA, KDA, { KDA_HEADS }, TD_SPLIT_ROWS, ONE, TD_FLOATS },
    { "self_attn.dt_bias", TD_GROUP_KDA, KDA, { KDA_WIDTH }, TD_SPLIT_ROWS, KDA_HEAD, TD_FLOATS },
    { "self_attn.o_norm.weight", TD_GROUP_KDA, KDA, { KDA_HEAD }, WHOLE_F },
    { "self_attn.o_proj.weight", TD_GROUP_KDA, KDA, { HIDDEN, KDA_WIDTH }, TD_SPLIT_COLS, KDA_HEAD, TD_FLOATS },

    { "self_attn.q_a_proj.weight", TD_GROUP_DSA, DSA, { Q_LORA, HIDDEN }, WHOLE_F },
    { "self_attn.q_a_layernorm.weight", TD_GROUP_DSA, DSA, { Q_LORA }, WHOLE_F },
    { "self_attn.q_b_proj.weight", TD_GROUP_DSA, DSA, { Q_WIDTH, Q_LORA }, TD_SPLIT_ROWS, QK_HEAD, TD_FLOATS },
    { "self_attn.kv_a_proj_with_mqa.weight", TD_GROUP_DSA, DSA, { KV_LORA, HIDDEN }, WHOLE_F },
    { "self_attn.kv_a_layernorm.weight", TD_GROUP_DSA, DSA, { KV_LORA }, WHOLE_F },
    { "self_attn.kv_b_proj.weight", TD_GROUP_DSA, DSA, { KV_WIDTH, KV_LORA }, TD_SPLIT_ROWS, KV_HEAD, TD_FLOATS },
    { "self_attn.o_proj.weight", TD_GROUP_DSA, DSA, { HIDDEN, O_WIDTH }, TD_SPLIT_COLS, V_HEAD, TD_FLOATS },
    { "self_attn.indexer.wq_b.weight", TD_GROUP_DSA, DSA, { INDEX_WIDTH, Q_LORA }, WHOLE_F },
    { "self_attn.indexer.wk.weight", TD_GROUP_DSA, DSA, { INDEX_HEAD, HIDDEN }, WHOLE_F },
    { "self_attn.indexer.k_norm.weight", TD_GROUP_DSA, DSA, { INDEX_HEAD }, WHOLE_F },
    { "self_attn.indexer.k_norm.bias", TD_GROUP_DSA, DSA, { INDEX_HEAD }, WHOLE_F },
    { "self_attn.indexer.weights_proj.weight", TD_GROUP_DSA, DSA, { INDEX_HEADS, HIDDEN }, WHOLE_F },
    { "self_attn.indexer.index_kpool_compress_gate", TD_GROUP_DSA, DSA, { INDEX_HEAD, HIDDEN }, WHOLE_F },
    { "self_attn.indexer.index_kpool_compress_ape", TD_GROUP_DSA, DSA, { INDEX_POOL, INDEX_HEAD }, WHOLE_F },

    { "mlp.gate_proj.weight", TD_GROUP_MLP, DENSE, { MLP_WIDTH, HIDDEN }, TD_SPLIT_ROWS, BY_WIDTH, TD_FLOATS },
    { "mlp.up_proj.weight", TD_GROUP_MLP, DENSE, { MLP_WIDTH, HIDDEN }, TD_SPLIT_ROWS, BY_WIDTH, TD_FLOATS },
    { "mlp.down_proj.weight", TD_GROUP_MLP, DENSE, { HIDDEN, MLP_WIDTH }, TD_SPLIT_COLS, BY_WIDTH, TD_FLOATS },
    { "mlp.gate.weight", TD_GROUP_ROUTER, MOE, { EXPERTS, HIDDEN }, WHOLE_F },
    /* Selection compares sums near 7 that differ in the third decimal: bf16 (step 0.03) would pick other experts. */
    { "mlp.gate.e_score_correction_bias", TD_GROUP_ROUTER, MOE, { EXPERTS }, TD_SPLIT_REPLICATED, WHOLE, F32_ONLY },
    { "mlp.shared_experts.gate_proj.weight",
      TD_GROUP_SHARED,
      SHARED,
      { SHARED_WIDTH, HIDDEN },
      TD_SPLIT_ROWS,
      BY_WIDTH,
      TD_FLOATS },
    { "mlp.shared_experts.up_proj.weight",
      TD_GROUP_SHARED,
      SHARED,
      { SHARED_WIDTH, HIDDEN },
      TD_SPLIT_ROWS,
      BY_WIDTH,
      TD_FLOATS },
    { "mlp.shared_experts.down_proj.weight",
      TD_GROUP_SHARED,
      SHARED,
      { HIDDEN, SHARED_WIDTH },
      TD_SPLIT_COLS,
      BY_WIDTH,
      TD_FLOATS },

    { "eh_proj.weight", TD_GROUP_MTP, MTP, { HIDDEN, HIDDEN_2 }, WHOLE_F },
    { "enorm.weight", TD_GROUP_MTP, MTP, { HIDDEN }, WHOLE_F },
    { "hnorm.weight", TD_GROUP_MTP, MTP, { HIDDEN }, WHOLE_F },
    { "shared_head.norm.weight", TD_GROUP_MTP, MTP, { HIDDEN }, WHOLE_F },
};

#define N(table) (sizeof(table) / sizeof *(table))

static void dims_of(const td_config *c, int64_t dims[N_DIMS])
{
    const int64_t all[N_DIMS] = {
        [ONE] = 1,
        [VOCAB] = c->vocab_size,
        [HIDDEN] = c->hidden,
        [HIDDEN_2] = 2 * (int64_t)c->hidden,
        [HC_OUT] = c->hc_mult * (c->hc_mult + 2),
        [HC_IN] = (int64_t)c->hc_mult * c->hidden,
        [HC_SCALES] = 3,
        [KDA_WIDTH] = (int64_t)c->kda_heads * c->kda_dim,
        [KDA_HEADS] = c->kda_heads,
        [KDA_HEAD] = c->kda_dim,
        [KDA_TAPS] = c->kda_conv,
        [Q_LORA] = c->q_lora,
        [KV_LORA] = c->kv_lora,
        [Q_WIDTH] = (int64_t)c->n_heads * c->qk_dim,
        [KV_WIDTH] = (int64_t)c->n_heads * (c->qk_dim + c->v_dim),
        [O_WIDTH] = (int64_t)c->n_heads * c->v_dim,
        [INDEX_WIDTH] = (int64_t)c->index_heads * c->index_dim,
        [INDEX_HEADS] = c->index_heads,
        [INDEX_HEAD] = c->index_dim,
        [INDEX_POOL] = c->index_kpool,
        [MLP_WIDTH] = c->intermediate,
        [SHARED_WIDTH] = c->shared_intermediate,
        [EXPERTS] = c->n_experts,
        [QK_HEAD] = c->qk_dim,
        [KV_HEAD] = c->qk_dim + c->v_dim,
        [V_HEAD] = c->v_dim,
    };
    memcpy(dims, all, sizeof all);
}

static bool applies(const td_config *c, int where, int layer)
{
    switch (where) {
    case LAYER: return true;
    case TRUNK_LAYER: return layer < c->n_layers;
    case KDA: return !c->is_dsa[layer];
    case DSA: return c->is_dsa[layer];
    case DENSE: return !c->is_moe[layer];
    case MOE: return c->is_moe[layer];
    case SHARED: return c->is_moe[layer] && c->n_shared_experts > 0;
    case MTP: return layer == c->n_layers;
    default: return false;
    }
}

static void make_role(const layout_row *row, const int64_t dims[N_DIMS], int layer, td_role *role)
{
    *role = (td_role){ .group = row->group, .layer = layer, .dtypes = row->dtypes, .split = row->split };
    if (layer >= 0)
        snprintf(role->name, sizeof role->name, PREFIX "layers.%d.%s", layer, row->suffix);
    else
        snprintf(role->name, sizeof role->name, "%s%s", row->group == TD_GROUP_HEAD ? "" : PREFIX, row->suffix);
    while (role->rank < 3 && row->shape[role->rank] != ONE) {
        role->shape[role->rank] = dims[row->shape[role->rank]];
        role->rank++;
    }
    int64_t cut = role->shape[row->split == TD_SPLIT_COLS ? role->rank - 1 : 0];
    if (row->unit == WHOLE)
        role->unit = cut;
    else
        role->unit = row->unit == BY_WIDTH ? td_shard_unit(cut) : dims[row->unit];
}

td_status td_roles_each(const td_config *config, td_role_visit *visit, void *user)
{
    int64_t dims[N_DIMS];
    td_role role;
    td_status status = TD_OK;
    dims_of(config, dims);
    for (size_t r = 0; r < N(ROWS) && !status; r++) {
        if (ROWS[r].where != GLOBAL) continue;
        make_role(&ROWS[r], dims, -1, &role);
        status = visit(user, &role);
    }
    for (int layer = 0; layer < config->n_layers + config->n_mtp; layer++) {
        for (size_t r = 0; r < N(ROWS) && !status; r++) {
            if (!applies(config, ROWS[r].where, layer)) continue;
            make_role(&ROWS[r], dims, layer, &role);
            status = visit(user, &role);
        }
    }
    return status;
}

/* --- vision tower: other exports hold some of it as F16 or F32 --- */

enum { V_ONE, V_HIDDEN, V_QKV, V_HEAD_DIM, V_MLP, V_OUT, V_PROJ, V_CHANNELS, V_FRAMES, V_PATCH, V_MERGE, V_N_DIMS };

typedef struct vision_row {
    const char *suffix;
    bool block; /* of every block */
    int shape[5];
} vision_row;

static const vision_row VISION_ROWS[] = {
    { "patch_embed.proj.weight", false, { V_HIDDEN, V_CHANNELS, V_FRAMES, V_PATCH, V_PATCH } },
    { "patch_embed.proj.bias", false, { V_HIDDEN } },
    { "norm1.weight", true, { V_HIDDEN } },
    { "norm2.weight", true, { V_HIDDEN } },
    { "attn.qkv.weight", true, { V_QKV, V_HIDDEN } },
    { "attn.qkv.bias", true, { V_QKV } },
    { "attn.q_norm.weight", true, { V_HEAD_DIM } },
    { "attn.k_norm.weight", true, { V_HEAD_DIM } },
    { "attn.proj.weight", true, { V_HIDDEN, V_HIDDEN } },
    { "attn.proj.bias", true, { V_HIDDEN } },
    { "mlp.gate_proj.weight", true, { V_MLP, V_HIDDEN } },
    { "mlp.gate_proj.bias", true, { V_MLP } },
    { "mlp.up_proj.weight", true, { V_MLP, V_HIDDEN } },
    { "mlp.up_proj.bias", true, { V_MLP } },
    { "mlp.down_proj.weight", true, { V_HIDDEN, V_MLP } },
    { "mlp.down_proj.bias", true, { V_HIDDEN } },
    { "post_layernorm.weight", false, { V_HIDDEN } },
    { "downsample.weight", false, { V_OUT, V_HIDDEN, V_MERGE, V_MERGE } },
    { "downsample.bias", false, { V_OUT } },
    { "merger.proj.weight", false, { V_OUT, V_OUT } },
    { "merger.post_projection_norm.weight", false, { V_OUT } },
    { "merger.post_projection_norm.bias", false, { V_OUT } },
    { "merger.gate_proj.weight", false, { V_PROJ, V_OUT } },
    { "merger.up_proj.weight", false, { V_PROJ, V_OUT } },
    { "merger.down_proj.weight", false, { V_OUT, V_PROJ } },
};

td_status td_vision_roles_each(const td_config *config, td_role_visit *visit, void *user)
{
    const td_config_vision *v = &config->vision;
    if (!config->has_vision) return TD_OK;
    const int64_t dims[V_N_DIMS] = {
        [V_ONE] = 1,
        [V_HIDDEN] = v->hidden,
        [V_QKV] = 3 * (int64_t)v->hidden,
        [V_HEAD_DIM] = v->hidden / v->n_heads,
        [V_MLP] = v->intermediate,
        [V_OUT] = v->out_hidden,
        [V_PROJ] = v->projection,
        [V_CHANNELS] = v->channels,
        [V_FRAMES] = v->temporal_patch,
        [V_PATCH] = v->patch,
        [V_MERGE] = v->spatial_merge,
    };
    td_status status = TD_OK;
    for (size_t r = 0; r < N(VISION_ROWS); r++) {
        const vision_row *row = &VISION_ROWS[r];
        for (int block = 0; block < (row->block ? v->depth : 1) && !status; block++) {
            td_role role = { .group = TD_GROUP_VISION, .layer = -1, .dtypes = TD_ANY_FLOATS };
            if (row->block)
                snprintf(role.name, sizeof role.name, VISION_PREFIX "blocks.%d.%s", block, row->suffix);
            else
                snprintf(role.name, sizeof role.name, VISION_PREFIX "%s", row->suffix);
            for (; role.rank < 5 && row->shape[role.rank] != V_ONE; role.rank++)
                role.shape[role.rank] = dims[row->shape[role.rank]];
            role.unit = role.shape[0];
            status = visit(user, &role);
        }
    }
    return status;
}

/* --- routed experts --- */

static const char *const PROJECTIONS[] = { "gate_proj", "up_proj", "down_proj" };

/* Parts that other EXL3 writers add and this reader does not apply: ignoring one would give wrong numbers in silence.
 */
static const char *const REFUSED_PARTS[] = { "mul1", "su", "sv", "bias", "scale" };

typedef struct expert_name {
    char text[192];
    size_t stem; /* length of "model...gate_proj." */
} expert_name;

static const char *part_name(expert_name *name, const char *part)
{
    snprintf(name->text + name->stem, sizeof name->text - name->stem, "%s", part);
    return name->text;
}

static td_status find_plain(const td_checkpoint *ck, expert_name *name, td_expert_matrix *m, td_error *err)
{
    return td_checkpoint_require(ck, part_name(name, "weight"), TD_FLOATS, TD_SHAPE(m->out_dim, m->in_dim), &m->weight,
                                 err);
}

static td_status find_exl3(const td_checkpoint *ck, expert_name *name, td_expert_matrix *m, td_error *err)
{
    for (size_t i = 0; i < N(REFUSED_PARTS); i++)
        if (td_checkpoint_find(ck, part_name(name, REFUSED_PARTS[i])))
            return td_fail(err, TD_EUNSUPPORTED, "%s: tensor %s: not supported, EXL3 must be trellis, suh, svh and mcg",
                           td_checkpoint_dir(ck), name->text);
    if (td_checkpoint_find(ck, part_name(name, "weight")))
        return td_fail(err, TD_EFORMAT, "%s: tensor %s: stands beside its own EXL3 form", td_checkpoint_dir(ck),
                       name->text);
    const td_tensor *trellis = td_checkpoint_find(ck, part_name(name, "trellis"));
    int64_t words = trellis->rank == 3 ? trellis->shape[2] : 0;
    if (words % 16 != 0 || words < 16 || words > 128)
        return td_fail(err, TD_EUNSUPPORTED, "%s: tensor %s: last dimension %lld, must be 16 * bits with 1 to 8 bits",
                       td_checkpoint_dir(ck), name->text, (long long)words);
    m->bits = (int)(words / 16);
    td_status status = td_checkpoint_require(ck, name->text, TD_DTYPE_BIT(TD_DTYPE_I16),
                                             TD_SHAPE(m->in_dim / 16, m->out_dim / 16, words), &m->trellis, err);
    if (!status)
        status = td_checkpoint_require(ck, part_name(name, "suh"), TD_DTYPE_BIT(TD_DTYPE_F16), TD_SHAPE(m->in_dim),
                                       &m->suh, err);
    if (!status)
        status = td_checkpoint_require(ck, part_name(name, "svh"), TD_DTYPE_BIT(TD_DTYPE_F16), TD_SHAPE(m->out_dim),
                                       &m->svh, err);
    if (!status)
        status =
            td_checkpoint_require(ck, part_name(name, "mcg"), TD_DTYPE_BIT(TD_DTYPE_I32), TD_SHAPE(1), &m->mcg, err);
    return status;
}

td_status td_checkpoint_expert(const td_checkpoint *ck, int layer, int expert, td_projection projection,
                               td_expert_matrix *out, td_error *err)
{
    const td_config *c = td_checkpoint_config(ck);
    if (!c || layer < 0 || layer >= c->n_layers + c->n_mtp || !c->is_moe[layer] || expert < 0 || expert >= c->n_experts)
        return td_fail(err, TD_EINVAL, "%s: no expert %d in layer %d", td_checkpoint_dir(ck), expert, layer);
    bool down = projection == TD_PROJ_DOWN;
    td_expert_matrix m = { .in_dim = down ? c->moe_intermediate : c->hidden,
                           .out_dim = down ? c->hidden : c->moe_intermediate };
    expert_name name;
    name.stem = (size_t)snprintf(name.text, sizeof name.text, PREFIX "layers.%d.mlp.experts.%d.%s.", layer, expert,
                                 PROJECTIONS[projection]);
    td_status status;
    if (!td_checkpoint_find(ck, part_name(&name, "trellis")))
        status = find_plain(ck, &name, &m, err);
    else if (m.in_dim % 128 != 0 || m.out_dim % 128 != 0)
        status = td_fail(err, TD_EUNSUPPORTED, "%s: tensor %s: %d x %d, EXL3 needs multiples of 128",
                         td_checkpoint_dir(ck), name.text, m.in_dim, m.out_dim);
    else
        status = find_exl3(ck, &name, &m, err);
    if (!status) *out = m;
    return status;
}

td_status td_expert_matrix_check_marker(const td_expert_matrix *matrix, td_error *err)
{
    uint32_t mark;
    if (!matrix->mcg) return TD_OK;
    memcpy(&mark, matrix->mcg->data, sizeof mark);
    if (mark == MCG_MARK) return TD_OK;
    return td_fail(err, TD_EFORMAT, "tensor %s: holds 0x%08X, must be 0x%08X: a damaged file or another codebook",
                   matrix->mcg->name, (unsigned)mark, MCG_MARK);
}

/* --- verification --- */

typedef struct verify_walk {
    const td_checkpoint *ck;
    td_problem_report *report; /* NULL: stop at the first problem, which is in err */
    void *user;
    td_error *err;
    int n_problems;
} verify_walk;

/* Reports a failure and goes on, or stops. */
static td_status settle(verify_walk *walk, td_status status)
{
    if (!status) return TD_OK;
    walk->n_problems++;
    if (!walk->report) return status;
    walk->report(walk->user, walk->err->text);
    return TD_OK;
}

static td_status verify_role(void *user, const td_role *role)
{
    verify_walk *walk = (verify_walk *)user;
    const td_tensor *tensor;
    return settle(
        walk, td_checkpoint_require(walk->ck, role->name, role->dtypes, role->rank, role->shape, &tensor, walk->err));
}

static td_status verify_experts(verify_walk *walk)
{
    const td_config *c = td_checkpoint_config(walk->ck);
    td_expert_matrix matrix;
    for (int layer = 0; layer < c->n_layers + c->n_mtp; layer++) {
        for (int e = 0; c->is_moe[layer] && e < c->n_experts; e++) {
            for (int p = TD_PROJ_GATE; p <= TD_PROJ_DOWN; p++) {
                td_status status = td_checkpoint_expert(walk->ck, layer, e, (td_projection)p, &matrix, walk->err);
                if (!status && matrix.trellis && c->quant_method != TD_QUANT_EXL3)
                    status =
                        td_fail(walk->err, TD_EFORMAT, "%s: tensor %s: config.json has no quantization_config for it",
                                td_checkpoint_dir(walk->ck), matrix.trellis->name);
                status = settle(walk, status);
                if (status) return status;
            }
        }
    }
    return TD_OK;
}

/* EXL3 anywhere else (attention, shared experts, head) is a kind of checkpoint that this program does not read: its
 * plain ".weight" is then missing anyway, but this says why. */
static td_status verify_no_other_exl3(verify_walk *walk)
{
    for (size_t i = 0; i < td_checkpoint_count(walk->ck); i++) {
        const char *name = td_checkpoint_at(walk->ck, i)->name;
        size_t n = strlen(name);
        if (n < 8 || strcmp(name + n - 8, ".trellis") != 0 || strstr(name, ".mlp.experts.")) continue;
        td_status status =
            settle(walk, td_fail(walk->err, TD_EUNSUPPORTED, "%s: tensor %s: only routed experts may be EXL3",
                                 td_checkpoint_dir(walk->ck), name));
        if (status) return status;
    }
    return TD_OK;
}

static td_status verify_all(verify_walk *walk)
{
    const td_config *config = td_checkpoint_config(walk->ck);
    if (!config)
        return settle(walk,
                      td_fail(walk->err, TD_EINVAL, "%s: opened without its config", td_checkpoint_dir(walk->ck)));
    td_status status = verify_no_other_exl3(walk);
    if (!status) status = td_roles_each(config, verify_role, walk);
    if (!status) status = verify_experts(walk);
    if (!status) status = td_vision_roles_each(config, verify_role, walk);
    return status;
}

td_status td_checkpoint_verify(const td_checkpoint *ck, td_error *err)
{
    td_error own;
    return verify_all(&(verify_walk){ .ck = ck, .err = err ? err : &own });
}

int td_checkpoint_problems(const td_checkpoint *ck, td_problem_report *report, void *user)
{
    td_error err;
    verify_walk walk = { .ck = ck, .report = report, .user = user, .err = &err };
    verify_all(&walk);
    return walk.n_problems;
}
