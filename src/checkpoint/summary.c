/* See summary.h. Walks the same tables as verification; what they do not name is "unused". */
#include "checkpoint/summary.h"

const char *td_group_name(td_group group)
{
    static const char *const NAMES[TD_GROUP_COUNT] = {
        [TD_GROUP_EMBEDDING] = "embedding",
        [TD_GROUP_HEAD] = "output head",
        [TD_GROUP_KDA] = "KDA attention",
        [TD_GROUP_DSA] = "DSA attention, indexer",
        [TD_GROUP_MLP] = "dense MLPs",
        [TD_GROUP_SHARED] = "shared experts",
        [TD_GROUP_ROUTER] = "routers",
        [TD_GROUP_HYPER] = "hyper-connections",
        [TD_GROUP_NORMS] = "norms",
        [TD_GROUP_MTP] = "MTP layer",
        [TD_GROUP_EXPERTS] = "routed experts",
        [TD_GROUP_VISION] = "vision tower",
    };
    return NAMES[group];
}

typedef struct walk {
    const td_checkpoint *ck;
    td_summary *sum;
} walk;

static void add(td_summary_cell *cell, const td_tensor *tensor, const uint64_t rank_bytes[TD_SHARDS])
{
    cell->n_tensors++;
    cell->n_bytes += tensor->n_bytes;
    for (int r = 0; r < TD_SHARDS; r++) cell->rank_bytes[r] += rank_bytes[r];
}

static td_status add_role(void *user, const td_role *role)
{
    const walk *w = (const walk *)user;
    const td_tensor *tensor = td_checkpoint_find(w->ck, role->name);
    if (!tensor) return TD_OK;
    uint64_t rank_bytes[TD_SHARDS], whole = (uint64_t)role->shape[role->split == TD_SPLIT_COLS ? role->rank - 1 : 0];
    for (int r = 0; r < TD_SHARDS; r++)
        rank_bytes[r] = tensor->n_bytes / whole * (uint64_t)td_range_n(td_role_range(role, r, TD_SHARDS));
    if (role->group == TD_GROUP_VISION)
        for (int r = 1; r < TD_SHARDS; r++) rank_bytes[r] = 0;
    bool mtp = role->layer == td_checkpoint_config(w->ck)->n_layers;
    add(mtp ? &w->sum->mtp : &w->sum->trunk[role->group], tensor, rank_bytes);
    return TD_OK;
}

/* One tensor of an expert matrix, of which each rank reads its share of the width, or everything. */
static void add_part(td_summary_cell *cell, const td_tensor *tensor, bool cut, int64_t width)
{
    uint64_t rank_bytes[TD_SHARDS];
    if (!tensor) return;
    for (int r = 0; r < TD_SHARDS; r++) {
        td_range range = td_shard_range(width, td_shard_unit(width), r, TD_SHARDS);
        rank_bytes[r] = cut ? tensor->n_bytes / (uint64_t)width * (uint64_t)td_range_n(range) : tensor->n_bytes;
    }
    add(cell, tensor, rank_bytes);
}

static void add_matrix(td_summary *sum, td_summary_cell *cell, const td_expert_matrix *m, bool down, int64_t width)
{
    add_part(cell, m->weight, true, width);
    add_part(cell, m->trellis, true, width);
    add_part(cell, m->suh, down, width);
    add_part(cell, m->svh, !down, width);
    add_part(cell, m->mcg, false, width);
    if (!m->trellis) return;
    if (sum->bits_least == 0 || m->bits < sum->bits_least) sum->bits_least = m->bits;
    if (m->bits > sum->bits_most) sum->bits_most = m->bits;
}

static void add_experts(const walk *w)
{
    const td_config *c = td_checkpoint_config(w->ck);
    td_expert_matrix matrix;
    for (int layer = 0; layer < c->n_layers + c->n_mtp; layer++) {
        td_summary_cell *cell = layer == c->n_layers ? &w->sum->mtp_experts : &w->sum->trunk[TD_GROUP_EXPERTS];
        for (int e = 0; c->is_moe[layer] && e < c->n_experts; e++)
            for (int p = TD_PROJ_GATE; p <= TD_PROJ_DOWN; p++)
                if (td_checkpoint_expert(w->ck, layer, e, (td_projection)p, &matrix, NULL) == TD_OK)
                    add_matrix(w->sum, cell, &matrix, p == TD_PROJ_DOWN, c->moe_intermediate);
    }
}

static void add_cell(td_summary_cell *to, const td_summary_cell *from)
{
    to->n_tensors += from->n_tensors;
    to->n_bytes += from->n_bytes;
    for (int r = 0; r < TD_SHARDS; r++) to->rank_bytes[r] += from->rank_bytes[r];
}

void td_summary_make(const td_checkpoint *ck, td_summary *out)
{
    const td_config *config = td_checkpoint_config(ck);
    td_check(config);
    *out = (td_summary){ 0 };
    walk w = { ck, out };
    td_roles_each(config, add_role, &w);
    td_vision_roles_each(config, add_role, &w);
    add_experts(&w);
    add_cell(&out->mtp, &out->mtp_experts);
    for (int g = 0; g < TD_GROUP_COUNT; g++) add_cell(&out->total, &out->trunk[g]);
    add_cell(&out->total, &out->mtp);
    out->unused.n_tensors = (int64_t)td_checkpoint_count(ck) - out->total.n_tensors;
    out->unused.n_bytes = td_checkpoint_data_bytes(ck) - out->total.n_bytes;
    add_cell(&out->total, &out->unused);
}
