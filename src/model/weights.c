/* Which tensors make up which matrix, and which part of them this rank holds: the one description that the plan, the
 * memory layout and the loader share (builder.h). Stacks exist so that one product serves everything that reads the
 * same input. What is the same for every shard (latent projections, router, norms, embedding) is held once a rank. */
#include "model/builder.h"
#include "ops/math.h"

static td_range all_of(int64_t n)
{
    return (td_range){ 0, n };
}

/* Heads as rows of a tensor with `per_head` rows a head. */
static td_range head_rows(td_range heads, int64_t per_head)
{
    return (td_range){ heads.begin * per_head, heads.end * per_head };
}

static td_range own_heads(const td_model *m, bool kda)
{
    const td_shard *first = &m->own[0], *last = &m->own[m->n_own - 1];
    return kda ? (td_range){ first->kda_heads.begin, last->kda_heads.end }
               : (td_range){ first->heads.begin, last->heads.end };
}

static void build_site(td_builder *b, const td_config *c, td_model_site *site, const char *fn, const char *base,
                       const char *scale, const char *norm)
{
    td_part mix = td_part_all(fn, TD_HYPER_ROWS);
    if (fn) {
        td_build_floats(b, &site->fn, (int64_t)TD_STREAMS * c->hidden, &mix, 1);
        td_build_vector(b, &site->base, base, TD_HYPER_ROWS);
        td_build_vector(b, &site->scale, scale, 3);
    }
    td_build_vector(b, &site->norm, norm, c->hidden);
}

static void build_kda_shard(td_builder *b, const td_model *m, td_model_kda_shard *shard, td_range heads)
{
    const td_config *c = &m->config;
    int64_t rows = (int64_t)c->kda_heads * TD_HEAD;
    td_range own = head_rows(heads, TD_HEAD);
    shard->n_heads = (int)td_range_n(heads);
    td_part conv[] = { { "self_attn.q_conv1d.weight", rows, own },
                       { "self_attn.k_conv1d.weight", rows, own },
                       { "self_attn.v_conv1d.weight", rows, own } };
    td_build_floats(b, &shard->w.conv, TD_CONV, conv, 3);
    td_part a_log = { "self_attn.A_log", c->kda_heads, heads };
    td_build_mapped(b, &shard->w.neg_a, 1, &a_log, 1, td_expf); /* exp(A_log) */
    td_part dt_bias = { "self_attn.dt_bias", rows, own };
    td_build_floats(b, &shard->w.dt_bias, 1, &dt_bias, 1);
    td_part f_b = { "self_attn.f_b_proj.weight", rows, own }, g_b = { "self_attn.g_b_proj.weight", rows, own };
    td_build_matrix(b, &shard->f_b, m->options.dense, TD_HEAD, all_of(TD_HEAD), &f_b, 1);
    td_build_matrix(b, &shard->g_b, m->options.dense, TD_HEAD, all_of(TD_HEAD), &g_b, 1);
    td_part out = td_part_all("self_attn.o_proj.weight", c->hidden);
    td_build_matrix(b, &shard->out, m->options.dense, rows, own, &out, 1);
}

static void build_kda(td_builder *b, const td_model *m, td_model_kda *kda)
{
    const td_config *c = &m->config;
    int64_t rows = (int64_t)c->kda_heads * TD_HEAD;
    td_part in[3 * TD_SHARDS + 3];
    int n = 0;
    for (int i = 0; i < m->n_own; i++) {
        td_range own = head_rows(m->own[i].kda_heads, TD_HEAD);
        in[n++] = (td_part){ "self_attn.q_proj.weight", rows, own };
        in[n++] = (td_part){ "self_attn.k_proj.weight", rows, own };
        in[n++] = (td_part){ "self_attn.v_proj.weight", rows, own };
    }
    in[n++] = td_part_all("self_attn.f_a_proj.weight", TD_HEAD);
    in[n++] = td_part_all("self_attn.g_a_proj.weight", TD_HEAD);
    in[n++] = (td_part){ "self_attn.b_proj.weight", c->kda_heads, own_heads(m, true) }; /* last: any number of rows */
    td_build_matrix(b, &kda->in, m->options.dense, c->hidden, all_of(c->hidden), in, n);

    const float *o_norm = kda->shard[0].w.o_norm;
    td_build_vector(b, &o_norm, "self_attn.o_norm.weight", TD_HEAD);
    for (int i = 0; i < m->n_own; i++) {
        kda->shard[i].w.o_norm = o_norm;
        build_kda_shard(b, m, &kda->shard[i], m->own[i].kda_heads);
    }
}

