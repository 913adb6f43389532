/* Keys from three sources, kept as SHA-256 digests. A lookup compares with every digest in full, so its time tells
 * neither which key was near nor where in the list it stands. */
#include "server/auth.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/hash.h"
#include "base/log.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILE_MAX_BYTES = 1 << 20, CHECK_FILE_NS = 1000000000 };

typedef struct key_entry {
    uint8_t digest[TD_SHA256_BYTES];
    char label[TD_KEY_LABEL_CAP];
} key_entry;

typedef struct key_list {
    key_entry *entries;
    int n;
} key_list;

struct td_auth {
    key_list fixed; /* command line and environment: never changes */
    char *file;     /* NULL: none */

    pthread_mutex_t mutex; /* guards what follows */
    key_list from_file;
    bool closed; /* the file is not valid now */
    struct timespec file_mtime;
    off_t file_bytes;
    ino_t file_inode;
    int64_t checked_ns;
};

static bool label_ok(const char *label, size_t n_bytes)
{
    if (n_bytes == 0 || n_bytes >= TD_KEY_LABEL_CAP) return false;
    for (size_t i = 0; i < n_bytes; i++)
        if (!isalnum((unsigned char)label[i]) && !strchr("._-", label[i])) return false;
    return true;
}

/* key: the bytes between blanks. */
static td_status list_add(key_list *list, const char *label, const char *key, size_t n_bytes, td_error *err)
{
    for (size_t i = 0; i < n_bytes; i++)
        if ((unsigned char)key[i] <= ' ' || (unsigned char)key[i] >= 0x7f)
            return td_fail(err, TD_EFORMAT, "API key %s: only printable ASCII without blanks is allowed", label);
    if (n_bytes == 0) return td_fail(err, TD_EFORMAT, "API key %s is empty", label);
    if (list->n >= TD_KEYS_MAX) return td_fail(err, TD_EFORMAT, "more than %d API keys", TD_KEYS_MAX);
    key_entry *entries = realloc(list->entries, (size_t)(list->n + 1) * sizeof *entries);
    if (!entries) return td_fail(err, TD_ENOMEM, "API keys: out of memory");
    list->entries = entries;
    key_entry *entry = &entries[list->n];
    snprintf(entry->label, sizeof entry->label, "%s", label);
    td_sha256_of(key, n_bytes, entry->digest);
    list->n++;
    return TD_OK;
}

static void trim(const char **text, size_t *n_bytes)
{
    while (*n_bytes > 0 && strchr(" \t\r", (*text)[0])) (*text)++, (*n_bytes)--;
    while (*n_bytes > 0 && strchr(" \t\r", (*text)[*n_bytes - 1])) (*n_bytes)--;
}

static td_status add_from_env(key_list *list, const char *env, td_error *err)
{
    int number = 0;
    for (const char *at = env; *at;) {
        const char *end = strchrnul(at, ',');
        const char *key = at;
        size_t n_bytes = (size_t)(end - at);
        char label[TD_KEY_LABEL_CAP];
        trim(&key, &n_bytes);
        if (n_bytes > 0) { /* "a,,b" and a trailing comma happen in generated environments */
            snprintf(label, sizeof label, "env-%d", ++number);
            td_status st = list_add(list, label, key, n_bytes, err);
            if (st != TD_OK) return st;
        }
        at = *end ? end + 1 : end;
    }
    if (*env && number == 0) return td_fail(err, TD_EFORMAT, "the environment's list of API keys holds no key");
    return TD_OK;
}

