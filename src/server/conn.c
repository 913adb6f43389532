/* Deadlines of connections, and the few things that are done on their sockets beside libmicrohttpd. */
#include "server/conn.h"

#include "base/clock.h"

#include <errno.h>
#include <linux/tcp.h> /* struct tcp_info with tcpi_bytes_received, which netinet/tcp.h lacks */
#include <netinet/in.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

enum { CHECK_MAX_MS = 500, REFUSE_SEND_MS = 2000, REFUSE_DRAIN_MS = 2000 };

struct td_conn {
    td_conn *prev, *next;
    int fd;
    td_phase phase;
    int64_t since_ns; /* start of the phase; of a body: its last bytes */
    uint64_t
        n_seen; /* idle: bytes received by then, one more begins a request; write: bytes the other side has taken */
};

/* What the kernel counted; zeros where it is no TCP socket. */
static struct tcp_info counts_of(int fd)
{
    struct tcp_info info;
    socklen_t n_bytes = sizeof info;
    memset(&info, 0, sizeof info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &n_bytes) != 0) memset(&info, 0, sizeof info);
    return info;
}

static void end(td_conn *conn)
{
    conn->phase = TD_PHASE_CLOSED;
    shutdown(conn->fd, SHUT_RDWR); /* wakes the connection's thread, which then closes */
}

/* The reply fits any socket buffer, and nothing else is being written in these phases. */
static void end_with_408(td_conns *conns, td_conn *conn)
{
    (void)!send(conn->fd, conns->timeout_reply, conns->timeout_reply_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    end(conn);
}

/* Nothing taken for too long. What waits in the buffer is thrown away with a reset: it would be kept for minutes. */
static void check_write(td_conns *conns, td_conn *conn, int64_t now_ns)
{
    struct tcp_info info = counts_of(conn->fd);
    if (info.tcpi_bytes_acked != conn->n_seen || (info.tcpi_notsent_bytes == 0 && info.tcpi_unacked == 0)) {
        conn->n_seen = info.tcpi_bytes_acked;
        conn->since_ns = now_ns;
    } else if ((double)(now_ns - conn->since_ns) * 1e-9 > conns->write_s) {
        struct linger reset = { .l_onoff = 1 };
        setsockopt(conn->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
        end(conn);
    }
}

static void check(td_conns *conns, td_conn *conn, int64_t now_ns)
{
    double age_s = (double)(now_ns - conn->since_ns) * 1e-9;
    switch (conn->phase) {
    case TD_PHASE_IDLE:
        if (counts_of(conn->fd).tcpi_bytes_received > conn->n_seen) {
            conn->phase = TD_PHASE_HEADER;
            conn->since_ns = now_ns;
        } else if (age_s > conns->idle_s) {
            end(conn);
        }
        break;
    case TD_PHASE_HEADER:
        if (age_s > conns->header_s) end_with_408(conns, conn);
        break;
    case TD_PHASE_BODY:
        if (age_s > conns->body_s) end_with_408(conns, conn);
        break;
    case TD_PHASE_WRITE: check_write(conns, conn, now_ns); break;
    case TD_PHASE_WORK:
    case TD_PHASE_CLOSED: break;
    }
}

static void *watch(void *context)
{
    td_conns *conns = context;
    double shortest_s = conns->header_s < conns->body_s ? conns->header_s : conns->body_s;
    if (conns->idle_s < shortest_s) shortest_s = conns->idle_s;
    if (conns->write_s < shortest_s) shortest_s = conns->write_s;
    long every_ms = shortest_s < CHECK_MAX_MS / 250.0 ? (long)(shortest_s * 250) + 1 : CHECK_MAX_MS;
    pthread_mutex_lock(&conns->mutex);
    while (conns->running) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += every_ms * 1000000l;
        until.tv_sec += until.tv_nsec / 1000000000l;
        until.tv_nsec %= 1000000000l;
        pthread_cond_timedwait(&conns->wake, &conns->mutex, &until);
        int64_t now_ns = td_now_ns();
        for (td_conn *conn = conns->first; conn; conn = conn->next) check(conns, conn, now_ns);
    }
    pthread_mutex_unlock(&conns->mutex);
    return NULL;
}

td_status td_conns_init(td_conns *conns, double header_s, double body_s, double idle_s, double write_s,
                        const char *timeout_reply, td_error *err)
{
    memset(conns, 0, sizeof *conns);
    conns->header_s = header_s;
    conns->body_s = body_s;
    conns->idle_s = idle_s;
    conns->write_s = write_s;
    conns->timeout_reply_bytes = strlen(timeout_reply);
    td_check(conns->timeout_reply_bytes < sizeof conns->timeout_reply);
    memcpy(conns->timeout_reply, timeout_reply, conns->timeout_reply_bytes);

    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&conns->mutex, NULL);
    pthread_cond_init(&conns->wake, &attr);
    pthread_condattr_destroy(&attr);
    conns->running = true;
    int failed = pthread_create(&conns->thread, NULL, watch, conns);
    if (failed) {
        conns->running = false;
        pthread_cond_destroy(&conns->wake);
        pthread_mutex_destroy(&conns->mutex);
        return td_fail(err, TD_EIO, "cannot start a thread: %s", strerror(failed));
    }
    return TD_OK;
}

