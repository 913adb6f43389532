/* Any bytes as text: the ids stand for exactly these bytes, and reading them through a stream in pieces gives the same
 * text as reading them at once. The first byte chooses the flags. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "text/tokenizer.h"
#include "text/unicode.h"
#include "text/utf8.h"
#include "text/utf8_stream.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

/* Opened once: reading the file would be nearly all of the time. */
static const td_tokenizer *demo(void)
{
    static td_tokenizer *tok;
    td_error err;
    if (!tok && td_tokenizer_open("../oracle/tokenizer/demo.json", &tok, &err) != TD_OK &&
        td_tokenizer_open("tests/oracle/tokenizer/demo.json", &tok, &err) != TD_OK)
        abort();
    return tok;
}

static void check_ids(const td_tokenizer *tok, const td_ids *ids, const char *text, size_t n_bytes)
{
    td_utf8_stream stream, whole;
    char *pieces = malloc(TD_UTF8_STREAM_ROOM(n_bytes) + 3), *once = malloc(TD_UTF8_STREAM_ROOM(n_bytes) + 3);
    size_t at = 0, n_pieces = 0;
    if (!pieces || !once) abort();
    td_utf8_stream_init(&stream);
    td_utf8_stream_init(&whole);
    for (size_t i = 0; i < ids->n; i++) {
        const char *bytes;
        size_t n;
        if (td_tokenizer_id_bytes(tok, ids->data[i], &bytes, &n) != TD_OK) abort();
        if (n > n_bytes - at || memcmp(bytes, text + at, n) != 0) abort();
        at += n;
        n_pieces += td_utf8_stream_push(&stream, bytes, n, pieces + n_pieces);
        if (td_utf8_valid_prefix(pieces, n_pieces) != n_pieces) abort();
    }
    n_pieces += td_utf8_stream_finish(&stream, pieces + n_pieces);
    size_t n_once = td_utf8_stream_push(&whole, text, n_bytes, once);
    n_once += td_utf8_stream_finish(&whole, once + n_once);
    if (at != n_bytes || n_once != n_pieces || memcmp(once, pieces, n_once) != 0) abort();
    free(pieces);
    free(once);
}

/* Normalizing what is normalized changes nothing. */
static void check_nfc(const char *text, size_t n_bytes)
{
    static td_unicode unicode;
    const char *once, *twice;
    char *owned_once, *owned_twice;
    size_t n_once, n_twice;
    if (!unicode.classes && td_unicode_init(&unicode) != TD_OK) abort();
    if (td_nfc(&unicode, text, n_bytes, &once, &n_once, &owned_once) != TD_OK) abort();
    if (td_nfc(&unicode, once, n_once, &twice, &n_twice, &owned_twice) != TD_OK) abort();
    if (n_once != n_twice || memcmp(once, twice, n_once) != 0) abort();
    free(owned_once);
    free(owned_twice);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    const td_tokenizer *tok = demo();
    td_ids ids = { 0 };
    td_error err;
    if (n_bytes == 0) return 0;
    const char *text = (const char *)data + 1;
    n_bytes--;
    if (td_tokenizer_encode(tok, text, n_bytes, data[0] & 7u, &ids, &err) != TD_OK) abort();
    check_ids(tok, &ids, text, n_bytes);
    if (data[0] & 8) check_nfc(text, n_bytes);
    td_ids_deinit(&ids);
    return 0;
}
