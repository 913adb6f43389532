/* See cost.h. */
#include "cli/cost.h"

#include "checkpoint/slices.h"

/* Operations per value of the elementwise formulas, counted from docs/model.md; an exponential or a root counts one. */
enum { NORM_FLOPS = 4, SWIGLU_FLOPS = 8, MIX_FLOPS = 8, COLLAPSE_FLOPS = 7 };

static double act_bytes(const td_dev *dev, double n)
{
    return n * (double)td_act_bytes(dev, 1);
}

/* --- one call --- */

td_cost td_cost_embed(const td_dev *dev, const td_embed_args *a)
{
    double values = (double)a->window->n_rows * a->dim;
    return (td_cost){ .bytes = values * sizeof(td_bf16) + act_bytes(dev, values * a->n_streams) };
}

/* The mixing product [24][4 dim], write-back of 4 streams from 4 + 1, collapse of 4, norms. */
td_cost td_cost_hyper(const td_dev *dev, const td_hyper_args *a)
{
    enum { MIX_ROWS = 24 };
    double rows = a->n_rows, dim = a->dim, streams = TD_STREAMS * dim;
    td_cost cost = { .bytes = act_bytes(dev, rows * streams) };
    if (a->partials) {
        cost.bytes += rows * TD_SHARDS * dim * sizeof(float) + act_bytes(dev, rows * streams);
        cost.flops += rows * (streams * (MIX_FLOPS + 2) + dim * (TD_SHARDS - 1));
    }
    if (a->fn) {
        cost.bytes += MIX_ROWS * streams * sizeof(float) + act_bytes(dev, rows * dim);
        cost.flops += rows * (2 * MIX_ROWS * streams + 2 * streams + dim * (COLLAPSE_FLOPS + NORM_FLOPS));
    }
    return cost;
}

td_cost td_cost_rmsnorm(const td_dev *dev, const td_rmsnorm_args *a)
{
    double values = (double)a->n_rows * a->dim;
    return (td_cost){ .bytes = act_bytes(dev, 2 * values) + a->dim * (double)sizeof(float),
                      .flops = NORM_FLOPS * values };
}

td_cost td_cost_stream_mean(const td_dev *dev, const td_stream_mean_args *a)
{
    double values = (double)a->n_rows * a->dim;
    return (td_cost){ .bytes = act_bytes(dev, (TD_STREAMS + 1) * values), .flops = TD_STREAMS * values };
}

td_cost td_cost_linear(const td_dev *dev, const td_linear_args *a)
{
    double rows = a->n_rows, in = a->w->in, out = a->w->out;
    double y_bytes = a->y_f32 ? rows * out * sizeof(float) : act_bytes(dev, rows * out);
    return (td_cost){ .bytes = (double)td_cpu_weight_bytes(a->w->format, a->w->out, a->w->in) +
                               act_bytes(dev, rows * in) + y_bytes,
                      .flops = 2 * rows * in * out };
}

/* One row of one head: the convolution of q, k and v; decay of M; M^T k, the outer product and M^T q. */
static double kda_head_flops(void)
{
    double square = (double)TD_HEAD * TD_HEAD;
    return 3.0 * TD_HEAD * 2 * TD_CONV + 7 * square;
}

static double kda_state_bytes(double heads)
{
    return heads * TD_HEAD * TD_HEAD * sizeof(float);
}

/* The chunked form is charged what the recurrence would need: its extra products are its own choice. */
td_cost td_cost_kda(const td_dev *dev, const td_kda_args *a)
{
    double rows = a->window->n_rows, width = (double)a->n_heads * TD_HEAD, weights = 0;
    int used = 0;
    if (a->low.f_b) weights = 2.0 * (double)td_cpu_weight_bytes(a->low.f_b->format, a->low.f_b->out, TD_HEAD);
    for (int i = 0; i < a->window->n_segments; i++) used += a->window->host_segments[i].n_rows > 0;
    double gates = a->low.f_b ? 2.0 * TD_HEAD : 2 * width; /* columns that are read: before or after the product */
    return (td_cost){ .bytes = act_bytes(dev, rows * (4 * width + gates + a->n_heads)) + weights +
                               2 * used * kda_state_bytes(a->n_heads),
                      .flops = rows * (a->n_heads * kda_head_flops() + (a->low.f_b ? 4.0 * width * TD_HEAD : 0)) };
}

td_cost td_cost_kda_replay(const td_dev *dev, const td_kda_replay_args *a)
{
    td_cost cost = { 0 };
    double square = (double)TD_HEAD * TD_HEAD, width = (double)a->n_heads * TD_HEAD;
    (void)dev;
    for (int i = 0; i < a->window->n_segments; i++) {
        const td_segment *s = &a->window->host_segments[i];
        if (s->chunked || a->keep[i] <= 0 || a->keep[i] >= s->n_rows) continue;
        cost.bytes += 2 * kda_state_bytes(a->n_heads) + a->keep[i] * 3 * width * sizeof(float);
        cost.flops += a->keep[i] * a->n_heads * 5 * square;
    }
    return cost;
}

