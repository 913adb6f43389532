/* tandem bench serve URL: a running server, from outside: tokens a second at 1 to N requests at once, time to the first
 * token, and how fast prompts of given lengths are read.
 *
 * Replies are greedy and ignore the end of text, so that every run makes the same number of tokens. Prompts differ in
 * every run, so that nothing kept from an earlier one helps: texts carry a number, prompts of exact length are random
 * picks from the ids of a text that the server itself has tokenised. */
#include "base/clock.h"
#include "cli/args.h"
#include "cli/bench.h"
#include "cli/bench_rig.h"
#include "cli/client.h"
#include "cli/cost.h"
#include "cli/load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LIST_MAX = 16, ID_CAP = 512, POOL_IDS = 4096, SILENT_S = 600, CALL_S = 60, N_PROMPTS = 2 };

static const td_setting SETTINGS[] = {
    { .name = "requests",
      .kind = TD_SETTING_TEXT,
      .fallback = "1,2,4",
      .min = 1,
      .value = "LIST",
      .group = "Decoding",
      .help = "requests at once" },
    { .name = "tokens",
      .kind = TD_SETTING_INT,
      .fallback = "128",
      .min = 2,
      .max = 65536,
      .value = "N",
      .help = "tokens of a reply" },
    { .name = "prompt-tokens",
      .kind = TD_SETTING_TEXT,
      .fallback = "128,1024,4096",
      .min = 1,
      .value = "LIST",
      .group = "Prompts",
      .help = "lengths of prompts; those beyond the server's window are left out" },
    { .name = "runs",
      .kind = TD_SETTING_INT,
      .fallback = "3",
      .min = 1,
      .max = TD_BENCH_RUNS_MAX,
      .value = "N",
      .group = "Measuring",
      .help = "the median is reported, and half the range" },
    { .name = "ceilings",
      .kind = TD_SETTING_TEXT,
      .fallback = "",
      .value = "DIR",
      .help = "the server's checkpoint: also measure this machine's ceilings and print the ratios to them" },
    { .name = "ranks-here",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = 2,
      .value = "N",
      .help = "ranks that share this machine (its ceilings are divided); 0: all of the server's" },
    { .name = "dense",
      .kind = TD_SETTING_CHOICE,
      .fallback = "bf16",
      .choices = "bf16|q4|fp8",
      .value = "FORMAT",
      .help = "what the server was started with, for --ceilings" },
    TD_CLIENT_KEY_SETTING,
    { .name = "json", .kind = TD_SETTING_FLAG, .help = "one JSON object instead of the tables" },
};
enum { N_SETTINGS = sizeof SETTINGS / sizeof *SETTINGS };

typedef struct decode_row {
    int prompt; /* index of PROMPTS */
    int n_requests;
    td_stat tok_s, request_tok_s, ttft_s; /* of all together; of one; of one */
} decode_row;

typedef struct prompt_row {
    int n_tokens;
    td_stat tok_s, ttft_s, prefill_s;
    bool cached; /* the server took part of a prompt from what it had kept: the numbers are too good */
} prompt_row;

typedef struct bench {
    const td_settings *settings;
    const char *url, *key;
    td_client *client;
    char model[ID_CAP];
    int64_t window; /* tokens of the server's context; 0: it does not say */
    int world, n_runs, n_tokens;
    uint64_t state; /* of what differs from run to run */
    int32_t ids[POOL_IDS];
    int n_ids;
    decode_row decodes[LIST_MAX * N_PROMPTS];
    prompt_row prompts[LIST_MAX];
    int n_decodes, n_prompts;
    bool has_ratios;
    td_ceilings ceilings;
    td_ratios ratios;
} bench;

/* Prose is what drafting guesses badly, structure what it guesses well. */
static const struct {
    const char *name, *text;
} PROMPTS[N_PROMPTS] = {
    { "prose", "Tell a long story about a lighthouse keeper, his daughter and ship number %llu." },
    { "structured", "Write a JSON array of 100 objects with the members n, square and cube, from n = %llu on." },
};

static uint64_t next_random(bench *b)
{
    b->state = b->state * 6364136223846793005u + 1442695040888963407u;
    return b->state >> 33;
}

/* --- what the server is --- */

