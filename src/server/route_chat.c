/* POST /v1/chat/completions. The shape of chunks follows what clients check: every chunk has `choices`, the role comes
 * once and first, text and reasoning never share a delta, usage comes as docs/api.md says. */
#include "server/generate.h"
#include "server/prompt.h"

static void open_choice(td_json_writer *w)
{
    td_json_write_key(w, "choices");
    td_json_write_begin(w, '[');
    td_json_write_begin(w, '{');
    td_json_write_member_int(w, "index", 0);
    td_json_write_key(w, "delta");
    td_json_write_begin(w, '{');
}

/* The rest of the choice after its delta, with what belongs to the tokens since the last chunk. */
static void close_choice(td_generation *g, td_json_writer *w, const char *reason)
{
    td_json_write_end(w, '}');
    td_json_write_key(w, "logprobs");
    td_logprobs_write(&g->logprobs, w);
    td_json_write_member_text(w, "finish_reason", reason);
    if (reason) td_write_stop_reason(g, w);
    if (g->params.return_token_ids) {
        td_write_ids(w, "token_ids", g->reply.ids.data + g->n_ids_sent, g->reply.ids.n - g->n_ids_sent);
        g->n_ids_sent = g->reply.ids.n;
    }
    td_json_write_end(w, '}');
    td_json_write_end(w, ']');
}

static void begin(td_generation *g)
{
    td_json_writer w;
    td_sse_open(g, &w);
    open_choice(&w);
    td_json_write_member_text(&w, "role", "assistant");
    td_json_write_member_text(&w, "content", "");
    td_json_write_end(&w, '}');
    td_json_write_key(&w, "logprobs");
    td_json_write_null(&w);
    td_json_write_member_text(&w, "finish_reason", NULL);
    td_json_write_end(&w, '}');
    td_json_write_end(&w, ']');
    if (g->params.return_token_ids) td_write_ids(&w, "prompt_token_ids", g->prompt.data, g->prompt.n);
    td_write_chunk_usage(g, &w);
    td_sse_close(g, &w);
}

static void write_text(td_json_writer *w, const char *name, const td_buf *text)
{
    td_json_write_key(w, name);
    td_json_write_string(w, text->data ? text->data : "", text->n_bytes);
}

static void write_reasoning(td_generation *g, td_json_writer *w, const td_buf *text)
{
    write_text(w, "reasoning_content", text);
    if (g->x->server->options.reasoning_both) write_text(w, "reasoning", text);
}

static void delta(td_generation *g, td_delta kind, const td_buf *text)
{
    td_json_writer w;
    td_sse_open(g, &w);
    open_choice(&w);
    if (kind == TD_DELTA_REASONING)
        write_reasoning(g, &w, text);
    else
        write_text(&w, "content", text);
    close_choice(g, &w, NULL);
    td_write_chunk_usage(g, &w);
    td_sse_close(g, &w);
}

static void finish(td_generation *g)
{
    td_json_writer w;
    td_sse_open(g, &w);
    open_choice(&w);
    close_choice(g, &w, td_reply_reason(&g->reply));
    td_sse_finish(g, &w);
}

static void whole(td_generation *g)
{
    td_json_writer w = { .out = &g->x->reply };
    td_json_write_begin(&w, '{');
    td_write_head(g, &w, "chat.completion");
    td_json_write_key(&w, "choices");
    td_json_write_begin(&w, '[');
    td_json_write_begin(&w, '{');
    td_json_write_member_int(&w, "index", 0);
    td_json_write_key(&w, "message");
    td_json_write_begin(&w, '{');
    td_json_write_member_text(&w, "role", "assistant");
    write_text(&w, "content", &g->reply.content);
    if (g->reply.reasoning.n_bytes > 0) write_reasoning(g, &w, &g->reply.reasoning);
    td_json_write_member_text(&w, "refusal", NULL);
    td_json_write_end(&w, '}');
    td_json_write_key(&w, "logprobs");
    td_logprobs_write(&g->logprobs, &w);
    td_json_write_member_text(&w, "finish_reason", td_reply_reason(&g->reply));
    td_write_stop_reason(g, &w);
    if (g->params.return_token_ids) td_write_ids(&w, "token_ids", g->reply.ids.data, g->reply.ids.n);
    td_json_write_end(&w, '}');
    td_json_write_end(&w, ']');
    if (g->params.return_token_ids) td_write_ids(&w, "prompt_token_ids", g->prompt.data, g->prompt.n);
    td_json_write_key(&w, "usage");
    td_write_usage(g, &w);
    td_write_timing(g, &w);
    td_json_write_end(&w, '}');
}

static const td_form form = { .id_prefix = "chatcmpl-",
                              .prompt_param = "messages",
                              .chunk_object = "chat.completion.chunk",
                              .begin = begin,
                              .delta = delta,
                              .finish = finish,
                              .whole = whole };

void td_route_chat(td_call *x)
{
    td_refusal why;
    td_reply_start start = TD_REPLY_IN_ANSWER;
    const td_json *body = td_call_body(x);
    td_generation *g = body ? td_generation_create(x, &form) : NULL;
    if (!g) return;
    td_status st = td_params_chat(&g->params, x->server, body, &g->arena, &why);
    if (st == TD_OK) st = td_prompt_chat(x->server, &x->arena, body, &g->prompt, &start, &why);
    if (st != TD_OK) {
        td_call_refuse(x, &why);
        return;
    }
    td_call_drop_body(x);
    td_generation_run(g, start, &x->server->reply_ids);
}