td_cost td_cost_dsa_store(const td_dev *dev, const td_dsa_store_args *a)
{
    double rows = a->window->n_rows, lora = a->q_lora + a->cache.kv_lora;
    double out = rows * (double)td_kv_row_bytes(dev, a->cache.format, a->cache.kv_lora) +
                 rows / TD_POOL * (double)td_kv_row_bytes(dev, a->cache.format, TD_HEAD) +
                 act_bytes(dev, rows * (a->q_lora + 2.0 * TD_HEAD));
    return (td_cost){ .bytes = act_bytes(dev, rows * (lora + 2 * TD_HEAD)) + out,
                      .flops = rows * NORM_FLOPS * (lora + TD_HEAD) };
}

/* Tokens that a row at pos attends to. */
static double attended(int64_t pos, int64_t top_pools)
{
    int64_t n_pools = (pos + 1) / TD_POOL;
    if (n_pools <= top_pools) return (double)(pos + 1);
    return (double)(top_pools * TD_POOL + pos + 1 - n_pools * TD_POOL);
}

td_cost td_cost_dsa_select(const td_dev *dev, const td_dsa_select_args *a)
{
    td_cost cost = { 0 };
    double row_bytes = (double)td_kv_row_bytes(dev, a->cache.format, TD_HEAD);
    for (int i = 0; i < a->window->n_segments; i++) {
        const td_segment *s = &a->window->host_segments[i];
        double most = 0;
        for (int r = 0; r < s->n_rows; r++) {
            int n_pools = (s->pos + r + 1) / TD_POOL;
            if (n_pools <= a->top_pools) continue;
            most = n_pools;
            cost.flops += most * a->n_heads * (2.0 * TD_HEAD + 2);
            cost.bytes += act_bytes(dev, (double)a->n_heads * TD_HEAD);
        }
        cost.bytes += most * row_bytes; /* one sequence's rows read the same pools */
    }
    return cost;
}

/* One row of one head: the query into latent space, scores, the weighted sum, and back out. */
static double attend_head_flops(double n_tokens, double k_dim, double v_dim, double kv_lora)
{
    return 2 * kv_lora * (k_dim + v_dim) + 4 * n_tokens * kv_lora;
}

td_cost td_cost_dsa_attend(const td_dev *dev, const td_dsa_attend_args *a)
{
    const td_kv_b *w = &a->kv_b;
    double row_bytes = (double)td_kv_row_bytes(dev, a->cache.format, a->cache.kv_lora);
    double io = (double)w->n_heads * (w->k_dim + w->v_dim);
    td_cost cost = { .bytes = (double)td_cpu_kv_b_bytes(dev, w->n_heads, w->k_dim, w->v_dim, w->kv_lora) };
    for (int i = 0; i < a->window->n_segments; i++) {
        const td_segment *s = &a->window->host_segments[i];
        double sum = 0, prefix = s->n_rows ? (double)s->pos + s->n_rows : 0;
        for (int r = 0; r < s->n_rows; r++) {
            double n = attended(s->pos + r, a->top_pools);
            sum += n;
            cost.flops += w->n_heads * attend_head_flops(n, w->k_dim, w->v_dim, w->kv_lora);
        }
        cost.bytes += (sum < prefix ? sum : prefix) * row_bytes + act_bytes(dev, s->n_rows * io);
    }
    return cost;
}

td_cost td_cost_swiglu(const td_dev *dev, const td_swiglu_args *a)
{
    double values = (double)a->n_rows * a->width;
    return (td_cost){ .bytes = act_bytes(dev, 3 * values), .flops = SWIGLU_FLOPS * values };
}

td_cost td_cost_router(const td_dev *dev, const td_router_args *a)
{
    double rows = a->n_rows, dim = a->dim, n = a->n_experts;
    return (td_cost){ .bytes = (double)td_cpu_weight_bytes(a->w->format, a->w->out, a->w->in) + n * sizeof(float) +
                               act_bytes(dev, rows * dim) + rows * a->top_k * 8,
                      .flops = rows * (2 * dim * n + 2 * n) };
}

static double expert_bytes(const td_experts *e, int i)
{
    if (!e->exl3)
        return (double)(td_cpu_weight_bytes(e->gate[i].format, e->gate[i].out, e->gate[i].in) +
                        td_cpu_weight_bytes(e->up[i].format, e->up[i].out, e->up[i].in) +
                        td_cpu_weight_bytes(e->down[i].format, e->down[i].out, e->down[i].in));
    return (double)(td_exl3_bytes(e->gate_x[i].k, e->gate_x[i].n, e->gate_x[i].bits2) +
                    td_exl3_bytes(e->up_x[i].k, e->up_x[i].n, e->up_x[i].bits2) +
                    td_exl3_bytes(e->down_x[i].k, e->down_x[i].n, e->down_x[i].bits2));
}

double td_cost_expert_bytes(const td_experts_args *a, int *n_distinct)
{
    const td_experts *e = a->experts;
    bool chosen[TD_EXPERTS_MAX] = { false };
    double bytes = 0;
    int n = 0;
    for (int i = 0; i < a->n_rows * a->top_k; i++) {
        if (a->ids[i] < 0 || a->ids[i] >= e->n_experts || chosen[a->ids[i]]) continue;
        chosen[a->ids[i]] = true;
        bytes += expert_bytes(e, a->ids[i]);
        n++;
    }
    if (n_distinct) *n_distinct = n;
    return bytes;
}

