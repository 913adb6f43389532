/* See pair.h.
 *
 *     rank 1                          rank 0
 *     connect, HELLO(identity) ---->  compares
 *             <---- WELCOME(identity, generation) or REFUSE(why); then both end with the same words
 *     compares too
 *     second connection, JOIN(generation) ---->  the pair is formed
 *
 * Until then either end may vanish and come back: rank 0 starts over with the next HELLO and a new generation, rank 1
 * connects again. Only a well-formed HELLO counts as a word of our peer; anything else is dropped at the door. */
#include "link/pair.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "link/handshake.h"

#define RETRY_MS   50
#define MESSAGE_MS 2000 /* for one small message to leave this machine */

typedef struct waiting {
    int64_t start_ns, end_ns, report_ns, next_report_ns;
} waiting;

static waiting waiting_start(const td_link_options *o)
{
    int64_t now = td_now_ns(), report_ns = (int64_t)(o->report_ms > 0 ? o->report_ms : 10000) * 1000000;
    return (waiting){ now, now + (int64_t)o->wait_ms * 1000000, report_ns, now + report_ns };
}

static void waiting_report(waiting *w, const char *host, int port, int for_rank, const char *last)
{
    int64_t now = td_now_ns();
    if (now < w->next_report_ns) return;
    w->next_report_ns = now + w->report_ns;
    td_log(TD_LOG_INFO, "link", "waiting for rank %d (%s port %d) for %lld s%s%s", for_rank, host, port,
           (long long)((now - w->start_ns) / 1000000000), last[0] ? ": " : "", last);
}

/* TD_OK, or TD_ECANCELED when whoever opens the link has lost interest. */
static td_status still_wanted(const td_link_options *o, td_error *err)
{
    if (!o->keep_waiting || o->keep_waiting(o->keep_waiting_arg)) return TD_OK;
    return td_fail(err, TD_ECANCELED, "stopped while waiting for rank %d", 1 - o->rank);
}

static td_status send_frame(int fd, td_frame_type type, uint64_t generation, const void *payload, size_t n_bytes)
{
    uint8_t head[TD_FRAME_HEAD_BYTES];
    td_frame_write(head, type, 0, generation, payload, n_bytes);
    td_status status = td_net_send_all(fd, head, sizeof head, MESSAGE_MS);
    return status == TD_OK ? td_net_send_all(fd, payload, n_bytes, MESSAGE_MS) : status;
}

void td_pair_refuse(const td_visit *visit, td_refusal kind, const char *text)
{
    uint8_t payload[1 + TD_ERROR_TEXT_CAP];
    size_t n = strnlen(text, TD_ERROR_TEXT_CAP);
    payload[0] = (uint8_t)kind;
    memcpy(payload + 1, text, n);
    (void)send_frame(visit->fd, TD_FRAME_REFUSE, 0, payload, 1 + n);
    close(visit->fd);
}

