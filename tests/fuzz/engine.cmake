td_fuzz(fuzz_step SOURCES step_fuzz.c DEPS td_engine td_base CORPUS corpus/step)
