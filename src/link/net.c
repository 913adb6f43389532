/* See net.h. */
#include "link/net.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/clock.h"

static td_status resolve(const char *host, int port, int flags, struct addrinfo **list, td_error *err)
{
    char service[16];
    struct addrinfo hints = { .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = flags | AI_NUMERICSERV };
    snprintf(service, sizeof service, "%d", port);
    int rc = getaddrinfo(host, service, &hints, list);
    if (rc != 0) return td_fail(err, TD_ENOTFOUND, "address %s: %s", host, gai_strerror(rc));
    return TD_OK;
}

static int new_socket(const struct addrinfo *ai)
{
    return socket(ai->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, ai->ai_protocol);
}

td_status td_net_listen(const char *host, int port, int *fd, td_error *err)
{
    struct addrinfo *list = NULL;
    td_status status = resolve(host, port, AI_PASSIVE, &list, err);
    if (status != TD_OK) return status;
    int one = 1, sock = new_socket(list);
    status = TD_EIO;
    /* SO_REUSEADDR: connections of an earlier pair in TIME_WAIT must not keep a new one from starting. */
    if (sock >= 0 && setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
        bind(sock, list->ai_addr, list->ai_addrlen) == 0 && listen(sock, 128) == 0) {
        *fd = sock;
        status = TD_OK;
    } else {
        td_fail(err, TD_EIO, "cannot listen on %s port %d: %s", host, port, strerror(errno));
        if (sock >= 0) close(sock);
    }
    freeaddrinfo(list);
    return status;
}

/* Waits for a connect in progress; 0 or an errno. */
static int connect_result(int fd, int limit_ms)
{
    struct pollfd p = { .fd = fd, .events = POLLOUT };
    int error = ETIMEDOUT;
    socklen_t n = sizeof error;
    if (poll(&p, 1, limit_ms) > 0 && getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &n) != 0) error = errno;
    return error;
}

/* Nobody listens on a port of this machine that the system may also hand out: then a connect can meet itself. */
static bool met_itself(int fd)
{
    struct sockaddr_storage here = { 0 }, there = { 0 };
    socklen_t n_here = sizeof here, n_there = sizeof there;
    return getsockname(fd, (struct sockaddr *)&here, &n_here) == 0 &&
           getpeername(fd, (struct sockaddr *)&there, &n_there) == 0 && n_here == n_there &&
           memcmp(&here, &there, n_here) == 0;
}

td_status td_net_connect(const char *host, int port, int limit_ms, int *fd, td_error *err)
{
    struct addrinfo *list = NULL;
    td_status status = resolve(host, port, 0, &list, err);
    if (status != TD_OK) return status;
    status = TD_EAGAIN;
    for (struct addrinfo *ai = list; ai && status != TD_OK; ai = ai->ai_next) {
        int sock = new_socket(ai);
        if (sock < 0) {
            td_fail(err, TD_EAGAIN, "%s port %d: %s", host, port, strerror(errno));
            continue;
        }
        int error = connect(sock, ai->ai_addr, ai->ai_addrlen) == 0 ? 0 : errno;
        if (error == EINPROGRESS) error = connect_result(sock, limit_ms);
        if (error == 0 && met_itself(sock)) error = ECONNREFUSED;
        if (error == 0) {
            *fd = sock;
            status = TD_OK;
        } else {
            td_fail(err, TD_EAGAIN, "%s port %d: %s", host, port, strerror(error));
            close(sock);
        }
    }
    freeaddrinfo(list);
    return status;
}

