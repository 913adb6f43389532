/* tandem chat [URL]: a conversation in the terminal. Replies appear as they are made, thoughts dimmed; Ctrl-C ends the
 * reply, not the program. With --once, or when the input is not a terminal, it asks one question and ends: then only
 * the answer goes to stdout, so that scripts can use it. */
#include "base/clock.h"
#include "base/json_write.h"
#include "cli/args.h"
#include "cli/cli.h"
#include "cli/client.h"
#include "cli/conversation.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ID_CAP = 512, SILENT_S = 300 };
#define QUESTION_LIMIT ((size_t)16 << 20)

/* Set by SIGINT; a signal handler can reach nothing else. */
static atomic_bool interrupted;

static bool is_interrupted(void)
{
    return atomic_load(&interrupted);
}

static const td_setting SETTINGS[] = {
    { .name = "once",
      .kind = TD_SETTING_TEXT,
      .fallback = "",
      .value = "TEXT",
      .group = "Asking",
      .help = "ask this, print the answer, end" },
    { .name = "effort",
      .kind = TD_SETTING_CHOICE,
      .choices = "none|low|high|max",
      .value = "LEVEL",
      .help = "how long the model thinks; default: the server's" },
    { .name = "system", .kind = TD_SETTING_TEXT, .fallback = "", .value = "TEXT", .help = "system message" },
    { .name = "max-tokens",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = 1 << 20,
      .value = "N",
      .help = "longest reply; 0: the server's default" },
    { .name = "temperature",
      .kind = TD_SETTING_REAL,
      .fallback = "-1",
      .min = -1,
      .max = 2,
      .value = "T",
      .help = "0: always the likeliest token; -1: the server's default" },
    { .name = "model",
      .kind = TD_SETTING_TEXT,
      .fallback = "",
      .value = "ID",
      .group = "Server",
      .help = "default: the first that the server names" },
    TD_CLIENT_KEY_SETTING,
    { .name = "hide-reasoning", .kind = TD_SETTING_FLAG, .group = "Output", .help = "show answers only" },
    { .name = "json", .kind = TD_SETTING_FLAG, .help = "one question: the reply as one JSON object" },
};
enum { N_SETTINGS = sizeof SETTINGS / sizeof *SETTINGS };

typedef struct chat {
    td_client *client;
    td_conversation talk;
    char model[ID_CAP];
    bool tty;            /* stdout: colours, and no character that a terminal would obey */
    bool show_reasoning; /* while it streams */
    bool quiet;          /* nothing is shown while it streams */
} chat;

/* A reply as it arrives. */
typedef struct reply {
    const chat *chat;
    td_buf content, reasoning;
    td_arena arena;
    td_error err;
    td_status status;
    bool dim, shown, cut; /* dim: the terminal is in dimmed text; cut: by max_tokens or the window */
    int64_t sent_ns, first_ns, last_ns, completion_tokens;
} reply;

/* --- showing --- */

/* Text of a model on a terminal: without control characters but line feed and tab, so that no reply can move the
 * cursor, change the title or write to the clipboard. */
static void show(const chat *c, const char *text)
{
    if (!c->tty) {
        fputs(text, stdout);
        return;
    }
    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        if (p[0] == 0xc2 && p[1] >= 0x80 && p[1] < 0xa0) {
            p++; /* C1 controls, U+0080 to U+009F */
        } else if ((*p >= ' ' && *p != 0x7f) || *p == '\n' || *p == '\t') {
            putchar(*p);
        }
    }
}

static void set_dim(reply *r, bool dim)
{
    if (r->dim == dim) return;
    r->dim = dim;
    if (r->chat->tty) fputs(dim ? "\033[2m" : "\033[0m", stdout);
    if (!dim) fputs("\n\n", stdout);
}

static void show_piece(reply *r, const td_chat_piece *piece)
{
    const chat *c = r->chat;
    if (c->quiet) return;
    if (piece->reasoning && *piece->reasoning && c->show_reasoning) {
        set_dim(r, true);
        show(c, piece->reasoning);
        r->shown = true;
    }
    if (piece->content && *piece->content) {
        set_dim(r, false);
        show(c, piece->content);
        r->shown = true;
    }
    fflush(stdout);
}

