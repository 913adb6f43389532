/* Prompts of requests: rendered chats, texts, lists of ids -> token ids. Internal. */
#ifndef TD_SERVER_PROMPT_H
#define TD_SERVER_PROMPT_H

#include "server/core.h"

TD_BEGIN_C

/* Renders body's messages and appends their ids: what the chat route runs and /tokenize shows. */
td_status td_prompt_chat(const td_server *server, td_arena *arena, const td_json *body, td_ids *ids,
                         td_reply_start *start, td_refusal *why);

/* A string, encoded as it is. */
td_status td_prompt_text(const td_server *server, const char *text, size_t n_bytes, td_ids *ids, td_refusal *why);

/* An array of ids that the tokenizer has; param: the field's name. */
td_status td_prompt_ids(const td_server *server, const td_json *array, const char *param, td_ids *ids, td_refusal *why);

TD_END_C
#endif
