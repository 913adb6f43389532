/* tandem info DIR [--json]. Reads headers only, so it answers in a second for 175 GB. A refused config still shows what
 * the files hold: that is when a person needs to see it. */
#include "cli/info.h"

#include "base/json_write.h"
#include "checkpoint/summary.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_SERVED = 0, EXIT_REFUSED = 1, EXIT_ARGUMENTS = 2, PROBLEMS_SHOWN = 20, PROBLEMS_JSON = 1000 };

static const char HELP[] =
    "usage: tandem info DIR [--json]\n"
    "\n"
    "Says what the checkpoint in DIR is, where its bytes are, what one of two ranks holds, and\n"
    "everything that would keep tandem from serving it. Reads config.json and the headers of the\n"
    "safetensors files, no weights: a second, whatever the size.\n"
    "\n"
    "  --json    the same as one JSON object, for scripts\n"
    "  --help    this text\n"
    "\n"
    "Bytes are as stored. \"rank 0\" and \"rank 1\" are what each rank of two reads; a single rank\n"
    "reads everything once. The vision tower lives on rank 0.\n"
    "\n"
    "exit code  0 would be served   1 refused or unreadable   2 bad arguments\n"
    "\n"
    "example    tandem info models/demo\n"
    "           tandem info models/demo --json | jq '.bytes.total'\n";

/* What was found out about a folder. */
typedef struct findings {
    const char *dir;
    td_checkpoint *ck;       /* NULL: not even the files could be opened */
    const td_config *config; /* NULL: refused */
    td_summary summary;      /* valid when config is */
    td_checkpoint *drafter;  /* DIR/drafter; NULL: none */
    char **problems;         /* the first PROBLEMS_JSON */
    int n_problems;          /* all of them */
} findings;

static void add_problem(void *user, const char *text)
{
    findings *f = (findings *)user;
    if (f->n_problems < PROBLEMS_JSON) {
        f->problems[f->n_problems] = strdup(text);
        td_check(f->problems[f->n_problems]);
    }
    f->n_problems++;
}

static int n_kept(const findings *f)
{
    return f->n_problems < PROBLEMS_JSON ? f->n_problems : PROBLEMS_JSON;
}

static void inspect(const char *dir, findings *f)
{
    td_error err, ignored;
    char drafter[4096];
    *f = (findings){ .dir = dir, .problems = calloc(PROBLEMS_JSON, sizeof *f->problems) };
    td_check(f->problems);
    if (td_checkpoint_open(dir, &f->ck, &err)) {
        add_problem(f, err.text);
        if (td_checkpoint_open_tensors(dir, &f->ck, &ignored)) f->ck = NULL;
    } else {
        f->config = td_checkpoint_config(f->ck);
        td_checkpoint_problems(f->ck, add_problem, f);
        td_summary_make(f->ck, &f->summary);
    }
    int n = snprintf(drafter, sizeof drafter, "%s/drafter", dir);
    if (n < 0 || (size_t)n >= sizeof drafter || td_checkpoint_open_tensors(drafter, &f->drafter, &ignored))
        f->drafter = NULL;
}

static void release(findings *f)
{
    td_checkpoint_close(f->drafter);
    td_checkpoint_close(f->ck);
    for (int i = 0; i < n_kept(f); i++) free(f->problems[i]);
    free(f->problems);
}

/* --- text --- */

enum { NUMBER_CAP = 32 };

/* 1,048,576 */
static const char *grouped(uint64_t x, char text[NUMBER_CAP])
{
    char digits[NUMBER_CAP];
    int n = snprintf(digits, sizeof digits, "%" PRIu64, x), at = 0;
    for (int i = 0; i < n; i++) {
        if (i && (n - i) % 3 == 0) text[at++] = ',';
        text[at++] = digits[i];
    }
    text[at] = '\0';
    return text;
}

static const char *sized(uint64_t n_bytes, char text[NUMBER_CAP])
{
    static const char *const UNITS[] = { "B", "KiB", "MiB", "GiB", "TiB" };
    double x = (double)n_bytes;
    int unit = 0;
    for (; x >= 1024 && unit < 4; unit++) x /= 1024;
    snprintf(text, NUMBER_CAP, unit ? "%.2f %s" : "%.0f %s", x, UNITS[unit]);
    return text;
}

