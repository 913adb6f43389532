td_test(unit_exl3 SOURCES exl3_test.c exl3_vectors.c DEPS td_checkpoint LABELS unit)
td_test(unit_exl3_quantize SOURCES exl3_quantize_test.c exl3_vectors.c DEPS td_checkpoint LABELS unit)
add_test(NAME exl3_error_table COMMAND unit_exl3_quantize --table WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
set_tests_properties(exl3_error_table PROPERTIES TIMEOUT 300 LABELS slow)
td_test(unit_exl3_convert SOURCES exl3_convert_test.c checkpoint_fixture.c ${PROJECT_SOURCE_DIR}/src/cli/quantize.c
        DEPS td_calibration td_checkpoint LABELS unit)
