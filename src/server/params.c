/* See params.h. Each field has one short reader; the two lists at the end say which field belongs to which route. */
#include "server/params.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MODEL_MAX_BYTES = TD_MODEL_CAP - 1, TOP_LOGPROBS_MAX = TD_TOP_LOGPROBS_MAX };

/* ------------------------------------------------------------------------------------------------ readers --- */

td_status td_params_bool(const td_json *body, const char *name, bool *value, td_refusal *why)
{
    const td_json *field = td_json_get(body, name);
    if (td_json_is_null(field)) return TD_OK;
    if (td_json_bool(field, value) != TD_OK)
        return td_refuse_field(why, name, "%s must be true or false, not %s", name, td_json_kind_name(field));
    return TD_OK;
}

/* An integer in [low, high], or absent (*value and *given stay). */
static td_status read_int(const td_json *body, const char *name, int64_t low, int64_t high, int64_t *value, bool *given,
                          td_refusal *why)
{
    const td_json *field = td_json_get(body, name);
    int64_t x;
    if (td_json_is_null(field)) return TD_OK;
    if (td_json_int64(field, &x) != TD_OK) return td_refuse_field(why, name, "%s must be an integer", name);
    if (x < low && high == INT64_MAX)
        return td_refuse_field(why, name, "%s must be at least %lld, not %lld", name, (long long)low, (long long)x);
    if (x < low || x > high)
        return td_refuse_field(why, name, "%s must be from %lld to %lld, not %lld", name, (long long)low,
                               (long long)high, (long long)x);
    *value = x;
    if (given) *given = true;
    return TD_OK;
}

/* A finite number in [low, high] (open_low: above low), or absent. */
static td_status read_number(const td_json *body, const char *name, double low, bool open_low, double high,
                             double *value, td_refusal *why)
{
    const td_json *field = td_json_get(body, name);
    double x;
    if (td_json_is_null(field)) return TD_OK;
    if (td_json_double(field, &x) != TD_OK)
        return td_refuse_field(why, name, "%s must be a number, not %s", name, td_json_kind_name(field));
    if (!isfinite(x)) return td_refuse_field(why, name, "%s must be a finite number", name);
    if (x < low || x > high || (open_low && x == low))
        return td_refuse_field(why, name, "%s must be %s %g and at most %g, not %g", name,
                               open_low ? "above" : "at least", low, high, x);
    *value = x;
    return TD_OK;
}

static td_status check_string(const td_json *body, const char *name, td_refusal *why)
{
    const td_json *field = td_json_get(body, name);
    if (td_json_is_null(field) || td_json_kind_of(field) == TD_JSON_STRING) return TD_OK;
    return td_refuse_field(why, name, "%s must be a string, not %s", name, td_json_kind_name(field));
}

/* Fields of structured output, tools and media: present means that the client relies on them, so they are not ignored.
 */
static td_status refuse_present(const td_json *body, const char *const *names, const char *what, td_refusal *why)
{
    for (; *names; names++)
        if (!td_json_is_null(td_json_get(body, *names))) return td_refuse_unsupported(why, *names, what);
    return TD_OK;
}

/* ------------------------------------------------------------------------------------- one field or family --- */

td_status td_params_model(char model[TD_MODEL_CAP], const td_server *server, const td_json *body, td_refusal *why)
{
    const td_server_options *options = &server->options;
    const td_json *field = td_json_get(body, "model");
    size_t n_bytes = 0;
    snprintf(model, TD_MODEL_CAP, "%s", options->model_id);
    if (td_json_is_null(field)) return TD_OK;
    const char *name = td_json_string(field, &n_bytes);
    if (!name) return td_refuse_field(why, "model", "model must be a string, not %s", td_json_kind_name(field));
    if (n_bytes > MODEL_MAX_BYTES || strlen(name) != n_bytes)
        return td_refuse_field(why, "model", "model must be at most %d bytes without zero characters", MODEL_MAX_BYTES);
    bool known = n_bytes == 0 || strcmp(name, options->model_id) == 0;
    for (int i = 0; i < options->n_aliases && !known; i++) known = strcmp(name, options->aliases[i]) == 0;
    if (!known && options->strict_model)
        return td_refuse(why, 404, "model_not_found", "model", "the model `%s` does not exist; this server has `%s`",
                         name, options->model_id);
    if (n_bytes > 0) snprintf(model, TD_MODEL_CAP, "%s", name);
    return TD_OK;
}

