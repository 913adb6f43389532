/* Opening a checkpoint folder. The published one has 83 files and 150,226 tensors, and a start must not wait for it:
 * headers are scanned in place in the mapping, names are copied once into an arena, lookups go through one hash table.
 * The index is a cross-check, not a source: what a shard's own header says is what counts, but every name that the
 * index lists must be in the file that it lists. Measured on a synthetic folder of that size: docs/checkpoint.md. */
#include "checkpoint/checkpoint.h"

#include "base/hash.h"
#include "checkpoint/shapes.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILES_MAX        4096
#define CACHE_KEPT_BYTES ((uint64_t)4 << 30) /* a folder up to this size stays in the page cache for the next start */
#define INDEX_BYTES_MAX  ((uint64_t)256 << 20)
#define INDEX_NAME       "model.safetensors.index.json"
#define SUFFIX           ".safetensors"

typedef struct mapped_file {
    const char *name; /* inside the folder */
    int fd;           /* -1: not open */
    void *base;       /* NULL: not mapped */
    size_t n_bytes;
    td_tensor_list list;
} mapped_file;

typedef struct name_slot {
    uint32_t hash;
    uint32_t number; /* of the tensor + 1; 0: free */
} name_slot;

struct td_checkpoint {
    td_arena arena;
    const char *dir;
    td_config config;
    bool has_config;
    td_values values; /* a checkpoint of shapes: what is taken for its data */
    bool has_values;
    mapped_file *files;
    int n_files, files_cap;
    td_tensor *tensors;
    size_t n_tensors;
    name_slot *slots; /* open addressing, a power of two, at most half full */
    size_t n_slots;
    uint64_t data_bytes, index_bytes;
};

/* --- files --- */

static td_status no_memory(td_error *err, const td_checkpoint *ck)
{
    return td_fail(err, TD_ENOMEM, "%s: out of memory for the tensor table", ck->dir);
}

static td_status system_error(td_error *err, const td_checkpoint *ck, const char *name)
{
    return td_fail(err, errno == ENOENT ? TD_ENOTFOUND : TD_EIO, "%s/%s: %s", ck->dir, name, strerror(errno));
}

/* Opens and maps one file of the folder, read-only. */
static td_status map_file(const td_checkpoint *ck, mapped_file *file, td_error *err)
{
    char path[4096];
    struct stat info;
    int n = snprintf(path, sizeof path, "%s/%s", ck->dir, file->name);
    if (n < 0 || (size_t)n >= sizeof path) return td_fail(err, TD_EINVAL, "path too long: %.64s...", path);
    file->fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not stop the start */
    if (file->fd < 0 || fstat(file->fd, &info) != 0) return system_error(err, ck, file->name);
    if (!S_ISREG(info.st_mode)) return td_fail(err, TD_EFORMAT, "%s: not a regular file", path);
    if (info.st_size == 0) return td_fail(err, TD_EFORMAT, "%s: empty", path);
    void *base = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, file->fd, 0);
    if (base == MAP_FAILED) return system_error(err, ck, file->name);
    file->base = base;
    file->n_bytes = (size_t)info.st_size;
    return TD_OK;
}

static void unmap_file(mapped_file *file)
{
    if (file->base) munmap(file->base, file->n_bytes);
    if (file->fd >= 0) close(file->fd);
    file->base = NULL;
    file->fd = -1;
}

static int find_file(const td_checkpoint *ck, const char *name, size_t n_bytes)
{
    for (int i = ck->n_files - 1; i >= 0; i--) /* newest first: an index lists one file's tensors mostly together */
        if (strncmp(ck->files[i].name, name, n_bytes) == 0 && ck->files[i].name[n_bytes] == '\0') return i;
    return -1;
}

static td_status add_file(td_checkpoint *ck, const char *name, size_t n_bytes, td_error *err)
{
    if (ck->n_files == FILES_MAX)
        return td_fail(err, TD_EUNSUPPORTED, "%s: more than %d safetensors files", ck->dir, FILES_MAX);
    if (ck->n_files == ck->files_cap) {
        int cap = ck->files_cap ? 2 * ck->files_cap : 64;
        mapped_file *grown = (mapped_file *)realloc(ck->files, (size_t)cap * sizeof *grown);
        if (!grown) return no_memory(err, ck);
        ck->files = grown;
        ck->files_cap = cap;
    }
    char *copy = td_arena_strndup(&ck->arena, name, n_bytes);
    if (!copy) return no_memory(err, ck);
    ck->files[ck->n_files++] = (mapped_file){ .name = copy, .fd = -1 };
    return TD_OK;
}

