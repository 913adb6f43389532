/* Connections of the server: who is there, how long they may take, whether they left. Internal to the server.
 *
 * libmicrohttpd owns the sockets. Its one timeout is not used: it counts our own waiting for tokens as the client's
 * silence, cannot answer 408, and in 1.0.1 cannot be set for a connection that has a thread. So all deadlines are kept
 * here, by one thread that looks at all connections twice a second or more often. */
#ifndef TD_SERVER_CONN_H
#define TD_SERVER_CONN_H

#include "base/status.h"

#include <pthread.h>

TD_BEGIN_C

typedef enum td_phase {
    TD_PHASE_IDLE,   /* no request: just connected, or kept */
    TD_PHASE_HEADER, /* first bytes of a request came */
    TD_PHASE_BODY,   /* the header block is complete */
    TD_PHASE_WORK,   /* the request is complete, its route works: no deadline */
    TD_PHASE_WRITE,  /* bytes of the reply are on their way: the other side must take some */
    TD_PHASE_CLOSED  /* a deadline passed: whatever its thread does next, the connection ends */
} td_phase;

typedef struct td_conn td_conn;

typedef struct td_conns {
    pthread_mutex_t mutex; /* guards all below and the connections' phases */
    pthread_cond_t wake;
    pthread_t thread;
    bool running;
    td_conn *first;
    int n;
    double header_s, body_s, idle_s, write_s;
    char timeout_reply[512]; /* 408, ready to send */
    size_t timeout_reply_bytes;
} td_conns;

/* timeout_reply: a complete HTTP response, copied. Starts the thread. */
td_status td_conns_init(td_conns *conns, double header_s, double body_s, double idle_s, double write_s,
                        const char *timeout_reply, td_error *err);
void td_conns_deinit(td_conns *conns); /* every connection must be closed by then */
int td_conns_count(td_conns *conns);

/* fd stays valid until td_conn_close() returns. NULL: out of memory. */
td_conn *td_conn_open(td_conns *conns, int fd);
void td_conn_close(td_conns *conns, td_conn *conn);

/* The next phase, and its clock from now on. false: a deadline has passed and the answer to it is on its way. */
bool td_conn_enter(td_conns *conns, td_conn *conn, td_phase phase);

/* Ends the connection once what was written has been sent. */
void td_conn_end(td_conns *conns, td_conn *conn);

/* Has the other side closed or reset? A half-closed connection counts as left: who asks wants to read the answer. */
bool td_conn_left(const td_conn *conn);

/* Sends a complete response on a connection that libmicrohttpd is not writing to, then waits a moment for the other
 * side to close, reading and dropping what it still sends: a socket closed with unread bytes would be reset, and the
 * reset may overtake the answer. The caller closes the connection. */
void td_conn_refuse(td_conn *conn, const char *reply, size_t n_bytes);

TD_END_C
#endif
