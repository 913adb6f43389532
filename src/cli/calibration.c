/* The plain checkpoint runs over the text in engine arithmetic: the rows are then what the served model's experts are
 * given, they have the same bits on every machine, and bf16 holds them without loss. Inputs of all MoE layers and the
 * experts they went to are kept in a file (expert_inputs.h); an expert's Hessian is summed when it is asked for, since
 * all of them at once would be 38 GB a layer for 288 experts of width 4,096. For `down` the activations are computed
 * again from those inputs and the expert's own plain weights, with the operations of the model. */
#include "cli/calibration.h"

#include "cli/expert_inputs.h"
#include "cli/gram.h"
#include "model/model.h"
#include "text/tokenizer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { PATH_CAP = 4096, CHUNK_ROWS = 512, TEXT_BYTES_MAX = 256 << 20 };

struct td_calibration {
    td_calibration_options options;
    td_checkpoint *checkpoint;
    const td_config *config;
    td_ids ids;
    td_hessian_source source;
    int window_tokens;

    /* From the first question on. */
    td_dev *dev;
    td_ops ops;
    td_expert_inputs inputs;
    int64_t first; /* token of the rows that the model is busy with */
    td_gram *gram;
    float *x;          /* [TD_GRAM_ROWS][dim or width] */
    td_bf16 *plain;    /* one matrix */
    td_act *in, *mid;  /* [TD_GRAM_ROWS][dim], [TD_GRAM_ROWS][width] */
    td_act *gate_up;   /* [TD_GRAM_ROWS][2 * width] */
    td_weight w;       /* gate | up of one expert */
    int layer, expert; /* whose input the gram holds; -1: nobody's */
};

/* --- the text --- */

static td_status read_text(const char *path, char **out, size_t *n_bytes, td_error *err)
{
    FILE *file = fopen(path, "rbe");
    struct stat info;
    char *text = NULL;
    td_status status = TD_OK;
    if (!file) return td_fail(err, TD_EIO, "calibration text %s: %s", path, strerror(errno));
    if (fstat(fileno(file), &info) != 0 || !S_ISREG(info.st_mode) || info.st_size > TEXT_BYTES_MAX)
        status =
            td_fail(err, TD_EFORMAT, "calibration text %s: not a file of at most %d MiB", path, TEXT_BYTES_MAX >> 20);
    else if (!(text = malloc((size_t)info.st_size + 1)))
        status = td_fail(err, TD_ENOMEM, "calibration text %s: out of memory", path);
    else if (fread(text, 1, (size_t)info.st_size, file) != (size_t)info.st_size)
        status = td_fail(err, TD_EIO, "calibration text %s: cannot be read whole", path);
    fclose(file);
    if (status) {
        free(text);
        return status;
    }
    *out = text;
    *n_bytes = (size_t)info.st_size;
    return TD_OK;
}

static td_status tokenise(td_calibration *c, td_error *err)
{
    char path[PATH_CAP], *text = NULL;
    size_t n_bytes = 0;
    td_tokenizer *tokenizer = NULL;
    if (snprintf(path, sizeof path, "%s/tokenizer.json", c->options.checkpoint_dir) >= (int)sizeof path)
        return td_fail(err, TD_EINVAL, "%s: path too long", c->options.checkpoint_dir);
    td_status status = read_text(c->options.text_path, &text, &n_bytes, err);
    if (!status) status = td_tokenizer_open(path, &tokenizer, err);
    if (!status) status = td_tokenizer_encode(tokenizer, text, n_bytes, 0, &c->ids, err);
    td_tokenizer_destroy(tokenizer);
    free(text);
    if (status) return status;
    if (c->ids.n == 0) return td_fail(err, TD_EFORMAT, "calibration text %s: is empty", c->options.text_path);
    if ((int64_t)c->ids.n > c->options.tokens_max) c->ids.n = (size_t)c->options.tokens_max;
    return TD_OK;
}

