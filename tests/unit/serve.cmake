td_test(unit_serve_memory SOURCES serve_memory_test.c ${PROJECT_SOURCE_DIR}/src/cli/serve_memory.c
        ${PROJECT_SOURCE_DIR}/src/cli/serve_settings.c DEPS td_client td_engine td_model td_checkpoint td_ops td_base LABELS unit)
