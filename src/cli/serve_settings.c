/* See serve_settings.h. */
#include "cli/serve_settings.h"

#include "cli/args.h"

#include <stdio.h>
#include <string.h>

enum { MAX_CONTEXT = 1048576 };

const td_setting td_serve_settings[] = {
    { .name = "model",
      .kind = TD_SETTING_TEXT,
      .min = 1,
      .required = true,
      .value = "DIR",
      .group = "Checkpoint",
      .help = "folder with config.json, tokenizer.json and the safetensors files" },
    { .name = "name",
      .kind = TD_SETTING_TEXT,
      .fallback = "",
      .value = "ID",
      .help = "model id of the API; default: the folder's name" },
    { .name = "alias",
      .kind = TD_SETTING_LIST,
      .min = 1,
      .value = "ID",
      .help = "a further name of the model; may be given several times" },

    { .name = "rank",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = 1,
      .value = "N",
      .group = "Ranks",
      .help = "which rank this process is" },
    { .name = "world",
      .kind = TD_SETTING_INT,
      .fallback = "1",
      .min = 1,
      .max = 2,
      .value = "N",
      .help = "number of ranks",
      .same_on_ranks = true },
    { .name = "master",
      .kind = TD_SETTING_TEXT,
      .fallback = "127.0.0.1",
      .value = "ADDRESS",
      .help = "rank 0's address on the link" },
    { .name = "master-port",
      .kind = TD_SETTING_INT,
      .fallback = "29551",
      .min = 1,
      .max = 65535,
      .value = "PORT",
      .help = "control port of rank 0, on the link only" },
    { .name = "peer",
      .kind = TD_SETTING_TEXT,
      .fallback = "",
      .value = "ADDRESS",
      .help = "rank 0: take the other rank from this address only" },
    { .name = "transport",
      .kind = TD_SETTING_CHOICE,
      .fallback = "auto",
      .choices = "auto|shm|tcp|rc",
      .value = "NAME",
      .help = "how the ranks exchange",
      .same_on_ranks = true },
    { .name = "net-devices",
      .kind = TD_SETTING_TEXT,
      .fallback = "",
      .value = "LIST",
      .help = "network devices of the link; default: all" },
    { .name = "wait-timeout-s",
      .kind = TD_SETTING_INT,
      .fallback = "600",
      .min = 1,
      .max = 86400,
      .value = "S",
      .help = "how long to wait for the other rank at start" },
    { .name = "peer-timeout-s",
      .kind = TD_SETTING_INT,
      .fallback = "120",
      .min = 0,
      .max = 86400,
      .value = "S",
      .help = "a silent peer is lost after this; 0: never" },
    { .name = "late-timeout-s",
      .kind = TD_SETTING_INT,
      .fallback = "300",
      .min = 1,
      .max = 3600,
      .value = "S",
      .help = "a peer that lives but does not answer an exchange fails after this" },

    { .name = "host",
      .kind = TD_SETTING_TEXT,
      .fallback = "127.0.0.1",
      .value = "ADDRESS",
      .group = "API (rank 0)",
      .help = "address to bind; 0.0.0.0 for all" },
    { .name = "port",
      .kind = TD_SETTING_INT,
      .fallback = "8888",
      .min = 0,
      .max = 65535,
      .value = "PORT",
      .help = "port of the API; 0: any free one, printed" },
    { .name = "api-key",
      .kind = TD_SETTING_LIST,
      .min = 1,
      .value = "KEY",
      .help = "require this key; may be given several times (also TANDEM_API_KEYS, comma-separated)" },
    { .name = "api-key-file",
      .kind = TD_SETTING_TEXT,
      .fallback = "",
      .value = "PATH",
      .help = "keys, one a line, optionally 'label: key'; read again when it changes" },
    { .name = "metrics-open", .kind = TD_SETTING_FLAG, .help = "/metrics without a key" },
    { .name = "strict-model", .kind = TD_SETTING_FLAG, .help = "refuse unknown model names instead of serving them" },
    { .name = "no-cors", .kind = TD_SETTING_FLAG, .help = "send no CORS headers" },
    { .name = "keepalive-s",
      .kind = TD_SETTING_REAL,
      .fallback = "15",
      .min = 0,
      .max = 3600,
      .value = "S",
      .help = "comment on silent streams after this; 0: never" },
    { .name = "reasoning-field",
      .kind = TD_SETTING_CHOICE,
      .fallback = "reasoning_content",
      .choices = "reasoning_content|both",
      .value = "NAME",
      .help = "member that carries reasoning" },

    { .name = "context",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = MAX_CONTEXT,
      .value = "TOKENS",
      .group = "Serving",
      .help = "window: prompt and reply together; 0: the model's, or the largest that fits",
      .same_on_ranks = true },
    { .name = "parallel",
      .kind = TD_SETTING_INT,
      .fallback = "4",
      .min = 1,
      .max = 16,
      .value = "N",
      .help = "requests that run at once",
      .same_on_ranks = true },
    { .name = "max-queued",
      .kind = TD_SETTING_INT,
      .fallback = "64",
      .min = 0,
      .max = 100000,
      .value = "N",
      .help = "requests that may wait beside them; one more gets 429" },
    { .name = "max-tokens",
      .kind = TD_SETTING_INT,
      .fallback = "32768",
      .min = 1,
      .max = MAX_CONTEXT,
      .value = "TOKENS",
      .help = "reply budget of a request that names none" },
    { .name = "temperature",
      .kind = TD_SETTING_REAL,
      .fallback = "-1",
      .min = -1,
      .max = 2,
      .value = "T",
      .help = "default temperature; -1: the checkpoint's" },
    { .name = "top-p",
      .kind = TD_SETTING_REAL,
      .fallback = "-1",
      .min = -1,
      .max = 1,
      .value = "P",
      .help = "default top_p; -1: the checkpoint's" },
    { .name = "reasoning-effort",
      .kind = TD_SETTING_CHOICE,
      .fallback = "max",
      .choices = "none|low|high|max",
      .value = "NAME",
      .help = "default effort of requests that name none" },
    { .name = "seed-salt",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = 9007199254740992.0,
      .value = "N",
      .help = "changes every reply that is sampled without a seed" },

    { .name = "backend",
      .kind = TD_SETTING_CHOICE,
      .fallback = "auto",
      .choices = "auto|cpu|cuda",
      .value = "NAME",
      .group = "Engine",
      .help = "where the model runs",
      .same_on_ranks = true },
    { .name = "gpu",
      .kind = TD_SETTING_TEXT,
      .fallback = "0",
      .value = "N[,M]",
      .help = "which GPU, by the driver's numbering; two: rank 0's and rank 1's" },
    { .name = "kv",
      .kind = TD_SETTING_CHOICE,
      .fallback = "bf16",
      .choices = "bf16|fp8",
      .value = "FORMAT",
      .help = "rows of the attention cache",
      .same_on_ranks = true },
    { .name = "dense",
      .kind = TD_SETTING_CHOICE,
      .fallback = "bf16",
      .choices = "bf16|q4|fp8",
      .value = "FORMAT",
      .help = "dense weights in memory",
      .same_on_ranks = true },
    { .name = "pool-tokens",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = 1 << 30,
      .value = "TOKENS",
      .help = "KV pool shared by all requests; 0: one window",
      .same_on_ranks = true },
    { .name = "chunk-rows",
      .kind = TD_SETTING_INT,
      .fallback = "512",
      .min = 64,
      .max = 8192,
      .value = "ROWS",
      .help = "rows of a prompt chunk, a multiple of 64",
      .same_on_ranks = true },
    { .name = "threads",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = 256,
      .value = "N",
      .help = "threads of the CPU backend; 0: all cores" },
    { .name = "memory-reserve-gib",
      .kind = TD_SETTING_REAL,
      .fallback = "1",
      .min = 0,
      .max = 1024,
      .value = "GIB",
      .help = "memory left alone when deciding what fits" },

    { .name = "check-args",
      .kind = TD_SETTING_FLAG,
      .group = "Other",
      .help = "check settings, checkpoint and GPU, then end" },
    { .name = "check-layers",
      .kind = TD_SETTING_FLAG,
      .help = "debug: compare the ranks after every layer",
      .same_on_ranks = true },
    { .name = "fp32",
      .kind = TD_SETTING_FLAG,
      .help = "debug: no rounding to bf16 between operations",
      .same_on_ranks = true },
    { .name = "log-level",
      .kind = TD_SETTING_CHOICE,
      .fallback = "info",
      .choices = "debug|info|warn|error",
      .value = "LEVEL",
      .help = "least important lines to write" },
};
const int td_n_serve_settings = sizeof td_serve_settings / sizeof *td_serve_settings;

