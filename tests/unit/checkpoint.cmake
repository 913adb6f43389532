td_test(unit_config SOURCES config_test.c DEPS td_checkpoint LABELS unit)
