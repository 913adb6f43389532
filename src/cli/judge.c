/* See judge.h. */
#include "cli/judge.h"

enum { COLLAPSED_CHARS = 8, COLLAPSED_KINDS = 2 };

/* Length of the character at text; bytes that are not UTF-8 count as characters of their own. */
static size_t next_char(const char *text, size_t n_bytes, uint32_t *code)
{
    unsigned char lead = (unsigned char)text[0];
    size_t n = lead < 0x80 ? 1 : lead < 0xc0 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf8 ? 4 : 0;
    uint32_t c = n == 1 ? lead : lead & (0xffu >> (n + 1));
    bool whole = n > 0 && n <= n_bytes;
    for (size_t i = 1; whole && i < n; i++) {
        whole = ((unsigned char)text[i] & 0xc0) == 0x80;
        c = c << 6 | ((unsigned char)text[i] & 0x3f);
    }
    *code = whole ? c : 0x110000u + lead;
    return whole ? n : 1;
}

static bool is_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
           c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

const char *td_judge_trim(const char *text, size_t n_bytes, size_t *n_trimmed)
{
    size_t from = n_bytes, end = 0;
    uint32_t c;
    for (size_t i = 0, n; i < n_bytes; i += n) {
        n = next_char(text + i, n_bytes - i, &c);
        if (is_space(c)) continue;
        if (from == n_bytes) from = i;
        end = i + n;
    }
    *n_trimmed = end > from ? end - from : 0;
    return text + from;
}

td_status td_judge_answer(const char *text, size_t n_bytes, td_error *err)
{
    uint32_t kinds[COLLAPSED_KINDS + 1], c;
    int n_kinds = 0, n_chars = 0;
    text = td_judge_trim(text, n_bytes, &n_bytes);
    if (n_bytes == 0) return td_fail(err, TD_EFORMAT, "the answer is empty");
    for (size_t i = 0; i < n_bytes; n_chars++) {
        bool known = false;
        i += next_char(text + i, n_bytes - i, &c);
        for (int k = 0; k < n_kinds; k++) known |= kinds[k] == c;
        if (!known && n_kinds <= COLLAPSED_KINDS) kinds[n_kinds++] = c;
    }
    if (n_chars >= COLLAPSED_CHARS && n_kinds <= COLLAPSED_KINDS)
        return td_fail(err, TD_EFORMAT, "the answer is %d characters of only %d kind%s: the model is not working",
                       n_chars, n_kinds, n_kinds == 1 ? "" : "s");
    return TD_OK;
}

size_t td_judge_prefix(const char *text, size_t n_bytes, int n_chars)
{
    size_t i = 0;
    uint32_t c;
    while (i < n_bytes && n_chars-- > 0) i += next_char(text + i, n_bytes - i, &c);
    return i;
}
