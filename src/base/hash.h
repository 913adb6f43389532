/* SHA-256 (OpenSSL libcrypto) and FNV-1a-64. */
#ifndef TD_BASE_HASH_H
#define TD_BASE_HASH_H

#include "base/status.h"

TD_BEGIN_C

#define TD_SHA256_BYTES 32

typedef struct td_sha256 td_sha256;

td_sha256 *td_sha256_create(void); /* NULL: out of memory */
void td_sha256_update(td_sha256 *sha, const void *data, size_t n_bytes);
void td_sha256_finish(td_sha256 *sha, uint8_t digest[TD_SHA256_BYTES]); /* destroys sha */
void td_sha256_of(const void *data, size_t n_bytes, uint8_t digest[TD_SHA256_BYTES]);

/* n_bytes as 2 * n_bytes lowercase hex digits and a zero. */
void td_hex(const void *data, size_t n_bytes, char *out);

/* FNV-1a-64 of data, continued from hash; start with TD_FNV1A_START. A checksum, not a defence. */
#define TD_FNV1A_START 0xcbf29ce484222325ull
uint64_t td_fnv1a(uint64_t hash, const void *data, size_t n_bytes);

TD_END_C
#endif
