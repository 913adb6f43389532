/* The model against the official implementation: vectors of this folder (README.md), one case a run.
 *
 *     oracle_model CASE MODE DIR      CASE demo, small, nine; MODE fp32 or engine; DIR the checkpoint, "-": written
 * here
 *
 * fp32: nothing is rounded to bf16, so every layer's output must equal the reference's within 2e-5 (norm against norm
 * over the stored rows; both sides are fp32 and add in different orders), with the same experts and pools for every
 * position. engine: the arithmetic that serves; judged by what it does to logits, next to what plain bf16 does in the
 * reference. Prints every error, also when all is well. */
#include "base/hash.h"
#include "base/json.h"
#include "model_support.h"
#include "random_checkpoint.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ROWS_MAX = 700, LAYERS_MAX = 16, TOP_K_MAX = 8, MAX_FAILURES = 20 };

static const double LAYER_TOLERANCE = 2e-5;

typedef struct run {
    td_rig rig;
    td_checkpoint *vectors;
    const char *name;
    int hidden, n_layers, vocab, top_k, topk_pools;
    int base;             /* position of the window's first row */
    float *x[LAYERS_MAX]; /* [ROWS_MAX][4 * hidden] after each layer */
    float *normed;        /* [ROWS_MAX][hidden] */
    uint8_t experts[LAYERS_MAX][ROWS_MAX][TOP_K_MAX];
    uint8_t pools[LAYERS_MAX][ROWS_MAX]
                 [(ROWS_MAX / 4 + 7) / 8 + 1]; /* bit P: selected; all zero: every pool is visible */
    double worst_layer[LAYERS_MAX], worst_normed, worst_logits;
    int n_failures;
} run;

static const td_tensor *vector(const run *r, const char *name)
{
    const td_tensor *t = td_checkpoint_find(r->vectors, name);
    if (!t) {
        fprintf(stderr, "%s: no vector %s\n", r->name, name);
        exit(1);
    }
    return t;
}

static void judge(run *r, bool ok, const char *what, double got, double allowed)
{
    if (ok) return;
    r->n_failures++;
    if (r->n_failures <= MAX_FAILURES) printf("FAILED %s: %s: %.3g, allowed %.3g\n", r->name, what, got, allowed);
}

/* ---- what a forward leaves ---- */

static void on_layer(void *user, int layer, int n_rows, const float *x)
{
    run *r = user;
    if (layer < 0) return;
    size_t width = layer == r->n_layers ? (size_t)r->hidden : 4 * (size_t)r->hidden;
    float *to = layer == r->n_layers ? r->normed : r->x[layer];
    td_check(r->base + n_rows <= ROWS_MAX && layer <= r->n_layers);
    memcpy(to + (size_t)r->base * width, x, (size_t)n_rows * width * sizeof *x);
}

static int by_value(const void *a, const void *b)
{
    return *(const uint8_t *)a - *(const uint8_t *)b;
}

static void on_experts(void *user, int layer, int n_rows, int top_k, const int32_t *ids, const float *weights)
{
    run *r = user;
    (void)weights;
    if (layer >= r->n_layers) return;
    for (int i = 0; i < n_rows; i++) {
        for (int k = 0; k < top_k; k++) r->experts[layer][r->base + i][k] = (uint8_t)ids[i * top_k + k];
        qsort(r->experts[layer][r->base + i], (size_t)top_k, 1, by_value);
    }
}

static void on_pools(void *user, int layer, int n_rows, int top_pools, const int32_t *count, const int32_t *list)
{
    run *r = user;
    if (layer >= r->n_layers) return;
    for (int i = 0; i < n_rows; i++) {
        uint8_t *bits = r->pools[layer][r->base + i];
        memset(bits, 0, sizeof r->pools[layer][0]);
        for (int k = 0; k < count[i]; k++) {
            int pool = list[(size_t)i * (size_t)top_pools + (size_t)k];
            bits[pool / 8] |= (uint8_t)(1u << pool % 8);
        }
    }
}

static void must(td_status status, const td_error *err)
{
    if (status == TD_OK) return;
    fprintf(stderr, "%s\n", err->text);
    exit(1);
}

