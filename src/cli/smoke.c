/* tandem smoke URL: one question, and whether the answer looks like one. The start script trusts a server only after
 * this, because a damaged model answers 200 OK as quickly as a good one. */
#include "base/json_write.h"
#include "cli/args.h"
#include "cli/cli.h"
#include "cli/client.h"
#include "cli/judge.h"

#include <stdio.h>
#include <string.h>

enum { LIMIT_S = 180, MAX_TOKENS = 32, SHOWN_CHARS = 40, ID_CAP = 512 };

static const td_setting SETTINGS[] = {
    TD_CLIENT_KEY_SETTING,
    { .name = "json", .kind = TD_SETTING_FLAG, .help = "the result as one JSON object" },
};
enum { N_SETTINGS = sizeof SETTINGS / sizeof *SETTINGS };

typedef struct result {
    char model[ID_CAP];
    td_client_reply reply;
    const char *answer; /* part of reply */
    size_t n_answer;
    int64_t completion_tokens;
    double decode_s; /* as the server measured it; of the whole call when it does not say */
} result;

static void print_help(void)
{
    printf(
        "usage: tandem smoke URL [settings]\n\n"
        "Asks the server at URL one question (\"Reply with OK.\", at most %d tokens, temperature 0, no thinking, %d "
        "s)\n"
        "and judges the answer. It fails when nothing comes, when it is not JSON or has no choice, when the text is\n"
        "empty, or when it is 8 or more characters of at most 2 kinds: what a damaged model says.\n",
        MAX_TOKENS, LIMIT_S);
    td_settings_help(SETTINGS, N_SETTINGS);
    printf("\nexit code  0 it answers   1 it does not   2 bad arguments\n"
           "example    tandem smoke http://127.0.0.1:8888\n");
}

static void write_question(td_buf *body, const char *model)
{
    td_json_writer w = { .out = body };
    td_json_write_begin(&w, '{');
    td_json_write_member_text(&w, "model", model);
    td_json_write_key(&w, "messages");
    td_json_write_begin(&w, '[');
    td_json_write_begin(&w, '{');
    td_json_write_member_text(&w, "role", "user");
    td_json_write_member_text(&w, "content", "Reply with OK.");
    td_json_write_end(&w, '}');
    td_json_write_end(&w, ']');
    td_json_write_member_int(&w, "max_tokens", MAX_TOKENS);
    td_json_write_member_int(&w, "temperature", 0);
    td_json_write_key(&w, "chat_template_kwargs");
    td_json_write_begin(&w, '{');
    td_json_write_member_bool(&w, "enable_thinking", false);
    td_json_write_end(&w, '}');
    td_json_write_end(&w, '}');
}

/* On success r->reply is the caller's to free. */
static td_status ask(td_client *client, result *r, td_error *err)
{
    td_buf body;
    td_status status = td_client_model(client, r->model, sizeof r->model, err);
    if (status) return status;
    td_buf_init(&body, 0);
    write_question(&body, r->model);
    status = td_client_call(client, "/v1/chat/completions", &body, LIMIT_S, &r->reply, err);
    td_buf_deinit(&body);
    if (status) return status;
    const td_json *root = r->reply.json, *choice = td_json_at(td_json_get(root, "choices"), 0);
    const td_json *content = td_json_get(td_json_get(choice, "message"), "content");
    r->decode_s = r->reply.wall_s;
    (void)td_json_double(td_json_get(td_json_get(root, "tandem"), "decode_s"), &r->decode_s);
    (void)td_json_int64(td_json_get(td_json_get(root, "usage"), "completion_tokens"), &r->completion_tokens);
    r->answer = td_json_string(content, &r->n_answer);
    if (!choice)
        status = td_fail(err, TD_EFORMAT, "the reply has no choice");
    else if (!r->answer)
        status = td_fail(err, TD_EFORMAT, "the reply's content is %s, not a string", td_json_kind_name(content));
    else
        status = td_judge_answer(r->answer, r->n_answer, err);
    if (status) td_client_reply_free(&r->reply);
    return status;
}

static void print_result(const result *r)
{
    char line[4 * SHOWN_CHARS + 1];
    size_t n, at = 0;
    const char *text = td_judge_trim(r->answer, r->n_answer, &n);
    n = td_judge_prefix(text, n, SHOWN_CHARS);
    for (size_t i = 0; i < n && at + 1 < sizeof line; i++) /* one line, and nothing that a terminal would obey */
        line[at++] = (unsigned char)text[i] < ' ' || text[i] == 0x7f ? ' ' : text[i];
    line[at] = '\0';
    printf("%s: \"%s\" (%lld tokens, decoded in %.2f s)\n", r->model, line, (long long)r->completion_tokens,
           r->decode_s);
}

static void print_json(const result *r, const td_error *err)
{
    td_buf out;
    td_buf_init(&out, 0);
    td_json_writer w = { .out = &out };
    td_json_write_begin(&w, '{');
    td_json_write_member_bool(&w, "ok", !err);
    if (r->model[0]) td_json_write_member_text(&w, "model", r->model);
    if (err) {
        td_json_write_member_text(&w, "error", err->text);
    } else {
        td_json_write_key(&w, "answer");
        td_json_write_string(&w, r->answer, r->n_answer);
        td_json_write_member_int(&w, "completion_tokens", r->completion_tokens);
        td_json_write_key(&w, "decode_s");
        td_json_write_double(&w, r->decode_s);
    }
    td_json_write_end(&w, '}');
    printf("%s\n", out.data ? out.data : "{}");
    td_buf_deinit(&out);
}

int td_cli_smoke(int argc, char **argv)
{
    td_error err;
    td_settings settings;
    td_client *client;
    result r = { 0 };
    if (td_args_help(argc, argv)) {
        print_help();
        return TD_EXIT_OK;
    }
    const char *url = td_args_take_word(SETTINGS, N_SETTINGS, &argc, argv);
    td_status status = td_settings_parse(SETTINGS, N_SETTINGS, argc, argv, &settings, &err);
    if (!status && !url) status = td_fail(&err, TD_EINVAL, "which server? tandem smoke http://127.0.0.1:8888");
    if (!status) status = td_client_open(url, td_settings_text(&settings, "api-key"), NULL, &client, &err);
    if (status) {
        fprintf(stderr, "tandem smoke: %s\n", err.text);
        return status == TD_EINVAL ? TD_EXIT_ARGUMENTS : TD_EXIT_FAILED;
    }
    status = ask(client, &r, &err);
    if (td_settings_flag(&settings, "json"))
        print_json(&r, status ? &err : NULL);
    else if (!status)
        print_result(&r);
    if (status)
        fprintf(stderr, "tandem smoke: %s\n", err.text);
    else
        td_client_reply_free(&r.reply);
    td_client_close(client);
    return status ? TD_EXIT_FAILED : TD_EXIT_OK;
}
