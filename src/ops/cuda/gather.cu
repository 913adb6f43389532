/* The gather of two ranks inside the stream (ops/gather.h). Bytes and words that the host or its network card writes
 * are read past every cache; what the host is told goes out behind a fence that covers the whole system. */
#include "ops/cuda/cuda.h"
#include "ops/cuda/device.h"
#include "ops/gather.h"

enum {
    THREADS = 256,
    UNITS = 2,         /* 16-byte pieces a thread, as long as blocks may become more */
    AT_ONCE = 8,       /* that are on their way where there are more */
    BLOCKS_MAX = 128,  /* all of them wait at once: they must fit at once */
    SM_LEFT = 4,       /* multiprocessors without one of them, for another rank's kernels on the same GPU */
    PIECE = 8192,      /* bytes that L2 is asked for at once */
    FETCHING_MAX = 64, /* blocks that ask; 16 take longer than 8 us for half of an H200's L2 */
    FETCH_NS = 8000,   /* less than an exchange takes */
    LOOKS = 1024
};

/* state: blocks that have put their part, blocks that are done, number of the last gather. */
enum { PUT, DONE, NUMBER };

TD_DEVICE uint32_t load_acquire(const uint32_t *p)
{
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
    return value;
}

TD_DEVICE void store_release(uint32_t *p, uint32_t value)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

TD_DEVICE uint4 load_uncached(const uint4 *p)
{
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

TD_DEVICE uint64_t now_ns()
{
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

/* Until the other part has arrived; a stop ends it at once, and so does the limit, which is there for the day on which
 * the host thread that answers is no more. */
TD_DEVICE void wait_for_answer(td_bell *bell, uint32_t number, int64_t limit_ns)
{
    uint64_t start = now_ns();
    for (uint32_t looks = 0; (int32_t)(load_acquire(&bell->arrived) - number) < 0; looks++) {
        if (looks % LOOKS) continue;
        if (load_acquire(&bell->stop)) return;
        if (now_ns() - start < (uint64_t)limit_ns) continue;
        store_release(&bell->gave_up, number);
        return;
    }
}

/* n pieces by all threads of `blocks` blocks, COUNT of a thread on their way; !CACHED: the host or its network card wrote
 * them. */
template <bool CACHED, int COUNT> TD_DEVICE void copy_rounds(uint4 *to, const uint4 *from, size_t n, unsigned blocks)
{
    size_t step = (size_t)blocks * THREADS;
    for (size_t first = (size_t)blockIdx.x * THREADS + threadIdx.x; first < n; first += COUNT * step) {
        uint4 v[COUNT];
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            size_t i = first + j * step;
            v[j] = make_uint4(0, 0, 0, 0);
            if (i < n) v[j] = CACHED ? from[i] : load_uncached(from + i);
        }
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            size_t i = first + j * step;
            if (i < n) to[i] = v[j];
        }
    }
}

template <bool CACHED> TD_DEVICE void copy_pieces(uint4 *to, const uint4 *from, size_t n, unsigned blocks)
{
    if (n <= (size_t)UNITS * blocks * THREADS)
        copy_rounds<CACHED, UNITS>(to, from, n, blocks);
    else
        copy_rounds<CACHED, AT_ONCE>(to, from, n, blocks);
}

static inline __host__ __device__ size_t pieces_of(size_t n_bytes)
{
    return (n_bytes + PIECE - 1) / PIECE;
}

/* Memory idles while the gather waits: some more blocks ask L2 for the weights that come next, block `part` of n_parts.
 * What arrives too late is read from memory as ever, but a slow memory takes requests only as fast as it answers them,
 * and the gather must not last longer for them: so they end with the time that any exchange takes. */
TD_DEVICE void fetch_next(const td_gather_args &a, unsigned part, unsigned n_parts)
{
    if (threadIdx.x) return;
    uint64_t start = now_ns();
    size_t piece = part;
    for (int i = 0; i < TD_GATHER_NEXT; i++) {
        size_t n = pieces_of(a.next[i].n_bytes);
        for (; piece < n; piece += n_parts) {
            size_t at = piece * PIECE, left = a.next[i].n_bytes - at;
            if (now_ns() - start > FETCH_NS) return;
            asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"((const char *)a.next[i].data + at),
                         "r"((unsigned)(left < PIECE ? left : PIECE)));
        }
        piece -= n;
    }
}

