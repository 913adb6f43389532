/* See reasoning.h. Every byte of the reply gets a kind as it arrives; bytes wait in `held` until no stop string and, in
 * text form, no tag can begin with them. What is given out is then only a matter of kinds, so tags, dropped line feeds
 * and stop strings cannot disagree about where they are in the text. */
#include "text/reasoning.h"

#include <string.h>

enum { KIND_DROPPED, KIND_REASONING, KIND_CONTENT, KIND_UNDECIDED };

enum {
    STATE_REASONING_START, /* nothing of the think block yet: <think> once more is dropped */
    STATE_REASONING,
    STATE_ANSWER_START, /* line feeds are dropped; with may_open a <think> opens a think block */
    STATE_ANSWER
};

static const char open_tag[] = "<think>", close_tag[] = "</think>";

void td_reasoning_init(td_reasoning *split, td_reply_start start, const td_reply_ids *ids, td_stop *stop)
{
    *split = (td_reasoning){ .ids = *ids, .stop = stop, .stopped_by = -1 };
    split->state = start == TD_REPLY_IN_REASONING ? STATE_REASONING_START
                   : start == TD_REPLY_AT_ANSWER  ? STATE_ANSWER_START
                                                  : STATE_ANSWER;
    split->may_open = start == TD_REPLY_AT_ANSWER;
    td_buf_init(&split->held, 0);
    td_buf_init(&split->kinds, 0);
}

void td_reasoning_deinit(td_reasoning *split)
{
    td_buf_deinit(&split->held);
    td_buf_deinit(&split->kinds);
}

static bool in_reasoning(const td_reasoning *split)
{
    return split->state <= STATE_REASONING;
}

static bool by_text(const td_reasoning *split)
{
    return split->ids.end_think < 0;
}

static bool lost(const td_reasoning *split)
{
    return split->held.failed || split->kinds.failed;
}

/* Kind of one byte that is no part of a tag. */
static char plain_kind(td_reasoning *split, char c)
{
    if (in_reasoning(split)) {
        split->state = STATE_REASONING;
        return KIND_REASONING;
    }
    if (split->state == STATE_ANSWER_START && c == '\n') return KIND_DROPPED;
    split->state = STATE_ANSWER;
    return KIND_CONTENT;
}

static void put(td_reasoning *split, const char *text, size_t n_bytes, char kind)
{
    td_buf_add(&split->held, text, n_bytes);
    for (size_t i = 0; i < n_bytes; i++) td_buf_putc(&split->kinds, kind);
}

static void put_plain(td_reasoning *split, const char *text, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++) put(split, text + i, 1, plain_kind(split, text[i]));
}

/* A tag that counts, at the end of text; before it may stand what the detokenizer held back. */
static void put_tag(td_reasoning *split, const char *tag, const char *text, size_t n_bytes)
{
    size_t n_tag = strlen(tag);
    if (n_bytes < n_tag || memcmp(text + n_bytes - n_tag, tag, n_tag) != 0) n_tag = 0;
    put_plain(split, text, n_bytes - n_tag);
    put(split, text + n_bytes - n_tag, n_tag, KIND_DROPPED);
}

/* Which tags mean something where the reply is now. */
static bool opens_here(const td_reasoning *split)
{
    return split->state == STATE_REASONING_START || (split->state == STATE_ANSWER_START && split->may_open);
}

static void pass_tag(td_reasoning *split, const char *tag)
{
    split->state = tag == close_tag ? STATE_ANSWER_START : STATE_REASONING;
    split->may_open = false;
}

/* ---- by ids ---- */

static const char *tag_of_id(const td_reasoning *split, int32_t id)
{
    const td_reply_ids *ids = &split->ids;
    if (id < 0) return NULL;
    if (in_reasoning(split) && id == ids->end_think) return close_tag;
    if (opens_here(split) && id == ids->think) return open_tag;
    return NULL;
}

static void take_token(td_reasoning *split, int32_t id, const char *text, size_t n_bytes)
{
    const char *tag = tag_of_id(split, id);
    if (tag) {
        put_tag(split, tag, text, n_bytes);
        pass_tag(split, tag);
    } else if (!in_reasoning(split) && id >= 0 && id == split->ids.begin_box) {
        put_tag(split, "<|begin_of_box|>", text, n_bytes);
    } else if (!in_reasoning(split) && id >= 0 && id == split->ids.end_box) {
        put_tag(split, "<|end_of_box|>", text, n_bytes);
    } else {
        put_plain(split, text, n_bytes);
    }
}

