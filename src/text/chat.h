/* From a chat request to the prompt text of GLM-5.3-Flash.
 *
 * The checkpoint's chat template is not executed: its rules are written here once, in C, together with what requests
 * need before a template may see them (merged system messages, developer role, parsed arguments, ...). docs/chat.md has
 * the rules in words.
 *
 * Media travel by position. The prompt is one text plus a list of places in it where a picture or clip stands; text
 * that merely quotes <|image|> has no entry there and stays text. To encode: cut the text at the media marks; in the
 * pieces every added token counts except <|image|> and <|video|>, which are ordinary text; a mark becomes its medium's
 * slots. */
#ifndef TD_TEXT_CHAT_H
#define TD_TEXT_CHAT_H

#include "base/json.h"
#include "text/reasoning.h"

TD_BEGIN_C

#define TD_CHAT_PARAM_CAP        96
#define TD_CHAT_MAX_TOOLS        4096
#define TD_CHAT_MAX_PROMPT_BYTES ((size_t)256 << 20)

typedef enum td_chat_effort { TD_EFFORT_NONE, TD_EFFORT_LOW, TD_EFFORT_HIGH, TD_EFFORT_MAX } td_chat_effort;

typedef enum td_chat_choice {
    TD_CHOICE_AUTO,     /* the model decides; also when there are no tools */
    TD_CHOICE_NONE,     /* tools are not shown, calls not parsed */
    TD_CHOICE_REQUIRED, /* at least one call */
    TD_CHOICE_NAMED     /* a call of tools[0], the only one shown */
} td_chat_choice;

/* What the server was started with; a zeroed struct with effort = TD_EFFORT_MAX is the template's own behaviour. */
typedef struct td_chat_options {
    td_chat_effort effort; /* of requests that name none; NONE = thinking off */
    bool clear_thinking;   /* default of chat_template_kwargs.clear_thinking */
    bool effort_at_tail;   /* the effort line before <|assistant|> instead of after <sop> (keeps cached prefixes) */
    /* Reasoning that a client dropped from a tool-calling turn: asked with each call id of an assistant message without
     * reasoning; the text must live as long as the request. NULL: no memory. */
    const char *(*recall)(void *context, const char *call_id, size_t n_bytes, size_t *n_text_bytes);
    void *recall_context;
} td_chat_options;

typedef enum td_media_kind { TD_MEDIA_IMAGE, TD_MEDIA_VIDEO } td_media_kind;

typedef struct td_chat_media {
    td_media_kind kind;
    size_t at, n_bytes;  /* where <|image|> or <|video|> stands in the text */
    const td_json *part; /* the content part, for its URL or data */
    const char *param;   /* "messages[2].content[1]": for errors about it */
} td_chat_media;

typedef struct td_chat_prompt {
    const char *text; /* zero-terminated */
    size_t n_bytes;
    const td_chat_media *media; /* in order of position */
    size_t n_media;
    td_chat_effort effort;       /* as rendered; TD_EFFORT_NONE = thinking off */
    td_reply_start start;        /* how the reply begins: what td_reasoning_init wants */
    const td_json *const *tools; /* function objects that were offered and count for tool_choice, in order */
    size_t n_tools;
    td_chat_choice choice;
    bool tool_results; /* the conversation holds calls or results: a reply may refer to them */
} td_chat_prompt;

/* Renders request (the parsed body: messages, tools, tool_choice, functions, function_call, reasoning_effort,
 * chat_template_kwargs, thinking, enable_thinking, clear_thinking, add_generation_prompt, continue_final_message; other
 * members are not looked at). Everything in *prompt lives in the arena or in the request.
 * TD_EINVAL: the client's mistake; err says what, param which field ("messages[2].content"). TD_ENOMEM. */
td_status td_chat_render(td_arena *arena, const td_json *request, const td_chat_options *options,
                         td_chat_prompt *prompt, char param[TD_CHAT_PARAM_CAP], td_error *err);

/* "none", "low", "high", "max" and their aliases -> effort (absent: *effort stays). TD_EINVAL: another value. Also for
 * the server's own setting. */
td_status td_chat_effort_parse(const char *name, size_t n_bytes, td_chat_effort *effort);

TD_END_C
#endif
