/* See chat_tools.h. Results may arrive in any order (clients run calls in parallel); the model saw them in the order of
 * its calls, so they are put back into it whenever ids leave no doubt. */
#include "text/chat_tools.h"

#include "text/python_json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char tools_head[] =
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n";
static const char tools_tail[] =
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>";

/* ---- text ---- */

void td_chat_put_content(td_chat_writer *out, const td_chat_content *content, size_t from, size_t to)
{
    size_t base = out->text.n_bytes;
    td_buf_add(&out->text, content->text + from, to - from);
    for (size_t i = 0; i < content->n_media; i++) {
        td_chat_media mark = content->media[i];
        if (mark.at < from || mark.at + mark.n_bytes > to) continue;
        mark.at += base - from;
        td_buf_add(&out->media, &mark, sizeof mark);
    }
}

/* Bytes of the white space character at s, or 0. Python's set: it has U+001C-001F and U+0085, but not U+200B. */
static size_t space_at(const unsigned char *s, size_t n_left)
{
    if ((s[0] >= 0x09 && s[0] <= 0x0d) || (s[0] >= 0x1c && s[0] <= 0x20)) return 1;
    if (n_left >= 2 && s[0] == 0xc2) return s[1] == 0x85 || s[1] == 0xa0 ? 2 : 0;
    if (n_left < 3) return 0;
    unsigned x = (unsigned)(s[0] & 0x0f) << 12 | (unsigned)(s[1] & 0x3f) << 6 | (unsigned)(s[2] & 0x3f);
    if (s[0] < 0xe0 || s[0] > 0xef) return 0;
    bool space = x == 0x1680 || (x >= 0x2000 && x <= 0x200a) || x == 0x2028 || x == 0x2029 || x == 0x202f ||
                 x == 0x205f || x == 0x3000;
    return space ? 3 : 0;
}

void td_chat_strip(const char *text, size_t *from, size_t *to)
{
    const unsigned char *s = (const unsigned char *)text;
    for (size_t n; *from < *to && (n = space_at(s + *from, *to - *from)); *from += n)
        ;
    while (*to > *from) {
        size_t n = 1;
        while (n < 3 && n < *to - *from && (s[*to - n] & 0xc0) == 0x80) n++;
        if (space_at(s + *to - n, n) != n) break;
        *to -= n;
    }
}

const char *td_chat_id(const td_json *object, size_t *n_bytes)
{
    const char *id = td_json_string(td_json_get(object, "tool_call_id"), n_bytes);
    if (!id || !*n_bytes) id = td_json_string(td_json_get(object, "id"), n_bytes);
    return id && *n_bytes ? id : NULL;
}

/* ---- tools ---- */

/* The function object's members but two, which concern the server alone. Names are not escaped at this level. */
static void put_tool(td_buf *out, const td_json *function)
{
    bool first = true;
    td_buf_putc(out, '{');
    for (size_t i = 0; i < td_json_count(function); i++) {
        size_t n_bytes;
        const char *key = td_json_key_at(function, i, &n_bytes);
        if (strcmp(key, "defer_loading") == 0 || strcmp(key, "strict") == 0) continue;
        td_buf_puts(out, first ? "\"" : ", \"");
        td_buf_add(out, key, n_bytes);
        td_buf_puts(out, "\": ");
        td_python_json(out, td_json_at(function, i));
        first = false;
    }
    td_buf_puts(out, "}\n");
}

td_status td_chat_put_tools(td_chat_job *job, td_chat_writer *out)
{
    if (!job->n_tools) return TD_OK;
    td_buf_puts(&out->text, tools_head);
    for (size_t i = 0; i < job->n_tools; i++) {
        bool deferred = false;
        (void)td_json_bool(td_json_get(job->tools[i], "defer_loading"), &deferred); /* other kinds: not deferred */
        if (!deferred) put_tool(&out->text, job->tools[i]);
    }
    td_buf_puts(&out->text, tools_tail);
    return TD_OK;
}

/* ---- calls ---- */

const td_json *td_chat_called_function(const td_json *call)
{
    const td_json *function = td_json_get(call, "function");
    return td_json_count(function) ? function : call;
}

