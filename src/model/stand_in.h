/* What is loaded where a checkpoint has shapes and no data (checkpoint/shapes.h): parts of its pool of values for
 * matrices, numbers of plausible size for everything small. Activations then stay as large as a trained model's: norms
 * have weight 1, decays are mild, routing keys differ by what the row says. */
#ifndef TD_MODEL_STAND_IN_H
#define TD_MODEL_STAND_IN_H

#include "checkpoint/exl3.h"
#include "checkpoint/shapes.h"

TD_BEGIN_C

typedef struct td_stand_in {
    const td_values *values; /* NULL: the checkpoint has its data */
    uint64_t n_drawn;        /* every part that is taken starts somewhere else */
} td_stand_in;

/* n values of a matrix; NULL: the pool has fewer. At most td_stand_in_most() are asked for at once. */
const td_bf16 *td_stand_in_weights(td_stand_in *s, size_t n);
size_t td_stand_in_most(const td_stand_in *s);

/* A whole expert's matrix; TD_EINVAL: the pool is too small for it. */
td_status td_stand_in_exl3(td_stand_in *s, td_exl3 *whole);

/* n numbers of the small tensor `name`. */
void td_stand_in_floats(td_stand_in *s, const char *name, size_t n, float *out);

TD_END_C
#endif
