/* A row's bits depend on its own sequence and nothing else: not on how the prompt was cut into windows, how wide decode
 * windows are, which other sequences share them, where the pool put its blocks, whether it was resumed from a kept
 * state, whether drafts beside it were rejected, how many threads or ranks compute it. Every test computes the logits
 * of all rows of one sequence in another way and compares them, bit for bit, with those of the plainest way: the prompt
 * in one window, then one row at a time. The checkpoints are small and random (tiny_checkpoint.h); selection is sparse
 * from position 35 on. */
#include "base/clock.h"
#include "model/internal.h"
#include "model_support.h"
#include "stream_device.h"
#include "tiny_checkpoint.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { PROMPT = 202, TOTAL = 226, VOCAB_MAX = 320, OTHERS = 2 };

typedef struct rows_state {
    td_tiny_kind kind;
    td_kv_format kv;
    td_format dense;
    bool stream; /* the rig's device is stream_device.h's; what is expected comes from the CPU's */
    char dir[256];
    td_rig rig;
    int vocab;
    int32_t ids[TOTAL], other_ids[OTHERS][TOTAL];
    float expected[TOTAL * VOCAB_MAX], got[TOTAL * VOCAB_MAX];
} rows_state;

#define OK(call) assert_ok((call), &err, __LINE__)

static void assert_ok(td_status status, const td_error *err, int line)
{
    if (status) fail_msg("line %d: %s: %s", line, td_status_text(status), err->text);
}

static td_rig_options rig_options(const rows_state *s)
{
    td_rig_options o;
    td_rig_defaults(&o, s->dir);
    o.model.kv = s->kv;
    o.model.dense = s->dense;
    o.stream = s->stream;
    return o;
}

/* Logits of the last window's rows become rows row.. of out. */
static void keep_logits(const td_rig *rig, int row, int n_rows, float *out)
{
    int vocab = td_rig_vocab(rig);
    for (int i = 0; i < n_rows; i++) td_rig_logits(rig, i, out + (size_t)(row + i) * (size_t)vocab);
}

/* Rows from..to of the sequence in slot: prompt rows in windows of `chunk`, the others in windows of `width`. */
static void run_rows(td_rig *rig, int slot, const int32_t *ids, int from, int to, int chunk, int width, float *out)
{
    td_error err;
    for (int row = from; row < to;) {
        bool chunked = row < PROMPT;
        int end = chunked && to > PROMPT ? PROMPT : to, most = chunked ? chunk : width;
        int n = end - row < most ? end - row : most;
        OK(td_rig_run(rig, slot, ids + row, n, chunked, true, &err));
        if (out) keep_logits(rig, row, n, out);
        row += n;
    }
}

static void expect_rows(const rows_state *s, int from, int to, const char *what)
{
    for (int row = from; row < to; row++) {
        size_t at = (size_t)row * (size_t)s->vocab;
        if (memcmp(s->expected + at, s->got + at, (size_t)s->vocab * sizeof(float)) == 0) continue;
        for (int i = 0; i < s->vocab; i++)
            if (memcmp(&s->expected[at + (size_t)i], &s->got[at + (size_t)i], sizeof(float)) != 0)
                fail_msg("%s: row %d, token %d: %.9g, expected %.9g", what, row, i, (double)s->got[at + (size_t)i],
                         (double)s->expected[at + (size_t)i]);
    }
}

static void clear(rows_state *s)
{
    memset(s->got, 0xff, sizeof s->got);
}

static int setup(void **state, td_tiny_kind kind, td_kv_format kv, td_format dense)
{
    td_error err;
    rows_state *s = (rows_state *)calloc(1, sizeof *s);
    assert_non_null(s);
    s->kind = kind;
    s->kv = kv;
    s->dense = dense;
    OK(td_tiny_create(kind, s->dir, &err));
    td_rig_options o = rig_options(s);
    OK(td_rig_open(&s->rig, &o, &err));
    s->vocab = td_rig_vocab(&s->rig);
    assert_true(s->vocab <= VOCAB_MAX);
    for (int i = 0; i < TOTAL; i++) {
        s->ids[i] = (int32_t)((unsigned)(i * i * 7 + i * 31 + 5) % (unsigned)s->vocab);
        for (int j = 0; j < OTHERS; j++) s->other_ids[j][i] = (s->ids[i] * (j + 2) + i) % s->vocab;
    }
    td_rig_slot(&s->rig, 0, 0, 1, 1);
    run_rows(&s->rig, 0, s->ids, 0, TOTAL, 512, 1, s->expected);
    *state = s;
    return 0;
}

