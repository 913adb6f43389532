#include "model_support.h"
#include "stream_device.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

void td_rig_defaults(td_rig_options *options, const char *dir)
{
    *options = (td_rig_options){ .dir = dir, .n_threads = 1, .transport = "shm", .port = 29651 };
    options->model = (td_model_options){ .rank = 0,
                                         .world = 1,
                                         .n_slots = 4,
                                         .n_blocks = 16,
                                         .chunk_rows = 512,
                                         .context_tokens = 4096,
                                         .kv = TD_KV_ACT,
                                         .dense = TD_W_BF16,
                                         .head = TD_W_BF16,
                                         .mtp = true,
                                         .n_logits = 512 };
}

static td_status open_link(td_rig *rig, td_error *err)
{
    td_link_options o;
    td_link_options_init(&o);
    o.rank = rig->options.model.rank;
    o.world = rig->options.model.world;
    o.master_host = "127.0.0.1";
    o.port = rig->options.port;
    o.transport = rig->options.transport;
    o.gather_max_bytes = rig->plan.link_gather_bytes > 1 << 20 ? rig->plan.link_gather_bytes : 1 << 20;
    o.region_bytes = rig->plan.link_region_bytes + rig->options.link_extra_bytes;
    return td_link_open(&o, &rig->link, err);
}

static td_status open_parts(td_rig *rig, td_error *err)
{
    const td_rig_options *o = &rig->options;
    td_dev_limits limits;
    td_status status = td_checkpoint_open(o->dir, &rig->ck, err);
    if (status) return status;
    td_model_dev_limits(td_checkpoint_config(rig->ck), &o->model, &limits);
    status = o->stream ? stream_dev_create(&limits, o->n_threads, &rig->dev, &rig->ops, err)
                       : td_dev_create_cpu(&limits, o->n_threads, o->exact_fp32, &rig->dev, err);
    if (status) return status;
    if (!o->stream) td_ops_init(&rig->ops, rig->dev);
    status = td_model_plan_bytes(rig->dev, &rig->ops, rig->ck, &o->model, &rig->plan, err);
    if (!status) status = open_link(rig, err);
    if (!status)
        status = td_model_create(rig->dev, &rig->ops, rig->link, rig->ck, &o->model, NULL, NULL, &rig->model, err);
    return status;
}

td_status td_rig_open(td_rig *rig, const td_rig_options *options, td_error *err)
{
    *rig = (td_rig){ .options = *options };
    td_status status = open_parts(rig, err);
    if (status) td_rig_close(rig);
    return status;
}

void td_rig_close(td_rig *rig)
{
    td_model_destroy(rig->model);
    td_link_close(rig->link);
    td_dev_destroy(rig->dev);
    td_checkpoint_close(rig->ck);
    *rig = (td_rig){ 0 };
}

int td_rig_free_port(void)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t n_bytes = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0), port = 0;
    if (fd < 0) return 0;
    if (bind(fd, (struct sockaddr *)&address, sizeof address) == 0 &&
        getsockname(fd, (struct sockaddr *)&address, &n_bytes) == 0)
        port = ntohs(address.sin_port);
    close(fd);
    return port;
}

const char *td_rig_demo_dir(void)
{
    const char *dir = getenv("TD_DEMO_BF16");
    if (dir && *dir) return dir;
    return access("models/demo/config.json", R_OK) == 0 ? "models/demo" : NULL;
}

void td_rig_slot(td_rig *rig, int slot, int first, int step, int n_blocks)
{
    int32_t blocks[64];
    td_check(n_blocks <= 64);
    for (int i = 0; i < n_blocks; i++) blocks[i] = first + i * step;
    td_model_slot_reset(rig->model, slot);
    td_model_slot_blocks(rig->model, slot, blocks, n_blocks);
}

td_status td_rig_run(td_rig *rig, int slot, const int32_t *ids, int n_rows, bool chunked, bool all, td_error *err)
{
    td_batch batch = { .n_segments = 1 };
    batch.segments[0] = (td_batch_segment){ .slot = slot,
                                            .pos = td_model_slot_pos(rig->model, slot),
                                            .n_rows = n_rows,
                                            .ids = ids,
                                            .chunked = chunked,
                                            .logits_last = true,
                                            .logits_all = all };
    td_status status = td_model_forward(rig->model, &batch, err);
    return status ? status : td_model_commit(rig->model, &n_rows, err);
}

td_status td_rig_prefill(td_rig *rig, int slot, const int32_t *ids, int n, int chunk_rows, td_error *err)
{
    td_status status = TD_OK;
    for (int done = 0; done < n && !status; done += chunk_rows)
        status = td_rig_run(rig, slot, ids + done, n - done < chunk_rows ? n - done : chunk_rows, true, false, err);
    return status;
}

int td_rig_vocab(const td_rig *rig)
{
    return td_model_config(rig->model)->vocab_size;
}

void td_rig_logits(const td_rig *rig, int row, float *out)
{
    int columns = td_model_vocab_shard(rig->model), vocab = td_rig_vocab(rig);
    for (int shard = 0; shard < TD_SHARDS; shard++) {
        const float *logits = td_model_logits(rig->model, shard);
        int first = shard * columns, n = vocab - first < columns ? vocab - first : columns;
        if (logits) memcpy(out + first, logits + (size_t)row * (size_t)columns, (size_t)n * sizeof *out);
    }
}

int32_t td_rig_argmax(const float *logits, int n)
{
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static bool is_end(const td_config *config, int32_t id)
{
    for (int i = 0; i < config->n_eos; i++)
        if (config->eos[i] == id) return true;
    return false;
}

td_status td_rig_greedy(td_rig *rig, int slot, const int32_t *ids, int n, int32_t *out, int cap, int *n_out,
                        td_error *err)
{
    float *logits = (float *)malloc((size_t)td_rig_vocab(rig) * sizeof *logits);
    if (!logits) return td_fail(err, TD_ENOMEM, "out of memory");
    *n_out = 0;
    td_status status = td_rig_prefill(rig, slot, ids, n, rig->options.model.chunk_rows, err);
    while (!status && *n_out < cap) {
        td_rig_logits(rig, 0, logits);
        int32_t id = td_rig_argmax(logits, td_rig_vocab(rig));
        out[(*n_out)++] = id;
        if (is_end(td_model_config(rig->model), id)) break;
        status = td_rig_run(rig, slot, &id, 1, false, false, err);
    }
    free(logits);
    return status;
}