/* "key" or "label: key"; '#' begins a comment line. */
static td_status add_line(key_list *list, const char *file, int line_number, int *number, const char *line,
                          size_t n_bytes, td_error *err)
{
    trim(&line, &n_bytes);
    if (n_bytes == 0 || line[0] == '#') return TD_OK;
    char label[TD_KEY_LABEL_CAP];
    snprintf(label, sizeof label, "file-%d", ++*number);
    const char *colon = memchr(line, ':', n_bytes);
    if (colon) {
        const char *name = line;
        size_t n_name = (size_t)(colon - line);
        trim(&name, &n_name);
        if (!label_ok(name, n_name))
            return td_fail(err, TD_EFORMAT, "%s:%d: a label is 1 to 64 letters, digits, '.', '_', '-'", file,
                           line_number);
        snprintf(label, sizeof label, "%.*s", (int)n_name, name);
        n_bytes -= (size_t)(colon + 1 - line);
        line = colon + 1;
        trim(&line, &n_bytes);
    }
    td_status st = list_add(list, label, line, n_bytes, err);
    if (st != TD_OK) td_error_prefix(err, "%s:%d", file, line_number);
    return st;
}

static td_status parse_file(const char *file, const char *text, size_t n_bytes, key_list *list, td_error *err)
{
    int line_number = 0, number = 0;
    for (size_t at = 0; at < n_bytes;) {
        const char *newline = memchr(text + at, '\n', n_bytes - at);
        size_t n_line = newline ? (size_t)(newline - (text + at)) : n_bytes - at;
        td_status st = add_line(list, file, ++line_number, &number, text + at, n_line, err);
        if (st != TD_OK) return st;
        at += n_line + 1;
    }
    if (list->n == 0) return td_fail(err, TD_EFORMAT, "%s holds no API key", file);
    return TD_OK;
}