static void put_argument(td_buf *out, const td_json *arguments, size_t i)
{
    size_t n_bytes;
    const char *key = td_json_key_at(arguments, i, &n_bytes);
    const td_json *value = td_json_at(arguments, i);
    td_buf_puts(out, "<arg_key>");
    td_buf_add(out, key, n_bytes);
    td_buf_puts(out, "</arg_key><arg_value>");
    const char *text = td_json_string(value, &n_bytes);
    if (text)
        td_buf_add(out, text, n_bytes);
    else
        td_python_json(out, value);
    td_buf_puts(out, "</arg_value>");
}

td_status td_chat_put_calls(td_chat_job *job, td_chat_writer *out, const td_json *calls)
{
    for (size_t k = 0; k < td_json_count(calls); k++) {
        const td_json *function = td_chat_called_function(td_json_at(calls, k)), *arguments;
        size_t n_bytes;
        const char *name = td_json_string(td_json_get(function, "name"), &n_bytes);
        td_status status = td_chat_arguments(job, td_json_get(function, "arguments"), &arguments);
        if (status) return status;
        td_buf_puts(&out->text, "<tool_call>");
        td_buf_add(&out->text, name, n_bytes);
        for (size_t i = 0; i < td_json_count(arguments); i++) put_argument(&out->text, arguments, i);
        td_buf_puts(&out->text, "</tool_call>");
    }
    return TD_OK;
}

/* ---- results ---- */

typedef struct result {
    td_chat_named id; /* text NULL: none; after sorting, at = its call's place */
    td_chat_content content;
    const td_json *references; /* array of tool_reference, instead of content */
} result;

static int compare_text(const td_chat_named *a, const td_chat_named *b)
{
    if (a->n_bytes != b->n_bytes) return a->n_bytes < b->n_bytes ? -1 : 1;
    return memcmp(a->text, b->text, a->n_bytes);
}

static int compare_named(const void *a, const void *b)
{
    const td_chat_named *x = (const td_chat_named *)a, *y = (const td_chat_named *)b;
    int order = compare_text(x, y);
    return order ? order : x->at < y->at ? -1 : 1;
}

static int compare_results(const void *a, const void *b)
{
    size_t i = ((const result *)a)->id.at, j = ((const result *)b)->id.at;
    return i < j ? -1 : i > j;
}

