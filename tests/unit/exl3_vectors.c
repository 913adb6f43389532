#include "exl3_vectors.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

vec_file vec_load(const char *dir, const char *name, const char *suffix)
{
    char path[512];
    vec_file file = { NULL, 0 };
    snprintf(path, sizeof path, "%s/%s%s", dir, name, suffix);
    FILE *f = fopen(path, "rb");
    if (!f) fail_msg("cannot open %s", path);
    fseek(f, 0, SEEK_END);
    long n = ftell(f);
    rewind(f);
    assert_true(n > 0);
    file.n_bytes = (size_t)n;
    file.bytes = malloc(file.n_bytes + 1);
    assert_non_null(file.bytes);
    assert_int_equal(fread(file.bytes, 1, file.n_bytes, f), file.n_bytes);
    file.bytes[file.n_bytes] = 0;
    fclose(f);
    return file;
}

void vec_free(vec_file *file)
{
    free(file->bytes);
    file->bytes = NULL;
}

const void *vec_tensor(const vec_file *file, const char *name, int64_t shape[3], size_t *n_bytes)
{
    uint64_t head_bytes;
    char key[64];
    memcpy(&head_bytes, file->bytes, 8);
    assert_true(head_bytes + 8 <= file->n_bytes);
    snprintf(key, sizeof key, "\"%s\":", name);
    const char *entry = memmem(file->bytes + 8, head_bytes, key, strlen(key));
    if (!entry) return NULL;
    const char *dims = strstr(entry, "\"shape\":"), *offsets = strstr(entry, "\"data_offsets\":");
    assert_non_null(dims);
    assert_non_null(offsets);
    dims = strchr(dims, '[');
    for (int i = 0; i < 3; i++) {
        char *end;
        shape[i] = strtoll(dims + 1, &end, 10);
        if (end != dims + 1) dims = end;
    }
    char *end;
    uint64_t from = strtoull(strchr(offsets, '[') + 1, &end, 10), to = strtoull(strchr(end, ',') + 1, NULL, 10);
    assert_true(from <= to && head_bytes + 8 + to <= file->n_bytes);
    *n_bytes = to - from;
    return file->bytes + 8 + head_bytes + from;
}

td_exl3 vec_layer(const vec_file *file)
{
    int64_t shape[3], dummy[3];
    size_t n;
    td_exl3 w = { 0 };
    w.trellis = vec_tensor(file, "lin.trellis", shape, &n);
    assert_non_null(w.trellis);
    w.k = (int)shape[0] * 16;
    w.n = (int)shape[1] * 16;
    w.bits2 = (int)shape[2] / 8;
    assert_int_equal(n, td_exl3_trellis_bytes(w.k, w.n, w.bits2));
    w.suh = vec_tensor(file, "lin.suh", dummy, &n);
    w.svh = vec_tensor(file, "lin.svh", dummy, &n);
    w.codebook = vec_tensor(file, "lin.mcg", dummy, &n)    ? TD_EXL3_MCG
                 : vec_tensor(file, "lin.mul1", dummy, &n) ? TD_EXL3_MUL1
                                                           : TD_EXL3_3INST;
    return w;
}

void vec_cases(vec_case cases[VEC_CASES])
{
    char line[256];
    int n = 0;
    FILE *f = fopen(VEC_DIR "/expect.txt", "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        if (line[0] == '#') continue;
        assert_true(n < VEC_CASES);
        vec_case *c = &cases[n++];
        assert_int_equal(sscanf(line, "%15s %64s %64s %lf", c->name, c->inner, c->restored, &c->nmse), 4);
    }
    fclose(f);
    assert_int_equal(n, VEC_CASES);
}
