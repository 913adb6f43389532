/* The model's bookkeeping: the plan is what is taken, loading reports all of it and no more, wrong options, batches and
 * commits are refused in words and leave everything as it was. */
#include "model_support.h"
#include "tiny_checkpoint.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct model_state {
    char dir[256];
    td_rig rig;
} model_state;

static int setup(void **state)
{
    td_error err;
    model_state *s = (model_state *)calloc(1, sizeof *s);
    td_rig_options o;
    assert_non_null(s);
    assert_int_equal(td_tiny_create(TD_TINY_PLAIN, s->dir, &err), TD_OK);
    td_rig_defaults(&o, s->dir);
    td_status status = td_rig_open(&s->rig, &o, &err);
    if (status) fail_msg("%s", err.text);
    *state = s;
    return 0;
}

static int teardown(void **state)
{
    model_state *s = (model_state *)*state;
    td_rig_close(&s->rig);
    td_tiny_remove(s->dir);
    free(s);
    return 0;
}

static td_model_plan plan_of(const td_rig *rig, const td_model_options *options)
{
    td_error err;
    td_model_plan plan;
    td_status status = td_model_plan_bytes(rig->dev, &rig->ops, rig->ck, options, &plan, &err);
    if (status) fail_msg("%s", err.text);
    return plan;
}

/* Sizes that the formats fix, counted here by hand from the configuration of tiny_checkpoint.c. */
static void test_plan_counts(void **state)
{
    const td_rig *rig = &((model_state *)*state)->rig;
    const td_model_plan *p = &rig->plan;
    assert_int_equal(p->embed_bytes, 300 * 96 * 2);
    /* One DSA layer and the MTP layer: latents of 64 values a token, pools of 128 every 4 tokens, bf16. */
    assert_int_equal(p->kv_bytes_per_token, 2 * (64 * 2 + 128 * 2 / 4));
    assert_int_equal(p->kv_bytes, p->kv_bytes_per_token * 512 * 16);
    /* Four KDA layers of 4 heads: two states, two times 3 rows of q | k | v; two rings of 580 rows. */
    assert_int_equal(p->state_bytes_per_slot,
                     4 * (2 * 4 * 128 * 128 * 4 + 2 * 3 * 3 * 4 * 128 * 2) + 2 * 580 * 2 * 128 * 2);
    assert_int_equal(p->total_bytes, p->experts_bytes + p->dense_bytes + p->embed_bytes + p->head_bytes + p->mtp_bytes +
                                         p->kv_bytes + p->state_bytes + p->scratch_bytes);
    assert_int_equal(p->link_region_bytes, 0); /* alone, the partials are the model's own */
    td_model_options pair = rig->options.model;
    pair.world = 2;
    td_model_plan half = plan_of(rig, &pair);
    assert_true(half.link_gather_bytes == 64 * 96 * 4 && half.link_region_bytes >= 2 * 576 * 96 * 4);
}

static void test_plan_follows_options(void **state)
{
    const td_rig *rig = &((model_state *)*state)->rig;
    td_model_options o = rig->options.model;
    td_model_plan base = plan_of(rig, &o), other;
    o.n_blocks++;
    other = plan_of(rig, &o);
    assert_int_equal(other.total_bytes - base.total_bytes, base.kv_bytes_per_token * TD_BLOCK);
    o = rig->options.model;
    o.n_slots++;
    other = plan_of(rig, &o);
    assert_int_equal(other.state_bytes - base.state_bytes, base.state_bytes_per_slot + 64 /* block table, rounded */);
    o = rig->options.model;
    o.mtp = false;
    other = plan_of(rig, &o);
    assert_int_equal(other.mtp_bytes, 0);
    assert_true(other.kv_bytes == base.kv_bytes / 2 && other.dense_bytes == base.dense_bytes);
    /* Two ranks hold the routed experts once between them, and each the embedding. */
    td_model_plan half[2];
    o = rig->options.model;
    o.world = 2;
    for (o.rank = 0; o.rank < 2; o.rank++) half[o.rank] = plan_of(rig, &o);
    assert_int_equal(half[0].experts_bytes + half[1].experts_bytes, base.experts_bytes);
    assert_int_equal(half[0].head_bytes + half[1].head_bytes, base.head_bytes);
    assert_int_equal(half[1].embed_bytes, base.embed_bytes);
    assert_true(half[0].kv_bytes == base.kv_bytes && half[0].total_bytes < base.total_bytes);
}

typedef struct progress_log {
    uint64_t last, total;
    int calls, stop_after;
} progress_log;

static bool progress(void *user, uint64_t done, uint64_t total)
{
    progress_log *log = (progress_log *)user;
    assert_true(done > log->last && done <= total);
    log->last = done;
    log->total = total;
    return ++log->calls != log->stop_after;
}