static td_status ask_server(bench *b, td_error *err)
{
    td_client_reply reply;
    td_status status = td_client_model(b->client, b->model, sizeof b->model, err);
    if (!status) status = td_client_call(b->client, "/health", NULL, CALL_S, &reply, err);
    if (status) return status;
    (void)td_json_int64(td_json_get(reply.json, "context_length"), &b->window);
    b->world = (int)td_json_count(td_json_get(reply.json, "ranks"));
    if (b->world < 1) b->world = 1;
    td_client_reply_free(&reply);
    return TD_OK;
}

/* Ordinary ids of this model: whatever a plain text consists of. */
static td_status fetch_ids(bench *b, td_error *err)
{
    static const char TEXT[] = "The quick brown fox jumps over the lazy dog while seven wise owls judge a box of lime, "
                               "zinc and quartz; later they count: 0 1 2 3 4 5 6 7 8 9, and write it all down (twice). "
                               "In the morning a small ship left the harbour with letters, bread, salt and a map.";
    td_client_reply reply;
    td_buf body;
    td_buf_init(&body, 0);
    td_json_writer w = { .out = &body };
    td_json_write_begin(&w, '{');
    td_json_write_member_text(&w, "model", b->model);
    td_json_write_member_text(&w, "prompt", TEXT);
    td_json_write_member_bool(&w, "add_special_tokens", false);
    td_json_write_end(&w, '}');
    td_status status = td_client_call(b->client, "/tokenize", &body, CALL_S, &reply, err);
    td_buf_deinit(&body);
    if (status) return status;
    const td_json *tokens = td_json_get(reply.json, "tokens");
    for (size_t i = 0; i < td_json_count(tokens) && b->n_ids < POOL_IDS; i++) {
        int64_t id;
        if (!td_json_int64(td_json_at(tokens, i), &id) && id >= 0 && id <= INT32_MAX) b->ids[b->n_ids++] = (int32_t)id;
    }
    td_client_reply_free(&reply);
    return b->n_ids ? TD_OK : td_fail(err, TD_EFORMAT, "/tokenize: the server gives no tokens");
}

/* --- requests --- */

static void write_common(bench *b, td_json_writer *w, int n_tokens)
{
    td_json_write_member_text(w, "model", b->model);
    td_json_write_member_int(w, "max_tokens", n_tokens);
    td_json_write_member_int(w, "temperature", 0);
    td_json_write_member_bool(w, "ignore_eos", true);
    td_json_write_member_bool(w, "stream", true);
    td_json_write_key(w, "stream_options");
    td_json_write_begin(w, '{');
    td_json_write_member_bool(w, "include_usage", true);
    td_json_write_end(w, '}');
}

static void write_chat(bench *b, int prompt, td_load_request *r)
{
    char text[512];
    snprintf(text, sizeof text, PROMPTS[prompt].text, (unsigned long long)next_random(b) % 1000000);
    r->path = "/v1/chat/completions";
    td_buf_init(&r->body, 0);
    td_json_writer w = { .out = &r->body };
    td_json_write_begin(&w, '{');
    write_common(b, &w, b->n_tokens);
    td_json_write_key(&w, "messages");
    td_json_write_begin(&w, '[');
    td_json_write_begin(&w, '{');
    td_json_write_member_text(&w, "role", "user");
    td_json_write_member_text(&w, "content", text);
    td_json_write_end(&w, '}');
    td_json_write_end(&w, ']');
    td_json_write_key(&w, "chat_template_kwargs");
    td_json_write_begin(&w, '{');
    td_json_write_member_bool(&w, "enable_thinking", false);
    td_json_write_end(&w, '}');
    td_json_write_end(&w, '}');
}

static void write_ids(bench *b, int n_ids, td_load_request *r)
{
    r->path = "/v1/completions";
    td_buf_init(&r->body, 0);
    td_json_writer w = { .out = &r->body };
    td_json_write_begin(&w, '{');
    write_common(b, &w, 1);
    td_json_write_key(&w, "prompt");
    td_json_write_begin(&w, '[');
    for (int i = 0; i < n_ids; i++) td_json_write_int(&w, b->ids[next_random(b) % (uint64_t)b->n_ids]);
    td_json_write_end(&w, ']');
    td_json_write_end(&w, '}');
}