static void end_line(reply *r)
{
    if (r->dim && r->chat->tty) fputs("\033[0m", stdout);
    r->dim = false;
    if (r->shown) putchar('\n');
    fflush(stdout);
}

/* --- asking --- */

static bool on_event(void *user, char *data, size_t n_bytes)
{
    reply *r = user;
    td_chat_piece piece;
    td_arena_deinit(&r->arena);
    td_arena_init(&r->arena, 0);
    r->status = td_chat_piece_read(&r->arena, data, n_bytes, &piece, &r->err);
    if (r->status || piece.done) return false;
    if (piece.completion_tokens >= 0) r->completion_tokens = piece.completion_tokens;
    if (piece.finish) r->cut = strcmp(piece.finish, "length") == 0;
    if ((piece.content && *piece.content) || (piece.reasoning && *piece.reasoning)) {
        r->last_ns = td_now_ns();
        if (!r->first_ns) r->first_ns = r->last_ns;
    }
    if (piece.content) td_buf_puts(&r->content, piece.content);
    if (piece.reasoning) td_buf_puts(&r->reasoning, piece.reasoning);
    show_piece(r, &piece);
    return true;
}

static const char *text_of(const td_buf *buf)
{
    return buf->data ? buf->data : "";
}

/* One question. TD_ECANCELED: Ctrl-C; what had come is kept. Free r afterwards. */
static td_status ask(chat *c, const char *question, reply *r, td_error *err)
{
    td_buf body;
    *r = (reply){ .chat = c, .completion_tokens = -1, .sent_ns = td_now_ns() };
    td_buf_init(&r->content, 0);
    td_buf_init(&r->reasoning, 0);
    td_arena_init(&r->arena, 0);
    td_buf_init(&body, 0);
    td_conversation_request(&c->talk, question, &body);
    td_status status = td_client_stream(c->client, "/v1/chat/completions", &body, SILENT_S, on_event, r, err);
    td_buf_deinit(&body);
    end_line(r);
    if (!status && r->status) {
        *err = r->err;
        status = r->status;
    }
    if (!status && (r->content.failed || r->reasoning.failed)) status = td_fail(err, TD_ENOMEM, "out of memory");
    bool keep = !status || (status == TD_ECANCELED && r->content.n_bytes > 0);
    if (keep && td_conversation_add(&c->talk, question, text_of(&r->content), text_of(&r->reasoning)))
        status = td_fail(err, TD_ENOMEM, "out of memory");
    return status;
}

static void free_reply(reply *r)
{
    td_buf_deinit(&r->content);
    td_buf_deinit(&r->reasoning);
    td_arena_deinit(&r->arena);
}

static double tokens_per_s(const reply *r)
{
    double s = (double)(r->last_ns - r->first_ns) * 1e-9;
    return r->completion_tokens > 1 && s > 0 ? (double)(r->completion_tokens - 1) / s : 0;
}

static void print_speed(const reply *r)
{
    if (!r->chat->tty || r->completion_tokens < 0) return;
    printf("\033[2m[%lld tokens", (long long)r->completion_tokens);
    if (tokens_per_s(r) > 0) printf(", %.1f tok/s", tokens_per_s(r));
    if (r->first_ns) printf(", first after %.2f s", (double)(r->first_ns - r->sent_ns) * 1e-9);
    printf("%s]\033[0m\n", r->cut ? ", cut at the limit" : "");
}

/* --- one question --- */

static void print_json(const chat *c, const reply *r)
{
    td_buf out;
    td_buf_init(&out, 0);
    td_json_writer w = { .out = &out };
    td_json_write_begin(&w, '{');
    td_json_write_member_text(&w, "model", c->model);
    td_json_write_member_text(&w, "content", text_of(&r->content));
    td_json_write_member_text(&w, "reasoning_content", text_of(&r->reasoning));
    td_json_write_member_bool(&w, "cut", r->cut);
    td_json_write_member_int(&w, "completion_tokens", r->completion_tokens);
    td_json_write_key(&w, "tok_s");
    td_json_write_double(&w, tokens_per_s(r));
    td_json_write_end(&w, '}');
    printf("%s\n", out.data ? out.data : "{}");
    td_buf_deinit(&out);
}

