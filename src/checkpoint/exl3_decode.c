/* EXL3 decoding: stream -> states -> fp16 values, as float.
 *
 * Everything is written with vector extensions and without a half-precision instruction, so x86-64 and arm64 run the
 * same additions and give the same bits; the only rounding is round_half() below, checked over all 65,536 states of
 * every codebook. An fp16 sum of two halves h is exact in fp32 (each is a multiple of 2^-13 below 2), and rounding it
 * to 11 significant bits to nearest even is all that the fp16 addition does; likewise the fused multiply-add of mul1
 * (21 bits before rounding).
 *
 * 4-bit mcg, the released format, has its own path: the 32 words of a tile are transposed once into four vectors over
 * the columns, then every step of every row is a vector operation and rows come out in order. Measured on one Zen 3
 * core at 2.45 GHz (`unit_exl3 --speed`, panels of 4,096 rows in L2): see docs/exl3.md. */
#include "checkpoint/exl3.h"

#include <string.h>

typedef float f8 __attribute__((vector_size(32)));
typedef uint32_t u8x __attribute__((vector_size(32)));
typedef int32_t i8x __attribute__((vector_size(32)));

#define HALVES_KEEP 0x8FFF8FFFu /* of the product: sign, low exponent bits, mantissa of two halves */
#define HALVES_FLIP 0x3B603B60u
#define FLOAT_KEEP                                                                                                     \
    0x81FFE000u /* the same mask and flip for one half widened to fp32 (shifted right by 3, exponent + 112) */
#define FLOAT_FLIP   0x3F6C0000u
#define INST3_FACTOR 89226354u
#define INST3_ADDEND 64248484u

/* x (not infinite, no subnormal half) to 11 significant bits, to nearest even: d is x << 13 in value, c = RN(x + d)
 * lies on the grid of x's half-precision neighbours because d's last bit does, and c - d is exact. Ties follow c's
 * parity, which is x's as d counts an even number of grid steps. */
static inline f8 round_half(f8 x)
{
    f8 d = x * 8192.0f, c = x * 8193.0f;
    return c - d;
}

/* product of a 3inst or mcg state -> value */
static inline f8 halves_value(u8x product)
{
    u8x high = ((u8x)((i8x)product >> 3) & FLOAT_KEEP) ^ FLOAT_FLIP;
    u8x low = ((u8x)((i8x)(product << 16) >> 3) & FLOAT_KEEP) ^ FLOAT_FLIP;
    return round_half((f8)high + (f8)low);
}

/* product of a mul1 state -> value: (1024 + sum of its bytes) * 887/2^17 - 1329/2^7, one rounding */
static inline f8 bytes_value(u8x product)
{
    u8x pairs = (product & 0x00FF00FFu) + (product >> 8 & 0x00FF00FFu);
    u8x sum = (pairs + (pairs >> 16)) & 0x7FFu;
    f8 t = __builtin_convertvector((i8x)sum, f8) + 1024.0f;
    return round_half(t * (887.0f / 131072.0f) - 1329.0f / 128.0f);
}

static inline f8 state_value(td_exl3_codebook codebook, u8x state)
{
    switch (codebook) {
    case TD_EXL3_3INST: return halves_value(state * INST3_FACTOR + INST3_ADDEND);
    case TD_EXL3_MCG: return halves_value(state * TD_EXL3_MCG_MARK);
    default: return bytes_value(state * TD_EXL3_MUL1_MARK);
    }
}

float td_exl3_value(td_exl3_codebook codebook, uint16_t state)
{
    u8x s = { state };
    return state_value(codebook, s)[0];
}

void td_exl3_codebook_f32(td_exl3_codebook codebook, float table[TD_EXL3_STATES])
{
    const u8x step = { 0, 1, 2, 3, 4, 5, 6, 7 };
    for (uint32_t s = 0; s < TD_EXL3_STATES; s += 8) {
        f8 v = state_value(codebook, step + s);
        memcpy(table + s, &v, sizeof v);
    }
}

/* Word i of a tile's stream: two 16-bit words, the second one the higher. */
static inline uint32_t stream_word(const uint16_t *tile, int i)
{
    return (uint32_t)tile[2 * i] | (uint32_t)tile[2 * i + 1] << 16;
}

void td_exl3_unpack_tile(const uint16_t *tile, int bits2, uint16_t state[TD_EXL3_TILE_VALUES])
{
    int n_words = 4 * bits2;
    for (int p = 0; p < TD_EXL3_TILE_VALUES; p++) {
        int last = td_exl3_end_bit(p, bits2) - 1, i = last >> 5; /* the state's last bit and its word */
        uint64_t pair = (uint64_t)stream_word(tile, i ? i - 1 : n_words - 1) << 32 | stream_word(tile, i);
        state[p] = (uint16_t)(pair >> (31 - (last & 31)));
    }
}

void td_exl3_pack_tile(const uint16_t state[TD_EXL3_TILE_VALUES], int bits2, uint16_t *tile)
{
    uint64_t window = 0; /* the n_window last bits of the stream that are not written yet */
    int n_window = 0, i = 0;
    for (int p = 0; p < TD_EXL3_TILE_VALUES; p++) {
        int own = td_exl3_own_bits(p, bits2);
        window = window << own | (state[p] & ((1u << own) - 1));
        n_window += own;
        if (n_window < 32) continue;
        n_window -= 32;
        uint32_t word = (uint32_t)(window >> n_window);
        tile[i++] = (uint16_t)word;
        tile[i++] = (uint16_t)(word >> 16);
    }
}

