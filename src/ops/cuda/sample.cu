/* A shard's part of sampling with the CPU's bytes (ops/sample.h). Everything that is added is an integer, everything
 * else is a maximum in an order without ties, so no order of work enters.
 *   k_sample_max       a block 1,024 columns of a row; k_sample_max_join: a warp a row over its blocks
 *   k_sample_scan      a block 1,024 columns: masses, the best score, and the highest logit of each 32 columns
 *   k_sample_pick      a block a row: its list. The n-th largest of the maxima of 32 columns cannot exceed the n-th
 *                      largest logit, so most groups of 32 are never read again; what remains is sorted in shared
 *                      memory. Where too much remains (flat rows, many equal logits), a radix selection over (logit,
 *                      column) finds the n exactly
 *   k_sort_*           lists too long for a block (the third and fourth question of a flat row): the whole row is sorted
 * A column is a number of 54 bits that is larger the earlier it comes in the rule's order: the logit's place among
 * floats, then the column from above. 0 is a column that is not there. */
#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"
#include "ops/sample.h"

enum {
    THREADS = 256,
    PART = 1024, /* columns of a block */
    GROUP = 32,  /* columns of a warp's step */
    PICK_THREADS = 1024,
    LISTED = 4096, /* keys that a block sorts */
    BINS = 1 << 11,
    COLUMN_BITS = 22,
    SORT_JOBS = 4 /* rows that are sorted at a time */
};

static TD_DEVICE uint64_t key_of(uint32_t rank, int column)
{
    return rank ? (uint64_t)rank << COLUMN_BITS | (uint32_t)((1 << COLUMN_BITS) - 1 - column) : 0;
}

static TD_DEVICE int column_of(uint64_t key)
{
    return (1 << COLUMN_BITS) - 1 - (int)(key & ((1 << COLUMN_BITS) - 1));
}

/* A job and its row. The table may lie in host memory: a block reads it once. */
typedef struct row {
    td_sample_job job;
    const float *z;
    const uint32_t *mask;
    int n_columns;
    int32_t first_id;
} row;

static TD_DEVICE void load_row(const td_sample_args &a, int job, row *r)
{
    enum { WORDS = sizeof(td_sample_job) / sizeof(uint32_t) };
    if (threadIdx.x < WORDS) ((uint32_t *)&r->job)[threadIdx.x] = ((const uint32_t *)&a.jobs[job])[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        r->z = a.logits + (size_t)r->job.row * a.stride;
        r->mask = r->job.mask < 0 ? NULL : a.allowed + (size_t)r->job.mask * a.mask_words;
        r->n_columns = a.n_columns;
        r->first_id = a.first_id;
    }
    __syncthreads();
}

static TD_DEVICE bool is_there(const row *r, int column)
{
    uint32_t id = (uint32_t)(r->first_id + column);
    return column < r->n_columns && (!r->mask || (r->mask[id >> 5] >> (id & 31) & 1));
}

static TD_DEVICE uint64_t key_at(const row *r, int column)
{
    return is_there(r, column) ? key_of(td_rank_of(r->z[column]), column) : 0;
}

static TD_DEVICE td_candidate candidate_of(const row *r, uint64_t key)
{
    td_candidate c = { 0.0f, 0 };
    if (!key) return c;
    c.z = r->z[column_of(key)];
    c.id = r->first_id + column_of(key);
    return c;
}

/* ---- the highest logit ---- */

typedef struct max_part {
    uint64_t best; /* key */
    int32_t n_allowed, n_nan;
} max_part;

static TD_DEVICE max_part join_max(max_part p, max_part q)
{
    p.best = q.best > p.best ? q.best : p.best;
    p.n_allowed += q.n_allowed;
    p.n_nan += q.n_nan;
    return p;
}

static TD_DEVICE max_part warp_max(max_part p)
{
    for (int step = 16; step; step >>= 1) {
        max_part q;
        q.best = __shfl_xor_sync(0xffffffffu, p.best, step);
        q.n_allowed = __shfl_xor_sync(0xffffffffu, p.n_allowed, step);
        q.n_nan = __shfl_xor_sync(0xffffffffu, p.n_nan, step);
        p = join_max(p, q);
    }
    return p;
}

