/* Contents of messages and arguments of tool calls, as clients send them, turned into what the template shows.
 * A conversation is replayed whole with every request: what one client's library once wrote must not make all further
 * requests fail, so arguments that are no JSON are shown as they are instead of being refused. */
#include "text/chat_parts.h"

#include "base/json_write.h"
#include "text/python_json.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

td_status td_chat_refuse(td_chat_job *job, const char *text, const char *path_fmt, ...)
{
    va_list args;
    va_start(args, path_fmt);
    vsnprintf(job->param, TD_CHAT_PARAM_CAP, path_fmt, args);
    va_end(args);
    return td_fail(job->err, TD_EINVAL, "%s: %s", job->param, text);
}

td_status td_chat_no_memory(td_chat_job *job)
{
    return td_fail(job->err, TD_ENOMEM, "out of memory rendering the prompt");
}

/* Which member of a part of this type is its text, or NULL. */
static const char *text_member(const td_json *type)
{
    if (td_json_equals(type, "text") || td_json_equals(type, "input_text") || td_json_equals(type, "output_text"))
        return "text";
    return td_json_equals(type, "refusal") ? "refusal" : NULL;
}

static bool is_image(const td_json *type)
{
    return td_json_equals(type, "image_url") || td_json_equals(type, "image") || td_json_equals(type, "input_image");
}

static bool is_video(const td_json *type)
{
    return td_json_equals(type, "video_url") || td_json_equals(type, "video") || td_json_equals(type, "input_video");
}

static bool is_audio(const td_json *type)
{
    return td_json_equals(type, "input_audio") || td_json_equals(type, "audio_url") || td_json_equals(type, "audio");
}

static td_status add_media(td_chat_job *job, const td_json *part, bool image, const char *path, size_t i, td_buf *text,
                           td_buf *media)
{
    static const char *const around[2][3] = { { "<|begin_of_video|>", "<|video|>", "<|end_of_video|>" },
                                              { "<|begin_of_image|>", "<|image|>", "<|end_of_image|>" } };
    char where[TD_CHAT_PARAM_CAP];
    snprintf(where, sizeof where, "%s[%zu]", path, i);
    td_buf_puts(text, around[image][0]);
    const td_chat_media mark = { .kind = image ? TD_MEDIA_IMAGE : TD_MEDIA_VIDEO,
                                 .at = text->n_bytes,
                                 .n_bytes = strlen(around[image][1]),
                                 .part = part,
                                 .param = td_arena_strdup(job->arena, where) };
    td_buf_puts(text, around[image][1]);
    td_buf_puts(text, around[image][2]);
    td_buf_add(media, &mark, sizeof mark);
    return mark.param ? TD_OK : td_chat_no_memory(job);
}

static td_status add_part(td_chat_job *job, const td_json *part, const char *path, size_t i, td_buf *text,
                          td_buf *media)
{
    size_t n_bytes;
    const char *plain = td_json_string(part, &n_bytes);
    if (plain) {
        td_buf_add(text, plain, n_bytes);
        return TD_OK;
    }
    if (td_json_kind_of(part) != TD_JSON_OBJECT)
        return td_chat_refuse(job, "content parts must be objects", "%s[%zu]", path, i);
    const td_json *type = td_json_get(part, "type");
    const char *member = text_member(type);
    if (member) {
        plain = td_json_string(td_json_get(part, member), &n_bytes);
        if (!plain) return td_chat_refuse(job, "must be a string", "%s[%zu].%s", path, i, member);
        td_buf_add(text, plain, n_bytes);
        return TD_OK;
    }
    if (is_image(type) || is_video(type)) return add_media(job, part, is_image(type), path, i, text, media);
    if (is_audio(type)) return td_chat_refuse(job, "this model does not take audio", "%s[%zu].type", path, i);
    return td_chat_refuse(job, "unknown type of content part (text, image_url and video_url are known)", "%s[%zu].type",
                          path, i);
}

