/* The tool side of the prompt: offered tools, calls of earlier turns, their results; and the writer all share. */
#ifndef TD_TEXT_CHAT_TOOLS_H
#define TD_TEXT_CHAT_TOOLS_H

#include "text/chat_parts.h"

typedef struct td_chat_writer {
    td_buf text;
    td_buf media; /* td_chat_media, one after the other */
} td_chat_writer;

/* content[from, to) with the media that stand in it. */
void td_chat_put_content(td_chat_writer *out, const td_chat_content *content, size_t from, size_t to);

/* Python's str.strip(): moves the ends of text[*from, *to) inwards over white space. */
void td_chat_strip(const char *text, size_t *from, size_t *to);

const td_json *td_chat_called_function(const td_json *call);    /* its `function`, or the call itself */
const char *td_chat_id(const td_json *object, size_t *n_bytes); /* tool_call_id, else id; NULL: none or empty */

/* The block that lists the tools; nothing without tools. */
td_status td_chat_put_tools(td_chat_job *job, td_chat_writer *out);

td_status td_chat_put_calls(td_chat_job *job, td_chat_writer *out, const td_json *calls);

/* Results of messages[from, to), in the order of the calls they answer where that can be told. */
td_status td_chat_put_results(td_chat_job *job, td_chat_writer *out, const td_json *messages, size_t from, size_t to,
                              const td_json *calls);

#endif