/* The prompt from position 0 in slot 0; logits, when wanted, [n][vocab]. */
static void run_prompt(run *r, const int32_t *ids, int n, float *logits)
{
    td_error err;
    td_rig_slot(&r->rig, 0, 0, 1, (n + TD_BLOCK) / TD_BLOCK + 1);
    int chunk = r->rig.options.model.chunk_rows;
    for (r->base = 0; r->base < n; r->base += chunk) {
        int rows = n - r->base < chunk ? n - r->base : chunk;
        must(td_rig_run(&r->rig, 0, ids + r->base, rows, true, logits != NULL, &err), &err);
        for (int i = 0; logits && i < rows; i++)
            td_rig_logits(&r->rig, i, logits + (size_t)(r->base + i) * (size_t)r->vocab);
    }
}

/* ---- comparison ---- */

static double relative(const float *got, const float *want, size_t n)
{
    double difference = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        difference += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        size += (double)want[i] * want[i];
    }
    return sqrt(difference / (size > 0 ? size : 1e-300));
}

static void compare_length(run *r, int n, const int32_t *ids)
{
    char name[64];
    run_prompt(r, ids, n, NULL);
    snprintf(name, sizeof name, "rows_%d", n);
    const td_tensor *rows = vector(r, name);
    snprintf(name, sizeof name, "layers_%d", n);
    const td_tensor *layers = vector(r, name);
    snprintf(name, sizeof name, "normed_%d", n);
    const float *normed = vector(r, name)->data;
    int n_rows = (int)rows->shape[0];
    size_t width = 4 * (size_t)r->hidden;
    float *got = malloc((size_t)n_rows * width * sizeof *got);
    td_check(got);
    for (int layer = 0; layer <= r->n_layers; layer++) {
        bool end = layer == r->n_layers;
        size_t w = end ? (size_t)r->hidden : width;
        for (int i = 0; i < n_rows; i++)
            memcpy(got + (size_t)i * w, (end ? r->normed : r->x[layer]) + (size_t)((const int32_t *)rows->data)[i] * w,
                   w * sizeof *got);
        const float *want = end ? normed : (const float *)layers->data + (size_t)layer * (size_t)n_rows * width;
        double error = relative(got, want, (size_t)n_rows * w);
        double *worst = end ? &r->worst_normed : &r->worst_layer[layer];
        if (error > *worst) *worst = error;
        snprintf(name, sizeof name, "%d tokens, %s %d", n, end ? "final norm" : "layer", layer);
        judge(r, error <= LAYER_TOLERANCE, name, error, LAYER_TOLERANCE);
    }
    free(got);
}

/* Experts and pools of every position of the long prompts. */
static void compare_picks(run *r, const char *tag, int n)
{
    char name[32];
    const td_config *config = td_model_config(r->rig.model);
    snprintf(name, sizeof name, "experts_%s", tag);
    const uint8_t *experts = vector(r, name)->data;
    snprintf(name, sizeof name, "pools_%s", tag);
    const td_tensor *pools = vector(r, name);
    size_t pool_bytes = (size_t)pools->shape[2];
    int moe = 0, dsa = 0, wrong_experts = 0, wrong_pools = 0;
    for (int layer = 0; layer < r->n_layers; layer++) {
        for (int i = 0; config->is_moe[layer] && i < n; i++)
            wrong_experts +=
                memcmp(r->experts[layer][i], experts + ((size_t)moe * (size_t)n + (size_t)i) * (size_t)r->top_k,
                       (size_t)r->top_k) != 0;
        for (int i = 0; config->is_dsa[layer] && i < n; i++)
            wrong_pools += memcmp(r->pools[layer][i],
                                  (const uint8_t *)pools->data + ((size_t)dsa * (size_t)n + (size_t)i) * pool_bytes,
                                  pool_bytes) != 0;
        moe += config->is_moe[layer];
        dsa += config->is_dsa[layer];
    }
    printf("%s prompt %s: %d of %d selections of experts differ, %d of %d of pools\n", r->name, tag, wrong_experts,
           moe * n, wrong_pools, dsa * n);
    judge(r, wrong_experts == 0, "positions with other experts", wrong_experts, 0);
    judge(r, wrong_pools == 0, "positions with other pools", wrong_pools, 0);
}