td_cost td_cost_experts(const td_dev *dev, const td_experts_args *a)
{
    const td_experts *e = a->experts;
    double picks = 0, rows = a->n_rows, dim = e->dim;
    for (int i = 0; i < a->n_rows * a->top_k; i++) picks += a->ids[i] >= 0 && a->ids[i] < e->n_experts;
    return (td_cost){ .bytes = td_cost_expert_bytes(a, NULL) + act_bytes(dev, rows * dim) +
                               rows * dim * sizeof(float) * (a->shared ? 2 : 1),
                      .flops = picks * (2.0 * 3 * dim * e->width + SWIGLU_FLOPS * (double)e->width + 2 * dim) };
}

/* This rank's part read, the other one's written; what the link itself moves is not this machine's memory. */
td_cost td_cost_gather(const td_gather_args *a)
{
    return (td_cost){ .bytes = 2.0 * (double)a->n_bytes };
}

/* --- a rank's share --- */

double td_cost_active_bytes(const td_config *config, const td_model_plan *plan)
{
    double chosen = config->n_experts ? (double)config->top_k / config->n_experts : 0;
    return (double)plan->dense_bytes + (double)plan->head_bytes + chosen * (double)plan->experts_bytes +
           (double)plan->embed_bytes / config->vocab_size;
}

/* Sizes that a rank of world owns, over all of its virtual shards. */
typedef struct share {
    double heads, kda_heads, intermediate, moe, shared, vocab;
} share;

static share share_of(const td_config *config, int world)
{
    share s = { 0 };
    td_range own = td_rank_shards(0, world);
    for (int64_t i = own.begin; i < own.end; i++) {
        td_shard shard;
        td_shard_of(config, (int)i, TD_SHARDS, &shard);
        s.heads += (double)td_range_n(shard.heads);
        s.kda_heads += (double)td_range_n(shard.kda_heads);
        s.intermediate += (double)td_range_n(shard.intermediate);
        s.moe += (double)td_range_n(shard.moe);
        s.shared += config->n_shared_experts ? (double)td_range_n(shard.shared) : 0;
        s.vocab += (double)td_range_n(shard.vocab);
    }
    return s;
}

static double kda_layer_flops(const td_config *c, const share *s)
{
    double dim = c->hidden, width = s->kda_heads * TD_HEAD;
    double in = 2 * dim * (3 * width + 2.0 * TD_HEAD + s->kda_heads); /* q k v, f_a g_a, b */
    double low_rank = 2.0 * TD_HEAD * 2 * width;                      /* f_b, g_b */
    return in + low_rank + s->kda_heads * kda_head_flops() + 2 * width * dim;
}

static double dsa_layer_flops(const td_config *c, const share *s, int64_t pos)
{
    double dim = c->hidden, index = (double)c->index_heads * TD_HEAD;
    int64_t top_pools = c->index_topk / TD_POOL, n_pools = (pos + 1) / TD_POOL;
    double flops = 2 * dim * (c->q_lora + c->kv_lora + 2.0 * TD_HEAD) + 2 * c->q_lora * s->heads * c->qk_dim;
    if (n_pools > top_pools) /* only then is anything chosen */
        flops +=
            2 * c->q_lora * index + 2 * dim * c->index_heads + (double)n_pools * c->index_heads * (2.0 * TD_HEAD + 2);
    flops += s->heads * attend_head_flops(attended(pos, top_pools), c->qk_dim, c->v_dim, c->kv_lora);
    return flops + 2 * s->heads * c->v_dim * dim;
}

static double mlp_flops(double dim, double width)
{
    return 6 * dim * width + SWIGLU_FLOPS * width;
}

static double hyper_site_flops(double dim)
{
    double streams = TD_STREAMS * dim;
    return streams * (MIX_FLOPS + 2) + dim + 2 * 24 * streams + 2 * streams + dim * (COLLAPSE_FLOPS + NORM_FLOPS);
}

double td_cost_row_flops(const td_config *config, int world, int64_t pos)
{
    share s = share_of(config, world);
    double dim = config->hidden, flops = 0;
    for (int i = 0; i < config->n_layers; i++) {
        flops += 2 * hyper_site_flops(dim);
        flops += config->is_dsa[i] ? dsa_layer_flops(config, &s, pos) : kda_layer_flops(config, &s);
        if (config->is_moe[i])
            flops += 2 * dim * config->n_experts + config->top_k * (mlp_flops(dim, s.moe) + 2 * dim) +
                     mlp_flops(dim, s.shared);
        else
            flops += mlp_flops(dim, s.intermediate);
    }
    return flops;
}

double td_cost_prompt_flops(const td_config *config, int world, int64_t n_rows)
{
    double flops = 2 * config->hidden * share_of(config, world).vocab;
    for (int64_t pos = 0; pos < n_rows; pos++) flops += td_cost_row_flops(config, world, pos);
    return flops;
}