static td_status run_all(bench *b, td_load_request *requests, int n, td_error *err)
{
    td_status status = td_load_run(b->url, b->key, requests, n, SILENT_S, err);
    for (int i = 0; i < n; i++) {
        td_buf_deinit(&requests[i].body);
        if (!status && requests[i].status) {
            status = requests[i].status;
            *err = requests[i].err;
        }
    }
    return status;
}

/* --- decoding --- */

/* Tokens after the first of each, between the first of all and the last of all: the time that the first tokens took is
 * the prompts'. Requests that wait for each other are seen as such. */
static double together_tok_s(const td_load_request *requests, int n)
{
    double first = requests[0].first_s, last = 0, tokens = 0;
    for (int i = 0; i < n; i++) {
        if (requests[i].first_s < first) first = requests[i].first_s;
        if (requests[i].last_s > last) last = requests[i].last_s;
        tokens += (double)requests[i].completion_tokens - 1;
    }
    return last > first ? tokens / (last - first) : 0;
}

static td_status measure_decode(bench *b, int prompt, int n, td_error *err)
{
    td_load_request requests[TD_LOAD_MAX];
    double together[TD_BENCH_RUNS_MAX];
    double *single = malloc((size_t)b->n_runs * (size_t)n * 2 * sizeof *single);
    if (!single) return td_fail(err, TD_ENOMEM, "out of memory");
    double *ttft = single + b->n_runs * n;
    td_status status = TD_OK;
    for (int run = 0; !status && run < b->n_runs; run++) {
        for (int i = 0; i < n; i++) write_chat(b, prompt, &requests[i]);
        status = run_all(b, requests, n, err);
        for (int i = 0; !status && i < n; i++) {
            const td_load_request *r = &requests[i];
            double s = r->last_s - r->first_s;
            single[run * n + i] = s > 0 ? (double)(r->completion_tokens - 1) / s : 0;
            ttft[run * n + i] = r->first_s - r->sent_s;
            if (r->completion_tokens != b->n_tokens)
                status = td_fail(err, TD_EFORMAT, "a reply has %lld tokens, %d were asked for",
                                 (long long)r->completion_tokens, b->n_tokens);
        }
        if (!status) together[run] = together_tok_s(requests, n);
    }
    if (!status)
        b->decodes[b->n_decodes++] = (decode_row){ .prompt = prompt,
                                                   .n_requests = n,
                                                   .tok_s = td_stat_of(together, b->n_runs),
                                                   .request_tok_s = td_stat_of(single, b->n_runs * n),
                                                   .ttft_s = td_stat_of(ttft, b->n_runs * n) };
    free(single);
    return status;
}

/* --- prompts --- */

static td_status measure_prompt(bench *b, int n_tokens, td_error *err)
{
    double tok_s[TD_BENCH_RUNS_MAX], ttft_s[TD_BENCH_RUNS_MAX], prefill_s[TD_BENCH_RUNS_MAX];
    prompt_row *row = &b->prompts[b->n_prompts];
    *row = (prompt_row){ .n_tokens = n_tokens };
    td_status status = TD_OK;
    for (int run = 0; !status && run < b->n_runs; run++) {
        td_load_request r;
        write_ids(b, n_tokens, &r);
        status = run_all(b, &r, 1, err);
        if (!status && r.prompt_tokens != n_tokens)
            status = td_fail(err, TD_EFORMAT, "the server counts %lld tokens in a prompt of %d",
                             (long long)r.prompt_tokens, n_tokens);
        ttft_s[run] = r.first_s - r.sent_s;
        prefill_s[run] = r.prefill_s > 0 ? r.prefill_s : ttft_s[run];
        tok_s[run] = n_tokens / prefill_s[run];
        row->cached |= r.cached_tokens > 0;
    }
    if (status) return status;
    row->tok_s = td_stat_of(tok_s, b->n_runs);
    row->ttft_s = td_stat_of(ttft_s, b->n_runs);
    row->prefill_s = td_stat_of(prefill_s, b->n_runs);
    b->n_prompts++;
    return TD_OK;
}

/* --- ratios --- */

