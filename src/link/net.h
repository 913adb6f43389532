/* The few socket calls of the link. All sockets are non-blocking and close-on-exec. */
#ifndef TD_LINK_NET_H
#define TD_LINK_NET_H

#include <netinet/in.h>

#include "base/status.h"

TD_BEGIN_C

#define TD_NET_ADDRESSES_MAX 8
#define TD_NET_NAME_CAP      64 /* text of an address and port */

/* Listens on host:port (numeric or a name). Names host and port in err: in use, not an address of this machine, ... */
td_status td_net_listen(const char *host, int port, int *fd, td_error *err);

/* One attempt to connect, at most limit_ms. TD_EAGAIN when nobody listens there or nothing answers (err says which):
 * try again later; TD_ENOTFOUND when the name does not resolve. */
td_status td_net_connect(const char *host, int port, int limit_ms, int *fd, td_error *err);

/* Accepts one waiting connection: its descriptor, -1 when there is none. name: "192.0.2.2:40112". */
int td_net_accept(int listen_fd, char name[TD_NET_NAME_CAP]);

/* host's addresses without port, at most TD_NET_ADDRESSES_MAX (may ask a name server: not for the control thread). */
typedef struct td_net_addresses {
    int n;
    struct in6_addr at[TD_NET_ADDRESSES_MAX]; /* IPv4 ones mapped */
} td_net_addresses;
td_status td_net_resolve(const char *host, td_net_addresses *out, td_error *err);
/* Is the other end of fd one of them? */
bool td_net_peer_is(int fd, const td_net_addresses *allowed);
/* Do two connected sockets have the same address at the other end (ports aside)? */
bool td_net_same_peer(int fd_a, int fd_b);

/* TCP_NODELAY, and keepalive so that a host or cable that is gone ends the connection after about cable_ms. With
 * bound_unacked also when data stays unacknowledged that long (a stopped process still acknowledges; but its full
 * window would end the connection too, so not for bulk data). */
void td_net_tune(int fd, int cable_ms, bool bound_unacked);

/* Bytes moved, 0 = would block, -1 = the connection is over; then *why says how: "closed", or the system's words. */
long td_net_send(int fd, const void *bytes, size_t n_bytes, const char **why);
long td_net_recv(int fd, void *bytes, size_t cap_bytes, const char **why);

/* The small messages of pair forming: all n_bytes within limit_ms, or TD_EIO. */
td_status td_net_send_all(int fd, const void *bytes, size_t n_bytes, int limit_ms);

TD_END_C
#endif
