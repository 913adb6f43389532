/* tandem serve: one rank, from settings to a clean exit.
 *
 * Order: settings, checkpoint and memory plan first (everything that can be refused cheaply), then the API in the state
 * "loading", the pair, the weights, the engine. SIGTERM and SIGINT end both ranks: rank 0 lets running replies finish
 * for a moment, then tells rank 1. The main thread loads; afterwards it waits for signals (rank 0) or follows (rank 1).
 */
#include "base/clock.h"
#include "base/hash.h"
#include "base/log.h"
#include "cli/cli.h"
#include "cli/serve_memory.h"
#include "engine/engine.h"
#include "server/server.h"
#include "text/chat_encode.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { STOP_GRACE_S = 10, LOG_STEP_MS = 1000, ALIASES_MAX = 16, KEYS_MAX = 64 };

typedef struct serving {
    td_settings settings;
    td_serve_shape shape;
    td_serve_fit fit;
    td_checkpoint *checkpoint;
    td_tokenizer *tokenizer;
    td_dev *dev;
    td_ops ops;
    td_link *link;
    td_model *model;
    td_engine *engine;
    td_server *server;
    int rank, world;
    int32_t n_ids; /* ids the tokenizer knows */
    int64_t start_ns, load_ns, last_log_ns;
    atomic_bool stop; /* a signal came */
    atomic_bool link_is_open;
    atomic_bool serves; /* rank 0 takes requests: it is asked to stop through `stop`, not through the link */
    td_server *_Atomic keyed_server; /* whose keys SIGHUP reads again */
    pthread_t signals;
    bool signals_run;
    atomic_bool signals_end; /* SIGUSR1 is ours: without this it means nothing */
} serving;

static void signal_set(sigset_t *set)
{
    static const int signals[] = { SIGTERM, SIGINT, SIGHUP, SIGUSR1 };
    sigemptyset(set);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) sigaddset(set, signals[i]);
}

/* Before rank 0 serves, and on rank 1 always, the main thread may wait for the other rank: an announced stop ends that
 * wait on both. */
static void on_stop_signal(serving *s, int signal_number)
{
    td_log(TD_LOG_INFO, "serve", "%s: stopping", signal_number == SIGTERM ? "SIGTERM" : "SIGINT");
    atomic_store(&s->stop, true);
    if (!atomic_load(&s->serves) && atomic_load(&s->link_is_open)) td_link_announce_stop(s->link);
}

/* Signals arrive on a thread of their own, where ordinary code may run. */
static void *watch_signals(void *arg)
{
    serving *s = arg;
    sigset_t set;
    signal_set(&set);
    for (int signal_number; sigwait(&set, &signal_number) == 0;) {
        td_server *server = atomic_load(&s->keyed_server);
        if (signal_number == SIGUSR1 && atomic_load(&s->signals_end)) return NULL;
        if (signal_number == SIGHUP && server) td_server_reload_keys(server);
        if (signal_number == SIGTERM || signal_number == SIGINT) on_stop_signal(s, signal_number);
    }
    return NULL;
}

static td_status start_signals(serving *s, td_error *err)
{
    sigset_t set;
    signal_set(&set);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    if (pthread_create(&s->signals, NULL, watch_signals, s))
        return td_fail(err, TD_ENOMEM, "the signal thread cannot be started");
    s->signals_run = true;
    return TD_OK;
}

/* They stay blocked: what comes now is too late to matter. */
static void end_signals(serving *s)
{
    if (!s->signals_run) return;
    atomic_store(&s->signals_end, true);
    pthread_kill(s->signals, SIGUSR1);
    pthread_join(s->signals, NULL);
    s->signals_run = false;
}

static double gib(size_t n_bytes)
{
    return (double)n_bytes * 0x1p-30;
}

static double mib(size_t n_bytes)
{
    return (double)n_bytes * 0x1p-20;
}

/* "3.10 GiB" or, where host and GPU are two places, "3.10 GiB of GPU 0 and 0.04 GiB of the host". */
static const char *memory_text(const serving *s, const td_serve_memory *memory, char *out, size_t cap)
{
    if (td_serve_one_memory(&s->shape))
        snprintf(out, cap, "%.2f GiB", gib(memory->device_bytes + memory->host_bytes));
    else
        snprintf(out, cap, "%.2f GiB of GPU %d and %.2f GiB of the host", gib(memory->device_bytes), s->shape.gpu.index,
                 gib(memory->host_bytes));
    return out;
}

