/* See checkpoint_fixture.h. Anything that fails here is the machine's fault: abort. */
#include "checkpoint_fixture.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void fx_create(fx_folder *fx)
{
    const char *tmp = getenv("TMPDIR");
    *fx = (fx_folder){ 0 };
    snprintf(fx->dir, sizeof fx->dir, "%s/td_checkpoint_XXXXXX", tmp ? tmp : "/tmp");
    td_check(mkdtemp(fx->dir));
}

void fx_destroy(fx_folder *fx)
{
    DIR *dir = opendir(fx->dir);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        char path[512];
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", fx->dir, entry->d_name);
        remove(path);
    }
    if (dir) closedir(dir);
    rmdir(fx->dir);
    free(fx->tensors);
}

fx_tensor *fx_add(fx_folder *fx, const char *name, const char *dtype, int rank, const int64_t *shape)
{
    if (fx->n == fx->cap) {
        fx->cap = fx->cap ? 2 * fx->cap : 256;
        fx->tensors = realloc(fx->tensors, fx->cap * sizeof *fx->tensors);
        td_check(fx->tensors);
    }
    fx_tensor *t = &fx->tensors[fx->n++];
    *t = (fx_tensor){ .rank = rank };
    snprintf(t->name, sizeof t->name, "%s", name);
    snprintf(t->dtype, sizeof t->dtype, "%s", dtype);
    for (int i = 0; i < rank; i++) t->shape[i] = shape[i];
    return t;
}

fx_tensor *fx_find(fx_folder *fx, const char *name)
{
    for (size_t i = 0; i < fx->n; i++)
        if (strcmp(fx->tensors[i].name, name) == 0) return &fx->tensors[i];
    td_check(!"a tensor of the fixture");
    return NULL;
}

void fx_remove(fx_folder *fx, const char *name)
{
    fx_tensor *t = fx_find(fx, name);
    *t = fx->tensors[--fx->n];
}

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

static td_status add_role(void *user, const td_role *role)
{
    static const char *const F32[] = { ".A_log", ".dt_bias", ".e_score_correction_bias", "_base", "_scale" };
    const char *dtype = "BF16";
    for (size_t i = 0; i < sizeof F32 / sizeof *F32; i++)
        if (ends_with(role->name, F32[i])) dtype = "F32";
    fx_tensor *t = fx_add(user, role->name, dtype, role->rank, role->shape);
    if (ends_with(role->name, "_conv1d.weight")) { /* [width, 1, taps] in files */
        t->rank = 3;
        t->shape[2] = t->shape[1];
        t->shape[1] = 1;
    }
    return TD_OK;
}

static void add_matrix(fx_folder *fx, const char *stem, int64_t in_dim, int64_t out_dim, int bits)
{
    static const uint32_t MCG = 0xCBAC1FED;
    char name[160];
    if (bits == 0) {
        snprintf(name, sizeof name, "%s.weight", stem);
        fx_add(fx, name, "BF16", TD_SHAPE(out_dim, in_dim));
        return;
    }
    snprintf(name, sizeof name, "%s.trellis", stem);
    fx_add(fx, name, "I16", TD_SHAPE(in_dim / 16, out_dim / 16, 16 * bits));
    snprintf(name, sizeof name, "%s.suh", stem);
    fx_add(fx, name, "F16", TD_SHAPE(in_dim));
    snprintf(name, sizeof name, "%s.svh", stem);
    fx_add(fx, name, "F16", TD_SHAPE(out_dim));
    snprintf(name, sizeof name, "%s.mcg", stem);
    fx_add(fx, name, "I32", TD_SHAPE(1))->data = fx->n < 5000 ? &MCG : NULL; /* huge folders stay sparse */
}

void fx_add_model(fx_folder *fx, const td_config *c, int bits)
{
    static const char *const PROJECTIONS[] = { "gate_proj", "up_proj", "down_proj" };
    td_roles_each(c, add_role, fx);
    for (int layer = 0; layer < c->n_layers + c->n_mtp; layer++)
        for (int e = 0; c->is_moe[layer] && e < c->n_experts; e++)
            for (int p = 0; p < 3; p++) {
                char stem[128];
                snprintf(stem, sizeof stem, "model.language_model.layers.%d.mlp.experts.%d.%s", layer, e,
                         PROJECTIONS[p]);
                add_matrix(fx, stem, p == 2 ? c->moe_intermediate : c->hidden, p == 2 ? c->hidden : c->moe_intermediate,
                           bits);
            }
    td_vision_roles_each(c, add_role, fx);
}

static FILE *create(const fx_folder *fx, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", fx->dir, name);
    FILE *file = fopen(path, "wb");
    td_check(file);
    return file;
}

