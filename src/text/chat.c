/* See chat.h. Two passes: every message is read into a plain struct first (so that a refusal names the first wrong
 * field and rendering cannot fail half way but for memory), then the text is written front to back. Work is linear in
 * the request, or n log n in the calls of one turn: ids and tool names are sorted, never searched in nested loops,
 * because the request is hostile until proven otherwise. */
#include "text/chat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/chat_parts.h"
#include "text/chat_tools.h"

typedef enum td_role { ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT, ROLE_TOOL } td_role;

typedef struct message {
    td_role role;
    const td_json *json;
    td_chat_content content; /* unread for tool messages: their forms differ (chat_tools.c) */
    const char *reasoning;   /* NULL: not given */
    size_t n_reasoning_bytes;
    const td_json *calls; /* non-empty array, or NULL */
} message;

typedef struct renderer {
    td_chat_job job;
    message *messages;
    size_t n_messages;
    size_t last_user; /* index + 1; 0: none */
    td_chat_writer out;
    bool add_generation_prompt, continue_final;
    bool calls_or_results;
} renderer;

/* ---- reading messages ---- */

static td_status read_role(renderer *r, size_t i, td_role *role)
{
    static const struct {
        const char *name;
        td_role role;
    } roles[] = { { "system", ROLE_SYSTEM },       { "developer", ROLE_SYSTEM }, { "user", ROLE_USER },
                  { "assistant", ROLE_ASSISTANT }, { "tool", ROLE_TOOL },        { "function", ROLE_TOOL } };
    const td_json *value = td_json_get(r->messages[i].json, "role");
    for (size_t k = 0; k < sizeof roles / sizeof *roles; k++)
        if (td_json_equals(value, roles[k].name)) {
            *role = roles[k].role;
            return TD_OK;
        }
    return td_chat_refuse(&r->job, "must be one of system, developer, user, assistant, tool", "messages[%zu].role", i);
}

/* The first of the two fields with some text, else an empty one if there is one. */
static void read_reasoning(message *m)
{
    static const char *const fields[] = { "reasoning_content", "reasoning" };
    for (int k = 0; k < 2 && !m->n_reasoning_bytes; k++) {
        size_t n_bytes;
        const char *text = td_json_string(td_json_get(m->json, fields[k]), &n_bytes);
        if (!text) continue;
        m->reasoning = text;
        m->n_reasoning_bytes = n_bytes;
    }
}

/* Clients that drop reasoning between the steps of a tool loop get it back from the server's memory. */
static void recall_reasoning(renderer *r, message *m)
{
    const td_chat_options *options = r->job.options;
    if (!options->recall || m->n_reasoning_bytes) return;
    if (memmem(m->content.text, m->content.n_bytes, "</think>", 8)) return;
    for (size_t k = 0; k < td_json_count(m->calls) && !m->n_reasoning_bytes; k++) {
        size_t n_bytes;
        const char *id = td_chat_id(td_json_at(m->calls, k), &n_bytes);
        const char *text = id ? options->recall(options->recall_context, id, n_bytes, &m->n_reasoning_bytes) : NULL;
        if (text)
            m->reasoning = text;
        else
            m->n_reasoning_bytes = 0;
    }
}

static td_status read_assistant(renderer *r, size_t i)
{
    message *m = &r->messages[i];
    const td_json *calls = td_json_get(m->json, "tool_calls");
    if (!td_json_is_null(calls) && td_json_kind_of(calls) != TD_JSON_ARRAY)
        return td_chat_refuse(&r->job, "must be an array", "messages[%zu].tool_calls", i);
    for (size_t k = 0; k < td_json_count(calls); k++) {
        size_t n_bytes = 0;
        const td_json *function = td_chat_called_function(td_json_at(calls, k));
        if (!td_json_string(td_json_get(function, "name"), &n_bytes) || !n_bytes)
            return td_chat_refuse(&r->job, "must be a non-empty string", "messages[%zu].tool_calls[%zu].function.name",
                                  i, k);
    }
    if (td_json_count(calls)) m->calls = calls;
    read_reasoning(m);
    recall_reasoning(r, m);
    return TD_OK;
}

static td_status read_message(renderer *r, size_t i, const td_json *json)
{
    message *m = &r->messages[i];
    char path[TD_CHAT_PARAM_CAP];
    m->json = json;
    if (td_json_kind_of(json) != TD_JSON_OBJECT)
        return td_chat_refuse(&r->job, "must be an object", "messages[%zu]", i);
    td_status status = read_role(r, i, &m->role);
    if (status) return status;
    if (m->role == ROLE_USER) r->last_user = i + 1;
    if (m->role == ROLE_TOOL || td_json_count(td_json_get(json, "tool_calls"))) r->calls_or_results = true;
    if (m->role == ROLE_TOOL) return TD_OK;
    snprintf(path, sizeof path, "messages[%zu].content", i);
    status = td_chat_read_content(&r->job, td_json_get(json, "content"), path, &m->content);
    return status || m->role != ROLE_ASSISTANT ? status : read_assistant(r, i);
}