/* The largest window that fits goes to stdout, where scripts read it. */
static void print_largest(int32_t context_tokens)
{
    printf("largest_window=%d\n", context_tokens);
    fflush(stdout);
}

/* What this rank takes, against what the machine has. */
static td_status fit(serving *s, td_error *err)
{
    char need[96], available[96];
    int32_t asked = s->shape.context_tokens;
    td_status status = td_serve_fit_shape(&s->shape, &s->settings, s->checkpoint, &s->fit, err);
    if (status) return status;
    const td_model_plan *plan = &s->fit.need.plan;
    memory_text(s, &s->fit.need.memory, need, sizeof need);
    memory_text(s, &s->fit.available, available, sizeof available);
    if (!s->fit.fits) {
        print_largest(s->fit.largest);
        return td_fail(err, TD_ENOMEM,
                       "%s are needed, %s are free for this rank beside the reserve of %.2f GiB; the largest window "
                       "that fits, with a pool for one window, is %d tokens (--context, --pool-tokens)",
                       need, available, gib(s->shape.reserve_bytes), s->fit.largest);
    }
    if (s->shape.context_tokens < asked)
        td_log(TD_LOG_INFO, "serve", "window: %d tokens, the largest that fits", s->shape.context_tokens);
    td_log(TD_LOG_INFO, "serve", "memory: %s at most (weights %.1f MiB, KV pool %.1f MiB for %d tokens), %s free", need,
           mib(plan->experts_bytes + plan->dense_bytes + plan->embed_bytes + plan->head_bytes + plan->mtp_bytes),
           mib(plan->kv_bytes), s->shape.model.n_blocks * TD_BLOCK, available);
    return TD_OK;
}

static const char *last_part(const char *path, char *out, size_t cap)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    size_t from = n;
    while (from > 0 && path[from - 1] != '/') from--;
    snprintf(out, cap, "%.*s", (int)(n - from), path + from);
    return out;
}

static const char *nonempty(const char *text)
{
    return text && *text ? text : NULL;
}

static td_status start_server(serving *s, td_error *err)
{
    const char *aliases[ALIASES_MAX], *keys[KEYS_MAX];
    char folder[256];
    const td_settings *set = &s->settings;
    const char *dir = td_settings_text(set, "model");
    td_server_options o = { .host = td_settings_text(set, "host"),
                            .port = (int)td_settings_int(set, "port"),
                            .model_id = nonempty(td_settings_text(set, "name")),
                            .checkpoint = dir,
                            .backend = s->shape.backend == TD_CUDA ? "cuda" : "cpu",
                            .version = TD_VERSION,
                            .strict_model = td_settings_flag(set, "strict-model"),
                            .world = s->world,
                            .tokenizer = s->tokenizer,
                            .config = td_checkpoint_config(s->checkpoint),
                            .context_tokens = s->shape.context_tokens,
                            .temperature = td_settings_real(set, "temperature"),
                            .top_p = td_settings_real(set, "top-p"),
                            .max_tokens = (int)td_settings_int(set, "max-tokens"),
                            .keys_env = getenv("TANDEM_API_KEYS"),
                            .keys_file = nonempty(td_settings_text(set, "api-key-file")),
                            .metrics_open = td_settings_flag(set, "metrics-open"),
                            .no_cors = td_settings_flag(set, "no-cors"),
                            .reasoning_both = strcmp(td_settings_text(set, "reasoning-field"), "both") == 0,
                            .keepalive_s = td_settings_real(set, "keepalive-s") };
    if (!o.model_id) o.model_id = last_part(dir, folder, sizeof folder);
    if (o.keepalive_s == 0.0) o.keepalive_s = -1.0; /* the setting's 0 is "never" */
    o.aliases = aliases;
    o.n_aliases = td_settings_list(set, "alias", aliases, ALIASES_MAX);
    o.keys = keys;
    o.n_keys = td_settings_list(set, "api-key", keys, KEYS_MAX);
    const char *effort = td_settings_text(set, "reasoning-effort");
    td_status status = td_chat_effort_parse(effort, strlen(effort), &o.chat.effort);
    if (status) return status;
    if ((status = td_server_create(&o, &s->server, err))) return status;
    atomic_store(&s->keyed_server, s->server);
    td_log(TD_LOG_INFO, "serve", "API on %s port %d, loading", o.host, td_server_port(s->server));
    return TD_OK;
}

