/* opcheck: every block operation on the GPU against the CPU, which is the reference. `tandem opcheck` in builds with
 * CUDA, and the small program td_opcheck for tools that want one.
 *
 * A check makes twin buffers (one for each device, the same random content), runs the operation on both and compares.
 * Outputs are poisoned before, every buffer has guard bytes on both sides that are looked at after. Then the rules of
 * docs/arithmetic.md: a row alone has the bits that it has in a window, and so on, GPU against GPU. A failure prints
 * the case, the seed, and goes on; the program ends with 1.
 *
 * A new operation: a function in a file of this folder, an entry in main.c. */
#ifndef TD_TESTS_OPCHECK_H
#define TD_TESTS_OPCHECK_H

#include "base/json_write.h"
#include "ops/ops.h"

#include <stdarg.h>

enum { OC_CPU, OC_GPU, OC_SIDES };
enum { OC_BUFFERS_MAX = 512, OC_HANG_PATIENCE_MS = 1000 };
enum { OC_PATIENCE_MS = 3600000 }; /* a tool that watches every access makes minutes of a second */

/* The same memory on both devices. */
typedef struct oc_buf {
    unsigned char *cpu; /* host, guarded */
    unsigned char *gpu; /* device, guarded; one of the two addresses operations get */
    size_t n_bytes;
    const char *name;
} oc_buf;

/* One comparison. error and bound are 0 where bits or states are compared. */
typedef struct oc_result {
    char name[96];
    double error, bound;
    bool ok;
    char detail[256]; /* of the first failure */
} oc_result;

/* A JSON array that grows. */
typedef struct oc_list {
    td_buf text;
    td_json_writer writer;
} oc_list;

typedef struct oc_ctx {
    td_dev *dev[OC_SIDES];
    td_ops ops[OC_SIDES];
    uint64_t seed, first_seed;
    bool demo, real; /* which shapes */
    bool json, verbose;
    int part, n_parts; /* of an operation's cases, every n_parts-th is checked */
    bool once;         /* benchmarks run their operation once: for a profiler */
    const char *bench; /* the group of benchmarks, or "all" */
    const char *op;
    char what[160]; /* the case */
    oc_buf *bufs[OC_BUFFERS_MAX];
    int n_bufs;

    /* report.c */
    bool open;     /* `now` is a check that has begun */
    oc_result now; /* ended by the next one */
    int n_checks, n_failed, op_checks, op_failed, op_cases;
    double worst; /* largest error over its bound, of the operation, and where */
    oc_result worst_result;
    char worst_case[160];
    double op_start_s, start_s;
    oc_list checks, times, summaries; /* JSON: what the report is put together from */
    const char *gpu;                  /* its name */
    int gpu_index;
    const char *model_dir; /* of a small checkpoint */
} oc_ctx;

/* ---- main.c: operations ---- */
void oc_linear(oc_ctx *oc);
void oc_weights(oc_ctx *oc);
void oc_rows(oc_ctx *oc); /* embed, rmsnorm, stream_mean, residual, swiglu */
void oc_hyper(oc_ctx *oc);
void oc_router(oc_ctx *oc);
void oc_kda(oc_ctx *oc);
void oc_store(oc_ctx *oc);
void oc_select(oc_ctx *oc);
void oc_attend(oc_ctx *oc);
void oc_experts(oc_ctx *oc);
void oc_graphs(oc_ctx *oc);
void oc_gather(oc_ctx *oc);
void oc_hang(oc_ctx *oc);
void oc_model(oc_ctx *oc);
void oc_sample_math(oc_ctx *oc);
void oc_sample(oc_ctx *oc);
void oc_random(oc_ctx *oc);
void oc_bench(oc_ctx *oc);

/* ---- report.c ---- */

void oc_report_begin(oc_ctx *oc);
void oc_report_end(oc_ctx *oc, const char *fatal); /* fatal: why it ends early; NULL: it does not */
void oc_op_begin(oc_ctx *oc, const char *op);
void oc_op_end(oc_ctx *oc);
void oc_report_time(oc_ctx *oc, const char *name, int rows, double us, double gb_s, double of_copy, double tflops);

/* Names the case that follows; printf. False: it is another part's (--part), to be left out. */
bool oc_case(oc_ctx *oc, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Begins a check, which passes unless oc_fail() follows before the next one. oc_expect: begin and end in one. */
void oc_begin(oc_ctx *oc, const char *name);
void oc_measured(oc_ctx *oc, double error, double bound);
void oc_end(oc_ctx *oc);
void oc_fail(oc_ctx *oc, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void oc_expect(oc_ctx *oc, bool ok, const char *name);

/* The GPU is lost or full: nothing that follows could mean anything. Reports and ends the process with 1. */
_Noreturn void oc_give_up(oc_ctx *oc, const char *what, const td_error *err);

/* ---- harness.c ---- */

uint64_t oc_rand(oc_ctx *oc);
float oc_uniform(oc_ctx *oc); /* (-1, 1) */
int oc_below(oc_ctx *oc, int n);

/* n_bytes on both devices, poisoned; freed by oc_done(). */
oc_buf *oc_new(oc_ctx *oc, const char *name, size_t n_bytes);
void oc_poison(oc_ctx *oc, oc_buf *b);
void oc_push(oc_ctx *oc, oc_buf *b);        /* the CPU's content to the GPU */
void *oc_pull(oc_ctx *oc, const oc_buf *b); /* the GPU's content, malloced */
void oc_done(oc_ctx *oc);                   /* guards, then everything of the case is freed */

/* Random content on both: uniform in (-scale, scale) around mean; in a few values near zero or the maximum. */
oc_buf *oc_floats(oc_ctx *oc, const char *name, size_t n, float mean, float scale);
oc_buf *oc_acts(oc_ctx *oc, const char *name, size_t n, float scale);
oc_buf *oc_ints(oc_ctx *oc, const char *name, const int32_t *values, size_t n);
td_bf16 *oc_host_bf16(oc_ctx *oc, size_t n, float scale); /* malloced */

static inline void *oc_at(const oc_buf *b, int side)
{
    return b ? (side == OC_CPU ? b->cpu : b->gpu) : NULL;
}

/* A packed weight on both sides from host rows. */
typedef struct oc_weight {
    td_weight w[OC_SIDES];
} oc_weight;
oc_weight oc_pack(oc_ctx *oc, td_format format, int out, int in, const td_bf16 *rows);
oc_weight oc_random_weight(oc_ctx *oc, td_format format, int out, int in);

/* Runs; a status other than TD_OK is a failure. */
void oc_ran(oc_ctx *oc, td_status cpu, td_status gpu);

/* |gpu - cpu| / |cpu| over n values <= bound; NaN on one side fails. */
void oc_near_f32(oc_ctx *oc, const oc_buf *b, size_t n, double bound);
void oc_near_act(oc_ctx *oc, const oc_buf *b, size_t n, double bound);
void oc_near_values(oc_ctx *oc, const char *name, const float *got, const float *want, size_t n, double bound);
void oc_same(oc_ctx *oc, const oc_buf *b); /* equal bits on both devices */
void oc_bits(oc_ctx *oc, const char *what, const void *got, const void *want, size_t n_bytes);

/* A window over rows of several sequences, tables on both sides. */
typedef struct oc_window {
    td_window w[OC_SIDES];
    td_segment segments[TD_SEGMENTS_MAX];
} oc_window;
void oc_make_window(oc_ctx *oc, oc_window *window, const td_segment *segments, int n_segments);

#endif
