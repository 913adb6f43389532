/* See step.h. The message is a row of 32-bit words, in the order of the struct; 64-bit values are two words, low first.
 */
#include "engine/step.h"

#include <math.h>
#include <string.h>

enum { STEP_MAGIC = 0x50455354 /* the bytes "TSEP" */, HEAD_WORDS = 7, ADMIT_WORDS = 14, ROWS_WORDS = 3 };

typedef struct words {
    uint32_t *at;
    size_t n, cap;
} words;

static void put(words *w, uint32_t value)
{
    td_check(w->n < w->cap);
    w->at[w->n++] = value;
}

static void put64(words *w, uint64_t value)
{
    put(w, (uint32_t)value);
    put(w, (uint32_t)(value >> 32));
}

static void put_double(words *w, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    put64(w, bits);
}

size_t td_step_bytes_max(size_t n_ids)
{
    return 4 * (HEAD_WORDS + n_ids + TD_STEP_SLOTS_MAX * (1 + ADMIT_WORDS + TD_STEP_END_IDS_MAX + ROWS_WORDS));
}

static void put_admit(words *w, const td_step_admit *admit)
{
    put(w, (uint32_t)admit->slot);
    put(w, (uint32_t)admit->max_tokens);
    put(w, (uint32_t)admit->min_tokens);
    put(w, (uint32_t)admit->n_logprobs);
    put_double(w, admit->sample.temperature);
    put_double(w, admit->sample.top_p);
    put_double(w, admit->sample.min_p);
    put(w, (uint32_t)admit->sample.top_k);
    put64(w, admit->sample.seed);
    put(w, (uint32_t)admit->n_end_ids);
    for (int i = 0; i < admit->n_end_ids; i++) put(w, (uint32_t)admit->end_ids[i]);
    put(w, (uint32_t)admit->n_ids);
    for (int i = 0; i < admit->n_ids; i++) put(w, (uint32_t)admit->ids[i]);
}

size_t td_step_encode(const td_step *step, void *buf, size_t cap_bytes)
{
    words w = { .at = buf, .cap = cap_bytes / 4 };
    put(&w, STEP_MAGIC);
    put64(&w, step->digest);
    put(&w, (uint32_t)step->stop);
    put(&w, (uint32_t)step->n_releases);
    put(&w, (uint32_t)step->n_admits);
    put(&w, (uint32_t)step->n_rows);
    for (int i = 0; i < step->n_releases; i++) put(&w, (uint32_t)step->releases[i]);
    for (int i = 0; i < step->n_admits; i++) put_admit(&w, &step->admits[i]);
    for (int i = 0; i < step->n_rows; i++) {
        put(&w, (uint32_t)step->rows[i].slot);
        put(&w, (uint32_t)step->rows[i].n_rows);
        put(&w, (uint32_t)step->rows[i].prompt);
    }
    return 4 * w.n;
}

/* Reading: past the end gives zeros and sets `broken`, so one check at the end of a group is enough. */
typedef struct reader {
    const uint32_t *at;
    size_t n, cap;
    bool broken;
} reader;

static uint32_t get(reader *r)
{
    if (r->n >= r->cap) {
        r->broken = true;
        return 0;
    }
    return r->at[r->n++];
}

static int32_t get_int(reader *r)
{
    return (int32_t)get(r);
}

static uint64_t get64(reader *r)
{
    uint64_t low = get(r);
    return low | (uint64_t)get(r) << 32;
}