static td_format format_of(const char *name)
{
    return strcmp(name, "q4") == 0 ? TD_W_Q4 : strcmp(name, "fp8") == 0 ? TD_W_FP8 : TD_W_BF16;
}

void td_serve_set_context(td_serve_shape *shape, const td_settings *settings, int32_t context_tokens)
{
    int64_t pool = td_settings_int(settings, "pool-tokens");
    if (pool == 0) pool = context_tokens;
    shape->context_tokens = context_tokens;
    shape->model.context_tokens = context_tokens;
    shape->model.n_blocks = (int)((pool + TD_BLOCK - 1) / TD_BLOCK);
}

td_status td_serve_gpus(const td_settings *settings, int64_t gpus[TD_SHARDS], td_error *err)
{
    int n = 0;
    td_status status = td_args_numbers("gpu", td_settings_text(settings, "gpu"), 0, 63, TD_SHARDS, gpus, &n, err);
    for (int rank = n; !status && rank < TD_SHARDS; rank++) gpus[rank] = gpus[0];
    return status;
}

/* `auto` takes a GPU when there is one that this build can use; `cuda` refuses without. */
static td_status choose_backend(const td_settings *settings, td_serve_shape *shape, td_error *err)
{
    const char *wanted = td_settings_text(settings, "backend");
    td_error why;
    int64_t gpus[TD_SHARDS];
    td_status status = td_serve_gpus(settings, gpus, err);
    if (status || strcmp(wanted, "cpu") == 0) return status;
    shape->gpu_is_shared = shape->model.world > 1 && gpus[0] == gpus[1];
    status = td_gpu_query((int)gpus[shape->model.rank], &shape->gpu, &why);
    if (status == TD_OK && shape->exact_fp32)
        return td_fail(err, TD_EINVAL, "--fp32 is a mode of the CPU: --backend cpu");
    if (status == TD_EINVAL) return td_fail(err, status, "--gpu: %s", why.text);
    if (status == TD_OK)
        shape->backend = TD_CUDA;
    else if (strcmp(wanted, "cuda") == 0)
        return td_fail(err, status, "--backend cuda: %s; --backend cpu does without", why.text);
    else
        snprintf(shape->backend_note, sizeof shape->backend_note, "%.250s", why.text);
    return TD_OK;
}

