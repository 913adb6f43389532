td_test(unit_gpu SOURCES gpu_test.c DEPS td_ops LABELS unit arm64)
