/* A rendered prompt to token ids, media expanded to their slots (docs/chat.md "Media").
 *
 * A picture is <|begin_of_image|>, slots, <|end_of_image|>. A clip is <|begin_of_video|>, for each group of frames
 * <|begin_of_image|>, slots, <|end_of_image|> and the time of its first frame as "1.5 seconds", then <|end_of_video|>.
 * All slots have the id of <|image|>; only media make them: the same characters in text are text. */
#ifndef TD_TEXT_CHAT_ENCODE_H
#define TD_TEXT_CHAT_ENCODE_H

#include "text/chat.h"
#include "text/tokenizer.h"

TD_BEGIN_C

/* One medium's size, from its decoder. */
typedef struct td_media_slots {
    int n_groups;          /* pictures: 1 */
    int slots_per_group;   /* >= 1 */
    const double *times_s; /* clips: [n_groups] time of each group's first frame */
} td_media_slots;

/* <|image|> and <|video|> never arise from text from now on. Once, after opening the tokenizer of a chat model. */
td_status td_chat_reserve_media(td_tokenizer *tok);

/* Appends the prompt's ids. slots: [prompt->n_media] (NULL without media). first_slots: [n_media] out, index in *ids of
 * each medium's first slot; NULL: not wanted. tok: after td_chat_reserve_media(). TD_EUNSUPPORTED: media, and the
 * tokenizer has no placeholder for them; TD_EINVAL, TD_ENOMEM: as td_tokenizer_encode. After a failure *ids holds what
 * it held before. */
td_status td_chat_encode(const td_tokenizer *tok, const td_chat_prompt *prompt, const td_media_slots *slots,
                         td_ids *ids, size_t *first_slots, td_error *err);

TD_END_C
#endif
