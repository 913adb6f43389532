/* See hash.h. */
#include "base/hash.h"

#include <openssl/evp.h>

/* td_sha256 is OpenSSL's context under our name: no allocation of our own around it. */
static EVP_MD_CTX *context(td_sha256 *sha)
{
    return (EVP_MD_CTX *)sha;
}

td_sha256 *td_sha256_create(void)
{
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    if (ctx && EVP_DigestInit_ex(ctx, EVP_sha256(), NULL) != 1) {
        EVP_MD_CTX_free(ctx);
        return NULL;
    }
    return (td_sha256 *)ctx;
}

void td_sha256_update(td_sha256 *sha, const void *data, size_t n_bytes)
{
    td_check(EVP_DigestUpdate(context(sha), data, n_bytes) == 1);
}

void td_sha256_finish(td_sha256 *sha, uint8_t digest[TD_SHA256_BYTES])
{
    td_check(EVP_DigestFinal_ex(context(sha), digest, NULL) == 1);
    EVP_MD_CTX_free(context(sha));
}

void td_sha256_of(const void *data, size_t n_bytes, uint8_t digest[TD_SHA256_BYTES])
{
    td_check(EVP_Digest(data, n_bytes, digest, NULL, EVP_sha256(), NULL) == 1);
}

void td_hex(const void *data, size_t n_bytes, char *out)
{
    const uint8_t *bytes = (const uint8_t *)data;
    for (size_t i = 0; i < n_bytes; i++) {
        out[2 * i] = "0123456789abcdef"[bytes[i] >> 4];
        out[2 * i + 1] = "0123456789abcdef"[bytes[i] & 15];
    }
    out[2 * n_bytes] = '\0';
}

uint64_t td_fnv1a(uint64_t hash, const void *data, size_t n_bytes)
{
    const uint8_t *bytes = (const uint8_t *)data;
    for (size_t i = 0; i < n_bytes; i++) hash = (hash ^ bytes[i]) * 0x100000001b3ull;
    return hash;
}