/* A plain name of a shard: nothing that could leave the folder. */
static bool is_shard_name(const char *name, size_t n_bytes)
{
    size_t suffix = strlen(SUFFIX);
    return n_bytes > suffix && n_bytes < 256 && name[0] != '.' && !memchr(name, '/', n_bytes) &&
           !memchr(name, '\\', n_bytes) && memcmp(name + n_bytes - suffix, SUFFIX, suffix) == 0;
}

static int by_file_name(const void *a, const void *b)
{
    return strcmp(((const mapped_file *)a)->name, ((const mapped_file *)b)->name);
}

static td_status list_folder(td_checkpoint *ck, td_error *err)
{
    DIR *dir = opendir(ck->dir);
    if (!dir) return td_fail(err, errno == ENOENT ? TD_ENOTFOUND : TD_EIO, "%s: %s", ck->dir, strerror(errno));
    td_status status = TD_OK;
    for (struct dirent *entry; !status && (entry = readdir(dir));) {
        size_t n_bytes = strlen(entry->d_name);
        if (is_shard_name(entry->d_name, n_bytes)) status = add_file(ck, entry->d_name, n_bytes, err);
    }
    closedir(dir);
    return status;
}

/* --- the tensor table --- */

static uint32_t hash_name(const char *name, size_t n_bytes)
{
    uint64_t hash = td_fnv1a(TD_FNV1A_START, name, n_bytes);
    return (uint32_t)(hash ^ hash >> 32);
}

/* The slot that holds name, or the free one where it belongs. */
static name_slot *find_slot(const td_checkpoint *ck, const char *name, size_t n_bytes, uint32_t hash)
{
    size_t mask = ck->n_slots - 1, i = hash & mask;
    for (;; i = (i + 1) & mask) {
        name_slot *slot = &ck->slots[i];
        if (slot->number == 0) return slot;
        if (slot->hash != hash) continue;
        const char *other = ck->tensors[slot->number - 1].name;
        if (strncmp(other, name, n_bytes) == 0 && other[n_bytes] == '\0') return slot;
    }
}

static td_tensor *find_tensor(const td_checkpoint *ck, const char *name, size_t n_bytes)
{
    const name_slot *slot = find_slot(ck, name, n_bytes, hash_name(name, n_bytes));
    return slot->number ? &ck->tensors[slot->number - 1] : NULL;
}

static td_status insert(td_checkpoint *ck, const td_tensor *tensor, td_error *err)
{
    size_t n_bytes = strlen(tensor->name);
    uint32_t hash = hash_name(tensor->name, n_bytes);
    name_slot *slot = find_slot(ck, tensor->name, n_bytes, hash);
    if (slot->number)
        return td_fail(err, TD_EFORMAT, "%s: tensor %s stands twice: in %s and in %s", ck->dir, tensor->name,
                       ck->files[ck->tensors[slot->number - 1].file].name, ck->files[tensor->file].name);
    ck->tensors[ck->n_tensors++] = *tensor;
    *slot = (name_slot){ hash, (uint32_t)ck->n_tensors };
    ck->data_bytes += tensor->n_bytes;
    return TD_OK;
}

static td_status build_table(td_checkpoint *ck, td_error *err)
{
    size_t n = 0;
    for (int i = 0; i < ck->n_files; i++) n += ck->files[i].list.n;
    if (n >= UINT32_MAX / 2) return td_fail(err, TD_EUNSUPPORTED, "%s: %zu tensors are too many", ck->dir, n);
    for (ck->n_slots = 16; ck->n_slots < 2 * n;) ck->n_slots *= 2;
    ck->slots = (name_slot *)td_arena_take(&ck->arena, ck->n_slots * sizeof *ck->slots, _Alignof(name_slot));
    ck->tensors = (td_tensor *)td_arena_take(&ck->arena, (n + 1) * sizeof *ck->tensors, _Alignof(td_tensor));
    if (!ck->slots || !ck->tensors) return no_memory(err, ck);
    for (int i = 0; i < ck->n_files; i++) {
        const mapped_file *file = &ck->files[i];
        for (size_t t = 0; t < file->list.n; t++) {
            td_tensor tensor = file->list.items[t];
            tensor.file = i;
            if (file->base) tensor.data = (const unsigned char *)file->base + tensor.offset;
            td_status status = insert(ck, &tensor, err);
            if (status) return status;
        }
    }
    return TD_OK;
}

/* --- the index --- */

typedef struct index_check {
    td_checkpoint *ck;
    bool *listed; /* by tensor number; NULL in the first pass, which only collects files */
} index_check;

