/* What a code point is: class bits in one lookup, built from unicode_tables.c when a tokenizer is opened. */
#ifndef TD_TEXT_UNICODE_H
#define TD_TEXT_UNICODE_H

#include "text/unicode_tables.h"

TD_BEGIN_C

enum {
    TD_UNICODE_LETTER = 1,   /* \p{L} */
    TD_UNICODE_NUMBER = 2,   /* \p{N} */
    TD_UNICODE_SPACE = 4,    /* \s */
    TD_UNICODE_WORD = 8,     /* \w */
    TD_UNICODE_COMPOSE = 16, /* NFC must look closer: combining, decomposing, or joining what stands before */
};

/* classes[first_of_block[c >> 8] + (c & 255)]: blocks of one value share their 256 bytes. */
typedef struct td_unicode {
    uint8_t *classes;
    uint32_t first_of_block[0x110000 >> 8];
} td_unicode;

td_status td_unicode_init(td_unicode *unicode); /* TD_ENOMEM */
void td_unicode_deinit(td_unicode *unicode);

/* Class bits; 0 for anything above U+10FFFF. */
static inline unsigned td_unicode_class(const td_unicode *unicode, uint32_t code_point)
{
    if (code_point > 0x10FFFF) return 0;
    return unicode->classes[unicode->first_of_block[code_point >> 8] + (code_point & 255)];
}

/* Normalization Form C of valid or broken UTF-8 (broken bytes are kept). *out and *n_out: text itself when it already
 * is in that form (nothing allocated, *owned NULL), else a malloc'ed copy that the caller frees through *owned. */
td_status td_nfc(const td_unicode *unicode, const char *text, size_t n_bytes, const char **out, size_t *n_out,
                 char **owned);

TD_END_C
#endif