static __global__ void __launch_bounds__(THREADS) k_sample_max(td_sample_args a, max_part *parts)
{
    td_begin();
    __shared__ row r;
    __shared__ max_part warps[THREADS / 32];
    load_row(a, blockIdx.y, &r);
    max_part mine = { 0, 0, 0 };
#pragma unroll
    for (int i = 0; i < PART / THREADS; i++) {
        int column = blockIdx.x * PART + i * THREADS + threadIdx.x;
        if (!is_there(&r, column)) continue;
        uint64_t key = key_of(td_rank_of(r.z[column]), column);
        mine = join_max(mine, max_part{ key, 1, key ? 0 : 1 });
    }
    mine = warp_max(mine);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < THREADS / 32; w++) mine = join_max(mine, warps[w]);
    parts[blockIdx.y * gridDim.x + blockIdx.x] = mine;
}

static __global__ void k_sample_max_join(td_sample_args a, const max_part *parts, int n_parts)
{
    td_begin();
    __shared__ row r;
    load_row(a, blockIdx.x, &r);
    max_part all = { 0, 0, 0 };
    for (int i = threadIdx.x; i < n_parts; i += 32) all = join_max(all, parts[blockIdx.x * n_parts + i]);
    all = warp_max(all);
    if (threadIdx.x != 0) return;
    td_candidate best = candidate_of(&r, all.best);
    td_sample_max out = { best.z, all.best ? best.id : -1, all.n_allowed, all.n_nan };
    a.maxima[blockIdx.x] = out;
}

/* ---- masses and scores ---- */

typedef struct part {
    uint64_t mass, mass_raw;
    double score;
    td_candidate best;
    int32_t n_allowed, reserved;
} part;

static TD_DEVICE part no_part()
{
    part p = { 0, 0, -INFINITY, { 0.0f, -1 }, 0, 0 };
    return p;
}

static TD_DEVICE part join(part p, part q)
{
    p.mass += q.mass;
    p.mass_raw += q.mass_raw;
    p.n_allowed += q.n_allowed;
    if (q.best.id >= 0 && td_sample_beats(q.score, q.best, p.score, p.best)) {
        p.score = q.score;
        p.best = q.best;
    }
    return p;
}

static TD_DEVICE part warp_join(part p)
{
    for (int step = 16; step; step >>= 1) {
        part q;
        q.mass = __shfl_xor_sync(0xffffffffu, p.mass, step);
        q.mass_raw = __shfl_xor_sync(0xffffffffu, p.mass_raw, step);
        q.score = __shfl_xor_sync(0xffffffffu, p.score, step);
        q.best.z = __shfl_xor_sync(0xffffffffu, p.best.z, step);
        q.best.id = __shfl_xor_sync(0xffffffffu, p.best.id, step);
        q.n_allowed = __shfl_xor_sync(0xffffffffu, p.n_allowed, step);
        p = join(p, q);
    }
    return p;
}

/* z - z_top below which a mass is certainly 0 (E(d) 2^40 < 1 from d = -27.73 down): most of a row, and 64-bit floating
 * point is slow on a GB10. Rounding moves neither side by more than a millionth. */
static TD_DEVICE float massless_below(double temperature)
{
    return temperature > 1e-20 && temperature < 1e20 ? (float)(-29.0 * temperature) : -INFINITY;
}

static TD_DEVICE uint64_t mass_of(float z, float z_top, double temperature, float massless)
{
    return z - z_top < massless ? 0 : td_sample_mass(td_sample_distance(z, z_top, temperature));
}

static TD_DEVICE void consider(const row *r, const td_sample_cuts *cuts, uint64_t key, int column, float z, part *mine)
{
    td_candidate token = { z, r->first_id + column };
    double d = td_sample_distance(z, r->job.top.z, r->job.params.temperature);
    if (cuts->by_distance && d < cuts->least) return;
    double score = d + td_sample_gumbel(key, token.id);
    if (!td_sample_beats(score, token, mine->score, mine->best)) return;
    mine->score = score;
    mine->best = token;
}

