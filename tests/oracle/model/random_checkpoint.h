/* The two random checkpoints of the model vectors. Their weights are a function of tensor name and element, the same as
 * in make.py, so that they need not be stored: written anew for each test run. */
#ifndef TD_TESTS_RANDOM_CHECKPOINT_H
#define TD_TESTS_RANDOM_CHECKPOINT_H

#include "base/status.h"

/* name: "small" or "nine". Writes config.json and the safetensors files into dir (which exists). sha256: of all tensor
 * bytes in order of their names, as lowercase hex, for comparison with manifest.json. */
td_status td_random_checkpoint_write(const char *name, const char *dir, char sha256[65], td_error *err);

#endif
