/* tandem bench: what the commands under it share. docs/bench.md says what the numbers mean. */
#ifndef TD_CLI_BENCH_H
#define TD_CLI_BENCH_H

#include "base/json_write.h"
#include "cli/ceilings.h"
#include "cli/cli.h"
#include "cli/stats.h"

TD_BEGIN_C

enum { TD_BENCH_RUNS_MAX = 100, TD_MACHINE_CAP = 512 };

/* argv[0] is "serve", "ops", "model", "full"; the return value is the process's exit code. */
int td_bench_serve(int argc, char **argv);
int td_bench_ops(int argc, char **argv);
int td_bench_model(int argc, char **argv);
int td_bench_full(int argc, char **argv);

/* The two ratios of docs/bench.md, and how they are reached. */
typedef struct td_ratios {
    double active_bytes, decode_step_s; /* weights one token reads of a rank; time between two tokens */
    double prompt_flops, prompt_s;      /* operations of a rank for a prompt; its time */
    int64_t prompt_tokens;
    int world;      /* ranks of the pair */
    int ranks_here; /* ranks that share this machine: each has its part of the ceilings */
} td_ratios;

double td_ratio_decode(const td_ratios *r, const td_ceilings *c);
double td_ratio_prompt(const td_ratios *r, const td_ceilings *c);

void td_bench_print_machine(void); /* "machine: ..." */
void td_bench_print_ceilings(const td_ceilings *c);
void td_bench_print_ratios(const td_ratios *r, const td_ceilings *c);

/* Members of the object that is open. */
void td_bench_write_machine(td_json_writer *w);
void td_bench_write_ceilings(td_json_writer *w, const td_ceilings *c);
void td_bench_write_ratios(td_json_writer *w, const td_ratios *r, const td_ceilings *c);
void td_bench_write_stat(td_json_writer *w, const char *name, const td_stat *stat);
void td_bench_write_number(td_json_writer *w, const char *name, double x);

/* "tandem bench serve: text" to stderr; the exit code that goes with the status. */
int td_bench_fail(const char *command, td_status status, const td_error *err);

TD_END_C
#endif
