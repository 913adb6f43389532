td_test(unit_link SOURCES link_test.c DEPS td_link td_base LABELS unit arm64)
