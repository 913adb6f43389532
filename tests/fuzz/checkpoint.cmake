td_fuzz(fuzz_safetensors SOURCES safetensors_fuzz.c DEPS td_checkpoint CORPUS corpus/safetensors)
td_fuzz(fuzz_safetensors_index SOURCES safetensors_index_fuzz.c DEPS td_checkpoint CORPUS corpus/safetensors_index)
td_fuzz(fuzz_config SOURCES config_fuzz.c DEPS td_checkpoint CORPUS corpus/config)
