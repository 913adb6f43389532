foreach(area math linear hyper kda dsa moe sample)
    td_test(unit_ops_${area} SOURCES ops_${area}_test.c ops_support.c DEPS td_ops LABELS unit ops arm64)
endforeach()

# Equal bits on every machine: the same numbers here and in the cross build. tests/arm64 builds it without any library.
add_executable(ops_digest ops_digest.c)
target_link_libraries(ops_digest PRIVATE td_ops)
add_test(NAME ops_digest COMMAND ops_digest)
set_tests_properties(ops_digest PROPERTIES TIMEOUT 600 LABELS "unit;ops;arm64")
