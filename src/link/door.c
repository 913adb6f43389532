/* See door.h. When all seats are taken the guest that waited longest goes: our peer speaks at once, so a crowd of
 * silent connections cannot keep it out. */
#include "link/door.h"

#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"

static void log_drop(td_door *door, const char *name, const char *why)
{
    int64_t now = td_now_ns();
    if (now < door->next_log_ns) return;
    door->next_log_ns = now + 1000000000;
    td_log(TD_LOG_WARN, "link", "dropped a connection from %s: %s", name, why);
}

static void dismiss(td_door *door, td_guest *guest, const char *why)
{
    log_drop(door, guest->name, why);
    close(guest->fd);
    guest->fd = -1;
}

td_status td_door_open(td_door *door, const char *host, int port, const char *peer_host, td_error *err)
{
    *door = (td_door){ .listen_fd = -1, .peer_only = peer_host != NULL };
    for (int i = 0; i < TD_GUESTS_MAX; i++) door->guests[i].fd = -1;
    for (int i = 0; i < TD_GUESTS_MAX; i++) {
        td_frame_reader *reader = &door->guests[i].reader;
        if (td_frame_reader_init(reader, 32 << 10, 1u << TD_FRAME_HELLO | 1u << TD_FRAME_JOIN) != TD_OK) {
            td_door_close(door);
            return td_fail(err, TD_ENOMEM, "link: no memory for the control port");
        }
    }
    td_status status = peer_host ? td_net_resolve(peer_host, &door->peer, err) : TD_OK;
    if (status == TD_OK) status = td_net_listen(host, port, &door->listen_fd, err);
    if (status != TD_OK) td_door_close(door);
    return status;
}

void td_door_close(td_door *door)
{
    if (door->listen_fd >= 0) close(door->listen_fd);
    door->listen_fd = -1;
    for (int i = 0; i < TD_GUESTS_MAX; i++) {
        td_guest *guest = &door->guests[i];
        if (guest->reader.buf && guest->fd >= 0) close(guest->fd);
        guest->fd = -1;
        td_frame_reader_deinit(&guest->reader);
    }
}

int td_door_polls(const td_door *door, struct pollfd *polls)
{
    int n = 0;
    if (door->listen_fd < 0) return 0;
    polls[n++] = (struct pollfd){ .fd = door->listen_fd, .events = POLLIN };
    for (int i = 0; i < TD_GUESTS_MAX; i++)
        if (door->guests[i].fd >= 0) polls[n++] = (struct pollfd){ .fd = door->guests[i].fd, .events = POLLIN };
    return n;
}

static td_guest *free_seat(td_door *door)
{
    td_guest *oldest = &door->guests[0];
    for (int i = 0; i < TD_GUESTS_MAX; i++) {
        td_guest *guest = &door->guests[i];
        if (guest->fd < 0) return guest;
        if (guest->until_ns < oldest->until_ns) oldest = guest;
    }
    dismiss(door, oldest, "it said nothing and its place was needed");
    return oldest;
}

static void accept_all(td_door *door)
{
    char name[TD_NET_NAME_CAP];
    /* At most a few seats' worth a call: a flood of connections must not keep the caller from its beats. */
    for (int i = 0; i < 2 * TD_GUESTS_MAX; i++) {
        int fd = td_net_accept(door->listen_fd, name);
        if (fd < 0) return;
        if (door->peer_only && !td_net_peer_is(fd, &door->peer)) {
            log_drop(door, name, "it is not the peer's address");
            close(fd);
            continue;
        }
        td_guest *guest = free_seat(door);
        guest->fd = fd;
        guest->until_ns = td_now_ns() + (int64_t)TD_GUEST_LIMIT_S * 1000000000;
        guest->reader.used_bytes = guest->reader.taken_bytes = 0;
        for (int c = 0; c < TD_NET_NAME_CAP; c++) guest->name[c] = name[c];
    }
}

/* Reads what is there. true: the guest spoke and *visit has it; the seat is free again. */
static bool listen_to(td_door *door, td_guest *guest, td_visit *visit)
{
    size_t space;
    const char *why = NULL;
    void *to = td_frame_space(&guest->reader, &space);
    long n = space > 0 ? td_net_recv(guest->fd, to, space, &why) : 0;
    if (n < 0) {
        dismiss(door, guest, why);
        return false;
    }
    if (n == 0) {
        if (td_now_ns() > guest->until_ns) dismiss(door, guest, "it did not say who it is in time");
        return false;
    }
    td_frame_added(&guest->reader, (size_t)n);

    td_error err;
    td_visit v = { .fd = guest->fd };
    td_status status = td_frame_next(&guest->reader, &v.frame, &v.payload, &err);
    if (status == TD_EAGAIN) return false;
    if (status != TD_OK && status != TD_EUNSUPPORTED) {
        dismiss(door, guest, err.text);
        return false;
    }
    v.wrong_protocol = status == TD_EUNSUPPORTED;
    for (int c = 0; c < TD_NET_NAME_CAP; c++) v.name[c] = guest->name[c];
    guest->fd = -1;
    *visit = v;
    return true;
}

bool td_door_serve(td_door *door, td_visit *visit)
{
    if (door->listen_fd < 0) return false;
    accept_all(door);
    for (int i = 0; i < TD_GUESTS_MAX; i++)
        if (door->guests[i].fd >= 0 && listen_to(door, &door->guests[i], visit)) return true;
    return false;
}
