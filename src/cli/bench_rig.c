/* See bench_rig.h. */
#include "cli/bench_rig.h"

#include <stdlib.h>
#include <string.h>

static td_format format_of(const char *name)
{
    return strcmp(name, "q4") == 0 ? TD_W_Q4 : strcmp(name, "fp8") == 0 ? TD_W_FP8 : TD_W_BF16;
}

static td_model_options options_of(int world, int64_t context_tokens, int chunk_rows, const char *dense)
{
    td_format format = format_of(dense);
    return (td_model_options){ .world = world,
                               .n_slots = 1,
                               .n_blocks = (int)((context_tokens + TD_BLOCK - 1) / TD_BLOCK),
                               .chunk_rows = chunk_rows,
                               .context_tokens = context_tokens,
                               .kv = TD_KV_ACT,
                               .dense = format,
                               .head = format == TD_W_BF16 ? TD_W_BF16 : TD_W_FP8 };
}

static td_status open_link(td_rig *rig, td_error *err)
{
    td_link_options o;
    td_link_options_init(&o);
    if (o.gather_max_bytes < rig->plan.link_gather_bytes) o.gather_max_bytes = rig->plan.link_gather_bytes;
    o.region_bytes += rig->plan.link_region_bytes;
    return td_link_open(&o, &rig->link, err);
}

static td_status load(td_rig *rig, const td_model_options *o, int n_threads, td_error *err)
{
    td_dev_limits limits;
    td_model_dev_limits(td_checkpoint_config(rig->checkpoint), o, &limits);
    td_status status = td_dev_create_cpu(&limits, n_threads, false, &rig->dev, err);
    if (status) return status;
    td_ops_init(&rig->ops, rig->dev);
    status = td_model_plan_bytes(rig->dev, &rig->ops, rig->checkpoint, o, &rig->plan, err);
    if (!status) status = open_link(rig, err);
    if (!status)
        status = td_model_create(rig->dev, &rig->ops, rig->link, rig->checkpoint, o, NULL, NULL, &rig->model, err);
    return status;
}

td_status td_rig_open(const char *dir, int n_threads, int64_t context_tokens, int chunk_rows, const char *dense,
                      td_rig *rig, td_error *err)
{
    *rig = (td_rig){ .chunk_rows = (chunk_rows + TD_GRID - 1) / TD_GRID * TD_GRID, .state = 0x7a6f };
    td_model_options o = options_of(1, context_tokens, rig->chunk_rows, dense);
    td_status status = td_checkpoint_open(dir, &rig->checkpoint, err);
    if (!status) status = td_checkpoint_verify(rig->checkpoint, err);
    if (!status) status = load(rig, &o, n_threads, err);
    if (!status) {
        rig->n_blocks = o.n_blocks;
        rig->ids = malloc((size_t)rig->chunk_rows * sizeof *rig->ids);
        rig->blocks = malloc((size_t)o.n_blocks * sizeof *rig->blocks);
        if (!rig->ids || !rig->blocks) status = td_fail(err, TD_ENOMEM, "out of memory");
    }
    if (!status) td_rig_restart(rig);
    if (status) td_rig_close(rig);
    return status;
}

void td_rig_close(td_rig *rig)
{
    td_model_destroy(rig->model);
    if (rig->link) td_link_close(rig->link);
    td_dev_destroy(rig->dev);
    td_checkpoint_close(rig->checkpoint);
    free(rig->ids);
    free(rig->blocks);
    *rig = (td_rig){ 0 };
}

void td_rig_restart(td_rig *rig)
{
    for (int i = 0; i < rig->n_blocks; i++) rig->blocks[i] = i;
    td_model_slot_reset(rig->model, 0);
    td_model_slot_blocks(rig->model, 0, rig->blocks, rig->n_blocks);
    rig->pos = 0;
}

/* Any ids do: which tokens they are changes the experts that are chosen, and no other cost. */
static int32_t random_id(td_rig *rig)
{
    rig->state = rig->state * 6364136223846793005u + 1442695040888963407u;
    return (int32_t)((rig->state >> 33) % (uint64_t)td_checkpoint_config(rig->checkpoint)->vocab_size);
}

td_status td_rig_forward(td_rig *rig, int n_rows, bool chunked, td_error *err)
{
    for (int i = 0; i < n_rows; i++) rig->ids[i] = random_id(rig);
    td_batch batch = { .n_segments = 1,
                       .segments = { { .pos = rig->pos,
                                       .n_rows = n_rows,
                                       .ids = rig->ids,
                                       .chunked = chunked,
                                       .logits_last = chunked,
                                       .logits_all = !chunked } } };
    return td_model_forward(rig->model, &batch, err);
}

td_status td_rig_commit(td_rig *rig, int n_rows, td_error *err)
{
    td_status status = td_model_commit(rig->model, &n_rows, err);
    if (!status) rig->pos += n_rows;
    return status;
}

td_status td_rig_prompt(td_rig *rig, int n_tokens, td_error *err)
{
    td_status status = TD_OK;
    for (int n; !status && n_tokens > 0; n_tokens -= n) {
        n = n_tokens < rig->chunk_rows ? n_tokens : rig->chunk_rows;
        status = td_rig_forward(rig, n, true, err);
        if (!status) status = td_rig_commit(rig, n, err);
    }
    return status;
}

td_status td_rig_plan(const char *dir, int world, const char *dense, td_model_plan *plan, td_config *config,
                      td_error *err)
{
    td_checkpoint *checkpoint = NULL;
    td_dev *dev = NULL;
    td_ops ops;
    td_dev_limits limits;
    td_model_options o = options_of(world, TD_BLOCK, TD_GRID, dense);
    td_status status = td_checkpoint_open(dir, &checkpoint, err);
    if (!status) status = td_checkpoint_verify(checkpoint, err);
    if (!status) {
        td_model_dev_limits(td_checkpoint_config(checkpoint), &o, &limits);
        status = td_dev_create_cpu(&limits, 1, false, &dev, err);
    }
    if (!status) {
        td_ops_init(&ops, dev);
        status = td_model_plan_bytes(dev, &ops, checkpoint, &o, plan, err);
    }
    if (!status) *config = *td_checkpoint_config(checkpoint);
    td_dev_destroy(dev);
    td_checkpoint_close(checkpoint);
    return status;
}
