/* POST /tokenize and /detokenize, with vLLM's field names. A chat is rendered by the code that the chat route uses, so
 * the ids shown are the ids that would run. */
#include "server/generate.h"
#include "server/prompt.h"

static void write_token_strs(const td_server *server, td_json_writer *w, const td_ids *ids)
{
    td_buf text;
    td_buf_init(&text, 0);
    td_json_write_begin(w, '[');
    for (size_t i = 0; i < ids->n; i++) {
        td_buf_clear(&text);
        td_token_text(server->options.tokenizer, ids->data[i], &text);
        td_json_write_string(w, text.data ? text.data : "", text.n_bytes);
    }
    td_json_write_end(w, ']');
    td_buf_deinit(&text);
}

static td_status read_prompt(td_call *x, const td_json *body, td_ids *ids, td_refusal *why)
{
    const td_json *prompt = td_json_get(body, "prompt");
    td_reply_start unused;
    bool flag = false;
    td_status st = td_params_bool(body, "add_special_tokens", &flag, why);
    if (st != TD_OK) return st;
    if (!td_json_is_null(td_json_get(body, "chat_template")))
        return td_refuse(why, 400, "unsupported_parameter", "chat_template", "chat_template: the server's own is used");
    if (!td_json_is_null(td_json_get(body, "messages")))
        return td_prompt_chat(x->server, &x->arena, body, ids, &unused, why);
    if (td_json_is_null(prompt)) return td_refuse_field(why, "prompt", "prompt or messages must be given");
    size_t n_bytes = 0;
    const char *text = td_json_string(prompt, &n_bytes);
    if (!text) return td_refuse_field(why, "prompt", "prompt must be a string, not %s", td_json_kind_name(prompt));
    return td_prompt_text(x->server, text, n_bytes, ids, why);
}

void td_route_tokenize(td_call *x)
{
    td_refusal why;
    td_ids ids = { 0 };
    bool strings = false;
    char model[TD_MODEL_CAP];
    const td_json *body = td_call_body(x);
    if (!body) return;
    td_status st = td_params_model(model, x->server, body, &why);
    if (st == TD_OK) st = td_params_bool(body, "return_token_strs", &strings, &why);
    if (st == TD_OK) st = read_prompt(x, body, &ids, &why);
    if (st != TD_OK) {
        td_call_refuse(x, &why);
    } else {
        td_json_writer w = { .out = &x->reply };
        td_json_write_begin(&w, '{');
        td_json_write_member_int(&w, "count", (int64_t)ids.n);
        td_json_write_member_int(&w, "max_model_len", x->server->options.context_tokens);
        td_write_ids(&w, "tokens", ids.data, ids.n);
        td_json_write_key(&w, "token_strs");
        if (strings)
            write_token_strs(x->server, &w, &ids);
        else
            td_json_write_null(&w);
        td_json_write_end(&w, '}');
        td_call_json(x);
    }
    td_ids_deinit(&ids);
}

/* All ids' bytes joined, then made valid UTF-8: a character may span tokens. */
static void decode(const td_server *server, const td_ids *ids, td_buf *out)
{
    td_utf8_stream utf8;
    td_utf8_stream_init(&utf8);
    char *room;
    for (size_t i = 0; i < ids->n; i++) {
        const char *bytes = "";
        size_t n_bytes = 0;
        (void)td_tokenizer_id_bytes(server->options.tokenizer, ids->data[i], &bytes, &n_bytes);
        room = td_buf_reserve(out, TD_UTF8_STREAM_ROOM(n_bytes));
        if (room) td_buf_commit(out, td_utf8_stream_push(&utf8, bytes, n_bytes, room));
    }
    room = td_buf_reserve(out, TD_UTF8_STREAM_ROOM(0));
    if (room) td_buf_commit(out, td_utf8_stream_finish(&utf8, room));
}

void td_route_detokenize(td_call *x)
{
    td_refusal why;
    td_ids ids = { 0 };
    char model[TD_MODEL_CAP];
    const td_json *body = td_call_body(x);
    if (!body) return;
    const td_json *tokens = td_json_get(body, "tokens");
    td_status st = td_params_model(model, x->server, body, &why);
    if (st == TD_OK && td_json_kind_of(tokens) != TD_JSON_ARRAY)
        st = td_refuse_field(&why, "tokens", "tokens must be an array of token ids, not %s", td_json_kind_name(tokens));
    if (st == TD_OK) st = td_prompt_ids(x->server, tokens, "tokens", &ids, &why);
    if (st != TD_OK) {
        td_call_refuse(x, &why);
    } else {
        td_buf text;
        td_buf_init(&text, 0);
        decode(x->server, &ids, &text);
        td_json_writer w = { .out = &x->reply };
        td_json_write_begin(&w, '{');
        td_json_write_key(&w, "prompt");
        td_json_write_string(&w, text.data ? text.data : "", text.n_bytes);
        td_json_write_end(&w, '}');
        if (text.failed) x->reply.failed = true;
        td_buf_deinit(&text);
        td_call_json(x);
    }
    td_ids_deinit(&ids);
}
