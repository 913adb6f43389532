/* See stand_in.h. */
#include "model/stand_in.h"

#include "ops/random.h"

#include <string.h>

#define SEED    0x5eed0001u
#define ALIGNED 64u                /* values: parts start at whole cache lines */
#define MOST    ((size_t)16 << 20) /* values of a matrix that are packed at once */

/* A place for n values in a pool of n_pool, from which n may be read. */
static size_t draw(td_stand_in *s, size_t n_pool, size_t n)
{
    size_t places = (n_pool - n) / ALIGNED + 1;
    return (size_t)(td_random_bits(SEED, s->n_drawn++) % places) * ALIGNED;
}

size_t td_stand_in_most(const td_stand_in *s)
{
    size_t half = s->values->n_weights / 2;
    return half < MOST ? half : MOST;
}

const td_bf16 *td_stand_in_weights(td_stand_in *s, size_t n)
{
    return n <= s->values->n_weights ? s->values->weights + draw(s, s->values->n_weights, n) : NULL;
}

td_status td_stand_in_exl3(td_stand_in *s, td_exl3 *whole)
{
    const td_values *v = s->values;
    size_t n_words = td_exl3_trellis_bytes(whole->k, whole->n, whole->bits2) / sizeof *v->words;
    if (n_words > v->n_words || (size_t)whole->k > v->n_scales || (size_t)whole->n > v->n_scales) return TD_EINVAL;
    whole->trellis = v->words + draw(s, v->n_words, n_words);
    whole->suh = v->in_scales + draw(s, v->n_scales, (size_t)whole->k);
    whole->svh = v->out_scales + draw(s, v->n_scales, (size_t)whole->n);
    return TD_OK;
}

/* Around what, and how far from it. The order matters: the first that the name ends with. */
static const struct {
    const char *suffix;
    float centre, deviation;
} KINDS[] = {
    { "norm.weight", 1.0f, 0.0f },
    { "conv1d.weight", 0.0f, 0.3f },
    { "A_log", 0.0f, 0.3f },
    { "dt_bias", -3.0f, 0.5f },
    { "e_score_correction_bias", 7.0f, 1e-3f },
    { "_scale", 0.25f, 0.0f },
    { "", 0.0f, 0.02f },
};

static bool ends_with(const char *name, const char *suffix)
{
    size_t n = strlen(name), m = strlen(suffix);
    return m <= n && strcmp(name + n - m, suffix) == 0;
}

void td_stand_in_floats(td_stand_in *s, const char *name, size_t n, float *out)
{
    int kind = 0;
    uint64_t seed = SEED + s->n_drawn++;
    while (!ends_with(name, KINDS[kind].suffix)) kind++;
    float scale = td_random_bell_scale(KINDS[kind].deviation);
    for (size_t i = 0; i < n; i++) out[i] = KINDS[kind].centre + td_random_bell(seed, i, scale);
}