static void drop_fd(int *fd)
{
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

void td_pair_close(td_pair *pair)
{
    drop_fd(&pair->control_fd);
    drop_fd(&pair->step_fd);
    td_door_close(&pair->door);
    free(pair->identity);
    pair->identity = NULL;
}

/* --- rank 0 --- */

/* A guest said HELLO. TD_OK: welcomed, or dropped as nobody of ours; otherwise the ranks differ and this rank ends. */
static td_status greet(const td_link_options *o, td_pair *pair, const td_visit *visit, td_error *err)
{
    const char *theirs = (const char *)visit->payload;
    td_error why;
    if (visit->wrong_protocol) {
        td_fail(&why, TD_EINVAL, "the ranks differ in protocol: rank 0 speaks %d, rank 1 speaks %d", TD_LINK_PROTOCOL,
                visit->frame.protocol);
    } else if (td_identity_check(theirs, visit->frame.n_bytes, &why) != TD_OK) {
        td_log(TD_LOG_WARN, "link", "dropped a connection from %s: %s", visit->name, why.text);
        close(visit->fd);
        return TD_OK;
    } else if (td_identity_compare(pair->identity, pair->identity_bytes, o->rank, theirs, visit->frame.n_bytes, 1,
                                   &why) == TD_OK) {
        drop_fd(&pair->control_fd);
        if (getrandom(&pair->generation, sizeof pair->generation, 0) != (ssize_t)sizeof pair->generation)
            pair->generation = (uint64_t)td_now_ns() * 0x9e3779b97f4a7c15ull;
        pair->generation |= 1; /* never 0: that is "no pair yet" */
        if (send_frame(visit->fd, TD_FRAME_WELCOME, pair->generation, pair->identity, pair->identity_bytes) == TD_OK)
            pair->control_fd = visit->fd;
        else
            close(visit->fd);
        return TD_OK;
    }
    td_pair_refuse(visit, TD_REFUSE_DIFFERS, why.text);
    return td_fail(err, TD_EINVAL, "%s", why.text);
}

static td_status form_rank0(const td_link_options *o, td_pair *pair, td_error *err)
{
    const char *host = o->bind_host ? o->bind_host : o->master_host;
    td_status status = td_door_open(&pair->door, host, o->port, o->peer_host, err);
    waiting w = waiting_start(o);
    while (status == TD_OK && pair->step_fd < 0 && td_now_ns() < w.end_ns) {
        struct pollfd polls[TD_GUESTS_MAX + 2];
        td_visit visit;
        int n = td_door_polls(&pair->door, polls);
        polls[n] = (struct pollfd){ .fd = pair->control_fd, .events = POLLRDHUP };
        poll(polls, (nfds_t)n + 1, RETRY_MS);
        if (polls[n].revents) drop_fd(&pair->control_fd); /* it left before joining */
        while (status == TD_OK && pair->step_fd < 0 && td_door_serve(&pair->door, &visit)) {
            if (visit.wrong_protocol || visit.frame.type == TD_FRAME_HELLO)
                status = greet(o, pair, &visit, err);
            else if (pair->control_fd >= 0 && visit.frame.generation == pair->generation)
                pair->step_fd = visit.fd;
            else
                close(visit.fd);
        }
        waiting_report(&w, host, o->port, 1, "");
        if (status == TD_OK && pair->step_fd < 0) status = still_wanted(o, err);
    }
    if (status == TD_OK && pair->step_fd < 0)
        status =
            td_fail(err, TD_ETIMEOUT, "rank 1 did not connect to %s port %d within %d ms", host, o->port, o->wait_ms);
    return status;
}

/* --- rank 1 --- */

/* TD_EAGAIN: connect again; why says what happened. */
static td_status on_reply(const td_link_options *o, td_pair *pair, const td_frame *frame, const uint8_t *payload,
                          td_error *err)
{
    if (frame->type == TD_FRAME_REFUSE) {
        char text[TD_ERROR_TEXT_CAP];
        td_printable(text, sizeof text, payload + 1, frame->n_bytes - 1);
        if (payload[0] == TD_REFUSE_FORMED) return td_fail(err, TD_EPEER, "rank 0 refused this rank: %s", text);
        return td_fail(err, TD_EINVAL, "%s", text);
    }
    if (td_identity_check((const char *)payload, frame->n_bytes, err) != TD_OK)
        return td_fail(err, TD_EAGAIN, "rank 0's welcome is malformed");
    td_status status = td_identity_compare(pair->identity, pair->identity_bytes, o->rank, (const char *)payload,
                                           frame->n_bytes, 0, err);
    if (status == TD_OK) pair->generation = frame->generation;
    return status;
}

static td_status await_reply(const td_link_options *o, td_pair *pair, td_frame_reader *reader, waiting *w,
                             td_error *err)
{
    for (;;) {
        struct pollfd p = { .fd = pair->control_fd, .events = POLLIN };
        const char *why = NULL;
        size_t space;
        td_frame frame = { 0 };
        const uint8_t *payload;
        if (td_now_ns() > w->end_ns) return td_fail(err, TD_EAGAIN, "connected, but no answer");
        if (still_wanted(o, err) != TD_OK) return TD_ECANCELED;
        poll(&p, 1, RETRY_MS);
        waiting_report(w, o->master_host, o->port, 0, "connected, but no answer yet");
        void *to = td_frame_space(reader, &space);
        long n = td_net_recv(pair->control_fd, to, space, &why);
        if (n < 0) return td_fail(err, TD_EAGAIN, "the connection was %s without an answer", why);
        td_frame_added(reader, (size_t)n);
        td_status status = td_frame_next(reader, &frame, &payload, err);
        if (status == TD_OK) return on_reply(o, pair, &frame, payload, err);
        if (status == TD_EUNSUPPORTED)
            return td_fail(err, TD_EINVAL, "the ranks differ in protocol: rank 0 speaks %d, rank 1 speaks %d",
                           frame.protocol, TD_LINK_PROTOCOL);
        if (status != TD_EAGAIN) return td_fail(err, TD_EAGAIN, "what answers there is not tandem");
    }
}

static td_status try_rank1(const td_link_options *o, td_pair *pair, td_frame_reader *reader, waiting *w, td_error *err)
{
    const int connect_ms = 2000;
    reader->used_bytes = reader->taken_bytes = 0;
    td_status status = td_net_connect(o->master_host, o->port, connect_ms, &pair->control_fd, err);
    if (status != TD_OK) return status;
    if (send_frame(pair->control_fd, TD_FRAME_HELLO, 0, pair->identity, pair->identity_bytes) != TD_OK)
        return td_fail(err, TD_EAGAIN, "the connection broke");
    status = await_reply(o, pair, reader, w, err);
    if (status == TD_OK) status = td_net_connect(o->master_host, o->port, connect_ms, &pair->step_fd, err);
    if (status == TD_OK && send_frame(pair->step_fd, TD_FRAME_JOIN, pair->generation, NULL, 0) != TD_OK)
        status = td_fail(err, TD_EAGAIN, "the connection broke");
    return status;
}

static td_status form_rank1(const td_link_options *o, td_pair *pair, td_error *err)
{
    td_frame_reader reader;
    td_error last = { 0 };
    if (td_frame_reader_init(&reader, 32 << 10, 1u << TD_FRAME_WELCOME | 1u << TD_FRAME_REFUSE) != TD_OK)
        return td_fail(err, TD_ENOMEM, "link: no memory for the handshake");
    waiting w = waiting_start(o);
    td_status status;
    while ((status = try_rank1(o, pair, &reader, &w, &last)) == TD_EAGAIN && td_now_ns() < w.end_ns) {
        drop_fd(&pair->control_fd);
        drop_fd(&pair->step_fd);
        waiting_report(&w, o->master_host, o->port, 0, last.text);
        td_sleep_ns((int64_t)RETRY_MS * 1000000);
        if ((status = still_wanted(o, &last)) != TD_OK) break;
    }
    td_frame_reader_deinit(&reader);
    if (status == TD_EAGAIN)
        return td_fail(err, TD_ETIMEOUT, "no rank 0 at %s port %d within %d ms: %s", o->master_host, o->port,
                       o->wait_ms, last.text);
    if (status != TD_OK) return td_fail(err, status, "%s", last.text);
    return TD_OK;
}

td_status td_pair_form(const td_link_options *o, td_pair *out, td_error *err)
{
    td_pair pair = { .control_fd = -1, .step_fd = -1, .door = { .listen_fd = -1 } };
    td_status status = td_identity_create(o, &pair.identity, &pair.identity_bytes, err);
    if (status == TD_OK) status = o->rank == 0 ? form_rank0(o, &pair, err) : form_rank1(o, &pair, err);
    if (status != TD_OK) {
        td_pair_close(&pair);
        return status;
    }
    td_net_tune(pair.control_fd, o->cable_ms, true);
    td_net_tune(pair.step_fd, o->cable_ms, false);
    td_log(TD_LOG_INFO, "link", "pair %016llx formed", (unsigned long long)pair.generation);
    *out = pair;
    return TD_OK;
}
