/* Step messages as a wrong or hostile rank 0 could send them. Whatever decodes holds only what the receiver allows, and
 * encodes to the same bytes again. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/step.h"

static const td_step_limits limits = { .n_slots = 4, .vocab = 1000, .context_tokens = 4096, .chunk_rows = 512 };

static void check_admit(const td_step_admit *a, const unsigned char *from, size_t n_bytes)
{
    const unsigned char *ids = (const unsigned char *)a->ids;
    td_check(a->slot >= 0 && a->slot < limits.n_slots && a->max_tokens >= 1);
    td_check(a->n_ids >= 1 && a->n_ids < limits.context_tokens);
    td_check(a->n_end_ids >= 0 && a->n_end_ids <= TD_STEP_END_IDS_MAX);
    td_check(a->n_logprobs >= -1 && a->n_logprobs <= TD_SAMPLE_LOGPROBS_MAX);
    td_check(isfinite(a->sample.temperature) && a->sample.top_p > 0 && a->sample.top_p <= 1);
    td_check(a->sample.min_p >= 0 && a->sample.min_p <= 1);
    td_check(ids >= from && (size_t)(ids - from) + (size_t)a->n_ids * 4 <= n_bytes);
    for (int i = 0; i < a->n_ids; i++) td_check(a->ids[i] >= 0 && a->ids[i] < limits.vocab);
}

static void check_step(const td_step *step, const unsigned char *from, size_t n_bytes)
{
    int rows[2] = { 0 }, uses[TD_STEP_SLOTS_MAX] = { 0 };
    td_check(step->n_releases >= 0 && step->n_releases <= limits.n_slots);
    td_check(step->n_admits >= 0 && step->n_admits <= limits.n_slots);
    td_check(step->n_rows >= 0 && step->n_rows <= limits.n_slots);
    for (int i = 0; i < step->n_releases; i++) td_check(step->releases[i] >= 0 && step->releases[i] < limits.n_slots);
    for (int i = 0; i < step->n_admits; i++) check_admit(&step->admits[i], from, n_bytes);
    for (int i = 0; i < step->n_rows; i++) {
        const td_step_rows *r = &step->rows[i];
        td_check(r->slot >= 0 && r->slot < limits.n_slots && ++uses[r->slot] == 1);
        td_check(r->n_rows >= 1 && r->n_rows <= limits.chunk_rows && r->prompt >= 0 && r->prompt <= 1);
        rows[r->prompt] += r->n_rows;
    }
    td_check(rows[0] <= TD_WINDOW_MAX && rows[1] <= limits.chunk_rows);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static td_step step; /* as in the engine: what an earlier message left there must not matter */
    td_error err = { .text = "" };
    unsigned char *message = malloc(size ? size : 1); /* a block of its own: the sanitizer sees one byte too far */
    if (!message) return 0;
    memcpy(message, data, size);
    if (td_step_decode(message, size, &limits, &step, &err) == TD_OK) {
        check_step(&step, message, size);
        size_t n_ids = 0;
        for (int i = 0; i < step.n_admits; i++) n_ids += (size_t)step.admits[i].n_ids;
        size_t cap = td_step_bytes_max(n_ids);
        unsigned char *again = malloc(cap);
        if (again) td_check(td_step_encode(&step, again, cap) == size && memcmp(again, data, size) == 0);
        free(again);
    } else {
        td_check(err.status == TD_EFORMAT && err.text[0] != '\0');
    }
    free(message);
    return 0;
}
