/* The CUDA device: stream, scratch, memory, graphs, and the first failure. Every allocation is a plain cudaMalloc or
 * mapped pinned memory, made before the first window; operations never allocate. */
#include "ops/cuda/cuda.h"
#include "ops/gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct td_graph {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
};

td_status td_cuda_done(td_cuda_dev *dev, cudaError_t error, const char *op)
{
    if (error == cudaSuccess) return TD_OK;
    if (dev->error == cudaSuccess) {
        dev->error = error;
        dev->error_op = op;
    }
    return TD_ECUDA;
}

td_status td_cuda_launched(td_cuda_dev *dev, const char *op)
{
    return td_cuda_done(dev, cudaPeekAtLastError(), op);
}

static td_status report(const td_cuda_dev *dev, td_error *err)
{
    if (dev->hung) return td_gpu_hung(dev->index, dev->error_op, (int)(dev->patience_ns / 1000000000), err);
    return td_gpu_failed(dev->index, dev->error_op, dev->error, cudaGetErrorString(dev->error), err);
}

static void cuda_destroy(td_dev *base)
{
    td_cuda_dev *dev = td_cuda(base);
    if (!dev->hung) td_cuda_branches_destroy(dev);
    td_cuda_pieces_destroy(dev);
    if (!dev->hung) cudaFree(dev->scratch);
    if (!dev->hung && dev->stream) cudaStreamDestroy(dev->stream);
    free(dev);
}

/* ---- memory ---- */

static td_status cuda_alloc(td_dev *base, size_t n_bytes, void **out, td_error *err)
{
    size_t free_bytes = 0, total_bytes = 0;
    void *memory = NULL;
    cudaError_t error = cudaMalloc(&memory, n_bytes ? n_bytes : 1);
    if (error == cudaSuccess) {
        *out = memory;
        return TD_OK;
    }
    cudaGetLastError(); /* an allocation that fails leaves the device usable */
    if (error != cudaErrorMemoryAllocation) {
        td_cuda_done(td_cuda(base), error, "allocating");
        return report(td_cuda(base), err);
    }
    cudaMemGetInfo(&free_bytes, &total_bytes);
    return td_fail(err, TD_ENOMEM, "GPU %d: %.1f MiB are not to be had in one piece, %.1f of %.1f MiB are free",
                   td_cuda(base)->index, (double)n_bytes * 0x1p-20, (double)free_bytes * 0x1p-20,
                   (double)total_bytes * 0x1p-20);
}

static void cuda_free(td_dev *base, void *memory, size_t n_bytes)
{
    (void)n_bytes;
    if (!td_cuda(base)->hung) cudaFree(memory);
}

static td_status cuda_host_alloc(td_dev *base, size_t n_bytes, void **out, td_error *err)
{
    void *memory = NULL;
    cudaError_t error = cudaHostAlloc(&memory, n_bytes ? n_bytes : 1, cudaHostAllocMapped | cudaHostAllocPortable);
    if (error != cudaSuccess) {
        cudaGetLastError();
        if (error != cudaErrorMemoryAllocation) {
            td_cuda_done(td_cuda(base), error, "allocating pinned memory");
            return report(td_cuda(base), err);
        }
        return td_fail(err, TD_ENOMEM, "GPU %d: %zu bytes of pinned host memory are not to be had",
                       td_cuda(base)->index, n_bytes);
    }
    memset(memory, 0, n_bytes);
    *out = memory;
    return TD_OK;
}

static void cuda_host_free(td_dev *base, void *memory, size_t n_bytes)
{
    (void)n_bytes;
    if (!td_cuda(base)->hung) cudaFreeHost(memory);
}

static td_status cuda_upload(td_dev *base, void *dst, const void *src, size_t n_bytes)
{
    td_cuda_dev *dev = td_cuda(base);
    td_cuda_join_all(dev);
    td_status status = td_cuda_wait(dev, NULL, "upload"); /* from ordinary memory the copy itself waits, without end */
    if (status != TD_OK) return status;
    cudaError_t error = cudaMemcpyAsync(dst, src, n_bytes, cudaMemcpyHostToDevice, dev->stream);
    status = td_cuda_done(dev, error, "upload");
    return status == TD_OK ? td_cuda_wait(dev, NULL, "upload") : status; /* src may be pinned: it is read until here */
}

static td_status cuda_download(td_dev *base, void *dst, const void *src, size_t n_bytes)
{
    td_cuda_dev *dev = td_cuda(base);
    td_cuda_join_all(dev);
    td_status status = td_cuda_wait(dev, NULL, "download"); /* as above */
    if (status != TD_OK) return status;
    cudaError_t error = cudaMemcpyAsync(dst, src, n_bytes, cudaMemcpyDeviceToHost, dev->stream);
    status = td_cuda_done(dev, error, "download");
    return status == TD_OK ? td_cuda_wait(dev, NULL, "download") : status;
}

