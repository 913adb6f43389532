/* See json.h. One pass with a stack of open containers instead of recursion. Values are collected on a stack; when a
 * container closes, its own are moved to the arena as one array, so that elements have an index and one level costs one
 * allocation. A member's name travels in the value it belongs to. */
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

struct td_json {
    union {
        const char *text;     /* strings: decoded; numbers: as sent */
        const td_json *items; /* containers; from SORT_FROM members on, their order by name follows as uint32_t[n] */
    };
    const char *key; /* members: the name */
    uint32_t n;      /* bytes, elements or members */
    uint32_t key_bytes;
    uint8_t kind;
};

enum { SORT_FROM = 16 }; /* below, looking through all names is as fast as a binary search */

typedef struct open_container {
    uint32_t first;  /* its first value on the stack */
    const char *key; /* the name it has in its parent */
    uint32_t key_bytes;
    bool object;
} open_container;

typedef struct parser {
    td_arena *arena;
    char *start, *at, *end; /* *end == 0 */
    const char *file;       /* a file's text as it was, start is a copy of it; NULL: no file, names may come twice */
    td_json *stack;
    uint32_t n_stack, stack_cap;
    uint32_t n_values;
    open_container open[TD_JSON_MAX_DEPTH];
    int depth;
    td_error *err;
} parser;

static td_status syntax(parser *p, const char *what)
{
    size_t offset = (size_t)(p->at - p->start), line = 1;
    if (!p->file) return td_fail(p->err, TD_EFORMAT, "not JSON: %s at byte %zu", what, offset);
    for (size_t i = 0; i < offset; i++) line += p->file[i] == '\n';
    return td_fail(p->err, TD_EFORMAT, "line %zu: %s", line, what);
}

static void skip_space(parser *p)
{
    while (*p->at == ' ' || *p->at == '\n' || *p->at == '\r' || *p->at == '\t') p->at++;
}

/* ---- strings ---- */

/* Length of the UTF-8 character at s (its lead byte has the high bit), 0 if ill-formed. Reading stops at the zero byte
 * behind the text at the latest: it is no continuation byte. */