/* --- the model over the text --- */

static int moe_index(const td_config *config, int layer)
{
    int n = 0;
    for (int i = 0; i < layer; i++) n += config->is_moe[i];
    return n;
}

static void keep_rows(void *user, int layer, int n_rows, const float *x)
{
    td_calibration *c = user;
    if (c->config->is_moe[layer])
        td_expert_inputs_put_rows(&c->inputs, moe_index(c->config, layer), c->first, n_rows, x);
}

static void keep_picks(void *user, int layer, int n_rows, int top_k, const int32_t *ids, const float *weights)
{
    td_calibration *c = user;
    (void)weights;
    td_check(top_k == c->inputs.top_k);
    td_expert_inputs_put_picks(&c->inputs, moe_index(c->config, layer), c->first, n_rows, ids);
}

/* Tokens c->first .. + n - 1, which the sequence in slot 0 has reached; the MTP layer needs a next token for each row.
 */
static td_status run_chunk(td_calibration *c, td_model *model, int32_t pos, int n, bool window_ends, td_error *err)
{
    const int32_t *ids = c->ids.data + c->first;
    td_batch batch = { .n_segments = 1, .segments = { { .pos = pos, .n_rows = n, .ids = ids, .chunked = true } } };
    td_mtp_args mtp = { .pos = pos, .n_rows = window_ends ? n - 1 : n, .next_ids = ids + 1 };
    td_status status = td_model_forward(model, &batch, err);
    if (!status && c->config->n_mtp && mtp.n_rows > 0) status = td_model_mtp(model, &mtp, err);
    return status ? status : td_model_commit(model, &n, err);
}

static td_status run_text(td_calibration *c, td_model *model, td_error *err)
{
    int64_t total = (int64_t)c->ids.n;
    int32_t blocks[TD_CALIBRATION_WINDOW / TD_BLOCK];
    for (int i = 0; i < TD_CALIBRATION_WINDOW / TD_BLOCK; i++) blocks[i] = i;
    td_trace trace = { .user = c, .experts = keep_picks, .mlp_input = keep_rows };
    td_model_trace(model, &trace);
    for (int64_t window = 0; window < total; window += c->window_tokens) {
        int n_window = (int)(total - window < c->window_tokens ? total - window : c->window_tokens);
        td_model_slot_reset(model, 0);
        td_model_slot_blocks(model, 0, blocks, (n_window + TD_BLOCK - 1) / TD_BLOCK);
        for (int pos = 0; pos < n_window; pos += CHUNK_ROWS) {
            int n = n_window - pos < CHUNK_ROWS ? n_window - pos : CHUNK_ROWS;
            c->first = window + pos;
            td_status status = run_chunk(c, model, pos, n, pos + n == n_window, err);
            if (status) return status;
            if (c->options.progress) c->options.progress(c->options.progress_user, c->first + n, total);
        }
    }
    return TD_OK;
}

static td_status run_model(td_calibration *c, const td_model_options *options, td_error *err)
{
    td_model_plan plan;
    td_link_options link_options;
    td_link *link = NULL;
    td_model *model = NULL;
    td_status status = td_model_plan_bytes(c->dev, &c->ops, c->checkpoint, options, &plan, err);
    if (status) return status;
    td_link_options_init(&link_options);
    if (link_options.gather_max_bytes < plan.link_gather_bytes) link_options.gather_max_bytes = plan.link_gather_bytes;
    link_options.region_bytes += plan.link_region_bytes;
    status = td_link_open(&link_options, &link, err);
    if (status) return status;
    status = td_model_create(c->dev, &c->ops, link, c->checkpoint, options, NULL, NULL, &model, err);
    if (!status) status = run_text(c, model, err);
    td_model_destroy(model);
    td_link_close(link);
    return status;
}

