/* What a chat request says besides its messages: how much to think, and which tools there are. Several spellings of the
 * same wish are in use; docs/chat.md lists which counts first. */
#include "text/chat_parts.h"

#include <stdio.h>
#include <string.h>

/* ---- effort and thinking ---- */

td_status td_chat_effort_parse(const char *name, size_t n_bytes, td_chat_effort *effort)
{
    /* A level without a line of its own goes to the nearest that has one, a tie to the higher. */
    static const struct {
        const char *name;
        td_chat_effort effort;
    } levels[] = { { "none", TD_EFFORT_NONE },   { "minimal", TD_EFFORT_LOW }, { "low", TD_EFFORT_LOW },
                   { "medium", TD_EFFORT_HIGH }, { "high", TD_EFFORT_HIGH },   { "xhigh", TD_EFFORT_MAX },
                   { "max", TD_EFFORT_MAX } };
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++)
        if (strlen(levels[i].name) == n_bytes && memcmp(levels[i].name, name, n_bytes) == 0) {
            *effort = levels[i].effort;
            return TD_OK;
        }
    return TD_EINVAL;
}

static td_status read_effort(td_chat_job *job, const td_json *value, const char *path, td_chat_effort *effort)
{
    size_t n_bytes;
    if (td_json_is_null(value)) return TD_OK;
    const char *name = td_json_string(value, &n_bytes);
    if (name && td_chat_effort_parse(name, n_bytes, effort) == TD_OK) return TD_OK;
    return td_chat_refuse(job, "must be one of none, minimal, low, medium, high, xhigh, max", "%s", path);
}

static td_status read_switch(td_chat_job *job, const td_json *value, const char *path, int *is_on)
{
    bool on;
    if (td_json_is_null(value)) return TD_OK;
    if (td_json_bool(value, &on)) return td_chat_refuse(job, "must be true or false", "%s", path);
    if (*is_on < 0) *is_on = on;
    return TD_OK;
}

/* true, false, {"type": "enabled"} or {"type": "disabled"}; anything else says nothing. */
static void read_thinking(const td_json *value, int *is_on)
{
    bool on;
    const td_json *type = td_json_get(value, "type");
    if (*is_on >= 0) return;
    if (td_json_bool(value, &on) == TD_OK)
        *is_on = on;
    else if (td_json_equals(type, "enabled"))
        *is_on = true;
    else if (td_json_equals(type, "disabled"))
        *is_on = false;
}

static td_status read_thinking_settings(td_chat_job *job)
{
    const td_json *request = job->request, *kwargs = td_json_get(request, "chat_template_kwargs");
    td_chat_effort standard = job->options->effort;
    int is_on = -1, clear = -1;
    td_status status;
    if (!td_json_is_null(kwargs) && td_json_kind_of(kwargs) != TD_JSON_OBJECT)
        return td_chat_refuse(job, "must be an object", "chat_template_kwargs");

    job->effort = standard;
    status = read_effort(job, td_json_get(kwargs, "reasoning_effort"), "chat_template_kwargs.reasoning_effort",
                         &job->effort);
    if (!status) status = read_effort(job, td_json_get(request, "reasoning_effort"), "reasoning_effort", &job->effort);

    if (!status)
        status =
            read_switch(job, td_json_get(kwargs, "enable_thinking"), "chat_template_kwargs.enable_thinking", &is_on);
    read_thinking(td_json_get(kwargs, "thinking"), &is_on);
    if (!status) status = read_switch(job, td_json_get(request, "enable_thinking"), "enable_thinking", &is_on);
    read_thinking(td_json_get(request, "thinking"), &is_on);

    if (!status)
        status = read_switch(job, td_json_get(kwargs, "clear_thinking"), "chat_template_kwargs.clear_thinking", &clear);
    if (!status) status = read_switch(job, td_json_get(request, "clear_thinking"), "clear_thinking", &clear);
    if (status) return status;

    job->clear_thinking = clear >= 0 ? clear : job->options->clear_thinking;
    if (is_on == 0) job->effort = TD_EFFORT_NONE;
    if (is_on == 1 && job->effort == TD_EFFORT_NONE)
        job->effort = standard == TD_EFFORT_NONE ? TD_EFFORT_MAX : standard;
    return TD_OK;
}

/* ---- tools ---- */

static const td_json *function_of(const td_json *tool)
{
    const td_json *function = td_json_get(tool, "function");
    return function ? function : tool;
}