/* most: [jobs][n_groups] ranks. */
static __global__ void __launch_bounds__(THREADS)
    k_sample_scan(td_sample_args a, part *parts, uint32_t *most, int n_groups)
{
    td_begin();
    __shared__ row r;
    __shared__ part warps[THREADS / 32];
    load_row(a, blockIdx.y, &r);
    const td_sample_params *params = &r.job.params;
    const td_sample_cuts cuts = td_sample_cuts_of(params, r.job.top.n_allowed);
    bool mass = !cuts.greedy && !cuts.top_k && cuts.by_mass, raw = r.job.n_logprobs >= 0,
         open = td_sample_is_open(&cuts);
    float z_top = r.job.top.z, massless = massless_below(params->temperature), massless_raw = massless_below(1.0);
    uint64_t key = td_sample_key(params->seed, r.job.pos);
    part mine = no_part();
    for (int i = 0; i < PART / THREADS; i++) {
        int column = blockIdx.x * PART + i * THREADS + threadIdx.x;
        bool there = is_there(&r, column);
        float z = there ? r.z[column] : 0.0f;
        uint32_t highest = __reduce_max_sync(0xffffffffu, there ? td_rank_of(z) : 0u);
        if (threadIdx.x % 32 == 0 && column < r.n_columns) most[blockIdx.y * n_groups + column / GROUP] = highest;
        if (there) {
            mine.n_allowed++;
            if (mass) mine.mass += mass_of(z, z_top, params->temperature, massless);
            if (raw) mine.mass_raw += mass_of(z, z_top, 1.0, massless_raw);
            if (open) consider(&r, &cuts, key, column, z, &mine);
        }
    }
    mine = warp_join(mine);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < THREADS / 32; w++) mine = join(mine, warps[w]);
    parts[blockIdx.y * gridDim.x + blockIdx.x] = mine;
}

/* ---- the list ---- */

typedef struct pick_block {
    row r;
    uint32_t bins[BINS];
    uint32_t warp_sum[PICK_THREADS / 32];
    uint64_t prefix, mask;
    int left, count, n_sent;
} pick_block;

/* The head of the summary from its parts; b->n_sent for everyone. */
static TD_DEVICE td_sample_summary *write_head(const td_sample_args &a, pick_block *b, const part *parts, int n_parts)
{
    td_sample_summary *out = (td_sample_summary *)(a.summaries + b->r.job.out_bytes);
    if (threadIdx.x < 32) {
        part all = no_part();
        for (int i = threadIdx.x; i < n_parts; i += 32) all = join(all, parts[i]);
        all = warp_join(all);
        if (threadIdx.x == 0) {
            b->n_sent = min(b->r.job.n, all.n_allowed);
            out->mass = all.mass;
            out->mass_raw = all.mass_raw;
            out->score = all.score;
            out->best = all.best;
            out->n_allowed = all.n_allowed;
            out->n_sent = b->n_sent;
        }
    }
    __syncthreads();
    return out;
}

/* keys: sorted, at least n_sent of them. */
static TD_DEVICE void write_list(const pick_block *b, const uint64_t *keys, td_sample_summary *out)
{
    for (int i = threadIdx.x; i < b->r.job.n; i += PICK_THREADS)
        out->candidates[i] = candidate_of(&b->r, i < b->n_sent ? keys[i] : 0);
}

/* What is selected from: the keys of the row's columns, or the maxima of its groups as keys. */
static TD_DEVICE uint64_t item(const row *r, const uint32_t *most, int i)
{
    return most ? (uint64_t)most[i] << COLUMN_BITS : key_at(r, i);
}

/* One digit of the left-th largest of n items: narrows prefix and mask; left becomes its place among those with the
 * prefix. */
