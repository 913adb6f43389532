td_test(unit_cli SOURCES cli_test.c DEPS td_client LABELS unit)
td_test(unit_cli_client SOURCES cli_client_test.c DEPS td_client LABELS unit)
td_test(unit_cli_cost SOURCES cli_cost_test.c DEPS td_bench LABELS unit)
td_test(unit_quantize SOURCES quantize_test.c ${PROJECT_SOURCE_DIR}/src/cli/quantize.c
        DEPS td_test_model td_calibration LABELS unit)
td_test(unit_bench_full SOURCES bench_full_test.c DEPS td_bench ARGS $<TARGET_FILE:tandem> LABELS unit)
td_test(unit_serve_memory SOURCES serve_memory_test.c ${PROJECT_SOURCE_DIR}/src/cli/serve_memory.c
        ${PROJECT_SOURCE_DIR}/src/cli/serve_settings.c DEPS td_engine td_model td_checkpoint td_ops td_base LABELS unit)
