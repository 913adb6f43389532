/* See control.h. How a loss is told apart (docs/link.md):
 *   end of file or reset of the connection      the process is gone: at once
 *   the kernel gives up on the connection       host or cable gone: cable_ms
 *   connected, but no beat                      the process hangs or is stopped: warn_ms a warning, peer_timeout_ms
 * lost beats, but a gather does not come           late: wait.c After "stop" from either side the end of the connection
 * is no loss. */
#include "link/control.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "link/handshake.h"

#define OUT_CAP  (2 * (TD_FRAME_HEAD_BYTES + TD_FRAME_CONTROL_MAX))
#define FLUSH_MS 500 /* what a dying rank still tries to say */

struct td_control {
    td_link_options options; /* numbers only */
    td_pair pair;            /* control_fd, door: the thread's; -1 once the connection ended */
    int peer;
    int wake_fd; /* others -> thread: something to say, or quit */
    int news_fd; /* thread -> engine thread: health changed */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    atomic_int health; /* td_link_health; written under the lock */
    atomic_bool quit;
    atomic_llong silent_ns;

    /* the thread's own */
    td_frame_reader reader;
    uint8_t *out;
    size_t out_bytes, out_sent;
    uint32_t seq_out, seq_in;
    int64_t last_ns, since_beat_ns;
    bool silence_warned, deaf; /* deaf: the peer's bytes make no sense, read no more */

    /* under the lock: what is to be said */
    bool say_stop, say_failure, say_progress, say_barrier, say_address;
    td_error reason; /* of the loss, or what announce_failure says */
    uint64_t done, total;
    uint32_t barrier;
    char label[TD_LINK_LABEL_MAX + 1];
    const void *address;
    size_t address_bytes;

    /* under the lock: what the peer said */
    uint64_t peer_done, peer_total;
    uint32_t peer_barrier;
    char peer_label[TD_LINK_LABEL_MAX + 1];
    uint8_t *peer_address;
    size_t peer_address_bytes;
};

td_link_health td_control_health(const td_control *control)
{
    return (td_link_health)atomic_load_explicit(&control->health, memory_order_acquire);
}

int td_control_step_fd(const td_control *control)
{
    return control->pair.step_fd;
}

int td_control_news_fd(const td_control *control)
{
    return control->news_fd;
}

int td_control_peer(const td_control *control)
{
    return control->peer;
}

int64_t td_control_silent_ms(const td_control *control)
{
    return atomic_load_explicit(&control->silent_ns, memory_order_relaxed) / 1000000;
}

static void signal_fd(int fd)
{
    uint64_t one = 1;
    if (write(fd, &one, sizeof one) < 0) return; /* full: it is readable already, which is all that is meant */
}

/* Under the lock. Lost is final; stopped may not become lost: the peer's end was expected. */
static bool set_health(td_control *c, td_link_health health)
{
    if (td_control_health(c) != TD_LINK_UP) return false;
    atomic_store_explicit(&c->health, health, memory_order_release);
    signal_fd(c->news_fd);
    pthread_cond_broadcast(&c->changed);
    return true;
}

static td_status reason_locked(td_control *c, td_error *err)
{
    td_link_health health = td_control_health(c);
    if (health == TD_LINK_LOST) return td_fail(err, TD_EPEER, "%s", c->reason.text);
    if (health == TD_LINK_STOPPED) return td_fail(err, TD_ECANCELED, "a clean stop of the ranks was announced");
    return TD_OK;
}

td_status td_control_reason(td_control *c, td_error *err)
{
    pthread_mutex_lock(&c->lock);
    td_status status = reason_locked(c, err);
    pthread_mutex_unlock(&c->lock);
    return status;
}

td_status td_control_lose(td_control *c, td_error *err, const char *fmt, ...)
{
    va_list args;
    pthread_mutex_lock(&c->lock);
    if (td_control_health(c) == TD_LINK_UP) {
        va_start(args, fmt);
        vsnprintf(c->reason.text, sizeof c->reason.text, fmt, args);
        va_end(args);
        c->say_failure = true;
        set_health(c, TD_LINK_LOST);
        td_log(TD_LOG_ERROR, "link", "%s", c->reason.text);
    }
    td_status status = reason_locked(c, err);
    pthread_mutex_unlock(&c->lock);
    signal_fd(c->wake_fd);
    return status;
}

/* --- the thread: hearing --- */

