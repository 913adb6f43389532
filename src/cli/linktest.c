/* tandem linktest: what the link between two machines or processes can do, and whether it can be trusted: latency of
 * gathers, bandwidth of exchanges, and a stress whose payload changes with every operation (a constant one would hide a
 * stale buffer). Both ends run it; both print what they saw. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/json_write.h"
#include "base/log.h"
#include "base/settings.h"
#include "cli/cli.h"
#include "link/link.h"

enum { GATHER_SIZES = 9, EXCHANGE_SIZES = 7 };

static const size_t gather_sizes[GATHER_SIZES] = { 4,         1 << 10,   4 << 10,   16 << 10, 64 << 10,
                                                   128 << 10, 256 << 10, 512 << 10, 1 << 20 };
static const size_t exchange_sizes[EXCHANGE_SIZES] = {
    1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20, 64 << 20
};

static const td_setting table[] = {
    { .name = "role",
      .kind = TD_SETTING_CHOICE,
      .choices = "a|b",
      .required = true,
      .value = "a|b",
      .group = "Ends",
      .help = "a listens, b connects; start one of each" },
    { .name = "peer",
      .kind = TD_SETTING_TEXT,
      .min = 1,
      .fallback = "127.0.0.1:29552",
      .value = "HOST:PORT",
      .help = "b: where a listens; a: own address on the link and port to listen on" },
    { .name = "wait",
      .kind = TD_SETTING_INT,
      .fallback = "60",
      .min = 1,
      .max = 3600,
      .value = "SECONDS",
      .help = "for the other end to appear" },
    { .name = "transport",
      .kind = TD_SETTING_CHOICE,
      .choices = "auto|shm|tcp|rc",
      .fallback = "auto",
      .value = "NAME",
      .group = "Link",
      .help = "auto: UCX chooses; shm: one machine; tcp; rc: RoCE" },
    { .name = "net-devices",
      .kind = TD_SETTING_TEXT,
      .fallback = "",
      .value = "LIST",
      .help = "network devices UCX may use, e.g. rocep1s0f0:1,roceP2p1s0f0:1" },
    { .name = "ops",
      .kind = TD_SETTING_INT,
      .fallback = "20000",
      .min = 10,
      .max = 10000000,
      .value = "N",
      .group = "Measurement",
      .help = "gathers a size; from 128 KiB a tenth; both ends the same",
      .same_on_ranks = true },
    { .name = "exchange-mib",
      .kind = TD_SETTING_INT,
      .fallback = "64",
      .min = 0,
      .max = 64,
      .value = "MIB",
      .help = "largest exchange; 0: none",
      .same_on_ranks = true },
    { .name = "json", .kind = TD_SETTING_FLAG, .help = "one JSON object instead of the table" },
};
enum { N_SETTINGS = sizeof table / sizeof table[0] };

typedef struct latency {
    size_t bytes;
    int n_ops;
    double p50_us, p99_us, max_us;
    uint64_t mismatches; /* 8-byte words that were not what the other end put there */
} latency;

typedef struct bandwidth {
    size_t bytes;
    double gb_per_s; /* each way */
} bandwidth;

typedef struct results {
    latency gathers[GATHER_SIZES];
    bandwidth exchanges[EXCHANGE_SIZES];
    int n_exchanges;
    double step_us; /* a step message of 1 KiB and the gather that answers it */
} results;

/* Every word depends on the rank, the operation and its place. */
static uint64_t word_of(int rank, int op, size_t i)
{
    return ((uint64_t)rank << 63) ^ (uint64_t)op * 0x9e3779b97f4a7c15ull ^ (uint64_t)i * 0xc2b2ae3d27d4eb4full;
}

