/* What the files of the chat renderer share; private to them. */
#ifndef TD_TEXT_CHAT_PARTS_H
#define TD_TEXT_CHAT_PARTS_H

#include "base/buf.h"
#include "text/chat.h"

/* An id or a name and its place in the list it comes from: sorted by text, lists are searched in log n. */
typedef struct td_chat_named {
    const char *text;
    size_t n_bytes;
    size_t at;
} td_chat_named;

/* One rendering: where things come from and where they go. */
typedef struct td_chat_job {
    td_arena *arena;
    const td_json *request;
    const td_chat_options *options;
    char *param; /* [TD_CHAT_PARAM_CAP] */
    td_error *err;
    td_chat_effort effort; /* as it will be rendered */
    bool clear_thinking;
    td_chat_choice choice;
    const td_json **tools; /* function objects, as offered */
    size_t n_tools;
    td_chat_named *tool_names; /* sorted; NULL until the first result refers to tools */
} td_chat_job;

/* A message's text with its media. Borrowed from the request where it is one string, else in the arena. */
typedef struct td_chat_content {
    const char *text;
    size_t n_bytes;
    td_chat_media *media; /* `at` counts from the text's start */
    size_t n_media;
} td_chat_content;

/* Fills param with the path and err with "path: text", returns TD_EINVAL. */
td_status td_chat_refuse(td_chat_job *job, const char *text, const char *path_fmt, ...)
    __attribute__((format(printf, 3, 4)));
td_status td_chat_no_memory(td_chat_job *job);

/* Effort, clear_thinking, tools and choice from the request into the job (chat_settings.c). */
td_status td_chat_settings(td_chat_job *job);

/* A string, null, or an array of parts as text (chat_content.c). path: of the value, for errors. */
td_status td_chat_read_content(td_chat_job *job, const td_json *value, const char *path, td_chat_content *content);

/* A tool call's arguments as an object: parsed from their text, or {"_invalid_arguments": text} when that is none. */
td_status td_chat_arguments(td_chat_job *job, const td_json *value, const td_json **object);

#endif
