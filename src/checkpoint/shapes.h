/* A checkpoint of shapes: every tensor that a config demands, with its name, shape and dtype and without its data. A
 * model of full size can be planned, laid out and measured with it on a machine that has no checkpoint. What stands in
 * for the data is one pool of values that all tensors share (td_values); loading takes each tensor's part from another
 * place of it, so that no two matrices are alike. */
#ifndef TD_CHECKPOINT_SHAPES_H
#define TD_CHECKPOINT_SHAPES_H

#include "base/arena.h"
#include "checkpoint/checkpoint.h"

TD_BEGIN_C

/* Values instead of data, in memory of the device that is loaded; borrowed. */
typedef struct td_values {
    const td_bf16 *weights;               /* [n_weights] of matrices: bell-shaped, deviation about 0.02 */
    const uint16_t *words;                /* [n_words] of trellises: any bits */
    const td_f16 *in_scales, *out_scales; /* [n_scales] of EXL3: signs of size 1 and of the weights' size */
    size_t n_weights, n_words, n_scales;
} td_values;

/* Names as in a folder, bits: width of the experts' EXL3 (1 to 8), 0: plain BF16 experts. values NULL: for plans alone.
 * TD_EINVAL: bits; TD_ENOMEM. */
td_status td_checkpoint_create_shapes(const td_config *config, int bits, const td_values *values, td_checkpoint **out,
                                      td_error *err);

/* NULL for a checkpoint that has its data. */
const td_values *td_checkpoint_values(const td_checkpoint *ck);

/* The least values that the tensors of config need, for a pool that repeats itself as little as memory allows. */
void td_values_least(const td_config *config, int bits, td_values *least);

/* checkpoint.c: a checkpoint of these tensors, whose names are in arena. arena is taken over, also on failure. */
td_status td_checkpoint_of_list(const char *name, const td_config *config, td_arena *arena, const td_tensor_list *list,
                                const td_values *values, td_checkpoint **out, td_error *err);

TD_END_C
#endif
