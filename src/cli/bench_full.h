/* Inside of `tandem bench full`: what its files share. bench_full.c settings and verdicts, bench_full_rig.c the model,
 * bench_full_case.c one measurement, bench_full_show.c and bench_full_plot.c what is printed and drawn. */
#ifndef TD_CLI_BENCH_FULL_H
#define TD_CLI_BENCH_FULL_H

#include "cli/bench.h"
#include "cli/full_size.h"
#include "cli/op_timer.h"

#include <stdio.h>

TD_BEGIN_C

enum {
    TD_FULL_SLOTS = 4,    /* sequences that share a window */
    TD_FULL_LIST_MAX = 8, /* rows, contexts, prompt positions */
    TD_FULL_CASES_MAX = TD_FULL_LIST_MAX * TD_FULL_LIST_MAX + TD_FULL_LIST_MAX,
    TD_FULL_TARGETS_MAX = 8,
    TD_FULL_NAME_CAP = 128
};

typedef struct td_full_options {
    td_full_shape shape;
    int layers, world;
    const char *backend; /* "auto", "cpu", "cuda" */
    int gpu, n_threads;
    int64_t exchange_ns;
    int64_t pool_tokens; /* 0: what the contexts of all slots need, or what fits */
    int chunk_rows;
    td_format dense;
    double expert_bytes_per_s; /* 0: the copy rate; < 0: by the device */
    int decode_runs, prompt_runs;
    int64_t rows[TD_FULL_LIST_MAX], contexts[TD_FULL_LIST_MAX], prompts[TD_FULL_LIST_MAX];
    int n_rows, n_contexts, n_prompts;
    bool json;
    const char *svg; /* "": none */
} td_full_options;

/* What the device can do at best, in bytes and operations a second. */
typedef struct td_full_ceilings {
    double copy_bytes_per_s;
    double expert_bytes_per_s; /* the rate at which bytes of experts are counted */
    double multiply_flops_per_s;
} td_full_ceilings;

typedef struct td_full_rig {
    td_config config;
    td_model_options model_options;
    td_backend backend;
    int capability;                /* of the GPU, 90; 0: CPU */
    char device[TD_FULL_NAME_CAP]; /* "NVIDIA H200, ..." or the machine */
    td_checkpoint *checkpoint;
    td_dev *dev;
    td_ops ops; /* timed ones over the device's */
    td_op_timer timer;
    td_marks *marks;
    td_link *link;
    td_model *model;
    td_model_plan plan;
    size_t device_bytes, free_bytes; /* the device's own scratch; what there was before anything was taken */
    uint64_t load_bytes;
    double load_s;
    int32_t *ids, *blocks; /* [a window's rows], [a slot's blocks] */
    td_full_ceilings ceilings;
} td_full_rig;

/* One window: decode rows of up to four sequences, or a prompt's chunk. */
typedef struct td_full_case {
    bool prompt;
    int n_rows;
    int64_t context; /* tokens before it, as asked for */
    int32_t pos;     /* and as it is: the last windows of the longest context begin a little earlier */
    td_stat s;       /* a forward, by the host's clock */
    double link_s;   /* the part of it that is the set time of exchanges */
    double bytes, expert_bytes, flops, experts_a_layer;
    double floor_s, ratio; /* (s - link_s) / floor_s */
    td_op_entry ops[TD_OP_ENTRIES_MAX];
    int n_ops;
} td_full_case;

/* A claim of what is fast enough. */
typedef struct td_full_target {
    const char *what, *unit;
    double wanted, measured;
    bool at_least, met;
} td_full_target;

typedef struct td_full_result {
    td_full_case cases[TD_FULL_CASES_MAX];
    int n_cases;
    td_full_target targets[TD_FULL_TARGETS_MAX];
    int n_targets;
} td_full_result;

/* bench_full_rig.c. Plans, refuses what does not fit (TD_ENOMEM, with what would), makes the model; progress to stderr.
 * On failure everything is released. */
td_status td_full_rig_open(const td_full_options *options, td_full_rig *rig, td_error *err);
void td_full_rig_close(td_full_rig *rig);

/* bench_full_case.c. *fits false: the context is longer than model or pool, nothing was measured. c->prompt, n_rows and
 * context are the caller's. */
td_status td_full_case_run(td_full_rig *rig, const td_full_options *options, td_full_case *c, bool *fits,
                           td_error *err);

/* bench_full_show.c, to stdout */
void td_full_print(const td_full_options *options, const td_full_rig *rig, const td_full_result *result);
void td_full_print_json(const td_full_options *options, const td_full_rig *rig, const td_full_result *result);
/* "4k", "1M" */
const char *td_full_tokens(int64_t n, char *text, size_t cap_bytes);

/* bench_full_plot.c. Opened before anything is measured: minutes must not end in a folder that is not there. path "":
 * *out is NULL. */
td_status td_full_plot_open(const char *path, FILE **out, td_error *err);
td_status td_full_plot(FILE *file, const td_full_rig *rig, const td_full_result *result, td_error *err);

TD_END_C
#endif
