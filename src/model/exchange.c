/* The other rank's partials. On the CPU the link gathers when a block is done. A device must not wait for its host in
 * the middle of a forward: there the gather is an operation of the stream (ops/gather.h), and the host's part is to
 * relay - bell heard, bytes across the link, answer given - while the device is already told what comes next. The
 * thread that called forward does it, as it would only wait otherwise.
 *
 * Whatever goes wrong (the peer is lost, this device fails, the bell does not ring), `stop` is set before anything
 * else: then every gather still in the stream ends at once and nothing spins. */
#include "model/internal.h"

#include "base/clock.h"

#include <stdatomic.h>
#include <string.h>

#define LOOK_NS     1000000            /* between two looks at device and peer */
#define HANG_NS     TD_DEV_PATIENCE_NS /* no block of a model takes this long */
#define DEVICE_NS   900000000000ll     /* the device's own limit: longer than any of the link's */
#define WAITING_MAX 1 /* gathers in the stream while the host enqueues more: a launch queue is finite */

/* A decode window's next bell comes while spinning, a prompt's before the sleeps. */
static const td_pace pace = { .spin_ns = 200000, .yield_ns = 20000000, .sleep_ns = 50000 };

bool td_model_gathers_on_device(const td_model *m)
{
    return m->options.world > 1 && (td_dev_backend(m->dev) != TD_CPU || m->options.loopback);
}

static uint32_t load(const uint32_t *word)
{
    return atomic_load_explicit((const _Atomic uint32_t *)word, memory_order_acquire);
}

static void store(uint32_t *word, uint32_t value)
{
    atomic_store_explicit((_Atomic uint32_t *)word, value, memory_order_release);
}

static size_t part_bytes(const td_model *m, int n_rows)
{
    return (size_t)n_rows * (size_t)m->config.hidden * sizeof(float);
}

/* Small windows are gathered, prompts exchanged in pieces; the limit is the one that the plan tells the link. */
static td_status cross(td_model *m, float *parts, size_t n_bytes, td_error *err)
{
    if (n_bytes <= m->plan.link_gather_bytes) return td_link_gather(m->link, parts, n_bytes, err);
    char *mine = (char *)parts + (size_t)m->options.rank * n_bytes;
    char *theirs = (char *)parts + (size_t)(1 - m->options.rank) * n_bytes;
    return td_link_exchange(m->link, mine, theirs, n_bytes, err);
}

/* ---- the host's part of a device's gather ---- */

static td_status look(td_model *m, int64_t waited_ns, td_error *err)
{
    bool idle;
    uint32_t rung = load(&m->bell->rung); /* before the look at the device: it may ring and be done in between */
    if (td_link_state(m->link) == TD_LINK_LOST) return td_link_lost_reason(m->link, err);
    TD_TRY(td_dev_idle(m->dev, &idle, err));
    if (idle && rung == load(&m->bell->rung))
        return td_fail(err, TD_ECUDA, "gather %u: the GPU has nothing left to do and did not ring", m->answered + 1);
    if (waited_ns > HANG_NS)
        return td_fail(err, TD_ECUDA, "gather %u: the GPU did not come to it within %d s", m->answered + 1,
                       (int)(HANG_NS / 1000000000));
    return TD_OK;
}

static td_status hear(td_model *m, uint32_t number, td_error *err)
{
    int64_t last_ns = td_now_ns(), waited_ns = 0, looked_ns = 0;
    for (unsigned polls = 1; (int32_t)(load(&m->bell->rung) - number) < 0; polls++) {
        if (polls % 64) continue;
        waited_ns += td_clock_tick(&last_ns);
        if (waited_ns - looked_ns > LOOK_NS) {
            looked_ns = waited_ns;
            TD_TRY(look(m, waited_ns, err));
        }
        td_pause(&pace, waited_ns);
    }
    return TD_OK;
}

