/* tandem bench: the front door of the measurements, and how all of them print. */
#include "cli/bench.h"

#include "cli/args.h"
#include "cli/cli.h"

#include <stdio.h>
#include <string.h>

static int help(FILE *out)
{
    fputs("usage: tandem bench serve URL [settings]   a running server: tokens a second, time to the first token\n"
          "       tandem bench ops [settings]         the block operations on this machine, one by one\n"
          "       tandem bench model [settings]       the whole forward pass on this machine, without a server\n"
          "       tandem bench full [settings]        the real model's size on this machine, without its checkpoint\n"
          "\n"
          "Each has --help and --json. Times are compared with ceilings of this machine (bytes copied, fp32\n"
          "multiply-adds) that are measured in the same run; docs/bench.md says how to read them.\n",
          out);
    return out == stdout ? TD_EXIT_OK : TD_EXIT_ARGUMENTS;
}

int td_cli_bench(int argc, char **argv)
{
    if (argc < 2) return help(stderr);
    if (strcmp(argv[1], "serve") == 0) return td_bench_serve(argc - 1, argv + 1);
    if (strcmp(argv[1], "ops") == 0) return td_bench_ops(argc - 1, argv + 1);
    if (strcmp(argv[1], "model") == 0) return td_bench_model(argc - 1, argv + 1);
    if (strcmp(argv[1], "full") == 0) return td_bench_full(argc - 1, argv + 1);
    if (td_args_help(argc, argv)) return help(stdout);
    fprintf(stderr, "tandem bench: '%s' is not one of serve, ops, model, full\n", argv[1]);
    return TD_EXIT_ARGUMENTS;
}

int td_bench_fail(const char *command, td_status status, const td_error *err)
{
    fprintf(stderr, "tandem bench %s: %s\n", command, err->text);
    if (status == TD_ENOMEM) return TD_EXIT_MEMORY;
    return status == TD_EINVAL ? TD_EXIT_ARGUMENTS : TD_EXIT_FAILED;
}

double td_ratio_decode(const td_ratios *r, const td_ceilings *c)
{
    return r->decode_step_s > 0 ? r->active_bytes * r->ranks_here / c->copy_bytes_per_s / r->decode_step_s : 0;
}

double td_ratio_prompt(const td_ratios *r, const td_ceilings *c)
{
    return r->prompt_s > 0 ? r->prompt_flops * r->ranks_here / c->fma_flops_per_s / r->prompt_s : 0;
}

void td_bench_print_machine(void)
{
    char machine[TD_MACHINE_CAP];
    td_machine_line(machine, sizeof machine);
    printf("machine: %s\n", machine);
}

void td_bench_print_ceilings(const td_ceilings *c)
{
    printf("ceilings, %d thread%s: copy %.2f GB/s (read and written), reading alone %.2f GB/s, fp32 multiply-add %.1f "
           "GFLOP/s\n",
           c->n_threads, c->n_threads == 1 ? "" : "s", c->copy_bytes_per_s * 1e-9, c->read_bytes_per_s * 1e-9,
           c->fma_flops_per_s * 1e-9);
}

void td_bench_print_ratios(const td_ratios *r, const td_ceilings *c)
{
    printf("one rank of %d, %d on this machine\n", r->world, r->ranks_here);
    if (r->decode_step_s > 0)
        printf("  decode   %6.1f %% of the copy rate: %.2f MiB of weights a token in %.3f ms\n",
               100 * td_ratio_decode(r, c), r->active_bytes * 0x1p-20, r->decode_step_s * 1e3);
    if (r->prompt_s > 0)
        printf("  prompt   %6.1f %% of the multiply rate: %.2f GFLOP for %lld tokens in %.3f s\n",
               100 * td_ratio_prompt(r, c), r->prompt_flops * 1e-9, (long long)r->prompt_tokens, r->prompt_s);
}

void td_bench_write_machine(td_json_writer *w)
{
    char machine[TD_MACHINE_CAP];
    td_machine_line(machine, sizeof machine);
    td_json_write_member_text(w, "machine", machine);
    td_json_write_member_text(w, "version", TD_VERSION);
}

void td_bench_write_number(td_json_writer *w, const char *name, double x)
{
    td_json_write_key(w, name);
    td_json_write_double(w, x);
}

void td_bench_write_ceilings(td_json_writer *w, const td_ceilings *c)
{
    td_json_write_key(w, "ceilings");
    td_json_write_begin(w, '{');
    td_json_write_member_int(w, "threads", c->n_threads);
    td_bench_write_number(w, "copy_bytes_per_s", c->copy_bytes_per_s);
    td_bench_write_number(w, "read_bytes_per_s", c->read_bytes_per_s);
    td_bench_write_number(w, "fma_flops_per_s", c->fma_flops_per_s);
    td_json_write_end(w, '}');
}

void td_bench_write_ratios(td_json_writer *w, const td_ratios *r, const td_ceilings *c)
{
    td_json_write_key(w, "ratios");
    td_json_write_begin(w, '{');
    td_json_write_member_int(w, "world", r->world);
    td_json_write_member_int(w, "ranks_here", r->ranks_here);
    td_bench_write_number(w, "active_bytes", r->active_bytes);
    td_bench_write_number(w, "decode_step_s", r->decode_step_s);
    td_bench_write_number(w, "decode", td_ratio_decode(r, c));
    td_json_write_member_int(w, "prompt_tokens", r->prompt_tokens);
    td_bench_write_number(w, "prompt_flops", r->prompt_flops);
    td_bench_write_number(w, "prompt_s", r->prompt_s);
    td_bench_write_number(w, "prompt", td_ratio_prompt(r, c));
    td_json_write_end(w, '}');
}

void td_bench_write_stat(td_json_writer *w, const char *name, const td_stat *stat)
{
    td_json_write_key(w, name);
    td_json_write_begin(w, '{');
    td_bench_write_number(w, "median", stat->median);
    td_bench_write_number(w, "low", stat->low);
    td_bench_write_number(w, "high", stat->high);
    td_json_write_end(w, '}');
}
