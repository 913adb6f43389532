td_fuzz(fuzz_json SOURCES json_fuzz.c DEPS td_base CORPUS corpus/json)