static uint64_t count_wrong(const unsigned char *at, int rank, int op, size_t bytes)
{
    uint64_t wrong = 0;
    for (size_t i = 0; i * 8 < bytes; i++) {
        uint64_t word = word_of(rank, op, i);
        wrong += memcmp(at + 8 * i, &word, bytes - 8 * i < 8 ? bytes - 8 * i : 8) != 0;
    }
    return wrong;
}

static void put_words(unsigned char *at, int rank, int op, size_t bytes)
{
    for (size_t i = 0; i * 8 < bytes; i++) {
        uint64_t word = word_of(rank, op, i);
        memcpy(at + 8 * i, &word, bytes - 8 * i < 8 ? bytes - 8 * i : 8);
    }
}

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static td_status measure_gather(td_link *link, unsigned char *buf, int64_t *ns, latency *l, td_error *err)
{
    int rank = td_link_rank(link), peer = 1 - rank;
    l->mismatches = 0;
    for (int op = 0; op < l->n_ops; op++) {
        put_words(buf + (size_t)rank * l->bytes, rank, op, l->bytes);
        /* Both ends have just written or checked the same amount; a first, untimed gather takes the difference out, so
         * that the timed one is the link's and not the wait for the other end's arithmetic. */
        td_status status = td_link_check(link, "linktest", (uint64_t)op, err);
        int64_t start_ns = td_now_ns();
        if (status == TD_OK) status = td_link_gather(link, buf, l->bytes, err);
        if (status != TD_OK) return status;
        ns[op] = td_now_ns() - start_ns;
        l->mismatches += count_wrong(buf + (size_t)peer * l->bytes, peer, op, l->bytes);
    }
    qsort(ns, (size_t)l->n_ops, sizeof *ns, by_value);
    l->p50_us = (double)ns[l->n_ops / 2] / 1e3;
    l->p99_us = (double)ns[(size_t)l->n_ops * 99 / 100] / 1e3;
    l->max_us = (double)ns[l->n_ops - 1] / 1e3;
    return TD_OK;
}

static td_status measure_gathers(td_link *link, int n_ops, results *r, td_error *err)
{
    unsigned char *buf = td_link_buffer(link, 2 << 20);
    int64_t *ns = malloc((size_t)n_ops * sizeof *ns);
    td_status status = buf && ns ? TD_OK : td_fail(err, TD_ENOMEM, "linktest: no memory");
    for (int i = 0; i < GATHER_SIZES && status == TD_OK; i++) {
        int n = gather_sizes[i] >= (128 << 10) ? n_ops / 10 : n_ops;
        r->gathers[i] = (latency){ .bytes = gather_sizes[i], .n_ops = n };
        status = measure_gather(link, buf, ns, &r->gathers[i], err);
    }
    free(ns);
    return status;
}

static td_status measure_exchanges(td_link *link, size_t largest, results *r, td_error *err)
{
    const int repeats = 8;
    unsigned char *mine = td_link_buffer(link, largest), *theirs = td_link_buffer(link, largest);
    if (!mine || !theirs) return td_fail(err, TD_ENOMEM, "linktest: no memory");
    memset(mine, 1, largest);
    memset(theirs, 2, largest);
    for (int i = 0; i < EXCHANGE_SIZES && exchange_sizes[i] <= largest; i++) {
        td_status status = td_link_check(link, "linktest", exchange_sizes[i], err);
        int64_t start_ns = td_now_ns();
        for (int k = 0; k < repeats && status == TD_OK; k++)
            status = td_link_exchange(link, mine, theirs, exchange_sizes[i], err);
        if (status != TD_OK) return status;
        double ns = (double)(td_now_ns() - start_ns);
        r->exchanges[r->n_exchanges++] = (bandwidth){ exchange_sizes[i], repeats * (double)exchange_sizes[i] / ns };
    }
    return TD_OK;
}

