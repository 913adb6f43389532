/* The gather inside the stream, this thread answering as the link would: what the host finds in the slot, what comes
 * back, with content that changes every time (a constant one would hide a stale slot); eager and recorded; a stop and a
 * limit end it. There is no CPU twin: on the CPU the link gathers. */
#include "opcheck.h"

#include "base/clock.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { RECORDED = 5, PATIENCE_MS = 2000 };

typedef struct rig {
    oc_ctx *oc;
    td_dev *dev;
    td_gather_args args;
    td_bell *bell;
    unsigned char *slots, *expect, *got; /* [2][n_bytes] */
    int rounds;
    void *device; /* partials, then state */
    size_t device_bytes;
    uint32_t answered;
} rig;

static void make(rig *r, oc_ctx *oc, int rank, size_t n_bytes)
{
    td_error err;
    void *bell = NULL, *slots = NULL;
    *r = (rig){ .oc = oc, .dev = oc->dev[OC_GPU], .device_bytes = 2 * n_bytes + 256 };
    if (td_dev_alloc(r->dev, r->device_bytes, &r->device, &err) ||
        td_dev_host_alloc(r->dev, sizeof *r->bell, &bell, &err) ||
        td_dev_host_alloc(r->dev, 2 * n_bytes, &slots, &err) || !(r->expect = calloc(2, n_bytes)) ||
        !(r->got = malloc(2 * n_bytes)))
        oc_give_up(oc, "memory for a gather", &err);
    r->bell = bell;
    r->slots = slots;
    td_dev_fill(r->dev, r->device, 0, r->device_bytes);
    r->args = (td_gather_args){ .rank = rank,
                                .n_bytes = n_bytes,
                                .partials = r->device,
                                .state = (uint32_t *)(void *)((char *)r->device + 2 * n_bytes),
                                .bell = bell,
                                .slots = slots,
                                .limit_ns = 20000000000ll,
                                .next = { { r->device, n_bytes + 7 }, { (char *)r->device + n_bytes, 100 } } };
}

static void destroy(rig *r)
{
    td_dev_free(r->dev, r->device, r->device_bytes);
    td_dev_host_free(r->dev, r->bell, sizeof *r->bell);
    td_dev_host_free(r->dev, r->slots, 2 * r->args.n_bytes);
    free(r->expect);
    free(r->got);
}

static unsigned char *part(unsigned char *parts, const rig *r, bool own)
{
    return parts + (size_t)(own ? r->args.rank : 1 - r->args.rank) * r->args.n_bytes;
}

/* Waiting for the device, as oc_ran() does, would be waiting for an answer that only this thread can give. */
static void launched(const rig *r, td_status status)
{
    oc_expect(r->oc, status == TD_OK, "it is launched");
}

/* Words that differ from each other and from those of the round before: multiples of a random odd number. */
static void randomise(rig *r, unsigned char *bytes)
{
    uint64_t *words = (uint64_t *)(void *)bytes, odd = oc_rand(r->oc) | 1;
    for (size_t i = 0; i < r->args.n_bytes / 8; i++) words[i] = odd * (i + 1);
}

/* Hears the bell for the next number, compares what is in the slot, puts the other part there and answers. */
static bool answer(rig *r)
{
    uint32_t number = r->answered + 1;
    int64_t start = td_now_ns();
    while (atomic_load((_Atomic uint32_t *)&r->bell->rung) != number)
        if (td_now_ns() - start > PATIENCE_MS * 1000000ll) return false;
    bool same = memcmp(part(r->slots, r, true), part(r->expect, r, true), r->args.n_bytes) == 0;
    randomise(r, part(r->expect, r, false));
    memcpy(part(r->slots, r, false), part(r->expect, r, false), r->args.n_bytes);
    atomic_store((_Atomic uint32_t *)&r->bell->arrived, r->answered = number);
    return same;
}

static bool came_back(rig *r)
{
    return td_dev_download(r->dev, r->got, r->args.partials, 2 * r->args.n_bytes) == TD_OK &&
           memcmp(r->got, r->expect, 2 * r->args.n_bytes) == 0;
}