static td_status read_messages(renderer *r)
{
    const td_json *messages = td_json_get(r->job.request, "messages");
    size_t n = td_json_count(messages);
    if (td_json_kind_of(messages) != TD_JSON_ARRAY || !n) {
        snprintf(r->job.param, TD_CHAT_PARAM_CAP, "messages");
        return td_fail(r->job.err, TD_EINVAL, "messages must be a non-empty list");
    }
    r->messages = (message *)calloc(n, sizeof *r->messages);
    if (!r->messages) return td_chat_no_memory(&r->job);
    r->n_messages = n;
    for (size_t i = 0; i < n; i++) {
        td_status status = read_message(r, i, td_json_at(messages, i));
        if (status) return status;
    }
    return TD_OK;
}

static td_status read_bool(renderer *r, const char *name, bool *out)
{
    const td_json *value = td_json_get(r->job.request, name);
    if (td_json_is_null(value) || td_json_bool(value, out) == TD_OK) return TD_OK;
    return td_chat_refuse(&r->job, "must be true or false", "%s", name);
}

static td_status read_ending(renderer *r)
{
    r->add_generation_prompt = true;
    td_status status = read_bool(r, "add_generation_prompt", &r->add_generation_prompt);
    if (!status) status = read_bool(r, "continue_final_message", &r->continue_final);
    if (status || !r->continue_final) return status;
    if (r->add_generation_prompt)
        return td_chat_refuse(&r->job, "cannot be set together with add_generation_prompt", "continue_final_message");
    if (r->messages[r->n_messages - 1].role != ROLE_ASSISTANT)
        return td_chat_refuse(&r->job, "the last message must be an assistant message", "continue_final_message");
    return TD_OK;
}

/* ---- writing ---- */

static void put(renderer *r, const char *text)
{
    td_buf_puts(&r->out.text, text);
}

static void put_effort(renderer *r)
{
    static const char *const lines[] = { "", "<|system|>Reasoning Effort: Low", "<|system|>Reasoning Effort: High",
                                         "<|system|>Reasoning Effort: Max" };
    put(r, lines[r->job.effort]);
}

/* The part of an assistant's text that is its reasoning, when it has no field of its own: up to the first </think>,
 * from the last <think> before that. body_at: behind the last </think>. */
static bool split_text(const td_chat_content *c, size_t *from, size_t *to, size_t *body_at)
{
    static const char open[] = "<think>", close[] = "</think>";
    const char *first = (const char *)memmem(c->text, c->n_bytes, close, 8), *end = c->text + c->n_bytes;
    if (!first) return false;
    *from = 0;
    *to = (size_t)(first - c->text);
    for (const char *at = c->text; (at = (const char *)memmem(at, (size_t)(first - at), open, 7)); at++)
        *from = (size_t)(at - c->text) + 7;
    for (const char *at = first; at; at = (const char *)memmem(at + 8, (size_t)(end - at) - 8, close, 8))
        *body_at = (size_t)(at - c->text) + 8;
    return true;
}

/* Returns whether the prompt has to end here: a continued message that only has reasoning so far. */
static bool put_think(renderer *r, const message *m, size_t i, bool continued, size_t *body_at)
{
    size_t from = 0, to = 0;
    bool in_text = !m->reasoning && split_text(&m->content, &from, &to, body_at);
    bool shown = (m->reasoning || in_text) && (!r->job.clear_thinking || i + 1 > r->last_user);
    size_t start = *body_at, end = m->content.n_bytes;
    td_chat_strip(m->content.text, &start, &end);
    put(r, "<think>");
    if (shown && in_text) td_chat_put_content(&r->out, &m->content, from, to);
    if (shown && m->reasoning) td_buf_add(&r->out.text, m->reasoning, m->n_reasoning_bytes);
    if (continued && start == end && shown && (in_text ? to > from : m->n_reasoning_bytes > 0)) return true;
    put(r, "</think>");
    return false;
}

/* Fills *start when the prompt ends with this message. */
static td_status put_assistant(renderer *r, size_t i, bool continued, td_reply_start *reply)
{
    const message *m = &r->messages[i];
    size_t body_at = 0, end = m->content.n_bytes;
    put(r, "<|assistant|>");
    if (put_think(r, m, i, continued, &body_at)) {
        *reply = TD_REPLY_IN_REASONING;
        return TD_OK;
    }
    td_chat_strip(m->content.text, &body_at, &end);
    td_chat_put_content(&r->out, &m->content, body_at, end);
    if (continued) *reply = body_at == end ? TD_REPLY_AT_ANSWER : TD_REPLY_IN_ANSWER;
    return continued ? TD_OK : td_chat_put_calls(&r->job, &r->out, m->calls);
}