static td_status measure_steps(td_link *link, results *r, td_error *err)
{
    const int n = 1000;
    char message[1024] = { 0 };
    size_t got;
    td_status status = td_link_barrier(link, "steps", 0, err);
    int64_t start_ns = td_now_ns();
    for (int i = 0; i < n && status == TD_OK; i++) {
        if (td_link_rank(link) == 0)
            status = td_link_send_step(link, message, sizeof message, err);
        else
            status = td_link_recv_step(link, message, sizeof message, &got, -1, err);
        if (status == TD_OK) status = td_link_check(link, "step", (uint64_t)i, err);
    }
    r->step_us = (double)(td_now_ns() - start_ns) / 1e3 / n;
    return status;
}

static uint64_t total_mismatches(const results *r)
{
    uint64_t sum = 0;
    for (int i = 0; i < GATHER_SIZES; i++) sum += r->gathers[i].mismatches;
    return sum;
}

static void print_table(const td_link *link, const results *r)
{
    printf("link: rank %d, transport %s\n\n%12s %9s %10s %10s %10s\n", td_link_rank(link), td_link_transport(link),
           "gather", "ops", "p50 us", "p99 us", "max us");
    for (int i = 0; i < GATHER_SIZES; i++)
        printf("%10zu B %9d %10.2f %10.2f %10.1f\n", r->gathers[i].bytes, r->gathers[i].n_ops, r->gathers[i].p50_us,
               r->gathers[i].p99_us, r->gathers[i].max_us);
    printf("\n%12s %10s\n", "exchange", "GB/s each way");
    for (int i = 0; i < r->n_exchanges; i++)
        printf("%8zu MiB %10.2f\n", r->exchanges[i].bytes >> 20, r->exchanges[i].gb_per_s);
    printf("\nstep message and answer: %.1f us\nmismatches: %llu\n", r->step_us,
           (unsigned long long)total_mismatches(r));
}

static void write_gather(td_json_writer *w, const latency *l)
{
    td_json_write_begin(w, '{');
    td_json_write_member_int(w, "bytes", (int64_t)l->bytes);
    td_json_write_member_int(w, "ops", l->n_ops);
    td_json_write_key(w, "p50_us");
    td_json_write_double(w, l->p50_us);
    td_json_write_key(w, "p99_us");
    td_json_write_double(w, l->p99_us);
    td_json_write_key(w, "max_us");
    td_json_write_double(w, l->max_us);
    td_json_write_member_int(w, "mismatches", (int64_t)l->mismatches);
    td_json_write_end(w, '}');
}

static void print_json(const td_link *link, const results *r)
{
    td_buf out;
    td_buf_init(&out, 0);
    td_json_writer w = { .out = &out };
    td_json_write_begin(&w, '{');
    td_json_write_member_int(&w, "rank", td_link_rank(link));
    td_json_write_member_text(&w, "transport", td_link_transport(link));
    td_json_write_key(&w, "gathers");
    td_json_write_begin(&w, '[');
    for (int i = 0; i < GATHER_SIZES; i++) write_gather(&w, &r->gathers[i]);
    td_json_write_end(&w, ']');
    td_json_write_key(&w, "exchanges");
    td_json_write_begin(&w, '[');
    for (int i = 0; i < r->n_exchanges; i++) {
        td_json_write_begin(&w, '{');
        td_json_write_member_int(&w, "bytes", (int64_t)r->exchanges[i].bytes);
        td_json_write_key(&w, "gb_per_s");
        td_json_write_double(&w, r->exchanges[i].gb_per_s);
        td_json_write_end(&w, '}');
    }
    td_json_write_end(&w, ']');
    td_json_write_key(&w, "step_us");
    td_json_write_double(&w, r->step_us);
    td_json_write_member_int(&w, "mismatches", (int64_t)total_mismatches(r));
    td_json_write_end(&w, '}');
    if (!out.failed) printf("%s\n", out.data);
    td_buf_deinit(&out);
}