void td_conns_deinit(td_conns *conns)
{
    pthread_mutex_lock(&conns->mutex);
    conns->running = false;
    pthread_cond_signal(&conns->wake);
    pthread_mutex_unlock(&conns->mutex);
    pthread_join(conns->thread, NULL);
    td_check(!conns->first);
    pthread_cond_destroy(&conns->wake);
    pthread_mutex_destroy(&conns->mutex);
}

int td_conns_count(td_conns *conns)
{
    pthread_mutex_lock(&conns->mutex);
    int n = conns->n;
    pthread_mutex_unlock(&conns->mutex);
    return n;
}

td_conn *td_conn_open(td_conns *conns, int fd)
{
    td_conn *conn = calloc(1, sizeof *conn);
    if (!conn) return NULL;
    conn->fd = fd;
    conn->phase = TD_PHASE_IDLE;
    conn->since_ns = td_now_ns();
    pthread_mutex_lock(&conns->mutex);
    conn->next = conns->first;
    if (conn->next) conn->next->prev = conn;
    conns->first = conn;
    conns->n++;
    pthread_mutex_unlock(&conns->mutex);
    return conn;
}

void td_conn_close(td_conns *conns, td_conn *conn)
{
    pthread_mutex_lock(&conns->mutex);
    if (conn->prev)
        conn->prev->next = conn->next;
    else
        conns->first = conn->next;
    if (conn->next) conn->next->prev = conn->prev;
    conns->n--;
    pthread_mutex_unlock(&conns->mutex);
    free(conn);
}

bool td_conn_enter(td_conns *conns, td_conn *conn, td_phase phase)
{
    pthread_mutex_lock(&conns->mutex);
    bool open = conn->phase != TD_PHASE_CLOSED;
    if (open) {
        conn->phase = phase;
        conn->since_ns = td_now_ns();
        if (phase == TD_PHASE_IDLE) conn->n_seen = counts_of(conn->fd).tcpi_bytes_received;
        if (phase == TD_PHASE_WRITE) conn->n_seen = UINT64_MAX; /* the first look counts as progress */
    }
    pthread_mutex_unlock(&conns->mutex);
    return open;
}

void td_conn_end(td_conns *conns, td_conn *conn)
{
    pthread_mutex_lock(&conns->mutex);
    end(conn);
    pthread_mutex_unlock(&conns->mutex);
}

bool td_conn_left(const td_conn *conn)
{
    /* POLLRDHUP also shows behind bytes that were sent ahead and not read yet, where a peeking recv() would not see it.
     */
    struct pollfd p = { .fd = conn->fd, .events = POLLRDHUP };
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL));
}

/* Waits for events until the deadline; false: it passed, or the connection broke. */
static bool wait_for(int fd, short events, int64_t deadline_ns)
{
    struct pollfd p = { .fd = fd, .events = events };
    for (;;) {
        int64_t left_ns = deadline_ns - td_now_ns();
        if (left_ns <= 0) return false;
        int n = poll(&p, 1, (int)(left_ns / 1000000) + 1);
        if (n > 0) return !(p.revents & (POLLERR | POLLNVAL));
        if (n < 0 && errno != EINTR) return false;
    }
}

void td_conn_refuse(td_conn *conn, const char *reply, size_t n_bytes)
{
    int64_t deadline_ns = td_now_ns() + REFUSE_SEND_MS * 1000000ll;
    while (n_bytes > 0) {
        ssize_t sent = send(conn->fd, reply, n_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            reply += sent;
            n_bytes -= (size_t)sent;
        } else if (sent < 0 && errno != EAGAIN && errno != EINTR) {
            return;
        } else if (!wait_for(conn->fd, POLLOUT, deadline_ns)) {
            return;
        }
    }
    shutdown(conn->fd, SHUT_WR);
    deadline_ns = td_now_ns() + REFUSE_DRAIN_MS * 1000000ll;
    char drop[16384];
    while (wait_for(conn->fd, POLLIN, deadline_ns)) {
        ssize_t got = recv(conn->fd, drop, sizeof drop, MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) return;
    }
}