/* Every rank needs the number of ids (the vocabulary's padding is never sampled); only rank 0 needs the rest. */
static td_status open_tokenizer(serving *s, td_error *err)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/tokenizer.json", td_settings_text(&s->settings, "model"));
    td_status status = td_tokenizer_open(path, &s->tokenizer, err);
    if (!status && td_chat_reserve_media(s->tokenizer)) status = td_fail(err, TD_EFORMAT, "%s: media tokens", path);
    if (status) return status;
    s->n_ids = td_tokenizer_n_ids(s->tokenizer);
    int vocab = td_checkpoint_config(s->checkpoint)->vocab_size;
    if (s->n_ids > vocab)
        return td_fail(err, TD_EFORMAT, "%s: ids up to %d, but the model has %d (vocab_size)", path, s->n_ids - 1,
                       vocab);
    if (s->rank == 0) return TD_OK;
    td_tokenizer_destroy(s->tokenizer);
    s->tokenizer = NULL;
    return TD_OK;
}

/* Hash of what decides the weights' layout: two ranks with different files must not compute together. */
static uint64_t checkpoint_hash(const td_checkpoint *checkpoint)
{
    uint64_t hash = td_config_hash(td_checkpoint_config(checkpoint));
    for (size_t i = 0; i < td_checkpoint_count(checkpoint); i++) {
        const td_tensor *tensor = td_checkpoint_at(checkpoint, i);
        hash = td_fnv1a(hash, tensor->name, strlen(tensor->name));
        hash = td_fnv1a(hash, &tensor->n_bytes, sizeof tensor->n_bytes);
    }
    return hash;
}

/* Hash of the running program: two ranks of different builds must not compute together. */
static void build_hash(char hex[2 * TD_SHA256_BYTES + 1])
{
    uint8_t digest[TD_SHA256_BYTES], buf[1 << 16];
    td_sha256 *sha = td_sha256_create();
    FILE *file = fopen("/proc/self/exe", "rb");
    if (sha && file)
        for (size_t n; (n = fread(buf, 1, sizeof buf, file)) > 0;) td_sha256_update(sha, buf, n);
    if (file) fclose(file);
    memset(digest, 0, sizeof digest);
    if (sha) td_sha256_finish(sha, digest);
    td_hex(digest, sizeof digest, hex);
}

static bool keep_waiting(void *arg)
{
    serving *s = arg;
    return !atomic_load(&s->stop);
}

static td_status open_link(serving *s, td_error *err)
{
    char settings[4096], build[2 * TD_SHA256_BYTES + 1], checkpoint[32];
    size_t n = td_settings_canonical(&s->settings, settings, sizeof settings);
    td_check(n < sizeof settings);
    snprintf(settings + n, sizeof settings - n, "window=%d\npool_blocks=%d\ntokenizer_ids=%d\nruns_on=%s\n",
             s->shape.context_tokens, s->shape.model.n_blocks, s->n_ids, s->shape.backend == TD_CUDA ? "cuda" : "cpu");
    snprintf(checkpoint, sizeof checkpoint, "%016llx", (unsigned long long)checkpoint_hash(s->checkpoint));
    build_hash(build);
    td_link_options o;
    td_link_options_init(&o);
    o.rank = s->rank;
    o.world = s->world;
    o.master_host = td_settings_text(&s->settings, "master");
    o.port = (int)td_settings_int(&s->settings, "master-port");
    o.peer_host = nonempty(td_settings_text(&s->settings, "peer"));
    o.transport = td_settings_text(&s->settings, "transport");
    o.net_devices = nonempty(td_settings_text(&s->settings, "net-devices"));
    o.settings = settings;
    o.build = build;
    o.checkpoint = checkpoint;
    o.keep_waiting = keep_waiting;
    o.keep_waiting_arg = s;
    o.wait_ms = 1000 * (int)td_settings_int(&s->settings, "wait-timeout-s");
    o.peer_timeout_ms = 1000 * (int)td_settings_int(&s->settings, "peer-timeout-s");
    o.late_ms = 1000 * (int)td_settings_int(&s->settings, "late-timeout-s");
    size_t engine_region, engine_gather;
    td_engine_link_bytes(td_checkpoint_config(s->checkpoint), &engine_region, &engine_gather);
    if (o.gather_max_bytes < s->fit.need.plan.link_gather_bytes)
        o.gather_max_bytes = s->fit.need.plan.link_gather_bytes;
    if (o.gather_max_bytes < engine_gather) o.gather_max_bytes = engine_gather;
    o.region_bytes = s->fit.need.plan.link_region_bytes + engine_region;
    td_status status = td_link_open(&o, &s->link, err);
    if (status) return status;
    atomic_store(&s->link_is_open, true);
    if (atomic_load(&s->stop)) return td_fail(err, TD_ECANCELED, "stopped while the ranks met"); /* unannounced */
    if (s->world > 1) td_log(TD_LOG_INFO, "serve", "pair formed over %s", td_link_transport(s->link));
    return TD_OK;
}

