/* Start and end of the server: options checked and copied, socket bound, states, the graceful stop. */
#include "server/core.h"

#include "base/clock.h"
#include "base/log.h"

#include <errno.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    BODY_LIMIT_BYTES = 96 << 20,
    BODIES_LIMIT_BYTES = 256 << 20,
    MAX_CONNECTIONS = 1024,
    MAX_TOKENS = 32768,
    LISTEN_BACKLOG = 1024,
    OTHER_FDS = 256 /* descriptors of the process that are not connections */
};

/* ------------------------------------------------------------------------------------------------ options --- */

static td_status copy_strings(td_server *server, td_error *err)
{
    td_server_options *o = &server->options;
    const char **fields[] = { &o->host, &o->model_id, &o->checkpoint, &o->backend, &o->version };
    bool whole = true;
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (*fields[i]) whole &= (*fields[i] = td_arena_strdup(&server->arena, *fields[i])) != NULL;
    const char **aliases = td_arena_take(&server->arena, (size_t)(o->n_aliases + 1) * sizeof *aliases, sizeof *aliases);
    for (int i = 0; aliases && i < o->n_aliases; i++)
        whole &= (aliases[i] = td_arena_strdup(&server->arena, o->aliases[i])) != NULL;
    o->aliases = aliases;
    return whole && aliases ? TD_OK : td_fail(err, TD_ENOMEM, "server options: out of memory");
}

static void fill_defaults(td_server_options *o)
{
    if (!o->host) o->host = "127.0.0.1";
    if (!o->checkpoint) o->checkpoint = o->model_id;
    if (!o->backend) o->backend = "cpu";
    if (!o->version) o->version = "";
    if (o->world <= 0) o->world = 1;
    if (o->temperature < 0) o->temperature = o->config ? (double)o->config->temperature : 1.0;
    if (o->top_p < 0) o->top_p = o->config ? (double)o->config->top_p : 1.0;
    if (o->max_tokens <= 0) o->max_tokens = MAX_TOKENS;
    if (o->keepalive_s == 0) o->keepalive_s = 15;
    if (o->body_limit_bytes <= 0) o->body_limit_bytes = BODY_LIMIT_BYTES;
    if (o->bodies_limit_bytes <= 0) o->bodies_limit_bytes = BODIES_LIMIT_BYTES;
    if (o->max_connections <= 0) o->max_connections = MAX_CONNECTIONS;
    if (o->header_timeout_s <= 0) o->header_timeout_s = 30;
    if (o->body_timeout_s <= 0) o->body_timeout_s = 60;
    if (o->write_timeout_s <= 0) o->write_timeout_s = 30;
    if (o->idle_timeout_s <= 0) o->idle_timeout_s = 75;
}

static td_status check_options(const td_server_options *o, td_error *err)
{
    if (!o->model_id || !*o->model_id || strlen(o->model_id) >= TD_MODEL_CAP)
        return td_fail(err, TD_EINVAL, "model id: 1 to %d bytes are needed", TD_MODEL_CAP - 1);
    for (int i = 0; i < o->n_aliases; i++)
        if (!o->aliases[i] || !*o->aliases[i] || strlen(o->aliases[i]) >= TD_MODEL_CAP)
            return td_fail(err, TD_EINVAL, "model alias %d: 1 to %d bytes are needed", i + 1, TD_MODEL_CAP - 1);
    if (o->port < 0 || o->port > 65535) return td_fail(err, TD_EINVAL, "port %d: 0 to 65535 are possible", o->port);
    if (o->context_tokens < 2)
        return td_fail(err, TD_EINVAL, "context of %d tokens: at least 2 are needed", o->context_tokens);
    if (o->n_end_ids > TD_END_IDS_MAX)
        return td_fail(err, TD_EINVAL, "%d end tokens: at most %d are possible", o->n_end_ids, TD_END_IDS_MAX);
    if (o->temperature > 2) return td_fail(err, TD_EINVAL, "temperature %g: at most 2 is possible", o->temperature);
    if (o->top_p == 0 || o->top_p > 1) return td_fail(err, TD_EINVAL, "top_p %g: above 0 and at most 1", o->top_p);
    td_check(o->tokenizer != NULL);
    return TD_OK;
}

static void add_end_id(td_server *server, int32_t id)
{
    for (int i = 0; i < server->n_end_ids; i++)
        if (server->end_ids[i] == id) return;
    if (id >= 0 && server->n_end_ids < TD_END_IDS_MAX) server->end_ids[server->n_end_ids++] = id;
}