static td_status cuda_copy(td_dev *base, void *dst, const void *src, size_t n_bytes)
{
    td_cuda_dev *dev = td_cuda(base);
    td_cuda_join_all(dev);
    return td_cuda_done(dev, cudaMemcpyAsync(dst, src, n_bytes, cudaMemcpyDefault, dev->stream), "copy");
}

static td_status cuda_fill(td_dev *base, void *dst, int byte, size_t n_bytes)
{
    td_cuda_dev *dev = td_cuda(base);
    td_cuda_join_all(dev);
    return td_cuda_done(dev, cudaMemsetAsync(dst, byte, n_bytes, dev->stream), "fill");
}

static td_status cuda_sync(td_dev *base, td_error *err)
{
    td_cuda_dev *dev = td_cuda(base);
    td_cuda_done(dev, cudaSetDevice(dev->index), "this thread's GPU"); /* a forward begins here, on whatever thread */
    td_cuda_join_all(dev);
    td_cuda_wait(dev, NULL, "waiting for the operations");
    if (!dev->hung) td_cuda_done(dev, cudaGetLastError(), "an operation");
    return dev->error == cudaSuccess ? TD_OK : report(dev, err);
}

static td_status cuda_idle(td_dev *base, bool *idle, td_error *err)
{
    td_cuda_dev *dev = td_cuda(base);
    td_cuda_join_all(dev);
    cudaError_t error = cudaStreamQuery(dev->stream);
    *idle = error == cudaSuccess;
    td_cuda_done(dev, error == cudaErrorNotReady ? cudaSuccess : error, "waiting for the operations");
    return dev->error == cudaSuccess ? TD_OK : report(dev, err);
}

static td_status cuda_host_register(td_dev *base, void *memory, size_t n_bytes, td_error *err)
{
    void *device = NULL;
    cudaError_t error = cudaHostRegister(memory, n_bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
    if (error == cudaSuccess) error = cudaHostGetDevicePointer(&device, memory, 0);
    if (error == cudaSuccess && device == memory) return TD_OK;
    if (error == cudaSuccess) cudaHostUnregister(memory);
    cudaGetLastError();
    return td_fail(err, TD_EUNSUPPORTED, "GPU %d: %zu bytes of the link's memory cannot be shared with it: %s",
                   td_cuda(base)->index, n_bytes,
                   error == cudaSuccess ? "it would see them at another address" : cudaGetErrorString(error));
}

static void cuda_host_unregister(td_dev *base, void *memory)
{
    if (!td_cuda(base)->hung) cudaHostUnregister(memory);
}

/* ---- activations for the host ---- */

static void cuda_from_f32(const td_dev *base, td_act *dst, const float *src, size_t n)
{
    td_bf16 *rounded = (td_bf16 *)malloc((n ? n : 1) * sizeof *rounded);
    td_check(rounded);
    for (size_t i = 0; i < n; i++) rounded[i] = td_f32_bf16(src[i]);
    cuda_upload((td_dev *)base, dst, rounded, n * sizeof *rounded);
    free(rounded);
}

static void cuda_to_f32(const td_dev *base, float *dst, const td_act *src, size_t n)
{
    td_bf16 *raw = (td_bf16 *)calloc(n ? n : 1, sizeof *raw);
    td_check(raw);
    cuda_download((td_dev *)base, raw, src, n * sizeof *raw);
    for (size_t i = 0; i < n; i++) dst[i] = td_bf16_f32(raw[i]);
    free(raw);
}

/* ---- graphs ---- */

static td_status cuda_capture_begin(td_dev *base)
{
    td_cuda_dev *dev = td_cuda(base);
    td_cuda_join_all(dev);
    return td_cuda_done(dev, cudaStreamBeginCapture(dev->stream, cudaStreamCaptureModeThreadLocal), "recording");
}

static td_status cuda_capture_end(td_dev *base, td_graph **out, td_error *err)
{
    td_cuda_dev *dev = td_cuda(base);
    td_graph made = { NULL, NULL };
    td_cuda_join_all(dev);
    td_status status = td_cuda_done(dev, cudaStreamEndCapture(dev->stream, &made.graph), "recording");
    if (status == TD_OK) status = td_cuda_done(dev, cudaGraphInstantiate(&made.exec, made.graph, 0), "recording");
    td_graph *graph = (td_graph *)calloc(1, sizeof *graph);
    if (status != TD_OK || !graph) {
        if (made.exec) cudaGraphExecDestroy(made.exec);
        if (made.graph) cudaGraphDestroy(made.graph);
        free(graph);
        return status != TD_OK ? report(dev, err)
                               : td_fail(err, TD_ENOMEM, "GPU %d: no memory for a graph", dev->index);
    }
    *graph = made;
    *out = graph;
    return TD_OK;
}

static td_status cuda_graph_launch(td_dev *base, td_graph *graph)
{
    td_cuda_dev *dev = td_cuda(base);
    td_cuda_join_all(dev);
    return td_cuda_done(dev, cudaGraphLaunch(graph->exec, dev->stream), "launching a graph");
}

static void cuda_graph_destroy(td_dev *base, td_graph *graph)
{
    if (!td_cuda(base)->hung) {
        cudaGraphExecDestroy(graph->exec);
        cudaGraphDestroy(graph->graph);
    }
    free(graph);
}

static const td_dev_calls cuda_calls = {
    cuda_destroy,       cuda_from_f32,    cuda_to_f32,       cuda_alloc,         cuda_free,
    cuda_host_alloc,    cuda_host_free,   cuda_upload,       cuda_download,      cuda_copy,
    cuda_fill,          cuda_sync,        cuda_idle,         cuda_host_register, cuda_host_unregister,
    cuda_capture_begin, cuda_capture_end, cuda_graph_launch, cuda_graph_destroy, td_cuda_fork,
    td_cuda_main,       td_cuda_join
};

/* ---- creation ---- */

static size_t operations_bytes(const td_dev_limits *limits)
{
    size_t needs[] = { td_cuda_hyper_bytes(limits),  td_cuda_router_bytes(limits), td_cuda_select_bytes(limits),
                       td_cuda_attend_bytes(limits), td_cuda_kda_bytes(limits),    td_cuda_experts_bytes(limits),
                       td_cuda_sample_bytes(limits) };
    size_t most = 0;
    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++) most = needs[i] > most ? needs[i] : most;
    return most;
}

