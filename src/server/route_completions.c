/* POST /v1/completions: a text or token ids continued as they are; no template, no split of reasoning. */
#include "server/generate.h"
#include "server/prompt.h"

/* The one choice; ids from first on belong to it. */
static void write_choice(td_generation *g, td_json_writer *w, const char *text, size_t n_bytes, const char *reason,
                         size_t first_id)
{
    td_json_write_key(w, "choices");
    td_json_write_begin(w, '[');
    td_json_write_begin(w, '{');
    td_json_write_member_int(w, "index", 0);
    td_json_write_key(w, "text");
    td_json_write_string(w, text, n_bytes);
    td_json_write_key(w, "logprobs");
    td_logprobs_write(&g->logprobs, w);
    td_json_write_member_text(w, "finish_reason", reason);
    if (reason) td_write_stop_reason(g, w);
    if (g->params.return_token_ids)
        td_write_ids(w, "token_ids", g->reply.ids.data + first_id, g->reply.ids.n - first_id);
    td_json_write_end(w, '}');
    td_json_write_end(w, ']');
}

static void write_chunk(td_generation *g, const char *text, size_t n_bytes)
{
    td_json_writer w;
    td_sse_open(g, &w);
    write_choice(g, &w, text, n_bytes, NULL, g->n_ids_sent);
    if (g->params.return_token_ids && !g->begun) td_write_ids(&w, "prompt_token_ids", g->prompt.data, g->prompt.n);
    g->n_ids_sent = g->reply.ids.n;
    td_write_chunk_usage(g, &w);
    td_sse_close(g, &w);
}

/* An empty piece at once: proxies and clients see that the request was taken, however long the prompt runs. */
static void begin(td_generation *g)
{
    write_chunk(g, "", 0);
}

static void delta(td_generation *g, td_delta kind, const td_buf *text)
{
    (void)kind; /* everything is content here */
    write_chunk(g, text->data, text->n_bytes);
}

static void finish(td_generation *g)
{
    td_json_writer w;
    td_sse_open(g, &w);
    write_choice(g, &w, "", 0, td_reply_reason(&g->reply), g->n_ids_sent);
    td_sse_finish(g, &w);
}

static void whole(td_generation *g)
{
    const td_buf *text = &g->reply.content;
    td_json_writer w = { .out = &g->x->reply };
    td_json_write_begin(&w, '{');
    td_write_head(g, &w, "text_completion");
    write_choice(g, &w, text->data ? text->data : "", text->n_bytes, td_reply_reason(&g->reply), 0);
    if (g->params.return_token_ids) td_write_ids(&w, "prompt_token_ids", g->prompt.data, g->prompt.n);
    td_json_write_key(&w, "usage");
    td_write_usage(g, &w);
    td_write_timing(g, &w);
    td_json_write_end(&w, '}');
}

static const td_form form = { .id_prefix = "cmpl-",
                              .prompt_param = "prompt",
                              .chunk_object = "text_completion",
                              .begin = begin,
                              .delta = delta,
                              .finish = finish,
                              .whole = whole };

/* A string, an array of ids, or an array that holds exactly one of these. */
static td_status read_prompt(td_generation *g, const td_json *prompt, td_refusal *why)
{
    static const char expected[] = "prompt must be a string or an array of token ids";
    const td_server *server = g->x->server;
    if (td_json_kind_of(prompt) == TD_JSON_ARRAY) {
        td_json_kind first = td_json_kind_of(td_json_at(prompt, 0));
        if (first == TD_JSON_INT || first == TD_JSON_REAL)
            return td_prompt_ids(server, prompt, "prompt", &g->prompt, why);
        if (td_json_count(prompt) > 1)
            return td_refuse(why, 400, "unsupported_parameter", "prompt",
                             "prompt must be one prompt: this server gives one choice a request");
        prompt = td_json_at(prompt, 0);
        if (td_json_kind_of(prompt) == TD_JSON_ARRAY) return td_prompt_ids(server, prompt, "prompt", &g->prompt, why);
    }
    size_t n_bytes = 0;
    const char *text = td_json_string(prompt, &n_bytes);
    if (!text) return td_refuse_field(why, "prompt", "%s, not %s", expected, td_json_kind_name(prompt));
    return td_prompt_text(server, text, n_bytes, &g->prompt, why);
}

void td_route_completions(td_call *x)
{
    static const td_reply_ids no_tags = { -1, -1, -1, -1 };
    td_refusal why;
    const td_json *body = td_call_body(x);
    td_generation *g = body ? td_generation_create(x, &form) : NULL;
    if (!g) return;
    td_status st = td_params_completions(&g->params, x->server, body, &g->arena, &why);
    if (st == TD_OK) st = read_prompt(g, td_json_get(body, "prompt"), &why);
    if (st != TD_OK) {
        td_call_refuse(x, &why);
        return;
    }
    td_call_drop_body(x);
    td_generation_run(g, TD_REPLY_IN_ANSWER, &no_tags);
}
