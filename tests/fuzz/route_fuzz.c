/* Request bodies straight into the routes' readers, without a socket: JSON, fields, prompt, refusal texts. The first
 * byte chooses the route. */
#include "fake_engine.h"

#include "server/params.h"
#include "server/prompt.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static td_server server;

static void start(void)
{
    server.options = (td_server_options){ .model_id = "fuzz",
                                          .strict_model = true,
                                          .tokenizer = fake_tokenizer(),
                                          .context_tokens = 1000,
                                          .temperature = 1,
                                          .top_p = 1,
                                          .max_tokens = 20,
                                          .chat = { .effort = TD_EFFORT_MAX } };
}

/* A refusal is complete and its JSON is JSON. */
static void check_refusal(const td_refusal *why)
{
    td_buf out;
    td_arena arena;
    td_error err;
    const td_json *value;
    td_check(why->status >= 400 && why->status < 600 && why->text[0]);
    td_buf_init(&out, 0);
    td_arena_init(&arena, 0);
    td_refusal_write(why, &out);
    td_check(td_json_parse(&arena, out.data, out.n_bytes, &value, &err) == TD_OK);
    td_check(td_json_count(td_json_get(value, "error")) == 4);
    td_arena_deinit(&arena);
    td_buf_deinit(&out);
}

/* What was accepted keeps the promises of its ranges. */
static void check_params(const td_params *p)
{
    td_check(p->temperature >= 0 && p->temperature <= 2 && p->top_p > 0 && p->top_p <= 1);
    td_check(p->min_p >= 0 && p->min_p <= 1 && p->max_tokens >= 1 && p->min_tokens >= 0);
    td_check(p->n_stop_ids >= 0 && p->n_stop_ids <= TD_STOP_IDS_MAX - TD_END_IDS_MAX);
    td_check(p->n_top_logprobs >= 0 && p->n_top_logprobs <= TD_TOP_LOGPROBS_MAX && strlen(p->model) < TD_MODEL_CAP);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (!server.options.tokenizer) start();
    if (n_bytes < 1) return 0;
    td_arena arena;
    td_error err;
    td_refusal why = { 0 };
    const td_json *body;
    char *text = malloc(n_bytes); /* the first byte is not text: there is room for the reader's zero */
    memcpy(text, data + 1, n_bytes - 1);
    td_arena_init(&arena, 0);
    if (td_json_parse(&arena, text, n_bytes - 1, &body, &err) == TD_OK) {
        td_params params;
        td_ids ids = { 0 };
        td_reply_start start_at;
        td_status st = data[0] & 1 ? td_params_chat(&params, &server, body, &arena, &why)
                                   : td_params_completions(&params, &server, body, &arena, &why);
        if (st == TD_OK) check_params(&params);
        if (st == TD_OK && (data[0] & 1)) st = td_prompt_chat(&server, &arena, body, &ids, &start_at, &why);
        if (st == TD_OK && !(data[0] & 1))
            st = td_prompt_ids(&server, td_json_get(body, "prompt"), "prompt", &ids, &why);
        if (st != TD_OK) check_refusal(&why);
        td_ids_deinit(&ids);
    }
    td_arena_deinit(&arena);
    free(text);
    return 0;
}