static td_status read_stream(td_params *params, const td_json *body, td_refusal *why)
{
    td_status st = td_params_bool(body, "stream", &params->stream, why);
    const td_json *options = td_json_get(body, "stream_options");
    if (st != TD_OK || td_json_is_null(options)) return st;
    if (td_json_kind_of(options) != TD_JSON_OBJECT)
        return td_refuse_field(why, "stream_options", "stream_options must be an object, not %s",
                               td_json_kind_name(options));
    st = td_params_bool(options, "include_usage", &params->include_usage, why);
    if (st == TD_OK) st = td_params_bool(options, "continuous_usage_stats", &params->continuous_usage, why);
    return st;
}

static td_status read_limits(td_params *params, const td_server *server, const td_json *body, td_refusal *why)
{
    int64_t min_tokens = 0;
    params->max_tokens = server->options.max_tokens;
    td_status st = read_int(body, "max_tokens", 1, INT64_MAX, &params->max_tokens, &params->max_given, why);
    if (st == TD_OK)
        st = read_int(body, "max_completion_tokens", 1, INT64_MAX, &params->max_tokens, &params->max_given, why);
    if (st == TD_OK) st = read_int(body, "min_tokens", 0, INT32_MAX, &min_tokens, NULL, why);
    if (st != TD_OK) return st;
    params->min_tokens = (int)min_tokens;
    if (params->max_given && min_tokens > params->max_tokens)
        return td_refuse_field(why, "min_tokens", "min_tokens must be at most max_tokens");
    return TD_OK;
}

static td_status read_sampling(td_params *params, const td_server *server, const td_json *body, td_refusal *why)
{
    params->temperature = server->options.temperature;
    params->top_p = server->options.top_p;
    td_status st = read_number(body, "temperature", 0, false, 2, &params->temperature, why);
    if (st == TD_OK) st = read_number(body, "top_p", 0, true, 1, &params->top_p, why);
    if (st == TD_OK) st = read_number(body, "min_p", 0, false, 1, &params->min_p, why);
    if (st == TD_OK) st = read_int(body, "top_k", INT64_MIN, INT64_MAX, &params->top_k, NULL, why);
    if (st == TD_OK) st = read_int(body, "seed", INT64_MIN, INT64_MAX, &params->seed, &params->seeded, why);
    return st;
}

/* Penalties and biases are checked and have no effect: clients send them by habit, and a refusal would end their
 * session over something they do not depend on. */
static td_status check_ignored_sampling(const td_json *body, td_refusal *why)
{
    double unused = 0;
    td_status st = read_number(body, "presence_penalty", -2, false, 2, &unused, why);
    if (st == TD_OK) st = read_number(body, "frequency_penalty", -2, false, 2, &unused, why);
    if (st == TD_OK) st = read_number(body, "repetition_penalty", 0, true, 1e6, &unused, why);
    const td_json *bias = td_json_get(body, "logit_bias");
    if (st != TD_OK || td_json_is_null(bias)) return st;
    if (td_json_kind_of(bias) != TD_JSON_OBJECT)
        return td_refuse_field(why, "logit_bias", "logit_bias must be an object, not %s", td_json_kind_name(bias));
    for (size_t i = 0; i < td_json_count(bias); i++) {
        if (td_json_double(td_json_at(bias, i), &unused) != TD_OK || !(fabs(unused) <= 100))
            return td_refuse_field(why, "logit_bias", "logit_bias: values must be numbers from -100 to 100");
    }
    return TD_OK;
}