/* The checkpoint's end tokens, and the role tags: a model that writes one has finished its turn and would go on with
 * somebody else's. */
static void collect_end_ids(td_server *server)
{
    static const char *const roles[] = { "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>" };
    const td_server_options *o = &server->options;
    for (int i = 0; o->end_ids && i < o->n_end_ids; i++) add_end_id(server, o->end_ids[i]);
    if (o->end_ids) return;
    for (int i = 0; o->config && i < o->config->n_eos; i++) add_end_id(server, o->config->eos[i]);
    for (size_t i = 0; i < sizeof roles / sizeof roles[0]; i++)
        add_end_id(server, td_tokenizer_find_added(o->tokenizer, roles[i]));
}

static void collect_reply_ids(td_server *server)
{
    const td_tokenizer *tok = server->options.tokenizer;
    server->reply_ids = (td_reply_ids){ .think = td_tokenizer_find_added(tok, "<think>"),
                                        .end_think = td_tokenizer_find_added(tok, "</think>"),
                                        .begin_box = td_tokenizer_find_added(tok, "<|begin_of_box|>"),
                                        .end_box = td_tokenizer_find_added(tok, "<|end_of_box|>") };
}

/* ------------------------------------------------------------------------------------------------- socket --- */

static void note_address(td_server *server, int fd)
{
    struct sockaddr_storage bound;
    socklen_t n_bytes = sizeof bound;
    memset(&bound, 0, sizeof bound);
    getsockname(fd, (struct sockaddr *)&bound, &n_bytes);
    if (bound.ss_family == AF_INET6) {
        const struct sockaddr_in6 *a = (const struct sockaddr_in6 *)&bound;
        server->port = ntohs(a->sin6_port);
        server->loopback = IN6_IS_ADDR_LOOPBACK(&a->sin6_addr);
    } else {
        const struct sockaddr_in *a = (const struct sockaddr_in *)&bound;
        server->port = ntohs(a->sin_port);
        server->loopback = ntohl(a->sin_addr.s_addr) >> 24 == 127;
    }
}

static int try_listen(const struct addrinfo *address)
{
    int on = 1, off = 0;
    int fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (address->ai_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (bind(fd, address->ai_addr, address->ai_addrlen) == 0 && listen(fd, LISTEN_BACKLOG) == 0) return fd;
    int saved = errno;
    close(fd);
    errno = saved;
    return -1;
}

static td_status open_socket(td_server *server, int *out, td_error *err)
{
    const td_server_options *o = &server->options;
    char port[16];
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV }, *found = NULL;
    snprintf(port, sizeof port, "%d", o->port);
    int failed = getaddrinfo(o->host, port, &hints, &found);
    if (failed) return td_fail(err, TD_EINVAL, "host %s: %s", o->host, gai_strerror(failed));
    int fd = -1;
    for (struct addrinfo *a = found; a && fd < 0; a = a->ai_next) fd = try_listen(a);
    freeaddrinfo(found);
    if (fd < 0) return td_fail(err, TD_EIO, "cannot listen on %s port %d: %s", o->host, o->port, strerror(errno));
    note_address(server, fd);
    *out = fd;
    return TD_OK;
}

/* A descriptor a connection: the usual soft limit of 1024 would end before the limit of connections does. */
static void raise_descriptor_limit(int max_connections)
{
    struct rlimit limit;
    rlim_t need = (rlim_t)max_connections + OTHER_FDS;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= need) return;
    limit.rlim_cur = limit.rlim_max < need ? limit.rlim_max : need;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur < need)
        td_log(TD_LOG_WARN, "server", "only %llu descriptors are allowed for %d connections",
               (unsigned long long)limit.rlim_cur, max_connections);
}

/* --------------------------------------------------------------------------------------------- life cycle --- */

static td_status start_conns(td_server *server, td_error *err)
{
    td_buf reply;
    td_refusal why;
    td_refuse(&why, 408, NULL, NULL, "the request did not arrive in time");
    td_buf_init(&reply, 0);
    td_http_closing_reply(server, NULL, &why, &reply);
    td_status st = reply.failed ? td_fail(err, TD_ENOMEM, "server: out of memory") : TD_OK;
    if (st == TD_OK)
        st = td_conns_init(&server->conns, server->options.header_timeout_s, server->options.body_timeout_s,
                           server->options.idle_timeout_s, server->options.write_timeout_s, reply.data, err);
    td_buf_deinit(&reply);
    return st;
}