/* Answers the gathers that wait, but for the last `leave`. */
static td_status answer(td_model *m, uint32_t leave, td_error *err)
{
    td_status status = TD_OK;
    if (load(&m->bell->stop))
        return td_fail(err, TD_EPEER, "gather %u: an earlier forward failed, gathers do not wait any more",
                       m->answered + 1);
    while (m->asked - m->answered > leave && !status) {
        uint32_t number = m->answered + 1;
        status = hear(m, number, err);
        if (!status) status = cross(m, m->gather_slots, part_bytes(m, m->asked_rows), err);
        if (!status) store(&m->bell->arrived, m->answered = number);
    }
    if (status) store(&m->bell->stop, 1);
    return status;
}

td_status td_model_answer(td_model *m, int n_gathers, int n_rows, td_error *err)
{
    if (!m->bell) return TD_OK;
    m->asked += (uint32_t)n_gathers;
    m->asked_rows = n_rows;
    return answer(m, 0, err);
}

td_status td_model_settle(td_model *m, td_error *err)
{
    return td_model_answer(m, 0, m->asked_rows, err);
}

td_status td_model_gathered(const td_model *m, td_error *err)
{
    uint32_t number = m->bell ? load(&m->bell->gave_up) : 0;
    if (!number) return TD_OK;
    return td_fail(err, TD_ECUDA, "gather %u: the GPU went on without the other rank's part after %d s", number,
                   (int)(DEVICE_NS / 1000000000));
}

/* ---- the model's part ---- */

td_status td_model_exchange(td_model *m, int n_rows, const td_model_ahead *ahead, td_error *err)
{
    if (m->options.world == 1) return TD_OK;
    if (!td_model_gathers_on_device(m)) return cross(m, m->s.partials, part_bytes(m, n_rows), err);
    td_gather_args args = { .rank = m->options.rank,
                            .n_bytes = part_bytes(m, n_rows),
                            .partials = m->s.partials,
                            .state = m->gather_state,
                            .bell = m->bell,
                            .slots = m->gather_slots,
                            .loopback_ns = m->options.loopback_ns,
                            .limit_ns = DEVICE_NS };
    if (n_rows <= TD_WINDOW_MAX) memcpy(args.next, ahead->span, sizeof args.next); /* a prompt computes meanwhile */
    td_status status = m->ops->gather(m->dev, &args);
    if (status) return td_fail(err, status, "gather of %d rows: %s", n_rows, td_status_text(status));
    if (m->recording || !m->bell) return TD_OK;
    m->asked++;
    m->asked_rows = n_rows;
    bool looked_at = m->options.check_layers || td_model_traced(m); /* then the host reads device memory in between */
    return answer(m, looked_at ? 0 : WAITING_MAX, err);
}

/* ---- memory ---- */

size_t td_model_gather_bytes(const td_model *m)
{
    return sizeof(td_bell) + TD_SHARDS * part_bytes(m, m->rows_cap);
}

td_status td_model_share_link(td_model *m, td_error *err)
{
    size_t n_bytes = m->plan.link_region_bytes;
    void *memory = n_bytes ? td_link_buffer(m->link, n_bytes) : NULL;
    if (!n_bytes) return TD_OK;
    if (!memory)
        return td_fail(err, TD_ENOMEM, "model: the link was opened with too little memory, it needs %zu bytes",
                       n_bytes);
    if (!td_model_gathers_on_device(m)) {
        m->s.partials = (float *)memory;
        return TD_OK;
    }
    TD_TRY(td_dev_host_register(m->dev, memory, n_bytes, err)); /* zeroed, as the bell wants it */
    m->bell = (td_bell *)memory;
    m->gather_slots = (float *)(void *)((char *)memory + sizeof(td_bell));
    return TD_OK;
}

void td_model_abandon(td_model *m)
{
    if (m->bell) store(&m->bell->stop, 1);
}

void td_model_unshare_link(td_model *m)
{
    td_dev_host_unregister(m->dev, m->bell);
    m->bell = NULL;
}
