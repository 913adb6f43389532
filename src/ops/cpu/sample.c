/* A shard's part of sampling, the definition: columns in order, one comparison each. Its list is a heap of the best n
 * so far, the worst on top. */
#include "ops/sample.h"
#include "ops/cpu/cpu.h"

#include <string.h>

static bool is_allowed(const td_sample_logits *logits, int column)
{
    uint32_t id = (uint32_t)(logits->first_id + column);
    return !logits->allowed || (logits->allowed[id >> 5] >> (id & 31) & 1);
}

static td_candidate at(const td_sample_logits *logits, int column)
{
    return (td_candidate){ .z = logits->z[column], .id = logits->first_id + column };
}

void td_sample_shard_max(const td_sample_logits *logits, td_sample_max *out)
{
    *out = (td_sample_max){ .id = -1 };
    for (int i = 0; i < logits->n; i++) {
        if (!is_allowed(logits, i)) continue;
        float z = logits->z[i];
        out->n_allowed++;
        if (isnan(z)) {
            out->n_nan++;
        } else if (out->id < 0 || z > out->z) { /* strictly: the lower id stays */
            out->z = z;
            out->id = logits->first_id + i;
        }
    }
}

/* ---- summary ---- */

static void sift_down(td_candidate *heap, int n, int i)
{
    const td_candidate moved = heap[i];
    for (int child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && td_sample_before(heap[child], heap[child + 1])) child++;
        if (!td_sample_before(moved, heap[child])) break;
        heap[i] = heap[child];
    }
    heap[i] = moved;
}

/* The best n allowed columns, best first. Returns how many there are. */
static int select_best(const td_sample_logits *logits, int n, td_candidate *best)
{
    int count = 0;
    for (int i = 0; i < logits->n && n > 0; i++) {
        const td_candidate c = at(logits, i);
        if (!is_allowed(logits, i)) continue;
        if (count < n) {
            best[count++] = c;
            for (int k = n / 2 - 1; count == n && k >= 0; k--) sift_down(best, n, k);
        } else if (td_sample_before(c, best[0])) {
            best[0] = c;
            sift_down(best, n, 0);
        }
    }
    for (int k = count / 2 - 1; count < n && k >= 0; k--) sift_down(best, count, k);
    for (int end = count - 1; end > 0; end--) { /* the worst goes to the end */
        const td_candidate worst = best[0];
        best[0] = best[end];
        best[end] = worst;
        sift_down(best, end, 0);
    }
    return count;
}

static uint64_t shard_mass(const td_sample_logits *logits, float z_top, double temperature)
{
    uint64_t mass = 0;
    for (int i = 0; i < logits->n; i++)
        if (is_allowed(logits, i)) mass += td_sample_mass(td_sample_distance(logits->z[i], z_top, temperature));
    return mass;
}

static void shard_draw(const td_sample_logits *logits, const td_sample_params *params, const td_sample_cuts *c,
                       uint64_t pos, float z_top, td_sample_summary *out)
{
    uint64_t key = td_sample_key(params->seed, pos);
    for (int i = 0; i < logits->n; i++) {
        if (!is_allowed(logits, i)) continue;
        const td_candidate token = at(logits, i);
        double d = td_sample_distance(token.z, z_top, params->temperature);
        if (c->by_distance && d < c->least) continue;
        double score = d + td_sample_gumbel(key, token.id);
        if (!td_sample_beats(score, token, out->score, out->best)) continue;
        out->score = score;
        out->best = token;
    }
}

void td_sample_shard_summary(const td_sample_logits *logits, const td_sample_params *params, uint64_t pos,
                             const td_sample_max *top, int n_logprobs, int n, td_sample_summary *out)
{
    const td_sample_cuts c = td_sample_cuts_of(params, top->n_allowed);
    memset(out, 0, td_sample_summary_bytes(n));
    out->score = -INFINITY;
    out->best.id = -1;
    for (int i = 0; i < logits->n; i++) out->n_allowed += is_allowed(logits, i);
    out->n_sent = select_best(logits, n, out->candidates);
    if (!c.greedy && !c.top_k && c.by_mass) out->mass = shard_mass(logits, top->z, params->temperature);
    if (n_logprobs >= 0) out->mass_raw = shard_mass(logits, top->z, 1.0);
    if (td_sample_is_open(&c)) shard_draw(logits, params, &c, pos, top->z, out);
}

/* ---- operations ---- */

static td_sample_logits logits_of(const td_sample_args *a, const td_sample_job *job)
{
    return (td_sample_logits){ .z = a->logits + (size_t)job->row * a->stride,
                               .n = a->n_columns,
                               .first_id = a->first_id,
                               .allowed = job->mask < 0 ? NULL : a->allowed + (size_t)job->mask * a->mask_words };
}

static void max_jobs(void *ctx, int thread, int begin, int end)
{
    const td_sample_args *a = (const td_sample_args *)ctx;
    (void)thread;
    for (int i = begin; i < end; i++) {
        const td_sample_logits logits = logits_of(a, &a->jobs[i]);
        td_sample_shard_max(&logits, &a->maxima[i]);
    }
}

static void summary_jobs(void *ctx, int thread, int begin, int end)
{
    const td_sample_args *a = (const td_sample_args *)ctx;
    (void)thread;
    for (int i = begin; i < end; i++) {
        const td_sample_job *job = &a->jobs[i];
        const td_sample_logits logits = logits_of(a, job);
        td_sample_shard_summary(&logits, &job->params, job->pos, &job->top, job->n_logprobs, job->n,
                                (td_sample_summary *)(void *)(a->summaries + job->out_bytes));
    }
}

static bool fits(const td_sample_args *a)
{
    return a->n_jobs >= 0 && a->n_jobs <= TD_WINDOW_MAX && a->n_columns >= 0;
}

td_status td_cpu_sample_max(td_dev *dev, const td_sample_args *a)
{
    if (!fits(a)) return TD_EINVAL;
    td_cpu_for(td_cpu(dev), a->n_jobs, a->n_columns, max_jobs, (void *)a);
    return TD_OK;
}

td_status td_cpu_sample_summary(td_dev *dev, const td_sample_args *a)
{
    enum { STEPS = 40 /* a mass's, and what the list takes */ };
    if (!fits(a)) return TD_EINVAL;
    td_cpu_for(td_cpu(dev), a->n_jobs, (double)a->n_columns * STEPS, summary_jobs, (void *)a);
    return TD_OK;
}
