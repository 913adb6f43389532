/* Writing a checkpoint. All tensors are declared before the first byte, so every header is known when its file is
 * created and data can stream through in one pass; nothing but the declarations is held in memory. */
#include "checkpoint/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NAME_BYTES_MAX 512

typedef struct declared {
    const char *name;
    td_dtype dtype;
    int rank;
    int64_t shape[TD_RANK_MAX];
    uint64_t n_bytes;
    int shard;
} declared;

struct td_safetensors_writer {
    td_arena arena;
    const char *dir;
    uint64_t shard_bytes_max;
    declared *tensors;
    size_t n, cap;
    int n_shards; /* 0: not begun */

    FILE *file;          /* of the shard that is being written */
    int shard;           /* ... */
    int n_complete;      /* shards whose .part is whole */
    size_t tensor;       /* the one that is being written */
    uint64_t left_bytes; /* of it */
    uint64_t total_bytes;
    bool finished;
};

td_status td_safetensors_writer_create(const char *dir, uint64_t shard_bytes_max, td_safetensors_writer **out,
                                       td_error *err)
{
    td_safetensors_writer *w = (td_safetensors_writer *)calloc(1, sizeof *w);
    if (!w) return td_fail(err, TD_ENOMEM, "%s: out of memory", dir);
    td_arena_init(&w->arena, 0);
    w->dir = td_arena_strdup(&w->arena, dir);
    w->shard_bytes_max = shard_bytes_max;
    if (!w->dir) {
        td_safetensors_writer_destroy(w);
        return td_fail(err, TD_ENOMEM, "%s: out of memory", dir);
    }
    *out = w;
    return TD_OK;
}

/* Names go into JSON as they are. */
static bool is_plain(const char *name)
{
    for (const char *c = name; *c; c++)
        if (*c < 0x20 || *c > 0x7e || *c == '"' || *c == '\\') return false;
    return *name != '\0';
}

td_status td_safetensors_writer_declare(td_safetensors_writer *w, const char *name, td_dtype dtype, int rank,
                                        const int64_t *shape, td_error *err)
{
    if (w->n_shards) return td_fail(err, TD_EINVAL, "%s: tensor %s: declared after begin", w->dir, name);
    if (!is_plain(name) || strlen(name) > NAME_BYTES_MAX)
        return td_fail(err, TD_EINVAL, "%s: tensor name is empty, too long or not printable ASCII", w->dir);
    if (rank < 0 || rank > TD_RANK_MAX) return td_fail(err, TD_EINVAL, "%s: tensor %s: rank %d", w->dir, name, rank);
    declared d = { .dtype = dtype, .rank = rank, .n_bytes = (uint64_t)td_dtype_bytes(dtype) };
    for (int i = 0; i < rank; i++) {
        d.shape[i] = shape[i];
        if (shape[i] < 0 || __builtin_mul_overflow(d.n_bytes, (uint64_t)shape[i], &d.n_bytes))
            return td_fail(err, TD_EINVAL, "%s: tensor %s: bad shape", w->dir, name);
    }
    if (w->n == w->cap) {
        size_t cap = w->cap ? 2 * w->cap : 256;
        declared *grown = (declared *)realloc(w->tensors, cap * sizeof *grown);
        if (!grown) return td_fail(err, TD_ENOMEM, "%s: out of memory", w->dir);
        w->tensors = grown;
        w->cap = cap;
    }
    d.name = td_arena_strdup(&w->arena, name);
    if (!d.name) return td_fail(err, TD_ENOMEM, "%s: out of memory", w->dir);
    w->tensors[w->n++] = d;
    return TD_OK;
}

/* --- files --- */

enum { PATH_CAP = 4096 };

static void shard_name(const td_safetensors_writer *w, int shard, char *name, size_t cap)
{
    if (w->n_shards == 1)
        snprintf(name, cap, "model.safetensors");
    else
        snprintf(name, cap, "model-%05d-of-%05d.safetensors", shard + 1, w->n_shards);
}

