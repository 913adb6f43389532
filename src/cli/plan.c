/* tandem plan: what a rank of the server would take of memory, by purpose, before it is started. The numbers come from
 * the layout that loading uses, so plan and server cannot disagree; no weight is read. */
#include "base/json_write.h"
#include "cli/args.h"
#include "cli/cli.h"
#include "cli/serve_memory.h"

#include <stdio.h>
#include <string.h>

enum { ROWS_MAX = 16, NOTE_CAP = 96 };

typedef struct plan_row {
    const char *key, *name;
    size_t n_bytes;
    char note[NOTE_CAP];
} plan_row;

typedef struct planned {
    td_serve_shape shape;
    td_serve_fit fit;
    int32_t asked; /* window: the setting, or the checkpoint's longest */
    plan_row rows[ROWS_MAX];
    int n_rows;
} planned;

static void add_row(planned *p, const char *key, const char *name, size_t n_bytes, const char *note)
{
    plan_row *row = &p->rows[p->n_rows++];
    *row = (plan_row){ .key = key, .name = name, .n_bytes = n_bytes };
    snprintf(row->note, sizeof row->note, "%s", note);
}

static void fill_rows(planned *p)
{
    const td_model_plan *m = &p->fit.need.plan;
    const td_model_options *o = &p->shape.model;
    char note[NOTE_CAP];
    size_t total = p->fit.need.memory.device_bytes + p->fit.need.memory.host_bytes;
    add_row(p, "experts", "routed experts", m->experts_bytes, "");
    add_row(p, "dense", "other layer weights", m->dense_bytes, "");
    add_row(p, "embedding", "embedding", m->embed_bytes, "");
    add_row(p, "head", "head", m->head_bytes, "");
    if (m->mtp_bytes) add_row(p, "mtp", "MTP layer", m->mtp_bytes, "");
    snprintf(note, sizeof note, "%lld tokens, %zu bytes each", (long long)o->n_blocks * TD_BLOCK,
             m->kv_bytes_per_token);
    add_row(p, "kv_pool", "KV pool", m->kv_bytes, note);
    snprintf(note, sizeof note, "%d requests, %.2f MiB each", o->n_slots, (double)m->state_bytes_per_slot * 0x1p-20);
    add_row(p, "states", "recurrent states", m->state_bytes, note);
    snprintf(note, sizeof note, "windows of %d rows", o->chunk_rows);
    add_row(p, "scratch", "activations", m->scratch_bytes, note);
    add_row(p, "device_scratch", "scratch of the operations", p->fit.need.scratch_bytes, "");
    add_row(p, "link", "link buffers and prompts", total - m->total_bytes - p->fit.need.scratch_bytes, "");
}

static td_status make_plan(const td_settings *settings, const td_checkpoint *checkpoint, planned *p, td_error *err)
{
    td_status status = td_serve_shape_of(settings, td_checkpoint_config(checkpoint), &p->shape, err);
    if (status) return status;
    p->asked = p->shape.context_tokens;
    status = td_serve_fit_shape(&p->shape, settings, checkpoint, &p->fit, err);
    if (!status) fill_rows(p);
    return status;
}

static void print_memory(const char *name, size_t n_bytes)
{
    printf("  %-27s %11.2f MiB  %.3f GiB\n", name, (double)n_bytes * 0x1p-20, (double)n_bytes * 0x1p-30);
}

/* One sum where there is one memory; else the GPU's and the host's. */
static void print_totals(const planned *p)
{
    const td_serve_memory *need = &p->fit.need.memory, *available = &p->fit.available;
    bool cuda = p->shape.backend == TD_CUDA, one = td_serve_one_memory(&p->shape);
    print_memory("total", need->device_bytes + need->host_bytes);
    if (!one) print_memory("  of the GPU's memory", need->device_bytes);
    if (!one) print_memory("  of the host's", need->host_bytes);
    printf("\n");
    if (cuda)
        printf("  GPU %d: %s, sm_%d, %.0f MiB%s, %.0f of them the driver's and other programs'\n", p->shape.gpu.index,
               p->shape.gpu.name, p->shape.gpu.capability, (double)p->shape.gpu.total_bytes * 0x1p-20,
               one ? " shared with the host" : "",
               (double)(p->shape.gpu.total_bytes - p->shape.gpu.free_bytes) * 0x1p-20);
    if (!one) print_memory("free on the GPU", available->device_bytes);
    print_memory(one ? "free for this rank" : "free on the host", available->host_bytes);
    printf("  beside a reserve of %.2f GiB%s (--memory-reserve-gib)\n", (double)p->shape.reserve_bytes * 0x1p-30,
           one ? "" : " of each");
}

