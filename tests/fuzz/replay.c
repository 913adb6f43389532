/* Runs a libFuzzer target over files and folders named on the command line: corpora are replayed by plain ctest with
 * any compiler. An input that once crashed stays in the corpus and is tried again on every build. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static int n_inputs;

static void replay_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file) {
        perror(path);
        exit(1);
    }
    fseek(file, 0, SEEK_END);
    long n_bytes = ftell(file);
    rewind(file);
    uint8_t *data =
        malloc(n_bytes > 0 ? (size_t)n_bytes : 1); /* exact size: one byte too far is seen by the sanitizer */
    if (!data || fread(data, 1, (size_t)n_bytes, file) != (size_t)n_bytes) exit(1);
    fclose(file);
    LLVMFuzzerTestOneInput(data, (size_t)n_bytes);
    free(data);
    n_inputs++;
}

static void replay(const char *path)
{
    struct stat info;
    if (stat(path, &info) != 0) {
        perror(path);
        exit(1);
    }
    if (!S_ISDIR(info.st_mode)) {
        replay_file(path);
        return;
    }
    DIR *dir = opendir(path);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        char inner[4096];
        if (entry->d_name[0] == '.') continue;
        snprintf(inner, sizeof inner, "%s/%s", path, entry->d_name);
        replay(inner);
    }
    if (dir) closedir(dir);
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) replay(argv[i]);
    printf("%d inputs replayed\n", n_inputs);
    return n_inputs > 0 ? 0 : 1;
}
