/* Waiting for the GPU, with an end. The driver's own waits have none: a kernel that never returns and raises no error
 * (a peer's flag that does not come, a bug) would hold the process for good, and so would every call that waits
 * silently, cudaFree() above all. So the wait looks, and past the device's patience it takes the GPU for hung: from
 * then on nothing waits for it any more, what it holds is left to the end of the process, and the failure has words of
 * its own (ops/gpu.c). */
#include "base/clock.h"
#include "ops/cuda/cuda.h"

/* Decode windows are waited for without sleep: what it adds would be in every token. */
static const td_pace pace = { 500000, 500000000, 50000 };

static cudaError_t look(const td_cuda_dev *dev, cudaEvent_t event)
{
    return event ? cudaEventQuery(event) : cudaStreamQuery(dev->stream);
}

td_status td_cuda_wait(td_cuda_dev *dev, cudaEvent_t event, const char *op)
{
    cudaError_t error;
    int64_t last_ns = 0, waited_ns = 0;
    if (dev->hung) return TD_ECUDA;
    while ((error = look(dev, event)) == cudaErrorNotReady) {
        if (!last_ns) last_ns = td_now_ns();
        waited_ns += td_clock_tick(&last_ns);
        if (waited_ns > dev->patience_ns) {
            dev->hung = true;
            return td_cuda_done(dev, cudaErrorLaunchTimeout, op);
        }
        td_pause(&pace, waited_ns);
    }
    return td_cuda_done(dev, error, op);
}