static double gb_per_s(uint64_t n_bytes, int64_t ns)
{
    return ns > 0 ? (double)n_bytes / (double)ns : 0.0;
}

static bool on_progress(void *user, uint64_t done, uint64_t total)
{
    serving *s = user;
    uint64_t peer_done, peer_total;
    td_link_report_progress(s->link, done, total);
    td_link_peer_progress(s->link, &peer_done, &peer_total);
    if (s->server)
        td_server_progress(s->server, (int64_t)(done + peer_done),
                           (int64_t)(total + (peer_total ? peer_total : total * (uint64_t)(s->world - 1))));
    int64_t now = td_now_ns();
    if (now - s->last_log_ns > (int64_t)LOG_STEP_MS * 1000000) {
        s->last_log_ns = now;
        td_log(TD_LOG_INFO, "serve", "weights: %.1f of %.1f MiB, %.2f GB/s", mib(done), mib(total),
               gb_per_s(done, now - s->load_ns));
    }
    return !atomic_load(&s->stop) && td_link_state(s->link) == TD_LINK_UP;
}

/* Packing on a GPU is only enqueued by then: what became of it shows at the sync. */
static td_status load_model(serving *s, td_error *err)
{
    const td_model_plan *plan = &s->fit.need.plan;
    s->load_ns = s->last_log_ns = td_now_ns();
    td_status status =
        td_model_create(s->dev, &s->ops, s->link, s->checkpoint, &s->shape.model, on_progress, s, &s->model, err);
    if (status == TD_ECANCELED && td_link_state(s->link) == TD_LINK_LOST) return td_link_lost_reason(s->link, err);
    if (!status) status = td_dev_sync(s->dev, err);
    if (status) return status;
    int64_t ns = td_now_ns() - s->load_ns;
    size_t n_bytes = plan->experts_bytes + plan->dense_bytes + plan->embed_bytes + plan->head_bytes + plan->mtp_bytes;
    td_log(TD_LOG_INFO, "serve", "weights: %.3f GiB in %.2f s (%.2f GB/s)", gib(n_bytes), (double)ns * 1e-9,
           gb_per_s(n_bytes, ns));
    return TD_OK;
}

static td_status create_engine(serving *s, td_error *err)
{
    td_engine_options o = { .rank = s->rank,
                            .world = s->world,
                            .n_slots = s->shape.model.n_slots,
                            .queue_cap = (int)td_settings_int(&s->settings, "max-queued"),
                            .context_tokens = s->shape.context_tokens,
                            .n_blocks = s->shape.model.n_blocks,
                            .chunk_rows = s->shape.model.chunk_rows,
                            .n_ids = s->n_ids,
                            .seed_salt = (uint64_t)td_settings_int(&s->settings, "seed-salt") };
    return td_engine_create(s->model, s->link, &o, &s->engine, err);
}

/* The plan against the driver's account. What other programs, or a rank on the same GPU, took or gave back meanwhile is
 * in it. */
