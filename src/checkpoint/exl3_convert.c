/* Tensors are walked twice in the same order, to declare them and to write them. Wide types come first because a
 * safetensors file has no gaps: after an odd number of two-byte values a float would lie askew. */
#include "checkpoint/exl3_convert.h"

#include "base/hash.h"
#include "base/json.h"
#include "checkpoint/exl3_quantize.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PATH_CAP = 4096, SIDE_FILE_BYTES_MAX = 256 << 20 };

/* Names the maker in config.json; changes whenever the same input gives other bytes. */
#define MAKER "tandem-exl3-1"

typedef struct conversion {
    const td_convert_args *args;
    td_checkpoint *ck;
    td_safetensors_writer *writer;
    td_exl3_quantizer *quantizer;
    float *plain, *turned; /* one matrix as stored, and [inputs][outputs] */
    float *hessian;        /* [k][k] of the largest k; NULL without a source */
    uint16_t *packed;      /* trellis, suh, svh of one matrix */
    td_convert_progress progress;
} conversion;

/* Which part of a source tensor's output: the tensor as it is, or an expert's marker or packed weight. */
typedef enum part { PART_SAME, PART_MARKER, PART_PACKED } part;

/* The expert whose plain weight a tensor is. */
typedef struct expert_name {
    int layer, expert;
    td_projection projection;
    td_expert_matrix matrix;
} expert_name;

static bool find_expert(const conversion *c, const td_tensor *tensor, expert_name *out)
{
    static const char *const PROJECTIONS[] = { "gate_proj.weight", "up_proj.weight", "down_proj.weight" };
    int n = 0;
    if (sscanf(tensor->name, "model.language_model.layers.%d.mlp.experts.%d.%n", &out->layer, &out->expert, &n) != 2 ||
        !n)
        return false;
    for (int p = 0; p < 3; p++) {
        if (strcmp(tensor->name + n, PROJECTIONS[p]) != 0) continue;
        out->projection = (td_projection)p;
        return td_checkpoint_expert(c->ck, out->layer, out->expert, out->projection, &out->matrix, NULL) == TD_OK &&
               out->matrix.weight == tensor;
    }
    return false;
}

typedef td_status visit_fn(conversion *c, const td_tensor *tensor, part which, const expert_name *expert,
                           td_error *err);

static td_status walk(conversion *c, visit_fn *visit, td_error *err)
{
    for (int n_bytes = 8; n_bytes >= 1; n_bytes /= 2) {
        for (size_t i = 0; i < td_checkpoint_count(c->ck); i++) {
            const td_tensor *tensor = td_checkpoint_at(c->ck, i);
            expert_name expert;
            td_status status = TD_OK;
            bool is_expert = find_expert(c, tensor, &expert);
            if (!is_expert && td_dtype_bytes(tensor->dtype) == n_bytes)
                status = visit(c, tensor, PART_SAME, NULL, err);
            else if (is_expert && n_bytes == 4 && c->args->codebook != TD_EXL3_3INST)
                status = visit(c, tensor, PART_MARKER, &expert, err);
            else if (is_expert && n_bytes == 2)
                status = visit(c, tensor, PART_PACKED, &expert, err);
            if (status) return status;
        }
    }
    return TD_OK;
}

static td_status declare_part(conversion *c, const td_tensor *tensor, const char *suffix, td_dtype dtype, int rank,
                              const int64_t *shape, td_error *err)
{
    char name[PATH_CAP];
    int stem = (int)(strlen(tensor->name) - strlen("weight"));
    snprintf(name, sizeof name, "%.*s%s", stem, tensor->name, suffix);
    return td_safetensors_writer_declare(c->writer, name, dtype, rank, shape, err);
}

static td_status declare(conversion *c, const td_tensor *tensor, part which, const expert_name *expert, td_error *err)
{
    if (which == PART_SAME)
        return td_safetensors_writer_declare(c->writer, tensor->name, tensor->dtype, tensor->rank, tensor->shape, err);
    if (which == PART_MARKER)
        return declare_part(c, tensor, td_exl3_codebook_name(c->args->codebook), TD_DTYPE_I32, TD_SHAPE(1), err);
    int k = expert->matrix.in_dim, n = expert->matrix.out_dim;
    c->progress.n_total++;
    td_status status = declare_part(c, tensor, "trellis", TD_DTYPE_I16,
                                    TD_SHAPE(k / TD_EXL3_TILE, n / TD_EXL3_TILE, 16 * c->args->bits), err);
    if (!status) status = declare_part(c, tensor, "suh", TD_DTYPE_F16, TD_SHAPE(k), err);
    if (!status) status = declare_part(c, tensor, "svh", TD_DTYPE_F16, TD_SHAPE(n), err);
    return status;
}