static uint64_t bytes_of(const fx_tensor *t)
{
    uint64_t n = ends_with(t->dtype, "32") ? 4 : ends_with(t->dtype, "64") ? 8 : ends_with(t->dtype, "8") ? 1 : 2;
    for (int i = 0; i < t->rank; i++) n *= (uint64_t)t->shape[i];
    return n;
}

/* Where the next tensor may start: an edit may leave 6 bytes before an F32. */
static uint64_t aligned(uint64_t at)
{
    return (at + 7) / 8 * 8;
}

static void write_shard(const fx_folder *fx, const char *name, size_t first, size_t end)
{
    char *header = NULL;
    size_t n_header = 0;
    uint64_t at = 0;
    FILE *text = open_memstream(&header, &n_header);
    fprintf(text, "{\"__metadata__\": {\"format\": \"pt\"}");
    for (size_t i = first; i < end; i++) {
        const fx_tensor *t = &fx->tensors[i];
        at = aligned(at);
        fprintf(text, ", \"%s\": {\"dtype\": \"%s\", \"shape\": [", t->name, t->dtype);
        for (int d = 0; d < t->rank; d++) fprintf(text, "%s%lld", d ? ", " : "", (long long)t->shape[d]);
        fprintf(text, "], \"data_offsets\": [%llu, %llu]}", (unsigned long long)at,
                (unsigned long long)(at + bytes_of(t)));
        at += bytes_of(t);
    }
    fputc('}', text);
    fflush(text);
    while (n_header % 8) {
        fputc(' ', text);
        fflush(text);
    }
    fclose(text);
    FILE *file = create(fx, name);
    for (int i = 0; i < 8; i++) fputc((int)(n_header >> 8 * i & 255), file);
    fwrite(header, 1, n_header, file);
    free(header);
    at = 8 + n_header;
    for (size_t i = first; i < end; i++) {
        const fx_tensor *t = &fx->tensors[i];
        at = aligned(at);
        if (t->data) {
            fseeko(file, (off_t)at, SEEK_SET);
            fwrite(t->data, 1, bytes_of(t), file);
        }
        at += bytes_of(t);
    }
    fflush(file);
    td_check(ftruncate(fileno(file), (off_t)at) == 0);
    fclose(file);
}

/* As json.dumps(indent=2) writes it, which is what the published index is. */
static void write_index(const fx_folder *fx, int n_files, uint64_t total)
{
    FILE *file = create(fx, "model.safetensors.index.json");
    fprintf(file, "{\n  \"metadata\": {\n    \"total_size\": %llu\n  },\n  \"weight_map\": {\n",
            (unsigned long long)total);
    for (int f = 0; f < n_files; f++)
        for (size_t i = fx->n * (size_t)f / (size_t)n_files; i < fx->n * (size_t)(f + 1) / (size_t)n_files; i++)
            fprintf(file, "    \"%s\": \"model-%05d-of-%05d.safetensors\"%s\n", fx->tensors[i].name, f + 1, n_files,
                    i + 1 < fx->n ? "," : "");
    fprintf(file, "  }\n}\n");
    fclose(file);
}

void fx_write(fx_folder *fx, int n_files)
{
    uint64_t total = 0;
    for (size_t i = 0; i < fx->n; i++) total += bytes_of(&fx->tensors[i]);
    if (n_files == 1) {
        write_shard(fx, "model.safetensors", 0, fx->n);
        return;
    }
    for (int f = 0; f < n_files; f++) {
        char name[64];
        snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", f + 1, n_files);
        write_shard(fx, name, fx->n * (size_t)f / (size_t)n_files, fx->n * (size_t)(f + 1) / (size_t)n_files);
    }
    write_index(fx, n_files, total);
}

void fx_write_file(const fx_folder *fx, const char *name, const void *data, size_t n_bytes)
{
    FILE *file = create(fx, name);
    td_check(fwrite(data, 1, n_bytes, file) == n_bytes);
    fclose(file);
}

void fx_write_text(const fx_folder *fx, const char *name, const char *text)
{
    fx_write_file(fx, name, text, strlen(text));
}

void fx_copy_file(const fx_folder *fx, const char *from, const char *name)
{
    char text[16384];
    FILE *file = fopen(from, "rb");
    td_check(file);
    size_t n = fread(text, 1, sizeof text, file);
    fclose(file);
    fx_write_file(fx, name, text, n);
}

size_t fx_file_bytes(const fx_folder *fx, const char *name)
{
    char path[512];
    struct stat info;
    snprintf(path, sizeof path, "%s/%s", fx->dir, name);
    return stat(path, &info) == 0 ? (size_t)info.st_size : 0;
}