static int utf8_length(const unsigned char *s)
{
    unsigned char low = 0x80, high = 0xbf;
    int n;
    if (s[0] < 0xc2) return 0;
    if (s[0] < 0xe0) {
        n = 2;
    } else if (s[0] < 0xf0) {
        n = 3;
        if (s[0] == 0xe0) low = 0xa0;  /* shorter forms exist */
        if (s[0] == 0xed) high = 0x9f; /* surrogates */
    } else if (s[0] < 0xf5) {
        n = 4;
        if (s[0] == 0xf0) low = 0x90;
        if (s[0] == 0xf4) high = 0x8f; /* beyond U+10FFFF */
    } else {
        return 0;
    }
    if (s[1] < low || s[1] > high) return 0;
    for (int i = 2; i < n; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    return n;
}

/* Skips bytes that need no look: ASCII but quotes, backslashes and control characters. Eight at a time, because
 * pictures arrive as megabytes of base64. */
static const unsigned char *skip_plain(const unsigned char *s, const unsigned char *end)
{
    const uint64_t ones = 0x0101010101010101ull, tops = 0x8080808080808080ull;
    while (end - s >= 8) {
        uint64_t x;
        memcpy(&x, s, 8);
        uint64_t quote = x ^ ones * '"', slash = x ^ ones * '\\';
        uint64_t hit = (x - ones * 0x20) | (quote - ones) | (slash - ones) | x;
        if (hit & tops) break;
        s += 8;
    }
    while (*s >= 0x20 && *s < 0x80 && *s != '"' && *s != '\\') s++;
    return s;
}

static int hex4(const unsigned char *s)
{
    int x = 0;
    for (int i = 0; i < 4; i++) {
        int c = s[i], digit;
        if (c >= '0' && c <= '9')
            digit = c - '0';
        else if (c >= 'a' && c <= 'f')
            digit = c - 'a' + 10;
        else if (c >= 'A' && c <= 'F')
            digit = c - 'A' + 10;
        else
            return -1;
        x = x << 4 | digit;
    }
    return x;
}

static char *put_utf8(char *to, unsigned x)
{
    if (x < 0x80) {
        *to++ = (char)x;
    } else if (x < 0x800) {
        *to++ = (char)(0xc0 | x >> 6);
        *to++ = (char)(0x80 | (x & 63));
    } else if (x < 0x10000) {
        *to++ = (char)(0xe0 | x >> 12);
        *to++ = (char)(0x80 | (x >> 6 & 63));
        *to++ = (char)(0x80 | (x & 63));
    } else {
        *to++ = (char)(0xf0 | x >> 18);
        *to++ = (char)(0x80 | (x >> 12 & 63));
        *to++ = (char)(0x80 | (x >> 6 & 63));
        *to++ = (char)(0x80 | (x & 63));
    }
    return to;
}

/* p->at is at the 'u' of \uXXXX; writes the character, leaves p->at behind it. */
static td_status unicode_escape(parser *p, char **to)
{
    const unsigned char *s = (const unsigned char *)p->at;
    int x = hex4(s + 1); /* stops at the zero byte */
    if (x < 0) return syntax(p, "\\u without four hex digits");
    s += 5;
    if (x >= 0xd800 && x < 0xdc00 && s[0] == '\\' && s[1] == 'u') {
        int low = hex4(s + 2);
        if (low >= 0xdc00 && low < 0xe000) {
            x = 0x10000 + ((x - 0xd800) << 10) + (low - 0xdc00);
            s += 6;
        }
    }
    if (x >= 0xd800 && x < 0xe000) x = 0xfffd; /* half a surrogate pair */
    *to = put_utf8(*to, (unsigned)x);
    p->at = (char *)s;
    return TD_OK;
}

static td_status escape(parser *p, char **to)
{
    static const char from[] = "\"\\/bfnrt", is[] = "\"\\/\b\f\n\r\t";
    p->at++; /* the backslash */
    if (*p->at == 'u') return unicode_escape(p, to);
    const char *found = *p->at ? strchr(from, *p->at) : NULL;
    if (!found) return syntax(p, "unknown escape in a string");
    *(*to)++ = is[found - from];
    p->at++;
    return TD_OK;
}

/* p->at is behind the opening quote. Decodes in place, puts a zero behind the text. */
static td_status parse_string(parser *p, const char **text, uint32_t *n_bytes)
{
    char *begin = p->at, *to = begin;
    for (;;) {
        const unsigned char *from = (const unsigned char *)p->at;
        const unsigned char *s = skip_plain(from, (const unsigned char *)p->end);
        for (int n; *s >= 0x80; s = skip_plain(s + n, (const unsigned char *)p->end)) {
            n = utf8_length(s);
            if (!n) {
                p->at = (char *)s;
                return syntax(p, "invalid UTF-8");
            }
        }
        size_t n = (size_t)(s - from);
        if ((const unsigned char *)to != from) memmove(to, from, n);
        to += n;
        p->at = (char *)s;
        if (*s == '"') break;
        if (*s != '\\') return syntax(p, p->at == p->end ? "a string without end" : "a control character in a string");
        td_status status = escape(p, &to);
        if (status) return status;
    }
    p->at++;
    *to = '\0'; /* at the closing quote or before it */
    *text = begin;
    *n_bytes = (uint32_t)(to - begin);
    return TD_OK;
}

/* ---- numbers and words ---- */

static bool digits(parser *p)
{
    if (*p->at < '0' || *p->at > '9') return false;
    while (*p->at >= '0' && *p->at <= '9') p->at++;
    return true;
}

static td_status parse_number(parser *p, td_json *value)
{
    const char *begin = p->at;
    value->kind = TD_JSON_INT;
    if (*p->at == '-') p->at++;
    if (*p->at == '0') {
        p->at++;
    } else if (!digits(p)) {
        return syntax(p, "a value expected");
    }
    if (*p->at == '.') {
        value->kind = TD_JSON_REAL;
        p->at++;
        if (!digits(p)) return syntax(p, "a digit expected after the point");
    }
    if (*p->at == 'e' || *p->at == 'E') {
        value->kind = TD_JSON_REAL;
        p->at++;
        if (*p->at == '+' || *p->at == '-') p->at++;
        if (!digits(p)) return syntax(p, "a digit expected in the exponent");
    }
    value->text = begin;
    value->n = (uint32_t)(p->at - begin);
    return TD_OK;
}

static bool word(parser *p, const char *text)
{
    size_t n = strlen(text);
    if (strncmp(p->at, text, n) != 0) return false; /* ends at the zero byte */
    p->at += n;
    return true;
}

/* ---- containers ---- */

static int compare_names(const td_json *a, const td_json *b)
{
    if (a->key_bytes != b->key_bytes) return a->key_bytes < b->key_bytes ? -1 : 1;
    return memcmp(a->key, b->key, a->key_bytes);
}

static int compare_sorted(const void *a, const void *b, void *values)
{
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    int order = compare_names((const td_json *)values + i, (const td_json *)values + j);
    return order ? order : i < j ? -1 : 1;
}

static uint32_t *name_order(td_json *items, uint32_t n)
{
    uint32_t *order = (uint32_t *)(items + n);
    for (uint32_t i = 0; i < n; i++) order[i] = i;
    qsort_r(order, n, sizeof *order, compare_sorted, items);
    return order;
}

/* The value of `later` moves to the place of an earlier member with the same name; `later` is marked for removal. */
static void replace_member(td_json *first, td_json *later)
{
    const char *key = first->key;
    *first = *later;
    first->key = key;
    later->key = NULL;
}

static void unite_few(td_json *items, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++)
        for (uint32_t j = 0; j < i; j++)
            if (items[j].key && compare_names(items + i, items + j) == 0) {
                replace_member(items + j, items + i);
                break;
            }
}