/* "host:port", "[v6]:port" into host; the port, or 0. */
static int split_address(const char *text, char *host, size_t cap)
{
    const char *colon = strrchr(text, ':');
    char *end = NULL;
    long port = colon ? strtol(colon + 1, &end, 10) : 0;
    if (!colon || end == colon + 1 || *end != 0 || port < 1 || port > 65535) return 0;
    size_t n = (size_t)(colon - text);
    if (n >= 2 && text[0] == '[' && text[n - 1] == ']') text++, n -= 2;
    if (n == 0 || n >= cap) return 0;
    memcpy(host, text, n);
    host[n] = 0;
    return (int)port;
}

static int exit_code(td_status status)
{
    return status == TD_EINVAL ? TD_EXIT_ARGUMENTS : status == TD_EPEER ? TD_EXIT_PEER : TD_EXIT_FAILED;
}

static int fail(td_status status, const td_error *err)
{
    fprintf(stderr, "tandem linktest: %s\n", err->text);
    return exit_code(status);
}

static td_status measure(td_link *link, const td_settings *settings, results *r, td_error *err)
{
    size_t largest = (size_t)td_settings_int(settings, "exchange-mib") << 20;
    td_status status = measure_gathers(link, (int)td_settings_int(settings, "ops"), r, err);
    if (status == TD_OK) status = measure_exchanges(link, largest, r, err);
    if (status == TD_OK) status = measure_steps(link, r, err);
    if (status == TD_OK) status = td_link_barrier(link, "done", 0, err);
    return status;
}

int td_cli_linktest(int argc, char **argv)
{
    td_settings settings;
    td_error err = { 0 };
    char host[256], canonical[512];
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            printf("usage: tandem linktest --role a            on the first end\n"
                   "       tandem linktest --role b --peer HOST:PORT   on the other\n\n"
                   "Measures gathers and exchanges between two machines or processes and checks every byte.\n");
            td_settings_help(table, N_SETTINGS);
            printf("\nexit codes: 0 done, 1 failed or mismatches, 2 bad settings, 4 the other end is lost\n");
            return TD_EXIT_OK;
        }
    td_status status = td_settings_parse(table, N_SETTINGS, argc, argv, &settings, &err);
    if (status != TD_OK) return fail(TD_EINVAL, &err);
    int port = split_address(td_settings_text(&settings, "peer"), host, sizeof host);
    if (port == 0) {
        td_fail(&err, TD_EINVAL, "--peer %s: expected HOST:PORT", td_settings_text(&settings, "peer"));
        return fail(TD_EINVAL, &err);
    }

    td_link_options o;
    td_link *link = NULL;
    results r = { 0 };
    const char *devices = td_settings_text(&settings, "net-devices");
    td_link_options_init(&o);
    o.rank = strcmp(td_settings_text(&settings, "role"), "b") == 0;
    o.world = 2;
    o.master_host = host;
    o.port = port;
    o.transport = td_settings_text(&settings, "transport");
    o.net_devices = devices[0] ? devices : NULL;
    o.region_bytes = ((size_t)td_settings_int(&settings, "exchange-mib") << 21) + (2 << 20);
    o.wait_ms = (int)td_settings_int(&settings, "wait") * 1000;
    td_settings_canonical(&settings, canonical, sizeof canonical);
    o.settings = canonical;
    td_log_init(TD_LOG_INFO, o.rank);
    status = td_link_open(&o, &link, &err);
    if (status != TD_OK) return fail(status, &err);

    status = measure(link, &settings, &r, &err);
    if (status == TD_OK && td_settings_flag(&settings, "json")) print_json(link, &r);
    if (status == TD_OK && !td_settings_flag(&settings, "json")) print_table(link, &r);
    if (status == TD_OK)
        td_link_announce_stop(link);
    else
        td_link_announce_failure(link, err.text);
    td_link_close(link);
    if (status != TD_OK) return fail(status, &err);
    return total_mismatches(&r) == 0 ? TD_EXIT_OK : TD_EXIT_FAILED;
}
