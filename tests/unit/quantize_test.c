/* `tandem quantize` and its calibration text: sums against plain loops, Hessians against the rows that a model of the
 * test's own hands out, and a small checkpoint converted by the command. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "checkpoint/exl3_quantize.h"
#include "cli/calibration.h"
#include "cli/cli.h"
#include "cli/expert_inputs.h"
#include "cli/gram.h"
#include "model_support.h"
#include "tiny_checkpoint.h"

enum { DIM = 128, WIDTH = 256, EXPERTS = 3, TOP_K = 2, MOE_LAYER = 1, MTP_LAYER = 2, TOKENS = 2800, K_MAX = WIDTH };

#define OK(call)                                                                                                       \
    do {                                                                                                               \
        if (call) fail_msg("%s", err.text);                                                                            \
    } while (0)

static uint32_t random_bits(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

/* --- sums --- */

static void test_gram(void **state)
{
    enum { K = 40, ROWS = 1100 };
    static float x[ROWS * K], h[K * K], again[K * K];
    uint64_t seed = 1;
    td_error err;
    td_gram *g;
    (void)state;
    for (int i = 0; i < ROWS * K; i++) x[i] = td_bf16_f32(td_f32_bf16((float)random_bits(&seed) * 0x1p-31f - 0.3f));
    for (int threads = 1; threads <= 3; threads += 2) {
        int step = threads == 1 ? 512 : 77;
        OK(td_gram_create(48, threads, &g, &err));
        td_gram_reset(g, 48); /* what an earlier sum left must not matter */
        td_gram_add(g, x, 100);
        td_gram_reset(g, K);
        for (int r = 0; r < ROWS; r += step) td_gram_add(g, x + r * K, ROWS - r < step ? ROWS - r : step);
        td_gram_mean(g, threads == 1 ? h : again);
        td_gram_destroy(g);
    }
    assert_memory_equal(h, again, sizeof h);
    for (int i = 0; i < K; i++) {
        for (int j = 0; j < K; j++) {
            double sum = 0;
            for (int r = 0; r < ROWS; r++) sum += (double)x[r * K + i] * (double)x[r * K + j];
            assert_true(h[i * K + j] == (float)(sum / ROWS));
        }
    }
}

static void test_inputs(void **state)
{
    td_error err;
    td_expert_inputs in;
    const float x[] = { 1, 2, 3, 4, 5, 6 };
    const int32_t ids[] = { 0, 2, 2, 1, 1, 0 };
    float got[6];
    int64_t next = 0;
    (void)state;
    OK(td_expert_inputs_open("/tmp/td-quantize-test/", 2, 5, 2, 2, &in, &err));
    td_expert_inputs_put_rows(&in, 1, 2, 3, x); /* tokens 2, 3, 4 of the second layer */
    td_expert_inputs_put_picks(&in, 1, 2, 3, ids);
    assert_int_equal(td_expert_inputs_count(&in, 0, 0), 0);
    assert_int_equal(td_expert_inputs_count(&in, 1, 0), 2);
    assert_int_equal(td_expert_inputs_count(&in, 1, 2), 2);
    assert_int_equal(td_expert_inputs_count(&in, 1, 3), 0);
    assert_int_equal(td_expert_inputs_take(&in, 1, 0, &next, 1, got), 1);
    assert_true(got[0] == 1 && got[1] == 2 && next == 3);
    assert_int_equal(td_expert_inputs_take(&in, 1, 0, &next, 3, got), 1);
    assert_true(got[0] == 5 && got[1] == 6);
    assert_int_equal(td_expert_inputs_take(&in, 1, 0, &next, 3, got), 0);
    td_expert_inputs_close(&in);
    assert_int_equal(td_expert_inputs_open("/nowhere/at/all", 1, 1, 8, 1, &in, &err), TD_EIO);
    assert_non_null(strstr(err.text, "/nowhere/at/all.inputs-"));
}

/* --- a checkpoint, a tokenizer of single bytes, a text --- */

typedef struct fixture {
    char dir[256], text[300], to[300];
    uint8_t bytes[TOKENS]; /* the text, which is its ids as well */
} fixture;

