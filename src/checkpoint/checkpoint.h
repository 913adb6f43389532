/* A checkpoint folder: config.json, the index, the headers of all shards, their data memory-mapped. Opening reads no
 * weight; a tensor's bytes come from the page cache when they are touched. Find a tensor, check it, copy it out
 * (slices.h), give the pages back. Not for concurrent opening and closing; lookups are read-only and need no lock. */
#ifndef TD_CHECKPOINT_CHECKPOINT_H
#define TD_CHECKPOINT_CHECKPOINT_H

#include "base/num.h"
#include "checkpoint/config.h"
#include "checkpoint/safetensors.h"

TD_BEGIN_C

typedef struct td_checkpoint td_checkpoint;

/* dir must hold config.json and *.safetensors (those that model.safetensors.index.json names, or all of them when there
 * is no index). On failure err names file, tensor or key. Only the container is checked here, see td_checkpoint_verify.
 * A file that is truncated while it is mapped kills the process with SIGBUS, as with any mapping. */
td_status td_checkpoint_open(const char *dir, td_checkpoint **out, td_error *err);

/* Without config.json (a drafter's folder has its own kind): td_checkpoint_config is NULL, verify is refused. */
td_status td_checkpoint_open_tensors(const char *dir, td_checkpoint **out, td_error *err);
void td_checkpoint_close(td_checkpoint *ck); /* NULL is allowed; tensors and their data are gone */

const char *td_checkpoint_dir(const td_checkpoint *ck);
const td_config *td_checkpoint_config(const td_checkpoint *ck);
const td_tensor *td_checkpoint_find(const td_checkpoint *ck, const char *name); /* NULL: no such tensor */
size_t td_checkpoint_count(const td_checkpoint *ck);
const td_tensor *td_checkpoint_at(const td_checkpoint *ck, size_t i); /* files by name, header order inside a file */
int td_checkpoint_n_files(const td_checkpoint *ck);
const char *td_checkpoint_file_name(const td_checkpoint *ck, int file);
uint64_t td_checkpoint_data_bytes(const td_checkpoint *ck);  /* sum over all tensors */
uint64_t td_checkpoint_index_bytes(const td_checkpoint *ck); /* metadata.total_size; 0 without index */

/* A rank, then a list of rank sizes:  td_checkpoint_require(ck, name, TD_FLOATS, TD_SHAPE(8192, 4096), &tensor, err) */
#define TD_SHAPE(...)                                                                                                  \
    (int)(sizeof((const int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (const int64_t[])                               \
    {                                                                                                                  \
        __VA_ARGS__                                                                                                    \
    }

/* Sets of dtypes. */
#define TD_DTYPE_BIT(dtype) (1u << (dtype))
#define TD_FLOATS           (TD_DTYPE_BIT(TD_DTYPE_BF16) | TD_DTYPE_BIT(TD_DTYPE_F32))
#define TD_ANY_FLOATS       (TD_FLOATS | TD_DTYPE_BIT(TD_DTYPE_F16))

/* The tensor, or TD_ENOTFOUND, or TD_EFORMAT when shape or dtype differ; err says which and what was expected.
 * dtypes: set of allowed dtypes. Sizes of 1 are not compared: [1, 1, 64, 1] is accepted for [64]. */
td_status td_checkpoint_require(const td_checkpoint *ck, const char *name, unsigned dtypes, int rank,
                                const int64_t *shape, const td_tensor **out, td_error *err);

/* The same for "model.language_model.layers.{layer}.{suffix}". */
td_status td_checkpoint_require_layer(const td_checkpoint *ck, int layer, const char *suffix, unsigned dtypes, int rank,
                                      const int64_t *shape, const td_tensor **out, td_error *err);

/* One matrix of a routed expert, as the files hold it. W is [out_dim][in_dim] in the plain form; EXL3 stores the
 * transpose in tiles (docs/exl3.md). */
typedef enum td_projection { TD_PROJ_GATE, TD_PROJ_UP, TD_PROJ_DOWN } td_projection;

typedef struct td_expert_matrix {
    int in_dim, out_dim;
    const td_tensor *weight;  /* plain: [out_dim, in_dim], BF16 or F32; NULL when EXL3 */
    const td_tensor *trellis; /* EXL3: [in_dim / 16, out_dim / 16, 16 * bits] I16; NULL when plain */
    const td_tensor *suh;     /* [in_dim] F16 */
    const td_tensor *svh;     /* [out_dim] F16 */
    const td_tensor *mcg;     /* one I32 */
    int bits;                 /* 1..8, of this tensor */
} td_expert_matrix;

/* Finds and checks names, shapes and dtypes; reads no data (td_expert_matrix_check_marker does). layer may be the MTP
 * layer. A matrix with mul1, su, sv, bias or scale parts, or both forms, is refused. */
td_status td_checkpoint_expert(const td_checkpoint *ck, int layer, int expert, td_projection projection,
                               td_expert_matrix *out, td_error *err);

/* Reads the stored codebook multiplier of an EXL3 matrix and refuses any but mcg's; plain matrices pass. */
td_status td_expert_matrix_check_marker(const td_expert_matrix *matrix, td_error *err);

/* Elements first .. first + n - 1 in row-major order, from BF16, F16 or F32. TD_EINVAL when the range is outside,
 * TD_EUNSUPPORTED for another dtype; nothing is written then. To bf16 from F32 or F16: rounded to nearest even. */
td_status td_tensor_to_f32(const td_tensor *tensor, int64_t first, int64_t n, float *out, td_error *err);
td_status td_tensor_to_bf16(const td_tensor *tensor, int64_t first, int64_t n, td_bf16 *out, td_error *err);

/* Every tensor of the text model (and of the MTP layer) is there with its shape and dtype, EXL3 or plain experts, the
 * vision tower when the config has one. Further tensors are tolerated. The first problem is the error. */
td_status td_checkpoint_verify(const td_checkpoint *ck, td_error *err);

/* The same, all problems: calls report for each, returns how many. */
typedef void td_problem_report(void *user, const char *text);
int td_checkpoint_problems(const td_checkpoint *ck, td_problem_report *report, void *user);

/* Gives the pages that were read back to the system: call it while loading, a rank's memory must not hold the weights
 * twice. Those of large folders (4 GiB and more) leave the page cache, too. Data may be read again afterwards. */
void td_checkpoint_release_pages(const td_checkpoint *ck);

TD_END_C
#endif