static void unite_many(td_json *items, uint32_t n)
{
    const uint32_t *order = name_order(items, n);
    for (uint32_t i = 0, j; i < n; i = j) {
        for (j = i + 1; j < n && compare_names(items + order[i], items + order[j]) == 0; j++)
            ;
        for (uint32_t k = i + 1; k + 1 < j; k++) items[order[k]].key = NULL; /* neither first nor last */
        if (j > i + 1) replace_member(items + order[i], items + order[j - 1]);
    }
}

/* Makes names unique and leaves the order by name behind the items when there are many. Returns how many remain. */
static uint32_t unite_members(td_json *items, uint32_t n)
{
    if (n < SORT_FROM)
        unite_few(items, n);
    else
        unite_many(items, n);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n; i++)
        if (items[i].key) items[kept++] = items[i];
    if (kept < n && kept >= SORT_FROM) name_order(items, kept);
    return kept;
}

static td_status push(parser *p, const td_json *value)
{
    if (++p->n_values > TD_JSON_MAX_VALUES)
        return td_fail(p->err, TD_EFORMAT, "JSON with more than %u values", TD_JSON_MAX_VALUES);
    if (p->n_stack == p->stack_cap) {
        uint32_t cap = p->stack_cap ? p->stack_cap * 2 : 64;
        td_json *grown = (td_json *)realloc(p->stack, cap * sizeof *grown);
        if (!grown) return td_fail(p->err, TD_ENOMEM, "out of memory reading JSON");
        p->stack = grown;
        p->stack_cap = cap;
    }
    p->stack[p->n_stack++] = *value;
    return TD_OK;
}

static td_status open_bracket(parser *p, const td_json *value)
{
    if (p->depth == TD_JSON_MAX_DEPTH)
        return td_fail(p->err, TD_EFORMAT, "JSON deeper than %d levels", TD_JSON_MAX_DEPTH);
    p->open[p->depth++] = (open_container){
        .first = p->n_stack, .key = value->key, .key_bytes = value->key_bytes, .object = *p->at == '{'
    };
    p->at++;
    return TD_OK;
}

/* Moves the innermost container's values to the arena and leaves the container on the stack in their place. */
static td_status close_bracket(parser *p)
{
    open_container *open = &p->open[--p->depth];
    uint32_t n = p->n_stack - open->first;
    td_json value = { .key = open->key,
                      .key_bytes = open->key_bytes,
                      .kind = open->object ? TD_JSON_OBJECT : TD_JSON_ARRAY };
    p->at++;
    if (n) {
        size_t order_bytes = open->object && n >= SORT_FROM ? n * sizeof(uint32_t) : 0;
        td_json *items = (td_json *)td_arena_take(p->arena, n * sizeof *items + order_bytes, _Alignof(td_json));
        if (!items) return td_fail(p->err, TD_ENOMEM, "out of memory reading JSON");
        memcpy(items, p->stack + open->first, n * sizeof *items);
        value.n = open->object ? unite_members(items, n) : n;
        value.items = items;
        if (p->file && value.n < n) return syntax(p, "duplicate names in the object that ends here");
    }
    p->n_stack = open->first;
    return push(p, &value);
}

