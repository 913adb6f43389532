/* A device's memory, graphs and branches: every call goes to the backend's table (ops/dev_impl.h). */
#include "ops/dev_impl.h"
#include "ops/gpu.h"

#include <stdlib.h>

td_status td_dev_alloc(td_dev *dev, size_t n_bytes, void **out, td_error *err)
{
    return dev->calls->alloc(dev, n_bytes, out, err);
}

void td_dev_free(td_dev *dev, void *memory, size_t n_bytes)
{
    dev->calls->free(dev, memory, n_bytes);
}

td_status td_dev_host_alloc(td_dev *dev, size_t n_bytes, void **out, td_error *err)
{
    return dev->calls->host_alloc(dev, n_bytes, out, err);
}

void td_dev_host_free(td_dev *dev, void *memory, size_t n_bytes)
{
    dev->calls->host_free(dev, memory, n_bytes);
}

td_status td_dev_upload(td_dev *dev, void *dst, const void *src, size_t n_bytes)
{
    return n_bytes ? dev->calls->upload(dev, dst, src, n_bytes) : TD_OK;
}

td_status td_dev_download(td_dev *dev, void *dst, const void *src, size_t n_bytes)
{
    return n_bytes ? dev->calls->download(dev, dst, src, n_bytes) : TD_OK;
}

td_status td_dev_copy(td_dev *dev, void *dst, const void *src, size_t n_bytes)
{
    return n_bytes ? dev->calls->copy(dev, dst, src, n_bytes) : TD_OK;
}

td_status td_dev_fill(td_dev *dev, void *dst, int byte, size_t n_bytes)
{
    return n_bytes ? dev->calls->fill(dev, dst, byte, n_bytes) : TD_OK;
}

td_status td_dev_sync(td_dev *dev, td_error *err)
{
    return dev->calls->sync(dev, err);
}

td_status td_dev_idle(td_dev *dev, bool *idle, td_error *err)
{
    return dev->calls->idle(dev, idle, err);
}

td_status td_dev_host_register(td_dev *dev, void *memory, size_t n_bytes, td_error *err)
{
    return dev->calls->host_register(dev, memory, n_bytes, err);
}

void td_dev_host_unregister(td_dev *dev, void *memory)
{
    if (memory) dev->calls->host_unregister(dev, memory);
}

td_status td_dev_capture_begin(td_dev *dev)
{
    return dev->calls->capture_begin(dev);
}

td_status td_dev_capture_end(td_dev *dev, td_graph **out, td_error *err)
{
    return dev->calls->capture_end(dev, out, err);
}

td_status td_dev_graph_launch(td_dev *dev, td_graph *graph)
{
    return dev->calls->graph_launch(dev, graph);
}

void td_dev_graph_destroy(td_dev *dev, td_graph *graph)
{
    if (graph) dev->calls->graph_destroy(dev, graph);
}

td_status td_dev_fork(td_dev *dev)
{
    return dev->calls->fork ? dev->calls->fork(dev) : TD_OK;
}

td_status td_dev_main(td_dev *dev)
{
    return dev->calls->main ? dev->calls->main(dev) : TD_OK;
}

td_status td_dev_join(td_dev *dev)
{
    return dev->calls->join ? dev->calls->join(dev) : TD_OK;
}

static void sizes_destroy(td_dev *dev)
{
    free(dev);
}

td_dev *td_dev_create_sizes(td_backend backend, bool exact_fp32)
{
    static const td_dev_calls calls = { .destroy = sizes_destroy };
    td_dev *dev = (td_dev *)calloc(1, sizeof *dev);
    if (dev) *dev = (td_dev){ .backend = backend, .exact_fp32 = exact_fp32, .calls = &calls };
    return dev;
}

#ifndef TD_WITH_CUDA
td_status td_gpu_query(int index, td_gpu *out, td_error *err)
{
    (void)index;
    (void)out;
    return td_fail(err, TD_EUNSUPPORTED, "this build has no CUDA operations (-DTD_CUDA=ON makes one that has)");
}

td_status td_dev_create_cuda(const td_dev_limits *limits, int index, td_dev **out, td_error *err)
{
    (void)limits;
    (void)out;
    return td_fail(err, TD_EUNSUPPORTED,
                   "CUDA device %d: this build has no CUDA operations (configure with -DTD_CUDA=ON)", index);
}

size_t td_dev_cuda_scratch_bytes(const td_dev_limits *limits)
{
    (void)limits;
    return 0;
}

size_t td_dev_cuda_pinned_bytes(void)
{
    return 0;
}
#endif
