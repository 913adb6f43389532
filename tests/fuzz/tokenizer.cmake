td_fuzz(fuzz_tokenizer_file SOURCES tokenizer_file_fuzz.c DEPS td_text CORPUS corpus/tokenizer_file)
td_fuzz(fuzz_tokenizer_encode SOURCES tokenizer_encode_fuzz.c DEPS td_text CORPUS corpus/tokenizer_encode)
