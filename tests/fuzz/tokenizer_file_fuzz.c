/* Any bytes as a tokenizer.json: refused with words, or a tokenizer that gives back the bytes it is given. To get past
 * the vocabulary, an input that starts with '+' is put over a small correct file: each line replaces one line of it. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "text/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

/* The members of a correct file, one a line; the vocabulary is filled in behind them. */
static const char *const members[] = {
    "\"added_tokens\":[{\"id\":300,\"content\":\"<x>\",\"special\":true,\"lstrip\":true}]",
    "\"normalizer\":{\"type\":\"NFC\"}",
    "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false}",
    "\"post_processor\":null",
    "\"decoder\":{\"type\":\"ByteLevel\"}",
};

enum { N_MEMBERS = sizeof members / sizeof *members, VOCAB_BYTES = 8192 };

static size_t append(char *out, const void *text, size_t n)
{
    memcpy(out, text, n);
    return n;
}

static size_t append_model(const char *head, char *out)
{
    const char *start = out;
    int next = 0x100;
    out += append(out, head, strlen(head));
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        int code = printable ? b : next++;
        static const char hex[] = "0123456789abcdef";
        char entry[] = { ',',
                         '"',
                         '\\',
                         'u',
                         '0',
                         hex[code >> 8],
                         hex[code >> 4 & 15],
                         hex[code & 15],
                         '"',
                         ':',
                         (char)('0' + b / 100),
                         (char)('0' + b / 10 % 10),
                         (char)('0' + b % 10) };
        size_t skip = b == 0 ? 1 : 0, lead = b >= 100 ? 0 : b >= 10 ? 1 : 2;
        out += append(out, entry + skip, 10 - skip);
        out += append(out, entry + 10 + lead, 3 - lead);
    }
    out += append(out, "}}}", 3);
    return (size_t)(out - start);
}

/* The small file with the lines of data in place of its members, as far as there are lines. */
static char *patched(const char *data, size_t n_bytes, size_t *n_out)
{
    char *out = malloc(n_bytes + VOCAB_BYTES + 2048), *p = out;
    const char *end = data + n_bytes;
    if (!out) abort();
    *p++ = '{';
    for (int i = 0; i < N_MEMBERS; i++) {
        const char *newline = data < end ? memchr(data, '\n', (size_t)(end - data)) : NULL;
        const char *line_end = newline ? newline : end;
        if (line_end > data)
            p += append(p, data, (size_t)(line_end - data));
        else
            p += append(p, members[i], strlen(members[i]));
        *p++ = ',';
        data = newline ? newline + 1 : end;
    }
    static const char model[] = "\"model\":{\"merges\":[[\"a\",\"a\"],[\"b\",\"a\"]],\"vocab\":{\"aa\":256,\"ba\":257,";
    p += append_model(model, p);
    *n_out = (size_t)(p - out);
    return out;
}

static void use(td_tokenizer *tok)
{
    static const char text[] = "a baaab<x> \xC3\xA9\xCC\x81 12'S \xFF\n";
    td_ids ids = { 0 };
    td_error err;
    size_t n = 0;
    if (td_tokenizer_encode(tok, text, sizeof text - 1, 0, &ids, &err) == TD_OK) {
        for (size_t i = 0; i < ids.n; i++) {
            const char *bytes;
            if (td_tokenizer_id_bytes(tok, ids.data[i], &bytes, &n) != TD_OK) abort();
        }
    } else if (ids.n) {
        abort();
    }
    td_ids_deinit(&ids);
    td_tokenizer_destroy(tok);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    td_tokenizer *tok = NULL;
    td_error err = { 0 };
    char *owned = NULL;
    const char *text = (const char *)data;
    if (n_bytes && data[0] == '+') text = owned = patched((const char *)data + 1, n_bytes - 1, &n_bytes);
    td_status st = td_tokenizer_open_memory("fuzz", text, n_bytes, &tok, &err);
    if (st == TD_OK)
        use(tok);
    else if (!err.text[0])
        abort();
    free(owned);
    return 0;
}
