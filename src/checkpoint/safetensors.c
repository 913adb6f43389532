/* Reading of safetensors headers and of the index. Real headers have up to 150,000 entries, so both are scanned in one
 * pass without a document tree; everything a tensor says about itself is checked against the size of the file before
 * anyone may follow it. Writing: safetensors_writer.c. */
#include "checkpoint/safetensors.h"

#include "checkpoint/scan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEADER_BYTES_MAX ((uint64_t)100 << 20) /* the limit of the format's own library */
#define NAME_BYTES_MAX   512

static const struct {
    const char *name;
    int n_bytes;
} DTYPES[TD_DTYPE_COUNT] = {
    [TD_DTYPE_BF16] = { "BF16", 2 }, [TD_DTYPE_F16] = { "F16", 2 }, [TD_DTYPE_F32] = { "F32", 4 },
    [TD_DTYPE_F64] = { "F64", 8 },   [TD_DTYPE_I8] = { "I8", 1 },   [TD_DTYPE_U8] = { "U8", 1 },
    [TD_DTYPE_I16] = { "I16", 2 },   [TD_DTYPE_U16] = { "U16", 2 }, [TD_DTYPE_I32] = { "I32", 4 },
    [TD_DTYPE_U32] = { "U32", 4 },   [TD_DTYPE_I64] = { "I64", 8 }, [TD_DTYPE_F8_E4M3] = { "F8_E4M3", 1 },
};

int td_dtype_bytes(td_dtype dtype)
{
    return DTYPES[dtype].n_bytes;
}

const char *td_dtype_name(td_dtype dtype)
{
    return DTYPES[dtype].name;
}

int64_t td_tensor_n_elements(const td_tensor *tensor)
{
    return (int64_t)(tensor->n_bytes / (uint64_t)td_dtype_bytes(tensor->dtype));
}

const char *td_shape_text(int rank, const int64_t *shape, char text[TD_SHAPE_TEXT_CAP])
{
    int at = snprintf(text, TD_SHAPE_TEXT_CAP, "[");
    for (int i = 0; i < rank && i < TD_RANK_MAX; i++)
        at += snprintf(text + at, (size_t)(TD_SHAPE_TEXT_CAP - at), "%s%lld", i ? ", " : "", (long long)shape[i]);
    snprintf(text + at, (size_t)(TD_SHAPE_TEXT_CAP - at), "]");
    return text;
}

/* A parse in progress. */
typedef struct parser {
    const char *file;
    td_scan scan;
    uint64_t data_begin, file_bytes;
    td_arena *arena;
    td_tensor *items; /* malloc, grows; copied into the arena at the end */
    size_t n, cap;
    td_error *err;
} parser;

static td_status syntax(const parser *p, const char *expected)
{
    return td_fail(p->err, TD_EFORMAT, "%s: header: %s expected at byte %zu", p->file, expected,
                   (size_t)(p->scan.at - p->scan.begin));
}

static td_status parse_dtype(parser *p, td_tensor *tensor)
{
    td_scan_text text;
    if (!td_scan_string(&p->scan, &text)) return syntax(p, "a dtype string");
    for (int d = 0; d < TD_DTYPE_COUNT; d++) {
        if (td_scan_is(text, DTYPES[d].name, strlen(DTYPES[d].name))) {
            tensor->dtype = (td_dtype)d;
            return TD_OK;
        }
    }
    int shown = text.plain ? (int)(text.n_bytes < 32 ? text.n_bytes : 32) : 0;
    return td_fail(p->err, TD_EUNSUPPORTED, "%s: tensor %s: unknown dtype \"%.*s\"", p->file, tensor->name, shown,
                   text.data);
}

static td_status parse_shape(parser *p, td_tensor *tensor)
{
    if (!td_scan_char(&p->scan, '[')) return syntax(p, "a shape list");
    tensor->rank = 0;
    if (td_scan_char(&p->scan, ']')) return TD_OK;
    do {
        uint64_t dim;
        if (!td_scan_u64(&p->scan, &dim)) return syntax(p, "a dimension");
        if (dim > INT64_MAX)
            return td_fail(p->err, TD_EFORMAT, "%s: tensor %s: dimension too large", p->file, tensor->name);
        if (tensor->rank == TD_RANK_MAX)
            return td_fail(p->err, TD_EUNSUPPORTED, "%s: tensor %s: more than %d dimensions", p->file, tensor->name,
                           TD_RANK_MAX);
        tensor->shape[tensor->rank++] = (int64_t)dim;
    } while (td_scan_char(&p->scan, ','));
    return td_scan_char(&p->scan, ']') ? TD_OK : syntax(p, "']'");
}