static int setup_plain(void **state)
{
    return setup(state, TD_TINY_PLAIN, TD_KV_ACT, TD_W_BF16);
}

static int setup_exl3(void **state)
{
    return setup(state, TD_TINY_EXL3, TD_KV_FP8, TD_W_BF16);
}

static int setup_q4(void **state)
{
    return setup(state, TD_TINY_EXL3, TD_KV_ACT, TD_W_Q4);
}

/* The same rows from a device with a stream: recorded windows, and between ranks exchanges that are relayed. */
static int setup_stream(void **state)
{
    td_error err;
    int failed = setup(state, TD_TINY_EXL3, TD_KV_FP8, TD_W_BF16);
    rows_state *s = (rows_state *)*state;
    if (failed) return failed;
    td_rig_close(&s->rig);
    s->stream = true;
    td_rig_options o = rig_options(s);
    OK(td_rig_open(&s->rig, &o, &err));
    return 0;
}

static int teardown(void **state)
{
    rows_state *s = (rows_state *)*state;
    td_rig_close(&s->rig);
    td_tiny_remove(s->dir);
    free(s);
    return 0;
}

/* Guards the other tests: logits are finite and rows differ, so equal bits mean something. */
static void test_rows_say_something(void **state)
{
    const rows_state *s = (const rows_state *)*state;
    for (int row = 1; row < TOTAL; row++) {
        const float *logits = s->expected + (size_t)row * (size_t)s->vocab;
        for (int i = 0; i < s->vocab; i++) assert_true(logits[i] > -1e4f && logits[i] < 1e4f);
        assert_memory_not_equal(logits, logits - s->vocab, (size_t)s->vocab * sizeof(float));
    }
}

static void test_chunk_sizes(void **state)
{
    rows_state *s = (rows_state *)*state;
    const int chunks[] = { 64, 128 };
    for (int i = 0; i < 2; i++) {
        clear(s);
        td_rig_slot(&s->rig, 1, 2, 1, 1);
        run_rows(&s->rig, 1, s->ids, 0, TOTAL, chunks[i], 1, s->got);
        expect_rows(s, 0, TOTAL, "prompt cut into windows");
    }
}

/* Windows that end around the position where selection starts: 8 pools and a tail are seen whole, up to row 34. */
static void test_dense_limit(void **state)
{
    rows_state *s = (rows_state *)*state;
    for (int n = 33; n <= 41; n++) {
        clear(s);
        td_rig_slot(&s->rig, 1, 2, 1, 1);
        run_rows(&s->rig, 1, s->ids, 0, n, 512, 1, s->got);
        expect_rows(s, 0, n, "short prompt");
    }
}

static void test_window_widths(void **state)
{
    rows_state *s = (rows_state *)*state;
    const int widths[] = { 2, 5, 24 };
    for (int i = 0; i < 3; i++) {
        clear(s);
        td_rig_slot(&s->rig, 1, 2, 1, 1);
        run_rows(&s->rig, 1, s->ids, 0, TOTAL, 512, widths[i], s->got);
        expect_rows(s, 0, TOTAL, "wider windows");
    }
}

static void test_placement(void **state)
{
    rows_state *s = (rows_state *)*state;
    clear(s);
    td_rig_slot(&s->rig, 3, 15, -1, 3);
    run_rows(&s->rig, 3, s->ids, 0, TOTAL, 128, 3, s->got);
    expect_rows(s, 0, TOTAL, "other blocks");
}

