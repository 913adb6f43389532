td_test(unit_cli SOURCES cli_test.c DEPS td_client LABELS unit)
td_test(unit_cli_client SOURCES cli_client_test.c DEPS td_client LABELS unit)
td_test(unit_cli_cost SOURCES cli_cost_test.c DEPS td_bench LABELS unit)
td_test(unit_quantize SOURCES quantize_test.c ${PROJECT_SOURCE_DIR}/src/cli/quantize.c
        DEPS td_test_model td_calibration LABELS unit)
td_test(unit_bench_full SOURCES bench_full_test.c DEPS td_bench ARGS $<TARGET_FILE:tandem> LABELS unit)