static __global__ void __launch_bounds__(THREADS, 4) k_gather(td_gather_args a, unsigned blocks)
{
    td_begin();
    if (blockIdx.x >= blocks) {
        fetch_next(a, blockIdx.x - blocks, gridDim.x - blocks);
        return;
    }
    size_t n = a.n_bytes / sizeof(uint4);
    copy_pieces<true>((uint4 *)a.slots + a.rank * n, (const uint4 *)a.partials + a.rank * n, n, blocks);
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        /* Changed only by the last block that leaves, which waits for this one. */
        uint32_t number = ((volatile uint32_t *)a.state)[NUMBER] + 1;
        if (atomicAdd(&a.state[PUT], 1) == blocks - 1) {
            a.state[PUT] = 0;
            __threadfence_system();
            store_release(&a.bell->rung, number);
        }
        wait_for_answer(a.bell, number, a.limit_ns);
    }
    __syncthreads();
    copy_pieces<false>((uint4 *)a.partials + (1 - a.rank) * n, (const uint4 *)a.slots + (1 - a.rank) * n, n, blocks);
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(&a.state[DONE], 1) == blocks - 1) {
        a.state[DONE] = 0;
        ((volatile uint32_t *)a.state)[NUMBER]++;
    }
}

/* The time starts when the part is there, as the network's would. */
static __global__ void __launch_bounds__(THREADS, 4) k_gather_loopback(td_gather_args a, unsigned blocks)
{
    td_begin();
    if (blockIdx.x >= blocks) {
        fetch_next(a, blockIdx.x - blocks, gridDim.x - blocks);
        return;
    }
    uint64_t start = now_ns();
    size_t n = a.n_bytes / sizeof(uint4);
    copy_pieces<true>((uint4 *)a.partials + (1 - a.rank) * n, (const uint4 *)a.partials + a.rank * n, n, blocks);
    while (now_ns() - start < (uint64_t)a.loopback_ns) continue;
}

/* Cuts what is fetched to a part of L2 that leaves room for what else passes through; returns the blocks for it. */
static unsigned limit_next(const td_cuda_dev *dev, td_span next[TD_GATHER_NEXT])
{
    size_t room = dev->l2_bytes / 2, pieces = 0;
    for (int i = 0; i < TD_GATHER_NEXT; i++) {
        next[i].n_bytes = (next[i].n_bytes < room ? next[i].n_bytes : room) / sizeof(uint4) * sizeof(uint4);
        room -= next[i].n_bytes;
        pieces += pieces_of(next[i].n_bytes);
    }
    return pieces < FETCHING_MAX ? (unsigned)pieces : (unsigned)FETCHING_MAX;
}

td_status td_cuda_gather(td_dev *base, const td_gather_args *a)
{
    td_cuda_dev *dev = td_cuda(base);
    if (a->n_bytes % sizeof(uint4) || a->rank < 0 || a->rank > 1 || a->loopback_ns < 0) return TD_EINVAL;
    if (!a->n_bytes) return TD_OK;
    unsigned blocks = td_ceil_div(a->n_bytes / sizeof(uint4), (size_t)UNITS * THREADS);
    int most = dev->n_sm - SM_LEFT < BLOCKS_MAX ? dev->n_sm - SM_LEFT : (int)BLOCKS_MAX;
    if (blocks > (unsigned)most) blocks = (unsigned)most;
    td_gather_args g = *a;
    unsigned fetching = limit_next(dev, g.next);
    if (a->bell)
        td_launch(dev, k_gather, blocks + fetching, THREADS, 0, g, blocks);
    else
        td_launch(dev, k_gather_loopback, blocks + fetching, THREADS, 0, g, blocks);
    return td_cuda_launched(dev, "gather");
}
