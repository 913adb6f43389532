/* GET /v1/models and /v1/models/{id}. Agents read the window from here: max_model_len and its two other names; a member
 * called max_tokens would be taken for it and must not exist. */
#include "server/core.h"

#include <string.h>

static void write_model(const td_server *server, td_json_writer *w, const char *id)
{
    const td_server_options *o = &server->options;
    td_json_write_begin(w, '{');
    td_json_write_member_text(w, "id", id);
    td_json_write_member_text(w, "object", "model");
    td_json_write_member_int(w, "created", server->created_s);
    td_json_write_member_text(w, "owned_by", "tandem");
    td_json_write_member_text(w, "root", o->checkpoint);
    td_json_write_member_text(w, "parent", NULL);
    td_json_write_member_int(w, "max_model_len", o->context_tokens);
    td_json_write_member_int(w, "context_length", o->context_tokens);
    td_json_write_member_int(w, "context_window", o->context_tokens);
    td_json_write_key(w, "capabilities");
    td_json_write_begin(w, '{');
    td_json_write_member_bool(w, "vision", false);
    td_json_write_member_bool(w, "tools", false);
    td_json_write_member_bool(w, "reasoning", server->reply_ids.end_think >= 0);
    td_json_write_end(w, '}');
    td_json_write_end(w, '}');
}

void td_route_models(td_call *x)
{
    const td_server_options *o = &x->server->options;
    td_json_writer w = { .out = &x->reply };
    td_json_write_begin(&w, '{');
    td_json_write_member_text(&w, "object", "list");
    td_json_write_key(&w, "data");
    td_json_write_begin(&w, '[');
    write_model(x->server, &w, o->model_id);
    for (int i = 0; i < o->n_aliases; i++) write_model(x->server, &w, o->aliases[i]);
    td_json_write_end(&w, ']');
    td_json_write_end(&w, '}');
    td_call_json(x);
}

void td_route_model(td_call *x)
{
    const td_server_options *o = &x->server->options;
    const char *found = strcmp(x->path_arg, o->model_id) == 0 ? o->model_id : NULL;
    for (int i = 0; i < o->n_aliases && !found; i++)
        if (strcmp(x->path_arg, o->aliases[i]) == 0) found = o->aliases[i];
    if (!found) {
        td_refusal why;
        td_refuse(&why, 404, "model_not_found", "model", "the model `%.256s` does not exist; this server has `%s`",
                  x->path_arg, o->model_id);
        td_call_refuse(x, &why);
        return;
    }
    td_json_writer w = { .out = &x->reply };
    write_model(x->server, &w, found);
    td_call_json(x);
}