static td_status read_file(td_auth *auth, key_list *list, struct stat *info, td_error *err)
{
    int fd = open(auth->file, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return td_fail(err, TD_EIO, "API key file %s: %s", auth->file, strerror(errno));
    td_buf text;
    td_buf_init(&text, FILE_MAX_BYTES);
    td_status st = TD_OK;
    if (fstat(fd, info) != 0 || !S_ISREG(info->st_mode))
        st = td_fail(err, TD_EIO, "API key file %s: not a regular file", auth->file);
    else if (info->st_mode & (S_IRWXG | S_IRWXO))
        st = td_fail(err, TD_EINVAL, "API key file %s may be read by others: chmod 600 it", auth->file);
    char piece[4096];
    ssize_t got = 0;
    while (st == TD_OK && (got = read(fd, piece, sizeof piece)) > 0) td_buf_add(&text, piece, (size_t)got);
    if (st == TD_OK && got < 0) st = td_fail(err, TD_EIO, "API key file %s: %s", auth->file, strerror(errno));
    if (st == TD_OK && text.failed)
        st = td_fail(err, TD_EFORMAT, "API key file %s is larger than %d bytes", auth->file, FILE_MAX_BYTES);
    if (st == TD_OK) st = parse_file(auth->file, text.data, text.n_bytes, list, err);
    td_buf_deinit(&text);
    close(fd);
    return st;
}

/* With the mutex held (or before other threads know auth). */
static td_status load_file(td_auth *auth, td_error *err)
{
    key_list list = { 0 };
    struct stat info = { 0 };
    td_status st = read_file(auth, &list, &info, err);
    free(auth->from_file.entries);
    if (st != TD_OK) {
        free(list.entries);
        list = (key_list){ 0 };
    }
    auth->from_file = list;
    auth->closed = st != TD_OK;
    auth->file_mtime = info.st_mtim;
    auth->file_bytes = info.st_size;
    auth->file_inode = info.st_ino;
    return st;
}

static void reload_locked(td_auth *auth)
{
    td_error err;
    if (load_file(auth, &err) == TD_OK)
        td_log(TD_LOG_INFO, "server", "API key file read again: %d keys", auth->from_file.n);
    else
        td_log(TD_LOG_ERROR, "server", "no key is accepted until the key file is valid again: %s", err.text);
}

static void look_at_file(td_auth *auth)
{
    int64_t now_ns = td_now_ns();
    if (now_ns - auth->checked_ns < CHECK_FILE_NS) return;
    auth->checked_ns = now_ns;
    struct stat info = { 0 };
    bool found = stat(auth->file, &info) == 0;
    bool same = found && info.st_mtim.tv_sec == auth->file_mtime.tv_sec &&
                info.st_mtim.tv_nsec == auth->file_mtime.tv_nsec && info.st_size == auth->file_bytes &&
                info.st_ino == auth->file_inode;
    if (same || (!found && auth->closed)) return;
    reload_locked(auth);
}

td_status td_auth_create(const char *const *keys, int n_keys, const char *env, const char *file, td_auth **out,
                         td_error *err)
{
    td_auth *auth = calloc(1, sizeof *auth);
    if (!auth) return td_fail(err, TD_ENOMEM, "API keys: out of memory");
    pthread_mutex_init(&auth->mutex, NULL);
    td_status st = TD_OK;
    for (int i = 0; i < n_keys && st == TD_OK; i++) {
        char label[TD_KEY_LABEL_CAP];
        snprintf(label, sizeof label, "cli-%d", i + 1);
        st = list_add(&auth->fixed, label, keys[i], strlen(keys[i]), err);
    }
    if (st == TD_OK && env) st = add_from_env(&auth->fixed, env, err);
    if (st == TD_OK && file) {
        auth->file = strdup(file);
        st = auth->file ? load_file(auth, err) : td_fail(err, TD_ENOMEM, "API keys: out of memory");
    }
    if (st != TD_OK) {
        td_auth_destroy(auth);
        return st;
    }
    *out = auth;
    return TD_OK;
}

void td_auth_destroy(td_auth *auth)
{
    if (!auth) return;
    pthread_mutex_destroy(&auth->mutex);
    free(auth->fixed.entries);
    free(auth->from_file.entries);
    free(auth->file);
    free(auth);
}

bool td_auth_is_open(const td_auth *auth)
{
    return auth->fixed.n == 0 && !auth->file;
}

/* Every byte of every digest is looked at, and nothing branches on what was found. */
static void find(const key_list *list, const uint8_t digest[TD_SHA256_BYTES], int *found)
{
    for (int i = 0; i < list->n; i++) {
        unsigned differs = 0;
        for (int k = 0; k < TD_SHA256_BYTES; k++) differs |= (unsigned)(list->entries[i].digest[k] ^ digest[k]);
        int equal = -(int)((differs - 1u) >> 31); /* all ones when nothing differs */
        *found = (*found & ~equal) | (i & equal);
    }
}

td_auth_answer td_auth_check(td_auth *auth, const char *key, char label[TD_KEY_LABEL_CAP])
{
    label[0] = 0;
    if (td_auth_is_open(auth)) return TD_AUTH_OPEN;
    uint8_t digest[TD_SHA256_BYTES];
    int in_fixed = -1, in_file = -1;
    size_t n_bytes = key ? strlen(key) : 0;
    if (key) trim(&key, &n_bytes);
    td_sha256_of(key ? key : "", n_bytes, digest);
    pthread_mutex_lock(&auth->mutex);
    if (auth->file) look_at_file(auth);
    bool closed = auth->closed;
    find(&auth->fixed, digest, &in_fixed);
    find(&auth->from_file, digest, &in_file);
    const char *who = in_fixed >= 0  ? auth->fixed.entries[in_fixed].label
                      : in_file >= 0 ? auth->from_file.entries[in_file].label
                                     : "";
    snprintf(label, TD_KEY_LABEL_CAP, "%s", closed ? "" : who);
    pthread_mutex_unlock(&auth->mutex);
    if (closed) return TD_AUTH_CLOSED;
    return label[0] ? TD_AUTH_OK : TD_AUTH_REFUSED;
}

void td_auth_reload(td_auth *auth)
{
    if (!auth->file) return;
    pthread_mutex_lock(&auth->mutex);
    reload_locked(auth);
    pthread_mutex_unlock(&auth->mutex);
}

const char *td_auth_key_of(const char *authorization, const char *x_api_key)
{
    static const char scheme[] = "bearer";
    if (authorization && strncasecmp(authorization, scheme, sizeof scheme - 1) == 0) {
        const char *at = authorization + sizeof scheme - 1;
        if (*at == ' ' || *at == '\t') {
            while (*at == ' ' || *at == '\t') at++;
            return at;
        }
    }
    return x_api_key;
}
