/* A GPU that does not come to an end: a gather that nobody answers. The wait for it must end, with words, and nothing
 * after that may wait again, the destruction of the device included (the process ends while the kernel still runs; run
 * this under `time`). Runs only when it is named, last, and alone: the device is lost afterwards. */
#include "opcheck.h"

#include "base/clock.h"

#include <string.h>

enum { LIMIT_S = 30, SOON_MS = 200 };

static int64_t ms_since(int64_t start)
{
    return (td_now_ns() - start) / 1000000;
}

void oc_hang(oc_ctx *oc)
{
    enum { PART = 4096 };
    td_dev *dev = oc->dev[OC_GPU];
    td_error err = { 0 };
    void *partials = NULL, *bell = NULL, *slots = NULL;
    if (td_dev_alloc(dev, 2 * PART + 256, &partials, &err) || td_dev_host_alloc(dev, sizeof(td_bell), &bell, &err) ||
        td_dev_host_alloc(dev, 2 * PART, &slots, &err))
        oc_give_up(oc, "memory for a gather", &err);
    td_dev_fill(dev, partials, 0, 2 * PART + 256);
    td_gather_args args = { .n_bytes = PART,
                            .partials = partials,
                            .state = (uint32_t *)(void *)((char *)partials + 2 * PART),
                            .bell = bell,
                            .slots = slots,
                            .limit_ns = LIMIT_S * 1000000000ll };
    oc_case(oc, "a gather that nobody answers");
    oc_expect(oc, oc->ops[OC_GPU].gather(dev, &args) == TD_OK, "it is launched");
    int64_t start = td_now_ns();
    oc_expect(oc, td_dev_sync(dev, &err) == TD_ECUDA, "the wait ends");
    int64_t waited = ms_since(start);
    oc_expect(oc, waited >= OC_HANG_PATIENCE_MS && waited < OC_HANG_PATIENCE_MS + SOON_MS, "when patience does");
    oc_expect(oc, strstr(err.text, "hangs") != NULL, "the words say that it hangs");
    start = td_now_ns();
    oc_expect(oc, td_dev_sync(dev, &err) == TD_ECUDA && strstr(err.text, "hangs"), "the next wait says so again");
    oc_expect(oc, td_dev_upload(dev, partials, oc->what, 16) == TD_ECUDA, "an upload fails");
    oc_expect(oc, td_dev_download(dev, oc->what, partials, 16) == TD_ECUDA, "and a download");
    td_dev_free(dev, partials, 2 * PART + 256);
    td_dev_host_free(dev, slots, 2 * PART);
    td_dev_host_free(dev, bell, sizeof(td_bell));
    oc_expect(oc, ms_since(start) < SOON_MS, "nothing waits any more");
}