static void log_gpu_memory(const serving *s)
{
    td_gpu now;
    const td_gpu *before = &s->shape.gpu;
    const td_serve_memory *need = &s->fit.need.memory;
    if (s->shape.backend != TD_CUDA || td_gpu_query(before->index, &now, NULL)) return;
    size_t planned = need->device_bytes, from = before->free_bytes, to = now.free_bytes;
    if (td_serve_one_memory(&s->shape)) {
        planned += need->host_bytes;
        from = s->fit.host_free_bytes;
        to = td_mem_available_bytes();
    }
    double taken = mib(from) - mib(to);
    td_log(TD_LOG_INFO, "serve", "GPU %d: %.1f MiB taken, planned %.1f MiB (%+.1f %%)", before->index, taken,
           mib(planned), 100.0 * (taken / mib(planned) - 1.0));
}

/* Memory was planned and could not be had: everything is given back, then what is free now is looked at. */
static td_status no_memory(serving *s, td_error *err)
{
    int32_t largest;
    td_error ignored;
    td_model_destroy(s->model);
    td_dev_destroy(s->dev);
    s->model = NULL;
    s->dev = NULL;
    if (td_serve_refit(&s->shape, &s->settings, s->checkpoint, &s->fit.need.memory, &largest, &ignored))
        return err->status;
    print_largest(largest);
    td_error why = *err;
    return td_fail(err, TD_ENOMEM,
                   "%.600s; the largest window that fits into what is free now is %d tokens (--context)", why.text,
                   largest);
}

static td_status load(serving *s, td_error *err)
{
    td_status status = td_serve_device(&s->shape, td_checkpoint_config(s->checkpoint), &s->dev, err);
    if (!status) td_ops_init(&s->ops, s->dev);
    if (!status) status = load_model(s, err);
    if (!status) status = td_link_barrier(s->link, "loaded", 0, err);
    if (!status) status = create_engine(s, err);
    if (status == TD_ENOMEM) return no_memory(s, err);
    if (!status) log_gpu_memory(s);
    return status;
}

/* Rank 0, serving: until a signal, or the engine fails. */
static td_status serve(serving *s, td_error *err)
{
    atomic_store(&s->serves, true);
    td_server_ready(s->server, s->engine);
    td_log(TD_LOG_INFO, "serve", "ready after %.2f s: http://%s:%d/v1", (double)(td_now_ns() - s->start_ns) * 1e-9,
           td_settings_text(&s->settings, "host"), td_server_port(s->server));
    td_status status = TD_OK;
    while (!atomic_load(&s->stop) && (status = td_engine_health(s->engine, err)) == TD_OK) td_sleep_ns(50000000);
    if (status == TD_OK) {
        td_server_stop(s->server, STOP_GRACE_S);
    } else {
        td_server_failed(s->server, err->text);
        td_server_stop(s->server, 1.0); /* streams get their error event */
    }
    td_engine_stop(s->engine);
    return status;
}

static void log_backend(const td_serve_shape *shape)
{
    const td_gpu *gpu = &shape->gpu;
    if (shape->backend_note[0]) td_log(TD_LOG_INFO, "serve", "on the CPU: %s", shape->backend_note);
    if (shape->backend == TD_CUDA)
        td_log(TD_LOG_INFO, "serve", "GPU %d: %s, sm_%d, driver for CUDA %d.%d; %.1f of %.1f MiB free%s", gpu->index,
               gpu->name, gpu->capability, gpu->driver / 1000, gpu->driver % 1000 / 10, mib(gpu->free_bytes),
               mib(gpu->total_bytes), gpu->integrated ? " by the driver, memory shared with the host" : "");
}

static td_status run(serving *s, td_error *err)
{
    td_status status;
    const char *dir = td_settings_text(&s->settings, "model");
    if ((status = start_signals(s, err))) return status;
    if ((status = td_checkpoint_open(dir, &s->checkpoint, err))) return status;
    if ((status = td_checkpoint_verify(s->checkpoint, err))) return status;
    if ((status = td_serve_shape_of(&s->settings, td_checkpoint_config(s->checkpoint), &s->shape, err))) return status;
    log_backend(&s->shape);
    if ((status = open_tokenizer(s, err))) return status;
    if ((status = fit(s, err))) return status;
    if (s->rank == 0 && (status = start_server(s, err))) return status;
    if ((status = open_link(s, err))) return status;
    if ((status = load(s, err))) return status;
    return s->rank == 0 ? serve(s, err) : td_engine_follow(s->engine, err);
}

