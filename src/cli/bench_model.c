/* tandem bench model: the whole forward pass in this process, one rank, no server and no sampling: what the model costs
 * by itself, against what this machine could do. */
#include "base/clock.h"
#include "cli/args.h"
#include "cli/bench.h"
#include "cli/bench_rig.h"
#include "cli/cli.h"
#include "cli/cost.h"

#include <stdio.h>

enum { SETTLE_ROWS = 64, STEPS_MAX = 4096 };

static const td_setting SETTINGS[] = {
    { .name = "model",
      .kind = TD_SETTING_TEXT,
      .fallback = "models/demo",
      .min = 1,
      .value = "DIR",
      .help = "checkpoint to load" },
    { .name = "dense",
      .kind = TD_SETTING_CHOICE,
      .fallback = "bf16",
      .choices = "bf16|q4|fp8",
      .value = "FORMAT",
      .help = "dense weights in memory" },
    { .name = "prompt",
      .kind = TD_SETTING_INT,
      .fallback = "4096",
      .min = 1,
      .max = 262144,
      .value = "TOKENS",
      .help = "length of the prompt that is timed" },
    { .name = "tokens",
      .kind = TD_SETTING_INT,
      .fallback = "128",
      .min = 1,
      .max = STEPS_MAX,
      .value = "N",
      .help = "decode steps a run" },
    { .name = "chunk-rows",
      .kind = TD_SETTING_INT,
      .fallback = "512",
      .min = 64,
      .max = 8192,
      .value = "ROWS",
      .help = "rows of a prompt window" },
    { .name = "threads",
      .kind = TD_SETTING_INT,
      .fallback = "0",
      .min = 0,
      .max = 256,
      .value = "N",
      .help = "0: all cores" },
    { .name = "runs",
      .kind = TD_SETTING_INT,
      .fallback = "3",
      .min = 1,
      .max = TD_BENCH_RUNS_MAX,
      .value = "N",
      .help = "the median is reported" },
    { .name = "json", .kind = TD_SETTING_FLAG, .help = "one JSON object instead of the table" },
};
enum { N_SETTINGS = sizeof SETTINGS / sizeof *SETTINGS };

typedef struct measured {
    td_ceilings ceilings;
    td_ratios ratios;
    td_stat step_s, prompt_s;
} measured;

static double seconds_since(int64_t start_ns)
{
    return (double)(td_now_ns() - start_ns) * 1e-9;
}

/* Seconds a step, after a short prompt. */
static td_status time_steps(td_rig *rig, int n_steps, double *out, td_error *err)
{
    td_rig_restart(rig);
    td_status status = td_rig_prompt(rig, SETTLE_ROWS, err);
    int64_t start = td_now_ns();
    for (int i = 0; !status && i < n_steps; i++) {
        status = td_rig_forward(rig, 1, false, err);
        if (!status) status = td_rig_commit(rig, 1, err);
    }
    *out = seconds_since(start) / n_steps;
    return status;
}

static td_status time_prompt(td_rig *rig, int n_tokens, double *out, td_error *err)
{
    td_rig_restart(rig);
    int64_t start = td_now_ns();
    td_status status = td_rig_prompt(rig, n_tokens, err);
    *out = seconds_since(start);
    return status;
}

static td_status measure(const td_settings *s, measured *m, td_error *err)
{
    td_rig rig;
    double step_s[TD_BENCH_RUNS_MAX], prompt_s[TD_BENCH_RUNS_MAX];
    int n_prompt = (int)td_settings_int(s, "prompt"), n_steps = (int)td_settings_int(s, "tokens");
    int n_runs = (int)td_settings_int(s, "runs"), n_threads = (int)td_settings_int(s, "threads");
    int64_t longest = n_prompt > SETTLE_ROWS + n_steps ? n_prompt : SETTLE_ROWS + n_steps;
    td_status status = td_ceilings_measure(n_threads, &m->ceilings, err);
    if (status) return status;
    status = td_rig_open(td_settings_text(s, "model"), n_threads, longest, (int)td_settings_int(s, "chunk-rows"),
                         td_settings_text(s, "dense"), &rig, err);
    if (status) return status;
    double warm;
    status = time_steps(&rig, 1, &warm, err); /* threads and pages come into being here */
    for (int i = 0; !status && i < n_runs; i++) {
        status = time_steps(&rig, n_steps, &step_s[i], err);
        if (!status) status = time_prompt(&rig, n_prompt, &prompt_s[i], err);
    }
    td_ceilings after;
    if (!status) status = td_ceilings_measure(n_threads, &after, err);
    if (!status) {
        td_ceilings_raise(&m->ceilings, &after);
        const td_config *config = td_checkpoint_config(rig.checkpoint);
        m->step_s = td_stat_of(step_s, n_runs);
        m->prompt_s = td_stat_of(prompt_s, n_runs);
        m->ratios = (td_ratios){ .active_bytes = td_cost_active_bytes(config, &rig.plan),
                                 .decode_step_s = m->step_s.median,
                                 .prompt_flops = td_cost_prompt_flops(config, 1, n_prompt),
                                 .prompt_s = m->prompt_s.median,
                                 .prompt_tokens = n_prompt,
                                 .world = 1,
                                 .ranks_here = 1 };
    }
    td_rig_close(&rig);
    return status;
}

static void print_table(const measured *m)
{
    td_bench_print_machine();
    td_bench_print_ceilings(&m->ceilings);
    printf("decode step %9.3f ms +- %4.1f %%   %8.1f tokens/s\n", m->step_s.median * 1e3,
           100 * td_stat_spread(&m->step_s), 1 / m->step_s.median);
    printf("prompt      %9.1f ms +- %4.1f %%   %8.1f tokens/s\n", m->prompt_s.median * 1e3,
           100 * td_stat_spread(&m->prompt_s), (double)m->ratios.prompt_tokens / m->prompt_s.median);
    td_bench_print_ratios(&m->ratios, &m->ceilings);
}

static void print_json(const measured *m)
{
    td_buf out;
    td_buf_init(&out, 0);
    td_json_writer w = { .out = &out };
    td_json_write_begin(&w, '{');
    td_bench_write_machine(&w);
    td_bench_write_ceilings(&w, &m->ceilings);
    td_bench_write_stat(&w, "decode_step_s", &m->step_s);
    td_bench_write_stat(&w, "prompt_s", &m->prompt_s);
    td_bench_write_ratios(&w, &m->ratios, &m->ceilings);
    td_json_write_end(&w, '}');
    printf("%s\n", out.data ? out.data : "{}");
    td_buf_deinit(&out);
}

int td_bench_model(int argc, char **argv)
{
    td_settings settings;
    measured m;
    td_error err;
    if (td_args_help(argc, argv)) {
        printf(
            "usage: tandem bench model [settings]\n\n"
            "Runs the model in this process: decode steps and a prompt, and how near they come to reading the weights\n"
            "at this machine's copy rate and to its rate of fp32 multiply-adds.\n\n");
        td_settings_help(SETTINGS, N_SETTINGS);
        return TD_EXIT_OK;
    }
    td_status status = td_settings_parse(SETTINGS, N_SETTINGS, argc, argv, &settings, &err);
    if (!status) status = measure(&settings, &m, &err);
    if (status) return td_bench_fail("model", status, &err);
    if (td_settings_flag(&settings, "json"))
        print_json(&m);
    else
        print_table(&m);
    return TD_EXIT_OK;
}