static void write_file(const char *path, const void *data, size_t n_bytes)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, n_bytes, file), n_bytes);
    assert_int_equal(fclose(file), 0);
}

static void write_tokenizer(const char *dir)
{
    static char text[1 << 14];
    char path[300], *p = text;
    int next = 0x100;
    p += sprintf(p,
                 "{\"added_tokens\":[],\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
                 "\"use_regex\":false},\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"type\":\"BPE\",\"merges\":[],"
                 "\"vocab\":{");
    for (int b = 0; b < 256; b++) {
        bool printable = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        p += sprintf(p, "%s\"\\u%04x\":%d", b ? "," : "", printable ? b : next++, b);
    }
    p += sprintf(p, "}}}");
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    write_file(path, text, (size_t)(p - text));
}

/* Two layers, the second of experts, and an MTP layer if wanted: wide enough for EXL3, otherwise tiny. */
static void write_checkpoint(const char *dir, int n_experts, int n_mtp)
{
    static const char form[] =
        "{\"model_type\": \"glm5_next\", \"tie_word_embeddings\": false, \"text_config\": {"
        "\"vocab_size\": 256, \"hidden_size\": %d, \"intermediate_size\": 128, \"moe_intermediate_size\": %d,"
        "\"num_hidden_layers\": 2, \"num_attention_heads\": 2, \"num_key_value_heads\": 2, \"n_shared_experts\": 0,"
        "\"n_routed_experts\": %d, \"num_experts_per_tok\": %d, \"routed_scaling_factor\": 1.5, \"kv_lora_rank\": 64,"
        "\"q_lora_rank\": 64, \"qk_rope_head_dim\": 0, \"v_head_dim\": 64, \"qk_nope_head_dim\": 32,"
        "\"max_position_embeddings\": 8192, \"rms_norm_eps\": 1e-05, \"mlp_layer_types\": [\"dense\", \"sparse\"],"
        "\"index_topk\": 32, \"index_head_dim\": 128, \"index_n_heads\": 2, \"swiglu_limit\": 1.5, \"index_kpool\": 4,"
        "\"linear_attn_config\": {\"num_heads\": 2, \"head_dim\": 128, \"short_conv_kernel_size\": 4,"
        "\"gate_lower_bound\": -5.0}, \"hc_mult\": 4, \"hc_eps\": 1e-06, \"hc_sinkhorn_iters\": 20,"
        "\"eos_token_id\": [1], \"model_type\": \"glm5_next_text\","
        "\"layer_types\": [\"linear_attention\", \"deepseek_sparse_attention\"], \"n_group\": 1, \"topk_group\": 1,"
        "\"norm_topk_prob\": true, \"num_nextn_predict_layers\": %d, \"hidden_act\": \"silu\", \"mla_use_nope\": "
        "true}}";
    char json[2048];
    td_error err;
    snprintf(json, sizeof json, form, DIM, WIDTH, n_experts, n_experts < TOP_K ? n_experts : TOP_K, n_mtp);
    OK(td_tiny_write_config(json, dir, &err));
    write_tokenizer(dir);
}

static void make_fixture(fixture *f, int n_experts, int n_mtp)
{
    uint64_t seed = 7;
    const char *base = getenv("TMPDIR");
    snprintf(f->dir, sizeof f->dir, "%s/td-quantize-XXXXXX", base && strlen(base) < 200 ? base : "/tmp");
    assert_non_null(mkdtemp(f->dir));
    snprintf(f->text, sizeof f->text, "%s.txt", f->dir);
    snprintf(f->to, sizeof f->to, "%s-exl3", f->dir);
    write_checkpoint(f->dir, n_experts, n_mtp);
    for (int i = 0; i < TOKENS; i++) f->bytes[i] = (uint8_t)(32 + random_bits(&seed) % 90);
    write_file(f->text, f->bytes, TOKENS);
}

static void remove_fixture(const fixture *f)
{
    char command[1000];
    snprintf(command, sizeof command, "rm -rf '%s' '%s' '%s'", f->dir, f->text, f->to);
    assert_int_equal(system(command), 0);
}

/* --- Hessians --- */