typedef struct logits_score {
    double mean_cosine, median_cosine, argmax_equal, argmax_decided, mean_kl, relative;
} logits_score;

static const float DECIDED_GAP = 0.25f; /* between the reference's two best logits: beyond what bf16 moves them by */

static int by_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static float gap_of_best(const float *z, int n)
{
    float best = -INFINITY, second = -INFINITY;
    for (int i = 0; i < n; i++) {
        if (z[i] > best) {
            second = best;
            best = z[i];
        } else if (z[i] > second) {
            second = z[i];
        }
    }
    return best - second;
}

static double log_sum_exp(const float *z, int n)
{
    double top = z[0], sum = 0;
    for (int i = 1; i < n; i++) top = z[i] > top ? z[i] : top;
    for (int i = 0; i < n; i++) sum += exp(z[i] - top);
    return top + log(sum);
}

/* want is fp16 of fp32 logits: its own rounding is 5e-4 of each value. */
static logits_score score_logits(run *r, const char *tag, int n, const float *got)
{
    char name[32];
    snprintf(name, sizeof name, "logits_%s", tag);
    const td_f16 *half = vector(r, name)->data;
    snprintf(name, sizeof name, "argmax_%s", tag);
    const int32_t *best = vector(r, name)->data;
    float *want = malloc((size_t)r->vocab * sizeof *want);
    td_check(want);
    logits_score s = { 0 };
    double difference = 0, size = 0, cosines[ROWS_MAX];
    int decided = 0, decided_equal = 0;
    for (int row = 0; row < n; row++) {
        const float *z = got + (size_t)row * (size_t)r->vocab;
        double dot = 0, a = 0, b = 0, kl = 0;
        for (int i = 0; i < r->vocab; i++) want[i] = td_f16_f32(half[(size_t)row * (size_t)r->vocab + (size_t)i]);
        double lse_got = log_sum_exp(z, r->vocab), lse_want = log_sum_exp(want, r->vocab);
        for (int i = 0; i < r->vocab; i++) {
            dot += (double)z[i] * want[i];
            a += (double)z[i] * z[i];
            b += (double)want[i] * want[i];
            difference += ((double)z[i] - want[i]) * ((double)z[i] - want[i]);
            kl += exp(want[i] - lse_want) * ((want[i] - lse_want) - (z[i] - lse_got));
        }
        size += b;
        bool equal = td_rig_argmax(z, r->vocab) == best[row], is_decided = gap_of_best(want, r->vocab) > DECIDED_GAP;
        cosines[row] = dot / sqrt(a * b);
        s.mean_cosine += cosines[row] / n;
        s.mean_kl += kl / n;
        s.argmax_equal += (double)equal / n;
        decided += is_decided;
        decided_equal += is_decided && equal;
    }
    qsort(cosines, (size_t)n, sizeof *cosines, by_double);
    s.median_cosine = cosines[n / 2];
    s.argmax_decided = decided ? (double)decided_equal / decided : 1.0;
    s.relative = sqrt(difference / size);
    free(want);
    printf("%s prompt %s: logits cosine median %.7f, mean %.7f, argmax equal %.2f %% (%.2f %% of %d decided), mean KL "
           "%.3g, "
           "relative error %.3g\n",
           r->name, tag, s.median_cosine, s.mean_cosine, 100 * s.argmax_equal, 100 * s.argmax_decided, decided,
           s.mean_kl, s.relative);
    return s;
}

static void compare_steps(run *r, const int32_t *ids)
{
    const td_tensor *normed = vector(r, "step_normed");
    const int32_t *best = vector(r, "step_argmax")->data;
    int n_steps = (int)normed->shape[0], n_prompt = 61, equal = 0;
    float *logits = malloc((size_t)r->vocab * sizeof *logits),
          *got = malloc((size_t)n_steps * (size_t)r->hidden * sizeof *got);
    td_error err;
    td_check(logits && got);
    run_prompt(r, ids, n_prompt, NULL);
    for (int i = 0; i < n_steps; i++) {
        r->base = 0;
        must(td_rig_run(&r->rig, 0, ids + n_prompt + i, 1, false, true, &err), &err);
        memcpy(got + (size_t)i * (size_t)r->hidden, r->normed, (size_t)r->hidden * sizeof *got);
        td_rig_logits(&r->rig, 0, logits);
        equal += td_rig_argmax(logits, r->vocab) == best[i];
    }
    double error = relative(got, normed->data, (size_t)n_steps * (size_t)r->hidden);
    printf("%s: %d tokens one by one after %d: relative error %.3g, argmax equal %d of %d\n", r->name, n_steps,
           n_prompt, error, equal, n_steps);
    if (r->rig.options.exact_fp32) {
        judge(r, error <= LAYER_TOLERANCE, "rows after a prompt, one by one", error, LAYER_TOLERANCE);
        judge(r, equal == n_steps, "steps with the same argmax", equal, n_steps);
    }
    free(logits);
    free(got);
}

