/* Counters and histograms under one mutex: a request touches them a few times, a token batch once. */
#include "server/metrics.h"

#include "base/clock.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EDGES_MAX = 24, HTTP_MAX = 256, KEYS_MAX = 4200, VLLM_NAMES = 2 };

typedef enum histogram_id {
    H_LATENCY,
    H_FIRST_TOKEN,
    H_INTER_TOKEN,
    H_QUEUE,
    H_PREFILL,
    H_DECODE,
    H_PROMPT_TOKENS,
    H_REPLY_TOKENS,
    H_MAX_TOKENS,
    H_COUNT
} histogram_id;

static const double SECONDS[] = { 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300 };
static const double GAPS[] = { 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5 };
static const double TOKENS[] = { 1,    2,    5,     10,    20,    50,     100,    200,    500,    1000,
                                 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000 };
#define EDGES(a) a, (int)(sizeof(a) / sizeof(a)[0])

static const struct {
    const char *name, *vllm[VLLM_NAMES], *help;
    const double *edges;
    int n_edges;
} HISTOGRAMS[H_COUNT] = {
    [H_LATENCY] = { "request_latency_seconds",
                    { "e2e_request_latency_seconds" },
                    "From arrival of a request to the end of its reply",
                    EDGES(SECONDS) },
    [H_FIRST_TOKEN] = { "time_to_first_token_seconds",
                        { "time_to_first_token_seconds" },
                        "From arrival of a request to its first token",
                        EDGES(SECONDS) },
    [H_INTER_TOKEN] = { "inter_token_latency_seconds",
                        { "inter_token_latency_seconds" },
                        "Between tokens of a reply; tokens that arrive together share the time",
                        EDGES(GAPS) },
    [H_QUEUE] = { "request_queue_seconds", { "request_queue_time_seconds" }, "Waiting for a lane", EDGES(SECONDS) },
    [H_PREFILL] = { "request_prefill_seconds",
                    { "request_prefill_time_seconds" },
                    "Reading the prompt",
                    EDGES(SECONDS) },
    [H_DECODE] = { "request_decode_seconds",
                   { "request_decode_time_seconds", "request_inference_time_seconds" },
                   "Writing the reply",
                   EDGES(SECONDS) },
    [H_PROMPT_TOKENS] = { "request_prompt_tokens", { "request_prompt_tokens" }, "Tokens of a prompt", EDGES(TOKENS) },
    [H_REPLY_TOKENS] = { "request_generation_tokens",
                         { "request_generation_tokens" },
                         "Tokens of a reply",
                         EDGES(TOKENS) },
    [H_MAX_TOKENS] = { "request_max_tokens",
                       { "request_params_max_tokens" },
                       "Tokens a reply could have had",
                       EDGES(TOKENS) },
};

typedef struct histogram {
    int64_t buckets[EDGES_MAX + 1]; /* not cumulated; the last: above every edge */
    double sum;
} histogram;

typedef struct http_count {
    const char *handler, *method; /* static */
    int status_class;             /* 2 for 2xx; 0: no reply */
    int64_t n;
} http_count;

typedef struct key_count {
    char key[66];
    const char *status; /* static */
    int64_t n;
} key_count;

struct td_metrics {
    pthread_mutex_t mutex; /* guards everything below */
    histogram histograms[H_COUNT];
    http_count http[HTTP_MAX];
    int n_http;
    key_count *keys;
    int n_keys;
    int64_t finished_tokens, running_tokens, client_left, finished_stop, finished_length, finished_abort;
    int64_t start_s;
};

td_metrics *td_metrics_create(void)
{
    td_metrics *metrics = calloc(1, sizeof *metrics);
    if (!metrics) return NULL;
    metrics->keys = calloc(KEYS_MAX, sizeof *metrics->keys);
    if (!metrics->keys) {
        free(metrics);
        return NULL;
    }
    metrics->start_s = td_wall_s();
    pthread_mutex_init(&metrics->mutex, NULL);
    return metrics;
}

void td_metrics_destroy(td_metrics *metrics)
{
    if (!metrics) return;
    pthread_mutex_destroy(&metrics->mutex);
    free(metrics->keys);
    free(metrics);
}

static void observe(td_metrics *metrics, histogram_id id, double value, int times)
{
    histogram *h = &metrics->histograms[id];
    int i = 0;
    while (i < HISTOGRAMS[id].n_edges && value > HISTOGRAMS[id].edges[i]) i++;
    h->buckets[i] += times;
    h->sum += value * times;
}