/* The rows that a traced model of the test's own saw. */
typedef struct seen {
    int64_t first;
    float x[2][TOKENS][DIM]; /* of MOE_LAYER, of MTP_LAYER */
    int32_t ids[2][TOKENS][TOP_K];
} seen;

static void see_rows(void *user, int layer, int n_rows, const float *n)
{
    seen *s = user;
    if (layer >= MOE_LAYER) memcpy(s->x[layer - MOE_LAYER][s->first], n, (size_t)n_rows * DIM * sizeof(float));
}

static void see_picks(void *user, int layer, int n_rows, int top_k, const int32_t *ids, const float *weights)
{
    seen *s = user;
    (void)weights;
    assert_int_equal(top_k, TOP_K);
    memcpy(s->ids[layer - MOE_LAYER][s->first], ids, (size_t)n_rows * TOP_K * sizeof *ids);
}

/* The text in windows of TD_CALIBRATION_WINDOW tokens, each one prompt; no MTP row where there is no next token. */
static void look(const fixture *f, seen *s)
{
    static int32_t ids[TOKENS];
    td_error err;
    td_rig rig;
    td_rig_options options;
    td_rig_defaults(&options, f->dir);
    options.model.chunk_rows = TD_CALIBRATION_WINDOW;
    OK(td_rig_open(&rig, &options, &err));
    memset(s->ids, -1, sizeof s->ids);
    for (int i = 0; i < TOKENS; i++) ids[i] = f->bytes[i];
    td_trace trace = { .user = s, .mlp_input = see_rows, .experts = see_picks };
    td_model_trace(rig.model, &trace);
    for (s->first = 0; s->first < TOKENS; s->first += TD_CALIBRATION_WINDOW) {
        int n = TOKENS - s->first < TD_CALIBRATION_WINDOW ? (int)(TOKENS - s->first) : TD_CALIBRATION_WINDOW;
        td_rig_slot(&rig, 0, 3, 1, TD_CALIBRATION_WINDOW / TD_BLOCK);
        OK(td_rig_run(&rig, 0, ids + s->first, n, true, false, &err));
        td_mtp_args mtp = { .n_rows = n - 1, .next_ids = ids + s->first + 1 };
        OK(td_model_mtp(rig.model, &mtp, &err));
    }
    td_rig_close(&rig);
}

static float *load(const td_checkpoint *ck, const char *name, size_t n)
{
    td_error err;
    const td_tensor *t = td_checkpoint_find(ck, name);
    float *w = malloc(n * sizeof *w);
    assert_true(t && w);
    OK(td_tensor_to_f32(t, 0, (int64_t)n, w, &err));
    return w;
}

static float *load_expert(const td_checkpoint *ck, int layer, int expert, const char *projection)
{
    char name[160];
    snprintf(name, sizeof name, "model.language_model.layers.%d.mlp.experts.%d.%s_proj.weight", layer, expert,
             projection);
    return load(ck, name, (size_t)DIM * WIDTH);
}

/* What mlp_input hands out is what the router reads: the experts it chose have the largest keys of those rows. */
static void check_router(const td_checkpoint *ck, const seen *s)
{
    float *w = load(ck, "model.language_model.layers.1.mlp.gate.weight", (size_t)EXPERTS * DIM);
    float *bias = load(ck, "model.language_model.layers.1.mlp.gate.e_score_correction_bias", EXPERTS);
    for (int t = 0; t < TOKENS; t++) {
        double key[EXPERTS];
        for (int e = 0; e < EXPERTS; e++) {
            double z = 0;
            for (int i = 0; i < DIM; i++) z += (double)w[e * DIM + i] * (double)s->x[0][t][i];
            key[e] = 1 / (1 + exp(-z)) + (double)bias[e];
        }
        int left_out = EXPERTS - s->ids[0][t][0] - s->ids[0][t][1]; /* of 0 + 1 + 2 */
        for (int k = 0; k < TOP_K; k++) assert_true(key[s->ids[0][t][k]] > key[left_out] - 1e-5);
    }
    free(w);
    free(bias);
}

static double to_bf16(double x)
{
    return (double)td_bf16_f32(td_f32_bf16((float)x));
}