static td_status once(chat *c, const char *question, bool json, td_error *err)
{
    reply r;
    c->quiet = json;
    td_status status = ask(c, question, &r, err);
    if (!status && json) print_json(c, &r);
    if (!status && !json) print_speed(&r);
    free_reply(&r);
    return status;
}

static td_status read_all(FILE *in, td_buf *out, td_error *err)
{
    char bytes[4096];
    for (size_t n; (n = fread(bytes, 1, sizeof bytes, in)) > 0;) td_buf_add(out, bytes, n);
    if (ferror(in)) return td_fail(err, TD_EIO, "the question cannot be read");
    if (out->failed) return td_fail(err, TD_EINVAL, "the question is too long");
    while (out->n_bytes && (out->data[out->n_bytes - 1] == '\n' || out->data[out->n_bytes - 1] == '\r'))
        out->data[--out->n_bytes] = '\0';
    if (!out->n_bytes) return td_fail(err, TD_EINVAL, "the input holds no question");
    if (strlen(out->data) != out->n_bytes) return td_fail(err, TD_EINVAL, "the input is not text");
    return TD_OK;
}

/* --- the conversation --- */

static const char COMMANDS[] = "  /new             start over\n"
                               "  /effort LEVEL    how long it thinks: none, low, high, max\n"
                               "  /system TEXT     system message from now on; alone: none\n"
                               "  /help            this text\n"
                               "  /quit            end (or Ctrl-D)\n"
                               "Ctrl-C stops a reply. A line that ends with \\ goes on in the next.\n";

static const char *effort_of(const char *name)
{
    static const char *const LEVELS[] = { "none", "low", "high", "max" };
    for (size_t i = 0; i < sizeof LEVELS / sizeof *LEVELS; i++)
        if (strcmp(name, LEVELS[i]) == 0) return LEVELS[i];
    return NULL;
}

/* False: end. */
static bool command(chat *c, char *line)
{
    char *word = strtok(line, " \t"), *rest = strtok(NULL, "");
    while (rest && (*rest == ' ' || *rest == '\t')) rest++;
    if (strcmp(word, "/quit") == 0 || strcmp(word, "/exit") == 0) return false;
    if (strcmp(word, "/new") == 0) {
        td_conversation_clear(&c->talk);
        puts("A new conversation.");
    } else if (strcmp(word, "/effort") == 0) {
        const char *effort = rest ? effort_of(rest) : NULL;
        if (effort) c->talk.effort = effort;
        if (effort || !rest)
            printf("Effort: %s.\n", c->talk.effort ? c->talk.effort : "the server's default");
        else
            puts("Efforts are none, low, high and max.");
    } else if (strcmp(word, "/system") == 0) {
        if (td_conversation_system(&c->talk, rest)) puts("Out of memory.");
        puts(c->talk.system ? "The system message is set." : "No system message.");
    } else {
        if (strcmp(word, "/help") != 0) printf("There is no command %s.\n", word);
        fputs(COMMANDS, stdout);
    }
    return true;
}

/* A line, or several joined by a backslash at the end. False: Ctrl-D. After Ctrl-C an empty text. */
static bool read_line(td_buf *out)
{
    char *line = NULL;
    size_t cap = 0;
    bool more = true;
    td_buf_clear(out);
    td_buf_puts(out, "");
    for (const char *prompt = "> "; more; prompt = "  ") {
        fputs(prompt, stdout);
        fflush(stdout);
        errno = 0;
        ssize_t n = getline(&line, &cap, stdin);
        if (n < 0) {
            bool signal_came = errno == EINTR || is_interrupted();
            clearerr(stdin);
            putchar('\n');
            free(line);
            td_buf_clear(out);
            td_buf_puts(out, "");
            return signal_came;
        }
        while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r')) n--;
        more = n > 0 && line[n - 1] == '\\';
        td_buf_add(out, line, (size_t)(more ? n - 1 : n));
        if (more) td_buf_putc(out, '\n');
    }
    free(line);
    return true;
}

