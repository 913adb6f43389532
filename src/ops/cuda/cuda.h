/* Inside of the CUDA backend, host side: its device, scratch, and the one way in which a launch reports. */
#ifndef TD_OPS_CUDA_CUDA_H
#define TD_OPS_CUDA_CUDA_H

#include <cuda_runtime.h>

#include "base/arena.h"
#include "ops/cuda/cuda_ops.h"
#include "ops/dev_impl.h"

/* A piece of raw weights on its way into the packed form (staging.cu). */
enum { TD_PIECES = 2, TD_PIECE_BYTES = 32 << 20 };
typedef struct td_cuda_piece {
    unsigned char *host, *device; /* TD_PIECE_BYTES each; host: pinned */
    cudaEvent_t done;             /* the GPU needs neither any more */
} td_cuda_piece;

/* What runs beside the main line (dev.h "Side by side"), and the memory that a driver takes for its work, as measured. */
enum { TD_BRANCHES = 2, TD_BRANCH_BYTES = 24 << 20 };
typedef struct td_cuda_branch {
    cudaStream_t stream, main; /* main: the device's stream while operations go to the branch; else NULL */
    unsigned char *scratch;    /* and its scratch */
    cudaEvent_t forked, ended;
    bool open; /* between fork and join */
} td_cuda_branch;

typedef struct td_cuda_dev {
    td_dev base;
    td_dev_limits limits;
    int index, n_sm;
    size_t l2_bytes;
    cudaStream_t stream;    /* on which operations are enqueued: main's, or on a branch the branch's */
    unsigned char *scratch; /* device: first the products' own part, then what the running operation lays out; NULL on a
                               branch, which has none: an operation that takes some all the same fails at once */
    td_cuda_branch branch, aside;
    mutable bool crossed; /* the next launch is a branch's first */
    size_t product_bytes, scratch_bytes;
    unsigned char *staging, *staging_host; /* device, pinned: what the pieces are parts of */
    td_cuda_piece pieces[TD_PIECES];
    int next_piece;
    cudaError_t error; /* first failure and where; sticky */
    const char *error_op;
    int64_t patience_ns;
    bool hung; /* a wait has gone past it: nothing waits for this GPU any more (wait.cu) */
} td_cuda_dev;

static inline td_cuda_dev *td_cuda(td_dev *dev)
{
    return (td_cuda_dev *)dev;
}

/* Notes a failure of `call` in operation op; TD_OK or TD_ECUDA. */
td_status td_cuda_done(td_cuda_dev *dev, cudaError_t error, const char *op);

/* Ends an operation: what its launches reported. A kernel that fails later shows at td_dev_sync(). */
td_status td_cuda_launched(td_cuda_dev *dev, const char *op);

/* Until `event`, or with NULL everything enqueued, is done; at most the device's patience. */
td_status td_cuda_wait(td_cuda_dev *dev, cudaEvent_t event, const char *op);

/* Pieces: next (waits until the GPU is done with what it held), fill `host`, send, launch what reads `device`, done.
 * rows does next, fill and send for rows in host or device memory; device memory is copied past `host`. */
td_status td_cuda_pieces_create(td_cuda_dev *dev, td_error *err);
void td_cuda_pieces_destroy(td_cuda_dev *dev);
td_status td_cuda_piece_next(td_cuda_dev *dev, td_cuda_piece **out);
td_status td_cuda_piece_send(td_cuda_dev *dev, const td_cuda_piece *piece, size_t n_bytes);
td_status td_cuda_piece_rows(td_cuda_dev *dev, const void *from, size_t from_stride, size_t row_bytes, size_t n_rows,
                             td_cuda_piece **out);
td_status td_cuda_piece_done(td_cuda_dev *dev, td_cuda_piece *piece, const char *op);
bool td_cuda_on_device(const void *memory);

/* Branches (branch.cu). fork, main, join: dev.h. Between aside and aside_end, launches go to a branch of an
 * operation's own, for what only a later operation of its kind reads: that one catches up first. Whatever the host does
 * with memory or recordings joins all of them. */
td_status td_cuda_fork(td_dev *dev);
td_status td_cuda_main(td_dev *dev);
td_status td_cuda_join(td_dev *dev);
void td_cuda_aside(td_cuda_dev *dev);
void td_cuda_aside_end(td_cuda_dev *dev);
void td_cuda_catch_up(td_cuda_dev *dev);
void td_cuda_join_all(td_cuda_dev *dev);
td_status td_cuda_branches_create(td_cuda_dev *dev);
void td_cuda_branches_destroy(td_cuda_dev *dev);