static void build_indexer(td_builder *b, const td_config *c, td_model_dsa *dsa)
{
    td_part keys[] = { td_part_all("self_attn.indexer.wk.weight", TD_HEAD),
                       td_part_all("self_attn.indexer.index_kpool_compress_gate", TD_HEAD) };
    td_build_matrix(b, &dsa->index_in, TD_W_BF16, c->hidden, all_of(c->hidden), keys, 2);
    td_build_whole(b, &dsa->index_weights, TD_W_BF16, "self_attn.indexer.weights_proj.weight", c->index_heads,
                   c->hidden);
    td_build_vector(b, &dsa->k_norm_w, "self_attn.indexer.k_norm.weight", TD_HEAD);
    td_build_vector(b, &dsa->k_norm_b, "self_attn.indexer.k_norm.bias", TD_HEAD);
    td_part ape = td_part_all("self_attn.indexer.index_kpool_compress_ape", TD_POOL);
    td_build_floats(b, &dsa->ape, TD_HEAD, &ape, 1);
}

static void build_dsa(td_builder *b, const td_model *m, td_model_dsa *dsa)
{
    const td_config *c = &m->config;
    td_format format = m->options.dense;
    td_part latent[] = { td_part_all("self_attn.q_a_proj.weight", c->q_lora),
                         td_part_all("self_attn.kv_a_proj_with_mqa.weight", c->kv_lora) };
    td_build_matrix(b, &dsa->latent_in, format, c->hidden, all_of(c->hidden), latent, 2);
    td_build_vector(b, &dsa->q_norm, "self_attn.q_a_layernorm.weight", c->q_lora);
    td_build_vector(b, &dsa->kv_norm, "self_attn.kv_a_layernorm.weight", c->kv_lora);
    build_indexer(b, c, dsa);
    td_build_whole(b, &dsa->index_q, format, "self_attn.indexer.wq_b.weight", (int64_t)c->index_heads * TD_HEAD,
                   c->q_lora);

    int64_t q_rows = (int64_t)c->n_heads * c->qk_dim, v_cols = (int64_t)c->n_heads * c->v_dim;
    td_part q_b = { "self_attn.q_b_proj.weight", q_rows, head_rows(own_heads(m, false), c->qk_dim) };
    td_build_matrix(b, &dsa->q_b, format, c->q_lora, all_of(c->q_lora), &q_b, 1);
    for (int i = 0; i < m->n_own; i++) {
        td_build_kv_b(b, &dsa->shard[i].kv_b, c, m->own[i].heads);
        td_part out = td_part_all("self_attn.o_proj.weight", c->hidden);
        td_build_matrix(b, &dsa->shard[i].out, format, v_cols, head_rows(m->own[i].heads, c->v_dim), &out, 1);
    }
}

/* names: of gate, up, down. */
static void build_mlp(td_builder *b, const td_model *m, td_model_mlp *mlp, const char *const names[3], int64_t total,
                      bool shared)
{
    int64_t dim = m->config.hidden;
    for (int i = 0; i < m->n_own; i++) {
        td_model_mlp_shard *shard = &mlp->shard[i];
        td_range width = shared ? m->own[i].shared : m->own[i].intermediate;
        td_part in[] = { { names[0], total, width }, { names[1], total, width } };
        td_part down = td_part_all(names[2], dim);
        shard->width = (int)td_range_n(width);
        td_build_matrix(b, &shard->gate_up, m->options.dense, dim, all_of(dim), in, 2);
        td_build_matrix(b, &shard->down, m->options.dense, total, width, &down, 1);
    }
}