/* silu(min(g, limit)) * clamp(u, -limit, limit) with the roundings of bf16, everything else in double. */
static double activation(double g, double u)
{
    const double limit = 1.5;
    g = fmin(to_bf16(g), limit);
    u = fmax(fmin(to_bf16(u), limit), -limit);
    return to_bf16(to_bf16(g / (1 + exp(-g))) * u);
}

/* The sum of x x^T over the expert's rows, or of its activations, divided by their number. */
static int plain_hessian(const td_checkpoint *ck, const seen *s, int layer, int expert, bool down, double *h)
{
    int n = 0, k = down ? WIDTH : DIM;
    float *gate = load_expert(ck, layer, expert, "gate"), *up = load_expert(ck, layer, expert, "up");
    memset(h, 0, (size_t)k * (size_t)k * sizeof *h);
    for (int t = 0; t < TOKENS; t++) {
        const float *x = s->x[layer - MOE_LAYER][t];
        const int32_t *ids = s->ids[layer - MOE_LAYER][t];
        double row[K_MAX];
        if (ids[0] != expert && ids[1] != expert) continue;
        n++;
        for (int o = 0; o < k; o++) {
            double g = 0, u = 0;
            for (int i = 0; down && i < DIM; i++) {
                g += (double)gate[o * DIM + i] * (double)x[i];
                u += (double)up[o * DIM + i] * (double)x[i];
            }
            row[o] = down ? activation(g, u) : (double)x[o];
        }
        for (int i = 0; i < k; i++)
            for (int j = 0; j < k; j++) h[i * k + j] += row[i] * row[j];
    }
    for (int i = 0; i < k * k; i++) h[i] /= n;
    free(gate);
    free(up);
    return n;
}

static void check_hessian(const td_checkpoint *ck, const seen *s, int layer, int expert, bool down, const float *got)
{
    static double want[K_MAX * K_MAX];
    int k = down ? WIDTH : DIM;
    double off = 0, all = 0;
    assert_true(plain_hessian(ck, s, layer, expert, down, want) >= k);
    for (int i = 0; i < k * k; i++) {
        off += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        all += want[i] * want[i];
    }
    /* Inputs agree to the last bit; an activation next to the border of two bf16 values may fall to the other side. */
    if (!(sqrt(off / all) < (down ? 1e-4 : 1e-7)))
        fail_msg("layer %d expert %d, down %d: off by %g", layer, expert, down, sqrt(off / all));
}

static const struct {
    int layer, expert;
    td_projection projection;
} QUESTIONS[] = { { MOE_LAYER, 0, TD_PROJ_DOWN }, { MOE_LAYER, 0, TD_PROJ_GATE }, { MOE_LAYER, 0, TD_PROJ_UP },
                  { MOE_LAYER, 2, TD_PROJ_UP },   { MTP_LAYER, 1, TD_PROJ_GATE }, { MTP_LAYER, 1, TD_PROJ_DOWN } };
enum { N_QUESTIONS = sizeof QUESTIONS / sizeof *QUESTIONS };

typedef struct heard {
    int64_t n_done, n_total;
} heard;

static void hear(void *user, int64_t n_done, int64_t n_total)
{
    heard *h = user;
    assert_true(n_done > h->n_done && n_done <= n_total);
    *h = (heard){ n_done, n_total };
}

static td_calibration *open_calibration(const fixture *f, int tokens_max, int n_threads, heard *h)
{
    td_error err;
    td_calibration *c = NULL;
    td_calibration_options o = { .checkpoint_dir = f->dir,
                                 .text_path = f->text,
                                 .scratch_path = f->to,
                                 .tokens_max = tokens_max,
                                 .n_threads = n_threads,
                                 .progress = h ? hear : NULL,
                                 .progress_user = h };
    OK(td_calibration_create(&o, &c, &err));
    return c;
}

static void ask(const td_calibration *c, int question, float *h)
{
    const td_hessian_source *source = td_calibration_source(c);
    td_projection projection = QUESTIONS[question].projection;
    td_error err;
    bool known = false;
    OK(source->get(source->user, QUESTIONS[question].layer, QUESTIONS[question].expert, projection,
                   projection == TD_PROJ_DOWN ? WIDTH : DIM, h, &known, &err));
    assert_true(known);
}