td_status td_serve_shape_of(const td_settings *settings, const td_config *config, td_serve_shape *out, td_error *err)
{
    int64_t context = td_settings_int(settings, "context");
    int chunk = (int)td_settings_int(settings, "chunk-rows");
    if (context > config->max_positions)
        return td_fail(err, TD_EINVAL, "--context: %lld is more than the checkpoint's %d (max_position_embeddings)",
                       (long long)context, config->max_positions);
    if (context > 0 && context < 64)
        return td_fail(err, TD_EINVAL, "--context: %lld is too short; at least 64", (long long)context);
    if (td_settings_real(settings, "top-p") == 0)
        return td_fail(err, TD_EINVAL, "--top-p: 0 leaves no token; above 0, or -1 for the checkpoint's");
    if (chunk % TD_GRID) return td_fail(err, TD_EINVAL, "--chunk-rows: %d is not a multiple of %d", chunk, TD_GRID);
    if (context == 0) context = config->max_positions < MAX_CONTEXT ? config->max_positions : MAX_CONTEXT;
    td_format dense = format_of(td_settings_text(settings, "dense"));
    *out = (td_serve_shape){
        .model = { .rank = (int)td_settings_int(settings, "rank"),
                   .world = (int)td_settings_int(settings, "world"),
                   .n_slots = (int)td_settings_int(settings, "parallel"),
                   .chunk_rows = chunk,
                   .kv = strcmp(td_settings_text(settings, "kv"), "fp8") == 0 ? TD_KV_FP8 : TD_KV_ACT,
                   .dense = dense,
                   .head = dense == TD_W_BF16 ? TD_W_BF16 : TD_W_FP8,
                   .check_layers = td_settings_flag(settings, "check-layers") },
        .exact_fp32 = td_settings_flag(settings, "fp32"),
        .n_threads = (int)td_settings_int(settings, "threads"),
        .reserve_bytes = (size_t)(td_settings_real(settings, "memory-reserve-gib") * 0x1p30),
    };
    td_serve_set_context(out, settings, (int32_t)context);
    return choose_backend(settings, out, err);
}

td_status td_serve_device(const td_serve_shape *shape, const td_config *config, td_dev **out, td_error *err)
{
    td_dev_limits limits;
    td_model_dev_limits(config, &shape->model, &limits);
    if (shape->backend == TD_CUDA) return td_dev_create_cuda(&limits, shape->gpu.index, out, err);
    return td_dev_create_cpu(&limits, shape->n_threads, shape->exact_fp32, out, err);
}