/* Kernels that take more than 48 KiB of shared memory ask for it once, at creation. */
cudaError_t td_cuda_linear_init(void);
cudaError_t td_cuda_experts_init(void);
cudaError_t td_cuda_attend_init(void);
cudaError_t td_cuda_select_init(void);
cudaError_t td_cuda_kda_init(void);

/* Does the tensor core round as the decoding of experts needs it? TD_EUNSUPPORTED with the reason; TD_ECUDA. */
td_status td_cuda_experts_check(td_cuda_dev *dev, td_error *err);

/* Scratch is laid out by one function an operation, run over a counting arena at creation and over the real memory in
 * the operation. The products' part is separate, because operations that own scratch call td_cuda_product(). */
static inline void td_cuda_scratch(td_cuda_dev *dev, td_arena *arena)
{
    td_arena_init_fixed(arena, dev->scratch + dev->product_bytes, dev->scratch_bytes - dev->product_bytes);
}

static inline void *td_cuda_take(td_arena *arena, size_t n_bytes)
{
    return td_arena_take(arena, n_bytes, 256);
}

/* Counters of blocks that have arrived, at the end of the products' part: zero at creation, and again after every
 * operation, because the block that arrives last sets its counter back. */
enum {
    TD_COUNTERS_EXPERTS_AT = 0,
    TD_COUNTERS_EXPERTS = 2048,
    TD_COUNTERS_ROUTER_AT = TD_COUNTERS_EXPERTS,
    TD_COUNTERS_ALL = 4096
};

static inline uint32_t *td_cuda_counters(const td_cuda_dev *dev)
{
    return (uint32_t *)(void *)(dev->scratch + dev->product_bytes) - TD_COUNTERS_ALL;
}

size_t td_cuda_product_bytes(const td_dev_limits *limits);
size_t td_cuda_hyper_bytes(const td_dev_limits *limits);
size_t td_cuda_router_bytes(const td_dev_limits *limits);
size_t td_cuda_select_bytes(const td_dev_limits *limits);
size_t td_cuda_attend_bytes(const td_dev_limits *limits);
size_t td_cuda_kda_bytes(const td_dev_limits *limits);
size_t td_cuda_experts_bytes(const td_dev_limits *limits);
size_t td_cuda_sample_bytes(const td_dev_limits *limits);

/* y[b][r][o] = sum_i w[b][o][i] x[b][r][i] for n_batch packed matrices: what linear, router, attention share
 * (linear.cu). */
typedef struct td_cuda_product_args {
    td_format format;
    const void *w;
    size_t w_batch_bytes;
    int out, in, n_rows, n_batch;
    const td_bf16 *x;
    size_t x_stride, x_batch;
    td_bf16 *y_act; /* or y_f32 */
    float *y_f32;
    size_t y_stride, y_batch;
} td_cuda_product_args;
td_status td_cuda_product(td_cuda_dev *dev, const td_cuda_product_args *a);

#ifdef __CUDACC__
/* Launches a kernel on the device's stream. Templates because a kernel's parameter types are known only to it.
 *   td_launch         may be set up while the kernel before it ends (programmatic dependent launch)
 *   td_launch_spread  starts on an idle chip: for kernels of few, long blocks, which would otherwise be packed onto the
 *                     multiprocessors that happen to be free first
 * A branch's first kernel starts when the kernel before has ended, however it is launched. Every kernel calls
 * td_begin() before it touches what another kernel wrote. */
template <typename... P, typename... A>
static inline void td_launch_as(bool early, const td_cuda_dev *dev, void (*kernel)(P...), dim3 grid, unsigned threads,
                                size_t shared_bytes, A... args)
{
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early = early && !dev->crossed;
    dev->crossed = false;
    attribute.val.programmaticStreamSerializationAllowed = early;
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = dev->stream;
    config.attrs = &attribute;
    config.numAttrs = early ? 1 : 0;
    cudaLaunchKernelEx(&config, kernel, (P)args...);
}

template <typename K, typename... A> static inline void td_launch(const td_cuda_dev *dev, K kernel, A... args)
{
    td_launch_as(true, dev, kernel, args...);
}

template <typename K, typename... A> static inline void td_launch_spread(const td_cuda_dev *dev, K kernel, A... args)
{
    td_launch_as(false, dev, kernel, args...);
}
#endif

static inline unsigned td_ceil_div(size_t a, size_t b)
{
    return (unsigned)((a + b - 1) / b);
}

#endif
