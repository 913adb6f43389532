/* The safetensors container: u64 little-endian header length, a JSON header, raw little-endian tensors. A reader that
 * trusts nothing in the header, and a writer that splits tensors into shards of limited size. */
#ifndef TD_CHECKPOINT_SAFETENSORS_H
#define TD_CHECKPOINT_SAFETENSORS_H

#include "base/arena.h"
#include "base/status.h"

TD_BEGIN_C

#define TD_RANK_MAX 8

typedef enum td_dtype {
    TD_DTYPE_BF16,
    TD_DTYPE_F16,
    TD_DTYPE_F32,
    TD_DTYPE_F64,
    TD_DTYPE_I8,
    TD_DTYPE_U8,
    TD_DTYPE_I16,
    TD_DTYPE_U16,
    TD_DTYPE_I32,
    TD_DTYPE_U32,
    TD_DTYPE_I64,
    TD_DTYPE_F8_E4M3,
    TD_DTYPE_COUNT
} td_dtype;

int td_dtype_bytes(td_dtype dtype);        /* of one element */
const char *td_dtype_name(td_dtype dtype); /* as in the header: "BF16" */

typedef struct td_tensor {
    const char *name;
    td_dtype dtype;
    int rank;                   /* 0: a scalar */
    int64_t shape[TD_RANK_MAX]; /* outermost first */
    uint64_t n_bytes;
    uint64_t offset;  /* from the start of the file; a multiple of the element's size */
    const void *data; /* in the mapping, aligned to the element's size; NULL from td_safetensors_parse */
    int file;         /* number of the file inside its checkpoint */
} td_tensor;

int64_t td_tensor_n_elements(const td_tensor *tensor);

/* "[2048, 4096]" into text; returns text. */
#define TD_SHAPE_TEXT_CAP 192
const char *td_shape_text(int rank, const int64_t *shape, char text[TD_SHAPE_TEXT_CAP]);

/* Tensors of one file, in the order of the header. */
typedef struct td_tensor_list {
    td_tensor *items;
    size_t n;
} td_tensor_list;

/* Parses a header. head: the first head_bytes bytes of the file (8 length bytes and at least the whole header);
 * file_bytes: the size of the file; name: the file, for messages. Names, items come from arena. Checked: every range
 * inside the file, size == shape * dtype, no overlap, alignment, known dtypes, printable names, no name twice. */
td_status td_safetensors_parse(const char *name, const void *head, size_t head_bytes, uint64_t file_bytes,
                               td_arena *arena, td_tensor_list *out, td_error *err);

/* Parses model.safetensors.index.json: calls visit for each pair of weight_map. tensor and file are not terminated
 * (lengths given) and live as long as json. *total_bytes: metadata.total_size, 0 when absent. */
typedef td_status td_index_visit(void *user, const char *tensor, size_t tensor_bytes, const char *file,
                                 size_t file_bytes, td_error *err);
td_status td_safetensors_index_parse(const char *name, const void *json, size_t n_bytes, td_index_visit *visit,
                                     void *user, uint64_t *total_bytes, td_error *err);

/* Writes a checkpoint of many tensors: declare all of them, begin, put their bytes in the declared order, finish.
 *   shards hold whole tensors, each at most shard_bytes_max of data (a larger tensor gets its own);
 *   one shard: model.safetensors; several: model-0000i-of-0000n.safetensors and model.safetensors.index.json;
 *   the same declarations and data give the same bytes;
 *   files appear under their names only when complete (until then: name.part), the index last. */
typedef struct td_safetensors_writer td_safetensors_writer;

td_status td_safetensors_writer_create(const char *dir, uint64_t shard_bytes_max, td_safetensors_writer **out,
                                       td_error *err);
td_status td_safetensors_writer_declare(td_safetensors_writer *writer, const char *name, td_dtype dtype, int rank,
                                        const int64_t *shape, td_error *err);
td_status td_safetensors_writer_begin(td_safetensors_writer *writer, td_error *err);
td_status td_safetensors_writer_put(td_safetensors_writer *writer, const void *data, size_t n_bytes, td_error *err);
td_status td_safetensors_writer_finish(td_safetensors_writer *writer, td_error *err); /* fails unless every byte came */
void td_safetensors_writer_destroy(td_safetensors_writer *writer); /* NULL is allowed; removes unfinished .part files */

TD_END_C
#endif