/* From one request's decoding of prose and the longest prompt that was measured. */
static td_status measure_ratios(bench *b, td_error *err)
{
    const char *dir = td_settings_text(b->settings, "ceilings");
    td_model_plan plan;
    td_config config;
    td_ceilings after;
    int here = (int)td_settings_int(b->settings, "ranks-here");
    if (here == 0) here = b->world;
    td_status status = td_rig_plan(dir, b->world, td_settings_text(b->settings, "dense"), &plan, &config, err);
    if (!status) status = td_ceilings_measure(0, &after, err);
    if (status) return status;
    td_ceilings_raise(&b->ceilings, &after);
    b->ratios =
        (td_ratios){ .active_bytes = td_cost_active_bytes(&config, &plan), .world = b->world, .ranks_here = here };
    for (int i = b->n_decodes; i-- > 0;)
        if (b->decodes[i].n_requests == 1 && b->decodes[i].tok_s.median > 0)
            b->ratios.decode_step_s = 1 / b->decodes[i].tok_s.median;
    for (int i = 0; i < b->n_prompts; i++) {
        if (b->prompts[i].n_tokens <= b->ratios.prompt_tokens) continue;
        b->ratios.prompt_tokens = b->prompts[i].n_tokens;
        b->ratios.prompt_s = b->prompts[i].prefill_s.median;
    }
    b->ratios.prompt_flops = td_cost_prompt_flops(&config, b->world, b->ratios.prompt_tokens);
    b->has_ratios = true;
    return TD_OK;
}

/* --- all of it --- */

static td_status measure(bench *b, td_error *err)
{
    int64_t requests[LIST_MAX], lengths[LIST_MAX];
    int n_requests, n_lengths;
    td_status status = td_args_numbers("requests", td_settings_text(b->settings, "requests"), 1, TD_LOAD_MAX, LIST_MAX,
                                       requests, &n_requests, err);
    if (!status)
        status = td_args_numbers("prompt-tokens", td_settings_text(b->settings, "prompt-tokens"), 1, 1 << 20, LIST_MAX,
                                 lengths, &n_lengths, err);
    if (!status) status = td_client_open(b->url, b->key, NULL, &b->client, err);
    if (!status) status = ask_server(b, err);
    if (!status) status = fetch_ids(b, err);
    if (!status && *td_settings_text(b->settings, "ceilings")) /* before the server is busy */
        status = td_ceilings_measure(0, &b->ceilings, err);
    for (int p = 0; p < N_PROMPTS; p++)
        for (int i = 0; !status && i < n_requests; i++) status = measure_decode(b, p, (int)requests[i], err);
    for (int i = 0; !status && i < n_lengths; i++)
        if (b->window <= 0 || lengths[i] < b->window) status = measure_prompt(b, (int)lengths[i], err);
    if (!status && *td_settings_text(b->settings, "ceilings")) status = measure_ratios(b, err);
    return status;
}

static void print_tables(const bench *b)
{
    td_bench_print_machine();
    printf("server: %s at %s, %d rank%s; %d runs, median +- half the range\n", b->model, b->url, b->world,
           b->world == 1 ? "" : "s", b->n_runs);
    printf("\n%-12s %8s %16s %18s %16s\n", "decoding", "requests", "tokens/s", "tokens/s a request", "first token");
    for (int i = 0; i < b->n_decodes; i++) {
        const decode_row *d = &b->decodes[i];
        printf("%-12s %8d %9.1f +-%4.1f%% %11.1f +-%4.1f%% %9.3f s +-%3.0f%%\n", PROMPTS[d->prompt].name, d->n_requests,
               d->tok_s.median, 100 * td_stat_spread(&d->tok_s), d->request_tok_s.median,
               100 * td_stat_spread(&d->request_tok_s), d->ttft_s.median, 100 * td_stat_spread(&d->ttft_s));
    }
    if (b->n_prompts) printf("\n%-12s %8s %16s %18s\n", "prompts", "tokens", "tokens/s", "first token");
    for (int i = 0; i < b->n_prompts; i++) {
        const prompt_row *p = &b->prompts[i];
        printf("%-12s %8d %9.1f +-%4.1f%% %11.3f s +-%3.0f%%%s\n", "", p->n_tokens, p->tok_s.median,
               100 * td_stat_spread(&p->tok_s), p->ttft_s.median, 100 * td_stat_spread(&p->ttft_s),
               p->cached ? "  partly from kept state!" : "");
    }
    if (!b->has_ratios) return;
    printf("\n");
    td_bench_print_ceilings(&b->ceilings);
    td_bench_print_ratios(&b->ratios, &b->ceilings);
}

