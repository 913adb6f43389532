/* An engine on a tiny random model, and short ways to ask it: for the tests of the engine. Failures end the test. */
#ifndef TD_TESTS_ENGINE_SUPPORT_H
#define TD_TESTS_ENGINE_SUPPORT_H

#include "engine/engine.h"
#include "model_support.h"

#include <sys/types.h>

enum { TD_EN_REPLY_CAP = 2048, TD_EN_REQUESTS = 7, TD_EN_WAIT_MS = 60000, TD_EN_CONTEXT = 2048, TD_EN_SLOTS = 4 };

/* The checkpoint that every engine of this program serves; once each, as a group's setup and teardown. */
int td_en_group_setup(void **state);
int td_en_group_teardown(void **state);
const char *td_en_dir(void);

typedef struct td_en {
    td_rig rig;
    td_engine *engine;
    pid_t follower;
} td_en;

/* Rank 0 here (4 slots, chunks of 128 rows, 2,048 tokens of context); rank 1, when there is one, in a child that
 * follows. */
void td_en_start(td_en *en, int world, const char *transport, int n_blocks, int queue_cap);
int td_en_stop(td_en *en); /* the follower's exit code; 0 without one */

void td_en_rig_options(td_rig_options *o, int rank, int world, const char *transport, int n_blocks);

/* Requests of different lengths, temperatures and limits; ids has room for 512. */
void td_en_request(int k, int32_t *ids, td_request_options *o);

typedef struct td_en_reply {
    int32_t ids[TD_EN_REPLY_CAP];
    float logprobs[TD_EN_REPLY_CAP];
    int n;
    td_finish finish;
} td_en_reply;

void td_en_must(td_status status, const td_error *err);
td_request *td_en_submit(td_en *en, const td_request_options *o);
void td_en_collect(td_request *request, td_en_reply *out); /* until it ended */
void td_en_ask(td_en *en, const td_request_options *o, td_en_reply *out);
void td_en_assert_same(const td_en_reply *got, const td_en_reply *want);

#endif