static td_batch_segment segment(td_rig *rig, int slot, const int32_t *ids, int n_rows, bool chunked, bool all)
{
    return (td_batch_segment){ .slot = slot,
                               .pos = td_model_slot_pos(rig->model, slot),
                               .n_rows = n_rows,
                               .ids = ids,
                               .chunked = chunked,
                               .logits_all = all };
}

/* The sequence's next rows. */
static td_batch_segment rows_of(td_rig *rig, int slot, const int32_t *sequence, int n_rows, bool chunked, bool all)
{
    return segment(rig, slot, sequence + td_model_slot_pos(rig->model, slot), n_rows, chunked, all);
}

/* One sequence decodes while another's prompt and a third's rows are in the same windows. */
static void test_beside_others(void **state)
{
    rows_state *s = (rows_state *)*state;
    td_rig *rig = &s->rig;
    td_error err;
    clear(s);
    for (int slot = 0; slot < 3; slot++) td_rig_slot(rig, slot, slot, 4, 1);
    /* The prompt in the middle of two other prompts' chunks ... */
    for (int row = 0; row < PROMPT; row += 64) {
        int n = PROMPT - row < 64 ? PROMPT - row : 64, keep[] = { 64, n, 128 };
        td_batch batch = { .n_segments = 2 };
        batch.segments[0] = rows_of(rig, 1, s->other_ids[0], 64, true, false);
        batch.segments[1] = rows_of(rig, 0, s->ids, n, true, true);
        if (row == 64) batch.segments[batch.n_segments++] = rows_of(rig, 2, s->other_ids[1], 128, true, false);
        if (row >= 128) keep[0] = 0; /* the other one's rows are given up, and tried again */
        OK(td_model_forward(rig->model, &batch, &err));
        keep_logits(rig, row, n, s->got);
        OK(td_model_commit(rig->model, keep, &err));
    }
    /* ... then its rows between another's decode rows and a prompt. */
    for (int row = PROMPT; row < TOTAL; row += 4) {
        int keep[] = { 3, 4, 64 };
        td_batch batch = { .n_segments = 2 };
        batch.segments[0] = rows_of(rig, 2, s->other_ids[1], 3, false, false);
        batch.segments[1] = rows_of(rig, 0, s->ids, 4, false, true);
        if (row < PROMPT + 4) batch.segments[batch.n_segments++] = rows_of(rig, 1, s->other_ids[0], 64, true, false);
        OK(td_model_forward(rig->model, &batch, &err));
        keep_logits(rig, row, 4, s->got);
        OK(td_model_commit(rig->model, keep, &err));
    }
    expect_rows(s, 0, TOTAL, "beside other sequences");
}

/* From a kept state, in another slot, with a copy of the partly filled block. */
static void check_resume(rows_state *s, int at)
{
    td_rig *rig = &s->rig;
    void *kept = malloc(td_model_snapshot_bytes(rig->model));
    assert_non_null(kept);
    clear(s);
    td_rig_slot(rig, 0, 0, 1, 1);
    run_rows(rig, 0, s->ids, 0, at, 512, 1, NULL);
    assert_int_equal(td_model_snapshot_save(rig->model, 0, at, kept), TD_OK);
    assert_int_equal(td_model_block_copy(rig->model, 0, 9, at), TD_OK);
    run_rows(rig, 0, s->other_ids[0], at, at + 8 > PROMPT ? at + 8 : PROMPT, 512, 1, NULL); /* goes on in its own way */
    td_rig_slot(rig, 1, 3, 1, 1);
    run_rows(rig, 1, s->other_ids[1], 0, TOTAL, 512, 24, NULL); /* what the slot held before */
    td_rig_slot(rig, 1, 9, 1, 1);
    assert_int_equal(td_model_snapshot_load(rig->model, 1, at, kept), TD_OK);
    run_rows(rig, 1, s->ids, at, TOTAL, 512, 1, s->got);
    expect_rows(s, at, TOTAL, "resumed");
    free(kept);
}

static void test_resume(void **state)
{
    rows_state *s = (rows_state *)*state;
    check_resume(s, 64);
    for (int at = PROMPT; at < PROMPT + 4; at++) check_resume(s, at); /* every state of an unfinished pool */
}

