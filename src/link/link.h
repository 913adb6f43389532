/* The exchange between ranks: one interface for one rank alone (loop) and for two ranks over UCX (RoCE, shared memory,
 * TCP). docs/link.md says why it is built this way.
 *
 * Life. td_link_options_init, fill in, td_link_open (blocks until the pair is formed), td_link_buffer for every buffer
 * that gathers and exchanges use, load, td_link_barrier("loaded"), work, td_link_announce_stop, td_link_close.
 *
 * Threads. Open, buffer, gather, exchange, progress, check, send_step, recv_step and close belong to one thread at a
 * time (the engine thread); the others may be called from any thread. The link has one thread of its own, for the
 * control connection: beats, liveness, progress reports.
 *
 * Errors.
 * - TD_EPEER: the other rank is gone, silent or late beyond its limit, or out of step; err says which. The link stays
 *   unusable (TD_LINK_LOST): close it before freeing buffers it was given, and end this process with exit code 4.
 * - TD_ECANCELED: a clean stop was announced, by either rank.
 * - TD_ETIMEOUT: the caller's own limit ran out; the link is as it was.
 * - TD_EINVAL: an argument or a setting; from td_link_open also that the ranks differ (both return it, exit code 2).
 * No function waits for ever: each ends when the peer is lost or its limit runs out. */
#ifndef TD_LINK_LINK_H
#define TD_LINK_LINK_H

#include "base/status.h"

TD_BEGIN_C

#define TD_LINK_WORLD_MAX  2
#define TD_LINK_STEP_MAX   ((size_t)16 << 20) /* bytes of one step message */
#define TD_LINK_LABEL_MAX  63                 /* bytes of a barrier's label */
#define TD_LINK_PIECES_MAX 8                  /* pieces of one exchange */

typedef struct td_link td_link;

typedef struct td_link_options {
    int rank, world;         /* world 1: nothing below is used but gather_max_bytes and region_bytes */
    const char *master_host; /* where rank 1 finds rank 0; rank 0 binds to it unless bind_host is set. "127.0.0.1" */
    const char *bind_host;   /* rank 0: address to listen on, the link's own address; NULL = master_host */
    const char *peer_host;   /* rank 0: other addresses are dropped unread; NULL = whoever can reach us may connect */
    int port;                /* control port, 29551 */
    const char *transport;   /* "auto" "shm" "tcp" "rc" */
    const char *net_devices; /* UCX network devices, e.g. "eth0" or "rocep1s0f0:1,roceP2p1s0f0:1"; NULL = all */

    size_t gather_max_bytes; /* most bytes one rank gives to a gather, 1 MiB */
    size_t region_bytes;     /* sum of all td_link_buffer calls, each rounded up to 4096; 8 MiB */

    const char *settings;   /* "key=value\n" lines that must be equal on all ranks; NULL = none */
    const char *build;      /* hash of this program; must be equal; NULL = "" */
    const char *checkpoint; /* hash of the checkpoint; must be equal; NULL = "" */

    int wait_ms;                     /* td_link_open: until the peer is there, 60,000 */
    bool (*keep_waiting)(void *arg); /* asked about 20 times a second meanwhile; false: TD_ECANCELED. NULL = always */
    void *keep_waiting_arg;
    int beat_ms;         /* between two beats, 2,000 */
    int warn_ms;         /* no beat, or a late gather: a warning in the log, 5,000 */
    int peer_timeout_ms; /* no beat: lost, 120,000; 0 = never */
    int late_ms;         /* beats, but no gather, exchange or rest of a step message: lost, 300,000 */
    int cable_ms;        /* kernel: data unacknowledged or keepalive unanswered: lost, 11,000 */
    int report_ms;       /* between two "waiting for ..." lines, 10,000 while opening, 60,000 at barriers: 0 = those */
} td_link_options;

void td_link_options_init(td_link_options *options); /* the defaults above; rank 0 of world 1 */

/* Forms the pair (either rank may start first), compares build, checkpoint and settings, registers the region, and runs
 * one gather and one exchange so that the first real one finds everything connected. On failure *out is untouched. */
td_status td_link_open(const td_link_options *options, td_link **out, td_error *err);
void td_link_close(td_link *link); /* NULL is allowed. Bounded: at most about two seconds, whatever the peer does. */

int td_link_rank(const td_link *link);
int td_link_world(const td_link *link);
uint64_t td_link_generation(const td_link *link);   /* rank 0's random id of this pair; 0 for world 1 */
const char *td_link_transport(const td_link *link); /* "loop", "auto", "shm", "tcp", "rc" */