static td_status alloc_act(td_calibration *c, int width, td_act **out, td_error *err)
{
    void *memory = NULL;
    td_status status = td_dev_alloc(c->dev, td_act_bytes(c->dev, TD_GRAM_ROWS * (size_t)width), &memory, err);
    if (!status) *out = memory;
    return status;
}

static void free_act(td_calibration *c, int width, td_act *memory)
{
    td_dev_free(c->dev, memory, td_act_bytes(c->dev, TD_GRAM_ROWS * (size_t)width));
}

/* What the answers need, first of all the rows. */
static td_status prepare(td_calibration *c, td_error *err)
{
    const td_config *config = c->config;
    int dim = config->hidden, width = config->moe_intermediate, k = dim > width ? dim : width;
    td_model_options options = { .world = 1,
                                 .n_slots = 1,
                                 .n_blocks = TD_CALIBRATION_WINDOW / TD_BLOCK,
                                 .chunk_rows = CHUNK_ROWS,
                                 .context_tokens = c->window_tokens,
                                 .kv = TD_KV_ACT,
                                 .dense = TD_W_BF16,
                                 .head = TD_W_BF16,
                                 .mtp = config->n_mtp > 0 };
    td_dev_limits limits;
    td_model_dev_limits(config, &options, &limits);
    td_status status = td_dev_create_cpu(&limits, c->options.n_threads, false, &c->dev, err);
    if (status) return status;
    td_ops_init(&c->ops, c->dev);
    status = td_expert_inputs_open(c->options.scratch_path, moe_index(config, config->n_layers + config->n_mtp),
                                   (int64_t)c->ids.n, dim, config->top_k, &c->inputs, err);
    if (!status) status = run_model(c, &options, err);
    if (!status) status = td_gram_create(k, c->options.n_threads, &c->gram, err);
    if (!status) status = alloc_act(c, dim, &c->in, err);
    if (!status) status = alloc_act(c, 2 * width, &c->gate_up, err);
    if (!status) status = alloc_act(c, width, &c->mid, err);
    c->w = (td_weight){ .format = TD_W_BF16, .out = 2 * width, .in = dim };
    if (!status) status = td_dev_alloc(c->dev, c->ops.weight_bytes(TD_W_BF16, 2 * width, dim), &c->w.data, err);
    if (status) return status;
    c->x = malloc(TD_GRAM_ROWS * (size_t)k * sizeof *c->x);
    c->plain = malloc((size_t)width * (size_t)dim * sizeof *c->plain);
    return c->x && c->plain ? TD_OK
                            : td_fail(err, TD_ENOMEM, "calibration: no memory for a matrix of %d x %d", dim, width);
}

/* --- answers --- */

/* gate | up of an expert into c->w. */
static td_status fill_weights(td_calibration *c, int layer, int expert, td_error *err)
{
    int dim = c->config->hidden, width = c->config->moe_intermediate;
    for (int p = TD_PROJ_GATE; p <= TD_PROJ_UP; p++) {
        td_expert_matrix m;
        td_status status = td_checkpoint_expert(c->checkpoint, layer, expert, (td_projection)p, &m, err);
        if (!status) status = td_tensor_to_bf16(m.weight, 0, (int64_t)dim * width, c->plain, err);
        if (status) return status;
        status = c->ops.weight_fill(c->dev, &c->w, p * width, width, c->plain, (size_t)dim, 0);
        if (status) return td_fail(err, status, "%s: %s", m.weight->name, td_status_text(status));
    }
    return TD_OK;
}

