td_test(unit_config SOURCES config_test.c DEPS td_checkpoint LABELS unit arm64)
td_test(unit_safetensors SOURCES safetensors_test.c checkpoint_fixture.c DEPS td_checkpoint LABELS unit arm64)
td_test(unit_layout SOURCES layout_test.c checkpoint_fixture.c ${PROJECT_SOURCE_DIR}/src/cli/info.c DEPS td_checkpoint LABELS unit)
