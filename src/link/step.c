/* Step messages over their own connection, read and written by the engine thread itself: no hand-over between threads
 * on the way, and a prompt of megabytes does not stand before a beat. Rank 1 looks for the next message for a moment
 * (in a decode loop it is almost there), then blocks in poll() on the connection and on the control thread's news. */
#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "link/transport.h"

#define AHEAD_BYTES ((size_t)64 << 10)
#define SPIN_NS     100000

struct td_step_stream {
    int fd, news_fd;
    uint32_t seq;
    size_t used_bytes, taken_bytes; /* of ahead */
    uint8_t ahead[AHEAD_BYTES];
};

td_status td_steps_create(td_link *link, td_error *err)
{
    td_step_stream *s = calloc(1, sizeof *s);
    if (!s) return td_fail(err, TD_ENOMEM, "link: out of memory");
    s->fd = td_control_step_fd(link->control);
    s->news_fd = td_control_news_fd(link->control);
    link->steps = s;
    return TD_OK;
}

void td_steps_destroy(td_link *link)
{
    free(link->steps);
    link->steps = NULL;
}

/* The connection ended: the control connection's verdict (a stop, a loss with its reason) is better; it gets a moment.
 */
static td_status ended(td_link *link, const char *why, td_error *err)
{
    for (int i = 0; i < 300 && td_control_health(link->control) == TD_LINK_UP; i++) td_sleep_ns(1000000);
    return td_control_lose(link->control, err, "rank %d is gone (step connection: %s)", td_control_peer(link->control),
                           why);
}

/* Blocks until the step connection is ready, there is news, or limit_ms passed. */
static void block(td_link *link, short events, int limit_ms)
{
    td_step_stream *s = link->steps;
    struct pollfd polls[2] = { { .fd = s->fd, .events = events }, { .fd = s->news_fd, .events = POLLIN } };
    /* With a stop announced news_fd stays readable; what is still on its way is then looked for at intervals. */
    bool up = td_control_health(link->control) == TD_LINK_UP;
    poll(polls, up ? 2 : 1, up ? limit_ms : 10);
}

static td_status send_part(td_link *link, td_wait *wait, const uint8_t *bytes, size_t n_bytes, td_error *err)
{
    while (n_bytes > 0) {
        const char *why = NULL;
        long n = td_net_send(link->steps->fd, bytes, n_bytes, &why);
        if (n < 0) return ended(link, why, err);
        bytes += n;
        n_bytes -= (size_t)n;
        if (n_bytes == 0) break;
        block(link, POLLOUT, 100);
        td_status status = td_wait_more(wait, err);
        if (status != TD_OK) return status;
    }
    return TD_OK;
}

td_status td_link_send_step(td_link *link, const void *bytes, size_t n_bytes, td_error *err)
{
    if (n_bytes > TD_LINK_STEP_MAX)
        return td_fail(err, TD_EINVAL, "step message of %zu bytes, at most %zu", n_bytes, TD_LINK_STEP_MAX);
    if (link->rank != 0) return td_fail(err, TD_EINVAL, "only rank 0 sends step messages");
    if (link->world == 1) return TD_OK;
    td_status status = td_control_reason(link->control, err);
    if (status != TD_OK) return status;

    /* A small message goes out in one call; it is copied behind its head. Rank 0 receives no steps: ahead is free. */
    td_step_stream *s = link->steps;
    td_wait wait = td_wait_start(link->control, "room for step message", s->seq, link->warn_ms, link->late_ms);
    wait.no_sleep = true;
    td_frame_write(s->ahead, TD_FRAME_STEP, s->seq++, link->generation, bytes, n_bytes);
    size_t with_head = n_bytes < AHEAD_BYTES - TD_FRAME_HEAD_BYTES ? n_bytes : AHEAD_BYTES - TD_FRAME_HEAD_BYTES;
    if (with_head > 0) memcpy(s->ahead + TD_FRAME_HEAD_BYTES, bytes, with_head);
    status = send_part(link, &wait, s->ahead, TD_FRAME_HEAD_BYTES + with_head, err);
    if (status == TD_OK) status = send_part(link, &wait, (const uint8_t *)bytes + with_head, n_bytes - with_head, err);
    return status;
}

