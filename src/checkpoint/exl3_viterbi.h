/* The search for a tile's states: of all circular streams of 256 * bits bits, one whose values are (nearly) closest to
 * 256 targets. Two passes of the Viterbi algorithm, see exl3_viterbi.c and docs/exl3.md "Search". */
#ifndef TD_CHECKPOINT_EXL3_VITERBI_H
#define TD_CHECKPOINT_EXL3_VITERBI_H

#include "checkpoint/exl3.h"

TD_BEGIN_C

/* The tables of one codebook and width: read-only, shared by threads. */
typedef struct td_exl3_viterbi td_exl3_viterbi;

td_status td_exl3_viterbi_create(td_exl3_codebook codebook, int bits2, td_exl3_viterbi **out, td_error *err);
void td_exl3_viterbi_destroy(td_exl3_viterbi *v); /* NULL is allowed */

/* Bytes of scratch for one call of td_exl3_viterbi_pair; each thread needs its own, 64-byte aligned. 8 MiB at 4 bits,
 * 64 MiB at 1 bit. */
size_t td_exl3_viterbi_scratch_bytes(const td_exl3_viterbi *v);

/* Two tiles at once, because they share the reads of the table; neither result depends on the other. targets are in the
 * order of the stream (td_exl3_tile_index); state is what td_exl3_pack_tile takes. Equal costs: the lower state wins,
 * so the result is a function of the targets alone, on every machine. */
void td_exl3_viterbi_pair(const td_exl3_viterbi *v, const float targets[2][TD_EXL3_TILE_VALUES],
                          uint16_t state[2][TD_EXL3_TILE_VALUES], void *scratch);

TD_END_C
#endif