static td_status collect_file(void *user, const char *tensor, size_t tensor_bytes, const char *file, size_t file_bytes,
                              td_error *err)
{
    td_checkpoint *ck = ((index_check *)user)->ck;
    if (!is_shard_name(file, file_bytes))
        return td_fail(err, TD_EUNSUPPORTED,
                       "%s/" INDEX_NAME ": tensor %.*s: file \"%.*s\" is not a plain name ending in " SUFFIX, ck->dir,
                       (int)(tensor_bytes < 256 ? tensor_bytes : 256), tensor,
                       (int)(file_bytes < 256 ? file_bytes : 256), file);
    return find_file(ck, file, file_bytes) >= 0 ? TD_OK : add_file(ck, file, file_bytes, err);
}

static td_status check_listed(void *user, const char *name, size_t name_bytes, const char *file, size_t file_bytes,
                              td_error *err)
{
    const index_check *check = (const index_check *)user;
    const td_checkpoint *ck = check->ck;
    const td_tensor *tensor = find_tensor(ck, name, name_bytes);
    int name_shown = (int)(name_bytes < 256 ? name_bytes : 256);
    if (!tensor)
        return td_fail(err, TD_ENOTFOUND, "%s/" INDEX_NAME ": tensor %.*s: not in %.*s", ck->dir, name_shown, name,
                       (int)file_bytes, file);
    const char *found = ck->files[tensor->file].name;
    if (strncmp(found, file, file_bytes) != 0 || found[file_bytes] != '\0')
        return td_fail(err, TD_EFORMAT, "%s/" INDEX_NAME ": tensor %.*s: listed in %.*s, found in %s", ck->dir,
                       name_shown, name, (int)file_bytes, file, found);
    if (check->listed[tensor - ck->tensors])
        return td_fail(err, TD_EFORMAT, "%s/" INDEX_NAME ": tensor %.*s stands twice", ck->dir, name_shown, name);
    check->listed[tensor - ck->tensors] = true;
    return TD_OK;
}

static td_status parse_index(td_checkpoint *ck, const mapped_file *index, td_index_visit *visit, bool *listed,
                             td_error *err)
{
    char name[4096];
    index_check check = { ck, listed };
    snprintf(name, sizeof name, "%s/" INDEX_NAME, ck->dir);
    return td_safetensors_index_parse(name, index->base, index->n_bytes, visit, &check, &ck->index_bytes, err);
}

/* --- opening --- */

static td_status parse_files(td_checkpoint *ck, td_error *err)
{
    if (ck->n_files == 0) return td_fail(err, TD_ENOTFOUND, "%s: no " SUFFIX " file", ck->dir);
    qsort(ck->files, (size_t)ck->n_files, sizeof *ck->files, by_file_name);
    for (int i = 0; i < ck->n_files; i++) {
        char name[4096];
        mapped_file *file = &ck->files[i];
        td_status status = map_file(ck, file, err);
        if (status) return status;
        snprintf(name, sizeof name, "%s/%s", ck->dir, file->name);
        status = td_safetensors_parse(name, file->base, file->n_bytes, file->n_bytes, &ck->arena, &file->list, err);
        if (status) return status;
    }
    return build_table(ck, err);
}

static td_status open_with_index(td_checkpoint *ck, const mapped_file *index, td_error *err)
{
    if (index->n_bytes > INDEX_BYTES_MAX)
        return td_fail(err, TD_EUNSUPPORTED, "%s/" INDEX_NAME ": larger than %llu MB", ck->dir,
                       (unsigned long long)(INDEX_BYTES_MAX >> 20));
    td_status status = parse_index(ck, index, collect_file, NULL, err);
    if (!status) status = parse_files(ck, err);
    if (status) return status;
    bool *listed = (bool *)calloc(ck->n_tensors + 1, sizeof *listed);
    if (!listed) return no_memory(err, ck);
    status = parse_index(ck, index, check_listed, listed, err);
    free(listed);
    return status;
}

static td_status open_files(td_checkpoint *ck, td_error *err)
{
    mapped_file index = { .name = INDEX_NAME, .fd = -1 };
    td_error reason;
    td_status status = map_file(ck, &index, &reason);
    if (status == TD_OK) {
        status = open_with_index(ck, &index, err);
    } else if (status == TD_ENOTFOUND) {
        status = list_folder(ck, err);
        if (!status) status = parse_files(ck, err);
    } else {
        td_fail(err, status, "%s", reason.text);
    }
    unmap_file(&index);
    return status;
}

/* Advice, as below: whether the system takes it changes nothing but memory. */
static void unmap_pages(const td_checkpoint *ck)
{
    for (int i = 0; i < ck->n_files; i++)
        if (ck->files[i].base) madvise(ck->files[i].base, ck->files[i].n_bytes, MADV_DONTNEED);
}