/* ---- by text ---- */

/* The tag that begins with the bytes under suspicion and c, or NULL. */
static const char *tag_with(const td_reasoning *split, char c)
{
    size_t n = (size_t)split->tag_matched;
    const char *seen = n ? split->held.data + split->held.n_bytes - n : "";
    if (in_reasoning(split) && memcmp(close_tag, seen, n) == 0 && close_tag[n] == c) return close_tag;
    if (opens_here(split) && memcmp(open_tag, seen, n) == 0 && open_tag[n] == c) return open_tag;
    return NULL;
}

/* The bytes under suspicion get this kind; a negative one: they are ordinary text after all. */
static void decide(td_reasoning *split, int kind)
{
    for (size_t i = split->held.n_bytes - (size_t)split->tag_matched; i < split->held.n_bytes; i++)
        split->kinds.data[i] = kind < 0 ? plain_kind(split, split->held.data[i]) : (char)kind;
    split->tag_matched = 0;
}

/* Tags hold one '<', their first character: where a byte does not fit, no other tag can have begun before it. */
static void take_byte(td_reasoning *split, char c)
{
    const char *tag = tag_with(split, c);
    if (!tag && split->tag_matched) {
        decide(split, -1);
        tag = tag_with(split, c);
    }
    if (!tag) {
        put_plain(split, &c, 1);
        return;
    }
    put(split, &c, 1, KIND_UNDECIDED);
    if (lost(split)) return;
    split->tag_matched++;
    if (tag[split->tag_matched]) return;
    decide(split, KIND_DROPPED);
    pass_tag(split, tag);
}

/* ---- giving out ---- */

static void give_out(td_reasoning *split, size_t n_bytes, td_buf *reasoning, td_buf *content)
{
    const char *text = split->held.data, *kinds = split->kinds.data;
    for (size_t i = 0, j; i < n_bytes; i = j) {
        for (j = i + 1; j < n_bytes && kinds[j] == kinds[i]; j++)
            ;
        if (kinds[i] == KIND_REASONING) td_buf_add(reasoning, text + i, j - i);
        if (kinds[i] == KIND_CONTENT) td_buf_add(content, text + i, j - i);
    }
    td_buf_drop(&split->held, n_bytes);
    td_buf_drop(&split->kinds, n_bytes);
}

/* No memory to hold text back: the caller sees it where it looks anyway. */
static bool out_of_memory(td_reasoning *split, td_buf *reasoning, td_buf *content)
{
    if (!lost(split)) return false;
    reasoning->failed = content->failed = true;
    return true;
}

bool td_reasoning_feed(td_reasoning *split, int32_t id, const char *text, size_t n_bytes, bool may_stop,
                       td_buf *reasoning, td_buf *content)
{
    if (split->stopped_by >= 0) return true;
    size_t from = split->held.n_bytes;
    bool counts = in_reasoning(split);
    if (by_text(split))
        for (size_t i = 0; i < n_bytes && !lost(split); i++) take_byte(split, text[i]);
    else
        take_token(split, id, text, n_bytes);
    split->n_reasoning_tokens += counts || in_reasoning(split);
    if (out_of_memory(split, reasoning, content)) return false;

    for (size_t i = from; split->stop && i < split->held.n_bytes; i++) {
        int found = td_stop_step(split->stop, (unsigned char)split->held.data[i]);
        if (found < 0 || !may_stop) continue;
        split->stopped_by = found;
        decide(split, -1);
        give_out(split, i + 1 - split->stop->strings[found].n_bytes, reasoning, content);
        return true;
    }
    size_t held = split->stop ? td_stop_held(split->stop) : 0;
    if (held < (size_t)split->tag_matched) held = (size_t)split->tag_matched;
    give_out(split, split->held.n_bytes - held, reasoning, content);
    return false;
}

void td_reasoning_finish(td_reasoning *split, td_buf *reasoning, td_buf *content)
{
    if (split->stopped_by >= 0 || out_of_memory(split, reasoning, content)) return;
    decide(split, -1);
    give_out(split, split->held.n_bytes, reasoning, content);
}

int64_t td_reasoning_tokens(const td_reasoning *split)
{
    return split->n_reasoning_tokens;
}

int td_reasoning_stopped_by(const td_reasoning *split)
{
    return split->stopped_by;
}

bool td_reasoning_open(const td_reasoning *split)
{
    return in_reasoning(split);
}