static TD_DEVICE void narrow(pick_block *b, const uint32_t *most, int n, int shift, int bits)
{
    uint64_t prefix = b->prefix, mask = b->mask;
    uint32_t low = (1u << bits) - 1, left = (uint32_t)b->left;
    for (int i = threadIdx.x; i < BINS; i += PICK_THREADS) b->bins[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += PICK_THREADS) {
        uint64_t key = item(&b->r, most, i);
        if ((key & mask) == prefix) atomicAdd(&b->bins[(uint32_t)(key >> shift) & low], 1u);
    }
    __syncthreads();
    /* two bins a thread, from the largest down */
    int top = BINS - 1 - 2 * (int)threadIdx.x;
    uint32_t first = b->bins[top], second = b->bins[top - 1], all;
    uint32_t above = td_block_before(first + second, b->warp_sum, &all);
    __syncthreads();
    if (above < left && left <= above + first + second) {
        bool upper = left <= above + first;
        b->left = (int)(left - above - (upper ? 0 : first));
        b->prefix = prefix | (uint64_t)(upper ? top : top - 1) << shift;
        b->mask = mask | (uint64_t)low << shift;
    }
    __syncthreads();
}

/* The top-th largest of n items, 1 <= top <= n; never 0, which is a column that is not there. Of groups only the rank.
 */
static TD_DEVICE uint64_t threshold(pick_block *b, const uint32_t *most, int n, int top)
{
    if (threadIdx.x == 0) {
        b->prefix = b->mask = 0;
        b->left = top;
    }
    __syncthreads();
    narrow(b, most, n, 43, 11);
    narrow(b, most, n, 32, 11);
    narrow(b, most, n, 22, 10);
    if (!most) {
        narrow(b, most, n, 11, 11);
        narrow(b, most, n, 0, 11);
    }
    uint64_t least = b->prefix;
    __syncthreads();
    return least ? least : 1;
}

/* All keys from `least` up, in any order, as far as they fit; their number. A warp looks at 32 groups' maxima at a
 * time. */
static TD_DEVICE int collect(pick_block *b, const uint32_t *most, int n_groups, uint64_t least, uint64_t *keys)
{
    int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) b->count = 0;
    __syncthreads();
    for (int g0 = threadIdx.x / 32 * 32; g0 < n_groups; g0 += PICK_THREADS) {
        bool live = g0 + lane < n_groups && most[g0 + lane] >= (uint32_t)(least >> COLUMN_BITS);
        for (uint32_t left = __ballot_sync(0xffffffffu, live); left; left &= left - 1) {
            uint64_t key = key_at(&b->r, (g0 + __ffs(left) - 1) * GROUP + lane);
            uint32_t in = __ballot_sync(0xffffffffu, key >= least);
            int first = 0;
            if (lane == 0 && in) first = atomicAdd(&b->count, __popc(in));
            first = __shfl_sync(0xffffffffu, first, 0) + __popc(in & ((1u << lane) - 1));
            if (key >= least && first < LISTED) keys[first] = key;
        }
    }
    __syncthreads();
    return b->count;
}

/* One step of a bitonic sort, largest first: pair p of those at `stride`; base: place of keys[0] in the whole. */
static TD_DEVICE void exchange(uint64_t *keys, unsigned p, unsigned stride, unsigned size, unsigned base)
{
    unsigned i = 2 * p - (p & (stride - 1));
    uint64_t x = keys[i], y = keys[i + stride];
    if ((x < y) != (((base + i) & size) == 0)) return;
    keys[i] = y;
    keys[i + stride] = x;
}

/* Keys of shared memory, n a power of two: sizes from .. to, strides that fit. */
static TD_DEVICE void sort_block(uint64_t *keys, unsigned n, unsigned from, unsigned to, unsigned base)
{
    for (unsigned size = from; size <= to; size *= 2)
        for (unsigned stride = min(size, n) / 2; stride; stride /= 2) {
            for (unsigned p = threadIdx.x; p < n / 2; p += PICK_THREADS) exchange(keys, p, stride, size, base);
            __syncthreads();
        }
}