static void hear(td_control *c, const td_frame *frame, const uint8_t *payload)
{
    char text[TD_ERROR_TEXT_CAP];
    pthread_mutex_lock(&c->lock);
    switch (frame->type) {
    case TD_FRAME_PROGRESS:
        c->peer_done = td_get_u64(payload);
        c->peer_total = td_get_u64(payload + 8);
        break;
    case TD_FRAME_BARRIER:
        c->peer_barrier = td_get_u32(payload);
        td_printable(c->peer_label, sizeof c->peer_label, payload + 4, frame->n_bytes - 4);
        break;
    case TD_FRAME_ADDRESS:
        if (c->peer_address_bytes == 0) {
            memcpy(c->peer_address, payload, frame->n_bytes);
            c->peer_address_bytes = frame->n_bytes;
        }
        break;
    case TD_FRAME_STOP:
        if (set_health(c, TD_LINK_STOPPED)) td_log(TD_LOG_INFO, "link", "rank %d announced a clean stop", c->peer);
        break;
    default: break; /* a beat, or a failure: below */
    }
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    if (frame->type == TD_FRAME_FAILURE) {
        td_printable(text, sizeof text, payload, frame->n_bytes);
        td_control_lose(c, NULL, "rank %d ended: %s", c->peer, text);
    }
}

static void hang_up(td_control *c)
{
    if (c->pair.control_fd >= 0) close(c->pair.control_fd);
    c->pair.control_fd = -1;
}

/* Reads what is there; false when the connection is over. */
static bool read_some(td_control *c)
{
    const char *why = NULL;
    size_t space;
    td_frame frame;
    const uint8_t *payload;
    td_error err;
    void *to = td_frame_space(&c->reader, &space);
    long n = td_net_recv(c->pair.control_fd, to, space, &why);
    if (n < 0) {
        if (strcmp(why, strerror(ETIMEDOUT)) == 0 || strcmp(why, strerror(EHOSTUNREACH)) == 0)
            td_control_lose(c, NULL, "rank %d is unreachable: its host or the cable is gone (%s)", c->peer, why);
        else
            td_control_lose(c, NULL, "rank %d is gone: its process ended (control connection: %s)", c->peer, why);
        hang_up(c);
        return false;
    }
    td_frame_added(&c->reader, (size_t)n);
    td_status status;
    while ((status = td_frame_next(&c->reader, &frame, &payload, &err)) == TD_OK) {
        if (frame.generation != c->pair.generation || frame.seq != c->seq_in) {
            td_control_lose(c, NULL, "control message %u of pair %016llx from rank %d, expected %u of %016llx",
                            frame.seq, (unsigned long long)frame.generation, c->peer, c->seq_in,
                            (unsigned long long)c->pair.generation);
            c->deaf = true;
            return false;
        }
        c->seq_in++;
        atomic_store_explicit(&c->silent_ns, 0, memory_order_relaxed);
        hear(c, &frame, payload);
    }
    if (status != TD_EAGAIN) {
        td_control_lose(c, NULL, "control connection to rank %d: %s", c->peer, err.text);
        c->deaf = true;
        return false;
    }
    return n > 0;
}

/* The pair is complete; whoever comes now is late. A second rank 1 from the peer's address means that the pair was
 * restarted by half: it must go down as a whole. From elsewhere it is only refused. */
static void answer_latecomer(td_control *c, const td_visit *visit)
{
    td_error why;
    char text[160];
    if (visit->wrong_protocol || visit->frame.type != TD_FRAME_HELLO ||
        td_identity_check((const char *)visit->payload, visit->frame.n_bytes, &why) != TD_OK) {
        close(visit->fd);
        return;
    }
    bool restarted = c->pair.control_fd >= 0 && td_net_same_peer(visit->fd, c->pair.control_fd);
    snprintf(text, sizeof text, "pair %016llx is already formed; stop both ranks and start both",
             (unsigned long long)c->pair.generation);
    td_log(TD_LOG_WARN, "link", "refused a second rank 1 from %s: %s", visit->name, text);
    td_pair_refuse(visit, TD_REFUSE_FORMED, text);
    if (restarted)
        td_control_lose(c, NULL, "rank 1 was started again while its pair %016llx stood; both ranks must start anew",
                        (unsigned long long)c->pair.generation);
}

/* --- the thread: speaking --- */

static void put_frame(td_control *c, td_frame_type type, const void *payload, size_t n_bytes)
{
    uint8_t *at = c->out + c->out_bytes;
    td_check(TD_FRAME_HEAD_BYTES + n_bytes <= OUT_CAP - c->out_bytes);
    td_frame_write(at, type, c->seq_out++, c->pair.generation, payload, n_bytes);
    if (n_bytes > 0) memcpy(at + TD_FRAME_HEAD_BYTES, payload, n_bytes);
    c->out_bytes += TD_FRAME_HEAD_BYTES + n_bytes;
}