static td_status parse_offsets(parser *p, uint64_t offsets[2])
{
    bool ok = td_scan_char(&p->scan, '[') && td_scan_u64(&p->scan, &offsets[0]) && td_scan_char(&p->scan, ',') &&
              td_scan_u64(&p->scan, &offsets[1]) && td_scan_char(&p->scan, ']');
    return ok ? TD_OK : syntax(p, "[begin, end]");
}

/* Sets n_bytes and offset after every check of the range. */
static td_status place(const parser *p, td_tensor *tensor, const uint64_t offsets[2])
{
    char shape[TD_SHAPE_TEXT_CAP];
    uint64_t begin = offsets[0], end = offsets[1], bytes = (uint64_t)td_dtype_bytes(tensor->dtype), size = bytes;
    for (int i = 0; i < tensor->rank; i++) {
        if (__builtin_mul_overflow(size, (uint64_t)tensor->shape[i], &size))
            return td_fail(p->err, TD_EFORMAT, "%s: tensor %s: shape %s overflows", p->file, tensor->name,
                           td_shape_text(tensor->rank, tensor->shape, shape));
    }
    if (begin > end || end > p->file_bytes - p->data_begin)
        return td_fail(p->err, TD_EFORMAT,
                       "%s: tensor %s: data_offsets [%llu, %llu] outside the file's %llu data bytes", p->file,
                       tensor->name, (unsigned long long)begin, (unsigned long long)end,
                       (unsigned long long)(p->file_bytes - p->data_begin));
    if (end - begin != size)
        return td_fail(p->err, TD_EFORMAT, "%s: tensor %s: %llu bytes, but %s %s is %llu", p->file, tensor->name,
                       (unsigned long long)(end - begin), td_dtype_name(tensor->dtype),
                       td_shape_text(tensor->rank, tensor->shape, shape), (unsigned long long)size);
    tensor->n_bytes = size;
    tensor->offset = p->data_begin + begin;
    if (tensor->offset % bytes != 0)
        return td_fail(p->err, TD_EUNSUPPORTED, "%s: tensor %s: at byte %llu, not aligned to its %s elements", p->file,
                       tensor->name, (unsigned long long)tensor->offset, td_dtype_name(tensor->dtype));
    return TD_OK;
}

enum { HAS_DTYPE = 1, HAS_SHAPE = 2, HAS_OFFSETS = 4, HAS_ALL = 7 };

/* {"dtype": .., "shape": .., "data_offsets": ..} in any order; other fields are skipped. */
static td_status parse_tensor(parser *p, td_tensor *tensor)
{
    int seen = 0;
    uint64_t offsets[2] = { 0, 0 };
    td_scan_text key;
    if (!td_scan_char(&p->scan, '{')) return syntax(p, "'{'");
    do {
        if (!td_scan_string(&p->scan, &key) || !td_scan_char(&p->scan, ':')) return syntax(p, "a field");
        int field = td_scan_is(key, "dtype", 5)           ? HAS_DTYPE
                    : td_scan_is(key, "shape", 5)         ? HAS_SHAPE
                    : td_scan_is(key, "data_offsets", 12) ? HAS_OFFSETS
                                                          : 0;
        if (seen & field)
            return td_fail(p->err, TD_EFORMAT, "%s: tensor %s: a field stands twice", p->file, tensor->name);
        seen |= field;
        td_status status = TD_OK;
        switch (field) {
        case HAS_DTYPE: status = parse_dtype(p, tensor); break;
        case HAS_SHAPE: status = parse_shape(p, tensor); break;
        case HAS_OFFSETS: status = parse_offsets(p, offsets); break;
        default: status = td_scan_skip(&p->scan) ? TD_OK : syntax(p, "a value");
        }
        if (status) return status;
    } while (td_scan_char(&p->scan, ','));
    if (!td_scan_char(&p->scan, '}')) return syntax(p, "'}'");
    if (seen != HAS_ALL)
        return td_fail(p->err, TD_EFORMAT, "%s: tensor %s: dtype, shape or data_offsets is missing", p->file,
                       tensor->name);
    return place(p, tensor, offsets);
}

