/* What `tandem bench full` found out, for people and for scripts. */
#include "cli/bench_full.h"

#include <stdio.h>
#include <string.h>

const char *td_full_tokens(int64_t n, char *text, size_t cap_bytes)
{
    if (n >= 1 << 20 && n % (1 << 20) == 0)
        snprintf(text, cap_bytes, "%lldM", (long long)(n >> 20));
    else if (n >= 1024 && n % 1024 == 0)
        snprintf(text, cap_bytes, "%lldk", (long long)(n >> 10));
    else
        snprintf(text, cap_bytes, "%lld", (long long)n);
    return text;
}

static const char *format_name(td_format format)
{
    return format == TD_W_Q4 ? "q4" : format == TD_W_FP8 ? "fp8" : "bf16";
}

/* ---- tables ---- */

static void print_head(const td_full_options *o, const td_full_rig *rig)
{
    const td_model_plan *p = &rig->plan;
    printf("device: %s\n", rig->device);
    printf("model: %s shape, %d layers (%d DSA, %d MoE), rank 0 of %d, dense %s, experts EXL3 %d bits, KV fp8\n",
           o->shape == TD_SHAPE_REAL ? "real" : "small", rig->config.n_layers, td_config_n_dsa(&rig->config),
           td_config_n_moe(&rig->config), o->world, format_name(o->dense), TD_FULL_EXPERT_BITS);
    printf("memory: experts %.2f GiB, dense %.2f, embedding %.2f, head %.2f, KV pool %.2f (%lld tokens), states %.2f, "
           "activations %.2f, operations %.2f\n",
           (double)p->experts_bytes * 0x1p-30, (double)p->dense_bytes * 0x1p-30, (double)p->embed_bytes * 0x1p-30,
           (double)p->head_bytes * 0x1p-30, (double)p->kv_bytes * 0x1p-30,
           (long long)rig->model_options.n_blocks * TD_BLOCK, (double)p->state_bytes * 0x1p-30,
           (double)p->scratch_bytes * 0x1p-30, (double)rig->device_bytes * 0x1p-30);
    printf("weights made and packed: %.1f GB in %.1f s, %.2f GB/s\n", (double)rig->load_bytes * 1e-9, rig->load_s,
           (double)rig->load_bytes * 1e-9 / rig->load_s);
    printf("ceilings: copy %.0f GB/s (read and written), experts counted at %.0f GB/s, multiply %.2f TFLOP/s\n",
           rig->ceilings.copy_bytes_per_s * 1e-9, rig->ceilings.expert_bytes_per_s * 1e-9,
           rig->ceilings.multiply_flops_per_s * 1e-12);
    if (o->world > 1)
        printf("exchanges: %d a forward, each set to take %.1f us; 'waits' is their sum, ratios are without it\n",
               2 * rig->config.n_layers, (double)o->exchange_ns * 1e-3);
}

static void print_cases(const td_full_result *r, bool prompts)
{
    char at[32];
    bool any = false;
    for (int i = 0; i < r->n_cases; i++) {
        const td_full_case *c = &r->cases[i];
        if (c->prompt != prompts) continue;
        if (!any)
            printf("\n%s\n  %5s %8s %10s %6s %9s %9s %10s %10s %9s %6s %8s\n",
                   prompts ? "prompt chunks" : "decode windows", "rows", prompts ? "at" : "context", "ms", "+-",
                   "tokens/s", "waits ms", "GB", "GFLOP", "floor ms", "ratio", "experts");
        any = true;
        printf("  %5d %8s %10.3f %5.1f%% %9.0f %9.3f %10.3f %10.1f %9.3f %6.2f %8.1f\n", c->n_rows,
               td_full_tokens(c->context, at, sizeof at), c->s.median * 1e3, 100 * td_stat_spread(&c->s),
               c->n_rows / c->s.median, c->link_s * 1e3, c->bytes * 1e-9, c->flops * 1e-9, c->floor_s * 1e3, c->ratio,
               c->experts_a_layer);
    }
}

static const td_op_entry *entry_like(const td_full_case *c, const td_op_entry *wanted)
{
    for (int i = 0; i < c->n_ops; i++)
        if (strcmp(c->ops[i].op, wanted->op) == 0 && strcmp(c->ops[i].shape, wanted->shape) == 0) return &c->ops[i];
    return NULL;
}

