/* See engine_support.h. */
#include "engine_support.h"
#include "tiny_checkpoint.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static char dir[256];
static int port; /* of the pair; another one for each engine */

int td_en_group_setup(void **state)
{
    (void)state;
    td_error err;
    port = 20000 + (int)(getpid() % 1000) * 8; /* below the ports that systems hand out */
    return td_tiny_create(TD_TINY_PLAIN, dir, &err);
}

int td_en_group_teardown(void **state)
{
    (void)state;
    td_tiny_remove(dir);
    return 0;
}

const char *td_en_dir(void)
{
    return dir;
}

void td_en_must(td_status status, const td_error *err)
{
    if (status) fail_msg("%s: %s", td_status_text(status), err->text);
}

void td_en_rig_options(td_rig_options *o, int rank, int world, const char *transport, int n_blocks)
{
    td_rig_defaults(o, dir);
    o->transport = transport;
    o->port = port;
    o->link_extra_bytes = 1 << 20;
    o->model.rank = rank;
    o->model.world = world;
    o->model.n_blocks = n_blocks;
    o->model.chunk_rows = 128;
    o->model.context_tokens = TD_EN_CONTEXT;
    o->model.mtp = false;
    o->model.n_logits = 16;
}

static td_status open_rank(td_en *en, int rank, int world, const char *transport, int n_blocks, int queue_cap,
                           td_error *err)
{
    td_rig_options o;
    td_en_rig_options(&o, rank, world, transport, n_blocks);
    td_status status = td_rig_open(&en->rig, &o, err);
    if (status) return status;
    const td_config *config = td_model_config(en->rig.model);
    td_engine_options e = { .rank = rank,
                            .world = world,
                            .n_slots = TD_EN_SLOTS,
                            .queue_cap = queue_cap,
                            .context_tokens = TD_EN_CONTEXT,
                            .n_blocks = n_blocks,
                            .chunk_rows = 128,
                            .n_ids = config->vocab_size - 3 };
    return td_engine_create(en->rig.model, en->rig.link, &e, &en->engine, err);
}

void td_en_start(td_en *en, int world, const char *transport, int n_blocks, int queue_cap)
{
    td_error err;
    *en = (td_en){ 0 };
    port++;
    if (world == 2) {
        en->follower = fork();
        assert_true(en->follower >= 0);
        if (en->follower == 0) {
            td_status status = open_rank(en, 1, 2, transport, n_blocks, queue_cap, &err);
            if (!status) status = td_engine_follow(en->engine, &err);
            if (status && status != TD_EPEER) fprintf(stderr, "rank 1: %s\n", err.text);
            _exit(status == TD_OK ? 0 : status == TD_EPEER ? 4 : 1);
        }
    }
    td_en_must(open_rank(en, 0, world, transport, n_blocks, queue_cap, &err), &err);
}

int td_en_stop(td_en *en)
{
    int status = 0;
    td_engine_destroy(en->engine);
    if (en->rig.link) td_link_announce_stop(en->rig.link);
    td_rig_close(&en->rig);
    if (en->follower > 0) waitpid(en->follower, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void td_en_request(int k, int32_t *ids, td_request_options *o)
{
    static const int lengths[TD_EN_REQUESTS] = { 5, 1, 64, 200, 130, 17, 300 };
    int n = lengths[k % TD_EN_REQUESTS];
    for (int i = 0; i < n; i++) ids[i] = (int32_t)((i * 7919 + k * 104729 + 13) % 90);
    *o = (td_request_options){ .ids = ids,
                               .n_ids = n,
                               .max_tokens = 40 + 3 * k,
                               .n_logprobs = k == 3 ? 4 : -1,
                               .sample = { .temperature = k % 2 ? 0.8 : 0.0,
                                           .top_p = k % 3 ? 0.9 : 1.0,
                                           .top_k = k == 5 ? 7 : 0,
                                           .seed = 1234u + (unsigned)k } };
}

td_request *td_en_submit(td_en *en, const td_request_options *o)
{
    td_request *request;
    td_error err;
    td_en_must(td_engine_submit(en->engine, o, &request, &err), &err);
    return request;
}

void td_en_collect(td_request *request, td_en_reply *out)
{
    td_token tokens[16];
    out->n = 0;
    do {
        int n = td_request_next(request, tokens, 16, TD_EN_WAIT_MS, &out->finish);
        if (n == 0 && out->finish == TD_FINISH_NONE) fail_msg("no token within %d ms", TD_EN_WAIT_MS);
        for (int i = 0; i < n; i++) {
            assert_true(out->n < TD_EN_REPLY_CAP);
            out->logprobs[out->n] = tokens[i].logprob;
            out->ids[out->n++] = tokens[i].id;
        }
    } while (out->finish == TD_FINISH_NONE);
}

void td_en_ask(td_en *en, const td_request_options *o, td_en_reply *out)
{
    td_request *request = td_en_submit(en, o);
    td_en_collect(request, out);
    td_request_release(request);
}

void td_en_assert_same(const td_en_reply *got, const td_en_reply *want)
{
    assert_int_equal(got->finish, want->finish);
    assert_int_equal(got->n, want->n);
    assert_memory_equal(got->ids, want->ids, (size_t)want->n * sizeof *want->ids);
    assert_memory_equal(got->logprobs, want->logprobs, (size_t)want->n * sizeof *want->logprobs);
}