static td_status check_tool(td_chat_job *job, const td_json *tool, const char *list, size_t i)
{
    size_t n_bytes = 0;
    const td_json *type = td_json_get(tool, "type"), *function = function_of(tool);
    if (td_json_kind_of(tool) != TD_JSON_OBJECT) return td_chat_refuse(job, "must be an object", "%s[%zu]", list, i);
    if (!td_json_is_null(type) && !td_json_equals(type, "function"))
        return td_chat_refuse(job, "only tools of type \"function\" are known", "%s[%zu].type", list, i);
    if (td_json_kind_of(function) != TD_JSON_OBJECT)
        return td_chat_refuse(job, "must be an object", "%s[%zu].function", list, i);
    if (!td_json_string(td_json_get(function, "name"), &n_bytes) || !n_bytes)
        return td_chat_refuse(job, "must be a non-empty string", "%s[%zu]%s.name", list, i,
                              function == tool ? "" : ".function");
    return TD_OK;
}

static td_status read_tools(td_chat_job *job)
{
    const char *list = "tools";
    const td_json *tools = td_json_get(job->request, list);
    if (td_json_is_null(tools)) tools = td_json_get(job->request, list = "functions"); /* the form before tools */
    if (td_json_is_null(tools)) return TD_OK;
    if (td_json_kind_of(tools) != TD_JSON_ARRAY) return td_chat_refuse(job, "must be an array", "%s", list);
    size_t n = td_json_count(tools);
    if (!n) return TD_OK;
    if (n > TD_CHAT_MAX_TOOLS) return td_chat_refuse(job, "too many tools (at most 4096)", "%s", list);
    job->tools = (const td_json **)td_arena_take(job->arena, n * sizeof *job->tools, _Alignof(td_json *));
    if (!job->tools) return td_chat_no_memory(job);
    for (size_t i = 0; i < n; i++) {
        td_status status = check_tool(job, td_json_at(tools, i), list, i);
        if (status) return status;
        job->tools[i] = function_of(td_json_at(tools, i));
    }
    job->n_tools = n;
    return TD_OK;
}

static td_status choose_named(td_chat_job *job, const td_json *name, const char *field)
{
    size_t n_bytes = 0, n_own;
    const char *wanted = td_json_string(name, &n_bytes);
    if (!wanted || !n_bytes) return td_chat_refuse(job, "the function's name is missing", "%s", field);
    for (size_t i = 0; i < job->n_tools; i++) {
        const char *own = td_json_string(td_json_get(job->tools[i], "name"), &n_own);
        if (n_own == n_bytes && memcmp(own, wanted, n_bytes) == 0) {
            job->tools[0] = job->tools[i];
            job->n_tools = 1;
            job->choice = TD_CHOICE_NAMED;
            return TD_OK;
        }
    }
    snprintf(job->param, TD_CHAT_PARAM_CAP, "%s", field);
    return td_fail(job->err, TD_EINVAL, "%s requested unknown tool %.64s", field, wanted);
}

static td_status choose_word(td_chat_job *job, const td_json *word, const char *field)
{
    if (td_json_equals(word, "none"))
        job->choice = TD_CHOICE_NONE;
    else if (td_json_equals(word, "required"))
        job->choice = TD_CHOICE_REQUIRED;
    else if (!td_json_equals(word, "auto"))
        return td_chat_refuse(job, "must be none, auto, required, or an object that names a function", "%s", field);
    return TD_OK;
}

/* {"type": "function", "function": {"name": N}} or flat, {"type": "allowed_tools", ...}, legacy {"name": N}. */
static td_status choose_object(td_chat_job *job, const td_json *choice, const char *field)
{
    const td_json *type = td_json_get(choice, "type"), *function = td_json_get(choice, "function");
    if (td_json_equals(type, "allowed_tools")) {
        const td_json *allowed = td_json_get(choice, "allowed_tools");
        return choose_word(job, td_json_get(allowed ? allowed : choice, "mode"), field);
    }
    if (!td_json_is_null(type) && !td_json_equals(type, "function"))
        return td_chat_refuse(job, "only type \"function\" and \"allowed_tools\" are known", "%s.type", field);
    return choose_named(job, td_json_get(function ? function : choice, "name"), field);
}

static td_status read_choice(td_chat_job *job)
{
    const char *field = "tool_choice";
    const td_json *choice = td_json_get(job->request, field);
    td_status status = TD_OK;
    if (td_json_is_null(choice)) choice = td_json_get(job->request, field = "function_call");
    if (td_json_kind_of(choice) == TD_JSON_OBJECT) {
        if (!job->n_tools) return td_chat_refuse(job, "there are no tools to choose from", "%s", field);
        status = choose_object(job, choice, field);
    } else if (!td_json_is_null(choice)) {
        status = choose_word(job, choice, field);
    }
    if (status) return status;
    if (job->choice == TD_CHOICE_REQUIRED && !job->n_tools)
        return td_chat_refuse(job, "there are no tools to choose from", "%s", field);
    if (job->choice == TD_CHOICE_NONE) job->n_tools = 0;
    return TD_OK;
}

td_status td_chat_settings(td_chat_job *job)
{
    td_status status = read_thinking_settings(job);
    if (!status) status = read_tools(job);
    return status ? status : read_choice(job);
}