/* "3-31 every 4" would be wrong for other models, so the layers are listed. */
static void print_layers(const td_config *c)
{
    int n_dsa = td_config_n_dsa(c), n_moe = td_config_n_moe(c);
    printf("  layers      %d: %d KDA, %d DSA (", c->n_layers, c->n_layers - n_dsa, n_dsa);
    const char *sep = "";
    for (int i = 0; i < c->n_layers; i++)
        if (c->is_dsa[i]) printf("%s%d", sep, i), sep = " ";
    printf(")%s\n", c->n_mtp ? ", and an MTP layer" : "");
    printf("  MLPs        %d dense, %d wide; %d with experts\n", c->n_layers - n_moe, c->intermediate, n_moe);
    printf("  experts     %d of width %d, %d chosen, %d shared\n", c->n_experts, c->moe_intermediate, c->top_k,
           c->n_shared_experts);
}

static void print_config(const findings *f)
{
    const td_config *c = f->config;
    char vocab[NUMBER_CAP], window[NUMBER_CAP];
    print_layers(c);
    printf("  format      ");
    if (f->summary.bits_most == 0)
        printf("plain weights, not quantised\n");
    else if (f->summary.bits_least == f->summary.bits_most)
        printf("routed experts EXL3, %d bits, codebook mcg\n", f->summary.bits_most);
    else
        printf("routed experts EXL3, %d to %d bits, codebook mcg\n", f->summary.bits_least, f->summary.bits_most);
    printf("  widths      hidden %d, vocabulary %s, window up to %s tokens\n", c->hidden,
           grouped((uint64_t)c->vocab_size, vocab), grouped((uint64_t)c->max_positions, window));
    printf("  KDA         %d heads of %d\n", c->kda_heads, c->kda_dim);
    printf("  DSA         %d heads, query and key %d, value %d; latents %d and %d\n", c->n_heads, c->qk_dim, c->v_dim,
           c->q_lora, c->kv_lora);
    printf("  indexer     %d heads of %d, keeps %d tokens in pools of %d\n", c->index_heads, c->index_dim,
           c->index_topk, c->index_kpool);
    if (c->has_vision)
        printf("  vision      %d blocks, width %d, %d heads\n", c->vision.depth, c->vision.hidden, c->vision.n_heads);
    printf("  sampling    temperature %g, top_p %g\n", (double)c->temperature, (double)c->top_p);
}

static void print_cell(const char *name, const td_summary_cell *cell)
{
    char count[NUMBER_CAP], bytes[NUMBER_CAP], rank0[NUMBER_CAP], rank1[NUMBER_CAP];
    if (cell->n_tensors == 0) return;
    printf("  %-24s %9s %14s %14s %14s\n", name, grouped((uint64_t)cell->n_tensors, count), sized(cell->n_bytes, bytes),
           sized(cell->rank_bytes[0], rank0), sized(cell->rank_bytes[1], rank1));
}

static void print_bytes(const findings *f)
{
    char exact[NUMBER_CAP];
    static const td_group ORDER[] = {
        /* what is large or asked about first */
        TD_GROUP_EXPERTS, TD_GROUP_SHARED, TD_GROUP_ROUTER, TD_GROUP_MLP,       TD_GROUP_KDA,    TD_GROUP_DSA,
        TD_GROUP_HYPER,   TD_GROUP_NORMS,  TD_GROUP_HEAD,   TD_GROUP_EMBEDDING, TD_GROUP_VISION,
    };
    const td_summary *s = &f->summary;
    printf("\n  %-24s %9s %14s %14s %14s\n", "", "tensors", "stored", "rank 0", "rank 1");
    for (size_t i = 0; i < sizeof ORDER / sizeof *ORDER; i++) print_cell(td_group_name(ORDER[i]), &s->trunk[ORDER[i]]);
    print_cell("MTP layer", &s->mtp);
    print_cell("not read", &s->unused);
    print_cell("total", &s->total);
    int n_files = td_checkpoint_n_files(f->ck);
    printf("  %s bytes in %d file%s\n", grouped(s->total.n_bytes, exact), n_files, n_files == 1 ? "" : "s");
    uint64_t listed = td_checkpoint_index_bytes(f->ck);
    if (listed && listed != s->total.n_bytes) printf("  the index says %s bytes\n", grouped(listed, exact));
}