/* Reads what is there into ahead: TD_OK when it holds a head, TD_EAGAIN when not yet. */
static td_status look(td_link *link, td_error *err)
{
    td_step_stream *s = link->steps;
    const char *why = NULL;
    s->used_bytes -= s->taken_bytes;
    if (s->taken_bytes > 0) memmove(s->ahead, s->ahead + s->taken_bytes, s->used_bytes);
    s->taken_bytes = 0;
    if (s->used_bytes >= TD_FRAME_HEAD_BYTES) return TD_OK;
    long n = td_net_recv(s->fd, s->ahead + s->used_bytes, AHEAD_BYTES - s->used_bytes, &why);
    if (n < 0) return ended(link, why, err);
    s->used_bytes += (size_t)n;
    return s->used_bytes >= TD_FRAME_HEAD_BYTES ? TD_OK : TD_EAGAIN;
}

/* The first bytes of a message: a moment of looking, then sleep until it comes, without a limit of lateness: idle is no
 * fault. */
static td_status await_head(td_link *link, int timeout_ms, td_error *err)
{
    int64_t start_ns = td_now_ns(), last_ns = start_ns, waited_ns = 0, stopped_ns = 0;
    int slice_ms = 1;
    for (;;) {
        td_status status = look(link, err);
        if (status != TD_EAGAIN) return status;
        int64_t passed_ns = td_clock_tick(&last_ns);
        waited_ns += passed_ns;
        td_link_health health = td_control_health(link->control);
        if (health == TD_LINK_STOPPED) stopped_ns += passed_ns;
        if (health == TD_LINK_LOST || stopped_ns > 50000000) return td_control_reason(link->control, err);
        if (timeout_ms >= 0 && waited_ns >= (int64_t)timeout_ms * 1000000)
            return td_fail(err, TD_ETIMEOUT, "no step message within %d ms", timeout_ms);
        link->ops->progress(
            link); /* should the last gather have left anything to send, it must not wait for the next */
        if (waited_ns < SPIN_NS) continue;
        int left_ms = timeout_ms < 0 ? INT_MAX : timeout_ms - (int)(waited_ns / 1000000);
        block(link, POLLIN, left_ms < slice_ms ? left_ms : slice_ms);
        slice_ms = slice_ms < 1000 ? 2 * slice_ms : 1000;
    }
}

static td_status take_payload(td_link *link, td_wait *wait, uint8_t *to, size_t n_bytes, td_error *err)
{
    td_step_stream *s = link->steps;
    size_t there = s->used_bytes - s->taken_bytes, now = there < n_bytes ? there : n_bytes;
    if (now > 0) memcpy(to, s->ahead + s->taken_bytes, now);
    s->taken_bytes += now;
    while (now < n_bytes) {
        const char *why = NULL;
        long n = td_net_recv(s->fd, to + now, n_bytes - now, &why);
        if (n < 0) return ended(link, why, err);
        now += (size_t)n;
        if (n > 0) continue;
        block(link, POLLIN, 100);
        td_status status = td_wait_more(wait, err);
        if (status != TD_OK) return status;
    }
    return TD_OK;
}

td_status td_link_recv_step(td_link *link, void *buf, size_t cap_bytes, size_t *n_bytes, int timeout_ms, td_error *err)
{
    if (link->rank == 0) return td_fail(err, TD_EINVAL, "rank 0 receives no step messages");
    td_step_stream *s = link->steps;
    uint8_t head[TD_FRAME_HEAD_BYTES];
    td_frame frame;
    td_status status = await_head(link, timeout_ms, err);
    if (status != TD_OK) return status;
    memcpy(head, s->ahead, sizeof head);
    status = td_frame_parse(head, &frame, err);
    if (status != TD_OK) return td_control_lose(link->control, err, "step connection: bytes that are no message");
    if (frame.type != TD_FRAME_STEP || frame.generation != link->generation || frame.seq != s->seq)
        return td_control_lose(link->control, err, "step message %u of pair %016llx, expected %u of %016llx", frame.seq,
                               (unsigned long long)frame.generation, s->seq, (unsigned long long)link->generation);
    if (frame.n_bytes > cap_bytes)
        return td_control_lose(link->control, err, "step message %u of %u bytes, at most %zu fit", frame.seq,
                               frame.n_bytes, cap_bytes);
    s->taken_bytes = sizeof head;
    td_wait wait = td_wait_start(link->control, "the rest of step message", s->seq, link->warn_ms, link->late_ms);
    wait.no_sleep = true;
    status = take_payload(link, &wait, buf, frame.n_bytes, err);
    if (status != TD_OK) return status;
    td_error why;
    if (td_frame_verify(head, &frame, buf, &why) != TD_OK) return td_control_lose(link->control, err, "%s", why.text);
    s->seq++;
    *n_bytes = frame.n_bytes;
    return TD_OK;
}
