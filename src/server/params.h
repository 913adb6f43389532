/* Fields of a request for tokens, checked: what chat and completions have in common, and what only one of them has.
 * A known field with a wrong type or range is refused by its name; null means absent; unknown fields are ignored. What
 * is accepted is listed for users in docs/api.md. Internal. */
#ifndef TD_SERVER_PARAMS_H
#define TD_SERVER_PARAMS_H

#include "server/core.h"
#include "server/logprobs.h"

TD_BEGIN_C

typedef struct td_params {
    char model[TD_MODEL_CAP]; /* as the reply shall name it */
    bool stream, include_usage, continuous_usage;
    bool max_given;
    int64_t max_tokens; /* as asked, or the server's default */
    int min_tokens;
    double temperature, top_p, min_p;
    int64_t top_k; /* <= 0: off */
    bool seeded;
    int64_t seed;
    td_stop stop;
    int32_t stop_ids[TD_STOP_IDS_MAX - TD_END_IDS_MAX];
    int n_stop_ids;
    bool ignore_eos;
    td_logprobs_form logprobs;
    int n_top_logprobs;
    bool include_reasoning; /* chat */
    bool return_token_ids;
    bool background;
} td_params;

/* arena: for what outlives the body's JSON. */
td_status td_params_chat(td_params *params, const td_server *server, const td_json *body, td_arena *arena,
                         td_refusal *why);
td_status td_params_completions(td_params *params, const td_server *server, const td_json *body, td_arena *arena,
                                td_refusal *why);

/* The member `model`: absent, a string; with strict_model it must be one that is served. */
td_status td_params_model(char model[TD_MODEL_CAP], const td_server *server, const td_json *body, td_refusal *why);

/* A bool or absent (*value stays). */
td_status td_params_bool(const td_json *body, const char *name, bool *value, td_refusal *why);

TD_END_C
#endif
