/* Reading UTF-8 that may be broken. "Valid" is Unicode's Table 3-7: no overlong forms, no surrogates, at most U+10FFFF.
 */
#ifndef TD_TEXT_UTF8_H
#define TD_TEXT_UTF8_H

#include "base/status.h"

TD_BEGIN_C

#define TD_UTF8_INVALID UINT32_MAX

/* The character at p (p < end). *n_bytes is its length, 1 .. 4; where the bytes are no character the result is
 * TD_UTF8_INVALID and *n_bytes the length of the maximal ill-formed subpart, 1 .. 3: what one U+FFFD replaces. */
uint32_t td_utf8_next(const unsigned char *p, const unsigned char *end, size_t *n_bytes);

/* True when [p, end) is nonempty, too short to be a character, and could become one with more bytes. */
bool td_utf8_is_partial(const unsigned char *p, const unsigned char *end);

/* Bytes of the longest prefix of text that is valid: n_bytes when all is. */
size_t td_utf8_valid_prefix(const char *text, size_t n_bytes);

/* Writes a character (any up to U+10FFFF, surrogates not) as 1 .. 4 bytes; returns how many. */
size_t td_utf8_put(uint32_t code_point, char *out);

TD_END_C
#endif