/* Seeds of the signs: by what the vector belongs to, so that gate and up, which share an input, share its signs. */
static uint64_t sign_seed(const expert_name *e, const char *what)
{
    char text[96];
    snprintf(text, sizeof text, "layer %d expert %d %s", e->layer, e->expert, what);
    return td_fnv1a(TD_FNV1A_START, text, strlen(text));
}

static td_status quantize_expert(conversion *c, const expert_name *e, td_error *err)
{
    static const char *const OUTPUTS[] = { "gate", "up", "down" };
    int k = e->matrix.in_dim, n = e->matrix.out_dim;
    bool known = false;
    td_status status = td_tensor_to_f32(e->matrix.weight, 0, (int64_t)k * n, c->plain, err);
    if (status) return status;
    for (size_t i = 0; i < (size_t)k; i++)
        for (size_t j = 0; j < (size_t)n; j++) c->turned[i * (size_t)n + j] = c->plain[j * (size_t)k + i];
    if (c->hessian) {
        const td_hessian_source *source = c->args->hessian;
        status = source->get(source->user, e->layer, e->expert, e->projection, k, c->hessian, &known, err);
        if (status) return status;
    }
    td_exl3_source source = { .k = k,
                              .n = n,
                              .w = c->turned,
                              .hessian = known ? c->hessian : NULL,
                              .input_seed = sign_seed(e, e->projection == TD_PROJ_DOWN ? "middle" : "input"),
                              .output_seed = sign_seed(e, OUTPUTS[e->projection]) };
    td_exl3_report report;
    uint16_t *suh = c->packed + td_exl3_trellis_bytes(k, n, 2 * c->args->bits) / 2;
    status = td_exl3_quantize(c->quantizer, &source, c->packed, suh, suh + k, &report, err);
    if (status) return td_error_prefix(err, "%s", e->matrix.weight->name);
    td_convert_progress *p = &c->progress;
    p->n_done++;
    p->n_feedback += report.feedback;
    p->nmse_sum += report.nmse;
    if (report.nmse > p->nmse_most) p->nmse_most = report.nmse;
    if (c->args->progress) c->args->progress(c->args->progress_user, p);
    return TD_OK;
}

static td_status write_tensor(conversion *c, const td_tensor *tensor, part which, const expert_name *expert,
                              td_error *err)
{
    if (which == PART_SAME) return td_safetensors_writer_put(c->writer, tensor->data, tensor->n_bytes, err);
    if (which == PART_MARKER) {
        uint32_t mark = c->args->codebook == TD_EXL3_MCG ? TD_EXL3_MCG_MARK : TD_EXL3_MUL1_MARK;
        return td_safetensors_writer_put(c->writer, &mark, sizeof mark, err);
    }
    td_status status = quantize_expert(c, expert, err);
    if (status) return status;
    size_t n_bytes = td_exl3_bytes(expert->matrix.in_dim, expert->matrix.out_dim, 2 * c->args->bits);
    return td_safetensors_writer_put(c->writer, c->packed, n_bytes, err);
}

/* --- files beside the weights --- */

static td_status read_file(const char *path, char **data, size_t *n_bytes, td_error *err)
{
    FILE *file = fopen(path, "rbe");
    if (!file) return td_fail(err, TD_EIO, "%s: %s", path, strerror(errno));
    struct stat info;
    char *bytes = NULL;
    td_status status = TD_OK;
    if (fstat(fileno(file), &info) != 0 || info.st_size < 0 || info.st_size > SIDE_FILE_BYTES_MAX)
        status = td_fail(err, TD_EFORMAT, "%s: larger than %d MiB", path, SIDE_FILE_BYTES_MAX >> 20);
    else if (!(bytes = malloc((size_t)info.st_size + 1)))
        status = td_fail(err, TD_ENOMEM, "%s: out of memory", path);
    else if (fread(bytes, 1, (size_t)info.st_size, file) != (size_t)info.st_size)
        status = td_fail(err, TD_EIO, "%s: cannot be read whole", path);
    fclose(file);
    if (status) {
        free(bytes);
        return status;
    }
    bytes[info.st_size] = '\0';
    *data = bytes;
    *n_bytes = (size_t)info.st_size;
    return TD_OK;
}

static td_status write_file(const char *path, const char *data, size_t n_bytes, td_error *err)
{
    FILE *file = fopen(path, "wbe");
    if (!file) return td_fail(err, TD_EIO, "%s: %s", path, strerror(errno));
    bool ok = fwrite(data, 1, n_bytes, file) == n_bytes && fflush(file) == 0 && fsync(fileno(file)) == 0;
    ok = fclose(file) == 0 && ok;
    return ok ? TD_OK : td_fail(err, TD_EIO, "%s: %s", path, strerror(errno));
}

