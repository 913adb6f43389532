/* The public functions: arguments checked, the region handed out, the transport called. See link.h. */
#include "link/link.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/hash.h"
#include "base/log.h"
#include "link/transport.h"

#define PAGE_BYTES ((size_t)4096)
#define WARM_BYTES ((size_t)256 << 10) /* first gather and exchange, to find everything connected */
#define PIECE_MIN  ((size_t)512 << 10) /* below that a piece's fixed cost shows: docs/link.md */

void td_link_options_init(td_link_options *o)
{
    *o = (td_link_options){ .world = 1,
                            .master_host = "127.0.0.1",
                            .port = 29551,
                            .transport = "auto",
                            .gather_max_bytes = (size_t)1 << 20,
                            .region_bytes = (size_t)8 << 20,
                            .wait_ms = 60000,
                            .beat_ms = 2000,
                            .warn_ms = 5000,
                            .peer_timeout_ms = 120000,
                            .late_ms = 300000,
                            .cable_ms = 11000 };
}

static td_status check_range(const char *name, long long value, long long least, long long most, td_error *err)
{
    if (value >= least && value <= most) return TD_OK;
    return td_fail(err, TD_EINVAL, "link option %s: %lld, allowed are %lld to %lld", name, value, least, most);
}

static td_status check_options(const td_link_options *o, td_error *err)
{
    const int day_ms = 86400000;
    const struct {
        const char *name;
        long long value, least, most;
    } ranges[] = {
        { "world", o->world, 1, TD_LINK_WORLD_MAX },
        { "rank", o->rank, 0, o->world - 1 },
        { "gather_max_bytes", (long long)o->gather_max_bytes, 16, 64 << 20 },
        { "region_bytes", (long long)o->region_bytes, 0, 1ll << 40 },
        { "port", o->world > 1 ? o->port : 1, 1, 65535 },
        { "wait_ms", o->wait_ms, 1, day_ms },
        { "beat_ms", o->beat_ms, 1, day_ms },
        { "warn_ms", o->warn_ms, 1, day_ms },
        { "peer_timeout_ms", o->peer_timeout_ms, 0, day_ms },
        { "late_ms", o->late_ms, 1, day_ms },
        { "cable_ms", o->cable_ms, 1, day_ms },
        { "report_ms", o->report_ms, 0, day_ms },
    };
    for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++) {
        td_status status = check_range(ranges[i].name, ranges[i].value, ranges[i].least, ranges[i].most, err);
        if (status != TD_OK) return status;
    }
    const char *known[] = { "auto", "shm", "tcp", "rc" };
    for (int i = 0; i < 4; i++)
        if (strcmp(o->transport, known[i]) == 0) return TD_OK;
    return td_fail(err, TD_EINVAL, "link option transport: '%s', allowed are auto, shm, tcp, rc", o->transport);
}

static const char *stable_name(const char *transport)
{
    static const char *const names[] = { "auto", "shm", "tcp", "rc" };
    int i = 0;
    while (i < 3 && strcmp(transport, names[i]) != 0) i++;
    return names[i];
}

/* Transports connect lazily, and each way of sending (short, copied, zero-copy) on its own: go once through all, and
 * see that the bytes are right. */
static td_status warm(td_link *link, td_error *err)
{
    unsigned char *buf = td_link_buffer(link, 2 * WARM_BYTES);
    int peer = 1 - link->rank;
    for (size_t n = 16; n <= WARM_BYTES && n <= link->gather_max_bytes; n *= 4) {
        memset(buf + (size_t)link->rank * n, 0x40 + link->rank, n);
        td_status status = td_link_gather(link, buf, n, err);
        if (status != TD_OK) return status;
        for (size_t i = 0; i < n; i++)
            if (buf[(size_t)peer * n + i] != 0x40 + peer)
                return td_control_lose(link->control, err, "transport %s delivers wrong bytes", link->name);
    }
    return td_link_exchange(link, buf + (size_t)link->rank * WARM_BYTES, buf + (size_t)peer * WARM_BYTES, WARM_BYTES,
                            err);
}

static td_status open_pair(td_link *link, const td_link_options *o, td_error *err)
{
    td_pair pair;
    td_status status = td_pair_form(o, &pair, err);
    if (status != TD_OK) return status;
    link->generation = pair.generation;
    status = td_control_start(o, &pair, &link->control, err);
    if (status == TD_OK) status = td_steps_create(link, err);
    if (status == TD_OK) status = td_ucx_open(link, o, err);
    if (status == TD_OK) status = warm(link, err);
    return status;
}