static void write_decodes(const bench *b, td_json_writer *w)
{
    td_json_write_key(w, "decode");
    td_json_write_begin(w, '[');
    for (int i = 0; i < b->n_decodes; i++) {
        const decode_row *d = &b->decodes[i];
        td_json_write_begin(w, '{');
        td_json_write_member_text(w, "prompt", PROMPTS[d->prompt].name);
        td_json_write_member_int(w, "requests", d->n_requests);
        td_bench_write_stat(w, "tok_s", &d->tok_s);
        td_bench_write_stat(w, "request_tok_s", &d->request_tok_s);
        td_bench_write_stat(w, "ttft_s", &d->ttft_s);
        td_json_write_end(w, '}');
    }
    td_json_write_end(w, ']');
}

static void print_json(const bench *b)
{
    td_buf out;
    td_buf_init(&out, 0);
    td_json_writer w = { .out = &out };
    td_json_write_begin(&w, '{');
    td_bench_write_machine(&w);
    td_json_write_member_text(&w, "model", b->model);
    td_json_write_member_int(&w, "world", b->world);
    td_json_write_member_int(&w, "runs", b->n_runs);
    td_json_write_member_int(&w, "tokens", b->n_tokens);
    write_decodes(b, &w);
    td_json_write_key(&w, "prefill");
    td_json_write_begin(&w, '[');
    for (int i = 0; i < b->n_prompts; i++) {
        const prompt_row *p = &b->prompts[i];
        td_json_write_begin(&w, '{');
        td_json_write_member_int(&w, "tokens", p->n_tokens);
        td_bench_write_stat(&w, "tok_s", &p->tok_s);
        td_bench_write_stat(&w, "ttft_s", &p->ttft_s);
        td_json_write_member_bool(&w, "cached", p->cached);
        td_json_write_end(&w, '}');
    }
    td_json_write_end(&w, ']');
    if (b->has_ratios) {
        td_bench_write_ceilings(&w, &b->ceilings);
        td_bench_write_ratios(&w, &b->ratios, &b->ceilings);
    }
    td_json_write_end(&w, '}');
    printf("%s\n", out.data ? out.data : "{}");
    td_buf_deinit(&out);
}

static void print_help(void)
{
    printf("usage: tandem bench serve URL [settings]\n\n"
           "Measures a running server that nobody else is using: tokens a second at several numbers of requests at\n"
           "once, for prose and for structured text, the time to the first token, and how fast prompts are read.\n");
    td_settings_help(SETTINGS, N_SETTINGS);
    printf("\nexample    tandem bench serve http://127.0.0.1:8888 --ceilings models/demo\n");
}

int td_bench_serve(int argc, char **argv)
{
    td_settings settings;
    td_error err;
    if (td_args_help(argc, argv)) {
        print_help();
        return TD_EXIT_OK;
    }
    bench *b = calloc(1, sizeof *b);
    const char *url = td_args_take_word(SETTINGS, N_SETTINGS, &argc, argv);
    td_status status = b ? td_settings_parse(SETTINGS, N_SETTINGS, argc, argv, &settings, &err)
                         : td_fail(&err, TD_ENOMEM, "out of memory");
    if (!status && !url) status = td_fail(&err, TD_EINVAL, "which server? tandem bench serve http://127.0.0.1:8888");
    if (!status) {
        b->settings = &settings;
        b->url = url;
        b->key = td_settings_text(&settings, "api-key");
        b->n_runs = (int)td_settings_int(&settings, "runs");
        b->n_tokens = (int)td_settings_int(&settings, "tokens");
        b->state = (uint64_t)td_wall_s() * 1000003u + (uint64_t)td_now_ns();
        status = measure(b, &err);
    }
    if (!status) {
        if (td_settings_flag(&settings, "json"))
            print_json(b);
        else
            print_tables(b);
    }
    if (b) td_client_close(b->client);
    free(b);
    return status ? td_bench_fail("serve", status, &err) : TD_EXIT_OK;
}
