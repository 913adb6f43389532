/* See conversation.h. */
#include "cli/conversation.h"

#include "base/json_write.h"

#include <stdlib.h>
#include <string.h>

static void free_turn(td_turn *turn)
{
    free(turn->user);
    free(turn->content);
    free(turn->reasoning);
}

void td_conversation_clear(td_conversation *c)
{
    for (int i = 0; i < c->n_turns; i++) free_turn(&c->turns[i]);
    c->n_turns = 0;
}

void td_conversation_deinit(td_conversation *c)
{
    td_conversation_clear(c);
    free(c->turns);
    free(c->system);
    c->turns = NULL;
    c->system = NULL;
    c->cap = 0;
}

td_status td_conversation_system(td_conversation *c, const char *text)
{
    char *copy = NULL;
    if (text && *text && !(copy = strdup(text))) return TD_ENOMEM;
    free(c->system);
    c->system = copy;
    return TD_OK;
}

td_status td_conversation_add(td_conversation *c, const char *user, const char *content, const char *reasoning)
{
    if (c->n_turns == c->cap) {
        int cap = c->cap ? 2 * c->cap : 16;
        td_turn *longer = realloc(c->turns, (size_t)cap * sizeof *longer);
        if (!longer) return TD_ENOMEM;
        c->turns = longer;
        c->cap = cap;
    }
    td_turn turn = { .user = strdup(user), .content = strdup(content), .reasoning = strdup(reasoning) };
    if (!turn.user || !turn.content || !turn.reasoning) {
        free_turn(&turn);
        return TD_ENOMEM;
    }
    c->turns[c->n_turns++] = turn;
    return TD_OK;
}

static void write_message(td_json_writer *w, const char *role, const char *content, const char *reasoning)
{
    td_json_write_begin(w, '{');
    td_json_write_member_text(w, "role", role);
    td_json_write_member_text(w, "content", content);
    if (reasoning && *reasoning) td_json_write_member_text(w, "reasoning_content", reasoning);
    td_json_write_end(w, '}');
}

void td_conversation_request(const td_conversation *c, const char *user, td_buf *out)
{
    td_json_writer w = { .out = out };
    td_json_write_begin(&w, '{');
    td_json_write_member_text(&w, "model", c->model);
    td_json_write_key(&w, "messages");
    td_json_write_begin(&w, '[');
    if (c->system) write_message(&w, "system", c->system, NULL);
    for (int i = 0; i < c->n_turns; i++) {
        write_message(&w, "user", c->turns[i].user, NULL);
        write_message(&w, "assistant", c->turns[i].content, c->turns[i].reasoning);
    }
    write_message(&w, "user", user, NULL);
    td_json_write_end(&w, ']');
    td_json_write_member_bool(&w, "stream", true);
    td_json_write_key(&w, "stream_options");
    td_json_write_begin(&w, '{');
    td_json_write_member_bool(&w, "include_usage", true);
    td_json_write_end(&w, '}');
    if (c->effort) td_json_write_member_text(&w, "reasoning_effort", c->effort);
    if (c->max_tokens > 0) td_json_write_member_int(&w, "max_tokens", c->max_tokens);
    if (c->temperature >= 0) {
        td_json_write_key(&w, "temperature");
        td_json_write_double(&w, c->temperature);
    }
    td_json_write_end(&w, '}');
}

td_status td_chat_piece_read(td_arena *arena, char *data, size_t n_bytes, td_chat_piece *out, td_error *err)
{
    td_chat_piece piece = { .completion_tokens = -1 };
    const td_json *root;
    if (n_bytes == 6 && memcmp(data, "[DONE]", 6) == 0) {
        piece.done = true;
        *out = piece;
        return TD_OK;
    }
    if (td_json_parse(arena, data, n_bytes, &root, err)) return td_error_prefix(err, "the stream is not JSON");
    const td_json *error = td_json_get(root, "error");
    if (!td_json_is_null(error)) {
        const char *words = td_json_string(td_json_get(error, "message"), NULL);
        return td_fail(err, TD_EIO, "the server ended the reply: %.500s", words ? words : "no reason given");
    }
    if (td_json_kind_of(td_json_get(root, "choices")) != TD_JSON_ARRAY)
        return td_fail(err, TD_EFORMAT, "the stream has an event without choices");
    const td_json *choice = td_json_at(td_json_get(root, "choices"), 0), *delta = td_json_get(choice, "delta");
    piece.content = td_json_string(td_json_get(delta, "content"), NULL);
    piece.reasoning = td_json_string(td_json_get(delta, "reasoning_content"), NULL);
    if (!piece.reasoning) piece.reasoning = td_json_string(td_json_get(delta, "reasoning"), NULL);
    piece.finish = td_json_string(td_json_get(choice, "finish_reason"), NULL);
    (void)td_json_int64(td_json_get(td_json_get(root, "usage"), "completion_tokens"), &piece.completion_tokens);
    *out = piece;
    return TD_OK;
}
