/* Copying out of a checkpoint that is mapped: what a GPU waits for while it loads. */
#ifndef TD_OPS_HOST_COPY_H
#define TD_OPS_HOST_COPY_H

#include "base/status.h"

TD_BEGIN_C

/* n_rows rows of row_bytes, from_stride bytes apart, to `to` without gaps. */
void td_host_copy_rows(void *to, const void *from, size_t from_stride, size_t row_bytes, size_t n_rows);

TD_END_C
#endif