static td_tensor *push(parser *p)
{
    if (p->n == p->cap) {
        size_t cap = p->cap ? 2 * p->cap : 256;
        td_tensor *grown = (td_tensor *)realloc(p->items, cap * sizeof *grown);
        if (!grown) return NULL;
        p->items = grown;
        p->cap = cap;
    }
    p->items[p->n] = (td_tensor){ 0 };
    return &p->items[p->n++];
}

static td_status parse_entry(parser *p)
{
    td_scan_text name;
    if (!td_scan_string(&p->scan, &name) || !td_scan_char(&p->scan, ':')) return syntax(p, "a tensor name");
    if (td_scan_is(name, "__metadata__", 12)) return td_scan_skip(&p->scan) ? TD_OK : syntax(p, "metadata");
    if (!name.plain || name.n_bytes == 0 || name.n_bytes > NAME_BYTES_MAX)
        return td_fail(p->err, TD_EUNSUPPORTED,
                       "%s: header: tensor name at byte %zu is empty, longer than %d bytes or not printable ASCII",
                       p->file, (size_t)(name.data - p->scan.begin), NAME_BYTES_MAX);
    td_tensor *tensor = push(p);
    if (!tensor || !(tensor->name = td_arena_strndup(p->arena, name.data, name.n_bytes)))
        return td_fail(p->err, TD_ENOMEM, "%s: out of memory after %zu tensors", p->file, p->n);
    return parse_tensor(p, tensor);
}

static td_status parse_entries(parser *p)
{
    if (!td_scan_char(&p->scan, '{')) return syntax(p, "'{'");
    if (!td_scan_char(&p->scan, '}')) {
        do {
            td_status status = parse_entry(p);
            if (status) return status;
        } while (td_scan_char(&p->scan, ','));
        if (!td_scan_char(&p->scan, '}')) return syntax(p, "',' or '}'");
    }
    return td_scan_end(&p->scan) ? TD_OK : syntax(p, "the end");
}

static int by_offset(const void *a, const void *b)
{
    const td_tensor *x = *(const td_tensor *const *)a, *y = *(const td_tensor *const *)b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return (x->n_bytes > y->n_bytes) - (x->n_bytes < y->n_bytes); /* an empty tensor lies before a full one */
}

static td_status check_overlap(const parser *p)
{
    const td_tensor **order = (const td_tensor **)malloc((p->n ? p->n : 1) * sizeof *order);
    if (!order) return td_fail(p->err, TD_ENOMEM, "%s: out of memory", p->file);
    for (size_t i = 0; i < p->n; i++) order[i] = &p->items[i];
    qsort(order, p->n, sizeof *order, by_offset);
    td_status status = TD_OK;
    for (size_t i = 1; i < p->n && !status; i++)
        if (order[i]->offset - order[i - 1]->offset < order[i - 1]->n_bytes)
            status = td_fail(p->err, TD_EFORMAT, "%s: tensors %s and %s overlap", p->file, order[i - 1]->name,
                             order[i]->name);
    free(order);
    return status;
}

td_status td_safetensors_parse(const char *name, const void *head, size_t head_bytes, uint64_t file_bytes,
                               td_arena *arena, td_tensor_list *out, td_error *err)
{
    const unsigned char *bytes = (const unsigned char *)head;
    if (head_bytes < 8 || file_bytes < 8)
        return td_fail(err, TD_EFORMAT, "%s: shorter than the 8 bytes of a header length", name);
    uint64_t header = 0;
    for (int i = 7; i >= 0; i--) header = header << 8 | bytes[i];
    if (header > HEADER_BYTES_MAX)
        return td_fail(err, TD_EFORMAT, "%s: header of %llu bytes, at most %llu are read: not a safetensors file?",
                       name, (unsigned long long)header, (unsigned long long)HEADER_BYTES_MAX);
    if (header > head_bytes - 8 || header > file_bytes - 8)
        return td_fail(err, TD_EFORMAT, "%s: header of %llu bytes reaches past the end: a partial download?", name,
                       (unsigned long long)header);
    const char *text = (const char *)bytes + 8;
    parser p = { .file = name,
                 .scan = { text, text, text + header },
                 .data_begin = 8 + header,
                 .file_bytes = file_bytes,
                 .arena = arena,
                 .err = err };
    td_status status = parse_entries(&p);
    if (!status) status = check_overlap(&p);
    if (!status) {
        td_tensor *items = (td_tensor *)td_arena_take(arena, p.n * sizeof *items, _Alignof(td_tensor));
        if (items && p.n) memcpy(items, p.items, p.n * sizeof *items);
        if (items || p.n == 0)
            *out = (td_tensor_list){ items, p.n };
        else
            status = td_fail(err, TD_ENOMEM, "%s: out of memory for %zu tensors", name, p.n);
    }
    free(p.items);
    return status;
}

