foreach(area math linear hyper kda dsa moe)
    td_test(unit_ops_${area} SOURCES ops_${area}_test.c ops_support.c DEPS td_ops LABELS unit ops)
endforeach()

# Equal bits on every machine: here, and cross-built under qemu where the compiler is there.
add_executable(ops_digest ops_digest.c)
target_link_libraries(ops_digest PRIVATE td_ops)
add_test(NAME ops_digest COMMAND ops_digest)
find_program(TD_ARM64_CC aarch64-linux-gnu-gcc)
find_program(TD_ARM64_QEMU qemu-aarch64)
if(TD_ARM64_CC AND TD_ARM64_QEMU AND NOT CMAKE_CROSSCOMPILING AND NOT TD_SANITIZE)
    add_test(NAME ops_digest_arm64
        COMMAND ${CMAKE_CTEST_COMMAND} --build-and-test ${PROJECT_SOURCE_DIR}/tests/arm64 ${CMAKE_BINARY_DIR}/arm64
                --build-generator ${CMAKE_GENERATOR} --build-target ops_digest
                --build-options -DCMAKE_TOOLCHAIN_FILE=${PROJECT_SOURCE_DIR}/cmake/arm64.cmake
                --test-command ${TD_ARM64_QEMU} -L /usr/aarch64-linux-gnu ${CMAKE_BINARY_DIR}/arm64/ops_digest)
    set_tests_properties(ops_digest_arm64 PROPERTIES TIMEOUT 600 LABELS arm64)
endif()
