/* EXL3: a weight matrix W[k][n] (inputs x outputs) kept as a trellis-coded matrix q between two rotations:
 *
 *   W = diag(suh) * Hn * q * Hn * diag(svh)         Hn: blocks of the 128-point Hadamard matrix / sqrt(128),
 * checkpoint/hadamard.h
 *
 * so y = x W is three cheap steps around a product with q: rotate x * suh, multiply, rotate back and scale by svh.
 * q is cut into 16 x 16 tiles; a tile is 256 * bits bits, a circular stream in which the 16 bits that end at value p's
 * own bits are its state, and a codebook maps a state to an fp16 value. Format, order and codebooks: docs/exl3.md.
 *
 * This file reads and cuts; exl3_quantize.h makes. Every function here is pure: no state, any thread. */
#ifndef TD_CHECKPOINT_EXL3_H
#define TD_CHECKPOINT_EXL3_H

#include "base/num.h"
#include "base/status.h"

TD_BEGIN_C

#define TD_EXL3_BLOCK       128 /* one Hadamard block: k, n and every cut are multiples of it */
#define TD_EXL3_TILE        16  /* rows and columns of a tile */
#define TD_EXL3_TILE_VALUES 256
#define TD_EXL3_STATES      65536       /* entries of a codebook */
#define TD_EXL3_MCG_MARK    0xCBAC1FEDu /* what the tensor "mcg" holds: the multiplier */
#define TD_EXL3_MUL1_MARK   0x83DCD12Du /* what the tensor "mul1" holds */

typedef enum td_exl3_codebook { TD_EXL3_3INST, TD_EXL3_MCG, TD_EXL3_MUL1 } td_exl3_codebook;

/* View of one packed matrix; owns nothing. Pointers are 2-byte aligned, little endian, borrowed. */
typedef struct td_exl3 {
    int k;     /* inputs, multiple of 128 */
    int n;     /* outputs, multiple of 128 */
    int bits2; /* width in half bits: last dimension of the trellis / 8. 2, 4, .. 16, or 3, 5, 7 (1.5, 2.5, 3.5 bits) */
    td_exl3_codebook codebook;
    const uint16_t *trellis; /* [k/16][n/16][8 * bits2] */
    const td_f16 *suh;       /* [k] input sign and scale */
    const td_f16 *svh;       /* [n] output sign and scale; 0 is a dead output */
} td_exl3;

/* TD_OK, or TD_EFORMAT with the field and what is allowed. All other functions take views that pass. */
td_status td_exl3_check(const td_exl3 *w, td_error *err);

/* Bytes of the trellis, and of trellis + suh + svh (what td_exl3_slice needs). k, n multiples of 16; 0 on overflow. */
size_t td_exl3_trellis_bytes(int k, int n, int bits2);
size_t td_exl3_bytes(int k, int n, int bits2);

/* "3inst", "mcg", "mul1"; and back (TD_EINVAL: the text lists the names). */
const char *td_exl3_codebook_name(td_exl3_codebook codebook);
td_status td_exl3_codebook_parse(const char *name, td_exl3_codebook *out, td_error *err);

/* The fp16 value of a state, as float (exact); and all 65,536 of them. */
float td_exl3_value(td_exl3_codebook codebook, uint16_t state);
void td_exl3_codebook_f32(td_exl3_codebook codebook, float table[TD_EXL3_STATES]);

/* Values of tile (kt, nt): rows 16 kt.. of inputs, columns 16 nt.. of outputs, out[k][n]. Exactly the fp16 values of q.
 */
void td_exl3_tile_f32(const td_exl3 *w, int kt, int nt, float out[TD_EXL3_TILE_VALUES]);

/* Rows k0 .. k1-1 (multiples of 16) of the 16 columns of tile column nt: out[k1 - k0][16]. The hot path of a CPU
 * product: 4-bit mcg runs in SIMD registers, everything else through unpacked states. out: any float alignment. */
void td_exl3_panel_f32(const td_exl3 *w, int nt, int k0, int k1, float *out);

/* W itself, out[k][n]: the exact product, rounded once to fp32. Slow (double, whole blocks); for tests and tools.
 * TD_ENOMEM when the scratch of two blocks is not to be had. */
td_status td_exl3_restore(const td_exl3 *w, float *out, td_error *err);

/* Cuts inputs k0..k1-1 and outputs n0..n1-1 out of w for one rank: copies into buffer (2-byte aligned,
 * td_exl3_bytes(k1 - k0, n1 - n0, bits2) bytes: trellis, suh, svh) and makes *out a view of it. Boundaries are
 * multiples of 128: a cut inside a block would split a rotation. Summed over input slices (joined over output slices)
 * the products are W's. TD_EINVAL names the boundary; nothing is written then. */
td_status td_exl3_slice(const td_exl3 *w, int k0, int k1, int n0, int n1, void *buffer, td_exl3 *out, td_error *err);

/* One tile's stream and its 256 states, in stream order. Pack writes the own bits of every state (8 * bits2 words); the
 * states must overlap as the format says (td_exl3_unpack_tile of the result gives them back). */
void td_exl3_pack_tile(const uint16_t state[TD_EXL3_TILE_VALUES], int bits2, uint16_t *tile);
void td_exl3_unpack_tile(const uint16_t *tile, int bits2, uint16_t state[TD_EXL3_TILE_VALUES]);

/* Where value p of the stream sits in its tile, as 16 * row + column: the operand order of the m16n8k16 tensor-core
 * step. */
static inline int td_exl3_tile_index(int p)
{
    int lane = p >> 3, j = p & 7;
    int row = 2 * (lane & 3) + (j & 1) + 8 * (j >> 1 & 1), column = (lane >> 2) + 8 * (j >> 2);
    return 16 * row + column;
}

/* Bits of the stream that end with value p's own, and how many of them are its own: in a half width even values own
 * (bits2 - 1) / 2 bits and odd ones a bit more. */
static inline int td_exl3_end_bit(int p, int bits2)
{
    return bits2 % 2 ? ((p + 1) * bits2 - (p + 1) % 2) / 2 : (p + 1) * (bits2 / 2);
}

static inline int td_exl3_own_bits(int p, int bits2)
{
    return (bits2 + (p & 1)) / 2;
}

TD_END_C
#endif