/* Windows of a true token and drafts of which `keep` rows turn out right. */
static void test_partial_keep(void **state)
{
    rows_state *s = (rows_state *)*state;
    td_rig *rig = &s->rig;
    td_error err;
    for (int width = 2; width <= 8; width += 2) {
        clear(s);
        td_rig_slot(rig, 2, 5, 1, 1);
        run_rows(rig, 2, s->ids, 0, PROMPT, 512, 1, s->got);
        for (int row = PROMPT, turn = 0; row < TOTAL - 8; turn++) {
            int keep = turn % (width + 1); /* 0 too: the window never happened */
            int32_t drafts[8];
            for (int i = 0; i < width; i++) drafts[i] = i < keep ? s->ids[row + i] : s->other_ids[0][row + i];
            td_batch batch = { .n_segments = 1 };
            batch.segments[0] = segment(rig, 2, drafts, width, false, true);
            OK(td_model_forward(rig->model, &batch, &err));
            if (keep) keep_logits(rig, row, keep, s->got);
            OK(td_model_commit(rig->model, &keep, &err));
            row += keep;
            if (row >= TOTAL - 8) expect_rows(s, 0, row, "drafts kept in part");
        }
    }
}

/* Two sequences are rejected in part in one window, a third is kept whole. */
static void test_partial_keep_together(void **state)
{
    rows_state *s = (rows_state *)*state;
    td_rig *rig = &s->rig;
    td_error err;
    const int at[] = { 1, 0, 2 };
    clear(s);
    for (int slot = 0; slot < 3; slot++) {
        td_rig_slot(rig, slot, 10 + slot, 1, 1);
        run_rows(rig, slot, slot == 1 ? s->ids : s->other_ids[0], 0, PROMPT, 512, 1, slot == 1 ? s->got : NULL);
    }
    for (int row = PROMPT; row < TOTAL - 4; row += 2) {
        int32_t drafts[] = { s->ids[row], s->ids[row + 1], 7, 8 };
        int keep[] = { 2, 1, 3 };
        td_batch batch = { .n_segments = 3 };
        batch.segments[0] = segment(rig, at[0], drafts, 4, false, true);
        batch.segments[1] = rows_of(rig, at[1], s->other_ids[0], 3, false, false);
        batch.segments[2] = rows_of(rig, at[2], s->other_ids[0], 3, false, false);
        OK(td_model_forward(rig->model, &batch, &err));
        keep_logits(rig, row, 2, s->got);
        OK(td_model_commit(rig->model, keep, &err));
    }
    expect_rows(s, 0, TOTAL - 4, "drafts of several sequences");
}

static void test_threads(void **state)
{
    rows_state *s = (rows_state *)*state;
    td_error err;
    td_rig rig;
    td_rig_options o = rig_options(s);
    o.n_threads = 2;
    OK(td_rig_open(&rig, &o, &err));
    clear(s);
    td_rig_slot(&rig, 0, 0, 1, 1);
    run_rows(&rig, 0, s->ids, 0, TOTAL, 512, 5, s->got);
    td_rig_close(&rig);
    expect_rows(s, 0, TOTAL, "two threads");
}

/* ---- MTP ---- */

enum { DRAFTS = 6 };

