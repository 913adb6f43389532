/* The device that block operations run on, the activations they pass along, and a window of rows.
 *
 * Activations. Between operations a tensor is "act": bf16 in engine arithmetic (every store rounds once,
 * docs/arithmetic.md), fp32 in the CPU's exact mode, which exists for comparison with the reference implementation.
 * td_act is opaque: buffers are sized with td_act_bytes() and indexed with td_act_at(). On CUDA act is always bf16.
 *
 * Virtual shards. Row-parallel sums and the vocabulary are always cut into TD_SHARDS parts. A rank of world 1 computes
 * both parts, a rank of world 2 one; the partials are added in shard order, so the number of ranks never changes a bit.
 *
 * Windows. Everything that changes from forward to forward (ids, positions, slots, parities) sits in device-visible
 * tables, never in launch arguments: a CUDA graph captured for a row count serves every window of that many rows. */
#ifndef TD_OPS_DEV_H
#define TD_OPS_DEV_H

#include "base/num.h"
#include "base/status.h"

TD_BEGIN_C

#define TD_SHARDS 2 /* virtual shards of every row-parallel sum and of the vocabulary; as in checkpoint/slices.h */

enum {
    TD_STREAMS = 4,      /* residual streams of the hyper-connections */
    TD_HEAD = 128,       /* KDA head width (keys and values), index key width */
    TD_POOL = 4,         /* tokens of an index pool */
    TD_GRID = 64,        /* chunked KDA works on chunks that start at multiples of this absolute position */
    TD_CONV = 4,         /* taps of the KDA convolution: TD_CONV - 1 earlier rows are kept */
    TD_BLOCK = 512,      /* tokens of a KV block: row of position p = table[p / 512] * 512 + p % 512 */
    TD_WINDOW_MAX = 64,  /* rows of a decode / verify window */
    TD_SEGMENTS_MAX = 16 /* sequences in one window */
};

typedef struct td_act td_act; /* element of an activation buffer: 2 or 4 bytes, see td_act_bytes() */

typedef enum td_backend { TD_CPU, TD_CUDA } td_backend;

/* What the device must be able to do at most; its scratch is sized from this once, at creation. */
typedef struct td_dev_limits {
    int rows;                           /* of one window, prompt chunks included */
    int dim;                            /* hidden size */
    int n_heads;                        /* attention heads of one shard */
    int n_experts, top_k, expert_width; /* width: of one shard */
    int index_heads, index_topk;
    int vocab_shard;        /* columns of a shard's logits; 0: this device does not sample */
    int64_t context_tokens; /* longest sequence: bounds the pools that are scored */
    int64_t patience_ns;    /* a GPU that does not come to an end for so long is hung; 0: TD_DEV_PATIENCE_NS */
} td_dev_limits;

#define TD_DEV_PATIENCE_NS 30000000000ll /* between two waits at most a prompt chunk is enqueued */

typedef struct td_dev td_dev;

/* CPU: n_threads OpenMP threads (0: all cores); exact_fp32: act is fp32 and nothing is rounded to bf16. Results have
 * the same bits for any n_threads. The device owns its scratch; destroy accepts NULL. */
td_status td_dev_create_cpu(const td_dev_limits *limits, int n_threads, bool exact_fp32, td_dev **out, td_error *err);

/* NVIDIA GPU number `index` of the driver's list: one stream, on which every operation is enqueued in call order, and
 * scratch that is allocated once. Fails as td_gpu_query() (ops/gpu.h), and with TD_EUNSUPPORTED in a build without CUDA.
 * The operations of a CUDA device only enqueue: a failure shows at the next td_dev_sync(). */
td_status td_dev_create_cuda(const td_dev_limits *limits, int index, td_dev **out, td_error *err);
size_t td_dev_cuda_scratch_bytes(const td_dev_limits *limits); /* memory that create_cuda takes; 0 without CUDA */
size_t td_dev_cuda_pinned_bytes(void);                         /* and of the host's */

/* A device that only answers sizes (td_act_bytes, td_dev_backend, what the op table's *_bytes functions ask): plans are
 * made with it, without touching a GPU. NULL: out of memory. */
td_dev *td_dev_create_sizes(td_backend backend, bool exact_fp32);
void td_dev_destroy(td_dev *dev);
td_backend td_dev_backend(const td_dev *dev);
bool td_dev_exact_fp32(const td_dev *dev);
size_t td_dev_scratch_bytes(const td_dev_limits *limits, bool exact_fp32, int n_threads); /* what create_cpu takes */

/* Bytes of n activations, and the address of element i. */
size_t td_act_bytes(const td_dev *dev, size_t n);
td_act *td_act_at(const td_dev *dev, const td_act *base, size_t i);