void td_metrics_http(td_metrics *metrics, const char *handler, const char *method, int status)
{
    int status_class = status / 100;
    pthread_mutex_lock(&metrics->mutex);
    int i = 0;
    while (i < metrics->n_http &&
           (strcmp(metrics->http[i].handler, handler) != 0 || strcmp(metrics->http[i].method, method) != 0 ||
            metrics->http[i].status_class != status_class))
        i++;
    if (i == metrics->n_http && i < HTTP_MAX)
        metrics->http[metrics->n_http++] =
            (http_count){ .handler = handler, .method = method, .status_class = status_class };
    if (i < metrics->n_http) metrics->http[i].n++;
    pthread_mutex_unlock(&metrics->mutex);
}

static void count_key(td_metrics *metrics, const char *key, const char *status)
{
    int i = 0;
    while (i < metrics->n_keys &&
           (strcmp(metrics->keys[i].key, key) != 0 || strcmp(metrics->keys[i].status, status) != 0))
        i++;
    if (i == metrics->n_keys && i < KEYS_MAX) {
        snprintf(metrics->keys[i].key, sizeof metrics->keys[i].key, "%s", key);
        metrics->keys[i].status = status;
        metrics->n_keys++;
    }
    if (i < metrics->n_keys) metrics->keys[i].n++;
}

void td_metrics_request_done(td_metrics *metrics, const td_metrics_request *request)
{
    pthread_mutex_lock(&metrics->mutex);
    count_key(metrics, request->key, request->status);
    if (request->ran) {
        bool stop = strcmp(request->status, "stop") == 0, length = strcmp(request->status, "length") == 0;
        metrics->finished_stop += stop;
        metrics->finished_length += length;
        metrics->finished_abort += !stop && !length;
        metrics->finished_tokens += request->n_tokens;
        metrics->running_tokens -= request->n_tokens;
        observe(metrics, H_LATENCY, request->latency_s, 1);
        if (request->first_token_s >= 0) observe(metrics, H_FIRST_TOKEN, request->first_token_s, 1);
        if (request->stats.admitted) {
            observe(metrics, H_QUEUE, request->stats.queue_s, 1);
            observe(metrics, H_PREFILL, request->stats.prefill_s, 1);
            observe(metrics, H_DECODE, request->stats.decode_s, 1);
        }
        observe(metrics, H_PROMPT_TOKENS, request->stats.prompt_tokens, 1);
        observe(metrics, H_REPLY_TOKENS, request->n_tokens, 1);
        observe(metrics, H_MAX_TOKENS, request->max_tokens, 1);
    }
    pthread_mutex_unlock(&metrics->mutex);
}

void td_metrics_tokens(td_metrics *metrics, int n, double gap_s)
{
    pthread_mutex_lock(&metrics->mutex);
    metrics->running_tokens += n;
    if (gap_s >= 0) observe(metrics, H_INTER_TOKEN, gap_s / n, n);
    pthread_mutex_unlock(&metrics->mutex);
}

void td_metrics_client_left(td_metrics *metrics)
{
    pthread_mutex_lock(&metrics->mutex);
    metrics->client_left++;
    pthread_mutex_unlock(&metrics->mutex);
}

/* ------------------------------------------------------------------------------------------------ the page --- */

typedef struct page {
    td_buf *out;
    const char *model; /* escaped, for the label of vLLM's names */
} page;

static void head(page *p, const char *prefix, const char *name, const char *type, const char *help)
{
    td_buf_printf(p->out, "# HELP %s%s %s\n# TYPE %s%s %s\n", prefix, name, help, prefix, name, type);
}

/* One sample in both names; vllm may be NULL. */
static void value(page *p, const char *name, const char *vllm, const char *type, const char *help, double x)
{
    head(p, "tandem:", name, type, help);
    td_buf_printf(p->out, "tandem:%s %.17g\n", name, x);
    if (!vllm) return;
    head(p, "vllm:", vllm, type, help);
    td_buf_printf(p->out, "vllm:%s{model_name=\"%s\"} %.17g\n", vllm, p->model, x);
}