/* Absorbs rows 0 .. n-2 in calls of `step` rows with h of the forward that is last, then DRAFTS chained drafts. */
static void run_mtp(rows_state *s, td_rig *rig, int n, int step, bool host_rows, float *out)
{
    td_error err;
    size_t dim = (size_t)td_model_config(rig->model)->hidden;
    float *h = (float *)malloc((size_t)n * dim * sizeof *h);
    assert_non_null(h);
    OK(td_rig_run(rig, 0, s->ids, n, true, false, &err));
    assert_int_equal(td_model_hidden(rig->model, 0, 0, n, h), TD_OK);
    for (int row = 0; row < n - 1; row += step) {
        int rows = n - 1 - row < step ? n - 1 - row : step;
        td_mtp_args args = { .slot = 0, .pos = row, .n_rows = rows, .from_row = row, .next_ids = s->ids + row + 1 };
        if (host_rows) args.h = h + (size_t)row * dim;
        OK(td_model_mtp(rig->model, &args, &err));
    }
    td_rig_logits(rig, 0, out);
    float *y = h + (size_t)(n - 1) * dim; /* the chain starts with the last row, whose next token is a draft */
    for (int i = 0; i < DRAFTS; i++) {
        int32_t id = td_rig_argmax(out + i * s->vocab, s->vocab);
        td_mtp_args args = { .slot = 0, .pos = n - 1 + i, .n_rows = 1, .h = y, .next_ids = &id, .y = y };
        OK(td_model_mtp(rig->model, &args, &err));
        td_rig_logits(rig, 0, out + (i + 1) * s->vocab);
    }
    free(h);
}

static void test_mtp(void **state)
{
    rows_state *s = (rows_state *)*state;
    const int steps[] = { 1, 7, 64 };
    size_t n_bytes = (size_t)(DRAFTS + 1) * (size_t)s->vocab * sizeof(float);
    float *expected = (float *)malloc(n_bytes), *got = (float *)malloc(n_bytes);
    assert_true(expected && got);
    td_rig_slot(&s->rig, 0, 0, 1, 1);
    run_mtp(s, &s->rig, 150, 512, false, expected);
    for (int i = 0; i < s->vocab; i++) assert_true(expected[i] > -1e4f && expected[i] < 1e4f);
    for (int i = 0; i < 3; i++) {
        td_rig_slot(&s->rig, 0, 11, -1, 1);
        run_mtp(s, &s->rig, 150, steps[i], i == 1, got);
        assert_memory_equal(got, expected, n_bytes);
    }
    free(expected);
    free(got);
}

/* From a state kept at row 128, of which the layer has seen 127: absorbs that row and the next 60; y of all of them. */
static void continue_mtp(rows_state *s, int slot, const float *h127, float y[61 * 128])
{
    td_error err;
    td_mtp_args pending = { .slot = slot, .pos = 127, .n_rows = 1, .h = h127, .next_ids = s->ids + 128, .y = y };
    td_mtp_args rest = { .slot = slot, .pos = 128, .n_rows = 60, .next_ids = s->ids + 129 };
    rest.y = y + td_model_config(s->rig.model)->hidden;
    OK(td_model_mtp(s->rig.model, &pending, &err));
    OK(td_rig_run(&s->rig, slot, s->ids + 128, 60, true, false, &err));
    OK(td_model_mtp(s->rig.model, &rest, &err));
}

static void test_mtp_resume(void **state)
{
    rows_state *s = (rows_state *)*state;
    td_rig *rig = &s->rig;
    td_error err;
    static float h127[128], expected[61 * 128], got[61 * 128];
    void *kept = malloc(td_model_snapshot_bytes(rig->model));
    assert_non_null(kept);
    for (int slot = 1; slot >= 0; slot--) { /* slot 1 first held another sequence */
        const int32_t *ids = slot ? s->other_ids[0] : s->ids;
        td_mtp_args args = { .slot = slot, .n_rows = slot ? 199 : 127, .next_ids = ids + 1 };
        td_rig_slot(rig, slot, slot, 1, 1);
        OK(td_rig_run(rig, slot, ids, args.n_rows + 1, true, false, &err));
        OK(td_model_mtp(rig->model, &args, &err));
    }
    assert_int_equal(td_model_hidden(rig->model, 0, 127, 1, h127), TD_OK);
    assert_int_equal(td_model_snapshot_save(rig->model, 0, 128, kept), TD_OK);
    assert_int_equal(td_model_block_copy(rig->model, 0, 7, 128), TD_OK);
    continue_mtp(s, 0, h127, expected);
    td_rig_slot(rig, 1, 7, 1, 1);
    assert_int_equal(td_model_snapshot_load(rig->model, 1, 128, kept), TD_OK);
    continue_mtp(s, 1, h127, got);
    assert_memory_equal(got, expected, sizeof got);
    free(kept);
}