static td_status start(td_server *server, td_error *err)
{
    const td_server_options *o = &server->options;
    int fd = -1;
    td_status st = copy_strings(server, err);
    if (st == TD_OK) st = td_auth_create(o->keys, o->n_keys, o->keys_env, o->keys_file, &server->auth, err);
    if (st != TD_OK) return st;
    collect_reply_ids(server);
    collect_end_ids(server);
    raise_descriptor_limit(o->max_connections);
    if (!(server->metrics = td_metrics_create())) return td_fail(err, TD_ENOMEM, "server: out of memory");
    if ((st = open_socket(server, &fd, err)) != TD_OK) return st;
    if ((st = start_conns(server, err)) != TD_OK) {
        close(fd);
        return st;
    }
    if ((st = td_http_start(server, fd, err)) != TD_OK) {
        td_conns_deinit(&server->conns);
        close(fd);
        return st;
    }
    if (!server->loopback && td_auth_is_open(server->auth))
        td_log(TD_LOG_WARN, "server", "%s port %d is open to everyone who can reach it: no API key is set", o->host,
               server->port);
    return TD_OK;
}

td_status td_server_create(const td_server_options *options, td_server **out, td_error *err)
{
    td_server *server = calloc(1, sizeof *server);
    if (!server) return td_fail(err, TD_ENOMEM, "server: out of memory");
    server->options = *options;
    fill_defaults(&server->options);
    server->created_s = td_wall_s();
    td_arena_init(&server->arena, 0);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&server->mutex, NULL);
    pthread_cond_init(&server->idle, &attr);
    pthread_condattr_destroy(&attr);
    td_status st = check_options(&server->options, err);
    if (st == TD_OK) st = start(server, err);
    if (st != TD_OK) {
        td_server_destroy(server);
        return st;
    }
    *out = server;
    return TD_OK;
}

int td_server_port(const td_server *server)
{
    return server->port;
}

void td_server_progress(td_server *server, int64_t done, int64_t total)
{
    atomic_store(&server->progress_done, done);
    atomic_store(&server->progress_total, total);
}

void td_server_ready(td_server *server, td_engine *engine)
{
    int loading = TD_SERVER_LOADING;
    atomic_store(&server->engine, engine);
    atomic_compare_exchange_strong(&server->state, &loading, TD_SERVER_READY);
}

void td_server_failed(td_server *server, const char *message)
{
    pthread_mutex_lock(&server->mutex);
    snprintf(server->failure, sizeof server->failure, "%s", message);
    pthread_mutex_unlock(&server->mutex);
    int state = atomic_load(&server->state);
    while (state != TD_SERVER_STOPPING && !atomic_compare_exchange_weak(&server->state, &state, TD_SERVER_FAILED))
        ;
}

/* Until no call is left, or limit_s. */
static void wait_for_calls(td_server *server, double limit_s)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)limit_s;
    until.tv_nsec += (long)((limit_s - (double)(time_t)limit_s) * 1e9);
    until.tv_sec += until.tv_nsec / 1000000000l;
    until.tv_nsec %= 1000000000l;
    pthread_mutex_lock(&server->mutex);
    while (server->n_calls > 0 && pthread_cond_timedwait(&server->idle, &server->mutex, &until) == 0)
        ;
    pthread_mutex_unlock(&server->mutex);
}

void td_server_stop(td_server *server, double limit_s)
{
    enum { LAST_EVENTS_S = 2 };
    if (!server->daemon) return;
    atomic_store(&server->state, TD_SERVER_STOPPING);
    int listen_fd = MHD_quiesce_daemon(server->daemon);
    if (listen_fd >= 0) close(listen_fd);
    wait_for_calls(server, limit_s > 0 ? limit_s : 0);
    atomic_store(&server->cancel, true);
    wait_for_calls(server, LAST_EVENTS_S);
    MHD_stop_daemon(server->daemon); /* joins every connection's thread */
    server->daemon = NULL;
    td_conns_deinit(&server->conns);
    atomic_store(&server->engine, NULL);
}

void td_server_destroy(td_server *server)
{
    if (!server) return;
    td_server_stop(server, 0);
    td_auth_destroy(server->auth);
    td_metrics_destroy(server->metrics);
    td_arena_deinit(&server->arena);
    pthread_cond_destroy(&server->idle);
    pthread_mutex_destroy(&server->mutex);
    free(server);
}

void td_server_reload_keys(td_server *server)
{
    td_auth_reload(server->auth);
}