static td_status join(char path[PATH_CAP], const char *dir, const char *name, td_error *err)
{
    int n = snprintf(path, PATH_CAP, "%s/%s", dir, name);
    return n < PATH_CAP ? TD_OK : td_fail(err, TD_EINVAL, "%s: path too long", dir);
}

/* quantization_config goes in as text before the last brace, so the rest of the file keeps its bytes. */
static td_status write_config(const conversion *c, const char *to_dir, td_error *err)
{
    char path[PATH_CAP], added[512], *text = NULL, *whole = NULL;
    size_t n_bytes = 0;
    td_status status = join(path, c->args->from_dir, "config.json", err);
    if (!status) status = read_file(path, &text, &n_bytes, err);
    if (status) return status;
    td_arena arena;
    const td_json *root = NULL;
    td_arena_init(&arena, 0);
    status = td_json_parse_file(&arena, text, n_bytes, &root, err);
    if (status)
        td_error_prefix(err, "%s", path);
    else if (td_json_get(root, "quantization_config"))
        status = td_fail(err, TD_EINVAL, "%s: already has a quantization_config", path);
    td_arena_deinit(&arena);
    while (n_bytes > 0 && text[n_bytes - 1] != '}') n_bytes--;
    if (n_bytes > 0) n_bytes--;
    while (n_bytes > 0 && strchr(" \t\r\n", text[n_bytes - 1])) n_bytes--;
    int n = snprintf(
        added, sizeof added,
        ",\n  \"quantization_config\": {\n    \"quant_method\": \"exl3\",\n    \"version\": \"" MAKER "\",\n"
        "    \"bits\": %d,\n    \"head_bits\": 16,\n    \"codebook\": \"%s\",\n    \"out_scales\": \"always\",\n"
        "    \"scope\": \"glm53_routed_experts_only\",\n"
        "    \"non_routed_dtype_policy\": \"official_source_native\"\n  }\n}\n",
        c->args->bits, td_exl3_codebook_name(c->args->codebook));
    if (!status && !(whole = malloc(n_bytes + (size_t)n))) status = td_fail(err, TD_ENOMEM, "%s: out of memory", path);
    if (!status) {
        memcpy(whole, text, n_bytes);
        memcpy(whole + n_bytes, added, (size_t)n);
        status = join(path, to_dir, "config.json", err);
    }
    if (!status) status = write_file(path, whole, n_bytes + (size_t)n, err);
    free(whole);
    free(text);
    return status;
}

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

/* Not copied: what is written anew, what describes the other form, and hidden files. */
static bool is_side_file(const char *name)
{
    return name[0] != '.' && strcmp(name, "config.json") != 0 && strcmp(name, "README.md") != 0 &&
           !ends_with(name, ".safetensors") && !ends_with(name, ".safetensors.index.json");
}

static td_status copy_side_files(const conversion *c, const char *to_dir, td_error *err)
{
    char path[PATH_CAP];
    td_status status = TD_OK;
    DIR *dir = opendir(c->args->from_dir);
    if (!dir) return td_fail(err, TD_EIO, "%s: %s", c->args->from_dir, strerror(errno));
    for (struct dirent *entry; !status && (entry = readdir(dir));) {
        struct stat info;
        char *data = NULL;
        size_t n_bytes = 0;
        status = join(path, c->args->from_dir, entry->d_name, err);
        if (status || !is_side_file(entry->d_name) || stat(path, &info) != 0 || !S_ISREG(info.st_mode)) continue;
        status = read_file(path, &data, &n_bytes, err);
        if (!status) status = join(path, to_dir, entry->d_name, err);
        if (!status) status = write_file(path, data, n_bytes, err);
        free(data);
    }
    closedir(dir);
    return status;
}

/* --- the folder --- */

/* A folder of plain files that was made here. */
static void remove_folder(const char *path)
{
    char file[PATH_CAP];
    DIR *dir = opendir(path);
    if (!dir) return;
    for (struct dirent *entry; (entry = readdir(dir));)
        if (!join(file, path, entry->d_name, NULL)) unlink(file);
    closedir(dir);
    rmdir(path);
}

/* to_dir must be absent or empty; makes to_dir.part. */
static td_status make_folder(const char *to_dir, char part_dir[PATH_CAP], td_error *err)
{
    int n_files = 0, n_bytes = (int)strlen(to_dir);
    while (n_bytes > 1 && to_dir[n_bytes - 1] == '/') n_bytes--;
    DIR *dir = opendir(to_dir);
    if (!dir && errno != ENOENT) return td_fail(err, TD_EINVAL, "%s: %s", to_dir, strerror(errno));
    if (dir) {
        for (struct dirent *entry; (entry = readdir(dir));)
            n_files += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
        closedir(dir);
    }
    if (n_files > 0) return td_fail(err, TD_EINVAL, "%s: is not empty; name a new folder", to_dir);
    if (snprintf(part_dir, PATH_CAP, "%.*s.part", n_bytes, to_dir) >= PATH_CAP)
        return td_fail(err, TD_EINVAL, "%s: path too long", to_dir);
    if (mkdir(part_dir, 0777) == 0) return TD_OK;
    if (errno == EEXIST)
        return td_fail(err, TD_EINVAL, "%s: is there, from a run that was cut off or still goes on; remove it",
                       part_dir);
    return td_fail(err, TD_EIO, "%s: %s", part_dir, strerror(errno));
}