/* Room for the callers' buffers, for td_link_check and for warm(). */
static td_status map_region(td_link *link, size_t bytes, td_error *err)
{
    size_t own_bytes = PAGE_BYTES + (link->world > 1 ? 2 * WARM_BYTES : 0);
    link->region_bytes = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES + own_bytes;
    void *at = mmap(NULL, link->region_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return td_fail(err, TD_ENOMEM, "link region of %zu bytes", link->region_bytes);
    link->region = at;
    link->check = td_link_buffer(link, PAGE_BYTES);
    return TD_OK;
}

td_status td_link_open(const td_link_options *options, td_link **out, td_error *err)
{
    td_status status = check_options(options, err);
    if (status == TD_OK && options->world > 1) status = td_ucx_available(err);
    if (status != TD_OK) return status;
    td_link *link = calloc(1, sizeof *link);
    if (!link) return td_fail(err, TD_ENOMEM, "link: out of memory");
    *link = (td_link){ .rank = options->rank,
                       .world = options->world,
                       .warn_ms = options->warn_ms,
                       .late_ms = options->late_ms,
                       .gather_max_bytes = options->gather_max_bytes,
                       .name = options->world == 1 ? "loop" : stable_name(options->transport),
                       .ops = options->world == 1 ? &td_transport_loop : &td_transport_ucx };
    status = map_region(link, options->region_bytes, err);
    if (status == TD_OK && link->world > 1) status = open_pair(link, options, err);
    if (status != TD_OK) {
        if (link->control && err) td_link_announce_failure(link, err->text);
        td_link_close(link);
        return status;
    }
    *out = link;
    return TD_OK;
}

void td_link_close(td_link *link)
{
    if (!link) return;
    link->ops->close(link);
    td_control_stop(link->control);
    td_steps_destroy(link);
    if (link->region) munmap(link->region, link->region_bytes);
    free(link);
}

int td_link_rank(const td_link *link)
{
    return link->rank;
}

int td_link_world(const td_link *link)
{
    return link->world;
}

uint64_t td_link_generation(const td_link *link)
{
    return link->generation;
}

const char *td_link_transport(const td_link *link)
{
    return link->name;
}

void *td_link_buffer(td_link *link, size_t n_bytes)
{
    if (n_bytes > link->region_bytes) return NULL;
    size_t need = (n_bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    if (need > link->region_bytes - link->region_used_bytes) return NULL;
    void *at = link->region + link->region_used_bytes;
    link->region_used_bytes += need;
    return at;
}

td_status td_link_gather(td_link *link, void *buf, size_t n_bytes, td_error *err)
{
    if (n_bytes == 0 || n_bytes > link->gather_max_bytes)
        return td_fail(err, TD_EINVAL, "gather of %zu bytes, allowed are 1 to %zu", n_bytes, link->gather_max_bytes);
    if (td_link_state(link) == TD_LINK_LOST) return td_link_lost_reason(link, err);
    return link->ops->gather(link, buf, n_bytes, err);
}

size_t td_exchange_piece_bytes(size_t n_bytes)
{
    size_t piece = (n_bytes + TD_LINK_PIECES_MAX - 1) / TD_LINK_PIECES_MAX;
    piece = (piece + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    return piece < PIECE_MIN ? PIECE_MIN : piece;
}

static int n_pieces(size_t n_bytes, size_t piece_bytes)
{
    return (int)((n_bytes + piece_bytes - 1) / piece_bytes);
}

td_status td_link_exchange_start(td_link *link, td_exchange *x, const void *mine, size_t send_bytes, void *theirs,
                                 size_t recv_bytes, td_error *err)
{
    if (td_link_state(link) == TD_LINK_LOST) return td_link_lost_reason(link, err);
    if (link->exchanging) return td_fail(err, TD_EINVAL, "an exchange is under way: finish it first");
    size_t send_piece = td_exchange_piece_bytes(send_bytes), recv_piece = td_exchange_piece_bytes(recv_bytes);
    *x = (td_exchange){ .number = ++link->n_exchanges,
                        .recv_bytes = recv_bytes,
                        .recv_piece_bytes = recv_piece,
                        .n_send = n_pieces(send_bytes, send_piece),
                        .n_recv = n_pieces(recv_bytes, recv_piece) };
    td_status status = link->ops->exchange_start(link, x, mine, send_bytes, send_piece, theirs, err);
    link->exchanging = true; /* also after a failure: the transport holds on to the buffers, and the link is lost */
    return status;
}

td_status td_link_exchange_wait(td_link *link, td_exchange *x, size_t until_bytes, size_t *arrived_bytes, td_error *err)
{
    if (!link->exchanging || x->number != link->n_exchanges)
        return td_fail(err, TD_EINVAL, "this exchange is not under way");
    if (until_bytes > x->recv_bytes)
        return td_fail(err, TD_EINVAL, "waiting for %zu bytes of an exchange of %zu", until_bytes, x->recv_bytes);
    while (x->next_recv < x->n_recv && x->arrived_bytes < until_bytes) {
        td_status status = link->ops->exchange_piece(link, x, x->next_recv, err);
        if (status != TD_OK) return status;
        x->next_recv++;
        x->arrived_bytes = x->next_recv == x->n_recv ? x->recv_bytes : (size_t)x->next_recv * x->recv_piece_bytes;
    }
    if (x->n_recv == 0) x->arrived_bytes = x->recv_bytes;
    *arrived_bytes = x->arrived_bytes;
    return TD_OK;
}

td_status td_link_exchange_finish(td_link *link, td_exchange *x, td_error *err)
{
    size_t arrived;
    td_status status = td_link_exchange_wait(link, x, x->recv_bytes, &arrived, err);
    if (status == TD_OK) status = link->ops->exchange_sent(link, x, err);
    if (status == TD_OK) link->exchanging = false;
    return status;
}

td_status td_link_exchange(td_link *link, const void *mine, void *theirs, size_t n_bytes, td_error *err)
{
    td_exchange x;
    td_status status = td_link_exchange_start(link, &x, mine, n_bytes, theirs, n_bytes, err);
    return status == TD_OK ? td_link_exchange_finish(link, &x, err) : status;
}

void td_link_progress(td_link *link)
{
    link->ops->progress(link);
}

td_status td_link_check(td_link *link, const char *what, uint64_t checksum, td_error *err)
{
    uint64_t name = td_fnv1a(TD_FNV1A_START, what, strlen(what)), (*of)[2] = (void *)link->check;
    of[link->rank][0] = checksum;
    of[link->rank][1] = name;
    td_status status = td_link_gather(link, link->check, sizeof of[0], err);
    if (status != TD_OK) return status;
    for (int r = 0; r < link->world; r++) {
        if (of[r][1] != name)
            return td_control_lose(link->control, err,
                                   "rank %d is out of step: this rank checks %s, rank %d something else", r, what, r);
        if (of[r][0] != of[0][0] || of[r][0] != checksum)
            return td_control_lose(link->control, err, "the ranks differ in %s: rank 0 has %016llx, rank 1 has %016llx",
                                   what, (unsigned long long)of[0][0], (unsigned long long)of[1][0]);
    }
    return TD_OK;
}

void td_link_report_progress(td_link *link, uint64_t done, uint64_t total)
{
    if (link->control) td_control_report_progress(link->control, done, total);
}

void td_link_peer_progress(td_link *link, uint64_t *done, uint64_t *total)
{
    *done = *total = 0;
    if (link->control) td_control_peer_progress(link->control, done, total);
}

td_status td_link_barrier(td_link *link, const char *label, int timeout_ms, td_error *err)
{
    size_t n = strlen(label);
    if (n == 0 || n > TD_LINK_LABEL_MAX) return td_fail(err, TD_EINVAL, "barrier label of %zu bytes", n);
    link->ops->progress(link);
    return link->control ? td_control_barrier(link->control, label, timeout_ms, err) : TD_OK;
}

void td_link_announce_stop(td_link *link)
{
    if (link->control) td_control_announce_stop(link->control);
}

void td_link_announce_failure(td_link *link, const char *text)
{
    if (link->control) td_control_announce_failure(link->control, text);
}

td_link_health td_link_state(const td_link *link)
{
    return link->control ? td_control_health(link->control) : TD_LINK_UP;
}

td_status td_link_lost_reason(td_link *link, td_error *err)
{
    return link->control ? td_control_reason(link->control, err) : TD_OK;
}