static void build_moe(td_builder *b, const td_model *m, td_model_moe *moe, size_t *experts_account)
{
    static const char *const shared[] = { "mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight",
                                          "mlp.shared_experts.down_proj.weight" };
    const td_config *c = &m->config;
    td_build_whole(b, &moe->router, TD_W_BF16, "mlp.gate.weight", c->n_experts, c->hidden);
    td_build_vector(b, &moe->bias, "mlp.gate.e_score_correction_bias", c->n_experts);
    if (c->n_shared_experts) build_mlp(b, m, &moe->shared, shared, c->shared_intermediate, true);
    size_t *account = b->account;
    b->account = experts_account;
    for (int i = 0; i < m->n_own; i++) td_build_experts(b, &moe->experts[i], c, m->own[i].moe);
    b->account = account;
}

static void build_layer(td_builder *b, td_model *m, int index, size_t *dense_account, size_t *experts_account)
{
    static const char *const dense[] = { "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight" };
    td_model_layer *layer = &m->layers[index];
    bool trunk = index < m->config.n_layers;
    td_builder_layer(b, index);
    b->account = dense_account;
    layer->is_dsa = m->config.is_dsa[index];
    layer->is_moe = m->config.is_moe[index];
    build_site(b, &m->config, &layer->attn_site, trunk ? "hc_attn_fn" : NULL, "hc_attn_base", "hc_attn_scale",
               "input_layernorm.weight");
    build_site(b, &m->config, &layer->mlp_site, trunk ? "hc_ffn_fn" : NULL, "hc_ffn_base", "hc_ffn_scale",
               "post_attention_layernorm.weight");
    if (layer->is_dsa)
        build_dsa(b, m, &layer->dsa);
    else
        build_kda(b, m, &layer->kda);
    if (layer->is_moe)
        build_moe(b, m, &layer->moe, experts_account);
    else
        build_mlp(b, m, &layer->mlp, dense, m->config.intermediate, false);
}

static void build_mtp(td_builder *b, td_model *m)
{
    const td_config *c = &m->config;
    build_layer(b, m, c->n_layers, &m->plan.mtp_bytes, &m->plan.mtp_bytes);
    b->account = &m->plan.mtp_bytes;
    td_build_whole(b, &m->eh_proj, m->options.dense, "eh_proj.weight", c->hidden, 2 * (int64_t)c->hidden);
    td_build_vector(b, &m->enorm, "enorm.weight", c->hidden);
    td_build_vector(b, &m->hnorm, "hnorm.weight", c->hidden);
    td_build_vector(b, &m->shared_head_norm, "shared_head.norm.weight", c->hidden);
}

void td_build_weights(td_builder *b, td_model *m)
{
    const td_config *c = &m->config;
    td_builder_prefix(b, "model.language_model.");
    b->account = &m->plan.embed_bytes;
    td_build_table(b, &m->embed, "embed_tokens.weight", c->vocab_size, c->hidden);
    b->account = &m->plan.dense_bytes;
    td_build_vector(b, &m->final_norm, "norm.weight", c->hidden);

    for (int i = 0; i < c->n_layers; i++) build_layer(b, m, i, &m->plan.dense_bytes, &m->plan.experts_bytes);
    if (m->options.mtp) build_mtp(b, m);

    td_builder_prefix(b, "");
    b->account = &m->plan.head_bytes;
    for (int i = 0; i < m->n_own; i++) {
        td_part rows = { "lm_head.weight", c->vocab_size, m->own[i].vocab };
        td_build_matrix(b, &m->head[i], m->options.head, c->hidden, all_of(c->hidden), &rows, 1);
    }
}
