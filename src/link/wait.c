/* How the engine thread waits: see control.h. A decode step has ~90 gathers of a few microseconds, so the first looks
 * are free of system calls; a peer that computes longer gets the core (sched_yield) in case both share one, and after
 * 20 ms the machine gets it. */
#include <stdio.h>

#include "base/clock.h"
#include "base/log.h"
#include "link/control.h"

#define STOP_GRACE_NS 1000000000 /* data sent before a clean stop may still be on its way */

static const td_pace pace = { .spin_ns = 5000, .yield_ns = 20000000, .sleep_ns = 100000 };

td_wait td_wait_start(td_control *control, const char *what, uint64_t number, int warn_ms, int late_ms)
{
    return (td_wait){ .control = control,
                      .what = what,
                      .number = number,
                      .warn_ms = warn_ms,
                      .late_ms = late_ms,
                      .last_ns = td_now_ns() };
}

/* "its beats arrive" or "no beat for 7 s": what tells a late peer from a hanging one. */
static void describe(const td_wait *wait, char text[64])
{
    int64_t silent_ms = td_control_silent_ms(wait->control);
    if (silent_ms < wait->warn_ms)
        snprintf(text, 64, "it is alive: its beats arrive");
    else
        snprintf(text, 64, "no beat from it for %lld ms", (long long)silent_ms);
}

static td_status judge(td_wait *wait, int64_t passed_ns, td_error *err)
{
    char beats[64];
    int peer = td_control_peer(wait->control);
    td_link_health health = td_control_health(wait->control);
    if (health == TD_LINK_LOST) return td_control_reason(wait->control, err);
    if (health == TD_LINK_STOPPED) {
        wait->stopped_ns += passed_ns;
        if (wait->stopped_ns > STOP_GRACE_NS) return td_control_reason(wait->control, err);
    }
    if (!wait->warned && health == TD_LINK_UP && wait->waited_ns > (int64_t)wait->warn_ms * 1000000) {
        wait->warned = true;
        describe(wait, beats);
        td_log(TD_LOG_WARN, "link", "rank %d is late: waiting for %s %llu since %d ms; %s", peer, wait->what,
               (unsigned long long)wait->number, wait->warn_ms, beats);
    }
    if (wait->waited_ns > (int64_t)wait->late_ms * 1000000) {
        describe(wait, beats);
        return td_control_lose(wait->control, err, "rank %d is late: %s %llu did not come within %d ms; %s", peer,
                               wait->what, (unsigned long long)wait->number, wait->late_ms, beats);
    }
    return TD_OK;
}

td_status td_wait_more(td_wait *wait, td_error *err)
{
    int64_t passed_ns = td_clock_tick(&wait->last_ns);
    wait->waited_ns += passed_ns;
    if (!wait->no_sleep) {
        if (wait->waited_ns < pace.spin_ns) return TD_OK;
        td_pause(&pace, wait->waited_ns);
    }
    return judge(wait, passed_ns, err);
}
