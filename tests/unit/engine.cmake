td_test(unit_engine_pool SOURCES engine_pool_test.c DEPS td_engine LABELS unit arm64)
td_test(unit_engine SOURCES engine_test.c DEPS td_engine td_test_model LABELS unit)