static __global__ void __launch_bounds__(PICK_THREADS)
    k_sample_pick(td_sample_args a, const part *parts, int n_parts, const uint32_t *most, int n_groups)
{
    td_begin();
    __shared__ pick_block b;
    __shared__ uint64_t keys[LISTED];
    load_row(a, blockIdx.x, &b.r);
    td_sample_summary *out = write_head(a, &b, parts + blockIdx.x * n_parts, n_parts);
    most += blockIdx.x * n_groups;
    int count = 0;
    if (b.n_sent) {
        uint64_t least = b.n_sent <= n_groups ? threshold(&b, most, n_groups, b.n_sent) : 1;
        count = collect(&b, most, n_groups, least, keys);
        if (count > LISTED) {
            least = threshold(&b, NULL, a.n_columns, b.n_sent);
            count = collect(&b, most, n_groups, least, keys);
        }
    }
    unsigned n = 2;
    while ((int)n < count) n *= 2;
    for (unsigned i = count + threadIdx.x; i < n; i += PICK_THREADS) keys[i] = 0;
    __syncthreads();
    sort_block(keys, n, 2, n, 0);
    write_list(&b, keys, out);
}

/* ---- the whole row, sorted ---- */

/* keys: [jobs][n], n a power of two from LISTED up. */
static __global__ void __launch_bounds__(PICK_THREADS) k_sort_local(td_sample_args a, uint64_t *keys, unsigned n)
{
    td_begin();
    __shared__ row r;
    __shared__ uint64_t part_keys[LISTED];
    unsigned base = blockIdx.x * LISTED;
    load_row(a, blockIdx.y, &r);
    for (unsigned i = threadIdx.x; i < LISTED; i += PICK_THREADS) part_keys[i] = key_at(&r, (int)(base + i));
    __syncthreads();
    sort_block(part_keys, LISTED, 2, LISTED, base);
    keys += (size_t)blockIdx.y * n + base;
    for (unsigned i = threadIdx.x; i < LISTED; i += PICK_THREADS) keys[i] = part_keys[i];
}

static __global__ void __launch_bounds__(THREADS)
    k_sort_step(uint64_t *keys, unsigned n, unsigned stride, unsigned size)
{
    td_begin();
    exchange(keys + (size_t)blockIdx.y * n, blockIdx.x * THREADS + threadIdx.x, stride, size, 0);
}

static __global__ void __launch_bounds__(PICK_THREADS) k_sort_merge(uint64_t *keys, unsigned n, unsigned size)
{
    td_begin();
    __shared__ uint64_t part_keys[LISTED];
    unsigned base = blockIdx.x * LISTED;
    keys += (size_t)blockIdx.y * n + base;
    for (unsigned i = threadIdx.x; i < LISTED; i += PICK_THREADS) part_keys[i] = keys[i];
    __syncthreads();
    sort_block(part_keys, LISTED, size, size, base);
    for (unsigned i = threadIdx.x; i < LISTED; i += PICK_THREADS) keys[i] = part_keys[i];
}

static __global__ void __launch_bounds__(PICK_THREADS)
    k_sample_list(td_sample_args a, const part *parts, int n_parts, const uint64_t *keys, unsigned n)
{
    td_begin();
    __shared__ pick_block b;
    load_row(a, blockIdx.x, &b.r);
    td_sample_summary *out = write_head(a, &b, parts + blockIdx.x * n_parts, n_parts);
    write_list(&b, keys + (size_t)blockIdx.x * n, out);
}

/* ---- entries ---- */

typedef struct scratch {
    part *parts;    /* [TD_WINDOW_MAX][n_parts]; of sample_max: max_part */
    uint32_t *most; /* [TD_WINDOW_MAX][n_groups] */
    uint64_t *keys; /* [SORT_JOBS][n_sorted] */
    int n_parts, n_groups;
    unsigned n_sorted;
} scratch;