static void write_histogram(page *p, const char *prefix, const char *name, const char *label, histogram_id id,
                            const histogram *h)
{
    int64_t n = 0;
    head(p, prefix, name, "histogram", HISTOGRAMS[id].help);
    for (int i = 0; i < HISTOGRAMS[id].n_edges; i++) {
        n += h->buckets[i];
        td_buf_printf(p->out, "%s%s_bucket{%s%sle=\"%g\"} %lld\n", prefix, name, label, *label ? "," : "",
                      HISTOGRAMS[id].edges[i], (long long)n);
    }
    n += h->buckets[HISTOGRAMS[id].n_edges];
    td_buf_printf(p->out, "%s%s_bucket{%s%sle=\"+Inf\"} %lld\n", prefix, name, label, *label ? "," : "", (long long)n);
    const char *open = *label ? "{" : "", *close = *label ? "}" : "";
    td_buf_printf(p->out, "%s%s_sum%s%s%s %.17g\n", prefix, name, open, label, close, h->sum);
    td_buf_printf(p->out, "%s%s_count%s%s%s %lld\n", prefix, name, open, label, close, (long long)n);
}

static void write_histograms(page *p, const td_metrics *metrics)
{
    char label[600];
    snprintf(label, sizeof label, "model_name=\"%s\"", p->model);
    for (int id = 0; id < H_COUNT; id++) {
        const histogram *h = &metrics->histograms[id];
        write_histogram(p, "tandem:", HISTOGRAMS[id].name, "", id, h);
        for (int i = 0; i < VLLM_NAMES && HISTOGRAMS[id].vllm[i]; i++)
            write_histogram(p, "vllm:", HISTOGRAMS[id].vllm[i], label, id, h);
    }
}

static void write_engine(page *p, const td_engine_stats *e)
{
    value(p, "requests_running", "num_requests_running", "gauge", "Requests in a lane", e->running);
    value(p, "requests_waiting", "num_requests_waiting", "gauge", "Requests in the queue", e->waiting);
    value(p, "requests_running_max", NULL, "gauge", "Lanes", e->slots);
    value(p, "prompt_tokens_total", "prompt_tokens_total", "counter", "Tokens of prompts",
          (double)e->prompt_tokens_total);
    value(p, "prompt_tokens_cached_total", "prompt_tokens_cached_total", "counter", "Tokens of prompts found computed",
          (double)e->cached_tokens_total);
    head(p, "vllm:", "prefix_cache_queries_total", "counter", "Tokens of prompts");
    td_buf_printf(p->out, "vllm:prefix_cache_queries_total{model_name=\"%s\"} %lld\n", p->model,
                  (long long)e->prompt_tokens_total);
    head(p, "vllm:", "prefix_cache_hits_total", "counter", "Tokens of prompts found computed");
    td_buf_printf(p->out, "vllm:prefix_cache_hits_total{model_name=\"%s\"} %lld\n", p->model,
                  (long long)e->cached_tokens_total);
    value(p, "decode_rounds_total", NULL, "counter", "Rounds of decoding", (double)e->rounds_total);
    value(p, "decode_seconds_total", NULL, "counter", "Time in rounds of decoding", e->decode_s_total);
    value(p, "decode_forward_seconds_total", NULL, "counter", "Of it, time in the model", e->decode_forward_s_total);
    value(p, "mtp_drafted_total", "spec_decode_num_draft_tokens_total", "counter", "Drafted tokens",
          (double)e->drafted_total);
    value(p, "mtp_accepted_total", "spec_decode_num_accepted_tokens_total", "counter", "Drafted tokens that were right",
          (double)e->accepted_total);
    value(p, "preemptions_total", "num_preemptions_total", "counter", "Requests that had to give up their lane",
          (double)e->preemptions_total);
    if (e->pool_tokens <= 0) return;
    double used = 1.0 - (double)e->pool_free_tokens / (double)e->pool_tokens;
    value(p, "pool_tokens", NULL, "gauge", "Token rows of the KV pool", (double)e->pool_tokens);
    value(p, "pool_free_tokens", NULL, "gauge", "Free token rows of the KV pool", (double)e->pool_free_tokens);
    head(p, "tandem:", "kv_cache_usage_ratio", "gauge", "Used share of the KV pool");
    td_buf_printf(p->out, "tandem:kv_cache_usage_ratio{pool=\"kv\"} %.17g\n", used);
    static const char *const names[] = { "kv_cache_usage_perc", "gpu_cache_usage_perc" };
    for (int i = 0; i < 2; i++) {
        head(p, "vllm:", names[i], "gauge", "Used share of the KV pool, 0 to 1");
        td_buf_printf(p->out, "vllm:%s{model_name=\"%s\"} %.17g\n", names[i], p->model, used);
    }
}