static td_status create_again(td_rig *rig, progress_log *log, td_model **model, td_error *err)
{
    td_link *link = NULL;
    td_link_options o;
    td_link_options_init(&o);
    o.gather_max_bytes = rig->plan.link_gather_bytes;
    o.region_bytes = rig->plan.link_region_bytes;
    assert_int_equal(td_link_open(&o, &link, err), TD_OK);
    td_status status =
        td_model_create(rig->dev, &rig->ops, link, rig->ck, &rig->options.model, progress, log, model, err);
    if (!status) td_model_destroy(*model);
    td_link_close(link);
    return status;
}

static void test_loading_progress(void **state)
{
    td_rig *rig = &((model_state *)*state)->rig;
    td_error err;
    td_model *model = NULL;
    progress_log log = { 0 };
    assert_int_equal(create_again(rig, &log, &model, &err), TD_OK);
    assert_true(log.last == log.total && log.calls > 50);
    assert_int_equal(log.total, rig->plan.experts_bytes + rig->plan.dense_bytes + rig->plan.embed_bytes +
                                    rig->plan.head_bytes + rig->plan.mtp_bytes);
    for (int stop = 1; stop < log.calls; stop += 9) {
        progress_log short_log = { .stop_after = stop };
        model = NULL;
        assert_int_equal(create_again(rig, &short_log, &model, &err), TD_ECANCELED);
        assert_true(model == NULL && short_log.calls == stop);
    }
}

static void expect_option(const td_rig *rig, td_model_options o, const char *text)
{
    td_error err;
    td_model_plan plan = { .total_bytes = 77 };
    assert_int_equal(td_model_plan_bytes(rig->dev, &rig->ops, rig->ck, &o, &plan, &err), TD_EINVAL);
    assert_int_equal(plan.total_bytes, 77);
    if (!strstr(err.text, text)) fail_msg("'%s' does not say '%s'", err.text, text);
}

static void test_option_refusals(void **state)
{
    const td_rig *rig = &((model_state *)*state)->rig;
    td_model_options o = rig->options.model;
    o.world = 3, expect_option(rig, o, "rank 0 of 3");
    o = rig->options.model, o.rank = 1, expect_option(rig, o, "rank 1 of 1");
    o = rig->options.model, o.n_slots = 0, expect_option(rig, o, "slots 0");
    o = rig->options.model, o.n_blocks = INT32_MAX, expect_option(rig, o, "pool blocks");
    o = rig->options.model, o.chunk_rows = 100, expect_option(rig, o, "chunk rows 100: a multiple of 64");
    o = rig->options.model, o.context_tokens = 8193, expect_option(rig, o, "max_position_embeddings, 8192");
    o = rig->options.model, o.n_logits = 1000, expect_option(rig, o, "logits rows 1000");
}

static td_batch one(int slot, int32_t pos, int n_rows, const int32_t *ids)
{
    td_batch batch = { .n_segments = 1 };
    batch.segments[0] = (td_batch_segment){ .slot = slot, .pos = pos, .n_rows = n_rows, .ids = ids };
    return batch;
}

static void expect_batch(td_rig *rig, td_batch batch, const char *text)
{
    td_error err;
    assert_int_equal(td_model_forward(rig->model, &batch, &err), TD_EINVAL);
    if (!strstr(err.text, text)) fail_msg("'%s' does not say '%s'", err.text, text);
}

static void test_batch_refusals(void **state)
{
    td_rig *rig = &((model_state *)*state)->rig;
    int32_t ids[600] = { 0 };
    td_rig_slot(rig, 0, 0, 1, 1);
    td_rig_slot(rig, 1, 1, 1, 2);
    td_batch b = one(0, 0, 1, ids);
    b.n_segments = 0, expect_batch(rig, b, "0 segments");
    b.n_segments = TD_SEGMENTS_MAX + 1, expect_batch(rig, b, "17 segments");
    expect_batch(rig, one(4, 0, 1, ids), "slot 4 of 4");
    expect_batch(rig, one(-1, 0, 1, ids), "slot -1");
    expect_batch(rig, one(0, 1, 1, ids), "position 1, slot 0 has 0 rows");
    expect_batch(rig, one(0, 0, 0, ids), "0 rows");
    expect_batch(rig, one(0, 0, 513, ids), "room for 512");
    expect_batch(rig, one(0, 0, 65, ids), "65 rows and 0 prompt rows: at most 64 and 512");
    b = one(1, 0, 513, ids), b.segments[0].chunked = true;
    expect_batch(rig, b, "0 rows and 513 prompt rows");
    b = one(0, 0, 1, ids), b.n_segments = 2, b.segments[1] = b.segments[0];
    expect_batch(rig, b, "the same slot, 0");
    b.segments[1].slot = 1, b.segments[0].chunked = true;
    expect_batch(rig, b, "come before prompts");
    ids[1] = 300, expect_batch(rig, one(0, 0, 2, ids), "token id 300 of 300");
    ids[1] = -1, expect_batch(rig, one(0, 0, 2, ids), "token id -1");
    ids[1] = 0;
    td_rig_slot(rig, 2, 0, 1, 0);
    expect_batch(rig, one(2, 0, 1, ids), "room for 0");
    td_error err;
    assert_int_equal(td_rig_run(rig, 0, ids, 3, false, false, &err), TD_OK);
    b = one(0, 3, 1, ids), b.segments[0].chunked = true;
    expect_batch(rig, b, "not a multiple of 64");
}

