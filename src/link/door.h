/* Rank 0's listening socket and the connections that have not yet said who they are. Bytes from strangers end here: a
 * guest gets one buffer, one first message, a few seconds, and costs nobody else time. */
#ifndef TD_LINK_DOOR_H
#define TD_LINK_DOOR_H

#include <poll.h>

#include "link/message.h"
#include "link/net.h"

TD_BEGIN_C

#define TD_GUESTS_MAX    8
#define TD_GUEST_LIMIT_S 5

typedef struct td_guest {
    int fd; /* -1: free */
    int64_t until_ns;
    char name[TD_NET_NAME_CAP];
    td_frame_reader reader;
} td_guest;

typedef struct td_door {
    int listen_fd; /* -1: closed */
    bool peer_only;
    td_net_addresses peer; /* peer_only: connections from elsewhere are dropped unread */
    int64_t next_log_ns;   /* strangers fill no log: a line a second at most */
    td_guest guests[TD_GUESTS_MAX];
} td_door;

/* A guest that spoke: frame.type HELLO or JOIN with its payload; or wrong_protocol, and frame.protocol is what it
 * speaks. fd is the receiver's to close. The payload is good until the door's next call. */
typedef struct td_visit {
    int fd;
    char name[TD_NET_NAME_CAP];
    bool wrong_protocol;
    td_frame frame;
    const uint8_t *payload;
} td_visit;

/* peer_host NULL: everybody who reaches the port may speak. */
td_status td_door_open(td_door *door, const char *host, int port, const char *peer_host, td_error *err);
void td_door_close(td_door *door); /* an unopened, zeroed door with listen_fd -1 is fine */

/* Fills at most TD_GUESTS_MAX + 1 entries; how many. */
int td_door_polls(const td_door *door, struct pollfd *polls);

/* Accepts, reads and drops without waiting. true: *visit is one guest; call again for more. */
bool td_door_serve(td_door *door, td_visit *visit);

TD_END_C
#endif