static void print_table(const planned *p)
{
    printf("rank %d of %d, window %d tokens%s\n\n", p->shape.model.rank, p->shape.model.world, p->shape.context_tokens,
           p->shape.context_tokens < p->asked ? ", the largest that fits" : "");
    for (int i = 0; i < p->n_rows; i++) {
        const plan_row *row = &p->rows[i];
        printf("  %-27s %11.2f MiB  %s\n", row->name, (double)row->n_bytes * 0x1p-20, row->note);
    }
    print_totals(p);
    if (p->shape.model.world > 1)
        printf("  The other rank takes as much again, on this machine when --master is 127.*.\n");
    printf("\n%s\n", p->fit.fits ? "It fits." : "It does not fit.");
    if (!p->fit.fits) printf("largest_window=%d\n", p->fit.largest);
}

static void print_json(const planned *p)
{
    td_buf out;
    td_buf_init(&out, 0);
    td_json_writer w = { .out = &out };
    td_json_write_begin(&w, '{');
    td_json_write_member_int(&w, "rank", p->shape.model.rank);
    td_json_write_member_int(&w, "world", p->shape.model.world);
    td_json_write_member_int(&w, "window", p->shape.context_tokens);
    td_json_write_member_int(&w, "parallel", p->shape.model.n_slots);
    td_json_write_key(&w, "bytes");
    td_json_write_begin(&w, '{');
    for (int i = 0; i < p->n_rows; i++) td_json_write_member_int(&w, p->rows[i].key, (int64_t)p->rows[i].n_bytes);
    td_json_write_end(&w, '}');
    const td_serve_memory *need = &p->fit.need.memory, *available = &p->fit.available;
    bool one = td_serve_one_memory(&p->shape);
    td_json_write_member_text(&w, "backend", p->shape.backend == TD_CUDA ? "cuda" : "cpu");
    td_json_write_member_int(&w, "total_bytes", (int64_t)(need->device_bytes + need->host_bytes));
    td_json_write_member_int(&w, "available_bytes", (int64_t)(one ? available->host_bytes : available->device_bytes));
    if (!one) {
        td_json_write_member_int(&w, "gpu_bytes", (int64_t)need->device_bytes);
        td_json_write_member_int(&w, "host_bytes", (int64_t)need->host_bytes);
        td_json_write_member_int(&w, "available_host_bytes", (int64_t)available->host_bytes);
    }
    td_json_write_member_int(&w, "kv_bytes_per_token", (int64_t)p->fit.need.plan.kv_bytes_per_token);
    td_json_write_member_int(&w, "state_bytes_per_slot", (int64_t)p->fit.need.plan.state_bytes_per_slot);
    td_json_write_member_bool(&w, "fits", p->fit.fits);
    td_json_write_member_int(&w, "largest_window", p->fit.largest);
    td_json_write_end(&w, '}');
    printf("%s\n", out.data ? out.data : "{}");
    td_buf_deinit(&out);
}

static void print_help(const td_setting *table, int n)
{
    printf("usage: tandem plan --model DIR [settings of tandem serve] [--json]\n\n"
           "What one rank of a server with these settings would take of memory, and whether this machine has it.\n"
           "Reads headers only. Without --context the window is the checkpoint's, or the largest that fits.\n");
    td_settings_help(table, n);
    printf(
        "\nexit code  0 fits   1 the checkpoint cannot be read   2 bad arguments   3 does not fit (largest_window=N)\n"
        "example    tandem plan --model models/demo --world 2 --parallel 8\n");
}

int td_cli_plan(int argc, char **argv)
{
    td_setting table[TD_SETTINGS_MAX];
    td_settings settings;
    td_checkpoint *checkpoint = NULL;
    planned p = { 0 };
    td_error err;
    int n = td_n_serve_settings;
    td_check(n < TD_SETTINGS_MAX);
    memcpy(table, td_serve_settings, (size_t)n * sizeof *table);
    table[n++] =
        (td_setting){ .name = "json", .kind = TD_SETTING_FLAG, .help = "one JSON object instead of the table" };
    if (td_args_help(argc, argv)) {
        print_help(table, n);
        return TD_EXIT_OK;
    }
    td_status status = td_settings_parse(table, n, argc, argv, &settings, &err);
    if (!status) status = td_checkpoint_open(td_settings_text(&settings, "model"), &checkpoint, &err);
    if (!status) status = td_checkpoint_verify(checkpoint, &err);
    if (!status) status = make_plan(&settings, checkpoint, &p, &err);
    td_checkpoint_close(checkpoint);
    if (status) {
        fprintf(stderr, "tandem plan: %s\n", err.text);
        return status == TD_EINVAL ? TD_EXIT_ARGUMENTS : TD_EXIT_FAILED;
    }
    if (td_settings_flag(&settings, "json"))
        print_json(&p);
    else
        print_table(&p);
    return p.fit.fits ? TD_EXIT_OK : TD_EXIT_MEMORY;
}
