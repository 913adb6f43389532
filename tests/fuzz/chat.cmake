td_fuzz(fuzz_chat SOURCES chat_fuzz.c DEPS td_text CORPUS corpus/chat)
td_fuzz(fuzz_reply SOURCES reply_fuzz.c DEPS td_text CORPUS corpus/reply)