/* ---- two ranks ---- */

/* A gather that the device did not wait for, and a model that was given up: neither may pass for a forward. */
static td_status expect_refusals(rows_state *s, td_rig *rig)
{
    td_error err;
    rig->model->bell->gave_up = 7;
    td_status status = td_rig_run(rig, 0, s->ids, 1, false, true, &err);
    if (status != TD_ECUDA || !strstr(err.text, "gather 7: the GPU went on")) return TD_EINVAL;
    rig->model->bell->gave_up = 0;
    td_model_abandon(rig->model);
    status = td_rig_run(rig, 0, s->ids, 1, false, true, &err);
    return status == TD_EPEER && strstr(err.text, "an earlier forward failed") ? TD_OK : TD_EINVAL;
}

/* One rank's half of every row, compared with the same columns of the one-rank run. die_at: the row before which rank 1
 * vanishes; TOTAL: it does not. */
static td_status run_rank(rows_state *s, int rank, int port, const char *transport, int die_at, td_error *err)
{
    td_rig rig;
    td_rig_options o = rig_options(s);
    o.model.rank = rank;
    o.model.world = 2;
    o.model.check_layers = !s->stream; /* there, recordings are what is tested */
    o.transport = transport;
    o.port = port;
    td_status status = td_rig_open(&rig, &o, err);
    if (status) return status;
    td_rig_slot(&rig, 0, 4, 1, 1);
    for (int row = 0; row < TOTAL && !status;) {
        bool chunked = row < PROMPT;
        int left = (chunked ? PROMPT : TOTAL) - row, n = chunked ? 128 : 3;
        if (n > left) n = left;
        if (rank == 1 && row >= die_at) _exit(0);
        status = td_rig_run(&rig, 0, s->ids + row, n, chunked, true, err);
        if (!status) keep_logits(&rig, row, n, s->got);
        row += n;
    }
    int first = rank * td_model_vocab_shard(rig.model), end = first + td_model_vocab_shard(rig.model);
    for (int row = 0; row < TOTAL && !status; row++)
        for (int i = first; i < end && i < s->vocab && !status; i++) {
            size_t at = (size_t)row * (size_t)s->vocab + (size_t)i;
            if (memcmp(&s->got[at], &s->expected[at], sizeof(float)) != 0)
                status = td_fail(err, TD_EINVAL, "rank %d, row %d, token %d: %.9g, expected %.9g", rank, row, i,
                                 (double)s->got[at], (double)s->expected[at]);
        }
    if (!status && s->stream && expect_refusals(s, &rig))
        status = td_fail(err, TD_EINVAL, "rank %d: a forward that failed passed", rank);
    td_link_announce_stop(rig.link);
    td_rig_close(&rig);
    return status;
}

static td_status two_ranks(rows_state *s, const char *transport, int die_at, td_error *err)
{
    int port = td_rig_free_port(), exit_status = 0;
    assert_true(port > 0);
    clear(s);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        td_status status = run_rank(s, 1, port, transport, die_at, err);
        if (status) fprintf(stderr, "rank 1: %s\n", err->text);
        _exit(status ? 1 : 0);
    }
    td_status status = run_rank(s, 0, port, transport, die_at, err);
    assert_int_equal(waitpid(child, &exit_status, 0), child);
    assert_int_equal(exit_status, 0);
    return status;
}

static void test_two_ranks_shm(void **state)
{
    td_error err;
    OK(two_ranks((rows_state *)*state, "shm", TOTAL, &err));
}

static void test_two_ranks_tcp(void **state)
{
    td_error err;
    OK(two_ranks((rows_state *)*state, "tcp", TOTAL, &err));
}

/* Between two decode windows and between two prompt windows: what waits in the stream must end, and soon. */
static void test_lost_rank(void **state)
{
    td_error err;
    int64_t start = td_now_ns();
    assert_int_equal(two_ranks((rows_state *)*state, "tcp", PROMPT + 4, &err), TD_EPEER);
    assert_int_equal(two_ranks((rows_state *)*state, "shm", 1, &err), TD_EPEER);
    assert_true(td_now_ns() - start < 20000000000ll);
}

