/* ops/host_copy.h against a loop of memcpy: odd strides, one row, many rows, none, out of
 * heap memory and out of a mapped file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "ops/host_copy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { BYTES = 3 << 20 };

static void check(const unsigned char *from, size_t stride, size_t row_bytes, size_t n_rows)
{
    size_t n_bytes = row_bytes * n_rows;
    unsigned char *got = malloc(n_bytes + 1), *want = malloc(n_bytes + 1);
    assert_non_null(got);
    assert_non_null(want);
    got[n_bytes] = 0x5a;
    td_host_copy_rows(got, from, stride, row_bytes, n_rows);
    for (size_t r = 0; r < n_rows; r++) memcpy(want + r * row_bytes, from + r * stride, row_bytes);
    assert_memory_equal(got, want, n_bytes);
    assert_int_equal(got[n_bytes], 0x5a);
    free(got);
    free(want);
}

static void check_all(const unsigned char *from)
{
    check(from + 3, 8192, 4096, 300);
    check(from, 4099, 1, 700);
    check(from + 1, 0, 100, 4);
    check(from + 7, 1000003, 999999, 3);
    check(from, BYTES, BYTES, 1);
    check(from + 5, 64, 64, 40000);
    check(from, 64, 64, 0);
}

static void test_heap(void **state)
{
    (void)state;
    unsigned char *from = malloc(BYTES);
    assert_non_null(from);
    for (size_t i = 0; i < BYTES; i++) from[i] = (unsigned char)(i * 2654435761u >> 13);
    check_all(from);
    free(from);
}

static void test_file(void **state)
{
    (void)state;
    unsigned char *bytes = malloc(BYTES);
    FILE *file = tmpfile();
    assert_non_null(bytes);
    assert_non_null(file);
    for (size_t i = 0; i < BYTES; i++) bytes[i] = (unsigned char)(i * 40503u >> 7);
    assert_int_equal(fwrite(bytes, 1, BYTES, file), BYTES);
    assert_int_equal(fflush(file), 0);
    unsigned char *map = mmap(NULL, BYTES, PROT_READ, MAP_PRIVATE, fileno(file), 0);
    assert_ptr_not_equal(map, MAP_FAILED);
    check_all(map);
    assert_memory_equal(map, bytes, BYTES);
    munmap(map, BYTES);
    fclose(file);
    free(bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_heap), cmocka_unit_test(test_file) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
