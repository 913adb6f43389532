/* JSON text inside a prompt: what Python's json.dumps(value, ensure_ascii=False) prints, because the chat template was
 * trained with it. ", " and ": " between, integers with the digits that were sent, other numbers as Python's repr. */
#ifndef TD_TEXT_PYTHON_JSON_H
#define TD_TEXT_PYTHON_JSON_H

#include "base/buf.h"
#include "base/json.h"

TD_BEGIN_C

void td_python_json(td_buf *out, const td_json *value); /* failure shows in out->failed */

TD_END_C
#endif