static void write_server(page *p, const td_metrics *metrics)
{
    head(p, "tandem:", "requests_total", "counter", "Requests for tokens by key label and outcome");
    for (int i = 0; i < metrics->n_keys; i++)
        td_buf_printf(p->out, "tandem:requests_total{key=\"%s\",status=\"%s\"} %lld\n", metrics->keys[i].key,
                      metrics->keys[i].status, (long long)metrics->keys[i].n);
    const struct {
        const char *reason;
        int64_t n;
    } reasons[] = { { "stop", metrics->finished_stop },
                    { "length", metrics->finished_length },
                    { "abort", metrics->finished_abort } };
    head(p, "vllm:", "request_success_total", "counter", "Finished requests by reason");
    for (int i = 0; i < 3; i++)
        td_buf_printf(p->out, "vllm:request_success_total{model_name=\"%s\",finished_reason=\"%s\"} %lld\n", p->model,
                      reasons[i].reason, (long long)reasons[i].n);
    value(p, "generation_tokens_total", "generation_tokens_total", "counter", "Tokens of finished replies",
          (double)metrics->finished_tokens);
    value(p, "generation_tokens_running", NULL, "gauge", "Tokens so far of replies that run",
          (double)metrics->running_tokens);
    value(p, "client_disconnections_total", NULL, "counter", "Clients that left before their reply was complete",
          (double)metrics->client_left);
    head(p, "", "http_requests_total", "counter", "HTTP requests");
    for (int i = 0; i < metrics->n_http; i++) {
        const http_count *c = &metrics->http[i];
        char status[8] = "none";
        if (c->status_class) snprintf(status, sizeof status, "%dxx", c->status_class);
        td_buf_printf(p->out, "http_requests_total{handler=\"%s\",method=\"%s\",status=\"%s\"} %lld\n", c->handler,
                      c->method, status, (long long)c->n);
    }
}

/* Resident bytes and CPU seconds of this process; false: /proc is not there. */
static bool process_numbers(double *resident_bytes, double *cpu_s)
{
    char line[1024];
    FILE *file = fopen("/proc/self/stat", "r");
    if (!file) return false;
    size_t n = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    line[n] = 0;
    const char *at = strrchr(line, ')'); /* the program's name may hold blanks */
    unsigned long user = 0, sys = 0;
    long pages = 0;
    if (!at ||
        sscanf(at + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu %*d %*d %*d %*d %*d %*d %*u %*u %ld",
               &user, &sys, &pages) != 3)
        return false;
    *resident_bytes = (double)pages * (double)sysconf(_SC_PAGESIZE);
    *cpu_s = (double)(user + sys) / (double)sysconf(_SC_CLK_TCK);
    return true;
}

static int open_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    int n = 0;
    if (!dir) return -1;
    while (readdir(dir)) n++;
    closedir(dir);
    return n - 3; /* ".", ".." and the descriptor of the listing itself */
}

static void write_process(page *p, const td_metrics *metrics)
{
    double resident_bytes = 0, cpu_s = 0;
    if (process_numbers(&resident_bytes, &cpu_s)) {
        head(p, "", "process_resident_memory_bytes", "gauge", "Resident memory");
        td_buf_printf(p->out, "process_resident_memory_bytes %.0f\n", resident_bytes);
        head(p, "", "process_cpu_seconds_total", "counter", "CPU time, user and system");
        td_buf_printf(p->out, "process_cpu_seconds_total %.2f\n", cpu_s);
    }
    head(p, "", "process_start_time_seconds", "gauge", "Start of the process since 1970");
    td_buf_printf(p->out, "process_start_time_seconds %lld\n", (long long)metrics->start_s);
    int n = open_fds();
    if (n < 0) return;
    head(p, "", "process_open_fds", "gauge", "Open descriptors");
    td_buf_printf(p->out, "process_open_fds %d\n", n);
}

/* A label's value: backslash, quote and line feed are escaped. */
static void escape_label(const char *text, char *out, size_t cap)
{
    size_t n = 0;
    for (; *text && n + 3 < cap; text++) {
        if (*text == '\\' || *text == '"' || *text == '\n') out[n++] = '\\';
        out[n++] = *text == '\n' ? 'n' : *text;
    }
    out[n] = 0;
}

void td_metrics_write(td_metrics *metrics, const char *model, const td_engine_stats *engine, td_buf *out)
{
    char name[512];
    escape_label(model, name, sizeof name);
    page p = { .out = out, .model = name };
    if (engine) write_engine(&p, engine);
    pthread_mutex_lock(&metrics->mutex);
    write_server(&p, metrics);
    write_histograms(&p, metrics);
    pthread_mutex_unlock(&metrics->mutex);
    write_process(&p, metrics);
}
