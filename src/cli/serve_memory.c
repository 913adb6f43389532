/* See serve_memory.h. Where host and GPU share one memory, what is free is what Linux could free (MemAvailable): the
 * driver's own number leaves out the page cache, which holds the checkpoint that is about to be read. */
#include "cli/serve_memory.h"

#include "engine/engine.h"

#include <stdio.h>
#include <string.h>

enum { LINK_BYTES_SLACK = 4 << 20, AUTO_WINDOW_STEP = 32768 };

bool td_serve_one_memory(const td_serve_shape *shape)
{
    return shape->backend == TD_CPU || shape->gpu.integrated;
}

td_status td_serve_need_of(const td_serve_shape *shape, const td_checkpoint *checkpoint, td_serve_need *out,
                           td_error *err)
{
    td_ops ops;
    td_dev_limits limits;
    td_serve_need need = { 0 };
    td_model_dev_limits(td_checkpoint_config(checkpoint), &shape->model, &limits);
    td_dev *dev = td_dev_create_sizes(shape->backend, shape->exact_fp32);
    if (!dev) return td_fail(err, TD_ENOMEM, "plan: out of memory");
    td_ops_init(&ops, dev);
    td_status status = td_model_plan_bytes(dev, &ops, checkpoint, &shape->model, &need.plan, err);
    td_dev_destroy(dev);
    if (status) return status;
    const td_config *config = td_checkpoint_config(checkpoint);
    td_engine_options engine = { .n_slots = shape->model.n_slots,
                                 .context_tokens = shape->context_tokens,
                                 .n_blocks = shape->model.n_blocks };
    size_t engine_region, engine_gather;
    td_engine_link_bytes(config, &engine_region, &engine_gather);
    need.memory.host_bytes =
        need.plan.link_region_bytes + engine_region + td_engine_bytes(config, &engine) + LINK_BYTES_SLACK;
    if (shape->backend == TD_CUDA) {
        need.scratch_bytes = td_dev_cuda_scratch_bytes(&limits);
        need.memory.device_bytes = td_gpu_granules(need.plan.total_bytes - need.plan.shared_bytes) + need.scratch_bytes;
        need.memory.host_bytes += need.plan.shared_bytes + td_dev_cuda_pinned_bytes();
    } else {
        need.scratch_bytes = td_dev_scratch_bytes(&limits, shape->exact_fp32, shape->n_threads);
        need.memory.host_bytes += need.plan.total_bytes + need.scratch_bytes;
    }
    *out = need;
    return TD_OK;
}

static size_t share(size_t free_bytes, size_t reserve_bytes, bool halved)
{
    size_t rest = free_bytes > reserve_bytes ? free_bytes - reserve_bytes : 0;
    return halved ? rest / 2 : rest;
}

td_serve_memory td_serve_available(const td_serve_shape *shape, const td_settings *settings)
{
    td_serve_memory available = { .host_bytes = td_mem_available_bytes() };
    if (!td_serve_one_memory(shape)) available.device_bytes = shape->gpu.free_bytes;
    bool both_here = shape->model.world > 1 && strncmp(td_settings_text(settings, "master"), "127.", 4) == 0;
    available.device_bytes = share(available.device_bytes, shape->reserve_bytes, both_here && shape->gpu_is_shared);
    available.host_bytes = share(available.host_bytes, shape->reserve_bytes, both_here);
    return available;
}

bool td_serve_fits(const td_serve_shape *shape, const td_serve_memory *need, const td_serve_memory *available)
{
    if (td_serve_one_memory(shape)) return need->device_bytes + need->host_bytes <= available->host_bytes;
    return need->device_bytes <= available->device_bytes && need->host_bytes <= available->host_bytes;
}

td_status td_serve_largest(const td_serve_shape *shape, const td_checkpoint *checkpoint,
                           const td_serve_memory *available, int32_t *context_tokens, td_error *err)
{
    int32_t low = 0, high = shape->context_tokens / TD_BLOCK; /* low fits, in blocks; 0 stands for nothing */
    while (low < high) {
        td_serve_shape tried = *shape;
        td_serve_need need;
        int32_t middle = low + (high - low + 1) / 2;
        tried.context_tokens = middle * TD_BLOCK;
        tried.model.context_tokens = tried.context_tokens;
        tried.model.n_blocks = middle;
        td_status status = td_serve_need_of(&tried, checkpoint, &need, err);
        if (status) return status;
        if (td_serve_fits(&tried, &need.memory, available))
            low = middle;
        else
            high = middle - 1;
    }
    *context_tokens = low * TD_BLOCK;
    return TD_OK;
}

td_status td_serve_fit_shape(td_serve_shape *shape, const td_settings *settings, const td_checkpoint *checkpoint,
                             td_serve_fit *out, td_error *err)
{
    td_serve_fit fit = { .available = td_serve_available(shape, settings),
                         .host_free_bytes = td_mem_available_bytes(),
                         .largest = shape->context_tokens };
    td_status status = td_serve_need_of(shape, checkpoint, &fit.need, err);
    if (!status && !td_serve_fits(shape, &fit.need.memory, &fit.available)) {
        status = td_serve_largest(shape, checkpoint, &fit.available, &fit.largest, err);
        if (!status && fit.largest >= TD_BLOCK && td_settings_int(settings, "context") == 0) {
            int32_t window = fit.largest;
            if (window > AUTO_WINDOW_STEP) window -= window % AUTO_WINDOW_STEP; /* ranks a moment apart agree */
            td_serve_set_context(shape, settings, window);
            status = td_serve_need_of(shape, checkpoint, &fit.need, err);
        }
    }
    if (status) return status;
    /* not after shrinking either: a pool that was asked for */
    fit.fits = td_serve_fits(shape, &fit.need.memory, &fit.available);
    *out = fit;
    return TD_OK;
}

td_status td_serve_refit(td_serve_shape *shape, const td_settings *settings, const td_checkpoint *checkpoint,
                         const td_serve_memory *tried, int32_t *context_tokens, td_error *err)
{
    td_gpu gpu;
    if (shape->backend == TD_CUDA && td_gpu_query(shape->gpu.index, &gpu, NULL) == TD_OK) shape->gpu = gpu;
    td_serve_memory available = td_serve_available(shape, settings);
    if (td_serve_fits(shape, tried, &available)) { /* free in pieces, taken for a moment, or a limit of the process */
        size_t all = tried->device_bytes + tried->host_bytes;
        if (td_serve_one_memory(shape))
            available.host_bytes = all - all / 8;
        else
            available.device_bytes = tried->device_bytes - tried->device_bytes / 8;
    }
    return td_serve_largest(shape, checkpoint, &available, context_tokens, err);
}

size_t td_mem_available_bytes(void)
{
    size_t kib = SIZE_MAX / 1024;
    char line[256];
    FILE *file = fopen("/proc/meminfo", "r");
    if (!file) return SIZE_MAX;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %zu kB", &kib) == 1) break;
    fclose(file);
    return kib * 1024;
}