static void test_hessians(void **state)
{
    static seen s;
    static float h[2][N_QUESTIONS][K_MAX * K_MAX];
    fixture f;
    td_error err;
    td_checkpoint *ck;
    (void)state;
    make_fixture(&f, EXPERTS, 1);
    look(&f, &s);
    OK(td_checkpoint_open(f.dir, &ck, &err));
    check_router(ck, &s);
    for (int run = 0; run < 2; run++) {
        heard told = { 0 };
        td_calibration *c = open_calibration(&f, 1 << 20, run ? 3 : 1, &told);
        assert_int_equal(td_calibration_n_tokens(c), TOKENS);
        for (int i = 0; i < N_QUESTIONS; i++) ask(c, i, h[run][i]);
        assert_true(told.n_done == TOKENS && told.n_total == TOKENS);
        td_calibration_destroy(c);
    }
    assert_memory_equal(h[0], h[1], sizeof h[0]); /* 1 and 3 threads */
    for (int i = 0; i < N_QUESTIONS; i++)
        check_hessian(ck, &s, QUESTIONS[i].layer, QUESTIONS[i].expert, QUESTIONS[i].projection == TD_PROJ_DOWN,
                      h[0][i]);
    td_checkpoint_close(ck);
    remove_fixture(&f);
}

/* Fewer rows than inputs: no answer. 100 tokens are fewer than either side's inputs. */
static void test_few_rows(void **state)
{
    fixture f;
    float h[K_MAX * K_MAX] = { 0 };
    bool known = true;
    td_error err;
    (void)state;
    make_fixture(&f, 1, 0);
    td_calibration *c = open_calibration(&f, 100, 1, NULL);
    const td_hessian_source *source = td_calibration_source(c);
    assert_int_equal(td_calibration_n_tokens(c), 100);
    OK(source->get(source->user, MOE_LAYER, 0, TD_PROJ_GATE, DIM, h, &known, &err));
    assert_false(known);
    td_calibration_destroy(c);
    remove_fixture(&f);
}

/* --- the command --- */

/* tr((W' - W)^T H (W' - W)) / tr(W^T H W): what the outputs lose. w, restored: [DIM][WIDTH]. */
static double lost(const float *w, const float *restored, const float *h)
{
    double off = 0, all = 0;
    for (int i = 0; i < DIM; i++) {
        for (int j = 0; j < DIM; j++) {
            double weight = (double)h[i * DIM + j], o = 0, a = 0;
            for (int n = 0; n < WIDTH; n++) {
                double wi = (double)w[i * WIDTH + n], wj = (double)w[j * WIDTH + n];
                o += ((double)restored[i * WIDTH + n] - wi) * ((double)restored[j * WIDTH + n] - wj);
                a += wi * wj;
            }
            off += weight * o;
            all += weight * a;
        }
    }
    return off / all;
}

/* The same matrix, every input counting alike. */
static double lost_without(const float *w, const float *h, int bits)
{
    static uint16_t trellis[DIM * WIDTH], suh[DIM], svh[WIDTH];
    static float restored[DIM * WIDTH];
    td_error err;
    td_exl3_quantizer *q;
    td_exl3_report report;
    td_exl3_source source = { .k = DIM, .n = WIDTH, .w = w, .input_seed = 1, .output_seed = 2 };
    td_exl3 x = { .k = DIM, .n = WIDTH, .bits2 = 2 * bits, .codebook = TD_EXL3_MCG };
    OK(td_exl3_quantizer_create(TD_EXL3_MCG, 2 * bits, 1, &q, &err));
    OK(td_exl3_quantize(q, &source, trellis, suh, svh, &report, &err));
    td_exl3_quantizer_destroy(q);
    x.trellis = trellis;
    x.suh = suh;
    x.svh = svh;
    OK(td_exl3_restore(&x, restored, &err));
    return lost(w, restored, h);
}

