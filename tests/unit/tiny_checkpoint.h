/* Small checkpoints with every tensor of the format and weights that depend on their names alone, written where a test
 * says. Sizes are odd on purpose: widths and vocabulary are cut into unequal shards, pools are few. */
#ifndef TD_TESTS_TINY_CHECKPOINT_H
#define TD_TESTS_TINY_CHECKPOINT_H

#include "base/status.h"

TD_BEGIN_C

typedef enum td_tiny_kind {
    TD_TINY_PLAIN, /* 5 layers: KDA KDA KDA DSA KDA; 6 experts, 3 chosen; BF16 */
    TD_TINY_EXL3   /* 4 layers; 5 experts of width 256 in EXL3, 2 chosen, of 4, 3 and 5 bits */
} td_tiny_kind;

/* Writes config.json and the tensors into dir, which exists. */
td_status td_tiny_write(td_tiny_kind kind, const char *dir, td_error *err);

/* The same for a config.json of the caller's. */
td_status td_tiny_write_config(const char *json, const char *dir, td_error *err);

/* A fresh folder under the system's place for temporary files, with such a checkpoint in it; remove it with
 * td_tiny_remove. */
td_status td_tiny_create(td_tiny_kind kind, char dir[256], td_error *err);
void td_tiny_remove(const char *dir);

TD_END_C
#endif
