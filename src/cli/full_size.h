/* Sizes of models that need no files: GLM-5.3-Flash itself, and a small one of the same pattern for machines without a
 * GPU and for tests. */
#ifndef TD_CLI_FULL_SIZE_H
#define TD_CLI_FULL_SIZE_H

#include "checkpoint/config.h"

TD_BEGIN_C

typedef enum td_full_shape { TD_SHAPE_REAL, TD_SHAPE_SMALL } td_full_shape;

enum { TD_FULL_EXPERT_BITS = 4 };

/* The config, read by the reader that reads a checkpoint's. n_layers: how many of its layers, in their order (more than
 * it has go on in its pattern); 0: all. Neither MTP layer nor vision tower. TD_EINVAL: n_layers. */
td_status td_full_config(td_full_shape shape, int n_layers, td_config *out, td_error *err);

TD_END_C
#endif