static void print_container(const char *what, const td_checkpoint *ck)
{
    char count[NUMBER_CAP], bytes[NUMBER_CAP];
    int n_files = td_checkpoint_n_files(ck);
    printf("  %-11s %s tensors, %s in %d file%s\n", what, grouped(td_checkpoint_count(ck), count),
           sized(td_checkpoint_data_bytes(ck), bytes), n_files, n_files == 1 ? "" : "s");
}

static void print_problems(const findings *f)
{
    if (f->n_problems == 0) {
        printf("\nNothing would be refused.\n");
        return;
    }
    printf("\nRefused, %d problem%s:\n", f->n_problems, f->n_problems == 1 ? "" : "s");
    for (int i = 0; i < n_kept(f) && i < PROBLEMS_SHOWN; i++) printf("  - %s\n", f->problems[i]);
    if (f->n_problems > PROBLEMS_SHOWN)
        printf("  ... and %d more (--json lists them)\n", f->n_problems - PROBLEMS_SHOWN);
}

static void print_text(const findings *f)
{
    printf("%s: %s\n", f->dir, f->config ? "a glm5_next checkpoint" : "not a checkpoint that tandem serves");
    if (f->config) print_config(f);
    if (f->ck && !f->config) print_container("files", f->ck);
    if (f->drafter) print_container("drafter", f->drafter);
    if (f->config) print_bytes(f);
    print_problems(f);
}

/* --- JSON --- */

static void json_cell(td_json_writer *w, const char *name, const td_summary_cell *cell)
{
    td_json_write_key(w, name);
    td_json_write_begin(w, '{');
    td_json_write_member_int(w, "tensors", (int64_t)cell->n_tensors);
    td_json_write_member_int(w, "bytes", (int64_t)cell->n_bytes);
    td_json_write_key(w, "rank_bytes");
    td_json_write_begin(w, '[');
    for (int rank = 0; rank < 2; rank++) td_json_write_int(w, (int64_t)cell->rank_bytes[rank]);
    td_json_write_end(w, ']');
    td_json_write_end(w, '}');
}

/* Numbers of the layers that are marked. */
static void json_layers(td_json_writer *w, const char *name, const td_config *c, const bool *marked)
{
    td_json_write_key(w, name);
    td_json_write_begin(w, '[');
    for (int i = 0; i < c->n_layers; i++)
        if (marked[i]) td_json_write_int(w, i);
    td_json_write_end(w, ']');
}

static void json_config(td_json_writer *w, const td_config *c)
{
    const struct {
        const char *name;
        int value;
    } members[] = {
        { "layers", c->n_layers },
        { "mtp_layers", c->n_mtp },
        { "hidden", c->hidden },
        { "vocab_size", c->vocab_size },
        { "experts", c->n_experts },
        { "experts_chosen", c->top_k },
        { "experts_shared", c->n_shared_experts },
        { "moe_intermediate", c->moe_intermediate },
        { "heads", c->n_heads },
        { "kda_heads", c->kda_heads },
        { "index_heads", c->index_heads },
        { "index_topk", c->index_topk },
        { "max_positions", c->max_positions },
    };
    td_json_write_key(w, "config");
    td_json_write_begin(w, '{');
    for (size_t i = 0; i < sizeof members / sizeof *members; i++)
        td_json_write_member_int(w, members[i].name, members[i].value);
    td_json_write_member_bool(w, "vision", c->has_vision);
    json_layers(w, "dsa_layers", c, c->is_dsa);
    json_layers(w, "moe_layers", c, c->is_moe);
    td_json_write_key(w, "eos_ids");
    td_json_write_begin(w, '[');
    for (int i = 0; i < c->n_eos; i++) td_json_write_int(w, c->eos[i]);
    td_json_write_end(w, ']');
    td_json_write_end(w, '}');
}

