/* What every kind of device has in common: the head of its struct. A backend embeds it first and adds what it needs. */
#ifndef TD_OPS_DEV_IMPL_H
#define TD_OPS_DEV_IMPL_H

#include "ops/dev.h"

TD_BEGIN_C

/* The functions of dev.h "Memory", "Graphs" and "Side by side", which say what each does. */
typedef struct td_dev_calls {
    void (*destroy)(td_dev *dev);
    void (*act_from_f32)(const td_dev *dev, td_act *dst, const float *src, size_t n);
    void (*act_to_f32)(const td_dev *dev, float *dst, const td_act *src, size_t n);
    td_status (*alloc)(td_dev *dev, size_t n_bytes, void **out, td_error *err);
    void (*free)(td_dev *dev, void *memory, size_t n_bytes);
    td_status (*host_alloc)(td_dev *dev, size_t n_bytes, void **out, td_error *err);
    void (*host_free)(td_dev *dev, void *memory, size_t n_bytes);
    td_status (*upload)(td_dev *dev, void *dst, const void *src, size_t n_bytes);
    td_status (*download)(td_dev *dev, void *dst, const void *src, size_t n_bytes);
    td_status (*copy)(td_dev *dev, void *dst, const void *src, size_t n_bytes);
    td_status (*fill)(td_dev *dev, void *dst, int byte, size_t n_bytes);
    td_status (*sync)(td_dev *dev, td_error *err);
    td_status (*idle)(td_dev *dev, bool *idle, td_error *err);
    td_status (*host_register)(td_dev *dev, void *memory, size_t n_bytes, td_error *err);
    void (*host_unregister)(td_dev *dev, void *memory);
    td_status (*capture_begin)(td_dev *dev);
    td_status (*capture_end)(td_dev *dev, td_graph **out, td_error *err);
    td_status (*graph_launch)(td_dev *dev, td_graph *graph);
    void (*graph_destroy)(td_dev *dev, td_graph *graph);
    td_status (*fork)(td_dev *dev); /* these may be NULL: operations run in the order of the calls */
    td_status (*main)(td_dev *dev);
    td_status (*join)(td_dev *dev);
} td_dev_calls;

struct td_dev {
    td_backend backend;
    bool exact_fp32;
    const td_dev_calls *calls;
};

TD_END_C
#endif
