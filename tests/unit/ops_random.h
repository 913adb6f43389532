/* Random numbers of the operation tests: the same on every machine. */
#ifndef TD_TESTS_OPS_RANDOM_H
#define TD_TESTS_OPS_RANDOM_H

#include <stdint.h>

/* xorshift64*; *seed is not 0 */
static inline uint64_t op_next(uint64_t *seed)
{
    *seed ^= *seed >> 12;
    *seed ^= *seed << 25;
    *seed ^= *seed >> 27;
    return *seed * 0x2545f4914f6cdd1du;
}

/* (-1, 1), 24 bits */
static inline float op_uniform(uint64_t *seed)
{
    return (float)((int64_t)(op_next(seed) >> 40) - (1 << 23)) * 0x1p-23f;
}

#endif