static td_status open_folder(const char *dir, bool with_config, td_checkpoint **out, td_error *err)
{
    td_checkpoint *ck = (td_checkpoint *)calloc(1, sizeof *ck);
    if (!ck) return td_fail(err, TD_ENOMEM, "%s: out of memory", dir);
    td_arena_init(&ck->arena, 0);
    td_status status = TD_OK;
    ck->dir = td_arena_strdup(&ck->arena, dir);
    if (!ck->dir) status = td_fail(err, TD_ENOMEM, "%s: out of memory", dir);
    if (!status && with_config) status = td_config_load(dir, &ck->config, err);
    ck->has_config = with_config;
    if (!status) status = open_files(ck, err);
    if (status) {
        td_checkpoint_close(ck);
        return status;
    }
    unmap_pages(ck); /* the headers' */
    *out = ck;
    return TD_OK;
}

td_status td_checkpoint_open(const char *dir, td_checkpoint **out, td_error *err)
{
    return open_folder(dir, true, out, err);
}

td_status td_checkpoint_open_tensors(const char *dir, td_checkpoint **out, td_error *err)
{
    return open_folder(dir, false, out, err);
}

td_status td_checkpoint_of_list(const char *name, const td_config *config, td_arena *arena, const td_tensor_list *list,
                                const td_values *values, td_checkpoint **out, td_error *err)
{
    td_checkpoint *ck = (td_checkpoint *)calloc(1, sizeof *ck);
    if (!ck) {
        td_arena_deinit(arena);
        return td_fail(err, TD_ENOMEM, "%s: out of memory", name);
    }
    *ck = (td_checkpoint){ .arena = *arena, .dir = name, .config = *config, .has_config = true };
    if (values) {
        ck->values = *values;
        ck->has_values = true;
    }
    td_status status = add_file(ck, "shapes", 6, err);
    if (!status) {
        ck->files[0].list = *list;
        status = build_table(ck, err);
    }
    if (status) {
        td_checkpoint_close(ck);
        return status;
    }
    *out = ck;
    return TD_OK;
}

const td_values *td_checkpoint_values(const td_checkpoint *ck)
{
    return ck->has_values ? &ck->values : NULL;
}

void td_checkpoint_close(td_checkpoint *ck)
{
    if (!ck) return;
    for (int i = 0; i < ck->n_files; i++) unmap_file(&ck->files[i]);
    free(ck->files);
    td_arena_deinit(&ck->arena);
    free(ck);
}

void td_checkpoint_release_pages(const td_checkpoint *ck)
{
    unmap_pages(ck);
    if (ck->data_bytes <= CACHE_KEPT_BYTES) return;
    for (int i = 0; i < ck->n_files; i++)
        if (ck->files[i].base) posix_fadvise(ck->files[i].fd, 0, 0, POSIX_FADV_DONTNEED);
}

/* --- lookups --- */

const char *td_checkpoint_dir(const td_checkpoint *ck)
{
    return ck->dir;
}

const td_config *td_checkpoint_config(const td_checkpoint *ck)
{
    return ck->has_config ? &ck->config : NULL;
}

const td_tensor *td_checkpoint_find(const td_checkpoint *ck, const char *name)
{
    return find_tensor(ck, name, strlen(name));
}

size_t td_checkpoint_count(const td_checkpoint *ck)
{
    return ck->n_tensors;
}

const td_tensor *td_checkpoint_at(const td_checkpoint *ck, size_t i)
{
    return i < ck->n_tensors ? &ck->tensors[i] : NULL;
}

int td_checkpoint_n_files(const td_checkpoint *ck)
{
    return ck->n_files;
}

const char *td_checkpoint_file_name(const td_checkpoint *ck, int file)
{
    return file >= 0 && file < ck->n_files ? ck->files[file].name : NULL;
}

uint64_t td_checkpoint_data_bytes(const td_checkpoint *ck)
{
    return ck->data_bytes;
}

uint64_t td_checkpoint_index_bytes(const td_checkpoint *ck)
{
    return ck->index_bytes;
}

/* Equal but for dimensions of 1, which differ between exporters. */
static bool same_shape(const td_tensor *tensor, int rank, const int64_t *shape)
{
    int a = 0, b = 0;
    for (;;) {
        while (a < tensor->rank && tensor->shape[a] == 1) a++;
        while (b < rank && shape[b] == 1) b++;
        if (a == tensor->rank || b == rank) return a == tensor->rank && b == rank;
        if (tensor->shape[a++] != shape[b++]) return false;
    }
}

