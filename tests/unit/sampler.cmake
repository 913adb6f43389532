td_test(unit_sample_math SOURCES sample_math_test.c DEPS td_sampler LABELS unit arm64)
td_test(unit_sampler SOURCES sampler_test.c DEPS td_sampler LABELS unit arm64)
add_test(NAME sample_math_digest COMMAND unit_sample_math digest)
set_tests_properties(sample_math_digest PROPERTIES TIMEOUT 300 LABELS slow)
