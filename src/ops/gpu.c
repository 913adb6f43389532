/* See gpu.h. Each line names what was found and what to do about it. */
#include "ops/gpu.h"

#include <stdio.h>

td_status td_gpu_no_use(int code, const char *text, int driver, int runtime, td_error *err)
{
    if (driver == 0)
        return td_fail(err, TD_EUNSUPPORTED,
                       "no NVIDIA driver is installed (in a container: it was started without the GPU); `nvidia-smi` "
                       "shows when there is one");
    if (code == TD_GPU_OLD_DRIVER)
        return td_fail(err, TD_EUNSUPPORTED,
                       "the NVIDIA driver is too old: it is for CUDA %d.%d, this build needs CUDA %d.%d; update the "
                       "driver",
                       driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    if (code == 0 || code == TD_GPU_NONE)
        return td_fail(err, TD_EUNSUPPORTED,
                       "the NVIDIA driver lists no GPU (`nvidia-smi`, and CUDA_VISIBLE_DEVICES, say which it has)");
    if (code == TD_GPU_NOT_READY)
        return td_fail(err, TD_EUNSUPPORTED,
                       "the NVIDIA driver is not ready yet: %s; wait, or see whether its services run (nvidia-smi)",
                       text);
    if (code == TD_GPU_DRIVER_MISMATCH)
        return td_fail(err, TD_EUNSUPPORTED,
                       "the NVIDIA driver in the kernel and its libraries are of different versions (after an update: "
                       "restart the machine)");
    return td_fail(err, TD_EUNSUPPORTED,
                   "the NVIDIA driver (CUDA %d.%d) gives no GPU: %s (error %d); does nvidia-smi work?", driver / 1000,
                   driver % 1000 / 10, text, code);
}

td_status td_gpu_no_such(int index, int n_gpus, td_error *err)
{
    if (n_gpus == 1) return td_fail(err, TD_EINVAL, "there is no GPU %d; the driver lists one, number 0", index);
    return td_fail(err, TD_EINVAL, "there is no GPU %d; the driver lists %d, numbers 0 to %d", index, n_gpus,
                   n_gpus - 1);
}

bool td_gpu_runs(const int *archs, int n_archs, int capability)
{
    for (int i = 0; i < n_archs; i++)
        if (archs[i] / 10 == capability / 10 && archs[i] <= capability) return true;
    return false;
}

td_status td_gpu_no_code(const td_gpu *gpu, const int *archs, int n_archs, td_error *err)
{
    char list[128] = "";
    for (int i = 0, n = 0; i < n_archs && n < (int)sizeof list; i++)
        n += snprintf(list + n, sizeof list - (size_t)n, "%ssm_%d", i ? ", " : "", archs[i]);
    return td_fail(err, TD_EUNSUPPORTED,
                   "GPU %d (%s) is sm_%d, this build has code for %s only (-DTD_CUDA_ARCHS=%d makes one for it)",
                   gpu->index, gpu->name, gpu->capability, list, gpu->capability);
}

td_status td_gpu_no_start(int index, int code, const char *text, td_error *err)
{
    if (code == TD_GPU_NO_MEMORY)
        return td_fail(err, TD_ENOMEM, "GPU %d: other programs have taken its memory (`nvidia-smi` lists them)", index);
    if (code == TD_GPU_UNAVAILABLE)
        return td_fail(err, TD_EUNSUPPORTED,
                       "GPU %d: another program has it for itself (compute mode: `nvidia-smi -q -d COMPUTE`)", index);
    return td_fail(err, TD_EUNSUPPORTED, "GPU %d cannot be used: %s (error %d)", index, text, code);
}

static bool is_lost(int code)
{
    static const int codes[] = { TD_GPU_ECC,        TD_GPU_NVLINK,        TD_GPU_CONTAINED, TD_GPU_ILLEGAL_ADDRESS,
                                 TD_GPU_TIMEOUT,    TD_GPU_ASSERT,        TD_GPU_STACK,     TD_GPU_ILLEGAL_INSTRUCTION,
                                 TD_GPU_MISALIGNED, TD_GPU_ADDRESS_SPACE, TD_GPU_PC,        TD_GPU_LAUNCH_FAILED,
                                 TD_GPU_UNKNOWN };
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (codes[i] == code) return true;
    return false;
}

td_status td_gpu_failed(int index, const char *op, int code, const char *text, td_error *err)
{
    if (code == TD_GPU_NO_MEMORY) return td_fail(err, TD_ENOMEM, "GPU %d: %s: out of memory", index, op);
    if (!is_lost(code)) return td_fail(err, TD_ECUDA, "GPU %d: %s: %s (error %d)", index, op, text, code);
    return td_fail(err, TD_ECUDA,
                   "GPU %d is lost: %s: %s (error %d); the driver's account stands in the kernel log behind \"Xid\": "
                   "sudo dmesg | grep Xid",
                   index, op, text, code);
}

td_status td_gpu_hung(int index, const char *op, int seconds, td_error *err)
{
    return td_fail(
        err, TD_ECUDA,
        "GPU %d hangs: %s: what it was given has not ended for %d s; it is taken for lost, and ends with this "
        "process. If nvidia-smi still shows the process, kill it",
        index, op, seconds);
}