static const char *dtypes_text(unsigned dtypes, char *text, size_t cap)
{
    text[0] = '\0';
    for (int d = 0; d < TD_DTYPE_COUNT; d++) {
        if (!(dtypes & TD_DTYPE_BIT(d))) continue;
        size_t at = strlen(text);
        snprintf(text + at, cap - at, "%s%s", at ? " or " : "", td_dtype_name((td_dtype)d));
    }
    return text;
}

td_status td_checkpoint_require(const td_checkpoint *ck, const char *name, unsigned dtypes, int rank,
                                const int64_t *shape, const td_tensor **out, td_error *err)
{
    char found[TD_SHAPE_TEXT_CAP], wanted[TD_SHAPE_TEXT_CAP], allowed[128];
    const td_tensor *tensor = td_checkpoint_find(ck, name);
    if (!tensor)
        return td_fail(err, TD_ENOTFOUND, "%s: tensor %s is missing, expected %s", ck->dir, name,
                       td_shape_text(rank, shape, wanted));
    const char *file = ck->files[tensor->file].name;
    if (!same_shape(tensor, rank, shape))
        return td_fail(err, TD_EFORMAT, "%s/%s: tensor %s: shape %s, expected %s", ck->dir, file, name,
                       td_shape_text(tensor->rank, tensor->shape, found), td_shape_text(rank, shape, wanted));
    if (!(dtypes & TD_DTYPE_BIT(tensor->dtype)))
        return td_fail(err, TD_EFORMAT, "%s/%s: tensor %s: dtype %s, expected %s", ck->dir, file, name,
                       td_dtype_name(tensor->dtype), dtypes_text(dtypes, allowed, sizeof allowed));
    *out = tensor;
    return TD_OK;
}

td_status td_checkpoint_require_layer(const td_checkpoint *ck, int layer, const char *suffix, unsigned dtypes, int rank,
                                      const int64_t *shape, const td_tensor **out, td_error *err)
{
    char name[256];
    int n = snprintf(name, sizeof name, "model.language_model.layers.%d.%s", layer, suffix);
    if (n < 0 || (size_t)n >= sizeof name) return td_fail(err, TD_EINVAL, "tensor name too long: %.64s...", suffix);
    return td_checkpoint_require(ck, name, dtypes, rank, shape, out, err);
}

/* --- conversion --- */

static td_status check_elements(const td_tensor *tensor, int64_t first, int64_t n, td_error *err)
{
    int64_t total = td_tensor_n_elements(tensor);
    if (first < 0 || n < 0 || first > total || n > total - first)
        return td_fail(err, TD_EINVAL, "tensor %s: %lld elements from element %lld on, it has %lld", tensor->name,
                       (long long)n, (long long)first, (long long)total);
    if (!(TD_DTYPE_BIT(tensor->dtype) & TD_ANY_FLOATS))
        return td_fail(err, TD_EUNSUPPORTED, "tensor %s: %s is not BF16, F16 or F32", tensor->name,
                       td_dtype_name(tensor->dtype));
    return TD_OK;
}

td_status td_tensor_to_f32(const td_tensor *tensor, int64_t first, int64_t n, float *out, td_error *err)
{
    td_status status = check_elements(tensor, first, n, err);
    if (status) return status;
    const uint16_t *half = (const uint16_t *)tensor->data + first;
    switch (tensor->dtype) {
    case TD_DTYPE_F32: memcpy(out, (const float *)tensor->data + first, (size_t)n * sizeof *out); break;
    case TD_DTYPE_F16:
        for (int64_t i = 0; i < n; i++) out[i] = td_f16_f32(half[i]);
        break;
    default:
        for (int64_t i = 0; i < n; i++) out[i] = td_bf16_f32(half[i]);
    }
    return TD_OK;
}

td_status td_tensor_to_bf16(const td_tensor *tensor, int64_t first, int64_t n, td_bf16 *out, td_error *err)
{
    td_status status = check_elements(tensor, first, n, err);
    if (status) return status;
    const uint16_t *half = (const uint16_t *)tensor->data + first;
    const float *full = (const float *)tensor->data + first;
    switch (tensor->dtype) {
    case TD_DTYPE_BF16: memcpy(out, half, (size_t)n * sizeof *out); break;
    case TD_DTYPE_F16:
        for (int64_t i = 0; i < n; i++) out[i] = td_f32_bf16(td_f16_f32(half[i]));
        break;
    default:
        for (int64_t i = 0; i < n; i++) out[i] = td_f32_bf16(full[i]);
    }
    return TD_OK;
}
