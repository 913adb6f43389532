/* The EXL3 known answers of tests/oracle/exl3 as test data. The container is read by string search, so that these tests
 * do not lean on the safetensors reader. */
#ifndef TD_TESTS_UNIT_EXL3_VECTORS_H
#define TD_TESTS_UNIT_EXL3_VECTORS_H

#include "checkpoint/exl3.h"

typedef struct vec_file {
    unsigned char *bytes;
    size_t n_bytes;
} vec_file;

/* The file dir/name + suffix, whole; the test fails without it. Free with vec_free. */
vec_file vec_load(const char *dir, const char *name, const char *suffix);
void vec_free(vec_file *file);

/* Data of a tensor (NULL: not there) and its shape. */
const void *vec_tensor(const vec_file *file, const char *name, int64_t shape[3], size_t *n_bytes);

/* The packed layer "lin" of a case, as a view into file. */
td_exl3 vec_layer(const vec_file *file);

#define VEC_DIR   "tests/oracle/exl3"
#define VEC_CASES 27

/* One line of expect.txt. */
typedef struct vec_case {
    char name[16];  /* "k4_mcg" */
    char inner[65]; /* SHA-256 in hex */
    char restored[65];
    double nmse; /* of the quantizer that made the case */
} vec_case;

void vec_cases(vec_case cases[VEC_CASES]);

#endif
