td_test(unit_chat SOURCES chat_test.c DEPS td_text LABELS unit arm64)
td_test(unit_reply SOURCES reply_test.c DEPS td_text LABELS unit arm64)
td_test(unit_chat_encode SOURCES chat_encode_test.c DEPS td_text LABELS unit arm64)