static void shard_path(const td_safetensors_writer *w, int shard, const char *suffix, char path[PATH_CAP])
{
    char name[64];
    shard_name(w, shard, name, sizeof name);
    snprintf(path, PATH_CAP, "%s/%s%s", w->dir, name, suffix);
}

static td_status io_error(const td_safetensors_writer *w, const char *what, td_error *err)
{
    return td_fail(err, TD_EIO, "%s: %s: %s", w->dir, what, strerror(errno));
}

/* The header of one shard; with out == NULL only its length. */
static size_t write_header(const td_safetensors_writer *w, int shard, FILE *out)
{
    uint64_t at = 0;
    bool first = true;
    size_t n_bytes = 0;
    char text[1024], shape[TD_SHAPE_TEXT_CAP];
    for (size_t i = 0; i < w->n; i++) {
        const declared *d = &w->tensors[i];
        if (d->shard != shard) continue;
        int n = snprintf(text, sizeof text, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%llu,%llu]}",
                         first ? "{\"__metadata__\":{\"format\":\"pt\"}," : ",", d->name, td_dtype_name(d->dtype),
                         td_shape_text(d->rank, d->shape, shape), (unsigned long long)at,
                         (unsigned long long)(at + d->n_bytes));
        n_bytes += (size_t)n;
        if (out) fwrite(text, 1, (size_t)n, out);
        at += d->n_bytes;
        first = false;
    }
    size_t padding = 8 - (n_bytes + 1) % 8; /* of '}' and spaces: data starts at a multiple of 8 */
    if (out) fprintf(out, "}%.*s", (int)padding, "        ");
    return n_bytes + 1 + padding;
}

static td_status open_shard(td_safetensors_writer *w, int shard, td_error *err)
{
    char path[PATH_CAP];
    shard_path(w, shard, ".part", path);
    w->file = fopen(path, "wbe");
    if (!w->file) return io_error(w, "create", err);
    w->shard = shard;
    uint64_t n_bytes = write_header(w, shard, NULL);
    unsigned char length[8];
    for (int i = 0; i < 8; i++) length[i] = (unsigned char)(n_bytes >> 8 * i);
    fwrite(length, 1, 8, w->file);
    write_header(w, shard, w->file);
    return ferror(w->file) ? io_error(w, path, err) : TD_OK;
}

static td_status close_shard(td_safetensors_writer *w, td_error *err)
{
    FILE *file = w->file;
    w->file = NULL;
    bool ok = fflush(file) == 0 && fsync(fileno(file)) == 0;
    ok = fclose(file) == 0 && ok;
    if (!ok) return io_error(w, "write", err);
    w->n_complete++;
    return TD_OK;
}

/* Moves past complete tensors (and those without bytes): closes and opens files as the plan says. */
static td_status advance(td_safetensors_writer *w, td_error *err)
{
    while (w->left_bytes == 0) {
        if (++w->tensor >= w->n) return w->file ? close_shard(w, err) : TD_OK;
        const declared *d = &w->tensors[w->tensor];
        w->left_bytes = d->n_bytes;
        if (d->shard == w->shard) continue;
        td_status status = close_shard(w, err);
        if (!status) status = open_shard(w, d->shard, err);
        if (status) return status;
    }
    return TD_OK;
}

/* Whole tensors into shards; every offset must suit its dtype, since a header cannot hold gaps. */
static td_status plan_shards(td_safetensors_writer *w, td_error *err)
{
    uint64_t at = 0;
    int shard = 0;
    for (size_t i = 0; i < w->n; i++) {
        declared *d = &w->tensors[i];
        if (at > 0 && (d->n_bytes > w->shard_bytes_max || at > w->shard_bytes_max - d->n_bytes)) {
            at = 0;
            shard++;
        }
        if (at % (uint64_t)td_dtype_bytes(d->dtype) != 0)
            return td_fail(err, TD_EINVAL, "%s: tensor %s: would not be aligned; declare wide dtypes first", w->dir,
                           d->name);
        d->shard = shard;
        at += d->n_bytes;
        w->total_bytes += d->n_bytes;
    }
    if (shard >= 99999) return td_fail(err, TD_EINVAL, "%s: too many shards", w->dir);
    w->n_shards = shard + 1;
    return TD_OK;
}

