/* See prompt.h. */
#include "server/prompt.h"

#include "text/chat_encode.h"

td_status td_prompt_text(const td_server *server, const char *text, size_t n_bytes, td_ids *ids, td_refusal *why)
{
    td_error err = { 0 };
    td_status st = td_tokenizer_encode(server->options.tokenizer, text, n_bytes, 0, ids, &err);
    return st == TD_OK ? TD_OK : td_refuse_status(why, st, &err);
}

td_status td_prompt_chat(const td_server *server, td_arena *arena, const td_json *body, td_ids *ids,
                         td_reply_start *start, td_refusal *why)
{
    td_error err = { 0 };
    td_chat_prompt prompt;
    char param[TD_CHAT_PARAM_CAP] = "";
    td_status st = td_chat_render(arena, body, &server->options.chat, &prompt, param, &err);
    if (st == TD_EINVAL) return td_refuse_field(why, param, "%s", err.text);
    if (st != TD_OK) return td_refuse_status(why, st, &err);
    if (prompt.n_media > 0)
        return td_refuse_unsupported(why, prompt.media[0].param,
                                     prompt.media[0].kind == TD_MEDIA_IMAGE ? "pictures are" : "videos are");
    *start = prompt.start;
    st = td_chat_encode(server->options.tokenizer, &prompt, NULL, ids, NULL, &err);
    return st == TD_OK ? TD_OK : td_refuse_status(why, st, &err);
}

td_status td_prompt_ids(const td_server *server, const td_json *array, const char *param, td_ids *ids, td_refusal *why)
{
    int32_t n_ids = td_tokenizer_n_ids(server->options.tokenizer);
    for (size_t i = 0; i < td_json_count(array); i++) {
        int64_t id;
        if (td_json_int64(td_json_at(array, i), &id) != TD_OK || id < 0 || id >= n_ids)
            return td_refuse_field(why, param, "%s[%zu] must be a token id from 0 to %d", param, i, n_ids - 1);
        if (td_ids_push(ids, (int32_t)id) != TD_OK)
            return td_refuse_status(why, TD_ENOMEM, &(td_error){ .text = "token ids" });
    }
    return TD_OK;
}