static void json_bytes(td_json_writer *w, const td_summary *s)
{
    static const char *const KEYS[TD_GROUP_COUNT] = {
        [TD_GROUP_EMBEDDING] = "embedding",
        [TD_GROUP_HEAD] = "head",
        [TD_GROUP_KDA] = "kda",
        [TD_GROUP_DSA] = "dsa",
        [TD_GROUP_MLP] = "dense_mlp",
        [TD_GROUP_SHARED] = "shared_experts",
        [TD_GROUP_ROUTER] = "routers",
        [TD_GROUP_HYPER] = "hyper_connections",
        [TD_GROUP_NORMS] = "norms",
        [TD_GROUP_MTP] = NULL,
        [TD_GROUP_EXPERTS] = "routed_experts",
        [TD_GROUP_VISION] = "vision",
    };
    td_json_write_key(w, "bytes");
    td_json_write_begin(w, '{');
    for (int g = 0; g < TD_GROUP_COUNT; g++)
        if (KEYS[g]) json_cell(w, KEYS[g], &s->trunk[g]);
    json_cell(w, "mtp", &s->mtp);
    json_cell(w, "mtp_experts", &s->mtp_experts);
    json_cell(w, "unused", &s->unused);
    json_cell(w, "total", &s->total);
    td_json_write_end(w, '}');
}

static void json_container(td_json_writer *w, const char *name, const td_checkpoint *ck)
{
    td_json_write_key(w, name);
    td_json_write_begin(w, '{');
    td_json_write_member_int(w, "tensors", (int64_t)td_checkpoint_count(ck));
    td_json_write_member_int(w, "bytes", (int64_t)td_checkpoint_data_bytes(ck));
    td_json_write_member_int(w, "files", td_checkpoint_n_files(ck));
    td_json_write_end(w, '}');
}

static void print_json(const findings *f)
{
    td_buf buf;
    td_buf_init(&buf, 0);
    td_json_writer w = { .out = &buf };
    td_json_write_begin(&w, '{');
    td_json_write_member_text(&w, "dir", f->dir);
    td_json_write_member_bool(&w, "served", f->n_problems == 0);
    td_json_write_member_int(&w, "n_problems", f->n_problems);
    td_json_write_key(&w, "problems");
    td_json_write_begin(&w, '[');
    for (int i = 0; i < n_kept(f); i++) td_json_write_text(&w, f->problems[i]);
    td_json_write_end(&w, ']');
    if (f->ck) json_container(&w, "container", f->ck);
    if (f->drafter) json_container(&w, "drafter", f->drafter);
    if (f->config) {
        json_config(&w, f->config);
        td_json_write_key(&w, "expert_bits");
        td_json_write_begin(&w, '[');
        td_json_write_int(&w, f->summary.bits_least);
        td_json_write_int(&w, f->summary.bits_most);
        td_json_write_end(&w, ']');
        json_bytes(&w, &f->summary);
    }
    td_json_write_end(&w, '}');
    td_check(!buf.failed);
    puts(buf.data);
    td_buf_deinit(&buf);
}

int td_cli_info(int argc, char **argv)
{
    const char *dir = NULL;
    bool json = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            fputs(HELP, stdout);
            return EXIT_SERVED;
        }
        if (strcmp(argv[i], "--json") == 0) {
            json = true;
        } else if (argv[i][0] == '-' || dir) {
            fprintf(stderr, "tandem info: %s \"%s\"; see tandem info --help\n",
                    argv[i][0] == '-' ? "unknown option" : "a second folder", argv[i]);
            return EXIT_ARGUMENTS;
        } else {
            dir = argv[i];
        }
    }
    if (!dir) {
        fprintf(stderr, "tandem info: which folder? see tandem info --help\n");
        return EXIT_ARGUMENTS;
    }
    findings f;
    inspect(dir, &f);
    if (json)
        print_json(&f);
    else
        print_text(&f);
    int code = f.n_problems == 0 ? EXIT_SERVED : EXIT_REFUSED;
    release(&f);
    return code;
}
