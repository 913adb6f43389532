/* Words of a stream in which every state of the codebook occurs, at its fourth and its eighth nibble, and what decodes
 * them on a GPU: experts_states.cu. */
#ifndef TD_TESTS_OPCHECK_EXPERTS_STATES_H
#define TD_TESTS_OPCHECK_EXPERTS_STATES_H

#include "base/num.h"
#include "base/status.h"

enum { OC_STATE_WORDS = 1 << 16 };

TD_HD static inline uint32_t oc_state_word(uint32_t i)
{
    return i | i * 0x9e3779b1u << 16;
}

TD_HD static inline uint32_t oc_state_before(uint32_t i)
{
    return i * 0x85ebca6bu;
}

TD_BEGIN_C
/* values[OC_STATE_WORDS][4]: the registers of lane i % 32 of warp i / 32. False: why. */
bool oc_gpu_states(uint32_t *values, const char **why);
TD_END_C

#endif
