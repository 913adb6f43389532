td_test(unit_base SOURCES base_test.c DEPS td_base LABELS unit arm64)
