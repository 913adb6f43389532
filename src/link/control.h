/* The control connection of a formed pair: its own thread sends beats, hears the peer's, and decides when the peer is
 * lost. It is the only one that reads and writes the connection; the others leave what is to be said under a lock and
 * wake it. */
#ifndef TD_LINK_CONTROL_H
#define TD_LINK_CONTROL_H

#include "link/pair.h"

TD_BEGIN_C

typedef struct td_control td_control;

/* Takes over pair (also on failure). options is copied; its strings are not kept. */
td_status td_control_start(const td_link_options *options, td_pair *pair, td_control **out, td_error *err);
/* Sends what is still to be said (at most half a second), ends the thread, closes everything. NULL is allowed. */
void td_control_stop(td_control *control);

td_link_health td_control_health(const td_control *control);
td_status td_control_reason(td_control *control, td_error *err); /* what waiting functions return; TD_OK when up */
/* The peer is lost for this reason; the first reason stays. The peer is told. Returns TD_EPEER and fills err with the
 * reason that stands (TD_ECANCELED when a clean stop was announced before). */
td_status td_control_lose(td_control *control, td_error *err, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

int td_control_step_fd(const td_control *control);
int td_control_news_fd(const td_control *control);       /* readable for good once health is not TD_LINK_UP */
int td_control_peer(const td_control *control);          /* the peer's rank */
int64_t td_control_silent_ms(const td_control *control); /* since the peer's last beat */

td_status td_control_swap_addresses(td_control *control, const void *mine, size_t mine_bytes, void *theirs,
                                    size_t cap_bytes, size_t *theirs_bytes, int timeout_ms, td_error *err);
td_status td_control_barrier(td_control *control, const char *label, int timeout_ms, td_error *err);
void td_control_report_progress(td_control *control, uint64_t done, uint64_t total);
void td_control_peer_progress(td_control *control, uint64_t *done, uint64_t *total);
void td_control_announce_stop(td_control *control);
void td_control_announce_failure(td_control *control, const char *text);

/* --- waiting (wait.c): the engine thread's patience, the same for every transport --- */

typedef struct td_wait {
    td_control *control;
    const char *what; /* "gather 17" in messages: what and number */
    uint64_t number;
    int warn_ms, late_ms;
    int64_t last_ns, waited_ns, stopped_ns;
    bool warned, no_sleep; /* no_sleep: the caller blocks in poll() itself */
} td_wait;

td_wait td_wait_start(td_control *control, const char *what, uint64_t number, int warn_ms, int late_ms);
/* Call after each fruitless look: spins, yields or sleeps according to how long it took so far, warns when late, and
 * ends the wait when the peer is lost, stopped or late beyond the limit (TD_EPEER, TD_ECANCELED with err). */
td_status td_wait_more(td_wait *wait, td_error *err);

TD_END_C
#endif