/* x [n_rows][dim], inputs, becomes [n_rows][width]: what down_proj multiplies. */
static td_status activate(td_calibration *c, int n_rows, td_error *err)
{
    size_t dim = (size_t)c->config->hidden, width = (size_t)c->config->moe_intermediate;
    td_act_from_f32(c->dev, c->in, c->x, (size_t)n_rows * dim);
    td_linear_args linear = {
        .n_rows = n_rows, .w = &c->w, .x = c->in, .x_stride = dim, .y_act = c->gate_up, .y_stride = 2 * width
    };
    td_swiglu_args swiglu = {
        .n_rows = n_rows, .width = (int)width, .limit = c->config->swiglu_limit, .gate_up = c->gate_up, .y = c->mid
    };
    td_status status = c->ops.linear(c->dev, &linear);
    if (!status) status = c->ops.swiglu(c->dev, &swiglu);
    if (status) return td_fail(err, status, "calibration: %s", td_status_text(status));
    td_act_to_f32(c->dev, c->x, c->mid, (size_t)n_rows * width);
    return TD_OK;
}

static td_status sum_rows(td_calibration *c, int layer, int expert, bool down, int k, td_error *err)
{
    int moe = moe_index(c->config, layer);
    int64_t next = 0;
    td_status status = down ? fill_weights(c, layer, expert, err) : TD_OK;
    td_gram_reset(c->gram, k);
    for (int n; !status && (n = td_expert_inputs_take(&c->inputs, moe, expert, &next, TD_GRAM_ROWS, c->x)) > 0;) {
        if (down) status = activate(c, n, err);
        if (!status) td_gram_add(c->gram, c->x, n);
    }
    return status;
}

/* gate and up, which follow each other, share one sum. */
static td_status get_hessian(void *user, int layer, int expert, td_projection projection, int k, float *h, bool *known,
                             td_error *err)
{
    td_calibration *c = user;
    bool down = projection == TD_PROJ_DOWN;
    td_status status = c->gram ? TD_OK : prepare(c, err);
    if (status) return status;
    if (td_expert_inputs_count(&c->inputs, moe_index(c->config, layer), expert) < k) {
        *known = false;
        return TD_OK;
    }
    if (down || c->layer != layer || c->expert != expert) {
        c->layer = -1;
        status = sum_rows(c, layer, expert, down, k, err);
        if (status) return status;
    }
    c->layer = down ? -1 : layer;
    c->expert = expert;
    td_gram_mean(c->gram, h);
    *known = true;
    return TD_OK;
}

/* --- life --- */

td_status td_calibration_create(const td_calibration_options *options, td_calibration **out, td_error *err)
{
    td_calibration *c = calloc(1, sizeof *c);
    if (!c) return td_fail(err, TD_ENOMEM, "calibration: out of memory");
    *c = (td_calibration){ .options = *options, .layer = -1 };
    c->source = (td_hessian_source){ c, get_hessian };
    td_status status = td_checkpoint_open(options->checkpoint_dir, &c->checkpoint, err);
    if (!status) {
        c->config = td_checkpoint_config(c->checkpoint);
        c->window_tokens =
            c->config->max_positions < TD_CALIBRATION_WINDOW ? c->config->max_positions : TD_CALIBRATION_WINDOW;
        status = tokenise(c, err);
    }
    if (status) {
        td_calibration_destroy(c);
        return status;
    }
    *out = c;
    return TD_OK;
}

void td_calibration_destroy(td_calibration *c)
{
    if (!c) return;
    if (c->dev) {
        int dim = c->config->hidden, width = c->config->moe_intermediate;
        free_act(c, dim, c->in);
        free_act(c, 2 * width, c->gate_up);
        free_act(c, width, c->mid);
        td_dev_free(c->dev, c->w.data, c->ops.weight_bytes(TD_W_BF16, 2 * width, dim));
        td_dev_destroy(c->dev);
    }
    free(c->x);
    free(c->plain);
    td_gram_destroy(c->gram);
    td_expert_inputs_close(&c->inputs);
    td_ids_deinit(&c->ids);
    td_checkpoint_close(c->checkpoint);
    free(c);
}

int64_t td_calibration_n_tokens(const td_calibration *c)
{
    return (int64_t)c->ids.n;
}

const td_hessian_source *td_calibration_source(const td_calibration *c)
{
    return &c->source;
}