/* --- index --- */

typedef struct index_parser {
    const char *file;
    td_scan scan;
    td_index_visit *visit;
    void *user;
    uint64_t total_bytes;
    td_error *err;
} index_parser;

static td_status index_syntax(const index_parser *p, const char *expected)
{
    return td_fail(p->err, TD_EFORMAT, "%s: %s expected at byte %zu", p->file, expected,
                   (size_t)(p->scan.at - p->scan.begin));
}

static td_status parse_weight_map(index_parser *p)
{
    if (!td_scan_char(&p->scan, '{')) return index_syntax(p, "an object for weight_map");
    if (td_scan_char(&p->scan, '}')) return TD_OK;
    do {
        td_scan_text tensor, file;
        if (!td_scan_string(&p->scan, &tensor) || !td_scan_char(&p->scan, ':') || !td_scan_string(&p->scan, &file))
            return index_syntax(p, "\"tensor\": \"file\"");
        if (!tensor.plain || !file.plain)
            return td_fail(p->err, TD_EUNSUPPORTED, "%s: weight_map: name at byte %zu is not printable ASCII", p->file,
                           (size_t)(tensor.data - p->scan.begin));
        td_status status = p->visit(p->user, tensor.data, tensor.n_bytes, file.data, file.n_bytes, p->err);
        if (status) return status;
    } while (td_scan_char(&p->scan, ','));
    return td_scan_char(&p->scan, '}') ? TD_OK : index_syntax(p, "',' or '}'");
}

/* total_size is only shown and compared: one that is not a plain integer counts as absent. */
static td_status parse_metadata(index_parser *p)
{
    if (!td_scan_char(&p->scan, '{')) return td_scan_skip(&p->scan) ? TD_OK : index_syntax(p, "metadata");
    if (td_scan_char(&p->scan, '}')) return TD_OK;
    do {
        td_scan_text key;
        if (!td_scan_string(&p->scan, &key) || !td_scan_char(&p->scan, ':')) return index_syntax(p, "a field");
        td_scan before = p->scan;
        if (td_scan_is(key, "total_size", 10) && td_scan_u64(&p->scan, &p->total_bytes)) continue;
        p->scan = before;
        if (!td_scan_skip(&p->scan)) return index_syntax(p, "a value");
    } while (td_scan_char(&p->scan, ','));
    return td_scan_char(&p->scan, '}') ? TD_OK : index_syntax(p, "',' or '}'");
}

td_status td_safetensors_index_parse(const char *name, const void *json, size_t n_bytes, td_index_visit *visit,
                                     void *user, uint64_t *total_bytes, td_error *err)
{
    const char *text = (const char *)json;
    index_parser p = { .file = name, .scan = { text, text, text + n_bytes }, .visit = visit, .user = user, .err = err };
    bool has_map = false;
    if (!td_scan_char(&p.scan, '{')) return index_syntax(&p, "'{'");
    do {
        td_scan_text key;
        if (!td_scan_string(&p.scan, &key) || !td_scan_char(&p.scan, ':')) return index_syntax(&p, "a field");
        td_status status;
        if (td_scan_is(key, "weight_map", 10)) {
            if (has_map) return td_fail(err, TD_EFORMAT, "%s: weight_map stands twice", name);
            has_map = true;
            status = parse_weight_map(&p);
        } else if (td_scan_is(key, "metadata", 8)) {
            status = parse_metadata(&p);
        } else {
            status = td_scan_skip(&p.scan) ? TD_OK : index_syntax(&p, "a value");
        }
        if (status) return status;
    } while (td_scan_char(&p.scan, ','));
    if (!td_scan_char(&p.scan, '}') || !td_scan_end(&p.scan)) return index_syntax(&p, "the end");
    if (!has_map) return td_fail(err, TD_EFORMAT, "%s: weight_map is missing", name);
    *total_bytes = p.total_bytes;
    return TD_OK;
}