/* What is written is what this program would serve (it serves mcg only; other codebooks are for comparison). The config
 * is asked first, before hours of work. */
static td_status check_config(const conversion *c, const char *dir, td_error *err)
{
    td_config config;
    return c->args->codebook == TD_EXL3_MCG ? td_config_load(dir, &config, err) : TD_OK;
}

static td_status check_result(const conversion *c, const char *dir, td_error *err)
{
    td_checkpoint *ck;
    if (c->args->codebook != TD_EXL3_MCG) return TD_OK;
    td_status status = td_checkpoint_open(dir, &ck, err);
    if (status) return status;
    status = td_checkpoint_verify(ck, err);
    td_checkpoint_close(ck);
    return status;
}

/* --- all of it --- */

/* Opens the source, refuses what cannot be converted, takes the buffers of the largest matrix. */
static td_status prepare(conversion *c, td_error *err)
{
    const td_convert_args *a = c->args;
    td_status status = td_checkpoint_open(a->from_dir, &c->ck, err);
    if (!status) status = td_checkpoint_verify(c->ck, err);
    if (status) return status;
    const td_config *config = td_checkpoint_config(c->ck);
    if (config->quant_method != TD_QUANT_NONE) return td_fail(err, TD_EINVAL, "%s: is quantized already", a->from_dir);
    if (config->hidden % TD_EXL3_BLOCK || config->moe_intermediate % TD_EXL3_BLOCK)
        return td_fail(err, TD_EUNSUPPORTED,
                       "%s/config.json: hidden_size %d and moe_intermediate_size %d, EXL3 needs multiples of 128",
                       a->from_dir, config->hidden, config->moe_intermediate);
    status = td_exl3_quantizer_create(a->codebook, 2 * a->bits, a->n_threads, &c->quantizer, err);
    if (status) return status;
    size_t n_values = (size_t)config->hidden * (size_t)config->moe_intermediate;
    size_t k = (size_t)(config->hidden > config->moe_intermediate ? config->hidden : config->moe_intermediate);
    c->plain = malloc(n_values * sizeof *c->plain);
    c->turned = malloc(n_values * sizeof *c->turned);
    c->packed = malloc(td_exl3_bytes(config->hidden, config->moe_intermediate, 2 * a->bits));
    if (a->hessian) c->hessian = malloc(k * k * sizeof *c->hessian);
    if (!c->plain || !c->turned || !c->packed || (a->hessian && !c->hessian))
        return td_fail(err, TD_ENOMEM, "no memory for a matrix of %d x %d", config->hidden, config->moe_intermediate);
    return TD_OK;
}

static td_status fill_folder(conversion *c, const char *dir, td_error *err)
{
    td_status status = copy_side_files(c, dir, err);
    if (!status) status = write_config(c, dir, err);
    if (!status) status = check_config(c, dir, err);
    if (!status) status = td_safetensors_writer_create(dir, c->args->shard_bytes_max, &c->writer, err);
    if (!status) status = walk(c, declare, err);
    if (!status) status = td_safetensors_writer_begin(c->writer, err);
    if (!status) status = walk(c, write_tensor, err);
    if (!status) status = td_safetensors_writer_finish(c->writer, err);
    td_safetensors_writer_destroy(c->writer);
    return status ? status : check_result(c, dir, err);
}

td_status td_exl3_convert(const td_convert_args *args, td_convert_progress *result, td_error *err)
{
    char part_dir[PATH_CAP];
    conversion c = { .args = args };
    td_status status = prepare(&c, err);
    if (!status) status = make_folder(args->to_dir, part_dir, err);
    if (!status) {
        status = fill_folder(&c, part_dir, err);
        if (!status && rename(part_dir, args->to_dir) != 0)
            status = td_fail(err, TD_EIO, "%s: %s", args->to_dir, strerror(errno));
        if (status) remove_folder(part_dir);
    }
    if (!status) *result = c.progress;
    free(c.plain);
    free(c.turned);
    free(c.hessian);
    free(c.packed);
    td_exl3_quantizer_destroy(c.quantizer);
    td_checkpoint_close(c.ck);
    return status;
}