static td_status read_stops(td_params *params, const td_server *server, const td_json *body, td_arena *arena,
                            td_refusal *why)
{
    enum { STOP_IDS_MAX = TD_STOP_IDS_MAX - TD_END_IDS_MAX };
    td_error err;
    td_status st = td_stop_init(&params->stop, arena, td_json_get(body, "stop"), &err);
    if (st == TD_ENOMEM) return td_refuse_status(why, st, &err);
    if (st != TD_OK) return td_refuse_field(why, "stop", "%s", err.text);
    const td_json *ids = td_json_get(body, "stop_token_ids");
    if (!td_json_is_null(ids)) {
        if (td_json_kind_of(ids) != TD_JSON_ARRAY || td_json_count(ids) > STOP_IDS_MAX)
            return td_refuse_field(why, "stop_token_ids", "stop_token_ids must be an array of at most %d token ids",
                                   STOP_IDS_MAX);
        int32_t n_ids = td_tokenizer_n_ids(server->options.tokenizer);
        for (size_t i = 0; i < td_json_count(ids); i++) {
            int64_t id;
            if (td_json_int64(td_json_at(ids, i), &id) != TD_OK || id < 0 || id >= n_ids)
                return td_refuse_field(why, "stop_token_ids", "stop_token_ids[%zu] must be a token id from 0 to %d", i,
                                       n_ids - 1);
            params->stop_ids[params->n_stop_ids++] = (int32_t)id;
        }
    }
    return td_params_bool(body, "ignore_eos", &params->ignore_eos, why);
}

static td_status check_one_choice(const td_json *body, td_refusal *why)
{
    static const char *const names[] = { "n", "best_of" };
    for (int i = 0; i < 2; i++) {
        int64_t n = 1;
        const td_json *field = td_json_get(body, names[i]);
        if (td_json_is_null(field)) continue;
        if (td_json_int64(field, &n) != TD_OK) return td_refuse_field(why, names[i], "%s must be an integer", names[i]);
        if (n != 1)
            return td_refuse(why, 400, "unsupported_parameter", names[i],
                             "%s must be 1: this server gives one choice a request", names[i]);
    }
    bool beams = false;
    td_status st = td_params_bool(body, "use_beam_search", &beams, why);
    if (st == TD_OK && beams)
        return td_refuse(why, 400, "unsupported_parameter", "use_beam_search", "beam search is not supported");
    return st;
}

static td_status read_priority(td_params *params, const td_json *body, td_refusal *why)
{
    const td_json *field = td_json_get(body, "priority");
    int64_t level = 0;
    if (td_json_is_null(field)) return TD_OK;
    if (td_json_equals(field, "background"))
        params->background = true;
    else if (td_json_equals(field, "foreground"))
        params->background = false;
    else if (td_json_int64(field, &level) == TD_OK)
        params->background = level > 0;
    else
        return td_refuse_field(why, "priority", "priority must be \"foreground\", \"background\" or an integer");
    return TD_OK;
}

/* A forced end of the think block needs the engine; until then a budget that would not be kept is refused. */
static td_status check_thinking_budget(const td_json *body, td_refusal *why)
{
    static const char *const names[] = { "thinking_budget", "thinking_token_budget" };
    for (int i = 0; i < 2; i++) {
        int64_t budget = 0;
        td_status st = read_int(body, names[i], 0, INT64_MAX, &budget, NULL, why);
        if (st != TD_OK) return st;
        if (budget > 0) return td_refuse_unsupported(why, names[i], "a thinking budget is");
    }
    return TD_OK;
}

static td_status check_structured(const td_json *body, td_refusal *why)
{
    static const char *const guided[] = { "guided_json",    "guided_regex",       "guided_choice",
                                          "guided_grammar", "structured_outputs", NULL };
    const td_json *format = td_json_get(body, "response_format");
    if (!td_json_is_null(format)) {
        if (td_json_kind_of(format) != TD_JSON_OBJECT)
            return td_refuse_field(why, "response_format", "response_format must be an object, not %s",
                                   td_json_kind_name(format));
        if (!td_json_equals(td_json_get(format, "type"), "text"))
            return td_refuse_unsupported(why, "response_format", "structured output is");
    }
    return refuse_present(body, guided, "structured output is", why);
}

/* Tools that are offered must be callable; without an offer, or with tool_choice none, nothing is asked of the server.
 */
static td_status check_tools(const td_json *body, td_refusal *why)
{
    const td_json *choice = td_json_get(body, "tool_choice"), *call = td_json_get(body, "function_call");
    bool unused = true;
    if (!td_json_equals(choice, "none") && td_json_count(td_json_get(body, "tools")) > 0)
        return td_refuse_unsupported(why, "tools", "tools are");
    if (!td_json_equals(call, "none") && td_json_count(td_json_get(body, "functions")) > 0)
        return td_refuse_unsupported(why, "functions", "tools are");
    if (!td_json_is_null(choice) && !td_json_equals(choice, "none") && !td_json_equals(choice, "auto"))
        return td_refuse_unsupported(why, "tool_choice", "tools are");
    return td_params_bool(body, "parallel_tool_calls", &unused, why);
}