td_status td_safetensors_writer_begin(td_safetensors_writer *w, td_error *err)
{
    if (w->n_shards) return td_fail(err, TD_EINVAL, "%s: begun twice", w->dir);
    if (w->n == 0) return td_fail(err, TD_EINVAL, "%s: no tensors", w->dir);
    td_status status = plan_shards(w, err);
    if (!status) status = open_shard(w, 0, err);
    if (status) return status;
    w->left_bytes = w->tensors[0].n_bytes;
    return advance(w, err);
}

td_status td_safetensors_writer_put(td_safetensors_writer *w, const void *data, size_t n_bytes, td_error *err)
{
    const unsigned char *from = (const unsigned char *)data;
    while (n_bytes > 0) {
        if (!w->file) return td_fail(err, TD_EINVAL, "%s: more bytes than were declared, or no begin", w->dir);
        size_t n = n_bytes < w->left_bytes ? n_bytes : (size_t)w->left_bytes;
        if (fwrite(from, 1, n, w->file) != n) return io_error(w, "write", err);
        from += n;
        n_bytes -= n;
        w->left_bytes -= n;
        td_status status = advance(w, err);
        if (status) return status;
    }
    return TD_OK;
}

static td_status write_index(const td_safetensors_writer *w, const char *path, td_error *err)
{
    char name[64];
    FILE *file = fopen(path, "wbe");
    if (!file) return io_error(w, "create the index", err);
    fprintf(file, "{\n  \"metadata\": {\n    \"total_size\": %llu\n  },\n  \"weight_map\": {",
            (unsigned long long)w->total_bytes);
    for (size_t i = 0; i < w->n; i++) {
        shard_name(w, w->tensors[i].shard, name, sizeof name);
        fprintf(file, "%s\n    \"%s\": \"%s\"", i ? "," : "", w->tensors[i].name, name);
    }
    fprintf(file, "\n  }\n}\n");
    bool ok = !ferror(file) && fflush(file) == 0 && fsync(fileno(file)) == 0;
    ok = fclose(file) == 0 && ok;
    return ok ? TD_OK : io_error(w, "write the index", err);
}

td_status td_safetensors_writer_finish(td_safetensors_writer *w, td_error *err)
{
    char part[PATH_CAP], path[PATH_CAP];
    if (w->n_shards == 0 || w->tensor < w->n)
        return td_fail(err, TD_EINVAL, "%s: tensor %s: %llu bytes were not written", w->dir,
                       w->n ? w->tensors[w->tensor < w->n ? w->tensor : 0].name : "(none)",
                       (unsigned long long)w->left_bytes);
    for (int i = 0; i < w->n_shards; i++) {
        shard_path(w, i, ".part", part);
        shard_path(w, i, "", path);
        if (rename(part, path) != 0) return io_error(w, "rename", err);
    }
    w->finished = true;
    if (w->n_shards == 1) return TD_OK;
    snprintf(part, sizeof part, "%s/model.safetensors.index.json.part", w->dir);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", w->dir);
    td_status status = write_index(w, part, err);
    if (!status && rename(part, path) != 0) status = io_error(w, "rename the index", err);
    if (status) unlink(part);
    return status;
}

void td_safetensors_writer_destroy(td_safetensors_writer *w)
{
    char path[PATH_CAP];
    if (!w) return;
    if (w->file) fclose(w->file);
    for (int i = 0; i < w->n_shards && !w->finished; i++) {
        shard_path(w, i, ".part", path);
        unlink(path);
    }
    free(w->tensors);
    td_arena_deinit(&w->arena);
    free(w);
}