static void test_commit_refusals(void **state)
{
    td_rig *rig = &((model_state *)*state)->rig;
    int32_t ids[64] = { 0 };
    td_error err;
    int keep = 4;
    td_rig_slot(rig, 0, 0, 1, 1);
    td_batch b = one(0, 0, 3, ids);
    assert_int_equal(td_model_forward(rig->model, &b, &err), TD_OK);
    assert_int_equal(td_model_commit(rig->model, &keep, &err), TD_EINVAL);
    assert_string_equal(err.text, "commit: 4 rows of segment 0, which has 3");
    keep = 2;
    assert_int_equal(td_model_commit(rig->model, &keep, &err), TD_OK);
    assert_int_equal(td_model_slot_pos(rig->model, 0), 2);
    assert_int_equal(td_model_commit(rig->model, &keep, &err), TD_EINVAL);
    assert_string_equal(err.text, "commit: there is no window to commit");
    td_rig_slot(rig, 0, 0, 1, 1);
    b = one(0, 0, 3, ids), b.segments[0].chunked = true;
    assert_int_equal(td_model_forward(rig->model, &b, &err), TD_OK);
    assert_int_equal(td_model_commit(rig->model, &keep, &err), TD_EINVAL);
    assert_string_equal(err.text, "commit: 2 rows of segment 0, which has 3, all or none");
}

static void test_mtp_refusals(void **state)
{
    td_rig *rig = &((model_state *)*state)->rig;
    int32_t ids[16] = { 0 };
    td_error err;
    td_rig_slot(rig, 0, 0, 1, 1);
    assert_int_equal(td_rig_run(rig, 0, ids, 8, true, false, &err), TD_OK);
    td_mtp_args a = { .slot = 0, .pos = 0, .n_rows = 9, .next_ids = ids };
    assert_int_equal(td_model_mtp(rig->model, &a, &err), TD_EINVAL);
    a.n_rows = 4, a.from_row = 5;
    assert_int_equal(td_model_mtp(rig->model, &a, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, "not in the last window"));
    a.from_row = 0, a.segment = 1;
    assert_int_equal(td_model_mtp(rig->model, &a, &err), TD_EINVAL);
    a.segment = 0, a.pos = 510;
    assert_int_equal(td_model_mtp(rig->model, &a, &err), TD_EINVAL);
    assert_non_null(strstr(err.text, "room for 512"));
    a.pos = 0;
    assert_int_equal(td_model_mtp(rig->model, &a, &err), TD_OK);
    assert_int_equal(td_model_n_logits(rig->model), 1);
}

/* What a trace sees: every layer once, in order, and the final-normed rows that td_model_hidden gives. */
typedef struct trace_log {
    int next_layer, experts, pools;
    size_t n;
    float final[8 * 96];
} trace_log;

static void trace_layer(void *user, int layer, int n_rows, const float *x)
{
    trace_log *log = (trace_log *)user;
    assert_int_equal(layer, log->next_layer++);
    assert_int_equal(n_rows, 8);
    if (layer == 5) memcpy(log->final, x, sizeof log->final);
    for (int s = 1; layer == -1 && s < 4; s++) assert_memory_equal(x + s * 96, x, 96 * sizeof(float));
}

static void trace_experts(void *user, int layer, int n_rows, int top_k, const int32_t *ids, const float *weights)
{
    ((trace_log *)user)->experts++;
    assert_true(layer >= 1 && layer < 5);
    for (int r = 0; r < n_rows; r++) {
        float sum = 0.0f;
        for (int k = 0; k < top_k; k++) {
            assert_in_range(ids[r * top_k + k], 0, 5);
            sum += weights[r * top_k + k];
        }
        assert_true(sum > 2.49f && sum < 2.51f);
    }
}