static void eager(rig *r)
{
    bool heard = true, back = true;
    for (int i = 0; i < r->rounds && heard; i++) {
        randomise(r, part(r->expect, r, true));
        td_dev_upload(r->dev, part((unsigned char *)r->args.partials, r, true), part(r->expect, r, true),
                      r->args.n_bytes);
        launched(r, r->oc->ops[OC_GPU].gather(r->dev, &r->args));
        heard = answer(r);
        if (!heard) atomic_store((_Atomic uint32_t *)&r->bell->stop, 1);
        back = came_back(r) && back;
    }
    oc_expect(r->oc, heard, "the slot holds the own part when the bell rings");
    oc_expect(r->oc, back, "both parts are there afterwards");
}

/* Several gathers of the same part in one recording; the host answers each. */
static void recorded(rig *r)
{
    td_error err = { 0 };
    td_graph *graph = NULL;
    bool heard = true, back = true;
    td_status status = td_dev_capture_begin(r->dev);
    for (int i = 0; i < RECORDED && !status; i++) status = r->oc->ops[OC_GPU].gather(r->dev, &r->args);
    bool made = td_dev_capture_end(r->dev, &graph, &err) == TD_OK && !status;
    oc_expect(r->oc, made, "recording");
    for (int i = 0; made && i < r->rounds / RECORDED && heard; i++) {
        randomise(r, part(r->expect, r, true));
        td_dev_upload(r->dev, part((unsigned char *)r->args.partials, r, true), part(r->expect, r, true),
                      r->args.n_bytes);
        launched(r, td_dev_graph_launch(r->dev, graph));
        for (int j = 0; j < RECORDED && heard; j++) heard = answer(r);
        if (!heard) atomic_store((_Atomic uint32_t *)&r->bell->stop, 1);
        back = came_back(r) && back;
    }
    oc_expect(r->oc, heard, "recorded: the slot holds the own part when the bell rings");
    oc_expect(r->oc, back, "recorded: both parts are there afterwards");
    td_dev_graph_destroy(r->dev, graph);
}

/* Nobody answers: the limit, then a stop. The device must come back by itself. */
static void unanswered(rig *r)
{
    td_error err = { 0 };
    int64_t start = td_now_ns();
    r->args.limit_ns = 20000000;
    oc_ran(r->oc, TD_OK, r->oc->ops[OC_GPU].gather(r->dev, &r->args));
    oc_ran(r->oc, TD_OK, td_dev_sync(r->dev, &err));
    oc_expect(r->oc, r->bell->gave_up == r->answered + 1 && td_now_ns() - start < 1000000000,
              "it gives up at its limit");
    start = td_now_ns();
    r->args.limit_ns = 20000000000ll;
    launched(r, r->oc->ops[OC_GPU].gather(r->dev, &r->args));
    atomic_store((_Atomic uint32_t *)&r->bell->stop, 1);
    oc_ran(r->oc, TD_OK, td_dev_sync(r->dev, &err));
    oc_expect(r->oc, td_now_ns() - start < 1000000000, "a stop ends it");
}

static void loopback(rig *r)
{
    td_error err = { 0 };
    r->args.bell = NULL;
    r->args.loopback_ns = 5000000;
    randomise(r, part(r->expect, r, true));
    memcpy(part(r->expect, r, false), part(r->expect, r, true), r->args.n_bytes);
    td_dev_upload(r->dev, part((unsigned char *)r->args.partials, r, true), part(r->expect, r, true), r->args.n_bytes);
    int64_t start = td_now_ns();
    oc_ran(r->oc, TD_OK, r->oc->ops[OC_GPU].gather(r->dev, &r->args));
    oc_ran(r->oc, TD_OK, td_dev_sync(r->dev, &err));
    double ms = (double)(td_now_ns() - start) * 1e-6;
    oc_expect(r->oc, ms >= 4.9 && ms < 100, "the loopback takes its time");
    oc_expect(r->oc, came_back(r), "the loopback gives the own part back");
}

void oc_gather(oc_ctx *oc)
{
    const size_t sizes[] = { 16, 2048, 16384, 262144, 1 << 20, 32 << 20 };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int rank = 0; rank < 2; rank++) {
            rig r;
            if (!oc_case(oc, "%zu bytes, rank %d", sizes[i], rank)) continue;
            make(&r, oc, rank, sizes[i]);
            r.rounds = sizes[i] <= 262144 ? 50 : sizes[i] <= 1 << 20 ? 20 : 3;
            eager(&r);
            if (sizes[i] <= 1 << 20) recorded(&r);
            if (sizes[i] == 16384) unanswered(&r);
            if (sizes[i] == 16384) loopback(&r);
            destroy(&r);
            oc_done(oc);
        }
}