/* Memory. Addresses that operations read and write ("device-visible") come from these; host code reaches what
 * td_dev_alloc gave only through upload, download and fill. On the CPU all of it is ordinary memory.
 *   td_dev_alloc       zeroed on the CPU (untouched pages cost nothing), undefined on a GPU; 256-byte aligned
 *   td_dev_host_alloc  zeroed, visible to host and device at the same address: tables written before each window,
 *                      buffers that cross ranks. A GPU reads it over the bus: small tables only.
 *   td_dev_upload      in order with the operations; src may be reused on return
 *   td_dev_download    waits for everything enqueued before; dst is filled on return (TD_ECUDA when anything failed)
 *   td_dev_copy        between memory that the device sees, in order; what it reads must stay until it has run
 *   td_dev_sync        waits, and reports the first failure since creation: such a device is lost. A GPU that has not
 *                      ended after the limits' patience has failed too (TD_ECUDA), in every call that waits; what it
 *                      holds is then left to the end of the process, because giving it back would wait as well
 *   td_dev_idle        the same without waiting: *idle says whether everything enqueued is done
 *   td_dev_host_register  makes memory that others gave (the link's region, whole pages) host_alloc's kind, at the
 *                      address it has; unregister it before it is unmapped
 * n_bytes of free and host_free are those of the allocation; NULL memory is allowed. */
td_status td_dev_alloc(td_dev *dev, size_t n_bytes, void **out, td_error *err);
void td_dev_free(td_dev *dev, void *memory, size_t n_bytes);
td_status td_dev_host_alloc(td_dev *dev, size_t n_bytes, void **out, td_error *err);
void td_dev_host_free(td_dev *dev, void *memory, size_t n_bytes);
td_status td_dev_upload(td_dev *dev, void *dst, const void *src, size_t n_bytes);
td_status td_dev_download(td_dev *dev, void *dst, const void *src, size_t n_bytes);
td_status td_dev_copy(td_dev *dev, void *dst, const void *src, size_t n_bytes);
td_status td_dev_fill(td_dev *dev, void *dst, int byte, size_t n_bytes);
td_status td_dev_sync(td_dev *dev, td_error *err);
td_status td_dev_idle(td_dev *dev, bool *idle, td_error *err);
td_status td_dev_host_register(td_dev *dev, void *memory, size_t n_bytes, td_error *err);
void td_dev_host_unregister(td_dev *dev, void *memory);

/* Graphs. Operations called between begin and end are recorded instead of run; launch runs them again with what their
 * tables hold then. What fixes a recording: row counts, n_segments, whether a segment is chunked; so record with unused
 * segment entries (n_rows 0) up to the number that may come. CPU: TD_EUNSUPPORTED. */
typedef struct td_graph td_graph;
td_status td_dev_capture_begin(td_dev *dev);
td_status td_dev_capture_end(td_dev *dev, td_graph **out, td_error *err);
td_status td_dev_graph_launch(td_dev *dev, td_graph *graph);
void td_dev_graph_destroy(td_dev *dev, td_graph *graph);

/* Side by side. What is enqueued between fork and main is a branch: it starts when everything before the fork is done,
 * runs beside what is enqueued between main and join, and is done before anything after the join starts. Recorded as
 * called. Between fork and join neither side may read what the other one writes, or write what the other one touches;
 * and on the branch only operations that need none of the device's scratch may be called (td_linear_fn of up to
 * TD_WINDOW_MAX rows that start at multiples of 16 bytes, td_swiglu_fn). One branch at a time, no operation on memory
 * or graphs in between. On the CPU nothing happens: operations run in the order of the calls. */
td_status td_dev_fork(td_dev *dev);
td_status td_dev_main(td_dev *dev);
td_status td_dev_join(td_dev *dev);

/* Host copies to and from activations (tests, snapshots, drafts): fp32 in, rounded as a store would; fp32 out. */
void td_act_from_f32(const td_dev *dev, td_act *dst, const float *src, size_t n);
void td_act_to_f32(const td_dev *dev, float *dst, const td_act *src, size_t n);

/* One sequence's rows in a window. Device-visible table; 32 bytes. */
typedef struct td_segment {
    int32_t first_row; /* index of its first row in the window */
    int32_t n_rows;    /* 0: unused entry */
    int32_t pos;       /* absolute position of the first row */
    int32_t slot;      /* recurrent states, index ring and block table of the sequence */
    int32_t parity;    /* which of the slot's two KDA states is the committed one (read); the other is written */
    int32_t chunked;   /* 1: prompt rows, KDA in chunks on the absolute grid, pos % TD_GRID == 0; 0: row by row */
    int32_t reserved[2];
} td_segment;

/* The rows of one forward. Pointers are device-visible and borrowed for the call; host_* are the same values for the
 * host, which picks kernels by shape from them (n_rows, whether any segment is chunked, the longest position). */
typedef struct td_window {
    int n_rows, n_segments;
    const int32_t *ids;         /* [n_rows] token ids */
    const int32_t *pos;         /* [n_rows] absolute positions */
    const int32_t *seg;         /* [n_rows] index into segments */
    const td_segment *segments; /* [n_segments] */
    const td_segment *host_segments;
    int64_t host_pos_max; /* largest position in the window */
} td_window;

TD_END_C
#endif