static td_status check_modalities(const td_json *body, td_refusal *why)
{
    const td_json *field = td_json_get(body, "modalities");
    if (td_json_is_null(field)) return TD_OK;
    if (td_json_kind_of(field) != TD_JSON_ARRAY)
        return td_refuse_field(why, "modalities", "modalities must be an array, not %s", td_json_kind_name(field));
    for (size_t i = 0; i < td_json_count(field); i++)
        if (!td_json_equals(td_json_at(field, i), "text"))
            return td_refuse_field(why, "modalities", "modalities: only \"text\" can be generated");
    return TD_OK;
}

/* ------------------------------------------------------------------------------------------------- routes --- */

static td_status read_common(td_params *params, const td_server *server, const td_json *body, td_arena *arena,
                             td_refusal *why)
{
    bool draft = true;
    *params = (td_params){ .include_reasoning = true };
    td_status st = td_params_model(params->model, server, body, why);
    if (st == TD_OK) st = read_stream(params, body, why);
    if (st == TD_OK) st = read_limits(params, server, body, why);
    if (st == TD_OK) st = read_sampling(params, server, body, why);
    if (st == TD_OK) st = check_ignored_sampling(body, why);
    if (st == TD_OK) st = read_stops(params, server, body, arena, why);
    if (st == TD_OK) st = check_one_choice(body, why);
    if (st == TD_OK) st = read_priority(params, body, why);
    if (st == TD_OK) st = check_structured(body, why);
    if (st == TD_OK) st = td_params_bool(body, "draft", &draft, why);
    if (st == TD_OK) st = td_params_bool(body, "return_token_ids", &params->return_token_ids, why);
    if (st == TD_OK) st = check_string(body, "cache_salt", why);
    return st;
}

static td_status read_chat_logprobs(td_params *params, const td_json *body, td_refusal *why)
{
    bool wanted = false, given = false;
    int64_t n = 0;
    td_status st = td_params_bool(body, "logprobs", &wanted, why);
    if (st == TD_OK) st = read_int(body, "top_logprobs", 0, TOP_LOGPROBS_MAX, &n, &given, why);
    if (st != TD_OK) return st;
    if (n > 0 && !wanted) return td_refuse_field(why, "top_logprobs", "top_logprobs needs logprobs: true");
    params->logprobs = wanted ? TD_LOGPROBS_CHAT : TD_LOGPROBS_NONE;
    params->n_top_logprobs = (int)n;
    return TD_OK;
}

td_status td_params_chat(td_params *params, const td_server *server, const td_json *body, td_arena *arena,
                         td_refusal *why)
{
    td_status st = read_common(params, server, body, arena, why);
    if (st == TD_OK) st = read_chat_logprobs(params, body, why);
    if (st == TD_OK) st = check_tools(body, why);
    if (st == TD_OK) st = check_thinking_budget(body, why);
    if (st == TD_OK) st = td_params_bool(body, "include_reasoning", &params->include_reasoning, why);
    if (st == TD_OK) st = check_modalities(body, why);
    return st;
}

td_status td_params_completions(td_params *params, const td_server *server, const td_json *body, td_arena *arena,
                                td_refusal *why)
{
    bool echo = false, given = false, unused = false;
    int64_t n = 0;
    td_status st = read_common(params, server, body, arena, why);
    if (st == TD_OK) st = read_int(body, "logprobs", 0, TOP_LOGPROBS_MAX, &n, &given, why);
    if (st == TD_OK) st = td_params_bool(body, "echo", &echo, why);
    if (st == TD_OK) st = td_params_bool(body, "add_special_tokens", &unused, why);
    if (st != TD_OK) return st;
    if (echo) return td_refuse(why, 400, "unsupported_parameter", "echo", "echo is not supported");
    if (!td_json_is_null(td_json_get(body, "suffix")))
        return td_refuse(why, 400, "unsupported_parameter", "suffix", "suffix is not supported");
    if (!td_json_is_null(td_json_get(body, "messages")))
        return td_refuse_field(why, "messages", "messages belong to /v1/chat/completions; this route takes a prompt");
    params->logprobs = given ? TD_LOGPROBS_TEXT : TD_LOGPROBS_NONE;
    params->n_top_logprobs = (int)n;
    return TD_OK;
}
