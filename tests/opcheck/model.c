/* The whole model on the GPU: recorded windows against operations called one by one (bits), and against the CPU
 * (errors). One script of windows for all three: prompts of several lengths in chunks, decode and verify windows of one
 * to sixteen rows that keep all rows or some, on both sides of the length where selection begins. Decode rows follow
 * the CPU's best token, so the demo checkpoint writes what it would write; the other ids are random. */
#include "model/model.h"
#include "opcheck.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 3, CONTEXT = 2560, CHUNK = 512, BLOCKS = SLOTS * CONTEXT / TD_BLOCK, WINDOWS = 60, ROWS_MAX = 64 };
enum { ON_CPU, EAGER, RECORDED, SIDES };

typedef struct side {
    td_dev *dev;
    td_ops ops;
    td_link *link;
    td_model *model;
} side;

typedef struct play {
    oc_ctx *oc;
    td_checkpoint *checkpoint;
    side sides[SIDES];
    int32_t ids[SLOTS][CONTEXT], next[SLOTS];
    int n_rows, n_different; /* compared so far; rows whose bits differ between recorded and eager */
    int n_decided, n_parted; /* rows where the CPU's best leads by DECIDED; of those, where the GPU's best is another */
    double *errors;          /* [n_rows] |gpu - cpu| / |cpu| of a row of logits */
} play;

#define DECIDED 0.5f

/* ---- set up ---- */

static td_status open_side(play *p, int which, td_error *err)
{
    side *s = &p->sides[which];
    td_model_options o = { .world = 1,
                           .n_slots = SLOTS,
                           .n_blocks = BLOCKS,
                           .chunk_rows = CHUNK,
                           .context_tokens = CONTEXT,
                           .kv = TD_KV_ACT,
                           .dense = TD_W_BF16,
                           .head = TD_W_BF16,
                           .no_graphs = which == EAGER };
    td_dev_limits limits;
    td_link_options link;
    td_link_options_init(&link);
    td_model_dev_limits(td_checkpoint_config(p->checkpoint), &o, &limits);
    td_status status = which == ON_CPU ? td_dev_create_cpu(&limits, 0, false, &s->dev, err)
                                       : td_dev_create_cuda(&limits, p->oc->gpu_index, &s->dev, err);
    if (!status) td_ops_init(&s->ops, s->dev);
    if (!status) status = td_link_open(&link, &s->link, err);
    if (!status) status = td_model_create(s->dev, &s->ops, s->link, p->checkpoint, &o, NULL, NULL, &s->model, err);
    for (int slot = 0; !status && slot < SLOTS; slot++) {
        int32_t blocks[CONTEXT / TD_BLOCK];
        for (int i = 0; i < CONTEXT / TD_BLOCK; i++) blocks[i] = i * SLOTS + slot; /* sequences lie interleaved */
        td_model_slot_reset(s->model, slot);
        td_model_slot_blocks(s->model, slot, blocks, CONTEXT / TD_BLOCK);
    }
    return status;
}

static void close_all(play *p)
{
    for (int i = 0; i < SIDES; i++) {
        td_model_destroy(p->sides[i].model);
        if (p->sides[i].link) td_link_close(p->sides[i].link);
        td_dev_destroy(p->sides[i].dev);
    }
    td_checkpoint_close(p->checkpoint);
    free(p->errors);
    free(p);
}

/* ---- comparison ---- */

/* Row r of a model's logits, both shards' columns in order; malloced. */
static float *row_of(const play *p, int which, int r)
{
    td_model *m = p->sides[which].model;
    int columns = td_model_vocab_shard(m), vocab = td_checkpoint_config(p->checkpoint)->vocab_size;
    float *row = malloc((size_t)TD_SHARDS * (size_t)columns * sizeof *row);
    td_check(row != NULL && vocab <= TD_SHARDS * columns);
    for (int shard = 0; shard < TD_SHARDS; shard++)
        memcpy(row + shard * columns, td_model_logits(m, shard) + (size_t)r * (size_t)columns,
               (size_t)columns * sizeof *row);
    return row;
}

/* The best id, and by how much it leads. */
static int best_of(const float *row, int n, float *lead)
{
    int best = 0;
    float second = -INFINITY;
    for (int i = 1; i < n; i++) {
        if (row[i] > row[best]) {
            second = row[best];
            best = i;
        } else if (row[i] > second) {
            second = row[i];
        }
    }
    *lead = row[best] - second;
    return best;
}

static int compare_row(play *p, int r)
{
    int n = td_checkpoint_config(p->checkpoint)->vocab_size;
    float lead, gpu_lead, *cpu = row_of(p, ON_CPU, r), *eager = row_of(p, EAGER, r), *recorded = row_of(p, RECORDED, r);
    double off = 0, all = 0;
    for (int i = 0; i < n; i++) {
        off += ((double)recorded[i] - (double)cpu[i]) * ((double)recorded[i] - (double)cpu[i]);
        all += (double)cpu[i] * (double)cpu[i];
    }
    int best = best_of(cpu, n, &lead);
    p->errors[p->n_rows++] = sqrt(off / all);
    p->n_different += memcmp(eager, recorded, (size_t)n * sizeof *eager) != 0;
    p->n_decided += lead >= DECIDED;
    p->n_parted += lead >= DECIDED && best_of(recorded, n, &gpu_lead) != best;
    free(cpu);
    free(eager);
    free(recorded);
    return best;
}