/* ---- the grammar ---- */

static td_status member_name(parser *p, td_json *value)
{
    if (*p->at != '"') return syntax(p, "a member name expected");
    p->at++;
    td_status status = parse_string(p, &value->key, &value->key_bytes);
    if (status) return status;
    skip_space(p);
    if (*p->at != ':') return syntax(p, "':' expected");
    p->at++;
    skip_space(p);
    return TD_OK;
}

/* A string, number or word: complete at once. */
static td_status parse_scalar(parser *p, td_json *value)
{
    td_status status = TD_OK;
    if (*p->at == '"') {
        p->at++;
        value->kind = TD_JSON_STRING;
        status = parse_string(p, &value->text, &value->n);
    } else if (word(p, "null")) {
        value->kind = TD_JSON_NULL;
    } else if (word(p, "true")) {
        value->kind = TD_JSON_TRUE;
    } else if (word(p, "false")) {
        value->kind = TD_JSON_FALSE;
    } else {
        status = parse_number(p, value);
    }
    return status ? status : push(p, value);
}

/* After a complete value: closes what closes here, then stops behind the comma before the next value. */
static td_status after_value(parser *p)
{
    for (;;) {
        skip_space(p);
        if (!p->depth) return TD_OK;
        bool object = p->open[p->depth - 1].object;
        if (*p->at == ',') {
            p->at++;
            skip_space(p);
            return TD_OK;
        }
        if (*p->at != (object ? '}' : ']')) return syntax(p, object ? "',' or '}' expected" : "',' or ']' expected");
        td_status status = close_bracket(p);
        if (status) return status;
    }
}

static td_status parse_all(parser *p)
{
    do {
        td_json value = { .kind = TD_JSON_NULL };
        td_status status = TD_OK;
        if (p->depth && p->open[p->depth - 1].object) status = member_name(p, &value);
        if (status) return status;
        if (*p->at == '{' || *p->at == '[') {
            char closing = *p->at == '{' ? '}' : ']';
            status = open_bracket(p, &value);
            if (status) return status;
            skip_space(p);
            if (*p->at != closing) continue;
            status = close_bracket(p);
        } else {
            status = parse_scalar(p, &value);
        }
        if (!status) status = after_value(p);
        if (status) return status;
    } while (p->depth);
    return p->at == p->end ? TD_OK : syntax(p, "text after the value");
}

static td_status parse_text(td_arena *arena, char *text, size_t n_bytes, const char *file, const td_json **value,
                            td_error *err)
{
    if (n_bytes >= UINT32_MAX) return td_fail(err, TD_EFORMAT, "JSON text of %zu bytes: too long", n_bytes);
    text[n_bytes] = '\0';
    parser *p = (parser *)calloc(1, sizeof *p);
    if (!p) return td_fail(err, TD_ENOMEM, "out of memory reading JSON");
    p->arena = arena;
    p->start = p->at = text;
    p->end = text + n_bytes;
    p->file = file;
    p->err = err;
    if (n_bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) p->at += 3;
    skip_space(p);
    td_status status = parse_all(p);
    if (!status) {
        td_json *root = (td_json *)td_arena_take(arena, sizeof *root, _Alignof(td_json));
        if (root) {
            *root = p->stack[0];
            *value = root;
        } else {
            status = td_fail(err, TD_ENOMEM, "out of memory reading JSON");
        }
    }
    free(p->stack);
    free(p);
    return status;
}

td_status td_json_parse(td_arena *arena, char *text, size_t n_bytes, const td_json **value, td_error *err)
{
    return parse_text(arena, text, n_bytes, NULL, value, err);
}

td_status td_json_parse_file(td_arena *arena, const char *text, size_t n_bytes, const td_json **value, td_error *err)
{
    char *copy = td_arena_strndup(arena, text, n_bytes);
    if (!copy) return td_fail(err, TD_ENOMEM, "out of memory reading JSON");
    return parse_text(arena, copy, n_bytes, text, value, err);
}

/* ---- looking at values ---- */

td_json_kind td_json_kind_of(const td_json *value)
{
    return value ? (td_json_kind)value->kind : TD_JSON_ABSENT;
}