/* Half widths: states to their places in the tile, then the codebook over rows. */
static void decode_tile_half(const uint16_t *tile, int bits2, td_exl3_codebook codebook, float *out)
{
    uint16_t state[TD_EXL3_TILE_VALUES];
    uint32_t placed[TD_EXL3_TILE_VALUES];
    td_exl3_unpack_tile(tile, bits2, state);
    for (int p = 0; p < TD_EXL3_TILE_VALUES; p++) placed[td_exl3_tile_index(p)] = state[p];
    for (int i = 0; i < TD_EXL3_TILE_VALUES; i += 8) {
        u8x s;
        memcpy(&s, placed + i, sizeof s);
        f8 v = state_value(codebook, s);
        memcpy(out + i, &v, sizeof v);
    }
}

/* Whole widths. Four lanes (32 values, two columns eight apart) are exactly `bits` words, so value (r, j) of every
 * column c ends in word bits * c + m at the same shift: with the words transposed to [m][c], states of a row are two
 * shifts. */
static void decode_tile_whole(const uint16_t *tile, int bits, td_exl3_codebook codebook, float *out)
{
    uint32_t words[9][8]; /* words[m + 1][c] is word bits * c + m; words[0][c] the one before m = 0 */
    for (int c = 0; c < 8; c++)
        for (int m = 0; m < bits; m++) words[m + 1][c] = stream_word(tile, bits * c + m);
    for (int c = 0; c < 8; c++) words[0][c] = words[bits][(c + 7) & 7];
    for (int p = 0; p < 32; p++) { /* the values of column 0 stand for those of all */
        int last = (p + 1) * bits - 1, shift = 31 - (last & 31);
        u8x before, own;
        memcpy(&before, words[last >> 5], sizeof before);
        memcpy(&own, words[(last >> 5) + 1], sizeof own);
        f8 v = state_value(codebook, (before << 1 << (31 - shift) | own >> shift) & 0xFFFFu);
        memcpy(out + td_exl3_tile_index(p), &v, sizeof v);
    }
}

static inline void put_mcg4(float *out, u8x state)
{
    f8 v = halves_value((state & 0xFFFFu) * TD_EXL3_MCG_MARK);
    memcpy(out, &v, sizeof v);
}

/* Rows 2r, 2r+1, 2r+8, 2r+9 of a 4-bit mcg tile: words of stream lanes r, r+4, .. r+28 (one a column) and those before.
 */
static inline void rows_mcg4(u8x word, u8x before, float *out)
{
    u8x across = before << 16 | word >> 16;
    put_mcg4(out, across >> 12);
    put_mcg4(out + 16, across >> 8);
    put_mcg4(out + 8 * 16, across >> 4);
    put_mcg4(out + 9 * 16, word >> 16);
    put_mcg4(out + 8, word >> 12);
    put_mcg4(out + 16 + 8, word >> 8);
    put_mcg4(out + 8 * 16 + 8, word >> 4);
    put_mcg4(out + 9 * 16 + 8, word);
}

#define SHUFFLE __builtin_shufflevector

static inline void decode_tile_mcg4(const uint16_t *tile, float *out)
{
    u8x w[4];
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    memcpy(w, tile, sizeof w);
#else
    for (int i = 0; i < 32; i++) w[i / 8][i % 8] = stream_word(tile, i);
#endif
    /* transpose: d_r = words r, r+4, .. r+28 */
    u8x a = SHUFFLE(w[0], w[1], 0, 4, 8, 12, 1, 5, 9, 13), b = SHUFFLE(w[2], w[3], 0, 4, 8, 12, 1, 5, 9, 13);
    u8x c = SHUFFLE(w[0], w[1], 2, 6, 10, 14, 3, 7, 11, 15), d = SHUFFLE(w[2], w[3], 2, 6, 10, 14, 3, 7, 11, 15);
    u8x d0 = SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11), d1 = SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    u8x d2 = SHUFFLE(c, d, 0, 1, 2, 3, 8, 9, 10, 11), d3 = SHUFFLE(c, d, 4, 5, 6, 7, 12, 13, 14, 15);
    rows_mcg4(d0, SHUFFLE(d3, d3, 7, 0, 1, 2, 3, 4, 5, 6), out);
    rows_mcg4(d1, d0, out + 2 * 16);
    rows_mcg4(d2, d1, out + 4 * 16);
    rows_mcg4(d3, d2, out + 6 * 16);
}

void td_exl3_panel_f32(const td_exl3 *w, int nt, int k0, int k1, float *out)
{
    size_t tile_words = (size_t)(8 * w->bits2), row_words = (size_t)(w->n / TD_EXL3_TILE) * tile_words;
    const uint16_t *tile = w->trellis + (size_t)(k0 / TD_EXL3_TILE) * row_words + (size_t)nt * tile_words;
    bool mcg4 = w->bits2 == 8 && w->codebook == TD_EXL3_MCG;
    for (int k = k0; k < k1; k += TD_EXL3_TILE, tile += row_words, out += TD_EXL3_TILE_VALUES) {
        if (mcg4)
            decode_tile_mcg4(tile, out);
        else if (w->bits2 % 2)
            decode_tile_half(tile, w->bits2, w->codebook, out);
        else
            decode_tile_whole(tile, w->bits2 / 2, w->codebook, out);
    }
}

void td_exl3_tile_f32(const td_exl3 *w, int kt, int nt, float out[TD_EXL3_TILE_VALUES])
{
    td_exl3_panel_f32(w, nt, TD_EXL3_TILE * kt, TD_EXL3_TILE * (kt + 1), out);
}