/* ---- the script ---- */

/* Runs the batch on all three, keeps keep[i] rows of each segment, and sets every slot's next token. */
static td_status window(play *p, td_batch *batch, const int *keep, td_error *err)
{
    int row = 0;
    for (int which = 0; which < SIDES; which++) {
        td_status status = td_model_forward(p->sides[which].model, batch, err);
        if (!status) status = td_model_commit(p->sides[which].model, keep, err);
        if (status) return status;
    }
    for (int i = 0; i < batch->n_segments; i++) {
        const td_batch_segment *s = &batch->segments[i];
        int n = s->logits_all ? s->n_rows : 1;
        for (int r = 0; r < n; r++) {
            int best = compare_row(p, row++);
            if (r == (s->logits_all ? keep[i] : n) - 1) p->next[s->slot] = best;
        }
    }
    return TD_OK;
}

static td_status prompt(play *p, int slot, int n_tokens, td_error *err)
{
    int vocab = td_checkpoint_config(p->checkpoint)->vocab_size;
    for (int at = 0; at < n_tokens; at += CHUNK) {
        int n = n_tokens - at < CHUNK ? n_tokens - at : CHUNK;
        for (int i = 0; i < n; i++) p->ids[slot][i] = oc_below(p->oc, vocab);
        td_batch batch = { .n_segments = 1,
                           .segments = { { .slot = slot,
                                           .pos = at,
                                           .n_rows = n,
                                           .ids = p->ids[slot],
                                           .chunked = true,
                                           .logits_last = true } } };
        td_status status = window(p, &batch, &n, err);
        if (status) return status;
    }
    return TD_OK;
}

/* Rows of some slots: the token that follows, then random ones as drafts; some of them are kept. */
static td_status decode(play *p, td_error *err)
{
    td_batch batch = { 0 };
    int keep[SLOTS], vocab = td_checkpoint_config(p->checkpoint)->vocab_size, most = oc_below(p->oc, 3) ? 1 : 16;
    for (int slot = 0; slot < SLOTS; slot++) {
        if (oc_below(p->oc, 3) == 0 && (slot || batch.n_segments)) continue;
        int n = 1 + oc_below(p->oc, most);
        p->ids[slot][0] = p->next[slot];
        for (int i = 1; i < n; i++) p->ids[slot][i] = oc_below(p->oc, vocab);
        keep[batch.n_segments] = 1 + oc_below(p->oc, n);
        batch.segments[batch.n_segments++] = (td_batch_segment){ .slot = slot,
                                                                 .pos = td_model_slot_pos(p->sides[ON_CPU].model, slot),
                                                                 .n_rows = n,
                                                                 .ids = p->ids[slot],
                                                                 .logits_all = true };
    }
    return window(p, &batch, keep, err);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Single rows can part: a bf16 tie in a router chooses another expert (docs/cuda.md). So the median has a bound, and
 * the share of rows that part where the CPU was decided. */
static void judge(play *p)
{
    oc_ctx *oc = p->oc;
    oc_begin(oc, "recorded and eager windows, bits");
    if (p->n_different) oc_fail(oc, "%d of %d rows differ", p->n_different, p->n_rows);
    qsort(p->errors, (size_t)p->n_rows, sizeof *p->errors, ascending);
    double median = p->errors[p->n_rows / 2], most = p->errors[p->n_rows - 1];
    oc_begin(oc, "median error of logits against the CPU");
    oc_measured(oc, median, 0.02);
    if (!(median <= 0.02)) oc_fail(oc, "%.3g, largest %.3g, of %d rows", median, most, p->n_rows);
    double parted = (double)p->n_parted / (p->n_decided ? p->n_decided : 1);
    oc_begin(oc, "decided rows with another best token");
    oc_measured(oc, parted, 0.02);
    if (!(parted <= 0.02)) oc_fail(oc, "%d of %d; largest error %.3g", p->n_parted, p->n_decided, most);
    oc_end(oc);
}

void oc_model(oc_ctx *oc)
{
    static const int prompts[SLOTS] = { 1, 255, 700 };
    td_error err = { 0 };
    play *p = calloc(1, sizeof *p);
    td_check(p != NULL);
    p->oc = oc;
    p->errors = malloc((WINDOWS * ROWS_MAX + SLOTS * 2) * sizeof *p->errors);
    td_check(p->errors != NULL);
    oc_case(oc, "%s, %d windows", oc->model_dir, WINDOWS);
    td_status status = td_checkpoint_open(oc->model_dir, &p->checkpoint, &err);
    for (int i = 0; !status && i < SIDES; i++) status = open_side(p, i, &err);
    for (int slot = 0; !status && slot < SLOTS; slot++) status = prompt(p, slot, prompts[slot], &err);
    for (int i = 0; !status && i < WINDOWS; i++) status = decode(p, &err);
    oc_begin(oc, "the script runs");
    if (status) oc_fail(oc, "%s", err.text);
    oc_end(oc);
    if (!status) judge(p);
    close_all(p);
    oc_done(oc);
}
