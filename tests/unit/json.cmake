td_test(unit_json SOURCES json_test.c DEPS td_base LABELS unit arm64)
