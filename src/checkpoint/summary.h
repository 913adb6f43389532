/* What a checkpoint consists of, in bytes as stored: by group, by layer kind, by rank. For `tandem info` and as the
 * loader's self-test (docs/checkpoint.md "Byte accounting"). */
#ifndef TD_CHECKPOINT_SUMMARY_H
#define TD_CHECKPOINT_SUMMARY_H

#include "checkpoint/slices.h"

TD_BEGIN_C

typedef struct td_summary_cell {
    int64_t n_tensors;
    uint64_t n_bytes;
    uint64_t rank_bytes[TD_SHARDS]; /* what rank r of TD_SHARDS reads of it; the vision tower belongs to rank 0 */
} td_summary_cell;

typedef struct td_summary {
    td_summary_cell trunk[TD_GROUP_COUNT]; /* everything but the MTP layer */
    td_summary_cell mtp;                   /* the MTP layer whole, its experts included */
    td_summary_cell mtp_experts;           /* ... of which routed experts */
    td_summary_cell unused;                /* in the files, not read; no rank bytes */
    td_summary_cell total;
    int bits_least, bits_most; /* widths of EXL3 experts; 0, 0: none */
} td_summary;

const char *td_group_name(td_group group); /* "routed experts" */

/* Counts what is there; missing tensors count nothing. The checkpoint must have a config. */
void td_summary_make(const td_checkpoint *ck, td_summary *out);

TD_END_C
#endif