static void compare_mtp(run *r, const int32_t *ids)
{
    const td_tensor *want = td_checkpoint_find(r->vectors, "mtp_y");
    if (!want) return;
    const int32_t *best = vector(r, "mtp_argmax")->data;
    int n = (int)want->shape[0];
    float *y = malloc((size_t)n * (size_t)r->hidden * sizeof *y), *logits = malloc((size_t)r->vocab * sizeof *logits);
    td_check(y && logits);
    td_error err;
    run_prompt(r, ids, n + 1, NULL);
    td_mtp_args args = { .slot = 0, .pos = 0, .n_rows = n, .segment = 0, .from_row = 0, .next_ids = ids + 1, .y = y };
    must(td_model_mtp(r->rig.model, &args, &err), &err);
    td_rig_logits(&r->rig, 0, logits);
    double error = relative(y, want->data, (size_t)n * (size_t)r->hidden);
    printf("%s: MTP layer over %d rows: relative error %.3g\n", r->name, n, error);
    if (r->rig.options.exact_fp32) {
        judge(r, error <= LAYER_TOLERANCE, "MTP rows", error, LAYER_TOLERANCE);
        judge(r, td_rig_argmax(logits, r->vocab) == best[n - 1], "MTP argmax of the last row",
              td_rig_argmax(logits, r->vocab), best[n - 1]);
    }
    free(y);
    free(logits);
}

/* What the reference's own bf16 run reached, from the manifest. */
static double reference_kl(const char *name, const char *tag)
{
    char text[8192];
    FILE *f = fopen("tests/oracle/model/manifest.json", "rb");
    td_check(f);
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    td_arena arena;
    td_error err;
    const td_json *root;
    td_arena_init(&arena, 0);
    must(td_json_parse(&arena, text, n, &root, &err), &err);
    const td_json *at = td_json_get(
        td_json_get(td_json_get(td_json_get(td_json_get(root, "cases"), name), "reference_bf16"), tag), "mean_kl");
    double kl = 0;
    td_check(td_json_double(at, &kl) == TD_OK);
    td_arena_deinit(&arena);
    return kl;
}

static void compare_fp32(run *r, const int32_t *a, const int32_t *b, float *logits)
{
    static const int lengths[] = { 1, 3, 63, 64, 65, 255, 259, 260, 300, 700 };
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        compare_length(r, lengths[i], lengths[i] <= 300 ? a : b);
    printf("%s: largest relative error per layer:", r->name);
    for (int i = 0; i < r->n_layers; i++) printf(" %.2g", r->worst_layer[i]);
    printf(", final norm %.2g\n", r->worst_normed);
    for (int i = 0; i < 2; i++) {
        int n = i ? 700 : 300;
        run_prompt(r, i ? b : a, n, logits);
        compare_picks(r, i ? "b" : "a", n);
        logits_score s = score_logits(r, i ? "b" : "a", n, logits);
        judge(r, s.relative < 5e-4, "logits", s.relative, 5e-4); /* the stored logits are fp16 */
        judge(r, s.argmax_equal > 1.0 - 1e-9, "share of equal argmax", s.argmax_equal, 1.0);
    }
}

/* The demo is a trained model and is held to absolute limits; the random ones are chaotic (a router that flips changes
 * all that follows), so they must only lose no more than the reference's own bf16 run. */