/* Only when all that was said before has left, so that OUT_CAP is enough for one of each kind. The stop or the failure
 * is the last word. */
static void compose(td_control *c)
{
    uint8_t small[4 + TD_LINK_LABEL_MAX + 16];
    if (c->out_bytes > 0 || c->pair.control_fd < 0) return;
    pthread_mutex_lock(&c->lock);
    if (c->say_address) put_frame(c, TD_FRAME_ADDRESS, c->address, c->address_bytes);
    if (c->say_progress) {
        td_put_u64(small, c->done);
        td_put_u64(small + 8, c->total);
        put_frame(c, TD_FRAME_PROGRESS, small, 16);
    }
    if (c->say_barrier) {
        size_t n = strlen(c->label);
        td_put_u32(small, c->barrier);
        memcpy(small + 4, c->label, n);
        put_frame(c, TD_FRAME_BARRIER, small, 4 + n);
    }
    if (c->since_beat_ns >= (int64_t)c->options.beat_ms * 1000000) {
        c->since_beat_ns = 0;
        put_frame(c, TD_FRAME_BEAT, NULL, 0);
    }
    if (c->say_stop) put_frame(c, TD_FRAME_STOP, NULL, 0);
    if (c->say_failure)
        put_frame(c, TD_FRAME_FAILURE, c->reason.text, strnlen(c->reason.text, sizeof c->reason.text - 1));
    c->say_address = c->say_progress = c->say_barrier = c->say_stop = c->say_failure = false;
    pthread_mutex_unlock(&c->lock);
}

static void flush_out(td_control *c)
{
    const char *why = NULL;
    if (c->out_bytes == 0 || c->pair.control_fd < 0) return;
    long n = td_net_send(c->pair.control_fd, c->out + c->out_sent, c->out_bytes - c->out_sent, &why);
    if (n < 0) return; /* reading says what happened, after all that the peer still said */
    c->out_sent += (size_t)n;
    if (c->out_sent == c->out_bytes) c->out_sent = c->out_bytes = 0;
}

/* --- the thread: its round --- */

static void judge_silence(td_control *c, int64_t passed_ns, bool heard)
{
    c->since_beat_ns += passed_ns;
    int64_t silent = heard ? 0 : atomic_load_explicit(&c->silent_ns, memory_order_relaxed) + passed_ns;
    atomic_store_explicit(&c->silent_ns, silent, memory_order_relaxed);
    if (silent < (int64_t)c->options.warn_ms * 1000000) {
        if (c->silence_warned) td_log(TD_LOG_INFO, "link", "rank %d is heard again", c->peer);
        c->silence_warned = false;
        return;
    }
    if (td_control_health(c) != TD_LINK_UP) return;
    if (!c->silence_warned)
        td_log(TD_LOG_WARN, "link", "no beat from rank %d for %d ms: it hangs or is stopped", c->peer,
               c->options.warn_ms);
    c->silence_warned = true;
    if (c->options.peer_timeout_ms > 0 && silent > (int64_t)c->options.peer_timeout_ms * 1000000)
        td_control_lose(c, NULL, "rank %d hangs or is stopped: connected, but no beat for %d ms", c->peer,
                        c->options.peer_timeout_ms);
}

static void round_once(td_control *c, int limit_ms)
{
    struct pollfd polls[TD_GUESTS_MAX + 3];
    td_visit visit;
    bool heard = false;
    short events = (short)((c->deaf ? 0 : POLLIN) | (c->out_bytes > 0 ? POLLOUT : 0));
    polls[0] = (struct pollfd){ .fd = events ? c->pair.control_fd : -1, .events = events };
    polls[1] = (struct pollfd){ .fd = c->wake_fd, .events = POLLIN };
    int n = 2 + td_door_polls(&c->pair.door, polls + 2);
    poll(polls, (nfds_t)n, limit_ms);

    uint64_t count;
    if (polls[1].revents && read(c->wake_fd, &count, sizeof count) < 0)
        count = 0; /* taken by nobody else; only drained */
    int64_t passed_ns = td_clock_tick(&c->last_ns);
    for (int i = 0; i < 16 && c->pair.control_fd >= 0 && !c->deaf && read_some(c); i++) heard = true;
    while (td_door_serve(&c->pair.door, &visit)) answer_latecomer(c, &visit);
    judge_silence(c, passed_ns, heard);
    compose(c);
    flush_out(c);
}