/* n_bytes of the registered region at a multiple of 4096, zeroed; NULL when the region is used up. Never given back.
 * Both ranks need not take the same buffers. */
void *td_link_buffer(td_link *link, size_t n_bytes);

/* All-gather in rank order, in place: buf is [world][n_bytes]; the caller has filled buf[rank]; afterwards every rank
 * holds the same buf. World 1: returns at once. 0 < n_bytes <= gather_max_bytes, the same on all ranks (checked).
 * buf should come from td_link_buffer; other memory works, more slowly. */
td_status td_link_gather(td_link *link, void *buf, size_t n_bytes, td_error *err);

/* Large exchange with the peer (prompt chunks, 1 to 64 MiB): sends send_bytes of mine, receives recv_bytes into theirs,
 * in up to TD_LINK_PIECES_MAX pieces cut by the same rule on both sides. Either size may be 0; one rank's send_bytes is
 * the other's recv_bytes. World 1: there is no peer, theirs is left alone.
 *
 *     td_exchange x;
 *     td_link_exchange_start(link, &x, mine, n, theirs, n, err);     both buffers are lent from here on
 *     for (size_t have = 0; have < n;) {
 *         td_link_exchange_wait(link, &x, have + 1, &have, err);      at least have + 1 bytes of theirs are there
 *         ... add up what came; td_link_progress(link) now and then keeps the rest moving ...
 *     }
 *     td_link_exchange_finish(link, &x, err);                         both are the caller's again
 *
 * One exchange at a time; gathers may run between start and finish. */
typedef struct td_exchange {
    uint64_t number;
    size_t recv_bytes, arrived_bytes, recv_piece_bytes;
    int n_send, n_recv, next_recv; /* pieces; the first one not yet arrived */
} td_exchange;

td_status td_link_exchange_start(td_link *link, td_exchange *x, const void *mine, size_t send_bytes, void *theirs,
                                 size_t recv_bytes, td_error *err);
td_status td_link_exchange_wait(td_link *link, td_exchange *x, size_t until_bytes, size_t *arrived_bytes,
                                td_error *err);
td_status td_link_exchange_finish(td_link *link, td_exchange *x, td_error *err);
/* The three at once, n_bytes each way. */
td_status td_link_exchange(td_link *link, const void *mine, void *theirs, size_t n_bytes, td_error *err);

void td_link_progress(td_link *link); /* moves transfers on, never waits */

/* Step messages, rank 0 to the others: sequence number and checksum, in order, over a connection of their own. Sending
 * returns when the kernel has the bytes. Receiving waits without spinning (after a moment) until a message, the limit
 * (TD_ETIMEOUT; < 0 = none), a stop or a loss. n_bytes <= TD_LINK_STEP_MAX; a message larger than cap is TD_EPEER.
 * World 1: sending does nothing; receiving is TD_EINVAL, as on rank 0. */
td_status td_link_send_step(td_link *link, const void *bytes, size_t n_bytes, td_error *err);
td_status td_link_recv_step(td_link *link, void *buf, size_t cap_bytes, size_t *n_bytes, int timeout_ms, td_error *err);

/* Compares a 64-bit checksum of all ranks (a gather); a difference is TD_EPEER naming `what` and both values. `what`
 * itself must be equal too. */
td_status td_link_check(td_link *link, const char *what, uint64_t checksum, td_error *err);

/* While loading: what this rank has read, for the other's log and for whoever shows it. Any thread, cheap. */
void td_link_report_progress(td_link *link, uint64_t done, uint64_t total);
void td_link_peer_progress(td_link *link, uint64_t *done, uint64_t *total); /* 0, 0 before the first report */

/* Waits until the peer is at the barrier of the same number; its label must be equal. timeout_ms 0 = until the peer is
 * lost. While waiting, a line in the log says for whom and how far it is. */
td_status td_link_barrier(td_link *link, const char *label, int timeout_ms, td_error *err);

/* Tells the peer that this rank is about to end: cleanly (the peer sees TD_LINK_STOPPED, no loss), or because of a
 * failure (the peer is lost and its error carries the text). Follow with td_link_close. */
void td_link_announce_stop(td_link *link);
void td_link_announce_failure(td_link *link, const char *text);

typedef enum td_link_health {
    TD_LINK_UP,
    TD_LINK_STOPPED, /* this rank or the peer announced a clean stop */
    TD_LINK_LOST     /* see td_link_lost_reason */
} td_link_health;

td_link_health td_link_state(const td_link *link);           /* one atomic load; any thread */
td_status td_link_lost_reason(td_link *link, td_error *err); /* TD_OK when up, else what the waiting functions return */

TD_END_C
#endif
