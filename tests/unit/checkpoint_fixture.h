/* Makes checkpoint folders for tests: a list of tensors that a test may change before it is written. Data is a hole in
 * a sparse file (reads as zeros) unless given, so that a folder of 175 GB costs the disk only its headers. Headers and
 * index are written here, not by the code under test. */
#ifndef TD_TESTS_CHECKPOINT_FIXTURE_H
#define TD_TESTS_CHECKPOINT_FIXTURE_H

#include "checkpoint/slices.h"

typedef struct fx_tensor {
    char name[160], dtype[16];
    int rank;
    int64_t shape[TD_RANK_MAX];
    const void *data; /* NULL: zeros */
} fx_tensor;

typedef struct fx_folder {
    char dir[128];
    fx_tensor *tensors;
    size_t n, cap;
} fx_folder;

void fx_create(fx_folder *fx);  /* an empty temporary folder */
void fx_destroy(fx_folder *fx); /* removes it */

fx_tensor *fx_add(fx_folder *fx, const char *name, const char *dtype, int rank, const int64_t *shape);
fx_tensor *fx_find(fx_folder *fx, const char *name); /* must exist */
void fx_remove(fx_folder *fx, const char *name);

/* All tensors that config asks for, with the dtypes of the published checkpoint: F32 for A_log, dt_bias, hc_*_base,
 * hc_*_scale and the router's bias, else BF16; experts plain (bits 0) or EXL3 of that width. */
void fx_add_model(fx_folder *fx, const td_config *config, int bits);

/* Writes the tensors over n_files files of about equal counts; an index when there are several. */
void fx_write(fx_folder *fx, int n_files);

void fx_write_file(const fx_folder *fx, const char *name, const void *data, size_t n_bytes);
void fx_write_text(const fx_folder *fx, const char *name, const char *text);
void fx_copy_file(const fx_folder *fx, const char *from, const char *name); /* from: path from the source root */
size_t fx_file_bytes(const fx_folder *fx, const char *name);

#endif