/* Microseconds by operation, a column a case of those that `cases` lists. */
static void print_matrix(const char *title, const td_full_case *const *cases, int n)
{
    char text[48];
    double sums[TD_FULL_LIST_MAX] = { 0 };
    printf("\n%s\n  %-12s %-20s %5s", title, "operation", "shape", "calls");
    for (int k = 0; k < n; k++) {
        char column[64];
        if (cases[k]->prompt)
            snprintf(column, sizeof column, "at %s", td_full_tokens(cases[k]->context, text, sizeof text));
        else
            snprintf(column, sizeof column, "%d row%s", cases[k]->n_rows, cases[k]->n_rows == 1 ? "" : "s");
        printf(" %10s", column);
    }
    const td_full_case *last = cases[n - 1]; /* has the operations of the others */
    for (int i = 0; i < last->n_ops; i++) {
        printf("\n  %-12s %-20s %5d", last->ops[i].op, last->ops[i].shape, last->ops[i].n_calls);
        for (int k = 0; k < n; k++) {
            const td_op_entry *e = entry_like(cases[k], &last->ops[i]);
            printf(" %10.1f", e ? e->s * 1e6 : 0);
            sums[k] += e ? e->s : 0;
        }
    }
    printf("\n  %-12s %-20s %5s", "together", "", "");
    for (int k = 0; k < n; k++) printf(" %10.1f", sums[k] * 1e6);
    printf("\n");
}

static void print_operations(const td_full_options *o, const td_full_result *r)
{
    const td_full_case *cases[TD_FULL_CASES_MAX];
    for (int i = 0; i <= o->n_contexts; i++) { /* each context's windows, then the prompts */
        char title[96], text[32];
        int n = 0;
        bool prompts = i == o->n_contexts;
        for (int k = 0; k < r->n_cases && n < TD_FULL_LIST_MAX; k++)
            if (r->cases[k].prompt == prompts && (prompts || r->cases[k].context == o->contexts[i]))
                cases[n++] = &r->cases[k];
        if (!n) continue;
        if (prompts)
            snprintf(title, sizeof title, "prompt chunks of %d rows, us by operation", cases[0]->n_rows);
        else
            snprintf(title, sizeof title, "decode windows at %s, us by operation",
                     td_full_tokens(o->contexts[i], text, sizeof text));
        print_matrix(title, cases, n);
    }
}

static void print_targets(const td_full_result *r)
{
    if (r->n_targets) printf("\ntargets (of the whole model on an H200)\n");
    for (int i = 0; i < r->n_targets; i++) {
        const td_full_target *t = &r->targets[i];
        printf("  %-52s %9.2f %-8s %s %9.2f  %s\n", t->what, t->measured, t->unit, t->at_least ? ">=" : "<=", t->wanted,
               t->met ? "met" : "missed");
    }
}

void td_full_print(const td_full_options *o, const td_full_rig *rig, const td_full_result *r)
{
    print_head(o, rig);
    print_cases(r, false);
    print_cases(r, true);
    print_operations(o, r);
    print_targets(r);
}

/* ---- JSON ---- */

static void write_plan(td_json_writer *w, const td_full_rig *rig)
{
    const td_model_plan *p = &rig->plan;
    td_json_write_key(w, "bytes");
    td_json_write_begin(w, '{');
    td_json_write_member_int(w, "experts", (int64_t)p->experts_bytes);
    td_json_write_member_int(w, "dense", (int64_t)p->dense_bytes);
    td_json_write_member_int(w, "embedding", (int64_t)p->embed_bytes);
    td_json_write_member_int(w, "head", (int64_t)p->head_bytes);
    td_json_write_member_int(w, "kv_pool", (int64_t)p->kv_bytes);
    td_json_write_member_int(w, "states", (int64_t)p->state_bytes);
    td_json_write_member_int(w, "activations", (int64_t)p->scratch_bytes);
    td_json_write_member_int(w, "operations", (int64_t)rig->device_bytes);
    td_json_write_end(w, '}');
    td_json_write_key(w, "load");
    td_json_write_begin(w, '{');
    td_json_write_member_int(w, "bytes", (int64_t)rig->load_bytes);
    td_bench_write_number(w, "s", rig->load_s);
    td_json_write_end(w, '}');
}

