/* The small parts of a tokenizer.json, from their JSON values (NULL: absent or null) into the tokenizer. Each refuses
 * what it does not know, naming the part: TD_EUNSUPPORTED; TD_EFORMAT where the file is malformed. */
#ifndef TD_TEXT_TOKENIZER_PARTS_H
#define TD_TEXT_TOKENIZER_PARTS_H

#include "base/json.h"
#include "text/tokenizer_internal.h"

TD_BEGIN_C

td_status td_tokenizer_read_normalizer(td_tokenizer *tok, const td_json *root, td_error *err);
td_status td_tokenizer_read_pre_tokenizer(td_tokenizer *tok, const td_json *root, td_error *err);
td_status td_tokenizer_read_post_processor(td_tokenizer *tok, const td_json *root, td_error *err);
td_status td_tokenizer_read_decoder(td_tokenizer *tok, const td_json *root, td_error *err);
td_status td_tokenizer_read_added(td_tokenizer *tok, const td_json *root, td_error *err); /* after the normalizer */

TD_END_C
#endif
