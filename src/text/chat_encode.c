/* See chat_encode.h. The text is cut at the media marks. Every cut lies between added tokens (the marks stand between
 * their begin and end tokens), so the pieces encode as the whole would. */
#include "text/chat_encode.h"

#include <stdio.h>
#include <string.h>

static const char image_token[] = "<|image|>", video_token[] = "<|video|>";

td_status td_chat_reserve_media(td_tokenizer *tok)
{
    const int32_t ids[] = { td_tokenizer_find_added(tok, image_token), td_tokenizer_find_added(tok, video_token) };
    for (int i = 0; i < 2; i++) {
        td_status status = ids[i] < 0 ? TD_OK : td_tokenizer_reserve(tok, ids[i]);
        if (status) return status;
    }
    return TD_OK;
}

static td_status add_text(const td_tokenizer *tok, const char *text, td_ids *ids, td_error *err)
{
    return td_tokenizer_encode(tok, text, strlen(text), 0, ids, err);
}

static td_status add_slots(int32_t image_id, int n, td_ids *ids, td_error *err)
{
    for (int i = 0; i < n; i++)
        if (td_ids_push(ids, image_id)) return td_fail(err, TD_ENOMEM, "out of memory encoding the prompt");
    return TD_OK;
}

static td_status add_clip(const td_tokenizer *tok, int32_t image_id, const td_media_slots *slots, td_ids *ids,
                          size_t *first_slot, td_error *err)
{
    td_status status = TD_OK;
    for (int g = 0; g < slots->n_groups && !status; g++) {
        char ending[384]; /* a double in %.1f has at most 311 characters */
        snprintf(ending, sizeof ending, "<|end_of_image|>%.1f seconds", slots->times_s[g]);
        status = add_text(tok, "<|begin_of_image|>", ids, err);
        if (g == 0) *first_slot = ids->n;
        if (!status) status = add_slots(image_id, slots->slots_per_group, ids, err);
        if (!status) status = add_text(tok, ending, ids, err);
    }
    return status;
}

static td_status add_all(const td_tokenizer *tok, const td_chat_prompt *prompt, const td_media_slots *slots,
                         td_ids *ids, size_t *first_slots, td_error *err)
{
    int32_t image_id = td_tokenizer_find_added(tok, image_token);
    size_t at = 0;
    if (prompt->n_media && image_id < 0)
        return td_fail(err, TD_EUNSUPPORTED, "this tokenizer has no token %s", image_token);
    for (size_t i = 0; i < prompt->n_media; i++) {
        const td_chat_media *medium = &prompt->media[i];
        td_status status = td_tokenizer_encode(tok, prompt->text + at, medium->at - at, 0, ids, err);
        size_t first = ids->n;
        if (status) return status;
        status = medium->kind == TD_MEDIA_IMAGE
                     ? add_slots(image_id, slots[i].n_groups * slots[i].slots_per_group, ids, err)
                     : add_clip(tok, image_id, &slots[i], ids, &first, err);
        if (status) return status;
        if (first_slots) first_slots[i] = first;
        at = medium->at + medium->n_bytes;
    }
    return td_tokenizer_encode(tok, prompt->text + at, prompt->n_bytes - at, 0, ids, err);
}

td_status td_chat_encode(const td_tokenizer *tok, const td_chat_prompt *prompt, const td_media_slots *slots,
                         td_ids *ids, size_t *first_slots, td_error *err)
{
    size_t n_before = ids->n;
    td_status status = add_all(tok, prompt, slots, ids, first_slots, err);
    if (status) ids->n = n_before;
    return status;
}