/* ---- recordings ---- */

/* Made once for each number of rows and reach, in advance where asked, and used for every window without a prompt. */
static void test_recordings(void **state)
{
    td_error err;
    rows_state *s = (rows_state *)*state;
    td_rig rig;
    td_rig_options o = rig_options(s);
    int n_recorded, n_launched, before;
    OK(td_rig_open(&rig, &o, &err));
    OK(td_model_prepare(rig.model, 2, &err));
    stream_dev_counts(rig.dev, &before, &n_launched);
    assert_true(before > 2 && before % 2 == 0 && n_launched == 0);
    td_rig_slot(&rig, 0, 0, 1, 1);
    clear(s);
    run_rows(&rig, 0, s->ids, 0, TOTAL, 512, 2, s->got);
    expect_rows(s, 0, TOTAL, "windows of two rows");
    stream_dev_counts(rig.dev, &n_recorded, &n_launched);
    assert_int_equal(n_recorded, before);
    assert_int_equal(n_launched, (TOTAL - PROMPT) / 2);
    td_rig_slot(&rig, 0, 0, 1, 1);
    run_rows(&rig, 0, s->ids, 0, TOTAL, 512, 8, s->got);
    expect_rows(s, 0, TOTAL, "windows of eight rows");
    stream_dev_counts(rig.dev, &n_recorded, &n_launched);
    assert_int_equal(n_recorded, before + 1);
    td_rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest plain[] = {
        cmocka_unit_test(test_two_ranks_shm), /* before the threads of other tests: it forks */
        cmocka_unit_test(test_two_ranks_tcp), cmocka_unit_test(test_rows_say_something),
        cmocka_unit_test(test_chunk_sizes),   cmocka_unit_test(test_dense_limit),
        cmocka_unit_test(test_window_widths), cmocka_unit_test(test_placement),
        cmocka_unit_test(test_beside_others), cmocka_unit_test(test_resume),
        cmocka_unit_test(test_partial_keep),  cmocka_unit_test(test_partial_keep_together),
        cmocka_unit_test(test_mtp),           cmocka_unit_test(test_mtp_resume),
    };
    const struct CMUnitTest exl3[] = {
        cmocka_unit_test(test_two_ranks_shm), cmocka_unit_test(test_rows_say_something),
        cmocka_unit_test(test_chunk_sizes),   cmocka_unit_test(test_window_widths),
        cmocka_unit_test(test_resume),        cmocka_unit_test(test_mtp),
        cmocka_unit_test(test_beside_others),
    };
    const struct CMUnitTest q4[] = {
        cmocka_unit_test(test_rows_say_something),
        cmocka_unit_test(test_chunk_sizes),
        cmocka_unit_test(test_partial_keep),
        cmocka_unit_test(test_threads),
    };
    const struct CMUnitTest stream[] = {
        cmocka_unit_test(test_two_ranks_shm), cmocka_unit_test(test_two_ranks_tcp),
        cmocka_unit_test(test_lost_rank),     cmocka_unit_test(test_recordings),
        cmocka_unit_test(test_chunk_sizes),   cmocka_unit_test(test_dense_limit),
        cmocka_unit_test(test_window_widths), cmocka_unit_test(test_placement),
        cmocka_unit_test(test_beside_others), cmocka_unit_test(test_resume),
        cmocka_unit_test(test_partial_keep),  cmocka_unit_test(test_partial_keep_together),
        cmocka_unit_test(test_mtp),           cmocka_unit_test(test_mtp_resume),
    };
    int failed = cmocka_run_group_tests_name("model rows: plain experts, bf16", plain, setup_plain, teardown);
    failed += cmocka_run_group_tests_name("model rows: EXL3 experts, fp8 cache", exl3, setup_exl3, teardown);
    failed += cmocka_run_group_tests_name("model rows: EXL3 experts, 4-bit weights", q4, setup_q4, teardown);
    failed += cmocka_run_group_tests_name("model rows: a device with a stream", stream, setup_stream, teardown);
    return failed;
}
