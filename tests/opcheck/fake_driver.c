/* libcuda.so.1 as the runtime sees it when there is no GPU to use: FAKE_DRIVER is the version it claims (12040), FAKE_INIT
 * what its first call answers. no_gpu.sh puts it in front of a real one. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static int number(const char *name, int fallback)
{
    const char *text = getenv(name);
    return text ? atoi(text) : fallback;
}

static int init(unsigned flags)
{
    (void)flags;
    return number("FAKE_INIT", 0);
}

static int version(int *out)
{
    *out = number("FAKE_DRIVER", 13000);
    return 0;
}

static int device_count(int *out)
{
    *out = 0;
    return 0;
}

static int anything_else(void)
{
    return 999;
}

EXPORT int cuGetProcAddress_v2(const char *name, void (**out)(void), int cuda_version, uint64_t flags, int *found);
EXPORT int cuGetProcAddress_v2(const char *name, void (**out)(void), int cuda_version, uint64_t flags, int *found)
{
    (void)cuda_version;
    (void)flags;
    if (found) *found = 0;
    *out = strcmp(name, "cuInit") == 0               ? (void (*)(void))init
           : strcmp(name, "cuDriverGetVersion") == 0 ? (void (*)(void))version
           : strcmp(name, "cuDeviceGetCount") == 0   ? (void (*)(void))device_count
           : strcmp(name, "cuGetProcAddress") == 0   ? (void (*)(void))cuGetProcAddress_v2
                                                     : (void (*)(void))anything_else;
    return 0;
}

EXPORT int cuGetProcAddress(const char *name, void (**out)(void), int cuda_version, uint64_t flags);
EXPORT int cuGetProcAddress(const char *name, void (**out)(void), int cuda_version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, out, cuda_version, flags, NULL);
}

EXPORT int cuDriverGetVersion(int *out);
EXPORT int cuDriverGetVersion(int *out)
{
    return version(out);
}
