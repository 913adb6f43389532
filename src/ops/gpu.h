/* What is known about a GPU before anything runs on it, and the words for what goes wrong with one. The words are pure
 * functions of error numbers and versions, so that they can be read and tested without a GPU. docs/cuda.md "How it
 * fails" lists them. */
#ifndef TD_OPS_GPU_H
#define TD_OPS_GPU_H

#include "base/status.h"

TD_BEGIN_C

typedef struct td_gpu {
    int index; /* in the driver's list */
    char name[64];
    int n_sm;
    size_t l2_bytes;
    int capability;                 /* 90 for sm_90, 121 for sm_121 */
    int driver, runtime;            /* CUDA versions as the driver counts: 13010 is 13.1 */
    bool integrated;                /* host and GPU share one memory */
    size_t free_bytes, total_bytes; /* by the driver; free: beside this process's own context, which the query makes */
} td_gpu;

/* GPU `index`, made ready for this process. TD_EUNSUPPORTED: no driver, no GPU, one this build has no code for;
 * TD_EINVAL: no such index; TD_ENOMEM: no memory for a context. The text is one line that says what to do. */
td_status td_gpu_query(int index, td_gpu *out, td_error *err);

/* Device memory is given out in pieces of this many bytes. */
#define TD_GPU_GRANULE ((size_t)2 << 20)
static inline size_t td_gpu_granules(size_t n_bytes)
{
    return (n_bytes + TD_GPU_GRANULE - 1) / TD_GPU_GRANULE * TD_GPU_GRANULE;
}

/* ---- words ---- */

/* Numbers of cudaError_t that have words of their own; cuda/dev.cu checks that they are the toolkit's. */
enum {
    TD_GPU_NO_MEMORY = 2,
    TD_GPU_OLD_DRIVER = 35,
    TD_GPU_UNAVAILABLE = 46,
    TD_GPU_NONE = 100,
    TD_GPU_ECC = 214,
    TD_GPU_NVLINK = 220,
    TD_GPU_CONTAINED = 226,
    TD_GPU_ILLEGAL_ADDRESS = 700,
    TD_GPU_TIMEOUT = 702,
    TD_GPU_ASSERT = 710,
    TD_GPU_STACK = 714,
    TD_GPU_ILLEGAL_INSTRUCTION = 715,
    TD_GPU_MISALIGNED = 716,
    TD_GPU_ADDRESS_SPACE = 717,
    TD_GPU_PC = 718,
    TD_GPU_LAUNCH_FAILED = 719,
    TD_GPU_NOT_READY = 802,
    TD_GPU_DRIVER_MISMATCH = 803,
    TD_GPU_UNKNOWN = 999
};

/* No GPU can be used: what the first call to the runtime said. driver 0: none is installed. */
td_status td_gpu_no_use(int code, const char *text, int driver, int runtime, td_error *err);

/* GPU `index` is not among n_gpus >= 1. */
td_status td_gpu_no_such(int index, int n_gpus, td_error *err);

/* Whether code for one of `archs` (90, 121) runs on a GPU: same generation, and at least as new. If not, the refusal.
 */
bool td_gpu_runs(const int *archs, int n_archs, int capability);
td_status td_gpu_no_code(const td_gpu *gpu, const int *archs, int n_archs, td_error *err);

/* GPU `index` was found and cannot be set up. */
td_status td_gpu_no_start(int index, int code, const char *text, td_error *err);

/* Operation `op` failed while it ran, or was not accepted. A code after which the GPU answers nothing more to this
 * process says so, and where the driver's own account stands. TD_ECUDA; TD_ENOMEM: there was no memory for it. */
td_status td_gpu_failed(int index, const char *op, int code, const char *text, td_error *err);

/* It has run for `seconds` without coming to an end, while the host did `op`. TD_ECUDA. */
td_status td_gpu_hung(int index, const char *op, int seconds, td_error *err);

TD_END_C
#endif