/* The last words, then the peer's end of the connection is awaited: closing with its bytes unread would be a reset,
 * which may overtake what we said. */
static void say_goodbye(td_control *c)
{
    char rest[4096];
    const char *why = NULL;
    int64_t end_ns = td_now_ns() + (int64_t)FLUSH_MS * 1000000;
    bool said = false;
    while (c->pair.control_fd >= 0 && td_now_ns() < end_ns) {
        compose(c);
        flush_out(c);
        if (c->out_bytes == 0 && !said) {
            said = true;
            shutdown(c->pair.control_fd, SHUT_WR);
        }
        struct pollfd p = { .fd = c->pair.control_fd, .events = (short)(POLLIN | (said ? 0 : POLLOUT)) };
        poll(&p, 1, 50);
        if (td_net_recv(c->pair.control_fd, rest, sizeof rest, &why) < 0) hang_up(c);
    }
}

static void *control_main(void *arg)
{
    td_control *c = arg;
    int beat_ms = c->options.beat_ms < 500 ? c->options.beat_ms : 500;
    c->last_ns = td_now_ns();
    while (!atomic_load(&c->quit)) round_once(c, beat_ms);
    say_goodbye(c);
    return NULL;
}

/* --- start and stop --- */

static void destroy(td_control *c)
{
    td_pair_close(&c->pair);
    if (c->wake_fd >= 0) close(c->wake_fd);
    if (c->news_fd >= 0) close(c->news_fd);
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->changed);
    td_frame_reader_deinit(&c->reader);
    free(c->out);
    free(c->peer_address);
    free(c);
}

td_status td_control_start(const td_link_options *options, td_pair *pair, td_control **out, td_error *err)
{
    const unsigned allowed = 1u << TD_FRAME_ADDRESS | 1u << TD_FRAME_BEAT | 1u << TD_FRAME_PROGRESS |
                             1u << TD_FRAME_BARRIER | 1u << TD_FRAME_STOP | 1u << TD_FRAME_FAILURE;
    pthread_condattr_t attr;
    td_control *c = calloc(1, sizeof *c);
    if (!c) {
        td_pair_close(pair);
        return td_fail(err, TD_ENOMEM, "link: no memory for the control connection");
    }
    c->options = *options;
    c->pair = *pair;
    c->peer = 1 - options->rank;
    pthread_mutex_init(&c->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&c->changed, &attr);
    pthread_condattr_destroy(&attr);
    c->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    c->news_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    c->out = malloc(OUT_CAP);
    c->peer_address = malloc(TD_FRAME_CONTROL_MAX);
    if (c->wake_fd < 0 || c->news_fd < 0 || !c->out || !c->peer_address ||
        td_frame_reader_init(&c->reader, TD_FRAME_CONTROL_MAX, allowed) != TD_OK ||
        pthread_create(&c->thread, NULL, control_main, c) != 0) {
        destroy(c);
        return td_fail(err, TD_ENOMEM, "link: cannot start the control connection's thread");
    }
    *out = c;
    return TD_OK;
}

void td_control_stop(td_control *c)
{
    if (!c) return;
    atomic_store(&c->quit, true);
    signal_fd(c->wake_fd);
    pthread_join(c->thread, NULL);
    destroy(c);
}

/* --- what the other threads say and ask --- */

void td_control_announce_stop(td_control *c)
{
    pthread_mutex_lock(&c->lock);
    c->say_stop = set_health(c, TD_LINK_STOPPED) || c->say_stop;
    pthread_mutex_unlock(&c->lock);
    signal_fd(c->wake_fd);
}

void td_control_announce_failure(td_control *c, const char *text)
{
    pthread_mutex_lock(&c->lock);
    if (set_health(c, TD_LINK_LOST)) {
        snprintf(c->reason.text, sizeof c->reason.text, "%s", text);
        c->say_failure = true;
    }
    pthread_mutex_unlock(&c->lock);
    signal_fd(c->wake_fd);
}

void td_control_report_progress(td_control *c, uint64_t done, uint64_t total)
{
    pthread_mutex_lock(&c->lock);
    c->done = done;
    c->total = total;
    c->say_progress = true;
    pthread_mutex_unlock(&c->lock);
    if (done == total) signal_fd(c->wake_fd); /* the rest goes with the thread's next round: cheap in any loop */
}