static void test_calibrated(void **state)
{
    static float w[DIM * WIDTH], restored[DIM * WIDTH], h[DIM * DIM];
    fixture f;
    td_error err;
    td_checkpoint *ck;
    td_expert_matrix m;
    bool known = false;
    (void)state;
    make_fixture(&f, 1, 0);
    char *argv[] = { "quantize", f.dir, f.to, "--bits", "5", "--calibration", f.text, "--threads", "1", NULL };
    assert_int_equal(td_cli_quantize(9, argv), TD_EXIT_OK);

    OK(td_checkpoint_open(f.dir, &ck, &err));
    float *stored = load_expert(ck, MOE_LAYER, 0, "gate"); /* [WIDTH][DIM] */
    for (int i = 0; i < DIM * WIDTH; i++) w[i] = stored[i % WIDTH * DIM + i / WIDTH];
    free(stored);
    td_checkpoint_close(ck);
    td_calibration *c = open_calibration(&f, 1 << 20, 1, NULL);
    const td_hessian_source *source = td_calibration_source(c);
    OK(source->get(source->user, MOE_LAYER, 0, TD_PROJ_GATE, DIM, h, &known, &err));
    td_calibration_destroy(c);

    OK(td_checkpoint_open(f.to, &ck, &err));
    OK(td_checkpoint_verify(ck, &err));
    OK(td_checkpoint_expert(ck, MOE_LAYER, 0, TD_PROJ_GATE, &m, &err));
    td_exl3 x = { .k = DIM, .n = WIDTH, .bits2 = 2 * m.bits, .codebook = TD_EXL3_MCG };
    x.trellis = m.trellis->data;
    x.suh = m.suh->data;
    x.svh = m.svh->data;
    OK(td_exl3_restore(&x, restored, &err));
    td_checkpoint_close(ck);
    double with = lost(w, restored, h), without = lost_without(w, h, 5);
    if (!(with < 0.8 * without)) fail_msg("with calibration %g, without %g", with, without);
    remove_fixture(&f);
}

static void test_refusals(void **state)
{
    fixture f;
    char *help[] = { "quantize", "--help", NULL }, *none[] = { "quantize", NULL };
    char *width[] = { "quantize", "/nowhere", "/tmp/never", "--bits", "9", NULL };
    char *tokens[] = { "quantize", "/nowhere", "/tmp/never", "--calibration-tokens", "0", NULL };
    char *missing[] = { "quantize", "/nowhere", "/tmp/never", NULL };
    char *no_source[] = { "quantize", "/nowhere", "/tmp/never", "--calibration", "text", NULL };
    (void)state;
    assert_int_equal(td_cli_quantize(2, help), TD_EXIT_OK);
    assert_int_equal(td_cli_quantize(1, none), TD_EXIT_ARGUMENTS);
    assert_int_equal(td_cli_quantize(5, width), TD_EXIT_ARGUMENTS);
    assert_int_equal(td_cli_quantize(5, tokens), TD_EXIT_ARGUMENTS);
    assert_int_equal(td_cli_quantize(3, missing), TD_EXIT_FAILED);
    assert_int_equal(td_cli_quantize(5, no_source), TD_EXIT_FAILED);

    make_fixture(&f, 1, 0);
    td_error err;
    td_calibration *c = NULL;
    td_calibration_options o = { .checkpoint_dir = f.dir, .text_path = "/nowhere", .tokens_max = 9, .n_threads = 1 };
    assert_int_equal(td_calibration_create(&o, &c, &err), TD_EIO);
    assert_string_equal(err.text, "calibration text /nowhere: No such file or directory");
    o.text_path = "/tmp";
    assert_int_equal(td_calibration_create(&o, &c, &err), TD_EFORMAT);
    assert_non_null(strstr(err.text, "calibration text /tmp: not a file"));
    write_file(f.text, "", 0);
    o.text_path = f.text;
    assert_int_equal(td_calibration_create(&o, &c, &err), TD_EFORMAT);
    assert_non_null(strstr(err.text, "is empty"));
    assert_null(c);
    remove_fixture(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gram),     cmocka_unit_test(test_inputs),     cmocka_unit_test(test_hessians),
        cmocka_unit_test(test_few_rows), cmocka_unit_test(test_calibrated), cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