/* Leading system messages are one. Returns how many messages that were. */
static size_t put_leading_system(renderer *r)
{
    size_t n = 0;
    for (; n < r->n_messages && r->messages[n].role == ROLE_SYSTEM; n++) {
        put(r, n ? "\n\n" : "<|system|>");
        td_chat_put_content(&r->out, &r->messages[n].content, 0, r->messages[n].content.n_bytes);
    }
    return n;
}

/* All consecutive results from message i on. Returns through *next the message after them. */
static td_status put_tool_run(renderer *r, size_t i, size_t *next)
{
    size_t end = i;
    while (end < r->n_messages && r->messages[end].role == ROLE_TOOL) end++;
    *next = end;
    const td_json *calls = i && r->messages[i - 1].role == ROLE_ASSISTANT ? r->messages[i - 1].calls : NULL;
    put(r, "<|observation|>");
    return td_chat_put_results(&r->job, &r->out, td_json_get(r->job.request, "messages"), i, end, calls);
}

static td_status put_messages(renderer *r, td_reply_start *reply)
{
    td_status status = TD_OK;
    for (size_t i = put_leading_system(r), next; i < r->n_messages && !status; i = next) {
        const message *m = &r->messages[i];
        next = i + 1;
        switch (m->role) {
        case ROLE_SYSTEM:
        case ROLE_USER:
            put(r, m->role == ROLE_USER ? "<|user|>" : "<|system|>");
            td_chat_put_content(&r->out, &m->content, 0, m->content.n_bytes);
            break;
        case ROLE_ASSISTANT: status = put_assistant(r, i, r->continue_final && next == r->n_messages, reply); break;
        case ROLE_TOOL: status = put_tool_run(r, i, &next); break;
        }
    }
    return status;
}

static td_status put_prompt(renderer *r, td_reply_start *reply)
{
    bool at_tail = r->job.options->effort_at_tail && r->add_generation_prompt;
    *reply = TD_REPLY_AT_ANSWER;
    put(r, "[gMASK]<sop>");
    if (!at_tail) put_effort(r);
    td_status status = td_chat_put_tools(&r->job, &r->out);
    if (!status) status = put_messages(r, reply);
    if (status || !r->add_generation_prompt) return status;
    if (at_tail) put_effort(r);
    put(r, r->job.effort == TD_EFFORT_NONE ? "<|assistant|><think></think>" : "<|assistant|><think>");
    *reply = r->job.effort == TD_EFFORT_NONE ? TD_REPLY_AT_ANSWER : TD_REPLY_IN_REASONING;
    return TD_OK;
}

/* ---- the whole ---- */

static td_status finish(renderer *r, td_reply_start reply, td_chat_prompt *prompt)
{
    td_arena *arena = r->job.arena;
    const td_buf *text = &r->out.text, *media = &r->out.media;
    if (text->failed || media->failed)
        return td_chat_refuse(&r->job, "the prompt's text does not fit in 256 MiB", "messages");
    const char *kept = td_arena_strndup(arena, text->data, text->n_bytes);
    td_chat_media *marks = NULL;
    if (media->n_bytes) marks = (td_chat_media *)td_arena_take(arena, media->n_bytes, _Alignof(td_chat_media));
    if (!kept || (media->n_bytes && !marks)) return td_chat_no_memory(&r->job);
    if (marks) memcpy(marks, media->data, media->n_bytes);
    *prompt = (td_chat_prompt){ .text = kept,
                                .n_bytes = text->n_bytes,
                                .media = marks,
                                .n_media = media->n_bytes / sizeof *marks,
                                .effort = r->job.effort,
                                .start = reply,
                                .tools = r->job.tools,
                                .n_tools = r->job.n_tools,
                                .choice = r->job.choice,
                                .tool_results = r->calls_or_results };
    return TD_OK;
}

td_status td_chat_render(td_arena *arena, const td_json *request, const td_chat_options *options,
                         td_chat_prompt *prompt, char param[TD_CHAT_PARAM_CAP], td_error *err)
{
    renderer r = { .job = { .arena = arena, .request = request, .options = options, .param = param, .err = err } };
    td_reply_start reply;
    param[0] = '\0';
    td_buf_init(&r.out.text, TD_CHAT_MAX_PROMPT_BYTES);
    td_buf_init(&r.out.media, 0);
    td_status status = read_messages(&r);
    if (!status) status = td_chat_settings(&r.job);
    if (!status) status = read_ending(&r);
    if (!status) status = put_prompt(&r, &reply);
    if (!status) status = finish(&r, reply, prompt);
    td_buf_deinit(&r.out.text);
    td_buf_deinit(&r.out.media);
    free(r.messages);
    return status;
}
