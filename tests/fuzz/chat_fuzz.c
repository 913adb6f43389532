/* A chat body, any bytes: read and rendered. The first byte chooses the server's options. What was rendered once must
 * render the same again, media must stand where they say, and a refusal names a field. */
#include <stdlib.h>
#include <string.h>

#include "text/chat.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static const char *recall(void *context, const char *call_id, size_t n_bytes, size_t *n_text_bytes)
{
    (void)context;
    *n_text_bytes = n_bytes;
    return n_bytes % 2 ? call_id : NULL;
}

static void check_prompt(const td_chat_prompt *prompt)
{
    size_t end = 0;
    td_check(strlen(prompt->text) <= prompt->n_bytes);
    for (size_t i = 0; i < prompt->n_media; i++) {
        const td_chat_media *m = &prompt->media[i];
        td_check(m->at >= end && m->at + m->n_bytes <= prompt->n_bytes);
        td_check(memcmp(prompt->text + m->at, m->kind == TD_MEDIA_IMAGE ? "<|image|>" : "<|video|>", m->n_bytes) == 0);
        td_check(m->param && m->part);
        end = m->at + m->n_bytes;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (!n_bytes) return 0;
    td_chat_options options = { .effort = (td_chat_effort)(data[0] & 3),
                                .clear_thinking = data[0] & 4,
                                .effort_at_tail = data[0] & 8,
                                .recall = data[0] & 16 ? recall : NULL };
    char *text = malloc(n_bytes), param[TD_CHAT_PARAM_CAP];
    const td_json *request;
    td_chat_prompt first, second;
    td_arena arena;
    td_error err;
    memcpy(text, data + 1, n_bytes - 1); /* one byte of room for the reader */
    td_arena_init(&arena, 0);
    if (td_json_parse(&arena, text, n_bytes - 1, &request, &err) == TD_OK) {
        td_status status = td_chat_render(&arena, request, &options, &first, param, &err);
        td_check(status == TD_OK || status == TD_EINVAL);
        td_check(status == TD_OK || (param[0] && err.text[0]));
        td_check(td_chat_render(&arena, request, &options, &second, param, &err) == status);
        if (!status) {
            check_prompt(&first);
            td_check(first.n_bytes == second.n_bytes && memcmp(first.text, second.text, first.n_bytes) == 0);
        }
    }
    td_arena_deinit(&arena);
    free(text);
    return 0;
}