size_t td_dev_cuda_pinned_bytes(void)
{
    return TD_PIECES * (size_t)TD_PIECE_BYTES;
}

size_t td_dev_cuda_scratch_bytes(const td_dev_limits *limits)
{
    return td_gpu_granules(td_cuda_product_bytes(limits) + operations_bytes(limits)) +
           td_gpu_granules(td_dev_cuda_pinned_bytes()) + TD_BRANCHES * (size_t)TD_BRANCH_BYTES;
}

/* Loads the kernels, sets what needs setting. */
static td_status load_kernels(td_cuda_dev *dev)
{
    td_status status = td_cuda_done(dev, td_cuda_linear_init(), "linear");
    if (status == TD_OK) status = td_cuda_done(dev, td_cuda_experts_init(), "experts");
    if (status == TD_OK) status = td_cuda_done(dev, td_cuda_attend_init(), "dsa_attend");
    if (status == TD_OK) status = td_cuda_done(dev, td_cuda_select_init(), "dsa_select");
    if (status == TD_OK) status = td_cuda_done(dev, td_cuda_kda_init(), "kda");
    return status;
}

static td_status count_gpus(td_gpu *gpu, td_error *err)
{
    int n = 0;
    cudaError_t error = cudaGetDeviceCount(&n);
    static_assert(
        TD_GPU_NO_MEMORY == (int)cudaErrorMemoryAllocation && TD_GPU_OLD_DRIVER == (int)cudaErrorInsufficientDriver &&
            TD_GPU_UNAVAILABLE == (int)cudaErrorDevicesUnavailable && TD_GPU_NONE == (int)cudaErrorNoDevice &&
            TD_GPU_ECC == (int)cudaErrorECCUncorrectable && TD_GPU_NVLINK == (int)cudaErrorNvlinkUncorrectable &&
            TD_GPU_CONTAINED == (int)cudaErrorContained && TD_GPU_ILLEGAL_ADDRESS == (int)cudaErrorIllegalAddress &&
            TD_GPU_TIMEOUT == (int)cudaErrorLaunchTimeout && TD_GPU_ASSERT == (int)cudaErrorAssert &&
            TD_GPU_STACK == (int)cudaErrorHardwareStackError &&
            TD_GPU_ILLEGAL_INSTRUCTION == (int)cudaErrorIllegalInstruction &&
            TD_GPU_MISALIGNED == (int)cudaErrorMisalignedAddress &&
            TD_GPU_ADDRESS_SPACE == (int)cudaErrorInvalidAddressSpace && TD_GPU_PC == (int)cudaErrorInvalidPc &&
            TD_GPU_LAUNCH_FAILED == (int)cudaErrorLaunchFailure && TD_GPU_NOT_READY == (int)cudaErrorSystemNotReady &&
            TD_GPU_DRIVER_MISMATCH == (int)cudaErrorSystemDriverMismatch && TD_GPU_UNKNOWN == (int)cudaErrorUnknown,
        "numbers of gpu.h");
    cudaDriverGetVersion(&gpu->driver);
    cudaRuntimeGetVersion(&gpu->runtime);
    if (error != cudaSuccess || n < 1) {
        cudaGetLastError();
        return td_gpu_no_use(error, cudaGetErrorString(error), gpu->driver, gpu->runtime, err);
    }
    return gpu->index < 0 || gpu->index >= n ? td_gpu_no_such(gpu->index, n, err) : TD_OK;
}