int td_net_accept(int listen_fd, char name[TD_NET_NAME_CAP])
{
    struct sockaddr_storage addr = { 0 };
    socklen_t n = sizeof addr;
    int fd = accept4(listen_fd, (struct sockaddr *)&addr, &n, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return -1;
    char host[48], port[8];
    if (getnameinfo((struct sockaddr *)&addr, n, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV))
        snprintf(name, TD_NET_NAME_CAP, "unknown address");
    else
        snprintf(name, TD_NET_NAME_CAP, "%s:%s", host, port);
    return fd;
}

/* The address without port as 16 bytes, IPv4 mapped into IPv6. */
static bool plain_address(const struct sockaddr *sa, struct in6_addr *out)
{
    if (sa->sa_family == AF_INET6) {
        memcpy(out, &((const struct sockaddr_in6 *)sa)->sin6_addr, sizeof *out);
        return true;
    }
    if (sa->sa_family != AF_INET) return false;
    memset(out, 0, sizeof *out);
    out->s6_addr[10] = out->s6_addr[11] = 0xff;
    memcpy(out->s6_addr + 12, &((const struct sockaddr_in *)sa)->sin_addr, 4);
    return true;
}

static bool peer_address(int fd, struct in6_addr *out)
{
    struct sockaddr_storage addr = { 0 };
    socklen_t n = sizeof addr;
    return getpeername(fd, (struct sockaddr *)&addr, &n) == 0 && plain_address((struct sockaddr *)&addr, out);
}

td_status td_net_resolve(const char *host, td_net_addresses *out, td_error *err)
{
    struct addrinfo *list = NULL;
    td_status status = resolve(host, 0, 0, &list, err);
    if (status != TD_OK) return status;
    out->n = 0;
    for (struct addrinfo *ai = list; ai && out->n < TD_NET_ADDRESSES_MAX; ai = ai->ai_next)
        if (plain_address(ai->ai_addr, &out->at[out->n])) out->n++;
    freeaddrinfo(list);
    return TD_OK;
}

bool td_net_peer_is(int fd, const td_net_addresses *allowed)
{
    struct in6_addr peer;
    if (!peer_address(fd, &peer)) return false;
    for (int i = 0; i < allowed->n; i++)
        if (memcmp(&peer, &allowed->at[i], sizeof peer) == 0) return true;
    return false;
}

bool td_net_same_peer(int fd_a, int fd_b)
{
    struct in6_addr a, b;
    return peer_address(fd_a, &a) && peer_address(fd_b, &b) && memcmp(&a, &b, sizeof a) == 0;
}

void td_net_tune(int fd, int cable_ms, bool bound_unacked)
{
    /* Probes after the connection was silent for half the limit, three of them in the other half. While data is
     * unacknowledged the kernel sends no probes but retransmits for many minutes: that is what TCP_USER_TIMEOUT bounds.
     */
    int on = 1, idle_s = cable_ms / 2000 > 0 ? cable_ms / 2000 : 1, gap_s = cable_ms / 6000 > 0 ? cable_ms / 6000 : 1;
    int probes = 3;
    unsigned user_ms = (unsigned)cable_ms;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &gap_s, sizeof gap_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    if (bound_unacked) (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_ms, sizeof user_ms);
}

static bool again(int error)
{
    return error == EAGAIN || error == EWOULDBLOCK || error == EINTR;
}

long td_net_send(int fd, const void *bytes, size_t n_bytes, const char **why)
{
    ssize_t n = send(fd, bytes, n_bytes, MSG_NOSIGNAL);
    if (n >= 0) return n;
    if (again(errno)) return 0;
    *why = strerror(errno);
    return -1;
}

long td_net_recv(int fd, void *bytes, size_t cap_bytes, const char **why)
{
    ssize_t n = recv(fd, bytes, cap_bytes, 0);
    if (n > 0) return n;
    if (n < 0 && again(errno)) return 0;
    *why = n == 0 ? "closed" : strerror(errno);
    return -1;
}

td_status td_net_send_all(int fd, const void *bytes, size_t n_bytes, int limit_ms)
{
    const uint8_t *at = bytes;
    const char *why = NULL;
    int64_t end_ns = td_now_ns() + (int64_t)limit_ms * 1000000;
    while (n_bytes > 0) {
        long n = td_net_send(fd, at, n_bytes, &why);
        if (n < 0 || td_now_ns() > end_ns) return TD_EIO;
        at += n;
        n_bytes -= (size_t)n;
        struct pollfd p = { .fd = fd, .events = POLLOUT };
        if (n_bytes > 0) poll(&p, 1, 100);
    }
    return TD_OK;
}
