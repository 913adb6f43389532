/* What every kind of device has in common: the head of its struct. A backend embeds it first and adds what it needs. */
#ifndef TD_OPS_DEV_IMPL_H
#define TD_OPS_DEV_IMPL_H

#include "ops/dev.h"

TD_BEGIN_C

struct td_dev {
    td_backend backend;
    bool exact_fp32;
    void (*destroy)(td_dev *dev);
    void (*act_from_f32)(const td_dev *dev, td_act *dst, const float *src, size_t n);
    void (*act_to_f32)(const td_dev *dev, float *dst, const td_act *src, size_t n);
};

TD_END_C
#endif