void td_control_peer_progress(td_control *c, uint64_t *done, uint64_t *total)
{
    pthread_mutex_lock(&c->lock);
    *done = c->peer_done;
    *total = c->peer_total;
    pthread_mutex_unlock(&c->lock);
}

/* Sleeps on `changed` for at most 200 ms; under the lock. */
static void wait_changed(td_control *c)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += 200000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    pthread_cond_timedwait(&c->changed, &c->lock, &until);
}

td_status td_control_swap_addresses(td_control *c, const void *mine, size_t mine_bytes, void *theirs, size_t cap_bytes,
                                    size_t *theirs_bytes, int timeout_ms, td_error *err)
{
    int64_t last_ns = td_now_ns(), waited_ns = 0;
    td_status status = TD_OK;
    if (mine_bytes > TD_FRAME_CONTROL_MAX)
        return td_fail(err, TD_EUNSUPPORTED, "transport address of %zu bytes, at most %zu fit", mine_bytes,
                       TD_FRAME_CONTROL_MAX);
    pthread_mutex_lock(&c->lock);
    c->address = mine;
    c->address_bytes = mine_bytes;
    c->say_address = true;
    signal_fd(c->wake_fd);
    /* also until our own has been composed: `mine` is the caller's */
    while (status == TD_OK && (c->peer_address_bytes == 0 || c->say_address)) {
        status = reason_locked(c, err);
        waited_ns += td_clock_tick(&last_ns);
        if (status == TD_OK && waited_ns > (int64_t)timeout_ms * 1000000)
            status = td_fail(err, TD_ETIMEOUT, "rank %d did not send its transport address within %d ms", c->peer,
                             timeout_ms);
        if (status == TD_OK) wait_changed(c);
    }
    c->say_address = false;
    if (status == TD_OK && c->peer_address_bytes > cap_bytes)
        status =
            td_fail(err, TD_EPEER, "rank %d sent a transport address of %zu bytes", c->peer, c->peer_address_bytes);
    if (status == TD_OK) {
        memcpy(theirs, c->peer_address, c->peer_address_bytes);
        *theirs_bytes = c->peer_address_bytes;
    }
    pthread_mutex_unlock(&c->lock);
    return status;
}

static void report_barrier(const td_control *c, const char *label, int64_t waited_ns)
{
    const double gib = 1024.0 * 1024 * 1024;
    if (c->peer_total > 0)
        td_log(TD_LOG_INFO, "link", "waiting for rank %d to be '%s' for %lld s: %.0f %% (%.2f of %.2f GiB)", c->peer,
               label, (long long)(waited_ns / 1000000000), 100.0 * (double)c->peer_done / (double)c->peer_total,
               (double)c->peer_done / gib, (double)c->peer_total / gib);
    else
        td_log(TD_LOG_INFO, "link", "waiting for rank %d to be '%s' for %lld s", c->peer, label,
               (long long)(waited_ns / 1000000000));
}

td_status td_control_barrier(td_control *c, const char *label, int timeout_ms, td_error *err)
{
    const int64_t report_ns = (int64_t)(c->options.report_ms > 0 ? c->options.report_ms : 60000) * 1000000;
    int64_t last_ns = td_now_ns(), waited_ns = 0, next_report_ns = report_ns;
    td_status status = TD_OK;
    char theirs[TD_LINK_LABEL_MAX + 1] = "";
    pthread_mutex_lock(&c->lock);
    uint32_t number = ++c->barrier;
    snprintf(c->label, sizeof c->label, "%s", label);
    c->say_barrier = true;
    signal_fd(c->wake_fd);
    while (c->peer_barrier < number && (status = reason_locked(c, err)) == TD_OK) {
        waited_ns += td_clock_tick(&last_ns);
        if (timeout_ms > 0 && waited_ns > (int64_t)timeout_ms * 1000000) {
            status = td_fail(err, TD_ETIMEOUT, "rank %d was not '%s' within %d ms", c->peer, label, timeout_ms);
            break;
        }
        if (waited_ns >= next_report_ns) {
            report_barrier(c, label, waited_ns);
            next_report_ns += report_ns;
        }
        wait_changed(c);
    }
    if (status == TD_OK && c->peer_barrier == number) memcpy(theirs, c->peer_label, sizeof theirs);
    pthread_mutex_unlock(&c->lock);
    if (status == TD_OK && theirs[0] && strcmp(theirs, label) != 0)
        return td_control_lose(c, err, "rank %d is out of step: it waits at '%s', this rank at '%s'", c->peer, theirs,
                               label);
    return status;
}