static void compare_engine(run *r, const int32_t *a, const int32_t *b, float *logits)
{
    for (int i = 0; i < 2; i++) {
        const char *tag = i ? "b" : "a";
        int n = i ? 700 : 300;
        run_prompt(r, i ? b : a, n, logits);
        logits_score s = score_logits(r, tag, n, logits);
        double kl = reference_kl(r->name, tag);
        printf("%s prompt %s: mean KL %.3g, of the reference in bf16 %.3g\n", r->name, tag, s.mean_kl, kl);
        judge(r, s.mean_kl <= 1.25 * kl, "mean KL against the reference in bf16", s.mean_kl, 1.25 * kl);
        if (strcmp(r->name, "demo") != 0) continue;
        judge(r, s.median_cosine >= 0.9999, "median cosine of logits", s.median_cosine, 0.9999);
        judge(r, s.argmax_decided >= 0.99, "equal argmax where the reference is decided", s.argmax_decided, 0.99);
    }
}

static void open_run(run *r, const char *name, const char *mode, const char *dir)
{
    td_error err;
    td_rig_options options;
    td_rig_defaults(&options, dir);
    options.exact_fp32 = strcmp(mode, "fp32") == 0;
    options.model.mtp = strcmp(name, "nine") != 0; /* that one has no MTP layer */
    must(td_rig_open(&r->rig, &options, &err), &err);
    const td_config *config = td_model_config(r->rig.model);
    *r = (run){ .rig = r->rig,
                .vectors = r->vectors,
                .name = name,
                .hidden = config->hidden,
                .n_layers = config->n_layers,
                .vocab = config->vocab_size,
                .top_k = config->top_k };
    td_check(r->n_layers < LAYERS_MAX && r->top_k <= TOP_K_MAX);
    for (int i = 0; i < r->n_layers; i++) r->x[i] = malloc(ROWS_MAX * 4 * (size_t)r->hidden * sizeof(float));
    r->normed = malloc(ROWS_MAX * (size_t)r->hidden * sizeof(float));
}

/* One file of vectors, opened through a folder that holds nothing else. */
static void open_vectors(run *r, const char *name, const char *work)
{
    char from[4096], to[4096], cwd[2048];
    td_error err;
    td_check(getcwd(cwd, sizeof cwd));
    snprintf(from, sizeof from, "%s/tests/oracle/model/%s.safetensors", cwd, name);
    snprintf(to, sizeof to, "%s/vectors.safetensors", work);
    td_check(symlink(from, to) == 0);
    must(td_checkpoint_open_tensors(work, &r->vectors, &err), &err);
    unlink(to);
}

int main(int argc, char **argv)
{
    static run r;
    td_error err;
    char work[] = "/tmp/tandem-oracle-XXXXXX", sha[65], path[4096];
    if (argc != 4) {
        fprintf(stderr, "usage: oracle_model demo|small|nine fp32|engine DIR|-\n");
        return 2;
    }
    td_check(mkdtemp(work));
    open_vectors(&r, argv[1], work);
    const char *dir = argv[3];
    if (strcmp(dir, "-") == 0) {
        must(td_random_checkpoint_write(argv[1], work, sha, &err), &err);
        dir = work;
        printf("%s: sha256 of the weights %s\n", argv[1], sha);
    }
    open_run(&r, argv[1], argv[2], dir);
    td_trace trace = { .user = &r, .layer = on_layer, .experts = on_experts, .pools = on_pools };
    td_model_trace(r.rig.model, &trace);
    const int32_t *a = vector(&r, "ids_a")->data, *b = vector(&r, "ids_b")->data;
    float *logits = malloc(ROWS_MAX * (size_t)r.vocab * sizeof *logits);
    td_check(logits);
    (r.rig.options.exact_fp32 ? compare_fp32 : compare_engine)(&r, a, b, logits);
    compare_steps(&r, a);
    compare_mtp(&r, a);
    free(logits);
    free(r.normed);
    for (int i = 0; i < r.n_layers; i++) free(r.x[i]);
    td_rig_close(&r.rig);
    td_checkpoint_close(r.vectors);
    snprintf(path, sizeof path, "%s/config.json", work);
    unlink(path);
    snprintf(path, sizeof path, "%s/model.safetensors", work);
    unlink(path);
    rmdir(work);
    printf("%s %s: %s\n", argv[1], argv[2], r.n_failures ? "FAILED" : "ok");
    return r.n_failures != 0;
}