/* First entry of sorted[0..n) with wanted's text, or NULL. */
static const td_chat_named *find_named(const td_chat_named *sorted, size_t n, const td_chat_named *wanted)
{
    size_t low = 0, high = n;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (compare_text(sorted + mid, wanted) < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return low < n && compare_text(sorted + low, wanted) == 0 ? sorted + low : NULL;
}

/* ids of the calls in order of their text; 0 when one has none or two are the same. */
static size_t sorted_call_ids(const td_json *calls, td_chat_named *ids)
{
    size_t n = td_json_count(calls);
    for (size_t k = 0; k < n; k++) {
        ids[k].at = k;
        ids[k].text = td_chat_id(td_json_at(calls, k), &ids[k].n_bytes);
        if (!ids[k].text) return 0;
    }
    qsort(ids, n, sizeof *ids, compare_named);
    for (size_t k = 1; k < n; k++)
        if (compare_text(ids + k - 1, ids + k) == 0) return 0;
    return n;
}

/* Every result belongs to exactly one call: gives each its call's place. */
static bool match_results(result *results, size_t n, const td_chat_named *ids, size_t n_ids, bool *answered)
{
    for (size_t k = 0; k < n; k++) {
        const td_chat_named *id = results[k].id.text ? find_named(ids, n_ids, &results[k].id) : NULL;
        if (!id || answered[id->at]) return false;
        answered[id->at] = true;
        results[k].id.at = id->at;
    }
    return true;
}

static td_status sort_results(td_chat_job *job, result *results, size_t n, const td_json *calls)
{
    size_t n_calls = td_json_count(calls);
    if (!n_calls || n > n_calls) return TD_OK; /* some id would occur twice or be unknown */
    td_chat_named *ids = (td_chat_named *)td_arena_take(job->arena, n_calls * sizeof *ids, _Alignof(td_chat_named));
    bool *answered = (bool *)td_arena_take(job->arena, n_calls * sizeof *answered, 1);
    if (!ids || !answered) return td_chat_no_memory(job);
    memset(answered, 0, n_calls * sizeof *answered);
    size_t n_ids = sorted_call_ids(calls, ids);
    if (n_ids && match_results(results, n, ids, n_ids, answered)) qsort(results, n, sizeof *results, compare_results);
    return TD_OK;
}

/* Is value an array whose first element says what all of them are? */
static bool is_references(const td_json *value)
{
    return td_json_kind_of(value) == TD_JSON_ARRAY &&
           td_json_equals(td_json_get(td_json_at(value, 0), "type"), "tool_reference");
}

static bool is_outputs(const td_json *content)
{
    return td_json_kind_of(content) == TD_JSON_ARRAY && td_json_get(td_json_at(content, 0), "output");
}

static td_status read_result(td_chat_job *job, const td_json *owner, const td_json *value, const char *path,
                             result *out)
{
    *out = (result){ 0 };
    out->id.text = td_chat_id(owner, &out->id.n_bytes);
    if (is_references(value)) {
        out->references = value;
        return TD_OK;
    }
    return td_chat_read_content(job, value, path, &out->content);
}

static td_status read_results(td_chat_job *job, const td_json *messages, size_t from, size_t to, result *results)
{
    char path[TD_CHAT_PARAM_CAP];
    for (size_t i = from; i < to; i++) {
        const td_json *message = td_json_at(messages, i), *content = td_json_get(message, "content");
        td_status status = TD_OK;
        if (is_outputs(content)) {
            for (size_t k = 0; k < td_json_count(content) && !status; k++) {
                const td_json *entry = td_json_at(content, k);
                snprintf(path, sizeof path, "messages[%zu].content[%zu].output", i, k);
                status = read_result(job, entry, td_json_get(entry, "output"), path, results++);
            }
        } else {
            snprintf(path, sizeof path, "messages[%zu].content", i);
            status = read_result(job, message, content, path, results++);
        }
        if (status) return status;
    }
    return TD_OK;
}

static size_t count_results(const td_json *messages, size_t from, size_t to)
{
    size_t n = 0;
    for (size_t i = from; i < to; i++) {
        const td_json *content = td_json_get(td_json_at(messages, i), "content");
        n += is_outputs(content) ? td_json_count(content) : 1;
    }
    return n;
}

static td_status index_tools(td_chat_job *job)
{
    if (job->tool_names || !job->n_tools) return TD_OK;
    td_chat_named *names =
        (td_chat_named *)td_arena_take(job->arena, job->n_tools * sizeof *names, _Alignof(td_chat_named));
    if (!names) return td_chat_no_memory(job);
    for (size_t i = 0; i < job->n_tools; i++) {
        names[i].at = i;
        names[i].text = td_json_string(td_json_get(job->tools[i], "name"), &names[i].n_bytes);
    }
    qsort(names, job->n_tools, sizeof *names, compare_named);
    job->tool_names = names;
    return TD_OK;
}

static void put_tools_named(const td_chat_job *job, td_buf *out, const td_chat_named *wanted)
{
    const td_chat_named *end = job->tool_names + job->n_tools;
    const td_chat_named *found = find_named(job->tool_names, job->n_tools, wanted);
    for (; found && found < end && compare_text(found, wanted) == 0 && !out->failed; found++)
        put_tool(out, job->tools[found->at]);
}

/* Tools that a search found: their definitions stand in the result, which is where deferred ones appear first. */
static td_status put_references(td_chat_job *job, td_buf *out, const td_json *references)
{
    td_status status = index_tools(job);
    if (status) return status;
    td_buf_puts(out, "<tools>\n");
    for (size_t k = 0; k < td_json_count(references); k++) {
        td_chat_named wanted = { 0 };
        wanted.text = td_json_string(td_json_get(td_json_at(references, k), "name"), &wanted.n_bytes);
        if (wanted.text && job->n_tools) put_tools_named(job, out, &wanted);
    }
    td_buf_puts(out, "</tools>");
    return TD_OK;
}

td_status td_chat_put_results(td_chat_job *job, td_chat_writer *out, const td_json *messages, size_t from, size_t to,
                              const td_json *calls)
{
    size_t n = count_results(messages, from, to);
    result *results = (result *)td_arena_take(job->arena, n * sizeof *results, _Alignof(result));
    if (!results) return td_chat_no_memory(job);
    td_status status = read_results(job, messages, from, to, results);
    if (!status) status = sort_results(job, results, n, calls);
    for (size_t k = 0; k < n && !status; k++) {
        td_buf_puts(&out->text, "<tool_response>");
        if (results[k].references)
            status = put_references(job, &out->text, results[k].references);
        else
            td_chat_put_content(out, &results[k].content, 0, results[k].content.n_bytes);
        td_buf_puts(&out->text, "</tool_response>");
    }
    return status;
}
