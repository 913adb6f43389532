/* See logprobs.h. A token's text need not be whole characters: the chat form then shows U+FFFD beside the exact bytes,
 * the older form, which has no bytes and uses texts as names, spells them "bytes:\xe2\x82". */
#include "server/logprobs.h"

#include "server/reply.h"

#include <string.h>

enum { LIST_TOKENS, LIST_VALUES, LIST_TOP, LIST_OFFSETS, N_LISTS };

void td_logprobs_init(td_logprobs *logprobs, td_logprobs_form form, int n_top)
{
    *logprobs = (td_logprobs){ .form = form, .n_top = n_top };
    for (int i = 0; i < N_LISTS; i++) td_buf_init(&logprobs->lists[i], 0);
    td_buf_init(&logprobs->text, 0);
}

void td_logprobs_deinit(td_logprobs *logprobs)
{
    for (int i = 0; i < N_LISTS; i++) td_buf_deinit(&logprobs->lists[i]);
    td_buf_deinit(&logprobs->text);
}

static void write_bytes(td_json_writer *w, const td_tokenizer *tokenizer, int32_t id)
{
    const char *bytes = "";
    size_t n_bytes = 0;
    (void)td_tokenizer_id_bytes(tokenizer, id, &bytes, &n_bytes);
    td_json_write_begin(w, '[');
    for (size_t i = 0; i < n_bytes; i++) td_json_write_int(w, (unsigned char)bytes[i]);
    td_json_write_end(w, ']');
}

/* Finite: a probability that underflowed is reported as a very small one, as other servers do. */
static double finite_value(float logprob)
{
    return logprob > -9999.0f ? (double)logprob : -9999.0;
}

static void write_chat_members(td_logprobs *logprobs, td_json_writer *w, const td_tokenizer *tokenizer, int32_t id,
                               float logprob)
{
    td_buf_clear(&logprobs->text);
    td_token_text(tokenizer, id, &logprobs->text);
    td_json_write_key(w, "token");
    td_json_write_string(w, logprobs->text.data, logprobs->text.n_bytes);
    td_json_write_key(w, "logprob");
    td_json_write_double(w, finite_value(logprob));
    td_json_write_key(w, "bytes");
    write_bytes(w, tokenizer, id);
}

static void add_chat(td_logprobs *logprobs, const td_tokenizer *tokenizer, const td_token *token)
{
    td_json_writer w = { .out = &logprobs->lists[LIST_TOKENS], .comma = logprobs->n_tokens > 0 };
    td_json_write_begin(&w, '{');
    write_chat_members(logprobs, &w, tokenizer, token->id, token->logprob);
    td_json_write_key(&w, "top_logprobs");
    td_json_write_begin(&w, '[');
    for (int i = 0; i < token->n_top && i < logprobs->n_top; i++) {
        td_json_write_begin(&w, '{');
        write_chat_members(logprobs, &w, tokenizer, token->top_ids[i], token->top_logprobs[i]);
        td_json_write_end(&w, '}');
    }
    td_json_write_end(&w, ']');
    td_json_write_end(&w, '}');
}

/* Text of the token when it is whole characters, else its bytes in hex; both unlike for unlike tokens. */
static void text_name(td_logprobs *logprobs, const td_tokenizer *tokenizer, int32_t id)
{
    const char *bytes = "";
    size_t n_bytes = 0;
    (void)td_tokenizer_id_bytes(tokenizer, id, &bytes, &n_bytes);
    td_buf_clear(&logprobs->text);
    td_token_text(tokenizer, id, &logprobs->text);
    if (logprobs->text.n_bytes == n_bytes && (n_bytes == 0 || memcmp(logprobs->text.data, bytes, n_bytes) == 0)) return;
    td_buf_clear(&logprobs->text);
    td_buf_puts(&logprobs->text, "bytes:");
    for (size_t i = 0; i < n_bytes; i++) td_buf_printf(&logprobs->text, "\\x%02x", (unsigned char)bytes[i]);
}

