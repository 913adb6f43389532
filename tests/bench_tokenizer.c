/* Speed of the tokenizer, one thread:  bench_tokenizer tokenizer.json text...
 * Prints the time to open the file, and for each text MB/s of the first call (cold cache of pieces) and of the best. */
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "text/tokenizer.h"

enum { N_RUNS = 10 };

static char *read_file(const char *path, size_t *n_bytes)
{
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END) != 0) {
        perror(path);
        exit(1);
    }
    long end = ftell(f);
    rewind(f);
    char *data = malloc((size_t)end + 1);
    if (!data || fread(data, 1, (size_t)end, f) != (size_t)end) {
        perror(path);
        exit(1);
    }
    fclose(f);
    *n_bytes = (size_t)end;
    return data;
}

static double mb_per_s(const td_tokenizer *tok, const char *text, size_t n_bytes, size_t *n_ids)
{
    td_ids ids = { 0 };
    td_error err;
    int64_t start = td_now_ns();
    if (td_tokenizer_encode(tok, text, n_bytes, 0, &ids, &err) != TD_OK) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
    double seconds = (double)(td_now_ns() - start) * 1e-9;
    *n_ids = ids.n;
    td_ids_deinit(&ids);
    return (double)n_bytes / seconds * 1e-6;
}

int main(int argc, char **argv)
{
    td_tokenizer *tok;
    td_error err;
    if (argc < 3) {
        fprintf(stderr, "usage: %s tokenizer.json text...\n", argv[0]);
        return 2;
    }
    int64_t start = td_now_ns();
    if (td_tokenizer_open(argv[1], &tok, &err) != TD_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    printf("%s: opened in %.3f s\n", argv[1], (double)(td_now_ns() - start) * 1e-9);
    for (int i = 2; i < argc; i++) {
        size_t n_bytes, n_ids;
        char *text = read_file(argv[i], &n_bytes);
        double first = mb_per_s(tok, text, n_bytes, &n_ids), best = first;
        for (int run = 1; run < N_RUNS; run++) {
            double speed = mb_per_s(tok, text, n_bytes, &n_ids);
            if (speed > best) best = speed;
        }
        printf("%-40s %9zu bytes %8zu ids  first %7.2f MB/s  best %7.2f MB/s\n", argv[i], n_bytes, n_ids, first, best);
        free(text);
    }
    td_tokenizer_destroy(tok);
    return 0;
}