static void lay_out(td_arena *arena, int n_columns, scratch *s)
{
    s->n_parts = (int)td_ceil_div(n_columns ? (size_t)n_columns : 1, PART);
    s->n_groups = (int)td_ceil_div((size_t)n_columns, GROUP);
    for (s->n_sorted = LISTED; s->n_sorted < (unsigned)n_columns; s->n_sorted *= 2) continue;
    s->parts = (part *)td_cuda_take(arena, TD_WINDOW_MAX * (size_t)s->n_parts * sizeof *s->parts);
    s->most = (uint32_t *)td_cuda_take(arena, TD_WINDOW_MAX * (size_t)s->n_groups * sizeof *s->most);
    s->keys = (uint64_t *)td_cuda_take(arena, SORT_JOBS * (size_t)s->n_sorted * sizeof *s->keys);
}

size_t td_cuda_sample_bytes(const td_dev_limits *limits)
{
    td_arena arena;
    scratch s;
    if (!limits->vocab_shard) return 0;
    td_arena_init_fixed(&arena, NULL, SIZE_MAX);
    lay_out(&arena, limits->vocab_shard, &s);
    return arena.used_bytes;
}

static bool fits(const td_cuda_dev *dev, const td_sample_args *a)
{
    return a->n_jobs >= 0 && a->n_jobs <= TD_WINDOW_MAX && a->n_columns >= 0 &&
           a->n_columns <= dev->limits.vocab_shard && a->n_columns <= 1 << COLUMN_BITS;
}

td_status td_cuda_sample_max(td_dev *base, const td_sample_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    td_arena arena;
    scratch s;
    if (!fits(dev, a)) return TD_EINVAL;
    if (!a->n_jobs) return TD_OK;
    td_cuda_scratch(dev, &arena);
    lay_out(&arena, a->n_columns, &s);
    max_part *parts = (max_part *)s.parts;
    td_launch(dev, k_sample_max, dim3(s.n_parts, a->n_jobs), THREADS, 0, *a, parts);
    td_launch(dev, k_sample_max_join, a->n_jobs, 32, 0, *a, parts, s.n_parts);
    return td_cuda_launched(dev, "sample_max");
}

static void sort_rows(td_cuda_dev *dev, const td_sample_args *a, const scratch *s)
{
    unsigned n = s->n_sorted, blocks = n / LISTED, jobs = (unsigned)a->n_jobs;
    td_launch_spread(dev, k_sort_local, dim3(blocks, jobs), PICK_THREADS, 0, *a, s->keys, n);
    for (unsigned size = 2 * LISTED; size <= n; size *= 2) {
        for (unsigned stride = size / 2; stride >= LISTED; stride /= 2)
            td_launch(dev, k_sort_step, dim3(n / 2 / THREADS, jobs), THREADS, 0, s->keys, n, stride, size);
        td_launch_spread(dev, k_sort_merge, dim3(blocks, jobs), PICK_THREADS, 0, s->keys, n, size);
    }
}

td_status td_cuda_sample_summary(td_dev *base, const td_sample_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    td_arena arena;
    scratch s;
    if (!fits(dev, a) || a->n_max < 1) return TD_EINVAL;
    if (!a->n_jobs) return TD_OK;
    td_cuda_scratch(dev, &arena);
    lay_out(&arena, a->n_columns, &s);
    td_launch(dev, k_sample_scan, dim3(s.n_parts, a->n_jobs), THREADS, 0, *a, s.parts, s.most, s.n_groups);
    if (a->n_max <= LISTED || a->n_columns <= LISTED) {
        td_launch_spread(dev, k_sample_pick, a->n_jobs, PICK_THREADS, 0, *a, s.parts, s.n_parts, s.most, s.n_groups);
        return td_cuda_launched(dev, "sample_summary");
    }
    for (int first = 0; first < a->n_jobs; first += SORT_JOBS) {
        td_sample_args some = *a;
        some.jobs += first;
        some.n_jobs = a->n_jobs - first < SORT_JOBS ? a->n_jobs - first : (int)SORT_JOBS;
        sort_rows(dev, &some, &s);
        td_launch_spread(dev, k_sample_list, some.n_jobs, PICK_THREADS, 0, some, s.parts + (size_t)first * s.n_parts,
                         s.n_parts, s.keys, s.n_sorted);
    }
    return td_cuda_launched(dev, "sample_summary");
}
