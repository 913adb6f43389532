td_fuzz(fuzz_link SOURCES link_fuzz.c DEPS td_link td_base CORPUS corpus/link)