static void converse(chat *c)
{
    td_buf line;
    reply r;
    td_error err;
    td_buf_init(&line, QUESTION_LIMIT);
    printf("%s at %s. /help lists the commands, Ctrl-D ends.\n\n", c->model, td_client_base(c->client));
    while (read_line(&line)) {
        atomic_store(&interrupted, false);
        char *text = line.data ? line.data : NULL;
        if (line.failed || !text || !text[strspn(text, " \t\n")]) continue;
        if (text[0] == '/') {
            if (!command(c, text)) break;
            continue;
        }
        td_status status = ask(c, text, &r, &err);
        if (status == TD_ECANCELED)
            puts("[stopped]");
        else if (status)
            fprintf(stderr, "%s\n", err.text);
        else
            print_speed(&r);
        putchar('\n');
        free_reply(&r);
        atomic_store(&interrupted, false);
    }
    td_buf_deinit(&line);
}

/* --- the command --- */

static void on_interrupt(int signal_number)
{
    (void)signal_number;
    atomic_store(&interrupted, true);
}

static void print_help(void)
{
    printf(
        "usage: tandem chat [URL] [settings]\n\n"
        "Talks to the server at URL (http://127.0.0.1:8888) in the terminal. With --once, or when the input is not a\n"
        "terminal, asks one question and prints only the answer.\n");
    td_settings_help(SETTINGS, N_SETTINGS);
    printf("\nIn the conversation:\n%s", COMMANDS);
    printf("\nexit code  0 done   1 the server gave no answer   2 bad arguments\n"
           "example    tandem chat --effort low\n"
           "           git diff | tandem chat --system \"Review this change.\" > review.md\n");
}

static td_status begin(chat *c, const char *url, const td_settings *settings, td_error *err)
{
    const char *model = td_settings_text(settings, "model");
    struct sigaction action = { .sa_handler = on_interrupt }; /* without SA_RESTART: it must wake the prompt */
    sigaction(SIGINT, &action, NULL);
    td_status status = td_client_open(url, td_settings_text(settings, "api-key"), is_interrupted, &c->client, err);
    if (status) return status;
    if (td_conversation_system(&c->talk, td_settings_text(settings, "system")))
        return td_fail(err, TD_ENOMEM, "out of memory");
    c->tty = isatty(STDOUT_FILENO);
    c->show_reasoning = c->tty && !td_settings_flag(settings, "hide-reasoning");
    c->talk.model = c->model;
    c->talk.effort = td_settings_text(settings, "effort");
    c->talk.max_tokens = td_settings_int(settings, "max-tokens");
    c->talk.temperature = td_settings_real(settings, "temperature");
    if (*model) {
        snprintf(c->model, sizeof c->model, "%s", model);
        return TD_OK;
    }
    return td_client_model(c->client, c->model, sizeof c->model, err);
}

static td_status talk(chat *c, const char *url, const td_settings *settings, td_error *err)
{
    const char *question = td_settings_text(settings, "once");
    bool json = td_settings_flag(settings, "json");
    td_status status = begin(c, url, settings, err);
    if (status) return status;
    if (*question) return once(c, question, json, err);
    if (isatty(STDIN_FILENO)) {
        if (json) return td_fail(err, TD_EINVAL, "--json is for one question: --once, or a question on the input");
        converse(c);
        return TD_OK;
    }
    td_buf input;
    td_buf_init(&input, QUESTION_LIMIT);
    status = read_all(stdin, &input, err);
    if (!status) status = once(c, input.data, json, err);
    td_buf_deinit(&input);
    return status;
}

int td_cli_chat(int argc, char **argv)
{
    td_error err;
    td_settings settings;
    chat c = { 0 };
    if (td_args_help(argc, argv)) {
        print_help();
        return TD_EXIT_OK;
    }
    const char *url = td_args_take_word(SETTINGS, N_SETTINGS, &argc, argv);
    td_status status = td_settings_parse(SETTINGS, N_SETTINGS, argc, argv, &settings, &err);
    if (!status) status = talk(&c, url ? url : "http://127.0.0.1:8888", &settings, &err);
    if (status) fprintf(stderr, "tandem chat: %s\n", err.text);
    td_conversation_deinit(&c.talk);
    td_client_close(c.client);
    return status == TD_EINVAL ? TD_EXIT_ARGUMENTS : status ? TD_EXIT_FAILED : TD_EXIT_OK;
}
