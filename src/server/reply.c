/* See reply.h. The order matters: bytes become whole characters before the split and the stop strings see them, and
 * what a cut character leaves behind is settled before the split is told that the text is over. */
#include "server/reply.h"

#include "base/hash.h"

#include <string.h>

void td_reply_init(td_reply *reply, const td_reply_options *options)
{
    *reply = (td_reply){ .options = *options, .stop_string = -1, .end_id = -1 };
    td_utf8_stream_init(&reply->utf8);
    td_reasoning_init(&reply->split, options->start, &options->ids, options->stop->n_strings ? options->stop : NULL);
    td_buf_init(&reply->reasoning, 0);
    td_buf_init(&reply->content, 0);
    td_buf_init(&reply->text, 0);
}

void td_reply_deinit(td_reply *reply)
{
    td_reasoning_deinit(&reply->split);
    td_buf_deinit(&reply->reasoning);
    td_buf_deinit(&reply->content);
    td_buf_deinit(&reply->text);
    td_ids_deinit(&reply->ids);
}

static bool is_end(const td_reply *reply, int32_t id)
{
    for (int i = 0; i < reply->options.n_end_ids; i++)
        if (reply->options.end_ids[i] == id) return true;
    return false;
}

static void drop_reasoning_if_asked(td_reply *reply)
{
    if (reply->options.no_reasoning) td_buf_clear(&reply->reasoning);
}

/* Text is complete: what was held back is certain now. */
static void close_text(td_reply *reply, td_reply_end end)
{
    reply->reasoning_tokens = td_reasoning_tokens(&reply->split); /* the tail below is no token */
    char tail[8];
    size_t n_bytes = td_utf8_stream_finish(&reply->utf8, tail);
    bool may_stop = (int64_t)reply->ids.n >= reply->options.min_tokens;
    if (n_bytes > 0 &&
        td_reasoning_feed(&reply->split, -1, tail, n_bytes, may_stop, &reply->reasoning, &reply->content)) {
        reply->stop_string = td_reasoning_stopped_by(&reply->split);
        if (end == TD_REPLY_LENGTH) end = TD_REPLY_STOP;
    }
    td_reasoning_finish(&reply->split, &reply->reasoning, &reply->content);
    drop_reasoning_if_asked(reply);
    reply->end = end;
}

bool td_reply_feed(td_reply *reply, int32_t id)
{
    if (reply->end != TD_REPLY_RUNNING) return true;
    if (td_ids_push(&reply->ids, id) != TD_OK) reply->failed = true;
    if (is_end(reply, id)) {
        /* An end token inside the think block is a token of it. */
        bool open = td_reasoning_open(&reply->split);
        reply->end_id = id;
        close_text(reply, TD_REPLY_STOP);
        reply->reasoning_tokens += open;
        return true;
    }
    const char *bytes = "";
    size_t n_bytes = 0;
    (void)td_tokenizer_id_bytes(reply->options.tokenizer, id, &bytes, &n_bytes); /* an id without text adds none */
    td_buf_clear(&reply->text);
    char *room = td_buf_reserve(&reply->text, TD_UTF8_STREAM_ROOM(n_bytes));
    if (!room) {
        reply->failed = true;
        return false;
    }
    td_buf_commit(&reply->text, td_utf8_stream_push(&reply->utf8, bytes, n_bytes, room));
    bool may_stop = (int64_t)reply->ids.n >= reply->options.min_tokens;
    bool stopped = td_reasoning_feed(&reply->split, id, reply->text.data, reply->text.n_bytes, may_stop,
                                     &reply->reasoning, &reply->content);
    drop_reasoning_if_asked(reply);
    if (reply->reasoning.failed || reply->content.failed) reply->failed = true;
    if (!stopped) return false;
    reply->stop_string = td_reasoning_stopped_by(&reply->split);
    reply->reasoning_tokens = td_reasoning_tokens(&reply->split);
    reply->end = TD_REPLY_STOP;
    return true;
}

void td_reply_finish(td_reply *reply, td_finish finish)
{
    if (reply->end != TD_REPLY_RUNNING) return;
    close_text(reply, finish == TD_FINISH_END      ? TD_REPLY_STOP
                      : finish == TD_FINISH_LENGTH ? TD_REPLY_LENGTH
                                                   : TD_REPLY_BROKEN);
}

const char *td_reply_reason(const td_reply *reply)
{
    return reply->end == TD_REPLY_STOP ? "stop" : reply->end == TD_REPLY_LENGTH ? "length" : NULL;
}

void td_reply_sha(const td_reply *reply, char out[TD_TOKEN_SHA_CAP])
{
    uint8_t digest[TD_SHA256_BYTES];
    td_sha256 *sha = td_sha256_create();
    out[0] = 0;
    if (!sha) return;
    for (size_t i = 0; i < reply->ids.n; i++) {
        uint32_t id = (uint32_t)reply->ids.data[i];
        uint8_t bytes[4] = { (uint8_t)id, (uint8_t)(id >> 8), (uint8_t)(id >> 16), (uint8_t)(id >> 24) };
        td_sha256_update(sha, bytes, sizeof bytes);
    }
    td_sha256_finish(sha, digest);
    td_hex(digest, 8, out);
}

void td_token_text(const td_tokenizer *tokenizer, int32_t id, td_buf *out)
{
    const char *bytes = "";
    size_t n_bytes = 0;
    if (td_tokenizer_id_bytes(tokenizer, id, &bytes, &n_bytes) != TD_OK) return;
    td_utf8_stream utf8;
    td_utf8_stream_init(&utf8);
    char *room = td_buf_reserve(out, TD_UTF8_STREAM_ROOM(n_bytes) + 3);
    if (!room) return;
    size_t n = td_utf8_stream_push(&utf8, bytes, n_bytes, room);
    n += td_utf8_stream_finish(&utf8, room + n);
    td_buf_commit(out, n);
}
