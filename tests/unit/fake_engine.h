/* A test double of the engine: the functions of engine/engine.h over a script instead of a model. Tokens become due by
 * the clock, so it needs no thread; a request holds its lane until its reader took the end, canceled or released it. */
#ifndef TD_TESTS_FAKE_ENGINE_H
#define TD_TESTS_FAKE_ENGINE_H

#include "engine/engine.h"
#include "text/tokenizer.h"

typedef struct fake_script {
    const char *reply; /* encoded by the tokenizer, added tokens included; then an end token, if the request has any */
    double prefill_s;  /* before the first token */
    double token_s;    /* between tokens */
    int together;      /* tokens that become due at one time; 0: 1 */
    int slots;         /* 0: 4 */
    int queue_cap;     /* further submits are TD_EFULL; 0: none waits */
    int fail_at;       /* > 0: the request fails after that many tokens */
    td_status fail_status;
    td_status health; /* not TD_OK: what td_engine_health() says */
} fake_script;

/* tokenizer: borrowed. The script is copied, its reply too. */
td_engine *fake_engine_create(const td_tokenizer *tokenizer, const fake_script *script);
void fake_engine_set(td_engine *engine, const fake_script *script); /* for requests from now on */

typedef struct fake_seen {
    td_request_options options; /* of the last submit; ids and end_ids point into the engine until the next one */
    int n_submitted, n_canceled, n_released;
    int n_running;
} fake_seen;
void fake_engine_seen(td_engine *engine, fake_seen *seen);

/* A tokenizer of 256 byte tokens (id = byte) and the special tokens of GLM from id 256 on. */
td_tokenizer *fake_tokenizer(void);

#endif