bool td_json_is_null(const td_json *value)
{
    return !value || value->kind == TD_JSON_NULL;
}

const char *td_json_kind_name(const td_json *value)
{
    static const char *const names[] = { "nothing",  "null",     "false",    "true",     "an integer",
                                         "a number", "a string", "an array", "an object" };
    return names[td_json_kind_of(value)];
}

static bool is_container(const td_json *value)
{
    return value && (value->kind == TD_JSON_ARRAY || value->kind == TD_JSON_OBJECT);
}

size_t td_json_count(const td_json *value)
{
    return is_container(value) ? value->n : 0;
}

const td_json *td_json_at(const td_json *value, size_t i)
{
    return i < td_json_count(value) ? value->items + i : NULL;
}

const char *td_json_key_at(const td_json *object, size_t i, size_t *n_bytes)
{
    if (td_json_kind_of(object) != TD_JSON_OBJECT || i >= object->n) return NULL;
    if (n_bytes) *n_bytes = object->items[i].key_bytes;
    return object->items[i].key;
}

const td_json *td_json_get_n(const td_json *object, const char *name, size_t n_bytes)
{
    if (td_json_kind_of(object) != TD_JSON_OBJECT || n_bytes > UINT32_MAX) return NULL;
    const td_json *items = object->items;
    const td_json wanted = { .key = name, .key_bytes = (uint32_t)n_bytes };
    if (object->n < SORT_FROM) {
        for (uint32_t i = 0; i < object->n; i++)
            if (compare_names(items + i, &wanted) == 0) return items + i;
        return NULL;
    }
    const uint32_t *order = (const uint32_t *)(items + object->n);
    uint32_t low = 0, high = object->n;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        int c = compare_names(items + order[mid], &wanted);
        if (c == 0) return items + order[mid];
        if (c < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return NULL;
}

const td_json *td_json_get(const td_json *object, const char *name)
{
    return td_json_get_n(object, name, strlen(name));
}

const char *td_json_string(const td_json *value, size_t *n_bytes)
{
    if (td_json_kind_of(value) != TD_JSON_STRING) return NULL;
    if (n_bytes) *n_bytes = value->n;
    return value->text;
}

bool td_json_equals(const td_json *value, const char *text)
{
    size_t n = strlen(text);
    return td_json_kind_of(value) == TD_JSON_STRING && value->n == n && memcmp(value->text, text, n) == 0;
}

const char *td_json_number_text(const td_json *value, size_t *n_bytes)
{
    td_json_kind kind = td_json_kind_of(value);
    if (kind != TD_JSON_INT && kind != TD_JSON_REAL) return NULL;
    if (n_bytes) *n_bytes = value->n;
    return value->text;
}

td_status td_json_double(const td_json *value, double *out)
{
    const char *text = td_json_number_text(value, NULL);
    if (!text) return TD_EINVAL;
    *out = strtod(text, NULL); /* stops by itself: a number is never followed by a byte that could continue it */
    return TD_OK;
}

td_status td_json_int64(const td_json *value, int64_t *out)
{
    double x;
    if (td_json_kind_of(value) == TD_JSON_REAL) {
        if (td_json_double(value, &x) || !(x >= -0x1p53 && x <= 0x1p53) || x != (double)(int64_t)x) return TD_EINVAL;
        *out = (int64_t)x;
        return TD_OK;
    }
    size_t n;
    const char *text = td_json_number_text(value, &n);
    if (!text) return TD_EINVAL;
    bool negative = text[0] == '-';
    uint64_t sum = 0, limit = negative ? (uint64_t)1 << 63 : INT64_MAX;
    for (size_t i = negative; i < n; i++) {
        uint64_t digit = (uint64_t)(text[i] - '0');
        if (sum > (limit - digit) / 10) return TD_EINVAL;
        sum = sum * 10 + digit;
    }
    *out = negative ? (int64_t)(0 - sum) : (int64_t)sum;
    return TD_OK;
}

td_status td_json_bool(const td_json *value, bool *out)
{
    td_json_kind kind = td_json_kind_of(value);
    if (kind != TD_JSON_TRUE && kind != TD_JSON_FALSE) return TD_EINVAL;
    *out = kind == TD_JSON_TRUE;
    return TD_OK;
}
