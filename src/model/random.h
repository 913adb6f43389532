/* Contexts without prompts: pool rows and recurrent states as a long text could have left them. Only measurements use
 * this. */
#ifndef TD_MODEL_RANDOM_H
#define TD_MODEL_RANDOM_H

#include "model/model.h"

TD_BEGIN_C

/* Fills every row of the pool, all planes. */
td_status td_model_random_pool(td_model *model, uint64_t seed);

/* Makes the slot one that has committed pos rows: its states and its index ring. Its block table is the caller's. */
td_status td_model_random_slot(td_model *model, int slot, int32_t pos, uint64_t seed);

TD_END_C
#endif