/* What can be refused without touching a server that may be running: the settings against the checkpoint, and whether
 * there is a GPU where one is asked for. Free memory is known only when the other is gone. */
static td_status check_only(serving *s, td_error *err)
{
    td_status status = td_checkpoint_open(td_settings_text(&s->settings, "model"), &s->checkpoint, err);
    return status ? status : td_serve_shape_of(&s->settings, td_checkpoint_config(s->checkpoint), &s->shape, err);
}

static int exit_code(const serving *s, td_status status)
{
    if (status == TD_OK || (status == TD_ECANCELED && atomic_load(&s->stop))) return TD_EXIT_OK;
    if (status == TD_ECANCELED && s->link_is_open && td_link_state(s->link) == TD_LINK_STOPPED) return TD_EXIT_OK;
    if (status == TD_EINVAL) return TD_EXIT_ARGUMENTS;
    if (status == TD_ENOMEM) return TD_EXIT_MEMORY;
    return status == TD_EPEER || status == TD_ETIMEOUT ? TD_EXIT_PEER : TD_EXIT_FAILED;
}

static void tear_down(serving *s, int code, const td_error *err)
{
    end_signals(s); /* its thread uses link and server */
    if (s->link_is_open) {
        if (code == TD_EXIT_OK)
            td_link_announce_stop(s->link);
        else if (code != TD_EXIT_PEER)
            td_link_announce_failure(s->link, err->text);
    }
    td_server_destroy(s->server);
    td_engine_destroy(s->engine);
    td_model_destroy(s->model);
    if (s->link_is_open) td_link_close(s->link);
    td_dev_destroy(s->dev);
    td_tokenizer_destroy(s->tokenizer);
    td_checkpoint_close(s->checkpoint);
}

static td_log_level level_of(const char *name)
{
    static const char *const names[] = { "debug", "info", "warn", "error" };
    for (int i = 0; i < 4; i++)
        if (strcmp(name, names[i]) == 0) return (td_log_level)i;
    return TD_LOG_INFO;
}

int td_cli_serve(int argc, char **argv)
{
    serving s = { .start_ns = td_now_ns() };
    td_error err = { .status = TD_OK };
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            printf("usage: tandem serve --model DIR [settings]\n\nRuns one rank of the server. Alone it serves the "
                   "whole model; two "
                   "ranks, started with --world 2 and\n--rank 0 / --rank 1, share it. ./start.sh does both on one "
                   "machine.\n");
            td_settings_help(td_serve_settings, td_n_serve_settings);
            printf("\nexit codes: 0 stopped, 1 failed, 2 bad settings, 3 does not fit in memory, 4 the other rank is "
                   "lost\n");
            return TD_EXIT_OK;
        }
    if (td_settings_parse(td_serve_settings, td_n_serve_settings, argc, argv, &s.settings, &err)) {
        fprintf(stderr, "tandem serve: %s\n", err.text);
        return TD_EXIT_ARGUMENTS;
    }
    s.rank = (int)td_settings_int(&s.settings, "rank");
    s.world = (int)td_settings_int(&s.settings, "world");
    if (s.rank >= s.world) {
        fprintf(stderr, "tandem serve: --rank: %d is not below --world %d\n", s.rank, s.world);
        return TD_EXIT_ARGUMENTS;
    }
    int64_t gpus[TD_SHARDS];
    if (td_serve_gpus(&s.settings, gpus, &err)) {
        fprintf(stderr, "tandem serve: %s\n", err.text);
        return TD_EXIT_ARGUMENTS;
    }
    if (td_settings_flag(&s.settings, "check-args")) {
        int checked = exit_code(&s, check_only(&s, &err));
        if (checked != TD_EXIT_OK) fprintf(stderr, "tandem serve: %s\n", err.text);
        td_checkpoint_close(s.checkpoint);
        return checked;
    }
    td_log_init(level_of(td_settings_text(&s.settings, "log-level")), s.world > 1 ? s.rank : -1);
    td_status status = run(&s, &err);
    int code = exit_code(&s, status);
    if (code != TD_EXIT_OK) td_log(TD_LOG_ERROR, "serve", "%s", err.text);
    tear_down(&s, code, &err);
    td_log(TD_LOG_INFO, "serve", "ended, exit code %d", code);
    return code;
}