static void write_head(td_json_writer *w, const td_full_options *o, const td_full_rig *rig)
{
    td_bench_write_machine(w);
    td_json_write_member_text(w, "device", rig->device);
    td_json_write_member_text(w, "backend", rig->backend == TD_CUDA ? "cuda" : "cpu");
    td_json_write_member_text(w, "shape", o->shape == TD_SHAPE_REAL ? "real" : "small");
    td_json_write_member_int(w, "layers", rig->config.n_layers);
    td_json_write_member_int(w, "world", o->world);
    td_json_write_member_text(w, "dense", format_name(o->dense));
    td_json_write_member_int(w, "expert_bits", TD_FULL_EXPERT_BITS);
    td_json_write_member_int(w, "pool_tokens", (int64_t)rig->model_options.n_blocks * TD_BLOCK);
    td_bench_write_number(w, "exchange_us", (double)o->exchange_ns * 1e-3);
    write_plan(w, rig);
    td_json_write_key(w, "ceilings");
    td_json_write_begin(w, '{');
    td_bench_write_number(w, "copy_bytes_per_s", rig->ceilings.copy_bytes_per_s);
    td_bench_write_number(w, "expert_bytes_per_s", rig->ceilings.expert_bytes_per_s);
    td_bench_write_number(w, "multiply_flops_per_s", rig->ceilings.multiply_flops_per_s);
    td_json_write_end(w, '}');
}

static void write_op(td_json_writer *w, const td_op_entry *e)
{
    td_json_write_begin(w, '{');
    td_json_write_member_text(w, "op", e->op);
    td_json_write_member_text(w, "shape", e->shape);
    td_json_write_member_int(w, "calls", e->n_calls);
    td_bench_write_number(w, "s", e->s);
    td_bench_write_number(w, "bytes", e->cost.bytes);
    td_bench_write_number(w, "flops", e->cost.flops);
    td_json_write_end(w, '}');
}

static void write_case(td_json_writer *w, const td_full_case *c)
{
    td_json_write_begin(w, '{');
    td_json_write_member_text(w, "kind", c->prompt ? "prompt" : "decode");
    td_json_write_member_int(w, "rows", c->n_rows);
    td_json_write_member_int(w, "context", c->context);
    td_json_write_member_int(w, "position", c->pos);
    td_bench_write_stat(w, "s", &c->s);
    td_bench_write_number(w, "waits_s", c->link_s);
    td_bench_write_number(w, "tokens_per_s", c->n_rows / c->s.median);
    td_bench_write_number(w, "bytes", c->bytes);
    td_bench_write_number(w, "expert_bytes", c->expert_bytes);
    td_bench_write_number(w, "experts_a_layer", c->experts_a_layer);
    td_bench_write_number(w, "flops", c->flops);
    td_bench_write_number(w, "floor_s", c->floor_s);
    td_bench_write_number(w, "ratio", c->ratio);
    td_json_write_key(w, "ops");
    td_json_write_begin(w, '[');
    for (int i = 0; i < c->n_ops; i++) write_op(w, &c->ops[i]);
    td_json_write_end(w, ']');
    td_json_write_end(w, '}');
}

static void write_targets(td_json_writer *w, const td_full_result *r)
{
    td_json_write_key(w, "targets");
    td_json_write_begin(w, '[');
    for (int i = 0; i < r->n_targets; i++) {
        const td_full_target *t = &r->targets[i];
        td_json_write_begin(w, '{');
        td_json_write_member_text(w, "what", t->what);
        td_json_write_member_text(w, "unit", t->unit);
        td_bench_write_number(w, "measured", t->measured);
        td_bench_write_number(w, t->at_least ? "at_least" : "at_most", t->wanted);
        td_json_write_member_bool(w, "met", t->met);
        td_json_write_end(w, '}');
    }
    td_json_write_end(w, ']');
}

void td_full_print_json(const td_full_options *o, const td_full_rig *rig, const td_full_result *r)
{
    td_buf out;
    td_buf_init(&out, 0);
    td_json_writer w = { .out = &out };
    td_json_write_begin(&w, '{');
    write_head(&w, o, rig);
    td_json_write_key(&w, "cases");
    td_json_write_begin(&w, '[');
    for (int i = 0; i < r->n_cases; i++) write_case(&w, &r->cases[i]);
    td_json_write_end(&w, ']');
    write_targets(&w, r);
    td_json_write_end(&w, '}');
    printf("%s\n", out.data && !out.failed ? out.data : "{}");
    td_buf_deinit(&out);
}