td_status td_gpu_query(int index, td_gpu *out, td_error *err)
{
    static const int built_for[] = { __CUDA_ARCH_LIST__ }; /* by nvcc: 900, 1210 */
    enum { N_BUILT = sizeof built_for / sizeof *built_for };
    int archs[N_BUILT];
    cudaDeviceProp prop;
    td_gpu gpu = { index };
    td_status status = count_gpus(&gpu, err);
    if (status != TD_OK) return status;
    cudaError_t error = cudaGetDeviceProperties(&prop, index);
    if (error == cudaSuccess) {
        snprintf(gpu.name, sizeof gpu.name, "%.63s", prop.name);
        gpu.capability = 10 * prop.major + prop.minor;
        gpu.integrated = prop.integrated;
        gpu.n_sm = prop.multiProcessorCount;
        gpu.l2_bytes = (size_t)prop.l2CacheSize;
        for (int i = 0; i < N_BUILT; i++) archs[i] = built_for[i] / 10;
        if (!td_gpu_runs(archs, N_BUILT, gpu.capability)) return td_gpu_no_code(&gpu, archs, N_BUILT, err);
        error = cudaSetDevice(index);
    }
    if (error == cudaSuccess) error = cudaFree(0); /* makes the context: what is wrong with the GPU shows here */
    if (error == cudaSuccess) error = cudaMemGetInfo(&gpu.free_bytes, &gpu.total_bytes);
    if (error != cudaSuccess) {
        cudaGetLastError();
        return td_gpu_no_start(index, error, cudaGetErrorString(error), err);
    }
    *out = gpu;
    return TD_OK;
}

static td_status set_up(td_cuda_dev *dev, td_error *err)
{
    dev->product_bytes = td_cuda_product_bytes(&dev->limits);
    dev->scratch_bytes = dev->product_bytes + operations_bytes(&dev->limits);
    td_status status = td_cuda_done(dev, cudaStreamCreateWithFlags(&dev->stream, cudaStreamNonBlocking), "a stream");
    if (status == TD_OK) status = td_cuda_branches_create(dev);
    if (status == TD_OK) status = load_kernels(dev);
    if (status != TD_OK) return report(dev, err);
    void *memory = NULL;
    status = cuda_alloc(&dev->base, dev->scratch_bytes, &memory, err);
    dev->scratch = (unsigned char *)memory;
    if (status != TD_OK) return td_error_prefix(err, "scratch for windows of %d rows", dev->limits.rows);
    status = cuda_fill(&dev->base, td_cuda_counters(dev), 0, TD_COUNTERS_ALL * sizeof(uint32_t));
    if (status != TD_OK) return report(dev, err);
    status = td_cuda_experts_check(dev, err);
    if (status != TD_OK) return status == TD_ECUDA ? report(dev, err) : status;
    return td_cuda_pieces_create(dev, err);
}

td_status td_dev_create_cuda(const td_dev_limits *limits, int index, td_dev **out, td_error *err)
{
    td_gpu gpu;
    if (limits->rows < 1 || limits->dim < 16 || limits->dim % 16 || limits->n_heads < 0 || limits->n_experts < 0 ||
        limits->top_k < 0 || limits->expert_width < 0 || limits->index_heads < 0 || limits->context_tokens < 0)
        return td_fail(err, TD_EINVAL, "GPU %d: rows %d, dim %d, heads %d: out of range", index, limits->rows,
                       limits->dim, limits->n_heads);
    td_status status = td_gpu_query(index, &gpu, err);
    if (status != TD_OK) return status;
    td_cuda_dev *dev = (td_cuda_dev *)calloc(1, sizeof *dev);
    if (!dev) return td_fail(err, TD_ENOMEM, "GPU %d: out of memory", index);
    dev->base.backend = TD_CUDA;
    dev->base.calls = &cuda_calls;
    dev->limits = *limits;
    dev->index = index;
    dev->n_sm = gpu.n_sm;
    dev->l2_bytes = gpu.l2_bytes;
    dev->patience_ns = limits->patience_ns ? limits->patience_ns : TD_DEV_PATIENCE_NS;
    status = set_up(dev, err);
    if (status != TD_OK) {
        cuda_destroy(&dev->base);
        return status;
    }
    *out = &dev->base;
    return TD_OK;
}