static void write_text_member(td_logprobs *logprobs, td_json_writer *w, const td_tokenizer *tokenizer, int32_t id,
                              float logprob)
{
    text_name(logprobs, tokenizer, id);
    if (w->comma) td_buf_putc(w->out, ',');
    td_json_escape(w->out, logprobs->text.data ? logprobs->text.data : "", logprobs->text.n_bytes);
    td_buf_putc(w->out, ':');
    w->comma = false;
    td_json_write_double(w, finite_value(logprob));
}

static int64_t n_characters(const td_buf *text)
{
    int64_t n = 0;
    for (size_t i = 0; i < text->n_bytes; i++) n += ((unsigned char)text->data[i] & 0xc0) != 0x80;
    return n;
}

static void add_text(td_logprobs *logprobs, const td_tokenizer *tokenizer, const td_token *token)
{
    bool comma = logprobs->n_tokens > 0;
    td_json_writer tokens = { .out = &logprobs->lists[LIST_TOKENS], .comma = comma };
    td_json_writer values = { .out = &logprobs->lists[LIST_VALUES], .comma = comma };
    td_json_writer top = { .out = &logprobs->lists[LIST_TOP], .comma = comma };
    td_json_writer offsets = { .out = &logprobs->lists[LIST_OFFSETS], .comma = comma };
    td_json_write_int(&offsets, logprobs->offset);
    text_name(logprobs, tokenizer, token->id);
    td_json_write_string(&tokens, logprobs->text.data, logprobs->text.n_bytes);
    td_json_write_double(&values, finite_value(token->logprob));
    bool among = false;
    td_json_write_begin(&top, '{');
    for (int i = 0; i < token->n_top && i < logprobs->n_top; i++) {
        among |= token->top_ids[i] == token->id;
        write_text_member(logprobs, &top, tokenizer, token->top_ids[i], token->top_logprobs[i]);
    }
    if (!among) write_text_member(logprobs, &top, tokenizer, token->id, token->logprob);
    td_json_write_end(&top, '}');
    td_buf_clear(&logprobs->text);
    td_token_text(tokenizer, token->id, &logprobs->text);
    logprobs->offset += n_characters(&logprobs->text);
}

void td_logprobs_add(td_logprobs *logprobs, const td_tokenizer *tokenizer, const td_token *token)
{
    if (logprobs->form == TD_LOGPROBS_CHAT) add_chat(logprobs, tokenizer, token);
    if (logprobs->form == TD_LOGPROBS_TEXT) add_text(logprobs, tokenizer, token);
    logprobs->n_tokens += logprobs->form != TD_LOGPROBS_NONE;
}

static void write_list(td_logprobs *logprobs, td_json_writer *w, const char *name, int list)
{
    td_json_write_key(w, name);
    td_json_write_begin(w, '[');
    if (logprobs->lists[list].n_bytes) td_json_write_raw(w, logprobs->lists[list].data, logprobs->lists[list].n_bytes);
    td_json_write_end(w, ']');
}

void td_logprobs_write(td_logprobs *logprobs, td_json_writer *w)
{
    if (logprobs->n_tokens == 0) {
        td_json_write_null(w);
        return;
    }
    td_json_write_begin(w, '{');
    if (logprobs->form == TD_LOGPROBS_CHAT) {
        write_list(logprobs, w, "content", LIST_TOKENS);
        td_json_write_key(w, "refusal");
        td_json_write_null(w);
    } else {
        write_list(logprobs, w, "tokens", LIST_TOKENS);
        write_list(logprobs, w, "token_logprobs", LIST_VALUES);
        write_list(logprobs, w, "top_logprobs", LIST_TOP);
        write_list(logprobs, w, "text_offset", LIST_OFFSETS);
    }
    td_json_write_end(w, '}');
    for (int i = 0; i < N_LISTS; i++) td_buf_clear(&logprobs->lists[i]);
    logprobs->n_tokens = 0;
}

bool td_logprobs_failed(const td_logprobs *logprobs)
{
    bool failed = logprobs->text.failed;
    for (int i = 0; i < N_LISTS; i++) failed |= logprobs->lists[i].failed;
    return failed;
}
