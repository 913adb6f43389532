pkg_check_modules(PKG_cmocka IMPORTED_TARGET GLOBAL cmocka)
td_test(unit_exl3 SOURCES exl3_test.c exl3_vectors.c DEPS td_checkpoint LABELS unit)
