td_test(unit_gpu SOURCES gpu_test.c DEPS td_ops LABELS unit arm64)
td_test(unit_host_copy SOURCES host_copy_test.c DEPS td_ops LABELS unit arm64)