static double get_double(reader *r)
{
    uint64_t bits = get64(r);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static td_status need(td_error *err, bool ok, const char *what, long value)
{
    return ok ? TD_OK : td_fail(err, TD_EFORMAT, "step message: %s %ld is out of range", what, value);
}

static td_status get_admit(reader *r, const td_step_limits *limits, td_step_admit *admit, td_error *err)
{
    td_status status;
    admit->slot = get_int(r);
    admit->max_tokens = get_int(r);
    admit->min_tokens = get_int(r);
    admit->n_logprobs = get_int(r);
    admit->sample.temperature = get_double(r);
    admit->sample.top_p = get_double(r);
    admit->sample.min_p = get_double(r);
    admit->sample.top_k = get_int(r);
    admit->sample.seed = get64(r);
    admit->n_end_ids = get_int(r);
    if ((status = need(err, admit->slot >= 0 && admit->slot < limits->n_slots, "slot", admit->slot))) return status;
    if ((status = need(err, admit->max_tokens >= 1, "max_tokens", admit->max_tokens))) return status;
    if ((status = need(err, isfinite(admit->sample.temperature), "temperature", 0))) return status;
    if ((status = need(err, admit->sample.top_p > 0 && admit->sample.top_p <= 1, "top_p", 0))) return status;
    if ((status = need(err, admit->sample.min_p >= 0 && admit->sample.min_p <= 1, "min_p", 0))) return status;
    if ((status = need(err, admit->n_logprobs >= -1 && admit->n_logprobs <= TD_SAMPLE_LOGPROBS_MAX,
                       "number of log-probabilities", admit->n_logprobs)))
        return status;
    if ((status = need(err, admit->n_end_ids >= 0 && admit->n_end_ids <= TD_STEP_END_IDS_MAX, "number of end ids",
                       admit->n_end_ids)))
        return status;
    for (int i = 0; i < admit->n_end_ids; i++) admit->end_ids[i] = get_int(r);
    admit->n_ids = get_int(r);
    if ((status = need(err, admit->n_ids >= 1 && admit->n_ids < limits->context_tokens, "prompt length", admit->n_ids)))
        return status;
    if (r->broken || (size_t)admit->n_ids > r->cap - r->n)
        return td_fail(err, TD_EFORMAT, "step message: it ends inside a request");
    admit->ids = (const int32_t *)(r->at + r->n);
    r->n += (size_t)admit->n_ids;
    for (int i = 0; i < admit->n_ids; i++)
        if ((status = need(err, admit->ids[i] >= 0 && admit->ids[i] < limits->vocab, "token id", admit->ids[i])))
            return status;
    return TD_OK;
}

static td_status get_rows(reader *r, const td_step_limits *limits, td_step *out, td_error *err)
{
    td_status status;
    int prompt_rows = 0, decode_rows = 0;
    uint32_t seen = 0;
    for (int i = 0; i < out->n_rows; i++) {
        td_step_rows *rows = &out->rows[i];
        rows->slot = get_int(r);
        rows->n_rows = get_int(r);
        rows->prompt = get_int(r);
        if ((status = need(err, rows->slot >= 0 && rows->slot < limits->n_slots, "slot", rows->slot))) return status;
        if ((status = need(err, rows->n_rows >= 1 && rows->n_rows <= limits->chunk_rows, "rows", rows->n_rows)))
            return status;
        if ((status = need(err, !(seen >> rows->slot & 1), "a second use of slot", rows->slot))) return status;
        seen |= 1u << rows->slot;
        if ((status = need(err, rows->prompt == 0 || rows->prompt == 1, "kind of rows", rows->prompt))) return status;
        *(rows->prompt ? &prompt_rows : &decode_rows) += rows->n_rows;
    }
    if ((status = need(err, prompt_rows <= limits->chunk_rows, "prompt rows", prompt_rows))) return status;
    return need(err, decode_rows <= TD_WINDOW_MAX, "decode rows", decode_rows);
}

td_status td_step_decode(const void *buf, size_t n_bytes, const td_step_limits *limits, td_step *out, td_error *err)
{
    reader r = { .at = buf, .cap = n_bytes / 4 };
    td_status status;
    if (n_bytes % 4 || get(&r) != STEP_MAGIC) return td_fail(err, TD_EFORMAT, "step message: it does not begin as one");
    out->digest = get64(&r);
    out->stop = get_int(&r);
    out->n_releases = get_int(&r);
    out->n_admits = get_int(&r);
    out->n_rows = get_int(&r);
    const int32_t counts[] = { out->n_releases, out->n_admits, out->n_rows };
    for (int i = 0; i < 3; i++)
        if ((status = need(err, counts[i] >= 0 && counts[i] <= limits->n_slots, "count", counts[i]))) return status;
    for (int i = 0; i < out->n_releases; i++) {
        out->releases[i] = get_int(&r);
        if ((status = need(err, out->releases[i] >= 0 && out->releases[i] < limits->n_slots, "slot", out->releases[i])))
            return status;
    }
    for (int i = 0; i < out->n_admits; i++)
        if ((status = get_admit(&r, limits, &out->admits[i], err))) return status;
    if ((status = get_rows(&r, limits, out, err))) return status;
    if (r.broken || r.n != r.cap)
        return td_fail(err, TD_EFORMAT, "step message: %zu bytes do not hold what it names", n_bytes);
    return TD_OK;
}
