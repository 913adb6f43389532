/* How far quantized checkpoints are from the plain one: the mean Kullback-Leibler divergence of their next-token
 * distributions over a text, in engine arithmetic.
 *
 *     divergence TEXT TOKENS PLAIN-CHECKPOINT CHECKPOINT...
 *
 * The text is cut into windows of 1,024 tokens that do not see each other. A tool, not a test: see README.md. */
#include "model_support.h"

#include "text/tokenizer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WINDOW = 1024, CHUNK = 512, TEXT_BYTES_MAX = 64 << 20 };

static void must(td_status status, const td_error *err)
{
    if (!status) return;
    fprintf(stderr, "divergence: %s\n", err->text);
    exit(1);
}

static void read_ids(const char *dir, const char *path, int n_most, td_ids *ids)
{
    static char text[TEXT_BYTES_MAX];
    char name[4096];
    td_error err = { 0 };
    td_tokenizer *tokenizer = NULL;
    FILE *file = fopen(path, "rbe");
    if (!file) must(td_fail(&err, TD_EIO, "%s: cannot be read", path), &err);
    size_t n_bytes = fread(text, 1, sizeof text, file);
    fclose(file);
    snprintf(name, sizeof name, "%s/tokenizer.json", dir);
    must(td_tokenizer_open(name, &tokenizer, &err), &err);
    must(td_tokenizer_encode(tokenizer, text, n_bytes, 0, ids, &err), &err);
    td_tokenizer_destroy(tokenizer);
    if (ids->n > (size_t)n_most) ids->n = (size_t)n_most;
}

static void open_rig(td_rig *rig, const char *dir)
{
    td_error err = { 0 };
    td_rig_options options;
    td_rig_defaults(&options, dir);
    options.n_threads = 0;
    options.model.mtp = false;
    must(td_rig_open(rig, &options, &err), &err);
}

static double log_sum_exp(const float *z, int n)
{
    double most = -INFINITY, sum = 0;
    for (int i = 0; i < n; i++)
        if ((double)z[i] > most) most = (double)z[i];
    for (int i = 0; i < n; i++) sum += exp((double)z[i] - most);
    return most + log(sum);
}

typedef struct total {
    double kl, square; /* sums over positions */
    int n, n_argmax;
} total;

static void add_row(total *t, const float *p, const float *q, int n)
{
    double lse_p = log_sum_exp(p, n), lse_q = log_sum_exp(q, n), kl = 0;
    for (int i = 0; i < n; i++) {
        double log_p = (double)p[i] - lse_p;
        if (log_p > -80) kl += exp(log_p) * (log_p - ((double)q[i] - lse_q));
    }
    t->kl += kl;
    t->square += kl * kl;
    t->n++;
    t->n_argmax += td_rig_argmax(p, n) == td_rig_argmax(q, n);
}

static void compare_chunk(td_rig *plain, td_rig *other, const int32_t *ids, int n, float *p, float *q, total *t)
{
    td_error err = { 0 };
    int vocab = td_rig_vocab(plain);
    must(td_rig_run(plain, 0, ids, n, true, true, &err), &err);
    must(td_rig_run(other, 0, ids, n, true, true, &err), &err);
    for (int row = 0; row < n; row++) {
        td_rig_logits(plain, row, p);
        td_rig_logits(other, row, q);
        add_row(t, p, q, vocab);
    }
}

static void compare(const char *plain_dir, const char *dir, const td_ids *ids)
{
    td_rig plain, other;
    total t = { 0 };
    open_rig(&plain, plain_dir);
    open_rig(&other, dir);
    size_t vocab = (size_t)td_rig_vocab(&plain);
    float *p = malloc(vocab * sizeof *p), *q = malloc(vocab * sizeof *q);
    td_check(p && q && td_rig_vocab(&other) == td_rig_vocab(&plain));
    for (size_t at = 0; at < ids->n; at += CHUNK) {
        if (at % WINDOW == 0) {
            td_rig_slot(&plain, 0, 0, 1, WINDOW / TD_BLOCK);
            td_rig_slot(&other, 0, 0, 1, WINDOW / TD_BLOCK);
        }
        compare_chunk(&plain, &other, ids->data + at, (int)(ids->n - at < CHUNK ? ids->n - at : CHUNK), p, q, &t);
    }
    double mean = t.kl / t.n, deviation = sqrt(fmax(0, t.square / t.n - mean * mean) / t.n);
    printf("%s: mean KL %.3e (standard error %.1e), argmax equal %.2f %% of %d positions\n", dir, mean, deviation,
           100.0 * t.n_argmax / t.n, t.n);
    free(p);
    free(q);
    td_rig_close(&plain);
    td_rig_close(&other);
}

int main(int argc, char **argv)
{
    td_ids ids = { 0 };
    if (argc < 5 || atoi(argv[2]) < 1) {
        fprintf(stderr, "usage: divergence TEXT TOKENS PLAIN-CHECKPOINT CHECKPOINT...\n");
        return 2;
    }
    read_ids(argv[3], argv[1], atoi(argv[2]), &ids);
    for (int i = 4; i < argc; i++) compare(argv[3], argv[i], &ids);
    td_ids_deinit(&ids);
    return 0;
}