static void trace_pools(void *user, int layer, int n_rows, int top_pools, const int32_t *count, const int32_t *list)
{
    (void)list;
    ((trace_log *)user)->pools++;
    assert_int_equal(layer, 3);
    assert_int_equal(top_pools, 8);
    for (int r = 0; r < n_rows; r++) assert_int_equal(count[r], -1);
}

static void test_trace(void **state)
{
    td_rig *rig = &((model_state *)*state)->rig;
    int32_t ids[] = { 5, 4, 3, 2, 1, 0, 299, 298 };
    float hidden[8 * 96];
    trace_log log = { .next_layer = -1 };
    td_trace trace = { .user = &log, .layer = trace_layer, .experts = trace_experts, .pools = trace_pools };
    td_error err;
    td_rig_slot(rig, 0, 0, 1, 1);
    td_model_trace(rig->model, &trace);
    assert_int_equal(td_rig_run(rig, 0, ids, 8, true, true, &err), TD_OK);
    td_model_trace(rig->model, NULL);
    assert_true(log.next_layer == 6 && log.experts == 4 && log.pools == 1);
    assert_int_equal(td_model_hidden(rig->model, 0, 0, 8, hidden), TD_OK);
    assert_memory_equal(hidden, log.final, sizeof hidden);
    assert_int_equal(td_model_hidden(rig->model, 0, 1, 8, hidden), TD_EINVAL);
}

/* fp32 throughout: the same model, so nearly the same logits as with bf16 activations. */
static void test_exact_mode(void **state)
{
    td_rig *rig = &((model_state *)*state)->rig, exact;
    td_rig_options o = rig->options;
    int32_t ids[40];
    static float rounded[300], full[300];
    td_error err;
    for (int i = 0; i < 40; i++) ids[i] = (i * 37 + 11) % 300;
    o.exact_fp32 = true;
    td_status status = td_rig_open(&exact, &o, &err);
    if (status) fail_msg("%s", err.text);
    td_rig_slot(rig, 0, 0, 1, 1);
    td_rig_slot(&exact, 0, 0, 1, 1);
    assert_int_equal(td_rig_run(rig, 0, ids, 40, true, false, &err), TD_OK);
    assert_int_equal(td_rig_run(&exact, 0, ids, 40, true, false, &err), TD_OK);
    td_rig_logits(rig, 0, rounded);
    td_rig_logits(&exact, 0, full);
    double dot = 0, rr = 0, ff = 0;
    for (int i = 0; i < 300; i++) dot += rounded[i] * full[i], rr += rounded[i] * rounded[i], ff += full[i] * full[i];
    assert_memory_not_equal(rounded, full, sizeof full);
    if (dot * dot < 0.99 * rr * ff) fail_msg("cosine^2 %g", dot * dot / (rr * ff));
    td_rig_close(&exact);
}

/* Rank `rank` of a pair whose link has no room for the partials. */
static td_status create_with_small_link(const td_rig *rig, int rank, int port, td_error *err)
{
    td_link_options o;
    td_link *link = NULL;
    td_model *model = NULL;
    td_model_options options = rig->options.model;
    td_link_options_init(&o);
    o.rank = options.rank = rank;
    o.world = options.world = 2;
    o.port = port;
    o.transport = "tcp";
    o.region_bytes = 4096;
    td_status status = td_link_open(&o, &link, err);
    if (status) return status == TD_EUNSUPPORTED ? status : TD_EIO; /* a build without UCX */
    status = td_model_create(rig->dev, &rig->ops, link, rig->ck, &options, NULL, NULL, &model, err);
    td_link_announce_stop(link);
    td_link_close(link);
    return status;
}

static void test_link_too_small(void **state)
{
    td_rig *rig = &((model_state *)*state)->rig;
    td_error err;
    int port = td_rig_free_port(), child_status;
    pid_t child = fork();
    if (child == 0) _exit(create_with_small_link(rig, 1, port, &err) == TD_ENOMEM ? 0 : 1);
    td_status status = create_with_small_link(rig, 0, port, &err);
    waitpid(child, &child_status, 0);
    if (status == TD_EUNSUPPORTED) skip();
    assert_int_equal(status, TD_ENOMEM);
    assert_non_null(strstr(err.text, "the link was opened with too little memory"));
    assert_true(WIFEXITED(child_status) && WEXITSTATUS(child_status) == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plan_counts),      cmocka_unit_test(test_plan_follows_options),
        cmocka_unit_test(test_loading_progress), cmocka_unit_test(test_option_refusals),
        cmocka_unit_test(test_batch_refusals),   cmocka_unit_test(test_commit_refusals),
        cmocka_unit_test(test_mtp_refusals),     cmocka_unit_test(test_trace),
        cmocka_unit_test(test_exact_mode),       cmocka_unit_test(test_link_too_small),
    };
    return cmocka_run_group_tests_name("model", tests, setup, teardown);
}