static td_status read_parts(td_chat_job *job, const td_json *value, const char *path, td_chat_content *content)
{
    td_buf text, media;
    td_status status = TD_OK;
    td_buf_init(&text, TD_CHAT_MAX_PROMPT_BYTES);
    td_buf_init(&media, 0);
    for (size_t i = 0; i < td_json_count(value) && !status; i++)
        status = add_part(job, td_json_at(value, i), path, i, &text, &media);
    if (!status && (text.failed || media.failed)) status = td_chat_no_memory(job);
    if (!status && text.n_bytes) {
        content->text = td_arena_strndup(job->arena, text.data, text.n_bytes);
        content->n_bytes = text.n_bytes;
        if (!content->text) status = td_chat_no_memory(job);
    }
    if (!status && media.n_bytes) {
        content->n_media = media.n_bytes / sizeof *content->media;
        content->media = (td_chat_media *)td_arena_take(job->arena, media.n_bytes, _Alignof(td_chat_media));
        if (content->media)
            memcpy(content->media, media.data, media.n_bytes);
        else
            status = td_chat_no_memory(job);
    }
    td_buf_deinit(&text);
    td_buf_deinit(&media);
    return status;
}

td_status td_chat_read_content(td_chat_job *job, const td_json *value, const char *path, td_chat_content *content)
{
    size_t n_bytes = 0;
    const char *text = td_json_string(value, &n_bytes);
    *content = (td_chat_content){ .text = text ? text : "", .n_bytes = n_bytes };
    if (text || td_json_is_null(value)) return TD_OK;
    if (td_json_kind_of(value) == TD_JSON_ARRAY) return read_parts(job, value, path, content);
    return td_chat_refuse(job, "must be a string or an array of content parts", "%s", path);
}

/* {"_invalid_arguments": text}: keeps the call, and the result that answers it, in the conversation. */
static td_status invalid_arguments(td_chat_job *job, const td_json *value, const td_json **object)
{
    td_buf raw, json;
    size_t n_bytes;
    const char *text = td_json_string(value, &n_bytes);
    td_status status = TD_OK;
    td_buf_init(&raw, 0);
    td_buf_init(&json, 0);
    if (text)
        td_buf_add(&raw, text, n_bytes);
    else
        td_python_json(&raw, value);
    td_buf_puts(&json, "{\"_invalid_arguments\":");
    td_json_escape(&json, raw.n_bytes ? raw.data : "", raw.n_bytes);
    td_buf_putc(&json, '}');
    char *kept = raw.failed || json.failed ? NULL : td_arena_strndup(job->arena, json.data, json.n_bytes);
    if (kept)
        status = td_json_parse(job->arena, kept, json.n_bytes, object, job->err);
    else
        status = td_chat_no_memory(job);
    td_buf_deinit(&raw);
    td_buf_deinit(&json);
    return status;
}

static bool is_blank(const char *text, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++)
        if (!strchr(" \t\r\n", text[i]) || !text[i]) return false;
    return true;
}

td_status td_chat_arguments(td_chat_job *job, const td_json *value, const td_json **object)
{
    size_t n_bytes;
    const char *text = td_json_string(value, &n_bytes);
    *object = NULL;
    if (td_json_kind_of(value) == TD_JSON_OBJECT) *object = value;
    if (*object || td_json_is_null(value) || (text && is_blank(text, n_bytes))) return TD_OK;
    if (text) {
        char *copy =
            td_arena_strndup(job->arena, text, n_bytes); /* the reader writes, and the text may still be needed */
        const td_json *parsed = NULL;
        if (!copy) return td_chat_no_memory(job);
        td_status status = td_json_parse(job->arena, copy, n_bytes, &parsed, NULL);
        if (status == TD_ENOMEM) return td_chat_no_memory(job);
        if (td_json_kind_of(parsed) == TD_JSON_NULL) return TD_OK;
        if (td_json_kind_of(parsed) == TD_JSON_OBJECT) {
            *object = parsed;
            return TD_OK;
        }
    }
    return invalid_arguments(job, value, object);
}
